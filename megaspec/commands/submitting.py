"""How `train` hands a run to a cluster: resolved for its nodes here, trained there."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from megaspec.commands.fewer_nodes import for_fewer_nodes, print_on_fewer
from megaspec.commands.layouts import layout_options, specs_of_list
from megaspec.commands.planned import cluster_target
from megaspec.compose.compose import Composed
from megaspec.compose.words import compose_words, tell_left_out
from megaspec.core.errors import Problem, RecipeError, printable
from megaspec.core.frozen import AUTO
from megaspec.core.terminal import terminal
from megaspec.data.fetch import data_in_words
from megaspec.estimate.target import Target, detect_target
from megaspec.launcher.spec import ClusterLauncher, SlurmLauncher
from megaspec.plan.report import print_plan
from megaspec.recipe import Recipe
from megaspec.resolve.gather import gather_facts, planned_run_dir
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.search.fits import memory_warning, start_problems
from megaspec.spec import Spec
from megaspec.sweep.multirun import specs_of_points
from megaspec.sweep.points import grid
from megaspec.sweep.words import OWN_LAUNCHER, read_words
from megaspec_launchers import kubernetes, slurm
from megaspec_launchers.recipe_file import content_of_job

SCHEDULERS: dict[str, ModuleType] = {"slurm": slurm, "kubernetes": kubernetes}
"""By launcher.kind: `render(spec, memory=)`, `submit(text, specs)` and `refuse_missing()`."""
# Names of keys whose values are files or folders.
PATHS = ("prefix", "path", "cache", "source", "fallback_dir")


def submit(composed: Composed, launcher: ClusterLauncher, *, goes_on: bool, memory: str, prints: bool) -> int:
    """Resolves a run for the nodes that its job asks for, and submits the job or `prints` it. -> 0.

    Nothing is written here: the job makes the run's folder where it runs. `goes_on`: with the run that is there
    (resume=auto). RecipeError, DataError: what can't be trained, or no scheduler to submit to; nothing was started.
    """
    refuse_in_a_world(launcher)
    scheduler = SCHEDULERS[launcher.kind]
    if not prints:
        scheduler.refuse_missing()
    target = cluster_target(composed.recipe, launcher, detect_target())
    facts = facts_for(composed.recipe, launcher, goes_on=goes_on)
    refused = partial(start_problems, target=target, origins=composed.origins, memory=memory)
    spec = resolve(composed.recipe, target, facts, composed.origins, refused=refused)
    _refuse_wrong_layouts(spec)
    spec, fewer = for_fewer_nodes(spec, target, memory=memory)
    _refuse_unmounted(spec)
    tell_left_out(composed)
    warning = memory_warning(spec, target)
    if warning:
        print(printable(f"megaspec: {warning}"), file=sys.stderr)
    text = scheduler.render(spec, memory=memory)
    if prints:
        print(text, end="")
        return 0
    data = ""
    if launcher.kind != "kubernetes":
        # what pods see is not known here
        data = data_in_words(spec.data, spec.remote)
    print_plan(spec, target, terminal(), data=data)
    print_on_fewer(spec, fewer, target, terminal())
    said = scheduler.submit(text, [spec])
    print(printable(f"{launcher.kind}: submitted {said}; the run is in {spec.run_dir}", keep="\n"))
    return 0


def launcher_of_points(words: Sequence[str], config_dirs: Sequence[str], *, prints: bool) -> ClusterLauncher | None:
    """The launcher of a sweep's first point, where it submits jobs; None where points are run here, or can't be.

    RecipeError: with `prints`, there is no first point.
    """
    try:
        taken = read_words(words, config_dirs)
        overrides = next(iter(grid(taken)), ())
        launcher = compose_words([*taken.plain, *overrides], config_dirs).recipe.launcher
    except RecipeError:
        if prints:
            raise
        return None  # the sweep itself tells what is wrong, of every point
    if isinstance(launcher, ClusterLauncher):
        return launcher
    return None


def submit_points(words: Sequence[str], config_dirs: Sequence[str], launcher: ClusterLauncher, *, prints: bool) -> int:
    """The points of a grid as jobs: an array of SLURM, of which sweep.slots may run at once; or a job of Kubernetes
    each. -> 0.

    RecipeError, DataError: a point can't be trained, or there is no scheduler; nothing was started.
    """
    refuse_in_a_world(launcher)
    scheduler = SCHEDULERS[launcher.kind]
    if not prints:
        scheduler.refuse_missing()
    taken = read_words(words, config_dirs)
    if taken.spec.kind != "grid" or taken.launcher != OWN_LAUNCHER:
        text = f"launcher.kind={launcher.kind} submits the points of a grid; drop sweep.kind={taken.spec.kind} and "
        text += "hydra/launcher, or set launcher=local to run points from here"
        raise RecipeError([Problem("launcher.kind", text)])
    # of every point the same, see _point_target
    facts_of = partial(facts_for, launcher=launcher, goes_on=False)
    specs = specs_of_points(taken, config_dirs, partial(_point_target, launcher=launcher), facts_of)
    for number, spec in enumerate(specs):
        _refuse_wrong_layouts(spec)
        _refuse_unmounted(spec)
        target = cluster_target(spec, launcher, detect_target())
        specs[number], _ = for_fewer_nodes(spec, target, memory=taken.memory)
    if isinstance(launcher, SlurmLauncher):
        at_once = None if taken.spec.slots == AUTO else taken.spec.slots
        text = slurm.render_array(specs, at_once=at_once, memory=taken.memory)
    else:
        _refuse_one_name(specs)
        text = "---\n".join(kubernetes.render(spec, memory=taken.memory) for spec in specs)
    if prints:
        print(text, end="")
        return 0
    said = scheduler.submit(text, specs)
    folder = Path(specs[0].run_dir).parent
    print(printable(f"{launcher.kind}: submitted {said}; {len(specs)} runs are in {folder}", keep="\n"))
    return 0


def _refuse_wrong_layouts(spec: Spec) -> None:
    """RecipeError: a layout of launcher.layouts is none. The node's supervisor would say so when the job has waited."""
    launcher = spec.launcher
    assert isinstance(launcher, ClusterLauncher), f"launcher.kind={launcher.kind} is no job"
    if not launcher.layouts:
        return
    # as the node reads it: with the degrees that are decided, which the words of a layout change
    recipe = Recipe.model_validate_json(json.dumps(content_of_job(spec)))
    target = cluster_target(recipe, launcher, detect_target())
    specs_of_list(layout_options(Composed(recipe, {})), target, gather_facts(recipe))


