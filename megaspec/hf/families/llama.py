"""Llama 2, 3, 3.1 and 3.2, and what is built like them (Touvron et al. 2023; Grattafiori et al. 2024)."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.names import Names, matrix
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec

NAMES = Names(
    layer="model.layers.{n}.",
    matrices={
        "attn.wqkv": matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.wo": matrix("self_attn.o_proj"),
        "mlp.w_gate_up": matrix("mlp.gate_proj", "mlp.up_proj"),
        "mlp.w_down": matrix("mlp.down_proj"),
    },
    vectors={"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    ends={"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    ignored={
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "since frequencies follow from the configuration",
    },
)


def read(config: Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-6)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {
            "kind": "gated",
            "activation": config.one_of("hidden_act", ACTIVATIONS, "silu"),
            "bias": config.flag("mlp_bias", False),
        },
    }


def write(spec: DecoderSpec) -> dict[str, Any]:
    return base_keys(spec) | {
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "mlp_bias": spec.mlp.bias,
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        **write_rope(spec.positions),
    }


KINDS = {"positions": "rotary", "norm": "rms", "layer": "sequential", "attention": "gqa", "mlp": "gated"}
FAMILY = Family("llama", "LlamaForCausalLM", read, write, lambda spec: NAMES, KINDS)
