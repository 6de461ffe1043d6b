"""The machine that a recipe is planned for: `hardware=`, `gpus=` and `throughput=` on a command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaspec.checkable import PartlyError
from megaspec.compose.compose import Composed
from megaspec.compose.words import compose_words
from megaspec.core.axes import fewest_gpus, world_size
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.core.problems import origin_of
from megaspec.estimate.hardware import Hardware, hardware_named, hardware_of
from megaspec.estimate.target import Target, detect_target
from megaspec.estimate.throughput import MeasuredThroughput, read_throughput, throughput_of
from megaspec.launcher.spec import ClusterLauncher
from megaspec.precision.spec import fp8_recipe
from megaspec.recipe import Recipe
from megaspec.resolve.beside import with_rules
from megaspec_kernels.catalog import packages_of

DEFAULT = "H100"
CPU = "cpu"
MAX_GPUS = 1_000_000
THROUGHPUT = "throughput"


@dataclass(frozen=True)
class Planned:
    """A composed recipe and what it is planned for."""

    composed: Composed
    target: Target
    hardware: Hardware | None
    """None for a machine without GPUs, or with GPUs that the table does not know."""
    throughput: MeasuredThroughput | None
    why: str
    """How the machine was chosen."""


def plan_words(
    words: Sequence[str], config_dirs: Sequence[str | Path] = (), *, searched: Sequence[str] = ()
) -> Planned:
    """`recipe=NAME [hardware=NAME] [gpus=N] [throughput=FILE] a.b=c ...`.

    Without `hardware=`: the GPUs of this machine; where it has none, those that the recipe's source names, else H100.
    Without `gpus=`: launcher.ranks, else those of this machine, else as many nodes as the degrees that are set need. A
    launcher.ranks that a file sets gives way to `gpus=`. `searched`: keys that will be decided anew. RecipeError: what
    `compose` raises, with every rule that is broken beside it.
    """
    given, rest = split_words(words, ("hardware", "gpus", THROUGHPUT))
    here = detect_target()
    try:
        composed = compose_words(rest, config_dirs)
    except PartlyError as error:
        raise _with_rules(error, given, here, searched) from None
    if "gpus" in given:
        composed = _on(composed, _count(given["gpus"]))
    target, hardware, why = _machine(given, composed.recipe, here)
    return Planned(composed, target, hardware, _throughput(given, hardware), why)


def _with_rules(error: PartlyError, given: dict[str, str], here: Target, searched: Sequence[str]) -> RecipeError:
    found = error.checkable
    if found is not None and "gpus" in given:
        placed = _on(Composed(found.recipe, dict(found.origins)), _count(given["gpus"]))
        error = PartlyError(error.problems, replace(found, recipe=placed.recipe, origins=placed.origins))
    return with_rules(error, lambda recipe: _machine(given, recipe, here)[0], searched=searched)


def _machine(given: dict[str, str], recipe: Recipe, here: Target) -> tuple[Target, Hardware | None, str]:
    """What the recipe is planned for, and why."""
    name = given.get("hardware")
    if name is None and isinstance(recipe.launcher, ClusterLauncher):
        return _of_cluster(given, recipe, recipe.launcher, here)
    if name == CPU:
        return without_gpus(here), None, "hardware=cpu"
    ranks = recipe.launcher.ranks
    is_enough = ranks == AUTO or ranks <= here.gpus
    if name is None and here.device == "cuda" and "gpus" not in given and is_enough:
        return here, hardware_of(here), "this machine"
    hardware, why = _hardware(name, recipe, here)
    return planned_target(hardware, _gpus(given, recipe, hardware), here, recipe), hardware, why


def _of_cluster(
    given: dict[str, str], recipe: Recipe, launcher: ClusterLauncher, here: Target
) -> tuple[Target, Hardware | None, str]:
    """The nodes of the cluster's job."""
    why = f"launcher.hardware={launcher.hardware}"
    if launcher.hardware == CPU:
        return cluster_target(recipe, launcher, here), None, why
    hardware = _named(launcher)
    gpus = launcher.nodes * launcher.ranks_per_node
    if "gpus" in given:
        gpus = _count(given["gpus"])
    return planned_target(hardware, gpus, here, recipe), hardware, why


def _named(launcher: ClusterLauncher) -> Hardware:
    """The kind of GPU of a cluster's nodes. RecipeError: it is not known."""
    try:
        return hardware_named(launcher.hardware)
    except RecipeError as error:
        problems = []
        for problem in error.problems:
            text = f"launcher.{problem.message}, or cpu"
            problems.append(replace(problem, key="launcher.hardware", message=text))
        raise RecipeError(problems) from None


def refuse_jobs(recipe: Recipe, origins: Mapping[str, str], command: str) -> None:
    """RecipeError: the recipe is for a scheduler, and `command` starts ranks here."""
    kind = recipe.launcher.kind
    if kind == "local":
        return
    text = f"launcher.kind={kind}: megaspec train alone submits jobs, and {command} starts ranks here; set "
    text += "launcher=local. A run goes on in a job by megaspec train recipe=NAME resume=auto with its name or run_dir"
    raise RecipeError([Problem("launcher.kind", text, origin_of(origins, "launcher.kind"))])


