"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023), side by side and with biases; Phi-3, 3.5 and 4 (Abdin et al. 2024)."""

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
        "attn.wqkv": matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.wo": matrix("self_attn.dense"),
        "mlp.w_up": matrix("mlp.fc1"),
        "mlp.w_down": matrix("mlp.fc2"),
    },
    vectors={"norm1": "input_layernorm"},
    ends={"embed": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
)
FUSED = replace(
    llama.NAMES,
    matrices={
        "attn.wqkv": matrix("self_attn.qkv_proj"),
        "attn.wo": matrix("self_attn.o_proj"),
        "mlp.w_gate_up": matrix("mlp.gate_up_proj"),
        "mlp.w_down": matrix("mlp.down_proj"),
    },
)


def read(config: Config) -> dict[str, Any]:
    config.fixed("qk_layernorm", False, "heads have one norm each, and Phi's would share a bias")
    dropout = config.number("resid_pdrop", 0.0)
    config.ignore("embd_pdrop", "of training")
    return base_section(config, has_head_dim=False) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config, fraction=0.5),
        "norm": {"kind": "layer", "eps": config.number("layer_norm_eps", 1e-5)},
        "layer": {"kind": "parallel"},
        "head_bias": True,
        "attention": {
            "kind": "gqa",
            "qkv_bias": True,
            "out_bias": True,
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {
            "kind": "plain",
            "activation": config.one_of("hidden_act", ACTIVATIONS, "gelu_new"),
            "bias": True,
        },
        "dropout": dropout,
    }


def write(spec: DecoderSpec) -> dict[str, Any]:
    activation = "gelu_new" if spec.mlp.activation == "gelu_tanh" else THEIR_ACTIVATIONS[spec.mlp.activation]
    return base_keys(spec, has_head_dim=False) | {
        "layer_norm_eps": spec.norm.eps,
        "hidden_act": activation,
        "attention_dropout": spec.attention.dropout,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "partial_rotary_factor": spec.positions.fraction,
        **write_rope(spec.positions),
    }


def read_3(config: Config) -> dict[str, Any]:
    config.fixed("attention_bias", False, "Phi-3's products have no biases")
    config.ignore("embd_pdrop", "of training")
    section = base_section(config, has_head_dim=False) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(_with_original(config)),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-5)},
        "attention": {"kind": "gqa", "dropout": config.number("attention_dropout", 0.0)},
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
        "dropout": config.number("resid_pdrop", 0.0),
    }
    window = config.count("sliding_window", None)
    if window is not None:
        section["attention"]["mask"] = {"kind": "window", "size": window}
    return section


def _with_original(config: Config) -> Config:
    """`original_max_position_embeddings` stands at the top here, and is taken before what the rope says."""
    original = config.count("original_max_position_embeddings", None)
    for name in ("rope_scaling", "rope_parameters"):
        parameters = config.values.get(name)
        if isinstance(parameters, dict):
            kind = parameters.get("rope_type", parameters.get("type", "default"))
            changed = dict(parameters)
            if kind == "su":
                # what Phi-3 called longrope before it had that name
                changed |= {"rope_type": "longrope"}
            if kind != "default" and original is not None:
                changed["original_max_position_embeddings"] = original
            config.values = {**config.values, name: changed}
    return config


def write_3(spec: DecoderSpec) -> dict[str, Any]:
    keys = write_rope(spec.positions)
    scaling = keys.get("rope_scaling", {})
    original = scaling.get("original_max_position_embeddings", spec.max_seq_len)
    if scaling.get("factor") == spec.max_seq_len / original:
        # follows from both lengths
        del scaling["factor"]
    return base_keys(spec, has_head_dim=False) | {
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_dropout": spec.attention.dropout,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "sliding_window": window_of(spec),
        "original_max_position_embeddings": original,
        **keys,
    }


PARALLEL = {**llama.KINDS, "norm": "layer", "layer": "parallel", "mlp": "plain"}
FAMILY = Family("phi", "PhiForCausalLM", read, write, lambda spec: NAMES, PARALLEL)
PHI_3 = Family("phi3", "Phi3ForCausalLM", read_3, write_3, lambda spec: FUSED, llama.KINDS)
