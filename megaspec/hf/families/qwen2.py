"""Qwen 2 and 2.5: Llama's blocks with biases on queries, keys and values (Yang et al. 2024)."""

from collections.abc import Callable
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.layer_kinds import FULL, SLIDING, put_kinds, read_window, with_window, write_kinds
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec


def read(config: Config) -> dict[str, Any]:
    section = read_common(config)
    # from a layer on
    read_windows(config, section, has_window=lambda i, limit: i >= limit)
    return section


def read_common(config: Config) -> dict[str, Any]:
    """All but windows."""
    return base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-6)},
        "attention": {"kind": "gqa", "qkv_bias": True, "dropout": config.number("attention_dropout", 0.0)},
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
    }


def read_windows(config: Config, section: dict[str, Any], *, has_window: Callable[[int, int], bool]) -> None:
    """Which layers see a window: those that layer_types names, else those of which `has_window` says so, of a layer's
    number and max_window_layers. With use_sliding_window=false, none, whatever the other keys say."""
    n_layers = section["n_layers"] or 0
    listed = config.entries("layer_types", None, of=str)
    if not config.flag("use_sliding_window", False):
        config.ignore("sliding_window", "use_sliding_window=false")
        config.ignore("max_window_layers", "use_sliding_window=false")
        if set(listed or ()) - {FULL}:
            config.refuse(f"layer_types names other layers than {FULL}, and use_sliding_window=false")
        return
    limit = config.count("max_window_layers", 28, least=0)
    kinds = listed or [SLIDING if has_window(i, limit) else FULL for i in range(n_layers)]
    if set(kinds) - {FULL, SLIDING} or len(kinds) != n_layers:
        config.refuse(f"layer_types must have {FULL} or {SLIDING} for each of num_hidden_layers={n_layers}")
        return
    put_kinds(section, kinds, {FULL: {}, SLIDING: {"mask": read_window(config, kinds)}})


def write_windows(spec: DecoderSpec) -> dict[str, Any]:
    """The other way round."""
    windows = with_window(spec)
    if not any(windows):
        return {"use_sliding_window": False}
    keys = {"use_sliding_window": True, **write_kinds(spec)}
    first = windows.index(True)
    if all(windows[first:]):
        # what readers of old files know
        del keys["layer_types"]
        keys["max_window_layers"] = first
    return keys


def write(spec: DecoderSpec) -> dict[str, Any]:
    return write_common(spec) | write_windows(spec)


def write_common(spec: DecoderSpec) -> dict[str, Any]:
    """All but windows."""
    return base_keys(spec) | {
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_dropout": spec.attention.dropout,
        **write_rope(spec.positions),
    }


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, write, lambda spec: llama.NAMES, llama.KINDS)
