"""What the plan counts of fp8, against the passes that a layer asks kernels for and, where it is computed operation by
operation, the bytes that its operations move."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspec.estimate.memory import StageMemory, fullest, memory_of
from megaspec.estimate.work import (
    DEQUANTISED,
    FP8_CAST,
    FP8_CAST_ALONE,
    FP8_CAST_APART,
    FP8_WEIGHT_CAST,
    PLAIN_FP8_CAST,
    PLAIN_FP8_CAST_OF_ROWS,
    ROUNDED,
    SUMMED,
    PassBytes,
    Product,
    fp8_bytes,
)
from megaspec.nn.fp8 import REMEMBERED, Fp8Form, Fp8Linear, Fp8Memory, Fp8Shared, Fp8Use
from megaspec.nn.fp8_facts import GRADIENTS_IN_FP8
from megaspec.nn.fp8_layouts import BLOCKS, Role, has_one_scale
from megaspec.nn.fp8_te import SCALES
from megaspec.nn.linear import Linear
from megaspec.recipe import Recipe
from megaspec_kernels.fp8_cast import reference as fp8_cast
from megaspec_kernels.fp8_cast.formats import Block, scale_shape
from megaspec_kernels.linear import mxfp8, nvfp4
from megaspec_kernels.registry import REGISTRY, Fp8CastKernel
from megaspec_kernels.scaled_product.reference import scaled_product
from tests.resolve.planned import shaped

E4M3 = torch.float8_e4m3fn
# Large enough that what is counted once for a matrix is nothing beside its numbers.
M = 512
K = 256
N = 384


class MovedBytes(TorchDispatchMode):
    """Counts what operations read and write, views and matrix products apart."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        taken = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        results = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if function is torch.ops.aten.mm.default or function.is_view:
            return made
        self.total += sum(one.nbytes for one in (*taken, *results))
        return made


def moved(run: Callable[[], object]) -> int:
    with MovedBytes() as counted:
        run()
    return counted.total


def quantised(x: Tensor, block: Block, *, rows: bool, columns: bool) -> None:
    scale = fp8_cast.scale(x, block=block, dtype=E4M3)
    fp8_cast.cast(x, scale, block=block, dtype=E4M3, rows=rows, columns=columns)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_the_cast(recipe: str) -> None:
    x = torch.randn(M, K, dtype=torch.bfloat16)
    blocks = BLOCKS[recipe]["input"]
    if recipe == "tensorwise":
        found = moved(lambda: quantised(x, blocks.rows, rows=True, columns=True))
    else:
        found = moved(lambda: quantised(x, blocks.rows, rows=True, columns=False))
        found += moved(lambda: quantised(x, blocks.columns, rows=False, columns=True))
    assert found / x.numel() == pytest.approx(PLAIN_FP8_CAST[recipe], rel=0.01)
    of_rows = moved(lambda: quantised(x, blocks.rows, rows=True, columns=False))
    assert of_rows / x.numel() == pytest.approx(PLAIN_FP8_CAST_OF_ROWS[recipe], rel=0.01)


def test_the_cast_by_a_delayed_scale() -> None:
    x = torch.randn(M, K, dtype=torch.bfloat16)

    def run(*, columns: bool) -> None:
        seen = torch.zeros(1)
        saturated = torch.zeros(1, dtype=torch.int64)
        scale = torch.ones(1, 1)
        block = (None, None)
        fp8_cast.cast(x, scale, block=block, dtype=E4M3, columns=columns, seen=seen, saturated=saturated)

    both = moved(lambda: run(columns=True))
    assert both / x.numel() == pytest.approx(PLAIN_FP8_CAST["delayed"], rel=0.01)
    rows = moved(lambda: run(columns=False))
    assert rows / x.numel() == pytest.approx(PLAIN_FP8_CAST_OF_ROWS["delayed"], rel=0.01)


