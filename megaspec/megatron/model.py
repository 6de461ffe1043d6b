"""Flags of the model -> the section `model`."""

import ast
import math
import re
from typing import Any

from megaspec.megatron.draft import Draft

# What Megatron can mix freely, and our two families hold together: feature -> (llama's, gpt's).
_FAMILIES = {
    "--normalization": ("RMSNorm", "LayerNorm"),
    "--position-embedding-type": ("rotary positions", "learned positions"),
    "--swiglu": ("SwiGLU", "GELU"),
    "--disable-bias-linear": ("no biases", "biases"),
}
_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
_LOSSES = {"aux_loss": "aux", "seq_aux_loss": "seq_aux", "global_aux_loss": "global_aux"}
_MAX_LAYERS = 10_000


def translate_model(draft: Draft) -> None:
    """Family, sizes, positions, vocabulary."""
    kind = _family(draft)
    flags = ("--normalization", "--position-embedding-type", "--swiglu", "--disable-bias-linear")
    draft.put("model.kind", kind, *flags, "--use-rotary-position-embeddings", "--no-position-embedding")
    _sizes(draft)
    draft.put("model.norm_eps", draft["--norm-epsilon"], "--norm-epsilon", ours=1e-5)
    draft.put("model.dropout", draft["--hidden-dropout"], "--hidden-dropout", ours=0.0)
    draft.put("model.attention_dropout", draft["--attention-dropout"], "--attention-dropout", ours=0.0)
    tied = not draft["--untie-embeddings-and-output-weights"]
    draft.put("model.tied_embeddings", tied, "--untie-embeddings-and-output-weights", ours=kind == "gpt")
    std = draft["--init-method-std"]
    draft.put("model.init_std", std, "--init-method-std", ours=0.02)
    if draft["--embedding-init-method-std"] not in (None, std):
        draft.lose("--embedding-init-method-std", "the embedding starts with model.init_std, too")
    elif draft.is_given("--embedding-init-method-std"):
        draft.put("model.init_std", std, "--init-method-std", "--embedding-init-method-std")
    if kind == "llama":
        _rope(draft)
    _vocabulary(draft)
    if draft["--multi-latent-attention"]:
        _latent(draft)
    elif draft["--qk-layernorm"]:
        draft.put("model.qk_norm", True, "--qk-layernorm")
    if draft.n_experts:
        translate_experts(draft)


def _positions(draft: Draft) -> str:
    return "rope" if draft["--use-rotary-position-embeddings"] else draft["--position-embedding-type"]


def _family(draft: Draft) -> str:
    """The family that loses fewer of the model's features; tells those that it loses."""
    positions = _positions(draft)
    is_llama = {
        "--normalization": draft["--normalization"] == "RMSNorm",
        "--position-embedding-type": positions in ("rope", "yarn", "mrope"),
        "--swiglu": draft["--swiglu"],
        "--disable-bias-linear": draft["--disable-bias-linear"],
    }
    needs_llama = ("--num-experts", "--multi-latent-attention", "--qk-layernorm")
    votes = sum(is_llama.values()) + sum(draft.is_given(n) for n in needs_llama)
    kind = "llama" if votes >= 2 else "gpt"
    for name, (llamas, gpts) in _FAMILIES.items():
        if is_llama[name] != (kind == "llama"):
            draft.lose(name, f"model.kind={kind} has {llamas if kind == 'llama' else gpts}")
    for name in needs_llama:
        if kind == "gpt" and draft[name]:
            draft.lose(name, "model.kind=llama alone has it")
    if positions not in ("rope", "learned_absolute") and is_llama["--position-embedding-type"] == (kind == "llama"):
        draft.lose("--position-embedding-type", "a recipe has rotary (llama) or learned positions (gpt)")
    if draft["--add-qkv-bias"]:
        if kind == "llama":
            draft.lose("--add-qkv-bias", "model.kind=llama has no biases")
        draft.used.add("--add-qkv-bias")  # gpt has them anyway
    return kind


def _sizes(draft: Draft) -> None:
    layers = "--num-layers" if draft.is_given("--num-layers") else "--encoder-num-layers"
    draft.put("model.n_layers", draft[layers], layers)
    draft.put("model.d_model", draft["--hidden-size"], "--hidden-size")
    draft.put("model.n_heads", draft["--num-attention-heads"], "--num-attention-heads")
    if draft["--group-query-attention"]:
        names = ("--group-query-attention", "--num-query-groups")
        draft.put("model.n_kv_heads", draft["--num-query-groups"], *names)
    if draft.is_given("--kv-channels") and not draft["--multi-latent-attention"]:
        draft.put("model.d_head", draft["--kv-channels"], "--kv-channels")
    width = draft["--ffn-hidden-size"]
    if width is None and draft["--hidden-size"] is not None:
        width = draft["--hidden-size"]
        width = int(width * 4 * 2 / 3 / 64) * 64 if draft["--swiglu"] else 4 * width
    draft.put("model.d_ffn", width, "--ffn-hidden-size")
    if draft.is_given("--max-position-embeddings"):
        draft.put("model.max_seq_len", draft["--max-position-embeddings"], "--max-position-embeddings")


