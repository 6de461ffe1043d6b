"""What all tests share: GPUs for workers, ranks, and lines that tests have to say, which stand together at the end."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import pytest

from megaspec.estimate.target import gpu_identifiers
from megaspec_launchers.local import PRELOADED, launch
from tests.ranks import RankPool
from tests.warm import WarmFactory, warm_point

Tell = Callable[[str], None]
_PROPERTY = "tell"


def pytest_configure() -> None:
    """Shares the machine among the workers of `-n`, before torch is loaded.

    What a worker calls device 0 is another GPU than its neighbours' device 0. All GPUs stay visible, for tests with a
    rank to each. A worker computes on one core: with a thread for each core of each worker threads wait for each other
    while they keep the cores busy, and some tests took five to ten times as long.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gpus = gpu_identifiers()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(begun_at(gpus, int(worker.removeprefix("gw"))))


def begun_at(gpus: Sequence[str], index: int) -> list[str]:
    """The same GPUs in the same circle, that of `index` first."""
    first = index % len(gpus)
    return [*gpus[first:], *gpus[:first]]


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Says a line in the summary."""
    return lambda line: request.node.user_properties.append((_PROPERTY, line))


@pytest.fixture(scope="module", autouse=True)
def _gpu_memory_is_given_back() -> Iterator[None]:
    """What a module's tests have freed goes back to the GPU, which other workers and their ranks share. Of 12 workers
    on two H200 some found no memory for new ranks; who held it was not looked into."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[RankPool]:
    """Ranks on GPUs, one each."""
    # blocks are compiled while the others wait
    with RankPool(device="cuda", timeout=300) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _warm_process() -> Iterator[WarmFactory]:
    with WarmFactory((*PRELOADED, launch.__kwdefaults__["entry"].partition(":")[0])) as made:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("CUDA_VISIBLE_DEVICES", "")
            environment.delenv("RANK", raising=False)
            made.open()
        yield made


@pytest.fixture
def warm_launches(_warm_process: WarmFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that are run in this process take their ranks from one process, instead of loading torch for each.

    For tests that set nothing in the environment: ranks have that of the session, without GPUs.
    """
    # a second of imports, which few tests need
    from megaspec.commands import bench_step, evaluate, generate, starting, verify
    from megaspec.sweep import child

    for command in (bench_step, evaluate, generate, starting):
        monkeypatch.setattr(command, "launch", partial(launch, factory=_warm_process))
    monkeypatch.setattr(child, "start", warm_point)
    monkeypatch.setattr(verify, "RankFactory", lambda *_, **__: nullcontext(_warm_process))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    done = [one for reports in terminalreporter.stats.values() for one in reports if getattr(one, "when", "") == "call"]
    lines = [line for one in done for name, line in one.user_properties if name == _PROPERTY]
    if lines:
        terminalreporter.section("what tests say")
        for line in lines:
            terminalreporter.line(line)


def pytest_collection_finish() -> None:
    """Fourteen thousand collected tests stay: no collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()
