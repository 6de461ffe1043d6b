"""Rank 0's copies of what is published to checkpoint.copy_to, by a process of its own: neither training nor the next
save waits for a store. Torch-free."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaspec.checkpoint.failures import KINDS
from megaspec.checkpoint.remote import FIRST_WAIT_SECONDS, Found, Identity, Owner
from megaspec.checkpoint.writer_process import WriterProcess
from megaspec.core.errors import WriteError, printable


@dataclass(frozen=True)
class Tidying:
    """What else of the copies goes: an earlier start may have been killed before it had deleted them.

    `may_go`: of what is there, and the step that was copied last by then, those to look at. `goes`: whether one of
    these does, by whose it is and that step.
    """

    may_go: Callable[[Found, int], list[int]]
    goes: Callable[[Identity, int], bool]


class Copier:
    """One copy at a time. Where several wait, the newest is copied and the others are told to be left out.

    A copy that fails is told, and the next checkpoint is copied all the same; `finish` raises what the last one met.
    What was deleted in the run folder is deleted there once the newest is whole there: at no time there is none. Then
    `tidying` is asked what else is there that nobody keeps. `owner`: the run whose copies they are.
    """

    def __init__(
        self,
        url: str,
        run_dir: Path,
        *,
        owner: Owner,
        tidying: Tidying | None = None,
        wait_seconds: float = FIRST_WAIT_SECONDS,
    ):
        self._url = url
        self._tidying = tidying
        self._is_listed = False
        self._to_look: list[int] = []
        """Steps of copies whose owner is asked for."""
        self._newest_listed = 0
        """The step that was copied last when it was looked at what is there."""
        self._common = {"url": url, "wait_seconds": wait_seconds, "run_dir": str(run_dir), "owner": asdict(owner)}
        self._process = WriterProcess({"run_dir": str(run_dir), "token": 0, "chunk_bytes": 8})
        self._to_copy: dict[str, Any] | None = None
        self._to_drop: deque[int] = deque()
        self._under_way: dict[str, Any] | None = None
        self._newest: int | None = None
        """Step of the copy that was asked for last."""
        self._is_newest_there = False
        self._failure: WriteError | None = None

    def check(self, refuse: Callable[[Sequence[Identity]], None]) -> None:
        """Whether what is copied will arrive, and makes the place this run's own. `refuse` is given what says whose the
        place was, and raises where that is another run.

        WriteError: it won't, and why; UsageError: a package is missing.
        """
        refuse([Identity(**one) for one in self._answered("check")])
        self._answered("claim")

    def _answered(self, what: str) -> Any:
        """What a job comes to that is waited for. Raises what it met."""
        self._process.send({"do": what, **self._common})
        answer = self._process.wait()
        if "value" not in answer:
            raise KINDS[answer["kind"]](answer["lines"])
        return answer["value"]

    def copy(self, path: Path, step: int) -> None:
        """A checkpoint is published."""
        if self._to_copy is not None:
            left_out = self._to_copy["step"]
            self._tell(f"step {left_out} is not copied to {self._url}: step {step} is, which is newer")
        self._to_copy = {"do": "copy", **self._common, "path": str(path), "step": step}
        self._newest = step
        self._is_newest_there = False
        self._is_listed = False
        if step in self._to_drop:
            # it was saved anew
            self._to_drop.remove(step)
        self.poll()

    def drop(self, step: int) -> None:
        """A checkpoint is not in the run folder any more: its copy goes as well."""
        if self._to_copy is not None and self._to_copy["step"] == step:
            self._to_copy = None
        if step == self._newest:
            # another one comes before it goes
            self._is_newest_there = False
        self._to_drop.append(step)
        self.poll()

    def poll(self) -> None:
        """Takes in what is done, and gives the process more to do."""
        if self._under_way is not None:
            answer = self._process.poll()
            if answer is None:
                return
            self._done(answer)
        if self._under_way is not None:
            return
        if self._to_copy is not None:
            job = self._to_copy
            self._to_copy = None
            self._start(job)
        elif not self._is_newest_there:
            return
        elif self._to_drop:
            self._start({"do": "drop", **self._common, "step": self._to_drop.popleft()})
        elif self._to_look:
            self._start({"do": "look", **self._common, "steps": self._to_look})
            self._to_look = []
        elif self._tidying is not None and not self._is_listed:
            self._is_listed = True
            self._start({"do": "list", **self._common})

    def _start(self, job: dict[str, Any]) -> None:
        self._under_way = job
        self._process.send(job)

    def finish(self, seconds: float = float("inf")) -> bool:
        """Waits for all copies, for about so many seconds. -> whether they are made. WriteError: the newest could not
        be."""
        until = time.monotonic() + seconds
        self.poll()
        while self._under_way is not None:
            left = until - time.monotonic()
            if left <= 0:
                return False
            answer = self._process.wait_some(min(left, 60.0))
            if answer is not None:
                self._done(answer)
            self.poll()
        if self._failure is not None:
            raise self._failure
        return True

    def close(self) -> None:
        """Gives up what is under way; the next start copies the newest."""
        self._process.abandon()
        self._to_copy = None
        self._to_drop.clear()
        self._to_look = []
        self._under_way = None

    def _done(self, answer: dict[str, Any]) -> None:
        job = self._under_way
        self._under_way = None
        assert job is not None, "no job is under way"
        is_copy = job["do"] == "copy"
        if "value" in answer:
            match job["do"]:
                case "copy":
                    self._failure = None
                    self._is_newest_there = job["step"] == self._newest and job["step"] not in self._to_drop
                case "list":
                    self._newest_listed = self._newest
                    self._to_look = self._tidying.may_go(Found(**answer["value"]), self._newest)
                case "look":
                    self._forgotten([Identity(**one) for one in answer["value"]])
            return
        if answer.get("died") and not job.get("again"):
            # begun anew: a store that is at fault answers, or does not, in its own words
            self._start(job | {"again": True})
            return
        error = KINDS[answer["kind"]](answer["lines"])
        again = "it is tried again behind the next copy"
        match job["do"]:
            case "copy":
                self._tell(f"step {job['step']} was not copied: {error}")
            case "drop":
                self._tell(f"step {job['step']} was not deleted there: {error}; {again}")
            case _:
                self._tell(f"what an earlier start left there was not looked at: {error}; {again}")
        # that it was deleted meanwhile is no failure of the store
        if is_copy and Path(job["path"]).is_dir():
            self._failure = WriteError(error.problems)

    def _forgotten(self, looked_at: list[Identity]) -> None:
        """Deletes those that nobody keeps, but for what was asked to be copied meanwhile."""
        wanted = {self._newest}
        if self._to_copy is not None:
            wanted.add(self._to_copy["step"])
        gone = []
        for one in looked_at:
            if one.step not in wanted and self._tidying.goes(one, self._newest_listed):
                gone.append(one.step)
        self._to_drop += gone
        if gone:
            steps = ", ".join(map(str, gone))
            self._tell(f"{self._url}: what an earlier start had to leave there is deleted: step {steps}")

    def _tell(self, text: str) -> None:
        print(printable(f"megaspec: {text}", keep="\n"), file=sys.stderr, flush=True)
