"""Points that run through one of Hydra's own launchers: each is a job, which starts the point's run as the slots do.

Torch-free. The Hydra side is hydra_plugins.megaspec_launcher.jobs.
"""

import time
from importlib import import_module
from pathlib import Path

from megaspec.core.errors import DataError, Problem, RecipeError
from megaspec.resolve.target import detect_target
from megaspec.sweep.attempt import Attempt, end_orphan, refused
from megaspec.sweep.driver import ORPHAN_SECONDS, Table, to_run
from megaspec.sweep.points import Checker
from megaspec.sweep.slots import point_target
from megaspec.sweep.state import Point, SweepFolder
from megaspec_launchers.signals import StopRequests

POLL_SECONDS = 0.1


def run_points(table: Table, stop: StopRequests) -> list[int]:
    """Hands every point that has not ended to the sweep's Hydra launcher. -> exit codes of those that failed.

    RecipeError: the launcher is not installed, or refuses its settings.
    """
    numbers = to_run(table)
    for number in numbers:
        point = table.points[number]
        if point.state == "running":
            end_orphan(point, ORPHAN_SECONDS)
            table.put(point.to("interrupted"))
    if numbers and not stop.count:
        jobs = import_module("hydra_plugins.megaspec_launcher.jobs")
        problem = jobs.run_points(
            str(table.folder.path.resolve()), numbers, table.head.launcher, list(table.head.launcher_words)
        )
        if problem:
            raise RecipeError([Problem("hydra/launcher", problem, code="sweep.launcher")])
    for point in table.folder.points():
        table.points[point.number] = point
    return [p.code for p in table.points.values() if p.number in numbers and p.state == "failed" and p.code]


def run_point(folder: str, number: int) -> int:
    """One point of a sweep, in the process of a job: started, waited for, and its end kept. -> its exit code.

    The job may run in the main thread of a process that has handlers of its own; SIGTERM and SIGINT reach the point.
    """
    sweep = SweepFolder(Path(folder))
    point = next(p for p in sweep.points() if p.number == number)
    checker = Checker(point_target(sweep.head().spec, detect_target()))
    with StopRequests() as stop:
        if stop.count:
            return 0
        try:
            attempt = Attempt(sweep, point, checker)
        except (RecipeError, DataError) as error:
            sweep.append(refused(point, error))
            return error.exit_code
        sweep.append(attempt.point)
        while (ended := attempt.ended()) is None:
            if stop.count:
                attempt.ask_to_stop(then="interrupted")
            if stop.count > 1:
                attempt.kill()
            time.sleep(POLL_SECONDS)
    sweep.append(ended)
    return _code(ended)


def _code(point: Point) -> int:
    assert point.code is not None, f"point {point.number} ended without a code"
    return point.code
