"""Every point of a sweep is run: begun by `train -m`, gone on with by `sweep resume`. Torch-free."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaspec.checkpoint.lock import RunLock
from megaspec.compose.words import take
from megaspec.core.errors import COMMAND_LINE, Preempted, Problem, RecipeError, printable
from megaspec.core.frozen import AUTO
from megaspec.data.files import write_error
from megaspec.estimate.target import Target, detect_target
from megaspec.search.fits import MEMORY
from megaspec.sweep import hydra_jobs
from megaspec.sweep.driver import Driver, Search, Table, exit_code, to_run
from megaspec.sweep.metric import choose_direction, choose_metric, has_value, never_has
from megaspec.sweep.points import Checker, Draft, grid, refuse_invalid, without_repeats
from megaspec.sweep.report import print_results
from megaspec.sweep.slots import make_slots, point_target
from megaspec.sweep.spec import KEPT
from megaspec.sweep.state import Axis, SweepFolder, SweepHead, recipe_of
from megaspec.sweep.words import OWN_LAUNCHER, SweepWords, default_name, kept_settings, read_words, sweep_spec
from megaspec_launchers.signals import StopRequests

SWEEPS = Path("sweeps")
# Points whose check takes long enough to say so.
_MANY = 500


def multirun(words: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Runs every point of a sweep, or goes on with it when it is there. -> exit code of the sweep.

    RecipeError, DataError: a point can't be run, and nothing was started; or no trial of a search gave a value.
    """
    if "RANK" in os.environ:
        command = " ".join(["megaspec train", *words, "-m"])
        text = f"-m starts runs of its own, but torchrun has started this process; give it by itself: {command}"
        raise RecipeError([Problem("", text, COMMAND_LINE, "sweep.torchrun")])
    taken = read_words(words, config_dirs)
    machine = detect_target()
    checker = Checker(point_target(taken.spec, machine), config_dirs, taken.memory)
    name, folder = _place(taken)
    axes = tuple(
        Axis(key=o.key, words=o.words, is_range=o.is_range, bounds=o.bounds, is_log=o.is_log) for o in taken.swept
    )
    if taken.spec.kind == "optuna":
        from megaspec.sweep.search import probe  # Optuna, only where it is needed

        drafts: list[Draft] = []
        metric = choose_metric(taken.spec, probe(axes, taken.plain, checker))
    else:
        drafts = _drafts(taken, checker)
        metric = choose_metric(taken.spec, drafts)
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
            count = len(drafts)
            folder.make(head, [d.point(i, count=count, name=name, folder=folder.path) for i, d in enumerate(drafts, 1)])
        elif taken.only_new:
            raise RecipeError([Problem("resume", f"{folder.path} holds this sweep already; drop resume=never", "", "")])
        else:
            _same_sweep(folder, head, drafts)
            folder.write_head(head)
        table = Table(folder, head)
        _plan_ranks(table, checker, {draft.fingerprint: draft.ranks for draft in drafts})
        return _go(table, checker, machine)


def resume_sweep(path: Path, words: Sequence[str]) -> int:
    """Goes on with a sweep as it was made, whatever has become of its recipe's files. -> exit code of the sweep."""
    folder = SweepFolder(path)
    old = folder.head()
    given = any(w.startswith("memory=") for w in words)
    memory, words = take(list(words), "memory", MEMORY)
    memory = memory if given else old.memory
    settings = [w for w in words if w.startswith("hydra.launcher.")]
    words = [w for w in words if w not in settings]
    foreign = [w for w in words if not w.startswith("sweep.")]
    if foreign:
        raise RecipeError(f"{foreign[0]}: the points of a sweep stay as they are; give sweep.slots=N and the like")
    launcher_words = kept_settings(old.launcher, old.launcher_words, settings, sweep=path)
    spec = sweep_spec(words, old.spec.model_dump())
    changed = [key for key in KEPT if getattr(spec, key) != getattr(old.spec, key)]
    if changed:
        text = f"sweep.{changed[0]}={getattr(spec, changed[0])}: a sweep that goes on keeps its {changed[0]}; drop it"
        raise RecipeError([Problem(f"sweep.{changed[0]}", text, COMMAND_LINE, "sweep.changed")])
    machine = detect_target()
    checker = Checker(point_target(spec, machine), old.config_dirs, memory)
    with _locked(folder):
        changed_head = {"spec": spec, "memory": memory, "launcher_words": launcher_words, "state": "running"}
        table = Table(folder, old.model_copy(update=changed_head))
        _plan_ranks(table, checker, {})
        folder.write_head(table.head)
        return _go(table, checker, machine)


def _plan_ranks(table: Table, checker: Checker, known: Mapping[str, int]) -> None:
    """World sizes of the points that are left, for this machine, whatever their file says. `known`: by fingerprint."""
    for number in to_run(table):
        point = table.points[number]
        ranks = known.get(point.fingerprint)
        if ranks is None:
            ranks = checker.spec(recipe_of(point), table.folder.run(point), {}).world_size
        table.points[number] = point.model_copy(update={"ranks": ranks})