@pytest.mark.parametrize(("block", "into"), [((None, None), None), ((1, None), None), ((None, None), "sum")], ids=str)
def test_the_product(block: Block, into: str | None) -> None:
    a = torch.randn(M, K).to(E4M3)
    b = torch.randn(N, K).to(E4M3)
    a_scale = torch.ones(scale_shape(block, (M, K)))
    b_scale = torch.ones(scale_shape(block, (N, K)))
    blocks = {"a_block": block, "b_block": block}
    if into is None:
        found = moved(lambda: scaled_product(a, b, a_scale, b_scale, **blocks, dtype=torch.bfloat16))
        assert found == pytest.approx(DEQUANTISED * (M + N) * K + ROUNDED * M * N, rel=0.01)
        return
    total = torch.zeros(M, N)
    found = moved(lambda: scaled_product(a, b, a_scale, b_scale, **blocks, dtype=torch.float32, into=total))
    # the tensor that is added to is read, and what is returned counts once
    assert found == pytest.approx(DEQUANTISED * (M + N) * K + SUMMED * M * N, rel=0.01)


class CountedPasses:
    """Bytes that kernels move of matrices in bf16, which they read once for their scales and once for the cast."""

    def __init__(self) -> None:
        self.total = 0

    def _count(self, x: Tensor, of_number: int) -> None:
        self.total += of_number * x.numel()

    def scale(self, x: Tensor, **rest: Any) -> Tensor:
        self._count(x, 2)
        return fp8_cast.scale(x, **rest)

    def cast(self, x: Tensor, scale: Tensor, *, rows: bool = True, columns: bool = False, **rest: Any) -> Any:
        self._count(x, 2 + rows + columns)
        return fp8_cast.cast(x, scale, rows=rows, columns=columns, **rest)

    def quantise_lines(self, x: Tensor, **rest: Any) -> Any:
        self._count(x, 2 + 2 + 2)
        return fp8_cast.quantise_lines(x, **rest)

    def quantise_short_lines(self, x: Tensor, **rest: Any) -> Any:
        self._count(x, 2 + 2)
        return fp8_cast.quantise_short_lines(x, **rest)

    def layer(self, recipe: str) -> Fp8Linear:
        """A layer that asks here; see layer_with."""
        cast = replace(
            REGISTRY["fp8_cast"]["reference"],
            scale=self.scale,
            cast=self.cast,
            quantise_lines=self.quantise_lines,
            quantise_short_lines=self.quantise_short_lines,
        )
        return layer_with(cast, recipe)


def layer_with(cast: Fp8CastKernel, recipe: str) -> Fp8Linear:
    """A layer in a step that is not its first."""
    memory = None
    if recipe == "delayed":
        memory = Fp8Memory(torch.ones(2), torch.zeros(2), torch.zeros(1, dtype=torch.int64), fresh=frozenset())
    form = Fp8Form(recipe, "e4m3", 0, cast, scaled_product)
    return Fp8Linear(form, Fp8Shared(is_recording=True), memory=memory)


def passes_of(recipe: str, role: Role, *layouts: str) -> float:
    """Bytes of a number of what a layer quantises, in one pass for each of the `layouts`."""
    counted = CountedPasses()
    layer = counted.layer(recipe)
    x = torch.randn(M, K, dtype=torch.bfloat16)
    for layout in layouts:
        layer.quantise(x, role, rows="rows" in layout, columns="columns" in layout)
    return counted.total / x.numel()


@pytest.mark.parametrize("recipe", BLOCKS)
def test_passes_of_kernels(recipe: str) -> None:
    for role in REMEMBERED:
        assert passes_of(recipe, role, "rows and columns") == FP8_CAST[recipe], role
        assert passes_of(recipe, role, "rows") == passes_of(recipe, role, "columns") == FP8_CAST_ALONE[recipe], role
        if not has_one_scale(recipe):
            assert passes_of(recipe, role, "rows", "columns") == FP8_CAST_APART[recipe], role
    assert passes_of(recipe, "weight", "rows and columns") == FP8_WEIGHT_CAST[recipe]


