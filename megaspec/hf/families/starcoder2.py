"""StarCoder2 (Lozhkov et al. 2024): LayerNorm, a plain feed-forward layer, biases, rotary positions, a window."""

from dataclasses import replace
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.layer_kinds import window_of
from megaspec.hf.names import matrix
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec

NAMES = replace(
    llama.NAMES,
    matrices={
        "attn.wqkv": llama.NAMES.matrices["attn.wqkv"],
        "attn.wo": llama.NAMES.matrices["attn.wo"],
        "mlp.w_up": matrix("mlp.c_fc"),
        "mlp.w_down": matrix("mlp.c_proj"),
    },
)


def read(config: Config) -> dict[str, Any]:
    bias = config.flag("use_bias", True)
    config.fixed("norm_type", "layer_norm", "the family has LayerNorm")
    config.fixed("mlp_type", "default", "the family has a plain feed-forward layer")
    config.ignore("embedding_dropout", "of training")
    section = base_section(config, has_head_dim=False) | {
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "positions": read_rope(config),
        "norm": {"kind": "layer", "eps": config.number("norm_epsilon", 1e-5)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {
            "kind": "plain",
            "activation": config.one_of("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
            "bias": bias,
        },
        "dropout": config.number("residual_dropout", 0.0),
    }
    window = config.count("sliding_window", None)
    if window is not None:
        section["attention"]["mask"] = {"kind": "window", "size": window}
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    return base_keys(spec, has_head_dim=False) | {
        "norm_epsilon": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "use_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        "residual_dropout": spec.dropout,
        "embedding_dropout": spec.dropout,
        "sliding_window": window_of(spec),
        **write_rope(spec.positions),
    }


KINDS = {**llama.KINDS, "norm": "layer", "mlp": "plain"}
FAMILY = Family("starcoder2", "Starcoder2ForCausalLM", read, write, lambda spec: NAMES, KINDS)
