"""The gate of every kernel: no worse than plain PyTorch, measured against the truth in fp64.

‖fast − truth‖∞ ≤ c · ‖plain − truth‖∞ + 4 · eps(dtype) · ‖truth‖∞, c = 2 for outputs and 3 for gradients.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

# c, of outputs and of gradients.
FORWARD = 2.0
BACKWARD = 3.0


def within(fast: Tensor, plain: Tensor, truth: Tensor, *, factor: float, size: float) -> tuple[float, float]:
    """-> (error, allowed), both largest absolute values. `truth` is fp64; the dtype is that of `fast`; `size` is what
    rounding is measured against. In fp64 plain PyTorch is the truth, whose own rounding is as large: 1e-13 of it.
    """
    assert fast.shape == plain.shape == truth.shape, f"{fast.shape}, {plain.shape}, {truth.shape}"
    error = worst(fast.to(torch.float64) - truth)
    plain_error = worst(plain.to(torch.float64) - truth)
    slack = 1e-13
    if fast.dtype != torch.float64:
        slack = 4 * torch.finfo(fast.dtype).eps
    return error, factor * plain_error + slack * size


def worst(x: Tensor) -> float:
    """max|x|; NaN counts as infinite."""
    if not x.numel():
        return 0.0
    return x.abs().nan_to_num(nan=float("inf")).max().item()


Results = dict[str, Tensor]


def results(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad_out: Tensor) -> Results:
    """The output under "out" and the gradient of every input under its name."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with filled_with_nan():
        out = function(**leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def check(fast: Results, plain: Results, truth: Results) -> None:
    """Holds every result to the gate, and the gate to this: zeros must not pass where the truth is not zero."""
    for name in truth:
        error, allowed = _held(name, fast[name], plain, truth)
        assert error <= allowed, f"{name}: {error:.3e} from the truth, allowed {allowed:.3e}"
        if worst(truth[name]):
            empty, _ = _held(name, torch.zeros_like(fast[name]), plain, truth)
            assert empty > allowed, f"{name}: the gate lets zeros pass ({empty:.3e}, allowed {allowed:.3e})"


def shares(fast: Results, plain: Results, truth: Results) -> dict[str, float]:
    """The error of every result as a share of what the gate allows: above 1 it does not pass."""
    found = {}
    for name in truth:
        error, allowed = _held(name, fast[name], plain, truth)
        found[name] = error / allowed if allowed else float("inf")
    return found


def _held(name: str, fast: Tensor, plain: Results, truth: Results) -> tuple[float, float]:
    """-> (error, allowed). Rounding is measured against ‖truth‖∞; for a gradient that is zero in exact arithmetic,
    against the largest one."""
    factor = FORWARD if name == "out" else BACKWARD
    size = worst(truth[name]) or max(worst(t) for t in truth.values())
    return within(fast, plain[name], truth[name], factor=factor, size=size)


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """Memory that torch.empty hands out holds NaN, so that an element that nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # the mode is for the NaN alone
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def in_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values in another dtype, strides kept."""
    return {name: x.to(dtype) for name, x in inputs.items()}
