"""Mistral 7B, of which v0.1 has a window, Mistral Nemo and Small: Llama's blocks with their own head size (Jiang et al.
2023)."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.layer_kinds import window_of
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec


def read(config: Config) -> dict[str, Any]:
    section = base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-6)},
        "attention": {"kind": "gqa", "dropout": config.number("attention_dropout", 0.0)},
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
    }
    window = config.count("sliding_window", None)
    if window is not None:
        section["attention"]["mask"] = {"kind": "window", "size": window}
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    return base_keys(spec) | {
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_dropout": spec.attention.dropout,
        "sliding_window": window_of(spec),
        **write_rope(spec.positions),
    }


FAMILY = Family("mistral", "MistralForCausalLM", read, write, lambda spec: llama.NAMES, llama.KINDS)
