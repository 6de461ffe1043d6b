"""What a layer keeps of queries, keys and values, beside what autograd saves of stand-ins on a CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from megaspec.estimate.activations import kept_tensors
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.trained import facts_of
from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.layer.module import Layer
from megaspec.recipe import Recipe
from megaspec.runtime.build import DTYPES, build_model, materialise
from megaspec_kernels.attention import flex
from megaspec_kernels.attention.documents import Documents, documents_of
from megaspec_kernels.registry import kernels_of
from tests.kernels import cudnn_frontend, flex_by_blocks
from tests.kernels.te import fake_transformer_engine
from tests.plan.plans import LLAMA, plan

TOKENS = 128
HEADS = {"n_heads": 4, "n_kv_heads": 2, "d_head": 16, "d_model": 64, "d_ffn": 96}
WINDOW = {"attention": {"kind": "gqa", "mask": {"kind": "window", "size": 32}}}
# Bytes of a token: queries, keys and values, in bf16.
QUERIES, KEYS, VALUES = 2 * 4 * 16, 2 * 2 * 16, 2 * 2 * 16
PRODUCT = QUERIES + KEYS + VALUES


@pytest.fixture(params=["cudnn", "te"])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Computes on the CPU in the place of a package."""
    if request.param == "cudnn":
        cudnn_frontend.put_in_place(monkeypatch)
    else:
        fake_transformer_engine(monkeypatch)
    return request.param


def recipe_of(attention: str, *, documents: bool, window: bool = False, **changes: object) -> Recipe:
    plain = {"kernels.compile": "none", "kernels.norm": "reference", "kernels.gated": "reference"}
    more = {"data.seq_len": TOKENS, "train.micro_batch": 2, "data.document_mask": documents}
    model = LLAMA | HEADS | {"n_layers": 1, "max_seq_len": TOKENS, **(WINDOW if window else {})}
    return plan(model, plain | more | {"kernels.attention": attention} | changes)


class Saved:
    """Bytes of what waits for the backward pass, but for a model's own tensors."""

    def __init__(self, own: Iterator[Tensor]):
        self.own = {x.untyped_storage().data_ptr() for x in own}
        self.storages: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # documents are of all layers
        if storage.data_ptr() not in self.own and tensor.is_floating_point():
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


def saved_by(recipe: Recipe, run: Callable[[Layer], Callable[[Tensor, SequenceContext], Tensor]]) -> int:
    """Bytes that the layer of a recipe keeps. `run` may compile it."""
    dtype = DTYPES[recipe.precision.kind]
    decoder = build_model(recipe.model, kernels_of(recipe.kernels), dtype=dtype)
    materialise(decoder, device=torch.device("cpu"), dtype=dtype)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.02)
    number = None
    if recipe.data.document_mask:
        number = documents_of(torch.arange(TOKENS).div(40, rounding_mode="floor").to(torch.int32).expand(2, -1))
    context = context_of(decoder, number)
    tables = (a for table in context.angles for a in table)
    saved = Saved([*decoder.parameters(), *tables])
    x = torch.randn(2, TOKENS, 64, dtype=dtype, requires_grad=True)
    forward = run(decoder.layers["0"])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept):
        out = forward(x, context)
    out.sum().backward()
    assert x.grad.isfinite().all()
    return saved.bytes


def context_of(decoder: torch.nn.Module, documents: Documents | None) -> SequenceContext:
    return decoder.context(torch.arange(TOKENS), length=TOKENS, documents=documents)


def counted(recipe: Recipe) -> dict[str, int]:
    """Bytes by name of the kept tensor, of the plan."""
    return {one.what: one.size for one in kept_tensors(layer_run(recipe), facts_of(recipe).layers[0])}


@pytest.mark.parametrize(("documents", "window"), [(True, False), (False, True)], ids=["documents", "window"])
def test_values_are_copied_and_their_product_is_not_kept(stand_in: str, documents: bool, window: bool) -> None:
    recipe = recipe_of(stand_in, documents=documents, window=window)
    found = counted(recipe)
    assert "qkv" not in found
    assert (found["q"], found["k"], found["v"]) == tuple(2 * TOKENS * size for size in (QUERIES, KEYS, VALUES))
    assert saved_by(recipe, lambda layer: layer) == pytest.approx(sum(found.values()), rel=0.01)
    # through others they are views of the product, all of which stays
    other = counted(recipe_of("sdpa", documents=documents, window=window))
    assert sum(other.values()) - sum(found.values()) == 2 * TOKENS * (QUERIES + KEYS)