@pytest.mark.parametrize("is_first", [False, True], ids=["behind others", "the first trained"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("recipe", BLOCKS)
def test_a_layer_quantises_what_its_gradients_need(recipe: str, is_frozen: bool, is_first: bool) -> None:
    """Of a frozen weight neither its input nor its gradient in columns; before what is trained nothing of gradients."""
    counted = CountedPasses()
    fp8 = counted.layer(recipe)
    layer = Linear(K, N).to(torch.bfloat16)
    nn.init.normal_(layer.weight)
    layer.weight.requires_grad_(not is_frozen)
    layer.fp8 = Fp8Use(fp8.ticket, recipe, "e4m3")
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=not is_first)
    y = layer(x)
    forward = counted.total
    if y.requires_grad:
        y.backward(torch.randn(M, N, dtype=torch.bfloat16))

    product = Product(M, N, K, "fp8", makes_input_gradient=not is_first, makes_weight_gradient=not is_frozen)
    on_a_gpu = ("kernels.fp8_cast=triton", "kernels.scaled_product=torch", f"precision.recipe={recipe}")
    planned = fp8_bytes(shaped("llama3_8b_half", *on_a_gpu, precision="fp8", global_batch=1), [product])
    assert planned == (forward, counted.total - forward)


def in_blocks(recipe: Recipe, name: str) -> Recipe:
    """By mxfp8 or nvfp4, on a GPU that other recipes are planned for, too."""
    return recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"recipe": name})})


def planned_of_number(
    *words: str,
    is_first: bool = False,
    is_frozen: bool = False,
    linear: str = "torch",
    input_ranks: int = 1,
    blocks: str = "",
) -> PassBytes:
    """What the plan counts for a number of the input and for one of the gradient. `linear`: kernels.linear, installed
    or not; `input_ranks`: see Product; `blocks`: mxfp8 or nvfp4."""
    # so many tokens that the weight is nothing beside them
    tokens = 1 << 30
    product = Product(
        tokens,
        N,
        K,
        "fp8",
        makes_input_gradient=not is_first,
        makes_weight_gradient=not is_frozen,
        input_ranks=input_ranks,
    )
    recipe = shaped("llama3_8b_half", "kernels.scaled_product=torch", *words, precision="fp8", global_batch=1)
    recipe = recipe.model_copy(update={"kernels": recipe.kernels.model_copy(update={"linear": linear})})
    if blocks:
        recipe = in_blocks(recipe, blocks)
    planned = fp8_bytes(recipe, [product])
    return PassBytes(planned.forward / (tokens * K), planned.backward / (tokens * N))


