"""A soak: a supervised run with a fault every so many seconds, held to the run that nothing disturbed, to the bit.

Faults come in a shuffled order, each kind as often as the others: a rank, the launcher or the process that forks ranks
is killed (-9) or stopped (SIGSTOP), a disk is full (no file of a rank may grow, RLIMIT_FSIZE), the newest checkpoint is
damaged, a bit of a weight is flipped. A stopped rank is found by the collective that the other one waits for; the bit
by `train.checks`, which ends the attempt with 77 and names the rank, whose device is then passed over.
"""

import json
import random
import resource
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from megaspec.checkpoint.folders import CHECKPOINTS, candidates
from megaspec.launcher.attempts import last_step, read_attempts
from megaspec.log.jsonl import read_metrics
from megaspec.log.sinks import METRICS
from megaspec.recipe import Recipe
from megaspec.run_folder import newest_step
from megaspec_launchers.rank_factory import RankFactory
from tests.faults.runs import assert_same, go, make_run, recipe, result
from tests.faults.supervised import plan_faults, supervised

FAULTS = (
    "kill a rank",
    "kill the launcher",
    "kill the server",
    "stop a rank",
    "stop the launcher",
    "stop the server",
    "full disk",
    "damaged checkpoint",
    "flipped bit",
)
RANKS = 2
SPARES = 256
# Of a step, beside what it computes: a run of minutes has few enough steps to be done once more without faults.
PAUSE_SECONDS = 0.04
EXPECTED = {
    "recipe.json", "target.json", "prediction.json", "spec.json", "environment.json", "metrics.jsonl", "exit_code.json",
    "attempts.jsonl", "avoided.jsonl", "suspects.jsonl", "devices", "lock", "logs", "checkpoints",
    "heartbeat.json",
}  # fmt: skip
MIB = 1 << 20


@dataclass(frozen=True)
class SoakResult:
    """What a soak came to."""

    minutes: float
    steps: int
    faults: dict[str, int]
    attempts: int
    codes: dict[str, int]
    """How often attempts ended with each exit code."""
    goodput: float
    """Seconds of the steps that count, once each, over all seconds."""
    supervisor_slope: float
    """Of the supervisor's memory in the second half of the time: MiB per 1,000 steps. In the first attempts it loads
    what it needs, some 3 MiB."""
    supervisor_growth: float
    """MiB from the middle third of the time to the last, by their medians: what a short soak can say."""
    rank_slope: float
    """Of rank 0's memory in the undisturbed run, behind its first thousand steps: MiB per 1,000 steps."""
    supervisor_files: float
    """Open files of the supervisor in the last third of the time, less those in the middle one, by their medians."""


def a_recipe(steps: int) -> Recipe:
    fields = json.loads(recipe(tp=1, steps=steps, save_every=20).model_dump_json())
    fields["train"]["eval_every"] = 500
    fields["train"]["checks"] = {"replicas_every": 10, "state": 1.0}
    fields["launcher"] |= {
        "ranks": RANKS,
        "timeout_seconds": 10.0,
        "restarts": {"most": 10_000, "without_progress": 20, "first_wait_seconds": 0.2, "longest_wait_seconds": 5.0},
    }
    return Recipe.model_validate_json(json.dumps(fields))


