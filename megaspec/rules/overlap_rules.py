"""Rules about what runs beside computation, and about what waits in the memory of the CPU."""

from megaspec.core.divisors import divisors
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.stages import stage_problem, stages_of
from megaspec.rules.case import Case


def overlap_needs_what_it_hides(case: Case) -> Problem | None:
    """An overlap is switched off only where there is communication that it would hide."""
    parallelism = case.recipe.parallelism
    is_sharded = parallelism.dp_strategy != "replicate"
    has_shared_experts = case.moe is not None and bool(case.moe.d_shared)
    # the overlap, whether there is communication for it, what would make some, and the degree that decides it
    for name, communicates, needs, degree in (
        ("grad_reduce", case.dp * case.cp > 1, "data-parallel or context-parallel ranks", "dp_replicate"),
        ("param_gather", is_sharded, "weights that are shared out, dp_strategy=zero1 to hsdp", "dp_strategy"),
        ("tp", case.tp > 1, "parallelism.tp > 1", "tp"),
        ("p2p", case.pp > 1, "parallelism.pp > 1", "pp"),
        (
            "shared_experts",
            has_shared_experts and case.ep * case.etp > 1,
            "model.moe.d_shared and parallelism.ep > 1",
            "ep",
        ),
    ):
        if getattr(parallelism.overlap, name) or communicates:
            continue
        # a degree that the resolver chose is no mistake of the user's
        if f"parallelism.{degree}" not in case.decided:
            key = f"parallelism.overlap.{name}"
            return Problem(key, f"{key}=false needs {needs}: there is nothing to overlap; drop it")
    return None


def offloaded_layers_are_there(case: Case) -> Problem | None:
    """No more layers are offloaded than a chunk of the model has, and groups that are recomputed stay whole."""
    key = "parallelism.offload.layers"
    parallelism = case.recipe.parallelism
    n_layers = case.recipe.model.n_layers
    layers = parallelism.offload.layers
    recompute = parallelism.recompute
    if not layers or stage_problem(n_layers, parallelism) is not None:
        return None
    # layers of the largest chunk of any pipeline rank
    most = 0
    for chunks in stages_of(n_layers, parallelism):
        for chunk in chunks:
            most = max(most, len(chunk.layers))
    if layers > most:
        where = f"the model, model.n_layers={most}"
        if case.pp > 1:
            where = f"a stage at parallelism.pp={case.pp}"
        return Problem(key, f"{key}={layers} must be at most the {most} layers of {where}; try {most}")
    group = recompute.layers or 1
    has_groups = recompute.kind == "full" and recompute.method != "block"
    # all layers of a chunk may be offloaded although the last group is smaller
    if has_groups and layers % group and layers < most:
        whole = list(range(group, most + 1, group)) or [most]
        smaller_groups = [divisor for divisor in divisors(layers) if divisor < group]
        text = f"{key}={layers} must hold whole groups of parallelism.recompute.layers={group}"
        hint = f"try {one_of(whole[:4])}, or parallelism.recompute.layers={smaller_groups[-1]}"
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
