"""Flags of experts, their router and its losses -> the section `model.moe`."""

import ast
import math
import re
from typing import Any

from megaspec.megatron.draft import RecipeDraft

_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
_LOSSES = {"aux_loss": "aux", "seq_aux_loss": "seq_aux", "global_aux_loss": "global_aux"}
_MAX_LAYERS = 10_000


def translate_experts(draft: RecipeDraft) -> None:
    """The section `model.moe`. Experts have the activation and the biases of dense layers, there as here."""
    moe = "model.moe."
    router = "model.moe.router."
    draft.put(f"{moe}n_experts", draft.n_experts, "--num-experts")
    draft.put(f"{moe}top_k", draft["--moe-router-topk"], "--moe-router-topk", ours=2)
    if draft.is_given("--moe-ffn-hidden-size"):
        draft.put(f"{moe}d_expert", draft["--moe-ffn-hidden-size"], "--moe-ffn-hidden-size")
    _which_layers(draft)
    _optional(draft, f"{moe}d_shared", "--moe-shared-expert-intermediate-size")
    _switch(draft, f"{moe}shared_gate", "--moe-shared-expert-gate")
    score = "--moe-router-score-function"
    draft.put(f"{router}score", _SCORES[draft[score]], score, ours="softmax")
    _weights(draft)
    if not draft["--disable-bias-linear"]:
        draft.put(f"{router}logit_bias", True, "--disable-bias-linear", remark="starts at 0 here, drawn there")
    _optional(draft, f"{router}scale", "--moe-router-topk-scaling-factor")
    _optional(draft, f"{router}n_groups", "--moe-router-num-groups")
    _optional(draft, f"{router}group_top_k", "--moe-router-group-topk")
    if draft["--moe-router-enable-expert-bias"]:
        names = ("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate")
        draft.put(f"{router}expert_bias", True, names[0])
        draft.put(f"{router}bias_rate", draft[names[1]], *names)
    _balancing(draft)
    _optional(draft, f"{router}z_loss", "--moe-z-loss-coeff")
    _optional(draft, f"{router}jitter", "--moe-input-jitter-eps")
    if draft.is_given("--moe-expert-capacity-factor") and draft["--moe-expert-capacity-factor"] >= 0:
        draft.put(f"{moe}capacity_factor", draft["--moe-expert-capacity-factor"], "--moe-expert-capacity-factor")
        draft.put(f"{moe}drop", draft["--moe-token-drop-policy"], "--moe-token-drop-policy", ours="probs")
        _switch(draft, f"{moe}pad_to_capacity", "--moe-pad-expert-input-to-capacity")


def _weights(draft: RecipeDraft) -> None:
    """Weights sum to 1 but for a softmax over all experts, and for other scores of a single expert."""
    if "sinkhorn" in draft["--moe-router-load-balancing-type"]:
        # it has weights of its own
        draft.used.add("--moe-router-pre-softmax")
        return
    key = "model.moe.router.norm_top_k"
    if draft["--moe-router-score-function"] == "softmax":
        if draft["--moe-router-pre-softmax"]:
            draft.put(key, False, "--moe-router-pre-softmax")
    elif draft["--moe-router-topk"] == 1:
        draft.put(key, False, "--moe-router-topk", remark="a single expert is weighed by its score")


def _optional(draft: RecipeDraft, key: str, name: str) -> None:
    if draft[name] is not None:
        draft.put(key, draft[name], name)


def _switch(draft: RecipeDraft, key: str, name: str) -> None:
    if draft[name]:
        draft.put(key, True, name)


def _balancing(draft: RecipeDraft) -> None:
    name = "--moe-router-load-balancing-type"
    weights = "--moe-aux-loss-coeff"
    kinds = draft[name]
    coefficients = draft[weights]
    draft.used.update((name, weights))
    if len(kinds) != len(coefficients):
        draft.refuse(weights, f"{len(coefficients)} for {len(kinds)} kinds of balancing; give one for each")
        return
    losses = []
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        if kind == "sinkhorn":
            draft.put("model.moe.router.balancing", "sinkhorn", name)
        elif kind == "quantile_balancing":
            draft.lose(name, "model.moe.router.balancing is top_k or sinkhorn")
        elif kind in _LOSSES and coefficient:
            losses.append({"kind": _LOSSES[kind], "coefficient": coefficient})
    if losses:
        draft.put("model.moe.router.losses", losses, name, weights)


def _which_layers(draft: RecipeDraft) -> None:
    """Every n-th layer, or a list such as ([0]*3+[1]*58)."""
    name = "--moe-layer-freq"
    text = draft[name]
    if re.fullmatch(r"[1-9]\d{0,4}", text):
        draft.put("model.moe.every", int(text), name, ours=1)
        return
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        draft.refuse(name, "must be a number, or a list of 0 and 1 such as ([0]*3+[1]*58)")
        return
    # layers in front of the first one with experts
    dense = [*pattern, 1].index(1)
    if len(pattern) == draft.n_layers and 0 not in pattern[dense:]:
        draft.put("model.moe.first_dense", dense, name)
    else:
        draft.put("model.moe.layers", pattern, name)


def _pattern(node: ast.expr) -> list[int]:
    """The 0s and 1s of a list expression of lists, + and *. ValueError: it is something else, or too long."""
    match node:
        case ast.List(elts=entries) if all(_number(e) in (0, 1) for e in entries):
            return [int(_number(e)) for e in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            made = [*_pattern(left), *_pattern(right)]
        case ast.BinOp(left=ast.Constant(value=int(times)), op=ast.Mult(), right=part):
            made = _repeated(part, times)
        case ast.BinOp(left=part, op=ast.Mult(), right=ast.Constant(value=int(times))):
            made = _repeated(part, times)
        case _:
            raise ValueError("not a list of 0 and 1")
    if len(made) > _MAX_LAYERS:
        raise ValueError("too long")
    return made


def _repeated(part: ast.expr, times: int) -> list[int]:
    once = _pattern(part)
    if len(once) * times > _MAX_LAYERS:
        raise ValueError("too long")
    return once * times


def _number(node: ast.expr) -> Any:
    """A whole number; NaN, which equals nothing, for everything else."""
    # bool is an int to isinstance
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return math.nan
