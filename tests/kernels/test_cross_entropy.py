"""Output head and loss against the truth. Triton runs on CUDA, and on the CPU under TRITON_INTERPRET=1."""

import os
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaspec_kernels import catalog
from megaspec_kernels.cross_entropy.reference import PLAIN_LOGITS, LogitForm, VocabShard
from megaspec_kernels.gate import check, in_dtype, results
from megaspec_kernels.registry import REGISTRY

IMPLEMENTATIONS = sorted(REGISTRY["cross_entropy"])


@dataclass(frozen=True)
class Shape:
    """M tokens, D features, V tokens of the vocabulary, P rows of padding after them."""

    M: int
    D: int
    V: int
    P: int = 0
    strided: bool = False
    size: float = 1.0
    """Factor on the logits."""
    masked: str = "some"

    def __str__(self) -> str:
        extra = f"-{self.masked}" + ("-strided" if self.strided else "") + (f"-x{self.size:g}" if self.size > 1 else "")
        return f"{self.M}x{self.D}x{self.V}+{self.P}{extra}"


SHAPES = [
    Shape(1, 8, 1, masked="none"),
    Shape(1, 16, 63, 1, masked="none"),
    Shape(63, 16, 1, 7),
    Shape(63, 32, 1000, 24),
    Shape(63, 32, 67, strided=True),
    Shape(63, 32, 1000, size=30),
    Shape(63, 8, 63, 1, masked="all"),
    Shape(1000, 24, 63, 65),
]
DTYPES = {
    "reference": [torch.float64, torch.float32, torch.bfloat16],
    "chunked": [torch.float64, torch.float32, torch.bfloat16],
    "triton": [torch.float32, torch.bfloat16],
}
CASES = [(name, dtype) for name in IMPLEMENTATIONS for dtype in DTYPES[name]]


@pytest.fixture(autouse=True)
def _triton_can_run(request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name == "triton":
        on_cuda = "cuda" in request.node.callspec.id
        if not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton runs on the CPU under TRITON_INTERPRET=1 only: see test_triton_interpreted.py")


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    labels: Tensor,
    weights: Tensor,
    valid: int,
    form: LogitForm = PLAIN_LOGITS,
) -> Tensor:
    """torch's own cross-entropy over the logits of the valid columns, in at least fp32."""
    product = F.linear(x, weight[:valid], None if bias is None else bias[:valid])
    logits = product.to(torch.promote_types(x.dtype, torch.float32)) * form.scale
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    return (F.cross_entropy(logits, labels, reduction="none") * weights.to(logits.dtype)).sum()


def run(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    labels: Tensor,
    weights: Tensor,
    shard: VocabShard,
    form: LogitForm = PLAIN_LOGITS,
) -> Tensor:
    wide = weights.to(torch.promote_types(x.dtype, torch.float32))
    return REGISTRY["cross_entropy"][name](x, weight, labels, wide, shard, bias_V=bias, form=form)


