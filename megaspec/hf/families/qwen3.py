"""Qwen 3, dense and with experts: norms of query and key heads (Yang et al. 2025)."""

from dataclasses import replace
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.families.qwen2 import read_windows, write_windows
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.layer_kinds import FULL, window_of, with_window
from megaspec.hf.names import matrix
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec

NAMES = replace(
    llama.NAMES,
    vectors={
        **llama.NAMES.vectors,
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
    },
    matrices={
        **llama.NAMES.matrices,
        "moe.router": matrix("mlp.gate"),
        "moe.experts.w_gate_up": matrix("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        "moe.experts.w_down": matrix("mlp.experts.{e}.down_proj"),
    },
)


def read(config: Config) -> dict[str, Any]:
    section = _read_common(config)
    # from a layer on
    read_windows(config, section, has_window=lambda i, limit: i >= limit)
    return section


def _read_common(config: Config) -> dict[str, Any]:
    """All but windows."""
    bias = config.flag("attention_bias", False)
    return base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-6)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "qk_norm": "per_head",
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
    }


def write(spec: DecoderSpec) -> dict[str, Any]:
    return _write_common(spec) | write_windows(spec)


def _write_common(spec: DecoderSpec) -> dict[str, Any]:
    """All but windows."""
    return base_keys(spec) | {
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        **write_rope(spec.positions),
    }


def read_experts(config: Config) -> dict[str, Any]:
    n_experts = config.count("num_experts", None)
    n_local = config.count("num_local_experts", None)
    if n_experts is None and n_local is None:
        config.refuse("num_experts is missing; it must be a whole number of at least 1")
    elif None not in (n_experts, n_local) and n_experts != n_local:
        config.refuse(f"num_experts={n_experts} and num_local_experts={n_local} contradict each other")
    moe = {
        "n_experts": n_experts or n_local,
        "top_k": config.count("num_experts_per_tok", 8),
        "d_expert": config.count("moe_intermediate_size", 768),
        "router": {"norm_top_k": config.flag("norm_topk_prob", False)},
        **read_layers(config),
    }
    for name in ("output_router_logits", "router_aux_loss_coef"):
        config.ignore(name, "of training")
    section = _read_common(config) | {"moe": moe}
    # of all layers or of none: transformers' class asks for nothing else
    config.ignore("max_window_layers", "windows of qwen3_moe are those of all layers")
    read_windows(config, section, has_window=lambda i, limit: True)
    if section["attention"].get("mask") is None and config.values.get("use_sliding_window") is True:
        config.refuse(f"layer_types has {FULL}, and use_sliding_window=true gives a window to all layers of qwen3_moe")
    return section


def read_layers(config: Config) -> dict[str, Any]:
    """Layer i has experts where (i + 1) is a multiple of decoder_sparse_step, and none where mlp_only_layers names it:
    as a step and the layers before it, or as a list."""
    step = config.count("decoder_sparse_step", 1)
    dense = config.entries("mlp_only_layers", [], of=int)
    n_layers = config.values.get("num_hidden_layers")
    if type(n_layers) is not int:
        # told by whoever asks for it
        return {}
    for number in dense:
        if not 0 <= number < n_layers:
            config.refuse(f"mlp_only_layers has {number}, num_hidden_layers={n_layers} are numbered from 0")
    has_experts = [int((i + 1) % step == 0 and i not in dense) for i in range(n_layers)]
    if not any(has_experts):
        config.refuse(f"decoder_sparse_step={step} and mlp_only_layers={dense} leave no layer with experts")
    if dense:
        return {"layers": has_experts}
    return {"every": step, "first_dense": step - 1}


def write_layers(spec: DecoderSpec) -> dict[str, Any]:
    """The other way round."""
    moe = spec.moe
    if moe.layers is None and moe.first_dense == moe.every - 1:
        return {"decoder_sparse_step": moe.every, "mlp_only_layers": []}
    has_experts = moe.in_layers(spec.n_layers)
    return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, has in enumerate(has_experts) if not has]}


def write_experts(spec: DecoderSpec) -> dict[str, Any]:
    return _write_common(spec) | {
        # where only some layers have a window, it is read back as another model
        "use_sliding_window": any(with_window(spec)),
        "sliding_window": window_of(spec),
        "num_experts": spec.moe.n_experts,
        "num_experts_per_tok": spec.moe.top_k,
        "moe_intermediate_size": spec.moe.d_expert,
        "norm_topk_prob": spec.moe.router.norm_top_k,
        **write_layers(spec),
    }


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, write, lambda spec: NAMES, llama.KINDS)
EXPERTS = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    read_experts,
    write_experts,
    lambda spec: NAMES,
    llama.KINDS,
    has_experts=True,
)
