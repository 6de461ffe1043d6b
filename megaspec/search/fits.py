"""Whether a run can start: what it asks for is built, and it fits the memory of its GPUs."""

from collections.abc import Mapping

from megaspec.core.errors import Problem
from megaspec.core.problems import one_of, origin_of
from megaspec.core.units import GIB
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.remedies import remedies
from megaspec.spec import Spec

# Predictions lie within 5 % of what was measured: past REFUSED of a GPU's memory a run can't fit, past TOLD it may not.
REFUSED = 1.10
TOLD = 0.97
# `memory=` on a command line: ignore starts a run that is predicted not to fit.
MEMORY = ("check", "ignore")
_KEY = "train.micro_batch"


def start_problems(
    spec: Spec, target: Target, origins: Mapping[str, str] | None = None, *, memory: str = "check"
) -> list[Problem]:
    """Why a run can't start: what can be planned only, and, unless `memory` is ignore, memory that it can't have."""
    problems = list(unbuilt_problems(spec, origins))
    if memory == "check":
        too_large = memory_problem(spec, target, origins)
        if too_large is not None:
            problems.append(too_large)
    return problems


def memory_problem(spec: Spec, target: Target, origins: Mapping[str, str] | None = None) -> Problem | None:
    """Why a run on GPUs would run out of memory, with what would fit; None where it fits or the memory is not known."""
    if _share(spec, target) <= REFUSED:
        return None
    text = f"{_KEY}={spec.train.micro_batch}: {_needs(spec, target)}; {_way_out(spec, target)}, or memory=ignore"
    return Problem(_KEY, text, origin_of(origins or {}, _KEY), "memory")


def memory_warning(spec: Spec, target: Target) -> str:
    """A line about a run that fits barely, or barely does not; "" where there is nothing to say."""
    if TOLD < _share(spec, target) <= REFUSED:
        return f"memory: {_needs(spec, target)}; it may not fit"
    return ""


def _share(spec: Spec, target: Target) -> float:
    """What the fullest rank needs over what its GPU has; 0 on a CPU."""
    if spec.device != "cuda" or not target.gpu_memory:
        return 0.0
    return fullest(memory_of(spec)).total / target.gpu_memory


def _needs(spec: Spec, target: Target) -> str:
    needed = fullest(memory_of(spec)).total / GIB
    available = target.gpu_memory / GIB
    return f"the fullest rank needs {needed:,.1f} GiB as predicted, and {target.gpu} has {available:,.1f}"


def _way_out(recipe: Recipe, target: Target) -> str:
    hardware = hardware_of(target)
    words = []
    if hardware is not None:
        words = [f"{one.words} ({one.total / GIB:,.1f} GiB)" for one in remedies(recipe, hardware)[:3]]
    if not words:
        return "megaspec tune searches for a layout that fits"
    return f"try {one_of(words)}"
