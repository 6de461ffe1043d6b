"""Documents through torch's flex_attention: on a CPU its forward pass, and our mask as a GPU's kernels read it with
every gradient; those kernels against fp64, on a GPU. Of whole sequences that hide nothing here is what is computed in
one order of sums; the rest of them, and the mask's blocks: test_attention.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention

from megaspec_kernels.attention import flex, flex_blocks, one_order, sdpa
from megaspec_kernels.attention.scoring import Scoring
from megaspec_kernels.gate import Results, check, filled_with_nan, in_dtype
from megaspec_kernels.registry import REGISTRY
from tests.kernels import flex_by_blocks
from tests.kernels.test_attention_documents import (
    ON_GPU,
    PACKED,
    Packed,
    alone,
    hold,
    host_never_waits,
    make,
)
from tests.source_patch import Patch, planted

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
# Documents of no token, of one, and of the whole row; boundaries at the edges of the mask's blocks of 128, one token
# before and one behind, and rows that end inside a block.
EDGES = [
    Packed(((0, 127, 1, 0, 128, 44, 0), (1, 299), (129, 170, 1)), N=2, K=1),
    Packed(((257, 0, 43), (300,)), N=2, K=1, window=130, sinks=True),
    Packed(((300,),), N=2, K=2, sinks=True),
]


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention that trains on a CPU."""
    monkeypatch.setattr(flex, "flex_attention", flex_by_blocks.flex_attention)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [*PACKED, *EDGES], ids=str)
def test_forward_of_documents(packed: Packed, dtype: torch.dtype) -> None:
    """Each as if it were alone, by torch's own flex_attention: all of it that runs on a CPU."""
    inputs, _, documents = make(packed)
    mine = in_dtype(inputs, dtype)
    q, k, v = (mine[name] for name in "qkv")
    options = {"documents": documents, "window": packed.window, "sinks": mine.get("sinks")}
    with torch.no_grad():
        with filled_with_nan():
            found = REGISTRY["attention"]["flex"].attend(q, k, v, **options)
        plain = alone(packed, **mine)
        truth = alone(packed, **inputs)
    check({"out": found}, {"out": plain}, {"out": truth})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [*PACKED, *EDGES], ids=str)
def test_gate_of_the_mask_by_blocks(packed: Packed, dtype: torch.dtype, by_blocks: None) -> None:
    """Each document as if it were alone, and every gradient, sinks' among them."""
    hold("flex", packed, dtype, CPU)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_stand_in_computes_what_torch_does(cap: float | None) -> None:
    """Output and log-sum-exp."""
    packed = EDGES[1]
    inputs, _, documents = make(packed)
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    options = {
        "score_mod": flex._capped(cap),
        "block_mask": flex.block_mask(packed.T, documents=documents, window=packed.window, device=CPU),
        "scale": Scoring().scale_of(packed.H),
        "enable_gqa": True,
        "return_aux": AuxRequest(lse=True),
    }
    out, aux = flex_by_blocks.flex_attention(q, k, v, **options)
    truth, aux_truth = flex_attention(q, k, v, **options)
    assert (out - truth).abs().max() <= 1e-13 * truth.abs().max()
    assert (aux.lse - aux_truth.lse).abs().max() <= 1e-13 * aux_truth.lse.abs().max()


def planted_in_flex(old: str, new: str) -> Patch:
    return Patch("megaspec_kernels.attention.flex", old, new)


def planted_in_blocks(old: str, new: str) -> Patch:
    return Patch("megaspec_kernels.attention.flex_blocks", old, new)


