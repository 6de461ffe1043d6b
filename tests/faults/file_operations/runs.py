"""Runs in which one file operation fails: started in this process, with ranks from a warm one."""

import errno
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HOOK = Path(__file__).parent
ROOT = HOOK.parents[2]

# before anything of the project is imported: some of it keeps functions of `os` by name
sys.path.insert(0, str(HOOK))
import sitecustomize as hook  # noqa: E402

SMALL = (
    "recipe=hello", "data=synthetic", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=2",
    "model.vocab_size=32", "data.vocab_size=32", "data.seq_len=8", "train.global_batch=4", "train.sample=null",
    "train.eval_every=3", "train.eval_samples=2", "checkpoint.every=2", "checkpoint.keep=2",
    "optim.schedule.warmup_steps=2", "log.console=plain", "log.every=1", "log.tensorboard=true",
    "log.report.every_seconds=0.2", "launcher.timeout_seconds=20", "launcher.grace_seconds=10",
    'log.alerts=[{metric: loss, comparison: above, value: 0.1}]',
)  # fmt: skip


@dataclass
class Ended:
    """How a command ended."""

    code: int | None
    said: str
    seconds: float
    log: list[tuple[str, str]] = field(default_factory=list)
    failed: bool = False
    """Whether the planned operation came, and failed."""


class Bench:
    """Runs commands; `folder` is its own."""

    def __init__(self, folder: Path, factory):
        self.folder = folder
        self.factory = factory
        self.plan = folder / "plan.json"
        os.environ[hook.VARIABLE] = str(self.plan)
        hook.install()

    def command(self, words, roots, *, fail=None, logs=False) -> Ended:
        from megaspec.cli import main

        log = self.folder / "operations.log"
        once = self.folder / "once"
        for path in (log, once):
            path.unlink(missing_ok=True)
        if fail is not None:
            fail = {"nth": 1, "lasts": False, "once": str(once)} | fail
        self.plan.write_text(
            json.dumps({"roots": list(map(str, roots)), "log": str(log) if logs else None, "fail": fail})
        )
        hook._of_process = 0
        began = time.monotonic()
        said = self.folder / "said.txt"
        with redirected(said):
            try:
                code = main([*words])
            except BaseException as error:
                traceback.print_exc()
                code = 1
                if isinstance(error, SystemExit):
                    code = error.code
        seconds = time.monotonic() - began
        self.plan.unlink()
        hook._of_process = 0
        lines = []
        if logs:
            lines = [tuple(line.split("\t")) for line in log.read_text().splitlines()]
        return Ended(code, said.read_text(errors="replace"), seconds, lines, once.exists())


@contextmanager
def redirected(path: Path):
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, one in enumerate(kept, 1):
            os.dup2(one, number)
            os.close(one)


@dataclass(frozen=True)
class Mode:
    """A command whose file operations fail: of a run folder, or of what it is given below `folder`."""

    words: tuple[str, ...]
    """RUN and COPIES stand for their folders."""
    after: tuple[str, ...] = ()
    """What is run before it, once; each time it finds what that left."""


COMMON = (*SMALL, "run_dir=RUN", "launcher.ranks=1", "parallelism.tp=1")
COPIED = "checkpoint.copy_to=file://COPIES"
MODES = {
    "train": Mode(("train", *COMMON, "train.steps=6", "checkpoint.saving=async")),
    "resume": Mode(("resume", "RUN", "train.steps=6", "launcher.ranks=2"), after=("train", *COMMON, "train.steps=4")),
    "copy_to": Mode(("resume", "RUN", "train.steps=6"), after=("train", *COMMON, "train.steps=4", COPIED)),
    "supervise": Mode(
        (
            "train",
            *COMMON,
            "train.steps=6",
            "launcher.restarts={first_wait_seconds: 0.05, longest_wait_seconds: 0.2}",
            "--supervise",
        )
    ),
}


