"""Points that run through one of Hydra's own launchers: each is a job, which starts the point's run as the slots do.

A job may be in another process or on another machine, so all that passes between it and the sweep are files:
points.jsonl, and `stop`, which asks the jobs to end. The Hydra side is hydra_plugins.megaspec_launcher.jobs.
"""

import shutil
import signal
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from megaspec.core.errors import DataError, Problem, RecipeError
from megaspec.estimate.target import detect_target
from megaspec.plugins import load, loaded
from megaspec.sweep.attempt import Attempt, refused
from megaspec.sweep.driver import PAGE_SECONDS, Say, SweepTable, settled
from megaspec.sweep.points import Checker
from megaspec.sweep.slots import point_target
from megaspec.sweep.state import HEAD, SweepFolder
from megaspec.sweep.words import OWN_LAUNCHER, check_launcher
from megaspec_launchers.signals import StopRequests

POLL_SECONDS = 0.2
# Launcher -> the package of Hydra's plug-in.
_PACKAGES = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
}
_SLURM_PROGRAMS = ("sbatch", "srun")


def refuse_missing(launcher: str, origin: str) -> None:
    """RecipeError: a launcher that is not installed, or SLURM's without SLURM. `origin`: where it was chosen."""
    package = _PACKAGES.get(launcher)
    if package is not None and find_spec(f"hydra_plugins.{package}") is None:
        distribution = package.replace("_", "-")
        text = f"hydra/launcher={launcher} needs {distribution}: pip install 'megaspec[sweep]', "
        text += f"or set hydra/launcher={OWN_LAUNCHER}, which runs points on this machine"
        raise RecipeError([Problem("hydra/launcher", text, origin, "sweep.launcher")])
    if launcher != "submitit_slurm":
        return
    missing = [program for program in _SLURM_PROGRAMS if shutil.which(program) is None]
    if missing:
        text = f"hydra/launcher=submitit_slurm needs SLURM, and {' and '.join(missing)} can't be found: start it on a "
        text += f"login node, or set hydra/launcher=submitit_local or {OWN_LAUNCHER}, which run points on this machine"
        raise RecipeError([Problem("hydra/launcher", text, origin, "sweep.launcher")])


def run_points(table: SweepTable, stop: StopRequests, say: Say) -> list[int]:
    """Hands every point that has not ended to the sweep's Hydra launcher. -> exit codes of those that failed.

    RecipeError: the launcher is not installed, or refuses its settings.
    """
    check_launcher(table.head.launcher, table.head.launcher_words, str(table.folder.path / HEAD))
    table.folder.take_stop_back()
    numbers = settled(table)
    if not numbers or stop.count:
        return []
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(table, stop, say, ended), daemon=True)
    watcher.start()
    try:
        jobs = import_module("hydra_plugins.megaspec_launcher.jobs")
        problem = jobs.run_points(
            str(table.folder.path.resolve()),
            numbers,
            table.head.launcher,
            table.head.launcher_words,
            logs=table.folder.new_hydra_logs(),
            plugins=loaded(),
        )
    finally:
        # the watcher looks once more after this, so that the table knows how the last points ended
        ended.set()
        watcher.join()
    if problem:
        text = f"hydra/launcher={table.head.launcher}: {problem}"
        raise RecipeError([Problem("hydra/launcher", text, code="sweep.launcher")])
    codes = []
    for number in numbers:
        point = table.points[number]
        if point.state == "failed" and point.code:
            codes.append(point.code)
    return codes


def run_point(folder: str, number: int, plugins: Sequence[str] = ()) -> int:
    """One point of a sweep, in the process of a job: started, waited for, and its end kept. -> its exit code."""
    load(plugins)
    sweep = SweepFolder(Path(folder))
    point = next(p for p in sweep.points() if p.number == number)
    in_job_process = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if in_job_process and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the sweep, which writes `stop`
    if sweep.is_asked_to_stop():
        return 0
    try:
        head = sweep.head()
        checker = Checker(point_target(head.spec, detect_target()), memory=head.memory)
        attempt = Attempt(sweep, point, checker)
    except (RecipeError, DataError) as error:
        sweep.append(refused(point, error))
        return error.exit_code
    sweep.append(attempt.point)
    while (ended := attempt.ended()) is None:
        if sweep.is_asked_to_stop():
            attempt.ask_to_stop(then="interrupted")
        time.sleep(POLL_SECONDS)
    sweep.append(ended)
    assert ended.code is not None, f"point {number} ended without a code"
    return ended.code


def _watch(table: SweepTable, stop: StopRequests, say: Say, ended: threading.Event) -> None:
    """While a launcher has the main thread: passes requests to stop on, tells what changed, keeps the page fresh."""
    known = {number: point.state for number, point in table.points.items()}
    look_at = 0.0
    is_last = False
    while not is_last:
        is_last = ended.wait(POLL_SECONDS)
        if stop.count:
            table.folder.ask_to_stop()
        if time.monotonic() < look_at and not is_last:
            continue
        table.reload()
        for number, point in table.points.items():
            if point.state != known[number]:
                text = f"point {number} of {len(known)} ({' '.join(point.overrides)}) {point.state}"
                if point.reason:
                    text += f": {point.reason}"
                say(text)
            known[number] = point.state
        table.write_page(running=True)
        look_at = time.monotonic() + PAGE_SECONDS
