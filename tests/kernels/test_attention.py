"""Core attention against the truth."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from megaspec_kernels.registry import REGISTRY
from tests.kernels.gate import check, in_dtype, results

IMPLEMENTATIONS = sorted(REGISTRY["attention"])


@dataclass(frozen=True)
class Shape:
    """B sequences, T tokens, N query heads, K key and value heads, H head size."""

    B: int
    T: int
    N: int
    K: int
    H: int
    documents: bool = False
    strided: bool = False

    def __str__(self) -> str:
        extra = ("-docs" if self.documents else "") + ("-strided" if self.strided else "")
        return f"{self.B}x{self.T}x{self.N}k{self.K}x{self.H}{extra}"


SHAPES = [
    Shape(1, 1, 1, 1, 8),
    Shape(3, 1, 4, 2, 16, documents=True),
    Shape(2, 63, 4, 4, 64),
    Shape(2, 63, 6, 2, 16, documents=True),
    Shape(2, 63, 4, 1, 32, strided=True),
    Shape(1, 1000, 2, 1, 64),
    Shape(1, 1000, 2, 2, 16, documents=True, strided=True),
]


def plain(q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None) -> Tensor:
    """One query at a time in words: the weighted mean of the values at and before it, within its document."""
    B, T, N, H = q.shape
    outs = []
    for n in range(N):
        kn, vn = k[:, :, n // (N // k.shape[2])], v[:, :, n // (N // k.shape[2])]
        scores = (q[:, :, n] @ kn.transpose(1, 2)) / H**0.5
        place = torch.arange(T, device=q.device)
        seen = (place[:, None] >= place[None, :]).expand(B, T, T)
        if documents is not None:
            seen = seen & (documents.unsqueeze(2) == documents.unsqueeze(1))
        outs.append(torch.softmax(torch.where(seen, scores, float("-inf")), dim=2) @ vn)
    return torch.stack(outs, dim=2)


def make(shape: Shape, device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Inputs and the output's gradient in values that bf16 holds exactly, and document numbers."""
    draw = torch.Generator().manual_seed(3)

    def tensor(heads: int) -> Tensor:
        if shape.strided:  # what a split of one wide projection hands over, heads before tokens
            wide = torch.randn(shape.B, heads, shape.T, 2 * shape.H, generator=draw)
            return wide.bfloat16().double().to(device)[..., ::2].transpose(1, 2)
        return torch.randn(shape.B, shape.T, heads, shape.H, generator=draw).bfloat16().double().to(device)

    inputs = {"q": tensor(shape.N), "k": tensor(shape.K), "v": tensor(shape.K)}
    grad = tensor(shape.N)
    documents = None
    if shape.documents:
        documents = (torch.rand(shape.B, shape.T, generator=draw) < 0.1).cumsum(1, dtype=torch.int32).to(device)
    return inputs, grad, documents


def run(name: str):
    kernel = REGISTRY["attention"][name]
    return lambda q, k, v, documents: kernel(q, k, v, documents=documents, drop=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gate(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    if name == "reference" and dtype != torch.float64:
        pytest.skip("the reference is what others are measured by in this dtype; fp64 holds it to the words below")
    inputs, grad, documents = make(shape, device)
    truth = results(partial(plain, documents=documents), inputs, grad)
    if shape.T == 1:  # one key: its weight is 1 whatever q and k are
        for key in ("q", "k"):
            assert truth[key].abs().max() == 0
    mine = in_dtype(inputs, dtype)
    check(
        results(partial(run(name), documents=documents), mine, grad),
        results(partial(plain, documents=documents), mine, grad),
        truth,
    )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gradcheck(name: str) -> None:
    inputs, _, documents = make(Shape(2, 5, 4, 2, 8, documents=True), torch.device("cpu"))
    leaves = tuple(x.requires_grad_() for x in inputs.values())
    assert torch.autograd.gradcheck(lambda q, k, v: run(name)(q, k, v, documents), leaves, eps=1e-6, atol=1e-7)


def test_weights_are_dropped_before_they_meet_the_values() -> None:
    inputs, _, _ = make(Shape(1, 7, 2, 2, 8), torch.device("cpu"))
    seen = []

    def drop(weights: Tensor) -> Tensor:
        seen.append(weights)
        return weights * 0.5

    half = REGISTRY["attention"]["reference"](*inputs.values(), documents=None, drop=drop)
    full = REGISTRY["attention"]["reference"](*inputs.values(), documents=None, drop=None)
    assert torch.equal(half, full * 0.5)
    assert seen[0].shape == (1, 2, 7, 7)
    assert torch.allclose(seen[0].sum(-1), torch.ones(1, 2, 7, dtype=torch.float64))
    with pytest.raises(AssertionError, match="no attention dropout"):
        REGISTRY["attention"]["sdpa"](*inputs.values(), documents=None, drop=drop)
