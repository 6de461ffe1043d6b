"""Rules about what the backward pass computes again."""

from collections.abc import Sequence

from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.parallelism.stages import stage_problem, stages_of
from megaspec.rules.case import Case

_PARTS = ("core_attention", "activation", "norm", "mlp", "moe", "shared_experts", "mla_up")


def recompute_settings_need_their_kind(case: Case) -> Problem | None:
    """parts belong to selective, method and layers to full; none takes neither."""
    recompute = case.recipe.parallelism.recompute
    if "parallelism.recompute.kind" in case.decided:
        return None
    for name, kind in (("parts", "selective"), ("method", "full"), ("layers", "full")):
        value = getattr(recompute, name)
        if value is not None and recompute.kind != kind:
            key = f"parallelism.recompute.{name}"
            shown = _listed(value) if isinstance(value, tuple) else value
            text = f"{key}={shown} needs parallelism.recompute.kind={kind}, it is {recompute.kind}"
            return Problem(key, f"{text}; drop it or set kind={kind}")
    return None


def recomputed_parts_are_named_once(case: Case) -> Problem | None:
    """Selective recompute names at least one part, each of them once."""
    parts, key = case.recipe.parallelism.recompute.parts, "parallelism.recompute.parts"
    if parts is None or (parts and len(set(parts)) == len(parts)):
        return None
    if not parts:
        return Problem(key, f"{key}=[] recomputes nothing; try [core_attention], or parallelism.recompute.kind=none")
    twice = next(part for part in parts if parts.count(part) > 1)
    return Problem(key, f"{key}={_listed(parts)} names {twice} twice; keep one")


def _listed(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"


def recomputed_parts_are_in_the_model(case: Case) -> Problem | None:
    """Only what the model has can be recomputed: experts, shared experts, dense feed-forward layers, a latent."""
    parts, moe, key = case.recipe.parallelism.recompute.parts or (), case.moe, "parallelism.recompute.parts"
    lacks = {}
    if moe is None:
        lacks["moe"] = lacks["shared_experts"] = "model.moe=null"
    elif moe.d_shared is None:
        lacks["shared_experts"] = "model.moe.d_shared=null"
    if moe is not None and case.dense_layers == 0:
        lacks["mlp"] = "every layer has experts"
    if case.mla is None:
        lacks["mla_up"] = "model.mla=null"
    absent = next((part for part in parts if part in lacks), None)
    if absent is None:
        return None
    has = one_of([part for part in _PARTS if part not in lacks])
    text = f"{key}={_listed(parts)}: the model has no {absent} to recompute, {lacks[absent]}"
    return Problem(key, f"{text}; it has {has}")


def recomputed_layers_are_there(case: Case) -> Problem | None:
    """A group of recomputed layers is no larger than the chunk of the model that it lies in."""
    recompute, key = case.recipe.parallelism.recompute, "parallelism.recompute.layers"
    model, parallelism = case.recipe.model, case.recipe.parallelism
    if recompute.kind != "full" or recompute.layers is None:
        return None
    if stage_problem(model.n_layers, parallelism) is not None:
        return None
    most = max(len(chunk.layers) for rank in stages_of(model.n_layers, parallelism) for chunk in rank)
    if recompute.layers <= most:
        return None
    chunk = f"a stage at parallelism.pp={case.pp}" if case.pp > 1 else f"the model, model.n_layers={model.n_layers}"
    if case.pp > 1 and parallelism.pipeline.virtual_stages > 1:
        chunk = f"a chunk at pp={case.pp} and virtual_stages={parallelism.pipeline.virtual_stages}"
    text = f"{key}={recompute.layers} must be at most the {most} layers of {chunk}"
    return Problem(key, f"{text}; try {most}")
