"""FlashAttention's packages: what they are told, on a CPU; their kernels against fp64, on a GPU."""

import importlib.util
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megaspec_kernels.attention import flash_attn, reference_block
from megaspec_kernels.attention.documents import BlockDocuments
from megaspec_kernels.attention.scoring import Scoring
from megaspec_kernels.gate import Results, check, filled_with_nan, in_dtype, results
from megaspec_kernels.registry import REGISTRY
from tests.kernels.flash_attn_packages import PACKAGES
from tests.kernels.test_attention_cudnn import TRAINED
from tests.kernels.test_attention_documents import (
    PACKED,
    PARTS,
    UNEVEN,
    Packed,
    Part,
    compiles_once,
    hold,
    host_never_waits,
    make,
)

VERSIONS = ("flash_attn", "flash_attn_3", "flash_attn_2")
MODULES = {
    "flash_attn": "flash_attn.cute",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_2": "flash_attn.flash_attn_interface",
}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


ON_GPU = [
    pytest.param(
        name,
        marks=(pytest.mark.gpu, pytest.mark.skipif(not _is_installed(module), reason=f"{module} is not installed")),
    )
    for name, module in MODULES.items()
]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that compute on the CPU."""
    monkeypatch.setattr(flash_attn, "require", PACKAGES.__getitem__)
    monkeypatch.setattr(flash_attn, "_takes", lambda q, mask: True)


@pytest.mark.parametrize("packed", PACKED, ids=str)
@pytest.mark.parametrize("name", VERSIONS)
def test_packages_are_told_of_documents_windows_groups_and_sinks(name: str, packed: Packed, told: None) -> None:
    hold(name, packed, torch.bfloat16, torch.device("cpu"))


def hold_whole(name: str, device: torch.device, *, T: int, H: int, window: int | None, cap: float | None) -> None:
    """Whole sequences without documents, with groups and sinks."""
    inputs, grad, _ = make(Packed(((T,), (T,)), H=H, sinks=True), device)
    options = {"window": window, "scoring": Scoring(scale=0.3, cap=cap)}

    def attend(name: str, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return REGISTRY["attention"][name].attend(q, k, v, sinks=sinks, **options)

    mine = in_dtype(inputs, torch.bfloat16)
    plain = partial(attend, "reference")
    check(results(partial(attend, name), mine, grad), results(plain, mine, grad), results(plain, inputs, grad))


@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, None), (None, 2.0), (7, 2.0)])
@pytest.mark.parametrize("name", VERSIONS)
def test_packages_are_told_of_whole_sequences(name: str, window: int | None, cap: float | None, told: None) -> None:
    hold_whole(name, torch.device("cpu"), T=45, H=16, window=window, cap=cap)


def hold_block(name: str, part: Part, device: torch.device, *, cap: float | None, H: int = 16) -> None:
    """Output, log-sum-exp and gradients of a part of packed sequences, against the equation."""
    packed = Packed(UNEVEN.rows, H=H)
    inputs, grad, documents = make(packed, device)
    met = BlockDocuments(documents.at(part.queries), documents.at(part.keys))
    options = {"causal": part.causal, "documents": met, "scoring": Scoring(cap=cap)}
    own = {
        "q": inputs["q"][:, part.queries],
        "k": inputs["k"][:, part.keys],
        "v": inputs["v"][:, part.keys],
    }
    kernel = REGISTRY["attention"][name]

    def of(forward: object, backward: object, given: dict[str, Tensor]) -> Results:
        d_out = grad[:, part.queries].to(given["q"].dtype)
        with filled_with_nan():
            out, lse = forward(*given.values(), **options)
            grads = backward(d_out, *given.values(), out, lse, **options)
        assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)
        # what sees nothing is -inf of all; the gate compares numbers
        return {"out": out, "lse": lse.nan_to_num(neginf=0.0), **dict(zip(given, grads, strict=True))}

    truth_lse = reference_block.block_forward(*own.values(), **options)[1]
    plain = (reference_block.block_forward, reference_block.block_backward)
    mine = in_dtype(own, torch.bfloat16)
    check(of(kernel.block_forward, kernel.block_backward, mine), of(*plain, mine), of(*plain, own))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("name", VERSIONS)
def test_packages_are_told_of_blocks(name: str, part: Part, cap: float | None, told: None) -> None:
    """Documents that have queries and no keys, keys and no queries, or neither, of which packages leave NaN."""
    hold_block(name, part, torch.device("cpu"), cap=cap)


@pytest.mark.parametrize("pass_of_block", ["_FORWARD", "_BACKWARD"])
def test_what_a_block_leaves_unwritten_is_seen(pass_of_block: str, told: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that makes a result with torch.empty and writes nothing into it."""
    passes = getattr(flash_attn, pass_of_block)
    written = passes[3]

    def unwritten(*arguments: object) -> tuple[Tensor, ...]:
        first, *others = written(*arguments)
        return torch.empty_like(first), *others

    monkeypatch.setitem(passes, 3, unwritten)
    with pytest.raises(AssertionError, match="inf from the truth"):
        hold_block("flash_attn_3", PARTS[0], torch.device("cpu"), cap=None)


