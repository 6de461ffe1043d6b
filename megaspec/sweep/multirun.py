"""Every point of a sweep is run: begun by `train -m`, gone on with by `sweep resume`. Torch-free."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megaspec.checkpoint.lock import RunLock
from megaspec.compose.words import compose_words, take
from megaspec.core.errors import COMMAND_LINE, Preempted, Problem, RecipeError, printable
from megaspec.core.frozen import AUTO
from megaspec.data.files import write_error
from megaspec.estimate.target import Target, detect_target
from megaspec.recipe import Recipe
from megaspec.rules.run_facts import Facts
from megaspec.search.fits import MEMORY
from megaspec.spec import Spec
from megaspec.sweep import hydra_jobs
from megaspec.sweep.driver import Driver, PointSearch, SweepTable, exit_code, to_run
from megaspec.sweep.metric import choose_direction, choose_metric, has_value, never_has
from megaspec.sweep.points import CheckedPoint, Checker, grid, left_out_in_words, refuse_invalid, without_repeats
from megaspec.sweep.report import print_results
from megaspec.sweep.slots import make_slots, point_target
from megaspec.sweep.spec import KEPT
from megaspec.sweep.state import HEAD, Axis, Point, SweepFolder, SweepHead, recipe_of
from megaspec.sweep.words import OWN_LAUNCHER, SweepWords, default_name, kept_settings, read_words, sweep_spec, value_in
from megaspec_launchers.signals import StopRequests

SWEEPS = Path("sweeps")
# Points whose check takes long enough to say so.
_MANY = 500
# Points that repeat an earlier one and are told by their words; the others are counted.
_MOST_REPEATS = 5


def multirun(words: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Runs every point of a sweep, or goes on with it when it is there. -> exit code of the sweep.

    RecipeError, DataError: a point can't be run, and nothing was started; or no trial of a search gave a value.
    """
    if "RANK" in os.environ:
        command = " ".join(["megaspec train", *words, "-m"])
        text = f"-m starts runs of its own, but torchrun has started this process; give it by itself: {command}"
        raise RecipeError([Problem("", text, COMMAND_LINE, "sweep.torchrun")])
    taken = read_words(words, config_dirs)
    hydra_jobs.refuse_missing(taken.launcher, COMMAND_LINE)
    machine = detect_target()
    checker = Checker(point_target(taken.spec, machine), config_dirs, taken.memory)
    name = _sweep_name(taken)
    folder = SweepFolder(SWEEPS / name)
    if taken.spec.folder != AUTO:
        folder = SweepFolder(Path(taken.spec.folder))
    axes = _axes(taken)
    if taken.spec.kind == "optuna":
        from megaspec.sweep.search import probe  # Optuna, only where it is needed

        # a search makes its points while it runs
        checked: list[CheckedPoint] = []
        probed = probe(axes, taken.plain, checker)
        _tell_left_out(probed)
        metric = choose_metric(taken.spec, probed)
    else:
        checked = _checked_grid(taken, checker)
        _tell_left_out(checked)
        metric = choose_metric(taken.spec, checked)
    head = SweepHead(
        name=name,
        spec=taken.spec,
        plain=taken.plain,
        config_dirs=tuple(config_dirs),
        axes=axes,
        metric=metric,
        direction=choose_direction(taken.spec, metric),
        launcher=taken.launcher,
        launcher_words=taken.launcher_words,
        memory=taken.memory,
    )
    with _locked(folder):
        if not folder.exists():
            points = []
            for number, one in enumerate(checked, 1):
                points.append(one.point(number, count=len(checked), name=name, folder=folder.path))
            folder.make(head, points)
        elif taken.only_new:
            raise RecipeError([Problem("resume", f"{folder.path} holds this sweep already; drop resume=never", "", "")])
        else:
            _refuse_other_sweep(folder, head, checked)
            folder.write_head(head)
        table = SweepTable(folder, head)
        _plan_ranks(table, checker, {one.fingerprint: one.ranks for one in checked})
        return _run_and_show(table, checker, machine)


def specs_of_points(
    taken: SweepWords,
    config_dirs: Sequence[str],
    target_of: Callable[[Recipe], Target],
    facts_of: Callable[[Recipe], Facts],
) -> list[Spec]:
    """The Specs of a grid's points, for jobs that train them elsewhere: each with a folder of its own, none is made.

    `target_of`: the machine of a point. `facts_of`: what is known here of its files. RecipeError, DataError: a point
    can't be run.
    """
    first = compose_words([*taken.plain, *grid(taken)[0]], config_dirs).recipe
    checker = Checker(target_of(first), config_dirs, taken.memory, facts_of)
    checked = _checked_grid(taken, checker)
    _tell_left_out(checked)
    name = _sweep_name(taken)
    folder = SWEEPS / name
    if taken.spec.folder != AUTO:
        folder = Path(taken.spec.folder)
    specs = []
    for number, one in enumerate(checked, 1):
        point = one.point(number, count=len(checked), name=name, folder=folder)
        recipe = recipe_of(point)
        target_of(recipe)
        specs.append(checker.spec(recipe, folder / point.folder, {}))
    return specs