def _rope(draft: Draft) -> None:
    draft.put("model.rope_base", float(draft["--rotary-base"]), "--rotary-base", ours=10_000.0)
    if draft["--use-rope-scaling"]:
        draft.put("model.rope_scaling.kind", "llama3", "--use-rope-scaling")
        draft.put("model.rope_scaling.factor", draft["--rope-scaling-factor"], "--rope-scaling-factor", ours=8.0)


def _vocabulary(draft: Draft) -> None:
    key, kind = "model.vocab_size", draft["--tokenizer-type"]
    names = [n for n in ("--tokenizer-type", "--tokenizer-model") if draft.is_given(n)]
    if draft.is_given("--vocab-size"):
        draft.put(key, draft["--vocab-size"], "--vocab-size", *names)
    elif draft.is_given("--padded-vocab-size"):
        draft.put(key, draft["--padded-vocab-size"], "--padded-vocab-size", *names)
    elif kind in _TOKENIZERS:
        draft.put(key, _TOKENIZERS[kind], *names, remark="its usual vocabulary; files of others differ")
    else:
        remark = "comes with the data; a number plans without them"
        draft.put(key, "auto", *(names or ["--vocab-size"]), remark=remark)
    pad = "--make-vocab-size-divisible-by"
    draft.put("model.vocab_pad_to", draft[pad], pad, ours=128)


def _latent(draft: Draft) -> None:
    if draft["--q-lora-rank"] is not None:
        draft.put("model.mla.q_rank", draft["--q-lora-rank"], "--q-lora-rank")
    for name, key in (
        ("--kv-lora-rank", "kv_rank"),
        ("--qk-head-dim", "d_nope"),
        ("--qk-pos-emb-head-dim", "d_rope"),
        ("--v-head-dim", "d_value"),
    ):
        draft.put(f"model.mla.{key}", draft[name], name)
    draft.used.update(("--multi-latent-attention", "--qk-layernorm"))
    if not draft["--qk-layernorm"]:
        draft.lose("--multi-latent-attention", "without --qk-layernorm; the latents of model.mla are always normed")
    if draft["--rope-type"] != "rope" and draft["--rotary-scaling-factor"] != 1.0:
        draft.lose("--rotary-scaling-factor", "YaRN stretches the rotary frequencies; a recipe has rope_scaling llama3")
    draft.used.update(("--rope-type", "--rotary-scaling-factor"))  # YaRN with factor 1 stretches nothing


def translate_experts(draft: Draft) -> None:
    """Experts, their router and its losses -> the section `model.moe`."""
    moe, router = "model.moe.", "model.moe.router."
    draft.put(f"{moe}n_experts", draft.n_experts, "--num-experts")
    draft.put(f"{moe}top_k", draft["--moe-router-topk"], "--moe-router-topk", ours=2)
    if draft.is_given("--moe-ffn-hidden-size"):
        draft.put(f"{moe}d_expert", draft["--moe-ffn-hidden-size"], "--moe-ffn-hidden-size")
    _which_layers(draft)
    _optional(draft, f"{moe}d_shared", "--moe-shared-expert-intermediate-size")
    _switch(draft, f"{moe}shared_gate", "--moe-shared-expert-gate")
    score = "--moe-router-score-function"
    draft.put(f"{router}score", _SCORES[draft[score]], score, ours="softmax")
    if draft[score] == "softmax":
        _switch(draft, f"{router}softmax_first", "--moe-router-pre-softmax")
    _optional(draft, f"{router}scale", "--moe-router-topk-scaling-factor")
    _optional(draft, f"{router}n_groups", "--moe-router-num-groups")
    _optional(draft, f"{router}group_top_k", "--moe-router-group-topk")
    if draft["--moe-router-enable-expert-bias"]:
        names = ("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate")
        draft.put(f"{router}bias_rate", draft[names[1]], *names)
    _balancing(draft)
    _optional(draft, f"{router}z_loss", "--moe-z-loss-coeff")
    _optional(draft, f"{router}jitter", "--moe-input-jitter-eps")
    if draft.is_given("--moe-expert-capacity-factor") and draft["--moe-expert-capacity-factor"] >= 0:
        draft.put(f"{moe}capacity_factor", draft["--moe-expert-capacity-factor"], "--moe-expert-capacity-factor")
        draft.put(f"{moe}drop", draft["--moe-token-drop-policy"], "--moe-token-drop-policy", ours="probs")
        _switch(draft, f"{moe}pad_to_capacity", "--moe-pad-expert-input-to-capacity")


def _optional(draft: Draft, key: str, name: str) -> None:
    if draft[name] is not None:
        draft.put(key, draft[name], name)


def _switch(draft: Draft, key: str, name: str) -> None:
    if draft[name]:
        draft.put(key, True, name)


def _balancing(draft: Draft) -> None:
    name, weights = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
    kinds, coefficients = draft[name], draft[weights]
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


def _which_layers(draft: Draft) -> None:
    """Every n-th layer, or a list such as ([0]*3+[1]*58)."""
    name = "--moe-layer-freq"
    text, n_layers = draft[name], draft.n_layers
    if re.fullmatch(r"[1-9]\d{0,4}", text):
        draft.put("model.moe.every", int(text), name, ours=1)
        return
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        draft.refuse(name, "must be a number, or a list of 0 and 1 such as ([0]*3+[1]*58)")
        return
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if len(pattern) == n_layers and 0 not in pattern[dense:]:
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
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else math.nan
