"""Layers that differ: a list of kinds in a config.json, a pattern of model.layer_types in ours."""

from collections.abc import Mapping, Sequence
from typing import Any

from megaspec.hf.config import Config
from megaspec.model.decoder.spec import DecoderSpec, LayerType
from megaspec.nn.attention.spec import WindowMask

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"


def read_kinds(config: Config, *, pattern: int) -> list[str]:
    """Which layers see a window. `pattern`: where the file lists none, every `pattern`-th layer sees
    everything."""
    pattern = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", pattern))
    n_layers = config.values.get("num_hidden_layers") or 0
    default = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(n_layers)]
    kinds = config.entries("layer_types", default, of=str)
    for kind in dict.fromkeys(kinds):
        if kind not in (FULL, SLIDING):
            config.refuse(f"layer_types has {kind}: it must be {FULL} or {SLIDING}")
    if len(kinds) != n_layers:
        config.refuse(f"layer_types has {len(kinds)} entries for num_hidden_layers={n_layers}")
    return kinds


def read_window(config: Config, kinds: Sequence[str]) -> dict[str, Any]:
    """The mask of layers with a window."""
    if SLIDING not in kinds:
        config.ignore("sliding_window", "no layer has a window")
        return {"kind": "causal"}
    return {"kind": "window", "size": config.count("sliding_window")}


def put_kinds(section: dict[str, Any], kinds: Sequence[str], types: Mapping[str, dict[str, Any]]) -> None:
    """Says of a model's section which layer is of which kind. `types`: in what each kind differs from the model."""
    used = list(dict.fromkeys(kinds))
    if len(used) == 1:
        # then it is the model's own
        differs = types[used[0]]
        if "mask" in differs:
            section["attention"]["mask"] = differs["mask"]
        if "positions" in differs:
            section["positions"] = differs["positions"]
        return
    section["layer_types"] = {name: types[name] for name in used}
    section["layer_pattern"] = shortest(kinds)


def shortest(kinds: Sequence[str]) -> list[str]:
    """The shortest list that makes all of them when it is repeated."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return list(kinds[:length])
    return list(kinds)


def with_window(spec: DecoderSpec) -> list[bool]:
    """Which layers have a window."""
    return [isinstance(spec.attention_of(layer_type).mask, WindowMask) for layer_type in spec.types]


def write_kinds(spec: DecoderSpec) -> dict[str, Any]:
    """`layer_types` and `sliding_window`."""
    kinds = [SLIDING if has else FULL for has in with_window(spec)]
    return {"layer_types": kinds, "sliding_window": window_of(spec)}


def window_of(spec: DecoderSpec) -> int | None:
    """The window of the first layer that has one; None: none has."""
    for layer_type in spec.types:
        mask = spec.attention_of(layer_type).mask
        if isinstance(mask, WindowMask):
            return mask.size
    return None


def first_type(spec: DecoderSpec, *, window: bool) -> LayerType:
    """What the first layer with a window, or without one, differs in; the model's own where there is none."""
    for layer_type, has in zip(spec.types, with_window(spec), strict=True):
        if has == window:
            return layer_type
    return LayerType()
