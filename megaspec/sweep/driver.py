"""Runs the points of a sweep on its slots: starts what fits, hears how it ended, keeps what it hears. Torch-free."""

import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megaspec.checkpoint.fallback import fallback_dir_in, file_elsewhere
from megaspec.checkpoint.lock import RunLock
from megaspec.core.errors import DataError, Preempted, RecipeError
from megaspec.log.sinks import METRICS
from megaspec.sweep.attempt import Attempt, end_orphan, goes_on, refused
from megaspec.sweep.page import write_page
from megaspec.sweep.points import Checker
from megaspec.sweep.results import Follower, RunResult
from megaspec.sweep.slots import Slots
from megaspec.sweep.state import ENDED, Point, SweepFolder, SweepHead
from megaspec_launchers.signals import StopRequests

POLL_SECONDS = 0.1
PAGE_SECONDS = 3.0
ORPHAN_SECONDS = 40.0
Say = Callable[[str], None]


class PointSearch(Protocol):
    """Where the points of a search come from."""

    def next(self) -> Point | None:
        """Another point to run, or one that was settled without a run; None: all were asked for."""

    def tell(self, point: Point, result: RunResult) -> None:
        """How a point ended."""

    def is_hopeless(self, point: Point, result: RunResult) -> bool:
        """Whether a point that runs is worth no more steps."""


class SweepTable:
    """Every point of a sweep as it is now, with its numbers; changes go to the folder."""

    def __init__(self, folder: SweepFolder, head: SweepHead):
        self.folder = folder
        self.head = head
        self._followers: dict[int, Follower] = {}
        self.reload()

    def reload(self) -> None:
        """Reads every point anew: jobs of a Hydra launcher write them themselves."""
        self.points = {point.number: point for point in self.folder.points()}

    def put(self, point: Point) -> None:
        """Keeps a change of a point, or a new one."""
        # the file first: what the table says has happened is never lost with this process
        self.folder.append(point)
        before = self.points.get(point.number)
        if point.recipe is None and before is not None:
            point = point.model_copy(update={"recipe": before.recipe})
        self.points[point.number] = point

    def follower(self, point: Point) -> Follower:
        """The numbers of a point's run."""
        if point.number not in self._followers:
            elsewhere = file_elsewhere(fallback_dir_in(point.recipe), self.folder.run(point), METRICS)
            path = Path(point.folder, METRICS)
            self._followers[point.number] = Follower(self.folder.path, path, elsewhere=elsewhere)
        return self._followers[point.number]

    def set_state(self, state: str) -> None:
        """Keeps what became of the sweep."""
        self.head = self.head.model_copy(update={"state": state})
        self.folder.write_head(self.head)

    def results(self) -> dict[int, RunResult]:
        """What every point has come to, by its number."""
        return {number: self.follower(point).read() for number, point in self.points.items()}

    def write_page(self, *, running: bool) -> None:
        """The page as of now."""
        write_page(self.folder.path, self.head, list(self.points.values()), self.results(), running=running)


