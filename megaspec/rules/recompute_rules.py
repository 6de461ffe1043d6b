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
        if value is None or recompute.kind == kind:
            continue
        if isinstance(value, tuple):
            value = _listed(value)
        key = f"parallelism.recompute.{name}"
        text = f"{key}={value} needs parallelism.recompute.kind={kind}, it is {recompute.kind}"
        return Problem(key, f"{text}; drop it or set kind={kind}")
    return None


def recomputed_parts_are_named_once(case: Case) -> Problem | None:
    """Selective recompute names at least one part, each of them once."""
    parts = case.recipe.parallelism.recompute.parts
    key = "parallelism.recompute.parts"
    if parts is None:
        return None
    if not parts:
        return Problem(key, f"{key}=[] recomputes nothing; try [core_attention], or parallelism.recompute.kind=none")
    for part in parts:
        if parts.count(part) > 1:
            return Problem(key, f"{key}={_listed(parts)} names {part} twice; keep one")
    return None


def _listed(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"


def recomputed_parts_are_in_the_model(case: Case) -> Problem | None:
    """Only what the model has can be recomputed: experts, shared experts, dense feed-forward layers, a latent."""
    recompute = case.recipe.parallelism.recompute
    parts = recompute.parts or ()
    if recompute.kind == "selective" and recompute.parts is None:
        parts = ("core_attention",)
    lacks = _lacking_parts(case)
    has = [part for part in _PARTS if part not in lacks]
    key = "parallelism.recompute.parts"
    for part in parts:
        if part in lacks:
            text = f"{key}={_listed(parts)}: the model has no {part} to recompute, {lacks[part]}"
            return Problem(key, f"{text}; it has {one_of(has)}")
    return None


def _lacking_parts(case: Case) -> dict[str, str]:
    """Parts that can be recomputed in other models, each with the setting for which this one lacks it."""
    moe = case.moe
    lacks = {}
    if moe is None:
        lacks["moe"] = "model.moe=null"
        lacks["shared_experts"] = "model.moe=null"
    elif moe.d_shared is None:
        lacks["shared_experts"] = "model.moe.d_shared=null"
    if moe is not None and case.dense_layers == 0:
        lacks["mlp"] = "every layer has experts"
    mixers = {mixer for layer in case.recipe.model.mixers for mixer in layer}
    if "attention" not in mixers:
        lacks["core_attention"] = "model.layer.mixers names no attention"
    if moe is None and "mlp" not in mixers:
        lacks["mlp"] = "model.layer.mixers names no mlp"
    if case.mla is None:
        lacks["mla_up"] = f"model.attention.kind={case.recipe.model.attention.kind}"
    return lacks


def recomputed_layers_are_there(case: Case) -> Problem | None:
    """A group of recomputed layers is no larger than the chunk of the model that it lies in."""
    recompute = case.recipe.parallelism.recompute
    parallelism = case.recipe.parallelism
    n_layers = case.recipe.model.n_layers
    if recompute.kind != "full" or recompute.layers is None:
        return None
    if stage_problem(n_layers, parallelism) is not None:
        return None
    most = 0
    for rank_chunks in stages_of(n_layers, parallelism):
        for chunk in rank_chunks:
            most = max(most, len(chunk.layers))
    if recompute.layers <= most:
        return None
    if case.pp == 1:
        where = f"the model, model.n_layers={n_layers}"
    elif parallelism.pipeline.virtual_stages == 1:
        where = f"a stage at parallelism.pp={case.pp}"
    else:
        where = f"a chunk at pp={case.pp} and virtual_stages={parallelism.pipeline.virtual_stages}"
    key = "parallelism.recompute.layers"
    text = f"{key}={recompute.layers} must be at most the {most} layers of {where}"
    return Problem(key, f"{text}; try {most}")