def _refuse_unmounted(spec: Spec) -> None:
    """RecipeError: what the run reads or keeps lies here where its container on the nodes does not see it."""
    launcher = spec.launcher
    if not isinstance(launcher, SlurmLauncher) or launcher.container is None:
        return
    seen = [os.getcwd()]
    if os.path.isabs(spec.run_dir):
        seen.append(os.path.dirname(spec.run_dir))
    seen += [mount.target or mount.source for mount in launcher.container.mounts]
    problems = []
    for key, path in _paths(spec):
        # also where a link in a folder that is mounted leads
        for place in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
            folder = os.path.dirname(place)
            if os.path.isdir(folder) and not any(_is_below(place, one) for one in seen):
                text = f"{key}={path} is in {folder}, which the container does not see; add it to "
                text += f"launcher.container.mounts: {{source: {folder}}}"
                problems.append(Problem(key, text))
                break
    if problems:
        raise RecipeError(problems)


def _paths(spec: Spec) -> Iterator[tuple[str, str]]:
    """Keys and values of files and folders that are no URLs."""
    waiting: list[tuple[str, Any]] = []
    for section in ("data", "init", "checkpoint"):
        waiting.append((section, getattr(spec, section).model_dump(mode="json")))
    while waiting:
        key, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += [(f"{key}.{name}", one) for name, one in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{key}.{number}", one) for number, one in enumerate(value)]
        elif isinstance(value, str) and key.rpartition(".")[2] in PATHS and "://" not in value:
            yield key, value


def _is_below(place: str, folder: str) -> bool:
    return os.path.commonpath([place, folder]) == os.path.normpath(folder)


def _refuse_one_name(specs: Sequence[Spec]) -> None:
    """RecipeError: jobs of Kubernetes that are called the same; the objects of one would be taken for the other's."""
    names = [kubernetes.job_name(spec) for spec in specs]
    if len(set(names)) < len(names):
        text = f"launcher.job={names[0]} would name the job of every point; drop it, and set sweep.name, by which runs "
        text += "and their jobs are called"
        raise RecipeError([Problem("launcher.job", text)])


def _point_target(recipe: Recipe, *, launcher: ClusterLauncher) -> Target:
    """The nodes of a point's job. RecipeError: its launcher is another."""
    if recipe.launcher != launcher:
        text = "launcher: the points of a sweep ask for the same nodes here; keep launcher the same in all of them"
        raise RecipeError([Problem("launcher", text)])
    return cluster_target(recipe, launcher, detect_target())


def facts_for(recipe: Recipe, launcher: ClusterLauncher, *, goes_on: bool) -> Facts:
    """What is known here of a job's data and folder. SLURM's nodes see the same files; what pods see is not known here:
    what is missing here is told, and looked for there."""
    facts = gather_facts(recipe)
    if goes_on or launcher.kind == "kubernetes":
        facts = replace(facts, run_dir=str(planned_run_dir(recipe)))
    if launcher.kind == "kubernetes":
        for problem in facts.problems:
            print(printable(f"not seen from here, the pods look again: {problem}"), file=sys.stderr)
        # nor where they begin
        facts = replace(facts, problems=(), started_in="")
    return facts


def refuse_in_a_world(launcher: ClusterLauncher) -> None:
    """RecipeError: this process is a rank of a world that is there already."""
    if "RANK" in os.environ:
        text = (
            f"launcher.kind={launcher.kind} submits a job, but torchrun has started this process; give the command by "
        )
        text += "itself, or set launcher=local to train here"
        raise RecipeError([Problem("launcher.kind", text)])
