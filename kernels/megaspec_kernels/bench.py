"""Every implementation of an operation: first held to the gate, then timed.

An operation's own bench.py says what it is held to and what is timed (`Bench`); what is here does it.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megaspec_kernels.catalog import CATALOG, NONE, Use, unmet
from megaspec_kernels.gate import Results, shares

ROUNDS = 15
WARM_UP = 4
SECONDS = 0.05
"""What a round lasts at least."""


@dataclass(frozen=True)
class Held:
    """One comparison: what an implementation made, what plain PyTorch made in the same formats, and the fp64 truth."""

    name: str
    fast: Results
    plain: Results
    truth: Results


@dataclass(frozen=True)
class Work:
    """A call as training makes it, with what it moves or computes at least."""

    name: str
    call: Callable[[], object]
    amount: float
    """Bytes that have to be read and written, or floating-point operations."""
    unit: Literal["bytes", "flops"]
    copy: Callable[[], object] | None = None
    """A copy that moves as many bytes, which is timed beside it: see `copy_of`."""


@dataclass(frozen=True)
class Bench:
    """What an operation's bench.py offers, by name of the implementation."""

    held: Callable[[str, torch.device], Iterable[Held]]
    """Shapes that hurt, in the formats that training uses on the device."""
    works: Callable[[str, torch.device], Iterable[Work]]
    """Shapes of a large model on a GPU, small ones on a CPU."""
    uses: Callable[[str], Use] = lambda name: Use()
    """What it asks of its implementation, for the catalog."""


def random(*shape: int, seed: int, device: torch.device) -> Tensor:
    """Normal numbers in fp64 that bf16 holds exactly, so that every format starts from the same."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).bfloat16().double().to(device)


def training_dtype(device: torch.device) -> torch.dtype:
    """The format that runs on a device train in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def compiled_on_gpu(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Plain operations as they are compiled in a layer; on a CPU as they are."""
    if device.type == "cpu":
        return function
    return torch.compile(function, dynamic=False)


class Passes(NamedTuple):
    """Calls of both."""

    forward: Callable[[], object]
    backward: Callable[[], object]


def replayed(function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Passes:
    """Forward and backward pass of a function by themselves, where every input has a gradient. On a GPU as graphs: what
    the host takes to start kernels, which is longer than they run, is not measured."""

    def forward() -> Any:
        return function(*inputs)

    def prepared() -> Passes:
        # memory of the forward pass that is given to the backward pass could be used but once
        with torch._functorch.config.patch(donated_buffer=False):
            out = forward()
            outputs = (out,) if isinstance(out, Tensor) else out

            def backward() -> Any:
                return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

            backward()
        return Passes(forward, backward)

    if inputs[0].device.type == "cpu":
        return prepared()
    # autograd runs a backward pass on the stream of its forward pass, and a graph takes what one stream is given
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        passes = prepared()
        graphs = Passes(_graph(passes.forward, stream), _graph(passes.backward, stream))
    torch.cuda.current_stream().wait_stream(stream)
    return graphs


def copy_of(amount: int, device: torch.device) -> Callable[[], object]:
    """A call that reads and writes memory once, `amount` bytes together: what a kernel that moves as many can reach, on
    the same machine and at the same size. Bits are turned over: how fast CUDA's own copy is depends on where both lie
    (2.7 or 4.2 TB/s of more than 300 MB on an H200)."""
    source = torch.empty(amount // 8, dtype=torch.int32, device=device)
    return partial(torch.bitwise_not, source, out=torch.empty_like(source))


def on_device(call: Callable[[], Any]) -> Callable[[], object]:
    """A call on a GPU without what the host takes to start it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        replay = _graph(call, stream)
    torch.cuda.current_stream().wait_stream(stream)
    return replay


def _graph(call: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], object]:
    """A call that replays what `call` starts on a stream."""
    for _ in range(WARM_UP):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        held = call()

    def replay() -> object:
        graph.replay()
        # its memory belongs to the graph, and is given to nobody else while it is held
        return held

    return replay


@dataclass(frozen=True)
class Row:
    """One line of the table. Without seconds nothing was timed, and `why` says why."""

    operation: str
    implementation: str
    name: str
    error: float | None = None
    """The largest share of what the gate allows, over the outputs and gradients of every comparison."""
    seconds: float | None = None
    """Median of a call."""
    amount: float | None = None
    unit: str = ""
    why: str = ""
    copy_seconds: float | None = None
    """Median of a copy that moves as much, where one was timed."""

    @property
    def is_red(self) -> bool:
        """The gate does not pass."""
        return self.error is not None and not self.error <= 1

    @property
    def cannot_run(self) -> bool:
        """It needs what this machine does not have."""
        return self.error is None


def measure(
    operation: str,
    bench: Bench,
    *,
    device: torch.device,
    sm: int,
    packages: Container[str] = NONE,
    only: Container[str] | None = None,
) -> Iterator[Row]:
    """The rows of an operation, an implementation after the other: best first, as in the catalog. `only`: some."""
    for name in CATALOG[operation].implementations:
        if only is not None and name not in only:
            continue
        lacks = unmet(operation, name, device=device.type, sm=sm, use=bench.uses(name), packages=packages)
        if lacks is not None:
            yield Row(operation, name, "", why=lacks)
            continue
        error, where = _worst(bench.held(name, device))
        if not error <= 1:
            yield Row(operation, name, where, error=error, why="does not pass the gate; no figure")
            continue
        for work in bench.works(name, device):
            seconds = _seconds(work.call, device)
            copy_seconds = None
            if work.copy is not None:
                copy_seconds = _seconds(work.copy, device)
            yield Row(operation, name, work.name, error, seconds, work.amount, work.unit, copy_seconds=copy_seconds)


def _worst(held: Iterable[Held]) -> tuple[float, str]:
    """The largest share of what the gate allows, and what it belongs to."""
    worst = 0.0
    where = ""
    for comparison in held:
        for name, share in shares(comparison.fast, comparison.plain, comparison.truth).items():
            # so that what is no number counts, too
            if not share <= worst:
                worst = share
                where = f"{comparison.name}, {name}"
    return worst, where


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, over rounds of as many as fill SECONDS."""
    for _ in range(WARM_UP):
        call()
    once = _round(call, 1, device)
    calls = max(1, min(100, int(SECONDS / once)))
    return median(_round(call, calls, device) for _ in range(ROUNDS)) / calls


def _round(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of so many calls, on the device's own clock."""
    if device.type == "cpu":
        start = perf_counter()
        for _ in range(calls):
            call()
        return perf_counter() - start
    begun = torch.cuda.Event(enable_timing=True)
    done = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begun.record()
    for _ in range(calls):
        call()
    done.record()
    torch.cuda.synchronize(device)
    return begun.elapsed_time(done) / 1e3
