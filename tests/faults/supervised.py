"""A supervisor whose ranks fail as a plan says: `python -P supervised.py RUN`; and what tests ask of such runs.

The plan stands beside the run, in plan.json: attempt -> a fault, see `supervised_entry.py`. `supervisor` of it:
{"look_seconds": between two looks at the launcher, "sees_no_stops": the kernel does not say that one was stopped}.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.warm import WarmProcess

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "launchers"))
ENVIRONMENT = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ENTRY = "tests.faults.supervised_entry:main"


def plan_faults(run, faults):
    """Says what happens in which attempt."""
    (run.parent / "plan.json").write_text(json.dumps({str(attempt): fault for attempt, fault in faults.items()}))


@contextmanager
def supervised(run, *words, said=None, **variables):
    """A supervisor of a run that was made, under way; `variables` of its environment. With a file for what is said it
    is a process that begins with nothing, whose memory can be measured."""
    environment = ENVIRONMENT | variables
    if said is None:
        process = WarmProcess([str(run), *words], file=Path(__file__), env=environment)
    else:
        command = [sys.executable, "-P", str(Path(__file__)), str(run), *words]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def family(pid):
    """Every process below one."""
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


if __name__ == "__main__":
    from megaspec.commands.starting import prepare_resume
    from megaspec.commands.supervised import supervise
    from megaspec.compose.compose import recompose
    from megaspec.core.errors import MegaspecError
    from megaspec.run_folder import read_run
    from megaspec_launchers import attempt_process

    folder = Path(sys.argv[1])
    plan = json.loads((folder.parent / "plan.json").read_text()).get("supervisor", {})
    attempt_process.LOOK_SECONDS = plan.get("look_seconds", attempt_process.LOOK_SECONDS)
    if plan.get("sees_no_stops"):
        attempt_process._is_stuck = lambda process: False
    composed = recompose(read_run(folder).recipe, "recipe.json", sys.argv[2:])

    def prepare(target, option):
        recipe = option.composed.recipe
        return prepare_resume(folder, recipe, option.composed.origins, target, memory="check", kept=composed.recipe)

    try:
        sys.exit(supervise(composed, prepare, place=folder, memory="check", entry=ENTRY))
    except MegaspecError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