def resume_sweep(path: Path, words: Sequence[str]) -> int:
    """Goes on with a sweep as it was made, whatever has become of its recipe's files. -> exit code of the sweep."""
    folder = SweepFolder(path)
    old = folder.head()
    is_memory_given = value_in(words, "memory") is not None
    memory, words = take(list(words), "memory", MEMORY)
    if not is_memory_given:
        memory = old.memory
    launcher_settings = []
    sweep_words = []
    for word in words:
        if word.startswith("hydra.launcher."):
            launcher_settings.append(word)
        elif word.startswith("sweep."):
            sweep_words.append(word)
        else:
            raise RecipeError(f"{word}: the points of a sweep stay as they are; give sweep.slots=N and the like")
    launcher_words = kept_settings(old.launcher, old.launcher_words, launcher_settings, sweep=path)
    hydra_jobs.refuse_missing(old.launcher, str(path / HEAD))
    spec = sweep_spec(sweep_words, old.spec.model_dump())
    for key in KEPT:
        if getattr(spec, key) != getattr(old.spec, key):
            text = f"sweep.{key}={getattr(spec, key)}: a sweep that goes on keeps its {key}; drop it"
            raise RecipeError([Problem(f"sweep.{key}", text, COMMAND_LINE, "sweep.changed")])
    machine = detect_target()
    checker = Checker(point_target(spec, machine), old.config_dirs, memory)
    with _locked(folder):
        changes = {"spec": spec, "memory": memory, "launcher_words": launcher_words, "state": "running"}
        table = SweepTable(folder, old.model_copy(update=changes))
        # before sweep.json is written: a point that this machine can't run leaves the sweep as it was
        _plan_ranks(table, checker, {})
        folder.write_head(table.head)
        return _run_and_show(table, checker, machine)


def _plan_ranks(table: SweepTable, checker: Checker, known: Mapping[str, int]) -> None:
    """World sizes of the points that are left, for this machine, whatever their file says. `known`: by fingerprint."""
    for number in to_run(table):
        point = table.points[number]
        ranks = known.get(point.fingerprint)
        if ranks is None:
            ranks = checker.spec(recipe_of(point), table.folder.run(point), {}).world_size
        table.points[number] = point.model_copy(update={"ranks": ranks})