# Of a query's first key, which mask_mod asks and the blocks are made of; of mask_mod alone.
BUGS = {
    "a document begins a token late": planted_in_flex(
        "is_start[:, 1:] = number[:, 1:] != number[:, :-1]", "is_start[:, 2:] = number[:, 1:-1] != number[:, :-2]"
    ),
    "a document begins a token early": planted_in_flex(
        "is_start[:, 1:] = number[:, 1:] != number[:, :-1]", "is_start[:, :-1] = number[:, 1:] != number[:, :-1]"
    ),
    "a document leaks into the next": planted_in_flex(
        "is_start[:, 1:] = number[:, 1:] != number[:, :-1]",
        "is_start[:, 1:] = (number[:, 1:] != number[:, :-1]) & (number[:, 1:] != 1)",
    ),
    "all rows have the documents of the first": planted_in_flex(
        "row = b if documents is not None and documents.number.shape[0] > 1 else 0", "row = 0"
    ),
    "in a block that is seen in part all of the past is seen": planted_in_flex(
        "(k <= q) & (k >= starts_BT[row, q])", "k <= q"
    ),
}
# Of the blocks alone: of their formula, and of their kernel.
BUGS_OF_BLOCKS = {
    "a block that the document begins in is seen whole": planted_in_blocks(
        "(starts_BT[:, last_query_I] + BLOCK - 1) // BLOCK", "starts_BT[:, last_query_I] // BLOCK"
    ),
    "a block that the document begins in is not seen": planted_in_blocks(
        "first_BI = starts_BT[:, first_query_I] // BLOCK",
        "first_BI = (starts_BT[:, first_query_I] + BLOCK - 1) // BLOCK",
    ),
}
BUGS_OF_KERNEL = {
    "a block that the document begins in is seen whole": planted_in_blocks(
        "whole = tl.minimum((last_start + b_block - 1) // b_block, this)",
        "whole = tl.minimum(last_start // b_block, this)",
    ),
    "a block that the document begins in is not seen": planted_in_blocks(
        "first = tl.load(starts_ptr + this * b_block) // b_block",
        "first = (tl.load(starts_ptr + this * b_block) + b_block - 1) // b_block",
    ),
    "a block of queries that sees a part of the keys is left out": planted_in_blocks(
        "tl.store(n_part_by_key_ptr + at, 1 + n_all - n_whole)", "tl.store(n_part_by_key_ptr + at, 1)"
    ),
}
# the fourth document begins in the first block and fills the second
ROWS = Packed(((20, 5, 30, 205, 40), (200, 100)), N=2, K=1)


@pytest.mark.parametrize("bug", [*BUGS, *BUGS_OF_BLOCKS])
def test_planted_bugs_are_caught(bug: str, by_blocks: None) -> None:
    """A boundary off by one, and a document that leaks into the next; in what mask_mod says and in the blocks."""
    hold("flex", ROWS, torch.bfloat16, CPU)
    with planted((BUGS | BUGS_OF_BLOCKS)[bug]), pytest.raises(AssertionError, match="from the truth"):
        hold("flex", ROWS, torch.bfloat16, CPU)


# Whole rows: of one token, of an odd number, of more than a block of the mask.
WHOLE = [
    Packed(((1,),), N=2, K=1),
    Packed(((63,), (63,)), N=4, K=2),
    Packed(((300,),), N=2, K=2, sinks=True),
]


@contextmanager
def in_one_order() -> Iterator[None]:
    """Sums are added so, as a run sets it, with NaN where nobody writes. Not around what is computed by equations: on a
    GPU torch asks for a setting of cuBLAS there."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def whole(attend: Callable[..., Tensor], packed: Packed, dtype: torch.dtype, device: torch.device) -> Results:
    """Output and gradients, without a word about documents."""
    inputs, grad, _ = make(packed, device)
    leaves = {name: x.requires_grad_() for name, x in in_dtype(inputs, dtype).items()}
    q, k, v, *sinks = leaves.values()
    out = attend(q, k, v, sinks=sinks[0] if sinks else None)
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def hold_whole(packed: Packed, dtype: torch.dtype, device: torch.device) -> None:
    """flex in one order, beside the equation."""
    equation = REGISTRY["attention"]["reference"].attend
    with in_one_order():
        fast = whole(REGISTRY["attention"]["flex"].attend, packed, dtype, device)
    plain = whole(equation, packed, dtype, device)
    truth = whole(equation, packed, torch.float64, device)
    check(fast, plain, truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", WHOLE, ids=str)
def test_in_one_order_what_hides_nothing_is_computed_here(
    packed: Packed, dtype: torch.dtype, by_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "attention", None)
    hold_whole(packed, dtype, CPU)


@pytest.mark.parametrize(("mode", "by_flex"), [("any", False), ("only warns", False), ("one", True)])
def test_in_any_order_what_hides_nothing_goes_through_sdpa(
    mode: str, by_flex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients, too, as a model that trains so is evaluated. A mode that warns asks for no order."""
    asked = []

    def flex_attention(*given: Tensor, **options: object) -> tuple[Tensor, AuxOutput]:
        asked.append("flex")
        return flex_by_blocks.flex_attention(*given, **options)

    def through_sdpa(*given: Tensor, **options: object) -> Tensor:
        asked.append("sdpa")
        return given[0]

    monkeypatch.setattr(flex, "flex_attention", flex_attention)
    monkeypatch.setattr(sdpa, "attention", through_sdpa)
    inputs, _, documents = make(WHOLE[1])
    torch.use_deterministic_algorithms(mode != "any", warn_only=mode == "only warns")
    try:
        with torch.no_grad():
            flex.attention(*inputs.values())
            flex.attention(*inputs.values(), documents=documents)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == ["flex" if by_flex else "sdpa", "flex"]