@dataclass
class _locked:
    """A sweep's folder, made where it is not there, and this process the only one that runs it."""

    folder: SweepFolder

    def __enter__(self) -> None:
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.folder.path, error) from None
        self._lock = RunLock(self.folder.path).acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _go(table: Table, checker: Checker, machine: Target) -> int:
    """Runs what is left of a sweep, and shows what it has come to. RecipeError: a search that saw no value."""
    left, found = len(to_run(table)), len(table.points)
    if table.head.spec.kind == "grid":
        _say(f"{table.folder.path}: {found} points, {left or 'none'} of them left")
    else:
        _say(f"{table.folder.path}: {table.head.spec.trials} points to search, {found - left} of them done")
    with StopRequests() as stop:
        failed, stopped = _run_points(table, checker, machine, stop)
    code = exit_code(table, failed, stopped=stopped)
    blind = _blind(table) if code == 0 else []
    code = RecipeError.exit_code if blind else code
    table.set_state("done" if code == 0 else "interrupted" if code == Preempted.exit_code else "failed")
    table.write_page(running=False)
    print_results(table)
    if blind:
        raise RecipeError(blind)
    return code


def _blind(table: Table) -> list[Problem]:
    """What is wrong with a search none of whose trials gave a value: it has searched nothing."""
    head, points = table.head, list(table.points.values())
    done = [point for point in points if point.state == "done"]
    if head.spec.kind == "grid" or any(has_value(table.follower(p).read(), head.metric) for p in done):
        return []
    reasons = [p.reason for p in points if p.state == "invalid"]
    reasons += [why for p in done if (why := never_has(head.metric, recipe_of(p)))]
    text = f"none of the {len(points)} trials gave a value of sweep.metric={head.metric}: nothing was searched"
    return [Problem("sweep.metric", "; ".join([text, *reasons[:1]]), code="sweep.metric")]


def _run_points(table: Table, checker: Checker, machine: Target, stop: StopRequests) -> tuple[list[int], bool]:
    """-> exit codes of the points that failed, and whether points are left since the sweep was asked to stop."""
    if table.head.launcher != OWN_LAUNCHER:
        failed = hydra_jobs.run_points(table, stop, _say)
        return failed, bool(stop.count and to_run(table))
    search = _search(table, checker)
    slots = make_slots(table.head.spec, machine, os.environ)
    failed = Driver(table, slots, checker, stop, _say, search=search).run()
    unasked = search is not None and len(table.points) < table.head.spec.trials
    return failed, bool(stop.count and (to_run(table) or unasked))


def _search(table: Table, checker: Checker) -> Search | None:
    if table.head.spec.kind == "grid":
        return None
    from megaspec.sweep.search import OptunaSearch  # Optuna, only where it is needed

    search = OptunaSearch(table.head, table.folder.path, checker, table.points)
    points = list(table.points.values())
    search.remember(points, {p.number: table.follower(p).read() for p in points})
    return search


def _drafts(taken: SweepWords, checker: Checker) -> list[Draft]:
    """Every point of a grid, checked. RecipeError, DataError: some can't be run."""
    combinations = grid(taken)
    if len(combinations) >= _MANY:
        _say(f"checking {len(combinations):,} points")
    made = [checker.draft(taken.plain, overrides) for overrides in combinations]
    drafts, repeats = without_repeats(made)
    refuse_invalid(drafts)
    for one, earlier in repeats[:5]:
        _say(f"{' '.join(one.overrides)} is the same run as {' '.join(earlier.overrides)}: run once")
    if len(repeats) > 5:
        _say(f"... and {len(repeats) - 5} repeats more")
    return drafts


def _place(taken: SweepWords) -> tuple[str, SweepFolder]:
    given = next((w.removeprefix("name=") for w in taken.plain if w.startswith("name=")), None)
    name = taken.spec.name if taken.spec.name != AUTO else given or default_name(taken)
    return name, SweepFolder(SWEEPS / name if taken.spec.folder == AUTO else Path(taken.spec.folder))


def _same_sweep(folder: SweepFolder, head: SweepHead, drafts: Sequence[Draft]) -> None:
    """RecipeError: the folder holds a sweep of other points, or of points that have changed."""
    old, points = folder.head(), folder.points()
    ways = f"give sweep.name=NEW, or go on with the old points: megaspec sweep resume {folder.path}"
    if head.spec.kind == "optuna" or old.spec.kind == "optuna":
        same = (old.spec.kind, old.axes, set(old.plain)) == (head.spec.kind, head.axes, set(head.plain))
        what = "another search" if not same else ""
    else:
        known = {p.fingerprint for p in points}
        new = [d for d in drafts if d.fingerprint not in known]
        overrides = {p.overrides for p in points}
        changed = [d for d in new if d.overrides in overrides]
        what = f"{len(points)} other points" if new or len(drafts) != len(points) else ""
        if changed:
            what = f"({' '.join(changed[0].overrides)}) composed from other settings than now"
    if what:
        raise RecipeError([Problem("sweep.folder", f"{folder.path} holds {what}; {ways}", code="sweep-other")])


def _say(text: str) -> None:
    for line in text.splitlines():
        print(printable(f"megaspec: {line}"), flush=True)
