"""Runs in which one file operation fails: started in this process, with ranks from a warm one."""

import errno
import json
import os
import re
import shutil
import sys
import time
import traceback
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
    "train.eval_every=3", "train.eval_samples=2", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=2",
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


def main(folder: Path, patterns: list[str]) -> None:
    """Fails, in a small run each, the first operation of each place that a pattern `KIND ERRNO REGEX` finds; prints a
    JSON object a line of how it ended."""
    from megaspec_launchers import local
    from megaspec_launchers.rank_factory import RankFactory

    factory = RankFactory((*local.PRELOADED, "megaspec.runtime.rank"), threads=1)
    close = factory.close
    # one warm process for all runs
    factory.close = lambda: None
    local.RankFactory = lambda *_, **__: factory
    bench = Bench(folder, factory)
    run = folder / "run"
    words = ["train", *SMALL, f"run_dir={run}", "launcher.ranks=1", "parallelism.tp=1", "checkpoint.saving=async"]
    recorded = bench.command(words, [run], logs=True)
    assert recorded.code == 0, recorded.said
    for pattern in patterns:
        kind, name, site = pattern.split("/", 2)
        found = sorted({one for of, one in recorded.log if of == kind and re.search(site, one)})
        assert found, f"no operation of the run is {pattern}"
        for one in found:
            shutil.rmtree(run, ignore_errors=True)
            fail = {"kind": kind, "site": one, "errno": getattr(errno, name)}
            ended = bench.command(words, [run], fail=fail)
            steps = 0
            if (run / "metrics.jsonl").exists():
                steps = (run / "metrics.jsonl").read_text().count('"event": "step"')
            told = {"pattern": pattern, "site": one, "code": ended.code, "failed": ended.failed, "said": ended.said}
            print(json.dumps(told | {"steps": steps}), flush=True)
    close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
