"""On which smaller numbers of nodes a job of SLURM can go on, and in which layouts (launcher.min_nodes).

All of it is decided before the job is submitted: the job holds a layout for each number of nodes that one fits, in
launcher.layouts, and its script trains on no other number. The ranks of a start take the layout that has as many, as
those of torchrun do.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from megaspec.commands.layouts import KEY, NO_LAYOUT, LayoutOption, all_open, first_that_fits, layout_options
from megaspec.compose.compose import Composed
from megaspec.core.errors import Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.core.units import counted
from megaspec.estimate.hardware import Hardware, hardware_of
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import MeasuredThroughput, throughput_of
from megaspec.launcher.spec import SEARCH, SlurmLauncher
from megaspec.plan.layouts import ON_FEWER, PlannedLayout, planned_layout, print_layouts
from megaspec.plan.plan import make_plan
from megaspec.recipe import Recipe
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.search.fits import start_problems
from megaspec.spec import Spec
from megaspec_launchers.recipe_file import content_of_job
from megaspec_launchers.slurm import RANKS

MIN_NODES = "launcher.min_nodes"
_MICRO_BATCH = "train.micro_batch"
_ATTENTION = "kernels.attention"
_DATA_PARALLEL = ("parallelism.dp_replicate", "parallelism.dp_shard")


@dataclass(frozen=True)
class OnFewer:
    """What a run is on fewer nodes."""

    nodes: int
    words: tuple[str, ...]
    """Its layout, as it stands in launcher.layouts."""
    spec: Spec


def for_fewer_nodes(spec: Spec, target: Target, *, memory: str) -> tuple[Spec, list[OnFewer]]:
    """The Spec with a layout in launcher.layouts for each smaller number of nodes that its job can go on with, and what
    it is there, the most nodes first; where all nodes are needed the Spec as it is. `target`: all nodes of the job.
    `memory`: ignore takes layouts that are predicted not to fit.

    RecipeError: no layout fits launcher.min_nodes, or one of the list fits no number of nodes.
    """
    launcher = spec.launcher
    if not isinstance(launcher, SlurmLauncher) or not launcher.is_elastic:
        return spec, []
    assert launcher.nodes * launcher.ranks_per_node == spec.world_size, "a rule was not asked"
    recipe = _with_attention_open(spec, _recipe_of_job(spec, launcher.layouts))
    # what is wrong with the data is told where the run itself is resolved
    facts = replace(gather_facts(recipe), problems=())
    words_of: dict[int, tuple[str, ...]] = {}
    refused: RecipeError | None = None
    for nodes in range(launcher.nodes - 1, 0, -1):
        fewer = _fewer(target, launcher, nodes)
        try:
            words_of[nodes] = _words(spec, recipe, fewer, facts, memory=memory)
        except RecipeError as error:
            if nodes == launcher.least_nodes:
                refused = error
        if nodes <= launcher.least_nodes and (refused is None or words_of):
            # with less a job does not start; where its least number is none, the next one that does is told
            break
    if refused is not None:
        raise _no_layout(launcher, list(words_of), refused)
    _refuse_layouts_that_fit_nothing(recipe, launcher, target, facts, memory=memory)
    layouts = tuple(words_of.values())
    made = spec.model_copy(update={"launcher": launcher.model_copy(update={"layouts": layouts})})
    # as the ranks will find it
    options = layout_options(Composed(_recipe_of_job(made, layouts), {}))
    found = []
    for nodes, words in words_of.items():
        fewer = _fewer(target, launcher, nodes)
        prepare = partial(_resolved, target=fewer, facts=facts, memory=memory)
        found.append(OnFewer(nodes, words, first_that_fits(options, fewer, prepare)[1]))
    return made, found


def is_for_fewer_nodes(spec: Spec) -> bool:
    """Whether a run is a job that can go on with fewer nodes than it asks for."""
    return isinstance(spec.launcher, SlurmLauncher) and spec.launcher.is_elastic


def fewer_nodes_to_plan(spec: Spec, target: Target) -> list[OnFewer]:
    """As `for_fewer_nodes`, of a run that is planned alone: what memory does not hold is shown. RecipeError."""
    try:
        return for_fewer_nodes(spec, target, memory="check")[1]
    except RecipeError:
        return for_fewer_nodes(spec, target, memory="ignore")[1]


def _words(spec: Spec, recipe: Recipe, target: Target, facts: Facts, *, memory: str) -> tuple[str, ...]:
    """The layout for as many ranks as a target has. RecipeError: none fits them."""
    ranks = target.world_size
    if recipe.launcher.layouts and recipe.launcher.layouts != SEARCH:
        options = layout_options(Composed(recipe, {}))
        prepare = partial(_resolved, target=target, facts=facts, memory=memory)
        taken, other = first_that_fits(options, target, prepare)
        said = recipe.launcher.layouts[taken.index - 1]
        words = [word for word in said if not word.startswith(RANKS)]
        if other.kernels.attention != spec.kernels.attention and not any(w.startswith(_ATTENTION) for w in words):
            words.append(f"{_ATTENTION}={_literal(other.kernels.attention)}")
        return (*words, f"{RANKS}{ranks}")
    other = _resolved_anew(spec, recipe, target, facts, memory=memory)
    words = []
    before = _flat(_layout_of(spec))
    for key, value in _flat(_layout_of(other)).items():
        if before[key] != value:
            words.append(f"{key}={_literal(value)}")
    return (*words, f"{RANKS}{ranks}")


def _resolved_anew(spec: Spec, recipe: Recipe, target: Target, facts: Facts, *, memory: str) -> Spec:
    """The run on as many ranks as a target has, with as little of its layout decided anew as does. RecipeError: nothing
    fits them; as when the most is decided anew."""
    refused: RecipeError | None = None
    for open_recipe in _opened(spec, recipe):
        launcher = open_recipe.launcher.model_copy(update={"ranks": target.world_size, "layouts": ()})
        option = LayoutOption("", Composed(open_recipe.model_copy(update={"launcher": launcher}), {}))
        try:
            return _resolved(option, target=target, facts=facts, memory=memory)
        except RecipeError as error:
            refused = error
    assert refused is not None, "nothing was tried"
    raise refused


def _refuse_layouts_that_fit_nothing(
    recipe: Recipe, launcher: SlurmLauncher, target: Target, facts: Facts, *, memory: str
) -> None:
    """RecipeError: layouts of the list that the job would never take, each with why it does not fit all nodes."""
    if not recipe.launcher.layouts or recipe.launcher.layouts == SEARCH:
        return
    problems: list[Problem] = []
    numbers = range(launcher.nodes, launcher.least_nodes - 1, -1)
    for index, option in enumerate(layout_options(Composed(recipe, {}))[1:]):
        refused = []
        for nodes in numbers:
            try:
                _resolved(option, target=_fewer(target, launcher, nodes), facts=facts, memory=memory)
            except RecipeError as error:
                refused.append(error)
        if len(refused) < len(numbers):
            continue
        text = f"{KEY}.{index} ({option.name}) must fit a number of nodes from {MIN_NODES}={launcher.least_nodes} to "
        text += f"launcher.nodes={launcher.nodes}, of {counted(launcher.ranks_per_node, 'rank')} each, and fits none; "
        problems.append(Problem(f"{KEY}.{index}", text + "change its degrees, or drop it"))
        for problem in refused[0].problems:
            text = f"on {launcher.nodes} nodes: {problem.message}"
            problems.append(Problem(problem.key, text, problem.origin, problem.code))
    if problems:
        raise RecipeError(problems)


def _opened(spec: Spec, recipe: Recipe) -> list[Recipe]:
    """The recipe of a job with parts of its layout left open, the fewest first: none but what its user left open, or by
    `search` all that a search decides."""
    if recipe.launcher.layouts == SEARCH:
        return [all_open(recipe)]
    decided = []
    for decision in spec.decisions:
        if decision.key.startswith("parallelism.") or decision.key == _MICRO_BATCH:
            decided.append(decision.key)
    found = []
    for keys in (_DATA_PARALLEL, (*_DATA_PARALLEL, _MICRO_BATCH), decided):
        content = recipe.model_dump(mode="json")
        for key in keys:
            if key in decided:
                _set(content, key, AUTO)
        found.append(Recipe.model_validate_json(json.dumps(content)))
    return found


def _with_attention_open(spec: Spec, recipe: Recipe) -> Recipe:
    """The recipe of a job with attention left open again where the resolver took it for the layout of all nodes: not
    every implementation attends to parts of sequences."""
    if _ATTENTION not in {decision.key for decision in spec.decisions}:
        return recipe
    content = recipe.model_dump(mode="json")
    _set(content, _ATTENTION, AUTO)
    return Recipe.model_validate_json(json.dumps(content))


def _set(content: dict[str, Any], key: str, value: object) -> None:
    *sections, name = key.split(".")
    for one in sections:
        content = content[one]
    content[name] = value


def _layout_of(spec: Spec) -> dict[str, Any]:
    """What of a Spec says how the work is divided, and what follows from it."""
    return {
        "parallelism": spec.parallelism.model_dump(mode="json"),
        "train": {"micro_batch": spec.train.micro_batch},
        "kernels": {"attention": spec.kernels.attention},
    }


def _flat(content: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted path -> value."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def _literal(value: Any) -> str:
    """A value as a word of a command line has it."""
    if isinstance(value, str):
        return f"'{value}'"
    return json.dumps(value)


def _recipe_of_job(spec: Spec, layouts: object) -> Recipe:
    content = content_of_job(spec)
    content["launcher"]["layouts"] = layouts
    return Recipe.model_validate_json(json.dumps(content))


def _fewer(target: Target, launcher: SlurmLauncher, nodes: int) -> Target:
    """Fewer nodes of a job, with their ranks started, as the ranks will find them."""
    ranks = nodes * launcher.ranks_per_node
    found = target.model_copy(update={"world_size": ranks, "local_ranks": launcher.ranks_per_node})
    if target.device != "cuda":
        return found
    return found.model_copy(update={"gpus": ranks})


def _resolved(option: LayoutOption, *, target: Target, facts: Facts, memory: str) -> Spec:
    """RecipeError: the layout does not fit the target, or its memory."""
    composed = option.composed
    refused = partial(start_problems, target=target, origins=composed.origins, memory=memory)
    return resolve(composed.recipe, target, facts, composed.origins, refused=refused)


def _no_layout(launcher: SlurmLauncher, usable: Sequence[int], why: RecipeError) -> RecipeError:
    ranks = launcher.least_nodes * launcher.ranks_per_node
    text = f"{MIN_NODES}={launcher.least_nodes} must be a number of nodes that a layout fits, and none fits their "
    text += f"{counted(ranks, 'rank')}; "
    if usable:
        text += f"set {MIN_NODES}={min(usable)}, or "
    elif launcher.layouts:
        text += f"drop {MIN_NODES}, or "
    else:
        text += f"drop {MIN_NODES}, leave a degree of parallelism open, or "
    text += f"add a layout for {counted(ranks, 'rank')} to {KEY}"
    problems = [Problem(MIN_NODES, text)]
    for problem in why.problems:
        # of a list each layout says why
        if problem.code != NO_LAYOUT or problem is not why.problems[0]:
            problems.append(problem)
    return RecipeError(problems)


def planned_on_fewer(
    spec: Spec,
    fewer: Sequence[OnFewer],
    target: Target,
    *,
    hardware: Hardware | None,
    throughput: MeasuredThroughput | None,
) -> list[PlannedLayout]:
    """What a run takes on all its nodes and on fewer, a line for each number that it can go on with; no line where it
    needs all of them."""
    if not fewer:
        return []
    assert isinstance(spec.launcher, SlurmLauncher), f"launcher.kind={spec.launcher.kind} needs all its nodes"
    lines = []
    for nodes, one in [(spec.launcher.nodes, spec), *((one.nodes, one.spec) for one in fewer)]:
        machine = target
        if target.device == "cuda":
            machine = target.model_copy(update={"gpus": one.world_size})
        plan = make_plan(one, machine, hardware=hardware, throughput=throughput)
        lines.append(planned_layout(counted(nodes, "node"), plan))
    return lines


def print_on_fewer(spec: Spec, fewer: Sequence[OnFewer], target: Target, console: Console) -> None:
    """The same before a job is submitted."""
    hardware = None
    throughput = None
    if spec.device == "cuda":
        hardware = hardware_of(target)
    if hardware is not None:
        throughput = throughput_of(hardware)
    lines = planned_on_fewer(spec, fewer, target, hardware=hardware, throughput=throughput)
    if lines:
        print_layouts(lines, console, device=spec.device, heading=ON_FEWER)