@pytest.mark.parametrize(("attention", "is_kept"), [("cudnn", True), ("te", False), ("sdpa", True), ("flex", True)])
def test_what_hides_nothing(attention: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cudnn and flex go through sdpa then."""
    if attention == "te":
        fake_transformer_engine(monkeypatch)
    recipe = recipe_of(attention, documents=False)
    found = counted(recipe)
    assert ("qkv" in found) == is_kept
    assert saved_by(recipe, lambda layer: layer) == pytest.approx(sum(found.values()), rel=0.01)


@pytest.fixture
def exact() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class KeepsAsFlex(torch.autograd.Function):
    """flex_attention that keeps what torch's does: what it was given, its output and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        out, aux = flex_by_blocks.flex_attention(q, k, v, **options)
        # torch's lies as its queries do
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, aux.lse)
        ctx.options = options
        return out, aux.lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            out, aux = flex_by_blocks.flex_attention(*leaves, **ctx.options)
        return *torch.autograd.grad((out, aux.lse), leaves, (grad_out, grad_lse)), None


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, AuxOutput]:
        # torch's keeps the log-sum-exp whether it is asked for or not
        out, lse = KeepsAsFlex.apply(q, k, v, options | {"return_aux": AuxRequest(lse=True)})
        return out, AuxOutput(lse=lse)

    monkeypatch.setattr(flex, "flex_attention", attend)


@pytest.mark.parametrize("sinks", [False, True])
def test_flex_in_one_order_keeps_of_all_layers_what_it_keeps_of_those_that_hide(
    sinks: bool, flex_on_cpu: None, exact: None
) -> None:
    changes = {"model.attention.kind": "gqa", "model.attention.sinks": sinks}
    deterministic = {"train.deterministic": True}
    recipe = recipe_of("flex", documents=False, **changes, **deterministic)
    found = counted(recipe)
    assert "qkv" not in found
    assert found == counted(recipe_of("flex", documents=True, **changes, **deterministic))
    assert ("o.without_sinks" in found) == sinks
    assert saved_by(recipe, lambda layer: layer) == pytest.approx(sum(found.values()), rel=0.01)
    # in any order, and through others in one, they are views of the product
    for other in (recipe_of("flex", documents=False, **changes), recipe_of("sdpa", documents=False, **deterministic)):
        assert "qkv" in counted(other)
        assert "o.without_sinks" not in counted(other)


def test_flex_keeps_its_output_without_the_sinks_too(flex_on_cpu: None) -> None:
    sinks = {"model.attention.kind": "gqa", "model.attention.sinks": True}
    recipe = recipe_of("flex", documents=True, **sinks)
    found = counted(recipe)
    # in bf16 as it was, in fp32 as it is scaled, and a number in fp32 for each head
    assert found["o.without_sinks"] == 2 * TOKENS * (QUERIES + 2 * QUERIES + 4 * HEADS["n_heads"])
    assert saved_by(recipe, lambda layer: layer) == pytest.approx(sum(found.values()), rel=0.01)
    compiled = recipe_of("flex", documents=True, **sinks, **{"kernels.compile": "block"})
    assert counted(compiled)["o.without_sinks"] == 2 * TOKENS * (QUERIES + 4 * HEADS["n_heads"])


def test_attention_that_runs_again_keeps_views(stand_in: str) -> None:
    again = {"parallelism.recompute": {"kind": "selective"}}
    found = counted(recipe_of(stand_in, documents=True, **again))
    assert found["qkv"] == 2 * TOKENS * PRODUCT
    assert "v" not in found


def test_compiled_layers_keep_the_copies_too(stand_in: str) -> None:
    """What the compiler cuts the two passes at, without its code."""

    def compiled(layer: Layer) -> Callable[..., Tensor]:
        torch._dynamo.reset()
        return torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)

    mine, other = (recipe_of(name, documents=True, **{"kernels.compile": "block"}) for name in (stand_in, "sdpa"))
    by_plan = sum(counted(other).values()) - sum(counted(mine).values())
    assert by_plan == 2 * TOKENS * (QUERIES + KEYS)
    assert saved_by(other, compiled) - saved_by(mine, compiled) == by_plan