@pytest.mark.parametrize("is_first", [False, True], ids=["behind others", "the first trained"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("recipe", BLOCKS)
def test_plain_casts_of_what_gradients_need(recipe: str, is_frozen: bool, is_first: bool) -> None:
    layer = layer_with(REGISTRY["fp8_cast"]["reference"], recipe)
    x = torch.randn(M, K, dtype=torch.bfloat16)
    forward = moved(lambda: layer.quantise(x, "input", columns=not is_frozen))
    backward = 0
    if not (is_first and is_frozen):
        backward = moved(lambda: layer.quantise(x, "gradient", rows=not is_first, columns=not is_frozen))
    words = ("kernels.fp8_cast=reference", f"precision.recipe={recipe}")
    planned = planned_of_number(*words, is_frozen=is_frozen, is_first=is_first)
    assert planned == pytest.approx((forward / x.numel(), backward / x.numel()), rel=0.01)


@pytest.mark.parametrize("linear", ["torch", "te"])
@pytest.mark.parametrize("recipe", sorted(GRADIENTS_IN_FP8))
def test_tokens_that_ranks_gather_are_cast_in_rows(recipe: str, linear: str) -> None:
    """Which have the scale of columns, too: those are made of the bytes of all ranks."""
    words = ("kernels.fp8_cast=reference", f"precision.recipe={recipe}")
    in_rows = FP8_CAST_ALONE[recipe] if linear == "te" else PLAIN_FP8_CAST_OF_ROWS[recipe]
    planned = planned_of_number(*words, linear=linear, input_ranks=2)
    assert planned.forward == pytest.approx(in_rows / 2, rel=1e-3)


@pytest.mark.parametrize("recipe", SCALES)
def test_transformer_engine_makes_rows_in_any_case(recipe: str) -> None:
    """Columns are made with them, or not at all: see TeFp8Linear.quantise."""
    both = FP8_CAST[recipe]
    planned = partial(planned_of_number, f"precision.recipe={recipe}", linear="te")
    assert planned() == pytest.approx((both, both), rel=1e-3)
    assert planned(is_first=True) == pytest.approx((both, both), rel=1e-3)
    assert planned(is_frozen=True) == pytest.approx((both - 1, both - 1), rel=1e-3)
    assert planned(is_frozen=True, is_first=True) == pytest.approx((both - 1, 0), rel=1e-3)


def test_mxfp8_by_transformer_engine() -> None:
    """One kernel for the layouts that are asked for, with a byte of scale for 32 numbers in each."""
    planned = partial(planned_of_number, blocks="mxfp8", linear="te")
    both = 2 + 2 * (1 + 1 / 32)
    one = 2 + 1 + 1 / 32
    assert planned() == pytest.approx((both, both), rel=1e-3)
    assert planned(is_first=True) == pytest.approx((both, one), rel=1e-3)
    assert planned(is_frozen=True) == pytest.approx((one, one), rel=1e-3)
    assert planned(is_frozen=True, is_first=True) == pytest.approx((one, 0), rel=1e-3)


def test_nvfp4_by_transformer_engine() -> None:
    """Read for its largest elements, then once more; rows are made in any case."""
    planned = partial(planned_of_number, blocks="nvfp4", linear="te")
    both = 2 + 2 + 2 * (1 / 2 + 1 / 16)
    one = 2 + 2 + 1 / 2 + 1 / 16
    assert planned() == pytest.approx((both, both), rel=1e-3)
    assert planned(is_first=True) == pytest.approx((both, both), rel=1e-3)
    assert planned(is_frozen=True, is_first=True) == pytest.approx((one, 0), rel=1e-3)


def test_nvfp4_by_the_definition() -> None:
    x = torch.randn(M, K, dtype=torch.bfloat16)
    both = moved(lambda: nvfp4.cast(x, "input", rounding="nearest"))
    assert both / x.numel() == pytest.approx(PLAIN_FP8_CAST["nvfp4"], rel=0.01)
    rows = moved(lambda: nvfp4.cast(x, "input", rounding="nearest", columns=False))
    assert rows / x.numel() == pytest.approx(PLAIN_FP8_CAST_OF_ROWS["nvfp4"], rel=0.01)


def test_mxfp8_by_the_definition() -> None:
    x = torch.randn(M, K, dtype=torch.bfloat16)
    both = moved(lambda: mxfp8.cast(x, E4M3))
    assert both / x.numel() == pytest.approx(PLAIN_FP8_CAST["mxfp8"], rel=0.01)
    rows = moved(lambda: mxfp8.cast(x, E4M3, columns=False))
    assert rows / x.numel() == pytest.approx(PLAIN_FP8_CAST_OF_ROWS["mxfp8"], rel=0.01)
    planned = planned_of_number(blocks="mxfp8")
    assert planned.forward == pytest.approx(both / x.numel() + DEQUANTISED + ROUNDED * N / K, rel=0.01)


@pytest.mark.parametrize(("name", "of_number"), [("mxfp8", 1 + 1 / 32), ("nvfp4", 1 / 2 + 1 / 16)])
def test_weights_and_what_is_kept_in_blocks(name: str, of_number: float) -> None:
    """Both layouts of a weight and one of an input, with a byte of scale for 32 numbers, or for 16 of half a byte."""

    recipe = shaped("llama3_8b_half", "precision.recipe=blockwise", precision="fp8", global_batch=1)
    plain: StageMemory = fullest(memory_of(recipe))
    found = fullest(memory_of(in_blocks(recipe, name)))
    # 13 of 16 layers of 8B, each of these outputs and inputs
    sizes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    weights = 13 * sum(n * k for n, k in sizes)
    assert found.weights - plain.weights == 2 * weights * (of_number - 1)
    tokens = 8192
    assert found.activations - plain.activations == 13 * tokens * sum(k for _, k in sizes) * (of_number - 1)
