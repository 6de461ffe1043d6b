"""Where a GPU's time goes in a step: arithmetic, messages that nothing hides, and neither. From torch's profiler."""

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megaspec.profiling.intervals import Interval, where


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
    compute: list[Interval] = []
    messages: list[Interval] = []
    for kernel in kernels:
        if kernel.time_range.start >= begun:
            spans = messages if "nccl" in kernel.name.lower() else compute
            spans.append((kernel.time_range.start, kernel.time_range.end))
    return asdict(where(compute, messages, steps=steps))