class Driver:
    """One life of a sweep. Use `run` in the main thread, with `stop` entered."""

    def __init__(
        self,
        table: SweepTable,
        slots: Slots,
        checker: Checker,
        stop: StopRequests,
        say: Say,
        *,
        search: PointSearch | None = None,
    ):
        self._table = table
        self._slots = slots
        self._checker = checker
        self._stop = stop
        self._say = say
        self._search = search
        self._running: dict[int, Attempt] = {}
        self._stopping = 0
        self._halted = False
        self._page_at = 0.0

    def run(self) -> list[int]:
        """Runs every point that has not ended. -> exit codes of those that failed, in the order in which they did."""
        self._codes: list[int] = []
        self._waiting = settled(self._table)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            while True:
                self._start_what_fits()
                # after a request to stop nothing is started, so the sweep ends when the last run has
                if not self._running:
                    break
                # a signal ends the wait at once
                if selector.select(POLL_SECONDS):
                    self._stop.clear()
                self._pass_on_stop()
                self._collect()
                self._prune()
                self._refresh()
        return self._codes

    def _start_what_fits(self) -> None:
        while not self._halted and not self._stop.count:
            number = self._first_that_fits()
            if number is not None:
                self._waiting.remove(number)
                self._start(self._table.points[number])
                continue
            # a search is asked as late as can be, when a slot is free, so that it knows how the others ended
            if self._waiting or not self._slots.fits(1) or not self._ask_for_one():
                return

    def _first_that_fits(self) -> int | None:
        """The first of the points that wait for which a slot is free; a small one may overtake a large one."""
        for number in self._waiting:
            if self._slots.fits(self._table.points[number].ranks):
                return number
        return None

    def _ask_for_one(self) -> bool:
        """Takes another point of the search in. -> False when there is none."""
        if self._search is None:
            return False
        point = self._search.next()
        if point is None:
            return False
        self._table.put(point)
        if point.state == "waiting":
            self._waiting.append(point.number)
        else:
            self._tell(point, f"{point.state}: {point.reason}")
        return True

    def _start(self, point: Point) -> None:
        gpus = self._slots.take(point.ranks)
        threads = None
        if not gpus and self._slots.most > 1:
            # cores of the machine / runs at once / ranks of a run
            threads = max(1, self._checker.target.cores // self._slots.most // point.ranks)
        try:
            attempt = Attempt(self._table.folder, point, self._checker, gpus=gpus, threads=threads)
        except (RecipeError, DataError) as error:
            self._slots.give(gpus)
            self._end(refused(point, error), 0.0)
            return
        self._running[point.number] = attempt
        self._table.follower(point).restart()
        self._table.put(attempt.point)
        text = "starts"
        if point.state == "interrupted":
            text = "goes on"
        if gpus:
            text += f" on GPU {','.join(gpus)}"
        self._tell(point, text)

    def _pass_on_stop(self) -> None:
        if self._stop.count <= self._stopping:
            return
        self._stopping = self._stop.count
        if self._stopping == 1:
            self._say(
                f"{self._stop.last}: {len(self._running)} running points finish their step and save; "
                "another signal kills them at once"
            )
        for attempt in self._running.values():
            attempt.ask_to_stop(then="interrupted")
            if self._stopping > 1:
                attempt.kill()

    def _collect(self) -> None:
        for number, attempt in list(self._running.items()):
            point = attempt.ended()
            if point is not None:
                del self._running[number]
                self._slots.give(attempt.gpus)
                self._end(point, time.monotonic() - attempt.began)

    def _end(self, point: Point, seconds: float) -> None:
        self._table.put(point)
        result = self._table.follower(point).read()
        metric = self._table.head.metric
        value = result.metric(metric)
        text = f"{point.state} after {seconds:.1f} s"
        if value is not None:
            text += f", {metric} {value:.6g}"
        if point.reason:
            text += f": {point.reason}"
        self._tell(point, text)
        if self._search is not None and point.state in ENDED:
            self._search.tell(point, result)
        if point.state == "failed":
            assert point.code is not None, f"point {point.number} failed without a code"
            self._codes.append(point.code)
            if not self._table.head.spec.keep_going and not self._halted:
                self._halted = True
                self._say("sweep.keep_going=false: no other point is started")

    def _prune(self) -> None:
        if self._search is None:
            return
        for attempt in self._running.values():
            result = self._table.follower(attempt.point).read()
            if self._search.is_hopeless(attempt.point, result):
                attempt.ask_to_stop(then="pruned")

    def _refresh(self) -> None:
        if time.monotonic() >= self._page_at:
            self._table.write_page(running=True)
            self._page_at = time.monotonic() + max(PAGE_SECONDS, len(self._table.points) / 100)

    def _tell(self, point: Point, text: str) -> None:
        count = len(self._table.points)
        if self._search is not None:
            count = self._table.head.spec.trials
        self._say(f"point {point.number} of {count} ({' '.join(point.overrides)}) {text}")


def to_run(table: SweepTable) -> list[int]:
    """Numbers of the points that have not ended, and with sweep.again=failed of those that failed."""
    runs_failed_again = table.head.spec.again == "failed"
    numbers = []
    for number, point in table.points.items():
        if point.state not in ENDED or (runs_failed_again and point.state == "failed"):
            numbers.append(number)
    return numbers


def settled(table: SweepTable) -> list[int]:
    """What `to_run` says, after what a sweep that was killed has left running has come to its end."""
    for number in to_run(table):
        point = table.points[number]
        if point.state == "running":
            end_orphan(point, table.folder.run(point), ORPHAN_SECONDS)
            table.put(_after_kill(table, point))
    return to_run(table)


def look(table: SweepTable) -> bool:
    """Whether a process runs the sweep. Where none does, the table, and no file, is put right about what was killed.

    RecipeError: the run of a point has links in place of its files.
    """
    if RunLock(table.folder.path).is_held():
        return True
    for number, point in table.points.items():
        if point.state != "running":
            continue
        table.folder.refuse_links(point.folder)
        if not goes_on(point, table.folder.run(point)):
            table.points[number] = _after_kill(table, point)
    if table.head.state == "running":
        table.head = table.head.model_copy(update={"state": "interrupted"})
    return False


def _after_kill(table: SweepTable, point: Point) -> Point:
    """A point that was running when its sweep was killed: its run may have come to its end all the same."""
    if table.follower(point).read().is_done:
        return point.to("done", code=0)
    return point.to("interrupted")


def exit_code(table: SweepTable, failed: list[int], *, stopped: bool) -> int:
    """75: points are left since the sweep was stopped. Else the first failure, of this life or an earlier one. Else 75
    when a point was stopped from outside, or 0.

    `failed`: exit codes of the points that failed in this life, in the order in which they did.
    """
    points = table.points.values()
    if stopped:
        return Preempted.exit_code
    if failed:
        return failed[0]
    for point in points:
        if point.state == "failed" and point.code:
            return point.code
    if any(point.state == "interrupted" for point in points):
        return Preempted.exit_code
    return 0
