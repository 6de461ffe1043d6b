"""From the trace that torch's profiler exports (Chrome's format) to what ran, when, and of which kind. Torch-free.

A kernel is tied to the call of the host that launched it by their `correlation`, and that call to the operations around
it by time and thread. A node of a backward pass is tied to the forward operation that made it by the `Sequence number`
that both have, and `Fwd thread id`, which is 0 in the forward pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaspec.nn.range_names import REST, WINDOW
from megaspec.profiling.classify import OF_RANGE, kind_of_kernel, kind_on_host
from megaspec.profiling.intervals import Interval, Span, shared_out, union, within, without
from megaspec.profiling.kinds import COMMUNICATION, IDLE, KINDS, OTHER

_OPERATIONS = ("cpu_op", "user_annotation")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Of what is called `other`.
_MOST_NAMED = 8
_LONGEST_NAME = 120


class TraceError(ValueError):
    """A trace that says nothing of a device's time."""


class Work(NamedTuple):
    """Something that kept the device busy, in microseconds."""

    name: str
    kind: str
    start: float
    end: float
    bytes: int | None = None
    """That a copy moved, where the profiler says so."""
    count: int = 1
    """0 where it is a further part of one that was counted."""


@dataclass
class Operation:
    """A stretch of the host's program that has a name."""

    name: str
    thread: Any
    start: float
    end: float
    sequence: int | None = None
    """Number of the node of autograd's graph that it makes, or is."""
    forward_thread: int = 0
    """0 in a forward pass; of a node of a backward pass the number of the thread that made it."""
    around: "Operation | None" = None
    inside: list["Operation"] = field(default_factory=list)

    def chain(self) -> Iterator["Operation"]:
        """This one and all around it, the innermost first."""
        here: Operation | None = self
        while here is not None:
            yield here
            here = here.around


@dataclass(frozen=True)
class KindOfTime:
    """What one kind of work took in the steps that were profiled, all together."""

    seconds: float
    """Its share of the time: all kinds together make up the steps."""
    busy_seconds: float
    """While any of it was under way, beside other work too."""
    count: int
    """Kernels; on a CPU operations."""
    copied_bytes: int | None = None
    """By the profiler's own word."""


@dataclass(frozen=True)
class Breakdown:
    """Where the time of the steps of a profile went, on one device."""

    seconds: float
    """Of all steps, without evaluations and saves between them."""
    kinds: dict[str, KindOfTime]
    """Every one of KINDS."""
    largest_other: dict[str, float]
    """Seconds by name, the longest first."""

    @property
    def accounted(self) -> float:
        """Share of the time whose kind is known; the rest is `other`."""
        return 1 - self.kinds[OTHER].seconds / self.seconds


