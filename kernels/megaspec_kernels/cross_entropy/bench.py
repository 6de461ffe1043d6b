"""Output head and loss."""

# M tokens, D model, V tokens of the vocabulary

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, random, training_dtype
from megaspec_kernels.cross_entropy.reference import VocabShard
from megaspec_kernels.gate import in_dtype, results
from megaspec_kernels.registry import REGISTRY


def _function(name: str, M: int, V: int, device: torch.device) -> Callable[..., Tensor]:
    """The mean loss over tokens of which every third has none."""
    draw = torch.Generator().manual_seed(7)
    labels = torch.randint(0, V, (M,), generator=draw).to(device)
    weights = (torch.arange(M, device=device) % 3 != 1).double() / M
    kernel = REGISTRY["cross_entropy"][name]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return kernel(x, weight, labels, weights.to(wide), VocabShard(0, V))

    return loss


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Odd vocabularies, padding columns that hold numbers, one token."""
    dtype = training_dtype(device)
    for M, D, V, padding in ((1, 8, 3, 0), (63, 32, 67, 5), (130, 64, 1000, 24)):
        inputs = {
            "x": random(M, D, seed=1, device=device),
            "weight": random(V + padding, D, seed=2, device=device),
        }
        grad = torch.tensor(0.37, dtype=torch.float64, device=device)
        mine = in_dtype(inputs, dtype)
        plain = _function("reference", M, V, device)
        yield Held(
            f"{M} x {D} x {V}",
            results(_function(name, M, V, device), mine, grad),
            results(plain, mine, grad),
            results(plain, inputs, grad),
        )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """Loss and both gradients: three products."""
    M, D, V = (8192, 4096, 128256) if device.type == "cuda" else (512, 128, 2048)
    dtype = training_dtype(device)
    x = torch.randn(M, D, device=device).to(dtype).requires_grad_()
    weight = torch.randn(V, D, device=device).mul_(0.02).to(dtype).requires_grad_()
    function = _function(name, M, V, device)

    def call() -> None:
        torch.autograd.grad(function(x, weight), (x, weight))

    yield Work(f"{M} x {D} x {V}", call, 3 * 2 * M * D * V, "flops")


BENCH = Bench(held, works)
