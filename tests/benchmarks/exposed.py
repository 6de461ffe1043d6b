"""Where a GPU's time goes in a step: arithmetic, messages that nothing hides, and neither. From torch's profiler."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]


@dataclass(frozen=True)
class Where:
    """Milliseconds of one rank, a step."""

    step_ms: float
    compute_ms: float
    """Kernels and copies that are no messages."""
    messages_ms: float
    """NCCL's kernels, waiting for other ranks included."""
    exposed_ms: float
    """Messages beside which nothing is computed."""
    idle_ms: float
    """Neither."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as intervals that don't touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def where(compute: Iterable[Interval], messages: Iterable[Interval], *, steps: int) -> Where:
    """From the kernels of some steps, in microseconds."""
    compute, messages = union(compute), union(messages)
    both = union([*compute, *messages])
    whole = both[-1][1] - both[0][0] if both else 0.0
    parts = whole, length(compute), length(messages), length(both) - length(compute), whole - length(both)
    return Where(*(round(part / 1e3 / steps, 3) for part in parts))


def profiled(step: Callable[[int], object], *, steps: int = 2) -> dict[str, float]:
    """`Where` of some steps on this rank's GPU, as plain data.

    Profilers start at their own pace: one more step comes first, at whose end the ranks stand together.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step(0)
        torch.cuda.synchronize()
        torch.cuda._sleep(1)  # a kernel to be known by
        for i in range(steps):
            step(i)
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == DeviceType.CUDA and e.time_range.elapsed_us() > 0]
    begun = max(e.time_range.end for e in kernels if "spin_kernel" in e.name)
    spans = {False: [], True: []}
    for kernel in kernels:
        if kernel.time_range.start >= begun:
            spans["nccl" in kernel.name.lower()].append((kernel.time_range.start, kernel.time_range.end))
    return asdict(where(spans[False], spans[True], steps=steps))
