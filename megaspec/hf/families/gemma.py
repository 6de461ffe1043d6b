"""Gemma 1, 2 and 3, text (Gemma Team 2024, 2025): norms times 1 + w, the embedding times the root of its width."""

from dataclasses import replace
from math import sqrt
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.layer_kinds import FULL, SLIDING, first_type, put_kinds, read_kinds, read_window, write_kinds
from megaspec.hf.rope import read_rope, read_two_ropes, write_rope
from megaspec.model.decoder.spec import DecoderSpec

SANDWICH = replace(
    llama.NAMES,
    vectors={
        "norm1": "input_layernorm",
        "post_norm1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "post_norm2": "post_feedforward_layernorm",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
    },
)


def _read_common(config: Config, activation: str) -> dict[str, Any]:
    """All but positions and masks."""
    bias = config.flag("attention_bias", False)
    section = base_section(config)
    if config.flag("use_bidirectional_attention", False):
        config.refuse("use_bidirectional_attention=true: attention is causal")
    return section | {
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "embedding_scale": sqrt(section["d_model"] or 1),
        "norm": {"kind": "rms", "weight": "one_plus", "eps": config.number("rms_norm_eps", 1e-6)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {"kind": "gated", "activation": config.one_of(activation, ACTIVATIONS, "gelu_pytorch_tanh")},
    }


def _write_common(spec: DecoderSpec, activation: str) -> dict[str, Any]:
    return base_keys(spec) | {
        "rms_norm_eps": spec.norm.eps,
        activation: THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
    }


def read(config: Config) -> dict[str, Any]:
    config.ignore("hidden_activation", "transformers reads hidden_act, where Gemma 1 has the same function")
    return _read_common(config, "hidden_act") | {"positions": read_rope(config)}


def write(spec: DecoderSpec) -> dict[str, Any]:
    return _write_common(spec, "hidden_act") | write_rope(spec.positions)


def _read_scores(config: Config, section: dict[str, Any]) -> None:
    """What Gemma 2 and 3 have beside."""
    section["layer"] = {"kind": "sequential", "norms": "sandwich"}
    section["attention"]["score_scale"] = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    config.ignore("hidden_act", "transformers reads hidden_activation")


def _write_scores(spec: DecoderSpec) -> dict[str, Any]:
    scale = spec.attention.score_scale
    if scale is None:
        scale = spec.d_head**-0.5
    # a whole number wherever it stands for one
    scalar = round(scale**-2, 6)
    return {
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "attn_logit_softcapping": spec.attention.score_cap,
        "final_logit_softcapping": spec.logit_cap,
    }


def read_2(config: Config) -> dict[str, Any]:
    section = _read_common(config, "hidden_activation") | {"positions": read_rope(config)}
    _read_scores(config, section)
    section["attention"]["score_cap"] = _cap(config, "attn_logit_softcapping", 50.0)
    section["logit_cap"] = _cap(config, "final_logit_softcapping", 30.0)
    kinds = read_kinds(config, pattern=2)
    put_kinds(section, kinds, {FULL: {}, SLIDING: {"mask": read_window(config, kinds)}})
    config.ignore("cache_implementation", "of generation")
    return section


def _cap(config: Config, name: str, default: float | None) -> float | None:
    """null stands for no cap, and a missing key for transformers' own."""
    if name in config.values:
        default = None
    return config.number(name, default)


def write_2(spec: DecoderSpec) -> dict[str, Any]:
    return (
        _write_common(spec, "hidden_activation") | write_rope(spec.positions) | _write_scores(spec) | write_kinds(spec)
    )


def read_3(config: Config) -> dict[str, Any]:
    section = _read_common(config, "hidden_activation")
    _read_scores(config, section)
    section["attention"]["qk_norm"] = "per_head"
    section["attention"]["score_cap"] = _cap(config, "attn_logit_softcapping", None)
    section["logit_cap"] = _cap(config, "final_logit_softcapping", None)
    full, sliding = read_two_ropes(config, full=1e6, sliding=1e4)
    section["positions"] = full
    kinds = read_kinds(config, pattern=6)
    put_kinds(section, kinds, {FULL: {}, SLIDING: {"mask": read_window(config, kinds), "positions": sliding}})
    config.ignore("cache_implementation", "of generation")
    return section


def write_3(spec: DecoderSpec) -> dict[str, Any]:
    full = spec.positions_of(first_type(spec, window=False))
    sliding = spec.positions_of(first_type(spec, window=True))
    return (
        _write_common(spec, "hidden_activation")
        | write_rope(full)
        | {"rope_local_base_freq": sliding.base}
        | _write_scores(spec)
        | write_kinds(spec)
    )


FAMILY = Family("gemma", "GemmaForCausalLM", read, write, lambda spec: llama.NAMES, llama.KINDS)
GEMMA_2 = Family("gemma2", "Gemma2ForCausalLM", read_2, write_2, lambda spec: SANDWICH, llama.KINDS)
GEMMA_3 = Family("gemma3_text", "Gemma3ForCausalLM", read_3, write_3, lambda spec: SANDWICH, llama.KINDS)
