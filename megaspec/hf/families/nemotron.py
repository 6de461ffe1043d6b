"""Nemotron-4 and Minitron (Parmar et al. 2024): LayerNorm times 1 + w, a squared ReLU, half of each head turned."""

from dataclasses import replace
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.names import matrix
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec

NAMES = replace(
    llama.NAMES,
    matrices={
        "attn.wqkv": llama.NAMES.matrices["attn.wqkv"],
        "attn.wo": llama.NAMES.matrices["attn.wo"],
        "mlp.w_up": matrix("mlp.up_proj"),
        "mlp.w_down": matrix("mlp.down_proj"),
    },
)


def read(config: Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config, fraction=0.5),
        "norm": {"kind": "layer", "weight": "one_plus", "eps": config.number("norm_eps", 1e-5)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {
            "kind": "plain",
            "activation": config.one_of("hidden_act", ACTIVATIONS, "relu2"),
            "bias": config.flag("mlp_bias", False),
        },
    }


def write(spec: DecoderSpec) -> dict[str, Any]:
    return base_keys(spec) | {
        "norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        "mlp_bias": spec.mlp.bias,
        "partial_rotary_factor": spec.positions.fraction,
        **write_rope(spec.positions),
    }


KINDS = {**llama.KINDS, "norm": "layer", "mlp": "plain"}
FAMILY = Family("nemotron", "NemotronForCausalLM", read, write, lambda spec: NAMES, KINDS)
