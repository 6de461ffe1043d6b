"""OLMo 1, 2 and 3 (Groeneveld et al. 2024; OLMo Team 2025): norms without weights, then norms behind sub-layers."""

from dataclasses import replace
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.layer_kinds import FULL, SLIDING, first_type, put_kinds, read_kinds, read_window, write_kinds
from megaspec.hf.rope import read_rope, rotary_section, write_rope
from megaspec.model.decoder.spec import DecoderSpec

POST = replace(
    llama.NAMES,
    vectors={
        "post_norm1": "post_attention_layernorm",
        "post_norm2": "post_feedforward_layernorm",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
    },
)


def _read_common(config: Config) -> dict[str, Any]:
    """All but norms and positions."""
    bias = config.flag("attention_bias", False)
    return base_section(config, has_head_dim=False) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
    }


def _write_common(spec: DecoderSpec) -> dict[str, Any]:
    return base_keys(spec, has_head_dim=False) | {
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
    }


def read(config: Config) -> dict[str, Any]:
    section = _read_common(config) | {
        "positions": read_rope(config),
        "norm": {"kind": "layer", "weight": "none", "bias": False, "eps": 1e-5},
    }
    section["attention"]["clip_qkv"] = config.number("clip_qkv", None)
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    return _write_common(spec) | {"clip_qkv": spec.attention.clip_qkv, **write_rope(spec.positions)}


def _read_post(config: Config) -> dict[str, Any]:
    section = _read_common(config) | {
        "layer": {"kind": "sequential", "norms": "post"},
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-5)},
    }
    section["attention"]["qk_norm"] = "whole"
    return section


def read_2(config: Config) -> dict[str, Any]:
    return _read_post(config) | {"positions": read_rope(config)}


def write_2(spec: DecoderSpec) -> dict[str, Any]:
    return _write_common(spec) | {"rms_norm_eps": spec.norm.eps, **write_rope(spec.positions)}


def read_3(config: Config) -> dict[str, Any]:
    section = _read_post(config)
    full, sliding = _ropes_3(config)
    section["positions"] = full
    kinds = read_kinds(config, pattern=4)
    put_kinds(section, kinds, {FULL: {}, SLIDING: {"mask": read_window(config, kinds), "positions": sliding}})
    return section


def _ropes_3(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of layers that see everything, and of those with a window, which no scaling stretches."""
    both = config.values.get("rope_parameters") or {}
    if FULL in both or SLIDING in both:
        parameters = config.section("rope_parameters")
        for name in parameters:
            if name not in (FULL, SLIDING):
                config.refuse(f"rope_parameters.{name} is mapped to nothing; it has {FULL}, {SLIDING}")
        sections = [rotary_section(config, parameters.get(name) or {}, base=5e5) for name in (FULL, SLIDING)]
        return sections[0], sections[1]
    full = read_rope(config, base=5e5)
    if full["base"] != 5e5:
        # transformers 5.23 gives it to full layers alone, older ones to all
        config.refuse(f"rope_theta={full['base']:g}: transformers reads it in two ways; write rope_parameters")
    return full, {"kind": "rotary", "base": 5e5, "fraction": 1.0}


def write_3(spec: DecoderSpec) -> dict[str, Any]:
    parameters = {}
    for name, has_window in ((FULL, False), (SLIDING, True)):
        keys = write_rope(spec.positions_of(first_type(spec, window=has_window)))
        parameters[name] = {"rope_type": "default"} | keys.get("rope_scaling", {}) | {"rope_theta": keys["rope_theta"]}
    return _write_common(spec) | {
        "rms_norm_eps": spec.norm.eps,
        "rope_parameters": parameters,
        **write_kinds(spec),
    }


LAYER_NORM = {**llama.KINDS, "norm": "layer"}
FAMILY = Family("olmo", "OlmoForCausalLM", read, write, lambda spec: llama.NAMES, LAYER_NORM)
OLMO_2 = Family("olmo2", "Olmo2ForCausalLM", read_2, write_2, lambda spec: POST, llama.KINDS)
OLMO_3 = Family("olmo3", "Olmo3ForCausalLM", read_3, write_3, lambda spec: POST, llama.KINDS)
