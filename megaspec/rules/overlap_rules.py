"""Rules about what runs beside computation, and about what waits in the memory of the CPU."""

from megaspec.core.divisors import divisors
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.stages import stage_problem, stages_of
from megaspec.rules.case import Case


def overlap_needs_what_it_hides(case: Case) -> Problem | None:
    """An overlap is switched off only where there is communication that it would hide."""
    own = case.recipe.parallelism
    is_sharded = own.dp_strategy != "replicate"
    shared = case.moe is not None and bool(case.moe.d_shared) and case.ep * case.etp > 1
    for name, sends, needs, decided in (
        ("grad_reduce", case.dp * case.cp > 1, "data-parallel or context-parallel ranks", "dp_replicate"),
        ("param_gather", is_sharded, "weights that are shared out, dp_strategy=zero1 to hsdp", "dp_strategy"),
        ("tp", case.tp > 1, "parallelism.tp > 1", "tp"),
        ("p2p", case.pp > 1, "parallelism.pp > 1", "pp"),
        ("shared_experts", shared, "model.moe.d_shared and parallelism.ep > 1", "ep"),
    ):
        if not getattr(own.overlap, name) and not sends and f"parallelism.{decided}" not in case.decided:
            key = f"parallelism.overlap.{name}"
            return Problem(key, f"{key}=false needs {needs}: there is nothing to overlap; drop it")
    return None


def offloaded_layers_are_there(case: Case) -> Problem | None:
    """No more layers are offloaded than a chunk of the model has, and groups that are recomputed stay whole."""
    own, key = case.recipe.parallelism, "parallelism.offload.layers"
    model, layers, recompute = case.recipe.model, own.offload.layers, own.recompute
    if not layers or stage_problem(model.n_layers, own) is not None:
        return None
    most = max(len(chunk.layers) for rank in stages_of(model.n_layers, own) for chunk in rank)
    if layers > most:
        where = f"a stage at parallelism.pp={case.pp}" if case.pp > 1 else f"the model, model.n_layers={most}"
        return Problem(key, f"{key}={layers} must be at most the {most} layers of {where}; try {most}")
    group = recompute.layers or 1
    if recompute.kind == "full" and recompute.method != "block" and layers % group and layers < most:
        fits = list(range(group, most + 1, group)) or [most]
        text = f"{key}={layers} must hold whole groups of parallelism.recompute.layers={group}"
        smaller = [d for d in divisors(layers) if d < group]
        hint = f"try {one_of(fits[:4])}, or parallelism.recompute.layers={smaller[-1]}"
        return Problem(key, f"{text}; {hint}")
    return None


def offloaded_optimizers_work_element_by_element(case: Case) -> Problem | None:
    """An optimizer that needs whole matrices is not updated on the CPU."""
    key = "parallelism.offload.optimizer"
    share = case.recipe.parallelism.offload.optimizer
    if not share or not isinstance(case.recipe.optim, MuonSpec):
        return None
    text = f"{key}={share:g} needs an optimizer that updates each weight by itself, optim.kind is muon"
    return Problem(key, f"{text}; drop it or set optim.kind=adamw")
