"""The stopwatch beside a host and a GPU whose times are known: nothing that it times waits for the host."""

from collections.abc import Callable

import pytest
import torch

from megaspec.verify import measured_throughput as module
from megaspec.verify.measured_throughput import AHEAD, Stopwatch

# Of a second: a product, cycles of a clock.
PRODUCT = 2e-4
CYCLES = 1.5e9


class Machine:
    """A host that queues work and a GPU that does it, one after the other."""

    def __init__(self) -> None:
        self.host = 0.0
        """Seconds that went by on the host."""
        self.free = 0.0
        """When the GPU has done all that is queued."""
        self.waited = 0.0
        """Seconds that the GPU spun for."""

    def launch(self, seconds: float, *, queued: float = 1e-6) -> None:
        self.host += queued
        self.free = max(self.host, self.free) + seconds

    def sleep(self, cycles: int) -> None:
        self.waited += cycles / CYCLES
        self.launch(cycles / CYCLES)

    def work(self, seconds: float, *, queued: float, kernels: int = 10) -> Callable[[], None]:
        """A call of so many kernels."""

        def call() -> None:
            for _ in range(kernels):
                self.launch(seconds / kernels, queued=queued / kernels)

        return call


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """In the place of torch.cuda and of the host's clock."""
    machine = Machine()

    class Event:
        def __init__(self, *, enable_timing: bool):
            self.at = 0.0

        def record(self) -> None:
            self.at = max(machine.host, machine.free)

        def synchronize(self) -> None:
            machine.host = max(machine.host, self.at)

        def elapsed_time(self, end: "Event") -> float:
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", machine.sleep)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: machine.launch(PRODUCT))
    monkeypatch.setattr(module, "perf_counter", lambda: machine.host)
    return machine


@pytest.fixture
def watch(machine: Machine) -> Stopwatch:
    watch = Stopwatch(torch.device("cpu"))
    machine.waited = 0.0
    return watch


def test_a_call_that_the_host_queues_in_time_is_timed_behind_products_alone(machine: Machine, watch: Stopwatch) -> None:
    assert watch._ahead * PRODUCT == pytest.approx(AHEAD, rel=0.05)
    assert watch.seconds(machine.work(4e-3, queued=1e-4)) == pytest.approx(4e-3)
    assert machine.waited == 0


@pytest.mark.parametrize("calls", [None, 20])
@pytest.mark.parametrize("queued", [2e-3, 20e-3])
def test_many_small_kernels_take_what_the_gpu_does(
    machine: Machine, watch: Stopwatch, queued: float, calls: int | None
) -> None:
    """The host needs longer for a call than the GPU does, and longer for all of them than the products run."""
    assert watch.seconds(machine.work(1e-3, queued=queued), calls=calls) == pytest.approx(1e-3)
    queued_calls = 3 * (calls or 2) * queued
    assert queued_calls - AHEAD < machine.waited < 1.3 * queued_calls


def test_without_the_wait_times_would_be_the_hosts(
    machine: Machine, watch: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stopwatch, "_wait", lambda self, seconds: None)
    assert watch.seconds(machine.work(1e-3, queued=2e-3), calls=20) == pytest.approx(2e-3)


def test_one_late_run_of_three_is_left_out(machine: Machine, watch: Stopwatch) -> None:
    """Something takes the host's time in the middle of what is timed."""
    calls = iter(range(100))

    def work() -> None:
        if next(calls) == 10:
            machine.host += 1.0
        machine.launch(1e-3)

    assert watch.seconds(work, calls=5) == pytest.approx(1e-3)