def without_gpus(here: Target) -> Target:
    """This machine, its GPUs left out."""
    return here.model_copy(update={"gpus": 0, "gpu": None, "sm": 0, "gpu_memory": 0})


def cluster_target(recipe: Recipe, launcher: ClusterLauncher, here: Target) -> Target:
    """The nodes of a cluster's job, with the packages of this machine. RecipeError: GPUs that are not known."""
    if launcher.hardware == CPU:
        # what memory and cores the nodes have is not known here
        return without_gpus(here).model_copy(update={"memory": 0})
    return planned_target(_named(launcher), launcher.nodes * launcher.ranks_per_node, here, recipe)


def planned_target(hardware: Hardware, gpus: int, here: Target, recipe: Recipe) -> Target:
    """A machine, or several, of this many GPUs, with the packages of this one, and those that kernels which the recipe
    names are made of: whoever wants them there installs them there."""
    versions = dict.fromkeys(packages_of(recipe.kernels.model_dump(), fp8_recipe=fp8_recipe(recipe.precision)), "")
    versions |= here.versions | {"torch": here.versions.get("torch", "").partition("+")[0]}
    return Target(
        gpus=gpus,
        gpu=hardware.name,
        sm=hardware.sm,
        gpu_memory=hardware.memory,
        cores=here.cores,
        versions=versions,
    )


def stated_gpus(recipe: Recipe, hardware: Hardware) -> int:
    """launcher.ranks, else as many nodes as the degrees that are set need, of eight GPUs where a node has more."""
    if recipe.launcher.ranks != AUTO:
        return recipe.launcher.ranks
    least = fewest_ranks(recipe)
    return max(least, min(8, hardware.node_size) * -(-least // hardware.node_size))


def fewest_ranks(recipe: Recipe) -> int:
    """GPUs that the degrees of a recipe need, those that it leaves open counted 1."""
    degrees = {}
    for axis in ("tp", "pp", "cp", "ep", "etp", "dp_replicate", "dp_shard"):
        degree = getattr(recipe.parallelism, axis)
        degrees[axis] = 1 if degree == AUTO else degree
    # the dense grid with what is said of data parallel, and whatever the expert grid needs beside it
    dense = world_size(degrees)
    both_grids = fewest_gpus(**{axis: degrees[axis] for axis in ("tp", "pp", "cp", "ep", "etp")})
    return max(both_grids, dense)


def split_words(words: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The words of these names, which say something of the machine, and the others, which are the recipe's.
    RecipeError: one without a value, or given twice."""
    given: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in names:
            rest.append(word)
        elif name in given or not value:
            what = "is given more than once" if name in given else "is empty"
            raise RecipeError([Problem(name, f"{name}= {what}", COMMAND_LINE, "choice.unknown")])
        else:
            given[name] = value
    return given, rest


def _hardware(name: str | None, recipe: Recipe, here: Target) -> tuple[Hardware, str]:
    """The kind of GPU that is planned for, and why it is that one."""
    if name is not None:
        return hardware_named(name), f"hardware={name}"
    if here.device == "cuda":
        hardware = hardware_of(here)
        if hardware is not None:
            return hardware, "the GPUs of this machine"
    if recipe.about.hardware is not None:
        return hardware_named(recipe.about.hardware), "no GPU here: what the recipe's source names"
    return hardware_named(DEFAULT), "no GPU here; hardware=cpu plans for this CPU"


def _gpus(given: dict[str, str], recipe: Recipe, hardware: Hardware) -> int:
    if "gpus" in given:
        return _count(given["gpus"])
    return stated_gpus(recipe, hardware)


def _count(text: str) -> int:
    """The number of `gpus=`. RecipeError: it is none, or too large."""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= MAX_GPUS:
        text = f"gpus={text} must be a whole number from 1 to {MAX_GPUS:,}"
        raise RecipeError([Problem("gpus", text, COMMAND_LINE, "choice.unknown")])
    return int(text)


def _on(composed: Composed, gpus: int) -> Composed:
    """The recipe with as many ranks, where a file says another number."""
    ranks = composed.recipe.launcher.ranks
    # a launcher.ranks of the command line stays as it is beside gpus=
    is_asked_for = composed.origins.get("launcher.ranks") == COMMAND_LINE
    if ranks in (AUTO, gpus) or is_asked_for:
        return composed
    launcher = composed.recipe.launcher.model_copy(update={"ranks": gpus})
    recipe = composed.recipe.model_copy(update={"launcher": launcher})
    return replace(composed, recipe=recipe, origins=composed.origins | {"launcher.ranks": f"gpus={gpus}"})


def _throughput(given: dict[str, str], hardware: Hardware | None) -> MeasuredThroughput | None:
    """Those of a file that is given, else those measured for the hardware; None on a CPU and on unknown GPUs."""
    if given.get("hardware") == CPU:
        return None
    if THROUGHPUT in given:
        return read_throughput(Path(given[THROUGHPUT]), hardware)
    if hardware is None:
        return None
    return throughput_of(hardware)
