"""Runs the points of a sweep on its slots: starts what fits, hears how it ended, keeps what it hears. Torch-free."""

import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megaspec.checkpoint.lock import RunLock
from megaspec.core.errors import DataError, Preempted, RecipeError
from megaspec.sweep.attempt import Attempt, end_orphan, goes_on, refused
from megaspec.sweep.page import write_page
from megaspec.sweep.points import Checker
from megaspec.sweep.results import METRICS, Follower, Result
from megaspec.sweep.slots import Slots
from megaspec.sweep.state import ENDED, Point, SweepFolder, SweepHead
from megaspec_launchers.signals import StopRequests

POLL_SECONDS = 0.1
PAGE_SECONDS = 3.0
ORPHAN_SECONDS = 40.0
Say = Callable[[str], None]


class Search(Protocol):
    """Where the points of a search come from."""

    def next(self) -> Point | None:
        """Another point to run, or one that was settled without a run; None: all were asked for."""

    def tell(self, point: Point, result: Result) -> None:
        """How a point ended."""

    def is_hopeless(self, point: Point, result: Result) -> bool:
        """Whether a point that runs is worth no more steps."""


class Table:
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
        self.folder.append(point)
        before = self.points.get(point.number)
        recipe = before.recipe if before is not None and point.recipe is None else point.recipe
        self.points[point.number] = point.model_copy(update={"recipe": recipe})

    def follower(self, point: Point) -> Follower:
        """The numbers of a point's run."""
        return self._followers.setdefault(point.number, Follower(self.folder.path, Path(point.folder, METRICS)))

    def set_state(self, state: str) -> None:
        """Keeps what became of the sweep."""
        self.head = self.head.model_copy(update={"state": state})
        self.folder.write_head(self.head)

    def write_page(self, *, running: bool) -> None:
        """The page as of now."""
        results = {number: self.follower(point).read() for number, point in self.points.items()}
        write_page(self.folder.path, self.head, list(self.points.values()), results, running=running)


class Driver:
    """One life of a sweep. Use `run` in the main thread, with `stop` entered."""

    def __init__(
        self,
        table: Table,
        slots: Slots,
        checker: Checker,
        stop: StopRequests,
        say: Say,
        *,
        search: Search | None = None,
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
                if not self._running:
                    break
                if selector.select(POLL_SECONDS):
                    self._stop.clear()
                self._pass_on_stop()
                self._collect()
                self._prune()
                self._refresh()
        return self._codes

    def _start_what_fits(self) -> None:
        while not self._halted and not self._stop.count:
            number = next((n for n in self._waiting if self._slots.fits(self._table.points[n].ranks)), None)
            if number is None and (self._waiting or not self._slots.fits(1) or not self._ask_for_one()):
                return
            if number is not None:
                self._waiting.remove(number)
                self._start(self._table.points[number])

    def _ask_for_one(self) -> bool:
        """Takes another point of the search in. -> False when there is none."""
        point = self._search.next() if self._search is not None else None
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
        again = "goes on" if point.state == "interrupted" else "starts"
        self._tell(point, again + (f" on GPU {','.join(gpus)}" if gpus else ""))

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
        value = result.metric(self._table.head.metric)
        numbers = "" if value is None else f", {self._table.head.metric} {value:.6g}"
        why = f": {point.reason}" if point.reason else ""
        self._tell(point, f"{point.state} after {seconds:.1f} s{numbers}{why}")
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
        count = self._table.head.spec.trials if self._search is not None else len(self._table.points)
        self._say(f"point {point.number} of {count} ({' '.join(point.overrides)}) {text}")


def to_run(table: Table) -> list[int]:
    """Numbers of the points that have not ended, and with sweep.again=failed of those that failed."""
    again = table.head.spec.again == "failed"
    return [n for n, p in table.points.items() if p.state not in ENDED or (again and p.state == "failed")]


def settled(table: Table) -> list[int]:
    """What `to_run` says, after what a sweep that was killed has left running has come to its end."""
    for number in to_run(table):
        point = table.points[number]
        if point.state == "running":
            end_orphan(point, table.folder.run(point), ORPHAN_SECONDS)
            table.put(_left(table, point))
    return to_run(table)


def look(table: Table) -> bool:
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
            table.points[number] = _left(table, point)
    if table.head.state == "running":
        table.head = table.head.model_copy(update={"state": "interrupted"})
    return False


def _left(table: Table, point: Point) -> Point:
    """A point that was running when its sweep was killed."""
    is_done = table.follower(point).read().is_done
    return point.to("done", code=0) if is_done else point.to("interrupted")


def exit_code(table: Table, failed: list[int], *, stopped: bool) -> int:
    """75: points are left since the sweep was stopped. Else the first failure, of this life or an earlier one. Else 75
    when a point was stopped from outside, or 0."""
    states = [p.state for p in table.points.values()]
    if stopped:
        return Preempted.exit_code
    earlier = [p.code for p in table.points.values() if p.state == "failed" and p.code]
    if failed or earlier:
        return (failed or earlier)[0]
    return Preempted.exit_code if "interrupted" in states else 0
