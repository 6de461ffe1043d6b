"""Command R7B and Command A (Cohere 2024): attention and feed-forward side by side; layers that see everything have no
positions, and those with a window rotary ones that are stored as pairs."""

from dataclasses import replace
from typing import Any

from megaspec.hf.blocks import pairs_to_halves
from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.layer_kinds import FULL, SLIDING, first_type, put_kinds, read_kinds, read_window, write_kinds
from megaspec.hf.names import Matrix, Names
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec


def names(spec: DecoderSpec) -> Names:
    """Rows of query and key heads lie in pairs, in layers without positions too, where their order says nothing."""
    pairs = (spec.d_head, pairs_to_halves(spec.d_head, spec.d_head))
    qkv = Matrix(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), within=(pairs, pairs, None))
    return replace(
        llama.NAMES, matrices={**llama.NAMES.matrices, "attn.wqkv": qkv}, vectors={"norm1": "input_layernorm"}
    )


def read(config: Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    section = base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "positions": {"kind": "none"},
        "norm": {"kind": "layer", "bias": False, "eps": config.number("layer_norm_eps", 1e-5)},
        "layer": {"kind": "parallel"},
        "logit_scale": config.number("logit_scale", 0.0625),
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
    }
    for name in ("order_of_interleaved_layers", "position_embedding_type", "rotary_pct"):
        config.ignore(name, "layer_types and rope_theta say it")
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"):
        config.ignore(name, "of every model of the family")
    config.fixed("use_qk_norm", False, "no model of the family has it")
    kinds = read_kinds(config, pattern=4)
    types = {FULL: {}, SLIDING: {"mask": read_window(config, kinds), "positions": read_rope(config)}}
    put_kinds(section, kinds, types)
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    keys = base_keys(spec) | {
        "layer_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        "logit_scale": spec.logit_scale,
        **write_kinds(spec),
    }
    turned = spec.positions_of(first_type(spec, window=True))
    if turned.is_rotary:
        keys |= write_rope(turned)
    return keys


KINDS = {"norm": "layer", "layer": "parallel", "attention": "gqa", "mlp": "gated"}
FAMILY = Family("cohere2", "Cohere2ForCausalLM", read, write, names, KINDS)
