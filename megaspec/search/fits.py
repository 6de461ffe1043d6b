"""Whether a run can start: what it asks for is built, and it fits the memory of its GPUs, or of its CPU's machine."""

from collections.abc import Mapping

from megaspec.core.errors import Problem
from megaspec.core.problems import one_of, origin_of
from megaspec.core.units import GIB, bytes_in_words, plural
from megaspec.estimate.cpu_memory import CpuNeed, cpu_need
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.target import Target
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.checkpoint_size import checkpoint_size
from megaspec.search.remedies import remedies, remedies_on_cpu
from megaspec.spec import Spec

# Predictions lie within 5 % of what was measured: past REFUSED of a GPU's memory a run can't fit, past TOLD it may not.
REFUSED = 1.10
TOLD = 0.97
# Ranks on a CPU and their processes were measured to take from 0.97 to 1.22 times what is predicted (README.md in
# estimate/): past all the memory that is available a run can't fit, past TOLD_ON_CPU of it it may not.
REFUSED_ON_CPU = 1.0
TOLD_ON_CPU = 0.82
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
        else:
            problems += copies_problems(spec, target, origins)
    return problems


def copied_for_saving(spec: Spec, target: Target) -> int:
    """Bytes of a machine's memory that hold what checkpoint.saving=async is writing; ranks share a checkpoint evenly.

    Page-locked where there are GPUs. 0 where training waits instead.
    """
    if spec.checkpoint.saving == "blocking":
        return 0
    local = target.local_ranks or spec.world_size
    if target.gpus:
        local = min(local, target.gpus)
    return checkpoint_size(spec).total * local // spec.world_size


def copies_problems(spec: Spec, target: Target, origins: Mapping[str, str] | None = None) -> list[Problem]:
    """Why this machine's memory does not hold what checkpoint.saving=async copies into it, beside the ranks themselves
    where they have no GPUs."""
    copied = copied_for_saving(spec, target)
    if not copied or not target.memory:
        return []
    available = target.memory
    beside = ""
    if spec.device == "cpu":
        available = max(0, available - need_here(spec, target).total)
        beside = " beside its ranks"
    if copied <= available:
        return []
    key = "checkpoint.saving"
    text = f"{key}=async: what is being saved takes {bytes_in_words(copied)} of this machine's memory, and "
    text += f"{bytes_in_words(available)} are available{beside}; set {key}=blocking, or memory=ignore"
    return [Problem(key, text, origin_of(origins or {}, key), "saving-memory")]


def memory_problem(spec: Spec, target: Target, origins: Mapping[str, str] | None = None) -> Problem | None:
    """Why a run would run out of memory, with what would fit; None where it fits or the memory is not known."""
    if _share(spec, target) <= _refused(spec):
        return None
    text = f"{_KEY}={spec.train.micro_batch}: {_needs(spec, target)}; {_way_out(spec, target)}, or memory=ignore"
    return Problem(_KEY, text, origin_of(origins or {}, _KEY), "memory")


def memory_warning(spec: Spec, target: Target) -> str:
    """A line about a run that fits barely, or barely does not; "" where there is nothing to say."""
    told = TOLD
    if spec.device == "cpu":
        told = TOLD_ON_CPU
    if told < _share(spec, target) <= _refused(spec):
        return f"memory: {_needs(spec, target)}; it may not fit"
    return ""


def _share(spec: Spec, target: Target) -> float:
    """What the fullest rank needs over what its GPU has, or all ranks of a machine over what is available there; 0
    where that is not known."""
    if spec.device == "cpu":
        if not target.memory:
            return 0.0
        return need_here(spec, target).total / target.memory
    if not target.gpu_memory:
        return 0.0
    return fullest(memory_of(spec)).total / target.gpu_memory


def need_here(spec: Spec, target: Target) -> CpuNeed:
    """What the ranks of a run on the CPU take on this machine."""
    return cpu_need(spec, world=spec.world_size, local=target.local_ranks)


def cpu_need_in_words(need: CpuNeed, available: int) -> str:
    """`2 ranks need 4.1 GiB ... , and 3.0 GiB of this machine's memory are available`"""
    ranks = f"{need.ranks} {plural('rank', need.ranks)}"
    verb = "needs" if need.ranks == 1 else "need"
    text = f"{ranks} {verb} {bytes_in_words(need.total)} as predicted"
    text += f" ({bytes_in_words(need.of_ranks)} to train, {bytes_in_words(need.of_processes)} for their processes)"
    return f"{text}, and {bytes_in_words(available)} of this machine's memory are available"


def _refused(spec: Spec) -> float:
    if spec.device == "cpu":
        return REFUSED_ON_CPU
    return REFUSED


def _needs(spec: Spec, target: Target) -> str:
    if spec.device == "cpu":
        return cpu_need_in_words(need_here(spec, target), target.memory)
    needed = fullest(memory_of(spec)).total / GIB
    available = target.gpu_memory / GIB
    return f"the fullest rank needs {needed:,.1f} GiB as predicted, and {target.gpu} has {available:,.1f}"


def _way_out(spec: Spec, target: Target) -> str:
    if spec.device == "cpu":
        found = remedies_on_cpu(spec, target)[:3]
        if not found:
            return (
                "no single change of the layout makes it fit; choose a smaller model (model=hello) or a larger machine"
            )
        return f"try {one_of([f'{one.words} ({bytes_in_words(one.total)})' for one in found])}"
    hardware = hardware_of(target)
    words = []
    if hardware is not None:
        words = [f"{one.words} ({one.total / GIB:,.1f} GiB)" for one in remedies(spec, hardware)[:3]]
    if not words:
        return "megaspec tune searches for a layout that fits"
    return f"try {one_of(words)}"