def test_the_compiler_asks_for_the_order_and_again_where_it_changes() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def asks(x: Tensor) -> Tensor:
        return x + 1 if one_order.is_asked_for() else x

    zero = torch.zeros(1)
    torch._dynamo.reset()
    try:
        for is_on, only_warns in ((False, False), (True, False), (True, True), (True, False), (False, False)):
            torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
            assert asks(zero).item() == (is_on and not only_warns)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def compiles_anew() -> None:
    """A mask of documents has a graph for each shape, and all tests together more than recompile_limit allows."""
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [*ON_GPU, *EDGES], ids=str)
def test_documents_on_a_gpu(packed: Packed, dtype: torch.dtype, compiles_anew: None, poisoned: None) -> None:
    """Each as if it were alone, against fp64, with NaN where nobody writes."""
    hold("flex", packed, dtype, CUDA)


WHOLE_ON_GPU = [Packed(((300,), (300,)), N=4, K=2, H=64), Packed(((2024,),), N=8, K=2, H=128), replace(WHOLE[2], H=64)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", WHOLE_ON_GPU, ids=str)
def test_what_hides_nothing_in_one_order_on_a_gpu(
    packed: Packed, dtype: torch.dtype, compiles_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "attention", None)
    hold_whole(packed, dtype, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_hides_nothing_repeats_to_the_bit_on_a_gpu(compiled: bool, compiles_anew: None) -> None:
    """By itself, and inside of a layer that is compiled as one graph."""
    attend = REGISTRY["attention"]["flex"].attend
    if compiled:
        attend = torch.compile(attend, fullgraph=True)
    with in_one_order():
        first, *others = [whole(attend, WHOLE_ON_GPU[1], torch.bfloat16, CUDA) for _ in range(4)]
    for other in others:
        for name, values in first.items():
            assert torch.equal(values, other[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("T", [16, 300])
def test_a_compiled_layer_without_gradients_reads_each_rows_own_blocks_on_a_gpu(T: int, compiles_anew: None) -> None:
    """As a model is evaluated: torch's compiler lays out what it computes for the kernel, see flex_blocks.py."""
    packed = Packed(((T // 4, T - T // 4), (T,), (T - 1, 1)), N=4, K=2, H=64)
    inputs, _, documents = make(packed, CUDA)
    mine = in_dtype(inputs, torch.bfloat16)

    @torch.compile
    def attend(q: Tensor, k: Tensor, v: Tensor, number: Tensor) -> Tensor:
        # numbers that are computed here, as chunks are
        here = replace(documents, number=number * 2 // 2)
        return REGISTRY["attention"]["flex"].attend(q, k, v, documents=here)

    with torch.no_grad():
        found = attend(*mine.values(), documents.number)
        plain = alone(packed, **mine)
        truth = alone(packed, **inputs)
    check({"out": found}, {"out": plain}, {"out": truth})


@pytest.mark.gpu
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught_on_a_gpu(bug: str, compiles_anew: None) -> None:
    hold("flex", ROWS, torch.bfloat16, CUDA)
    torch._dynamo.reset()
    with planted(BUGS[bug]), pytest.raises(AssertionError, match="from the truth"):
        hold("flex", ROWS, torch.bfloat16, CUDA)


@contextmanager
def planted_in_kernel(patch: Patch) -> Iterator[None]:
    """While entered, Triton compiles the kernel with a patch in it. `planted` can't: a kernel is no function."""
    kernel = flex_blocks.flex_blocks_kernel
    source = kernel.src
    assert source.count(patch.old) == 1, patch
    kernel._unsafe_update_src(source.replace(patch.old, patch.new))
    # what it has compiled before
    kernel.device_caches.clear()
    try:
        yield
    finally:
        kernel._unsafe_update_src(source)
        kernel.device_caches.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("bug", BUGS_OF_KERNEL)
def test_planted_bugs_of_the_kernel_are_caught_on_a_gpu(bug: str, compiles_anew: None) -> None:
    hold("flex", ROWS, torch.bfloat16, CUDA)
    torch._dynamo.reset()
    with planted_in_kernel(BUGS_OF_KERNEL[bug]), pytest.raises(AssertionError, match="from the truth"):
        hold("flex", ROWS, torch.bfloat16, CUDA)
    torch._dynamo.reset()
    hold("flex", ROWS, torch.bfloat16, CUDA)


@pytest.mark.gpu
def test_the_host_does_not_wait(compiles_anew: None) -> None:
    inputs, grad, documents = make(Packed(((300, 212), (512,)), H=64), CUDA)
    leaves = [x.bfloat16().requires_grad_() for x in inputs.values()]
    attend = REGISTRY["attention"]["flex"].attend

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves, documents=documents), leaves, grad.bfloat16())

    # the first call compiles
    both()
    with host_never_waits():
        both()