@contextmanager
def _locked(folder: SweepFolder) -> Iterator[None]:
    """A sweep's folder, made where it is not there, and this process the only one that runs it."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder.path, error) from None
    with RunLock(folder.path):
        yield


def _run_and_show(table: SweepTable, checker: Checker, machine: Target) -> int:
    """Runs what is left of a sweep, and shows what it has come to. RecipeError: a search that saw no value."""
    n_left = len(to_run(table))
    n_points = len(table.points)
    if table.head.spec.kind == "grid":
        _say(f"{table.folder.path}: {n_points} points, {n_left or 'none'} of them left")
    else:
        _say(f"{table.folder.path}: {table.head.spec.trials} points to search, {n_points - n_left} of them done")
    with StopRequests() as stop:
        failed, stopped = _run_points(table, checker, machine, stop)
    code = exit_code(table, failed, stopped=stopped)
    problems: list[Problem] = []
    if code == 0 and table.head.spec.kind == "optuna":
        problems = _search_without_values(table)
    if problems:
        code = RecipeError.exit_code
    table.set_state(_state_after(code))
    # the state is kept and the table shown before the error: it says which trials there were
    table.write_page(running=False)
    print_results(table)
    if problems:
        raise RecipeError(problems)
    return code


def _state_after(code: int) -> str:
    """What sweep.json says of a sweep that ended with an exit code."""
    if code == 0:
        return "done"
    if code == Preempted.exit_code:
        return "interrupted"
    return "failed"


def _search_without_values(table: SweepTable) -> list[Problem]:
    """What is wrong with a search none of whose trials gave a value: it has searched nothing."""
    metric = table.head.metric
    points = table.points.values()
    done = [point for point in points if point.state == "done"]
    if any(has_value(table.follower(point).read(), metric) for point in done):
        return []
    text = f"none of the {len(points)} trials gave a value of sweep.metric={metric}: nothing was searched"
    # one reason is told: why a trial was invalid, or else why one that is done never has the metric
    reasons = [point.reason for point in points if point.state == "invalid"]
    for point in done:
        reason = never_has(metric, recipe_of(point))
        if reason:
            reasons.append(reason)
    if reasons:
        text = f"{text}; {reasons[0]}"
    return [Problem("sweep.metric", text, code="sweep.metric")]


def _run_points(table: SweepTable, checker: Checker, machine: Target, stop: StopRequests) -> tuple[list[int], bool]:
    """-> exit codes of the points that failed, and whether points are left since the sweep was asked to stop."""
    if table.head.launcher != OWN_LAUNCHER:
        failed = hydra_jobs.run_points(table, stop, _say)
        return failed, bool(stop.count and to_run(table))
    search = _search(table, checker)
    slots = make_slots(table.head.spec, machine, os.environ)
    failed = Driver(table, slots, checker, stop, _say, search=search).run()
    has_trials_to_ask = search is not None and len(table.points) < table.head.spec.trials
    return failed, bool(stop.count and (to_run(table) or has_trials_to_ask))


def _search(table: SweepTable, checker: Checker) -> PointSearch | None:
    if table.head.spec.kind == "grid":
        return None
    from megaspec.sweep.search import OptunaSearch  # Optuna, only where it is needed

    search = OptunaSearch(table.head, table.folder.path, checker, table.points)
    search.remember(list(table.points.values()), table.results())
    return search


def _checked_grid(taken: SweepWords, checker: Checker) -> list[CheckedPoint]:
    """Every point of a grid, once. RecipeError, DataError: some can't be run."""
    combinations = grid(taken)
    if len(combinations) >= _MANY:
        _say(f"checking {len(combinations):,} points")
    checked = [checker.check(taken.plain, overrides) for overrides in combinations]
    different, repeats = without_repeats(checked)
    refuse_invalid(different)
    for one, earlier in repeats[:_MOST_REPEATS]:
        _say(f"{' '.join(one.overrides)} is the same run as {' '.join(earlier.overrides)}: run once")
    if len(repeats) > _MOST_REPEATS:
        _say(f"... and {len(repeats) - _MOST_REPEATS} repeats more")
    return different


def _tell_left_out(points: Sequence[CheckedPoint]) -> None:
    """On stderr, as every command does."""
    for line in left_out_in_words(points):
        print(printable(line), file=sys.stderr)


def _axes(taken: SweepWords) -> tuple[Axis, ...]:
    """What is swept, as sweep.json keeps it."""
    axes = []
    for swept in taken.swept:
        axis = Axis(
            key=swept.key,
            words=swept.words,
            is_range=swept.is_range,
            bounds=swept.bounds,
            is_log=swept.is_log,
        )
        axes.append(axis)
    return tuple(axes)


def _sweep_name(taken: SweepWords) -> str:
    """sweep.name, or else the `name=` of its runs, or else one made of the words."""
    if taken.spec.name != AUTO:
        return taken.spec.name
    return value_in(taken.plain, "name") or default_name(taken)


def _refuse_other_sweep(folder: SweepFolder, head: SweepHead, checked: Sequence[CheckedPoint]) -> None:
    """RecipeError: the folder holds a sweep of other points, or of points that have changed."""
    old = folder.head()
    points = folder.points()
    if head.spec.kind == "optuna" or old.spec.kind == "optuna":
        found = _other_search(old, head)
    else:
        found = _other_points(points, checked)
    if found:
        ways = f"give sweep.name=NEW, or go on with the old points: megaspec sweep resume {folder.path}"
        raise RecipeError([Problem("sweep.folder", f"{folder.path} holds {found}; {ways}", code="sweep-other")])


def _other_search(old: SweepHead, new: SweepHead) -> str:
    """How a search differs from the one that is kept; "" where it draws from the same space and plain words."""
    is_same = old.spec.kind == new.spec.kind and old.axes == new.axes and set(old.plain) == set(new.plain)
    if is_same:
        return ""
    return "another search"


def _other_points(old: Sequence[Point], new: Sequence[CheckedPoint]) -> str:
    """How the points of a grid differ from those that are kept; "" where they are the same."""
    old_fingerprints = {point.fingerprint for point in old}
    old_overrides = {point.overrides for point in old}
    added = [point for point in new if point.fingerprint not in old_fingerprints]
    for point in added:
        # the same words, and yet another recipe: a file that they are composed from has changed
        if point.overrides in old_overrides:
            return f"({' '.join(point.overrides)}) composed from other settings than now"
    if added or len(new) != len(old):
        return f"{len(old)} other points"
    return ""


def _say(text: str) -> None:
    for line in text.splitlines():
        print(printable(f"megaspec: {line}"), flush=True)