def soak(folder: Path, factory: RankFactory, *, minutes: float, every: float, seed: int = 0) -> SoakResult:
    """Runs one, and the undisturbed run after it. AssertionError: something was lost, left behind, or is not equal.

    When the time is over the run is asked to stop; how many steps that are depends on who else works on the machine.
    The other run is asked to stop behind the same step.
    """
    asked = a_recipe(steps=round(minutes * 60 / PAUSE_SECONDS))
    run = make_run(folder / "run", asked)
    # spares: each flipped bit costs one
    (run / "devices").write_text(",".join(map(str, range(SPARES))))
    flips = folder / "flips"
    flips.mkdir()
    plan_faults(run, {"every": {"pause": PAUSE_SECONDS, "flips": str(flips)}})
    temporary = folder / "temporary"
    temporary.mkdir()
    seen = Disturbed(run, flips, random.Random(seed), every)
    with open(folder / "said.txt", "w") as said, supervised(run, said=said, TMPDIR=str(temporary)) as supervisor:
        began = time.monotonic()
        seen.watch(supervisor, seconds=60 * minutes)
        seconds = time.monotonic() - began
    text = (folder / "said.txt").read_text()
    assert supervisor.returncode == 75, f"exit code {supervisor.returncode}: {text[-4000:]}"
    # an hour is long enough for another program to get the number of a process that is gone
    left = [one for one in seen.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"outlive the supervisor: {left}"
    # torch keeps one folder for what it compiles, whoever asks
    leaked = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    assert leaked == []
    unknown = {path.name for path in run.iterdir()} - EXPECTED
    assert unknown == set()
    hidden = [path.name for path in (run / CHECKPOINTS).iterdir() if path.name.startswith(".")]
    assert hidden == []
    steps = newest_step(run)
    undisturbed = make_run(folder / "undisturbed", asked)
    stop = {"rank": 0, "kind": "stop", "point": "step", "count": steps}
    assert go(undisturbed, factory, ranks=RANKS, fault=stop) == 75
    assert_same(run, result(undisturbed))
    attempts = read_attempts(run).attempts
    assert all(attempt.end is not None for attempt in attempts)
    codes = Counter(one.end.code for one in attempts)
    assert not codes[70], f"an attempt that ended by an error of our own: {errors_of_our_own(text)}"
    # the last one may come when the run is being stopped
    assert codes[77] >= seen.done["flipped bit"] - 1, f"bits that nobody found: {seen.done}, {codes}"
    useful = sum(line["seconds"] for line in lines_of(run))
    return SoakResult(
        minutes=round(seconds / 60, 2),
        steps=steps,
        faults=dict(seen.done),
        attempts=len(attempts),
        codes={str(code): n for code, n in codes.items()},
        goodput=round(useful / seconds, 3),
        supervisor_slope=round(slope(seen.memory[len(seen.memory) // 2 :]), 3),
        supervisor_growth=round(growth([size for _, size in seen.memory]) / MIB, 3),
        rank_slope=round(slope([(s["step"], s["memory_bytes"]) for s in lines_of(undisturbed) if s["step"] > 1000]), 3),
        supervisor_files=growth(seen.files),
    )


def errors_of_our_own(text: str) -> str:
    """Of what a supervised run said, the part about its first attempt with exit code 70."""
    before, _, why = text.partition("ended with 70")
    return f"{before[-6000:]}ended with 70{why[:300]}"


def lines_of(run: Path) -> list[dict]:
    return [line for line in read_metrics(run / METRICS) if line["event"] == "step"]


def slope(points: list[tuple[float, float]]) -> float:
    """Of a line through (step, bytes), in MiB per 1,000 steps; 0 for few points."""
    if len(points) < 10:
        return 0.0
    steps, sizes = np.array(points, dtype=np.float64).T
    return float(np.polyfit(steps, sizes, 1)[0]) * 1000 / MIB


def growth(values: list[float]) -> float:
    """From the middle third of them to the last, by their medians."""
    third = len(values) // 3
    return float(np.median(values[2 * third :]) - np.median(values[third : 2 * third]))


class Disturbed:
    """A supervised run while faults come to it."""

    def __init__(self, run: Path, flips: Path, rng: random.Random, every: float):
        self.run = run
        self.flips = flips
        self.rng = rng
        self.every = every
        self.done: Counter[str] = Counter()
        self.family: set[psutil.Process] = set()
        self.memory: list[tuple[float, float]] = []
        self.files: list[float] = []
        self.is_stopping = False

    def watch(self, supervisor, *, seconds: float) -> None:
        """Until the supervisor has ended; when the time is over, and ranks are at work, it is asked to stop."""
        until = time.monotonic() + seconds
        parent = psutil.Process(supervisor.pid)
        todo: list[str] = []
        next_fault = time.monotonic() + self.every
        while supervisor.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self.family |= set(parent.children(recursive=True))
                if self.family:
                    self.memory.append((last_step(self.run, METRICS), parent.memory_info().rss))
                    self.files.append(parent.num_fds())
            is_over = time.monotonic() >= until
            if is_over and len(self.ranks_of(parent)) == RANKS and not self.is_stopping:
                self.is_stopping = True
                supervisor.send_signal(signal.SIGTERM)
            if time.monotonic() >= next_fault and not is_over:
                if not todo:
                    todo = self.rng.sample(FAULTS, len(FAULTS))
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    if self.disturb(parent, todo[-1]):
                        self.done[todo.pop()] += 1
                        next_fault = time.monotonic() + self.every
            time.sleep(0.5)

    def ranks_of(self, parent: psutil.Process) -> list[psutil.Process]:
        """Ranks that are up; none while they are starting."""
        with suppress(psutil.NoSuchProcess):
            for launcher in parent.children():
                for server in launcher.children():
                    return server.children()
        return []

    def disturb(self, parent: psutil.Process, fault: str) -> bool:
        """-> False: not while ranks are starting."""
        ranks = self.ranks_of(parent)
        if len(ranks) != RANKS:
            return False
        server = ranks[0].parent()
        launcher = server.parent()
        rank = self.rng.randrange(RANKS)
        match fault:
            case "kill a rank":
                ranks[rank].kill()
            case "kill the launcher":
                launcher.kill()
            case "kill the server":
                server.kill()
            case "stop a rank":
                ranks[rank].send_signal(signal.SIGSTOP)
            case "stop the launcher":
                launcher.send_signal(signal.SIGSTOP)
            case "stop the server":
                server.send_signal(signal.SIGSTOP)
            case "full disk":
                for one in ranks:
                    _, hard = resource.prlimit(one.pid, resource.RLIMIT_FSIZE)
                    resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (512, hard))
            case "damaged checkpoint":
                found = candidates(self.run / CHECKPOINTS)
                # the run goes on from the one before it
                if len(found) < 2:
                    return False
                shard = self.rng.choice(sorted(found[0].path.glob("*.safetensors")))
                data = bytearray(shard.read_bytes())
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                shard.write_bytes(data)
                ranks[rank].kill()
            case "flipped bit":
                (self.flips / str(rank)).touch()
        return True
