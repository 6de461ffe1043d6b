"""Recomputation and offload on a GPU: the same to the bit, less memory, transfers beside the computation."""

from functools import partial
from typing import Any

import pytest
import torch

from megaspec.optim.offload import OffloadedOptimizer
from megaspec.optim.optimizer import build_optimizer
from megaspec.optim.spec import AdamWSpec
from megaspec.parallelism.offload import Offload
from megaspec.parallelism.saved import SavedTensors
from megaspec.runtime.build import build_model, materialise
from megaspec_kernels.registry import kernels_of
from tests.parallelism.test_recompute import spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

LAYERS, TOKENS, WIDTH = 8, 4096, 1024


def pass_through(layers: int, *, micro_batches: int = 1) -> dict[str, Any]:
    """Forward and backward through 8 layers of which the first `layers` are offloaded."""
    words = [f"model.n_layers={LAYERS}", f"model.d_model={WIDTH}", "model.n_heads=8", "model.d_head=128"]
    # fused attention sums its gradients in any order
    words += ["model.d_ffn=4096", f"model.max_seq_len={TOKENS}", "precision=bf16", "kernels.attention=reference"]
    spec = spec_of(*words, dropout=False)
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.bfloat16)
    materialise(model, device=torch.device("cuda"), dtype=torch.bfloat16)
    draw = torch.Generator("cuda").manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02, generator=draw)
    Offload(layers, SavedTensors(), device=torch.device("cuda", 0)).apply(model)
    tokens = torch.randint(0, 67, (1, TOKENS), device="cuda", generator=draw)
    peak = 0
    for _ in range(1 + micro_batches):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model.loss(tokens, tokens, torch.full(tokens.shape, 1 / TOKENS, device="cuda"))
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"gradients": gradients, "peak": peak}


def test_offloaded_layers_compute_the_same_in_less_memory() -> None:
    plain, half, every = (pass_through(n, micro_batches=3) for n in (0, LAYERS // 2, LAYERS))
    for found in (half, every):
        for name, gradient in plain["gradients"].items():
            assert torch.equal(gradient, found["gradients"][name]), name
    assert every["peak"] < half["peak"] < plain["peak"]
    assert half["peak"] < 0.75 * plain["peak"]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_updates_on_the_cpu_are_those_of_the_gpu(share: float) -> None:
    """Both kernels compute the same formula in fp32, in their own order."""
    draw = torch.Generator("cuda").manual_seed(5)
    start = {str(i): torch.randn(2048, 4096, generator=draw, device="cuda").bfloat16() for i in range(8)}
    both = [{name: w.clone() for name, w in start.items()} for _ in range(2)]
    spec = AdamWSpec(kind="adamw", lr=1e-2)
    plain, away = (
        build_optimizer(both[0], spec, adamw="torch"),
        OffloadedOptimizer(both[1], make=partial(build_optimizer, spec=spec), spec=spec, share=share, adamw="torch"),
    )
    for _ in range(3):
        gradients = {name: torch.randn(w.shape, generator=draw, device="cuda") for name, w in start.items()}
        scalars = {"divide_by": torch.tensor(2.0, device="cuda"), "skip": torch.tensor(0.0, device="cuda")}
        for optimizer in (plain, away):
            mine = {name: g.clone() for name, g in gradients.items()}
            optimizer.update(mine, lr=1e-2, weight_decay=0.1, **scalars)
    assert away.updates == 3
    for name, master in plain.masters.items():
        assert torch.allclose(master, away.masters[name].cuda(), rtol=1e-5, atol=1e-6), name
        assert torch.equal(both[1][name], away.masters[name].cuda().bfloat16()), name
