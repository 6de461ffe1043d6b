"""Qwen 2 and 2.5: Llama's blocks with biases on queries, keys and values (Yang et al. 2024)."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec


def read(config: Config) -> dict[str, Any]:
    read_windows(config)
    return base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-6)},
        "attention": {"kind": "gqa", "qkv_bias": True, "dropout": config.number("attention_dropout", 0.0)},
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
    }


def read_windows(config: Config) -> None:
    """Which layers see a window alone: with use_sliding_window=false, none, whatever the other keys say."""
    if config.flag("use_sliding_window", False):
        config.refuse("use_sliding_window=true: windows are no option of attention")
    config.ignore("sliding_window", "use_sliding_window=false")
    config.ignore("max_window_layers", "use_sliding_window=false")
    kinds = config.entries("layer_types", [])
    if set(kinds) - {"full_attention"}:
        config.refuse(f"layer_types has {', '.join(sorted(set(kinds)))}: windows are no option of attention")


def write(spec: DecoderSpec) -> dict[str, Any]:
    return base_keys(spec) | {
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_dropout": spec.attention.dropout,
        "use_sliding_window": False,
        **write_rope(spec.positions),
    }


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, write, lambda spec: llama.NAMES, llama.KINDS)
