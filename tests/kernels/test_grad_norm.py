"""Norms of gradients against fp64: tensors of all sizes in one call, what is not finite, one order of sums."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megaspec_kernels.gate import check, filled_with_nan
from megaspec_kernels.grad_norm import triton
from megaspec_kernels.registry import REGISTRY

INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
IMPLEMENTATIONS = list(REGISTRY["grad_norm"])
# A program's part and a block of parts are small here, so that the interpreter has several of each.
CHUNK = 256
BLOCK = 64
PARTS = 4
# One element, nothing, less and more than a part, and several blocks of parts.
ODD = ((1,), (0, 7), (3, 5), (63, 33), (CHUNK + 1,))
ALIGNED = ((16,), (CHUNK,), (64, 48), (2 * PARTS * CHUNK + 16,))
SIZES = {"odd": ODD, "aligned": ALIGNED, "mixed": (ALIGNED[0], ODD[2], ALIGNED[3], ODD[4], ODD[1], ALIGNED[2])}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "CHUNK", CHUNK)
    monkeypatch.setattr(triton, "BLOCK", BLOCK)
    monkeypatch.setattr(triton, "PARTS", PARTS)
    monkeypatch.setattr(triton, "WARPS", 1)
    # no sums of an earlier test where this one's lie
    triton._plan.cache_clear()


def kernel_of(implementation: str, device: torch.device) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    if implementation == "triton" and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    return REGISTRY["grad_norm"][implementation]


def values_of(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Of sizes far apart, so that no norm hides behind another."""
    draw = torch.Generator().manual_seed(len(shapes))
    values = []
    for i, shape in enumerate(shapes):
        value = torch.randn(shape, generator=draw).bfloat16().to(torch.float64)
        values.append((value * 4.0 ** (i - 2)).to(device))
    return values


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shapes", SIZES.values(), ids=SIZES)
def test_each_norm(
    implementation: str, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    kernel = kernel_of(implementation, device)
    values = values_of(shapes, device)
    mine = [value.to(dtype) for value in values]
    if implementation == "triton" and dtype == torch.float64:
        with pytest.raises(AssertionError, match=r"gradients in torch\.float64"):
            kernel(mine)
        return
    with filled_with_nan():
        fast = kernel(mine)
    plain = REGISTRY["grad_norm"]["reference"](mine)
    assert len(fast) == len(plain) == len(shapes)
    for i, value in enumerate(values):
        truth = value.square().sum().sqrt()
        assert fast[i].dtype == dtype
        assert fast[i].shape == ()
        check({"out": fast[i]}, {"out": plain[i]}, {"out": truth})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_views_are_read_as_they_are(implementation: str, device: torch.device) -> None:
    """Columns of a wider tensor, and a part that begins where no thread may load four elements at a time."""
    kernel = kernel_of(implementation, device)
    whole = values_of(((70, 40), (2 * CHUNK + 16,)), device)
    table, flat = (value.to(torch.float32) for value in whole)
    views = [table[:, ::2], table.t(), flat[3:], flat[1:17], flat[16:32]]
    found = kernel(views)
    plain = REGISTRY["grad_norm"]["reference"](views)
    for i, view in enumerate(views):
        truth = view.to(torch.float64).square().sum().sqrt()
        check({"out": found[i]}, {"out": plain[i]}, {"out": truth})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e20], ids=str)
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, -1])
def test_what_is_not_finite_shows_in_its_own_norm(
    implementation: str, bad: float, place: int, device: torch.device
) -> None:
    """And in no other. The square of 1e20 is none that fp32 holds."""
    kernel = kernel_of(implementation, device)
    values = [value.to(torch.float32) for value in values_of(SIZES["mixed"], device)]
    clean = kernel(values)
    for which in (2, 3):
        bads = [value.clone() for value in values]
        bads[which].view(-1)[place] = bad
        found = kernel(bads)
        plain = REGISTRY["grad_norm"]["reference"](bads)
        for i, norm in enumerate(found):
            if i == which:
                assert not torch.isfinite(norm)
                assert torch.isnan(norm) == torch.isnan(plain[i])
            else:
                assert torch.equal(norm, clean[i])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_norm_is_the_same_whichever_others_are_asked_for(implementation: str, device: torch.device) -> None:
    """To the bit: data parallelism asks bucket by bucket, the end of a step for all."""
    kernel = kernel_of(implementation, device)
    values = [value.to(torch.float32) for value in values_of(SIZES["mixed"], device)]
    together = kernel(values)
    assert all(torch.equal(kernel([value])[0], norm) for value, norm in zip(values, together, strict=True))
    backwards = kernel(values[::-1])[::-1]
    assert all(torch.equal(one, other) for one, other in zip(backwards, together, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_new_values_in_the_same_memory(implementation: str, device: torch.device) -> None:
    """Tables of addresses stay, what lies there does not."""
    kernel = kernel_of(implementation, device)
    values = [value.to(torch.float32) for value in values_of(SIZES["mixed"], device)]
    before = kernel(values)
    for value in values:
        value.mul_(2)
    # powers of two change no rounding
    assert all(torch.equal(2 * one, other) for one, other in zip(before, kernel(values), strict=True))
    assert kernel([]) == []


def test_gradients_of_several_formats_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"gradients in torch\.float32 and in torch\.bfloat16"):
        triton.grad_norm([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_the_host_waits_for_nothing_once_tables_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients have moved; and sums are the same in every run."""
    monkeypatch.undo()
    values = [torch.randn(shape, device="cuda") for shape in ((4096, 1000), (33,), (5, triton.CHUNK))]
    first = triton.grad_norm(values)
    moved = [value.clone() for value in values]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [triton.grad_norm(values), triton.grad_norm(moved)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for norms in again:
        assert all(torch.equal(one, other) for one, other in zip(norms, first, strict=True))