def breakdown(trace: Mapping[str, Any]) -> Breakdown:
    """Of a trace that has one range WINDOW. On a device where there is one in it, else on the CPU of that range's
    thread. TraceError: it holds no such range, or nothing ran in it."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    operations = _operations(events)
    windows, main = _windows(operations)
    works = list(_device_work(events, operations, main))
    if not works:
        if any(event.get("cat") in _LAUNCHES for event in events):
            raise TraceError("no kernel was recorded: another profiler may hold the GPU's counters")
        works = list(_host_work(operations, main))
    works = [work for work in works if work.kind != IDLE]
    seconds = sum(end - start for start, end in windows)
    if seconds <= 0:
        raise TraceError("nothing ran in the steps")
    shares = shared_out([Span(work.start, work.end, work.kind) for work in works], windows)
    by_kind: dict[str, list[Work]] = {kind: [] for kind in KINDS}
    for work in works:
        if any(work.start < end and work.end > start for start, end in windows):
            by_kind[work.kind].append(work)
    kinds = {}
    for kind, found in by_kind.items():
        busy = within([(work.start, work.end) for work in found], windows)
        copied = [work.bytes for work in found if work.bytes is not None]
        kinds[kind] = KindOfTime(
            seconds=shares.get(kind, 0.0) / 1e6,
            busy_seconds=sum(end - start for start, end in busy) / 1e6,
            count=sum(work.count for work in found),
            copied_bytes=sum(copied) if copied else None,
        )
    return Breakdown(seconds / 1e6, kinds, _largest(by_kind[OTHER]))


def _largest(works: Iterable[Work]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for work in works:
        seconds[work.name[:_LONGEST_NAME]] += (work.end - work.start) / 1e6
    longest = sorted(seconds, key=lambda name: -seconds[name])
    return {name: seconds[name] for name in longest[:_MOST_NAMED]}


def _windows(operations: Iterable[Operation]) -> tuple[list[Interval], Any]:
    """The steps, and the thread that trains."""
    found = [one for one in operations if one.name == WINDOW]
    if not found:
        raise TraceError(f"the trace holds no range {WINDOW}")
    rests = [(one.start, one.end) for one in operations if one.name == REST]
    return without([(one.start, one.end) for one in found], rests), found[0].thread


def _operations(events: Iterable[Mapping[str, Any]]) -> list[Operation]:
    """In the order in which they begin, those around others first, with what is around each."""
    found = []
    for event in events:
        if event.get("cat") in _OPERATIONS:
            args = event.get("args", {})
            found.append(
                Operation(
                    name=event["name"],
                    thread=event["tid"],
                    start=event["ts"],
                    end=event["ts"] + event["dur"],
                    sequence=args.get("Sequence number"),
                    forward_thread=args.get("Fwd thread id", 0),
                )
            )
    found.sort(key=lambda one: (one.start, -one.end))
    # of each thread, those that the one at hand may lie in
    open_ones: dict[Any, list[Operation]] = defaultdict(list)
    for one in found:
        stack = open_ones[one.thread]
        while stack and stack[-1].end <= one.start:
            stack.pop()
        # a name of a thread's own (gloo's) may outlast the operation that it begins in: then it lies in none
        while stack and stack[-1].end < one.end:
            stack.pop()
        if stack:
            one.around = stack[-1]
            stack[-1].inside.append(one)
        stack.append(one)
    return found


class _Ranges:
    """Which range an operation belongs to, backward passes included."""

    def __init__(self, operations: list[Operation], main: Any):
        self._main = main
        self._known: dict[int, str | None] = {}
        # (made by the thread that trains, number) -> the forward operation that made the node: the last that has it
        self._makers: dict[tuple[bool, int], Operation] = {}
        threads = set()
        for one in operations:
            if one.sequence is None:
                continue
            if one.forward_thread == 0:
                self._makers[one.thread == main, one.sequence] = one
            else:
                threads.add(one.forward_thread)
        # the thread that trains was the first to run an operation; the other one computes again in a backward pass
        self._first_thread = min(threads, default=0)

    def kind(self, operation: Operation | None) -> str | None:
        """Of the range that an operation lies in, or whose backward pass it is part of; None: in none."""
        todo = []
        here = operation
        while here is not None and id(here) not in self._known:
            todo.append(here)
            here = here.around
        kind = None if here is None else self._known[id(here)]
        for one in reversed(todo):
            kind = self._own(one) or kind
            self._known[id(one)] = kind
        return kind

    def _own(self, one: Operation) -> str | None:
        if one.name in OF_RANGE:
            return OF_RANGE[one.name]
        if one.forward_thread == 0 or one.sequence is None:
            return None
        maker = self._makers.get((one.forward_thread == self._first_thread, one.sequence))
        if maker is None:
            return None
        # of forward operations the ranges around them alone: no node was made by a node
        for around in maker.chain():
            if around.name in OF_RANGE:
                return OF_RANGE[around.name]
        return None


def _device_work(events: list[Mapping[str, Any]], operations: list[Operation], main: Any) -> Iterator[Work]:
    """Kernels and copies, each with the kind of what launched it."""
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not on_device:
        return
    launched_in = _launches(events, operations)
    ranges = _Ranges(operations, main)
    for event in on_device:
        args = event.get("args", {})
        operation = launched_in.get(args.get("correlation"))
        around = [] if operation is None else [one.name for one in operation.chain()]
        kind = kind_of_kernel(event["name"], around, ranges.kind(operation))
        yield Work(event["name"], kind, event["ts"], event["ts"] + event["dur"], args.get("bytes"))


def _launches(events: Iterable[Mapping[str, Any]], operations: list[Operation]) -> dict[int, Operation]:
    """Correlation -> the innermost operation around the call that launched a kernel."""
    calls = []
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in _LAUNCHES and correlation is not None:
            calls.append((event["ts"], event["tid"], correlation))
    calls.sort(key=lambda call: call[0])
    found = {}
    open_ones: dict[Any, list[Operation]] = defaultdict(list)
    number = 0
    for time, thread, correlation in calls:
        while number < len(operations) and operations[number].start <= time:
            open_ones[operations[number].thread].append(operations[number])
            number += 1
        stack = open_ones[thread]
        while stack and stack[-1].end <= time:
            stack.pop()
        if stack:
            found[correlation] = stack[-1]
    return found


def _host_work(operations: list[Operation], main: Any) -> Iterator[Work]:
    """On a CPU: what each operation of the thread that trains takes outside of those that it calls, and messages, which
    gloo's own threads send."""
    ranges = _Ranges(operations, main)
    kinds = {}
    for one in operations:
        if one.thread == main:
            kinds[id(one)] = kind_on_host([around.name for around in one.chain()], ranges.kind(one))
    for one in operations:
        if one.name.startswith("gloo:"):
            yield Work(one.name, COMMUNICATION, one.start, one.end)
            continue
        if one.thread != main:
            continue
        # of operations that call others those count which do the work
        count = int(all(kinds[id(below)] == IDLE for below in one.inside))
        # gloo's ranges on this thread are messages, in which it computes nothing
        inner = [(below.start, below.end) for below in one.inside if not below.name.startswith("gloo:")]
        for start, end in without([(one.start, one.end)], union(inner)):
            yield Work(one.name, kinds[id(one)], start, end, count=count)
            count = 0
