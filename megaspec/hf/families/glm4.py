"""GLM-4, dense (GLM Team 2024): norms on both sides, and rotary features stored as pairs."""

from dataclasses import replace
from typing import Any

from megaspec.hf.blocks import pairs_to_halves
from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.names import Matrix, Names, matrix
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec


def names(spec: DecoderSpec) -> Names:
    """The rows of each query and key head lie in pairs."""
    turned = spec.positions.turned(spec.d_head)
    pairs = (spec.d_head, pairs_to_halves(spec.d_head, turned))
    return replace(
        llama.NAMES,
        matrices={
            "attn.wqkv": Matrix(
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), within=(pairs, pairs, None)
            ),
            "attn.wo": matrix("self_attn.o_proj"),
            "mlp.w_gate_up": matrix("mlp.gate_up_proj"),
            "mlp.w_down": matrix("mlp.down_proj"),
        },
        vectors={
            "norm1": "input_layernorm",
            "post_norm1": "post_self_attn_layernorm",
            "norm2": "post_attention_layernorm",
            "post_norm2": "post_mlp_layernorm",
        },
    )


def read(config: Config) -> dict[str, Any]:
    return base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config, fraction=0.5),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1.5625e-07)},
        "layer": {"kind": "sequential", "norms": "sandwich"},
        "attention": {
            "kind": "gqa",
            "qkv_bias": config.flag("attention_bias", False),
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
    }


def write(spec: DecoderSpec) -> dict[str, Any]:
    return base_keys(spec) | {
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        "partial_rotary_factor": spec.positions.fraction,
        **write_rope(spec.positions),
    }


FAMILY = Family("glm4", "Glm4ForCausalLM", read, write, names, llama.KINDS)