@pytest.mark.parametrize("name", VERSIONS)
def test_the_compiler_neither_breaks_nor_begins_anew(name: str, told: None) -> None:
    compiles_once(name, torch.bfloat16, sinks=True)


def test_a_package_that_is_not_there_is_named() -> None:
    lacking = [module for module in MODULES.values() if not _is_installed(module)]
    if "flash_attn.cute" not in lacking:
        pytest.skip("flash-attn-4 is installed")
    x = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ImportError, match=r"flash-attn-4; pip install 'megaspec\[fa\]'"):
        flash_attn._forward(x, x, x, None, None, 8, 8, True, None, 0.25, 0.0, 4)


# Documents of no token, of one, and of the whole row. Heads of 16 are not version 4's, see catalog.py.
SHORT = [replace(PACKED[number], H=64) for number in (2, 3, 5)]
WHOLE_ROW = Packed(((1000, 24, 1, 999), (2024,), (0, 2024, 0)), N=8, K=2, H=128)


@pytest.mark.parametrize("packed", [*SHORT, WHOLE_ROW, TRAINED[0], TRAINED[1], TRAINED[4]], ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_documents_on_a_gpu(name: str, packed: Packed) -> None:
    """Each as if it were alone, against fp64. FlashAttention-4 compiles for each size of heads: 20 s."""
    hold(name, packed, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(("window", "cap"), [(None, None), (64, None), (None, 2.0)])
@pytest.mark.parametrize("name", ON_GPU)
def test_whole_sequences_on_a_gpu(name: str, window: int | None, cap: float | None) -> None:
    hold_whole(name, torch.device("cuda"), T=600, H=64, window=window, cap=cap)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_blocks_on_a_gpu(name: str, part: Part) -> None:
    """What ranks with a part of a sequence take, with documents that have no keys there."""
    hold_block(name, part, torch.device("cuda"), cap=None, H=64)


@pytest.mark.parametrize("name", ON_GPU)
def test_gradients_are_added_in_one_order_on_a_gpu(name: str) -> None:
    """Bitwise the same twice, where torch is told to be deterministic."""
    inputs, grad, documents = make(TRAINED[1], torch.device("cuda"))
    mine = {key: x.bfloat16().requires_grad_() for key, x in inputs.items()}
    attend = REGISTRY["attention"][name].attend
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            out = attend(*mine.values(), documents=documents)
            runs.append(torch.autograd.grad(out, list(mine.values()), grad.bfloat16()))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("name", ON_GPU)
def test_the_host_does_not_wait(name: str) -> None:
    """For whole sequences, nor for a part of one as ranks take it."""
    kernel = REGISTRY["attention"][name]
    inputs, grad, documents = make(Packed(((300, 212), (512,)), H=64), torch.device("cuda"))
    leaves = [x.bfloat16().requires_grad_() for x in inputs.values()]
    d_out = grad.bfloat16()
    met = BlockDocuments(documents.at(slice(256, 512)), documents.at(slice(0, 256)))
    queries = leaves[0].detach()[:, 256:]
    keys, values = (x.detach()[:, :256] for x in leaves[1:])

    def every_pass() -> None:
        torch.autograd.grad(kernel.attend(*leaves, documents=documents), leaves, d_out)
        options = {"causal": False, "documents": met}
        out, lse = kernel.block_forward(queries, keys, values, **options)
        kernel.block_backward(d_out[:, 256:], queries, keys, values, out, lse, **options)

    # the first call loads libraries, and version 4 compiles
    every_pass()
    with host_never_waits():
        every_pass()
