"""One rank's device under torch's profiler for some steps."""

import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megaspec.nn.range_names import REST, WINDOW
from megaspec.nn.ranges import marked
from megaspec.profiling.power import ClockAndPower, Meter
from megaspec.profiling.trace import Breakdown, breakdown

# Allocations and frees that are remembered: those of the last steps of a large model, and some hundreds of megabytes.
_MOST_ALLOCATIONS = 200_000


@dataclass(frozen=True)
class Recorded:
    """What a recording came to."""

    breakdown: Breakdown
    clock_and_power: ClockAndPower
    trace: dict[str, Any]
    """In Chrome's format, which Perfetto opens."""


class Recording:
    """Made and entered before the steps; `begin` where they begin, `finish` behind them.

    Making it takes up to seconds on a GPU, another number on each rank: ranks meet between that and `begin`. Nothing
    that is computed changes. `memory`: remember who allocated the GPU's memory, for `write_memory`.
    """

    def __init__(self, device: torch.device, *, memory: bool):
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._has_memory = memory and self._is_cuda
        self._stack = ExitStack()
        self._meter = Meter(gpu_uuid(device))
        self._window: AbstractContextManager[object] = marked(WINDOW)
        self._profile: profile | None = None

    def __enter__(self) -> "Recording":
        activities = [ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(ProfilerActivity.CUDA)
        self._drain()
        if self._has_memory:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, device=self._device)
            self._stack.callback(torch.cuda.memory._record_memory_history, enabled=None, device=self._device)
        self._profile = self._stack.enter_context(profile(activities=activities, acc_events=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """The steps begin now."""
        self._drain()
        self._stack.enter_context(self._meter)
        self._stack.enter_context(self._window)

    @contextmanager
    def rest(self) -> Iterator[None]:
        """What happens in here is no part of the steps."""
        self._drain()
        with marked(REST):
            yield
            self._drain()

    def write_memory(self, path: Path) -> bool:
        """Writes the GPU's memory as it is now, for pytorch.org/memory_viz. -> whether there is anything to write."""
        if self._has_memory:
            torch.cuda.memory._dump_snapshot(str(path))
        return self._has_memory

    def finish(self) -> Recorded:
        """The steps have ended, and all that `begin` and this object have started. TraceError: nothing was seen."""
        assert self._profile is not None, "a recording that was not entered"
        self._drain()
        self._stack.close()
        with tempfile.TemporaryDirectory(prefix="megaspec-profile-") as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_bytes())
        return Recorded(breakdown(trace), self._meter.found(), trace)

    def _drain(self) -> None:
        """Until the GPU has done all that it was given."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def packed(trace: dict[str, Any]) -> bytes:
    """A trace as a .json.gz file."""
    # the fastest setting that makes it a tenth: the run waits for it
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=3)


def gpu_uuid(device: torch.device) -> str | None:
    """The name by which NVML knows a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