def make(shape: Shape, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs with gradients, in values that bf16 holds exactly, and the others."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(shape.M, shape.D, generator=draw) * shape.size
    weight = torch.randn(shape.V + shape.P, shape.D, generator=draw)  # padding rows hold numbers: they must not count
    labels = torch.randint(0, shape.V, (shape.M,), generator=draw)
    weights = torch.rand(shape.M, generator=draw).double() / shape.M
    if shape.masked == "some":
        weights[torch.rand(shape.M, generator=draw) < 0.4] = 0
    if shape.masked == "all":
        weights[:] = 0
    inputs = {"x": x.bfloat16().double().to(device), "weight": weight.bfloat16().double().to(device)}
    if shape.strided:
        inputs = {"x": inputs["x"].t().contiguous().t(), "weight": inputs["weight"].t().contiguous().t()}
    return inputs, {"labels": labels.to(device), "weights": weights.float().double().to(device)}


def gate(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    inputs, others = make(shape, device)
    grad = torch.tensor(0.37, dtype=torch.float32).double().to(device)
    mine = in_dtype(inputs, dtype)
    check(
        results(partial(run, name, **others, shard=VocabShard(0, shape.V)), mine, grad),
        results(partial(plain, **others, valid=shape.V), mine, grad),
        results(partial(plain, **others, valid=shape.V), inputs, grad),
    )


# Around a logit's size, far below it, and a scale alone; 0.3 has no exact form.
FORMS = [LogitForm(scale=0.3), LogitForm(cap=5.0), LogitForm(scale=2.0, cap=0.5)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_gate_of_shaped_logits(name: str, dtype: torch.dtype, form: LogitForm, device: torch.device) -> None:
    """With a bias beside the table, whose padding holds numbers too."""
    shape = Shape(63, 32, 67, 5)
    inputs, others = make(shape, device)
    drawn = torch.randn(shape.V + shape.P, generator=torch.Generator().manual_seed(6))
    inputs["bias"] = drawn.bfloat16().double().to(device)
    grad = torch.tensor(0.37, dtype=torch.float32).double().to(device)
    mine = in_dtype(inputs, dtype)
    check(
        results(partial(run, name, **others, shard=VocabShard(0, shape.V), form=form), mine, grad),
        results(partial(plain, **others, valid=shape.V, form=form), mine, grad),
        results(partial(plain, **others, valid=shape.V, form=form), inputs, grad),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_gate(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    gate(name, shape, dtype, device)


@pytest.mark.parametrize(("name", "dtype"), [c for c in CASES if c[0] != "reference"], ids=str)
def test_gate_in_pieces(name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(63, 32, 67, 5)
    bytes_a_row = 72 * torch.finfo(dtype).bits // 8
    monkeypatch.setattr(catalog, "LOGITS_BYTES", 15 * bytes_a_row)  # 4 pieces of 13 tokens and one of 11
    gate(name, shape, dtype, device)


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_without_gradients_the_loss_is_one_product(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """As a model is evaluated, whose weights are parameters: nothing of their gradients is computed."""
    shape = Shape(63, 32, 67, 5)
    inputs, others = make(shape, device)
    mine = in_dtype(inputs, dtype)
    leaves = {"x": mine["x"], "weight": mine["weight"].requires_grad_()}
    with_gradients = run(name, **leaves, **others, shard=VocabShard(0, shape.V))
    with torch.no_grad(), _Products() as products:
        loss = run(name, **leaves, **others, shard=VocabShard(0, shape.V))
    assert torch.equal(loss, with_gradients)
    assert products.count == 1


@pytest.mark.parametrize("cuts", [(0, 40, 67), (0, 67, 67), (0, 1, 67), (0, 24, 48, 67)], ids=str)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_shards_add_up(name: str, dtype: torch.dtype, cuts: tuple[int, ...], device: torch.device) -> None:
    """Each shard is told what the others would send; the second of (0, 67, 67) holds padding alone."""
    shape, pad = Shape(63, 32, 67), 8
    inputs, others = make(shape, device)
    grad = torch.tensor(0.37, dtype=torch.float32).double().to(device)
    truth = results(partial(plain, **others, valid=shape.V), inputs, grad)
    mine = in_dtype(inputs, dtype)
    plain_results = results(partial(plain, **others, valid=shape.V), mine, grad)
    logits = (mine["x"] @ mine["weight"].t()).double()
    labels = others["labels"]
    top = logits.amax(1)
    found = []
    for first, end in pairwise(cuts):
        rest = torch.ones(shape.V, dtype=torch.bool, device=device)
        rest[first:end] = False
        sent = iter(
            [
                (logits - top[:, None]).exp()[:, rest].sum(1),
                torch.where(rest[labels], logits.gather(1, labels[:, None])[:, 0], 0),
            ]
        )
        shard = VocabShard(
            first,
            end - first,
            sum=lambda x, sent=sent: x + next(sent).to(x.dtype),
            max=lambda x: torch.maximum(x, top.to(x.dtype)),
        )
        rows = mine["weight"].new_full((end - first + pad, shape.D), 3.0)
        rows[: end - first] = mine["weight"][first:end]
        here = results(partial(run, name, **others, shard=shard), {"x": mine["x"], "weight": rows}, grad)
        assert (here["weight"][end - first :] == 0).all(), "padding rows got a gradient"
        found.append({**here, "weight": here["weight"][: end - first]})
    check(
        {
            "out": found[-1]["out"],
            "x": torch.stack([f["x"].double() for f in found]).sum(0).to(dtype),
            "weight": torch.cat([f["weight"] for f in found]),
        },
        plain_results,
        truth,
    )


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_gradcheck(name: str) -> None:
    inputs, others = make(Shape(5, 4, 7, 2), torch.device("cpu"))
    leaves = tuple(x.requires_grad_() for x in inputs.values())
    shard = VocabShard(0, 7)
    assert torch.autograd.gradcheck(lambda x, w: run(name, x, w, **others, shard=shard), leaves, eps=1e-6, atol=1e-7)