class Case:
    """The folders of a mode's runs, below `folder`."""

    def __init__(self, bench: Bench, mode: Mode, folder: Path):
        self.bench = bench
        self.mode = mode
        self.run = folder / "run"
        self.copies = folder / "copies"
        self.kept = folder / "kept"
        if mode.after:
            done = bench.command(self._words(mode.after), [])
            assert done.code == 0, done.said
            for place in (self.run, self.copies):
                if place.exists():
                    shutil.copytree(place, self.kept / place.name)

    def _words(self, words) -> list[str]:
        return [word.replace("RUN", str(self.run)).replace("COPIES", str(self.copies)) for word in words]

    def go(self, **how) -> Ended:
        """The command, as if nothing had been before but what `after` left."""
        for place in (self.run, self.copies):
            shutil.rmtree(place, ignore_errors=True)
            if (self.kept / place.name).exists():
                shutil.copytree(self.kept / place.name, place)
        return self.bench.command(self._words(self.mode.words), [self.run, self.copies], **how)

    def found(self, ended: Ended) -> dict:
        """What a run left; of one that ended with an error, what another start without faults came to."""
        told = {"code": ended.code, "failed": ended.failed, "said": ended.said, "seconds": ended.seconds}
        told["kept"] = self._good(self.run)
        told["aside"] = [path.name for path in self.run.glob("checkpoints/quarantine/*")]
        told["ranks"] = [log.read_text(errors="replace") for log in sorted(self.run.glob("logs/rank-*.log"))]
        if ended.code != 0 and (self.run / "spec.json").exists():
            again = self.bench.command(["resume", str(self.run)], [])
            told["again"] = {"code": again.code, "said": again.said}
        told["steps"] = steps_in(self.run / "metrics.jsonl")
        told["last"] = self._good(self.run)
        told["copied"] = self._good(self.copies)
        return told

    def _good(self, place: Path) -> list[int]:
        """Steps of the checkpoints in a folder of a run, or of copies of it, that are good in every byte."""
        from megaspec.checkpoint.examine import examine
        from megaspec.checkpoint.folders import candidates

        good = []
        for candidate in candidates(place / "checkpoints"):
            _, problems = examine(candidate.path, candidate.step, deep=True)
            if not problems:
                good.append(candidate.step)
        return sorted(good)


def steps_in(path: Path) -> list[int]:
    """Of the events of steps, in their order."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return [line["step"] for line in lines if line["event"] == "step"]


def main(folder: Path, modes: dict[str, list[str]]) -> None:
    """Fails, in a small run each, the first operation of each place that a pattern `KIND/ERRNO/REGEX` finds; `modes`:
    mode -> patterns. Prints a JSON object a line of how it ended."""
    from megaspec_launchers import local
    from megaspec_launchers.rank_factory import RankFactory

    factory = RankFactory((*local.PRELOADED, "megaspec.runtime.rank"), threads=1)
    close = factory.close
    # one warm process for all runs
    factory.close = lambda: None
    local.RankFactory = lambda *_, **__: factory
    bench = Bench(folder, factory)
    for name, patterns in modes.items():
        case = Case(bench, MODES[name], folder / name)
        recorded = case.go(logs=True)
        assert recorded.code == 0, recorded.said
        for pattern in patterns:
            for told in ended(case, recorded, pattern):
                print(json.dumps({"mode": name} | told), flush=True)
    close()


def ended(case: Case, recorded: Ended, pattern: str) -> Iterator[dict]:
    """How runs end in which an operation fails that `recorded` had and the pattern finds."""
    kind, code, site = pattern.split("/", 2)
    found = sorted({one for of, one in recorded.log if of == kind and re.search(site, one)})
    assert found, f"no operation of the run is {pattern}"
    for one in found:
        how = case.go(fail={"kind": kind, "site": one, "errno": getattr(errno, code)})
        yield {"pattern": pattern, "site": one} | case.found(how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
