"""Rotary positions in a config.json: `rope_theta` and `rope_scaling`, as files on the hub have them, and
`rope_parameters`, as transformers 5 writes them."""

from collections.abc import Callable, Mapping
from typing import Any

from megaspec.hf.config import Config
from megaspec.nn.rope.spec import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RotarySpec,
    YarnRopeScaling,
)


def read_rope(
    config: Config, *, base: float = 10_000.0, fraction: float = 1.0, scaling: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The section model.positions. `base`, `fraction`, `scaling`: transformers' own for the family, where the file does
    not say them."""
    parameters = config.section("rope_parameters", None)
    theta = config.number("rope_theta", None)
    said = config.section("rope_scaling", None)
    partial = config.number("partial_rotary_factor", None)
    if parameters is None:
        parameters = dict(said or scaling or {})
        parameters.setdefault("rope_theta", base if theta is None else theta)
    else:
        _refuse_other(config, "rope_theta", theta, parameters.get("rope_theta", theta))
        _refuse_other(config, "partial_rotary_factor", partial, parameters.get("partial_rotary_factor", partial))
    if partial is None:
        partial = fraction
    return rotary_section(config, parameters, base=base, fraction=partial)


def read_two_ropes(config: Config, *, full: float, sliding: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Positions of layers that see everything, and of those with a window. Bases: where the file does not say them."""
    both = config.section("rope_parameters", None)
    theta = config.number("rope_theta", None)
    local = config.number("rope_local_base_freq", None)
    scaling = config.section("rope_scaling", None)
    if both is None:
        of_full = dict(scaling or {})
        of_full.setdefault("rope_theta", full if theta is None else theta)
        of_sliding = {"rope_theta": sliding if local is None else local}
    else:
        inner = Config(both, "")
        of_full = inner.section("full_attention", {})
        of_sliding = inner.section("sliding_attention", {})
        for name in both:
            if name not in inner.asked:
                config.refuse(f"rope_parameters.{name} is mapped to nothing; it has full_attention, sliding_attention")
        _refuse_other(config, "rope_theta", theta, of_full.get("rope_theta", theta))
        _refuse_other(config, "rope_local_base_freq", local, of_sliding.get("rope_theta", local))
    return rotary_section(config, of_full, base=full), rotary_section(config, of_sliding, base=sliding)


def _refuse_other(config: Config, name: str, old: Any, new: Any) -> None:
    """Both forms are there, as in files that were written for old and new readers: they must say the same."""
    if old is not None and old != new:
        config.refuse(f"{name}={old} and rope_parameters.{name}={new} contradict each other")


def rotary_section(config: Config, parameters: dict[str, Any], *, base: float, fraction: float = 1.0) -> dict[str, Any]:
    """One set of rope parameters, flat."""
    inner = Config(parameters, "")
    inner.ignore("type", "the old name of rope_type")
    kind = inner.text("rope_type", parameters.get("type", "default"))
    section = {
        "kind": "rotary",
        "base": inner.number("rope_theta", base),
        "fraction": inner.number("partial_rotary_factor", fraction),
    }
    if kind in _SCALINGS:
        longest = config.values.get("max_position_embeddings")
        section["scaling"] = _SCALINGS[kind](inner, longest)
    elif kind != "default":
        config.refuse(f"rope_type={kind!r} is none of default, {', '.join(_SCALINGS)}")
    for name in parameters:
        if name not in inner.asked:
            inner.refuse(f"{name} is mapped to nothing where rope_type={kind}")
    for problem in inner.problems:
        config.refuse(f"rope_parameters.{problem}")
    return section


def _linear(inner: Config, longest: Any) -> dict[str, Any]:
    return {"kind": "linear", "factor": inner.number("factor")}


def _dynamic(inner: Config, longest: Any) -> dict[str, Any]:
    # transformers counts from what the model accepts, whatever the file says beside that
    inner.ignore("original_max_position_embeddings", "transformers takes max_position_embeddings")
    return {"kind": "dynamic", "factor": inner.number("factor"), "original_max_seq_len": longest}


def _llama3(inner: Config, longest: Any) -> dict[str, Any]:
    return {
        "kind": "llama3",
        "factor": inner.number("factor"),
        "low_freq_factor": inner.number("low_freq_factor"),
        "high_freq_factor": inner.number("high_freq_factor"),
        "original_max_seq_len": inner.count("original_max_position_embeddings"),
    }


def _yarn(inner: Config, longest: Any) -> dict[str, Any]:
    return {
        "kind": "yarn",
        "factor": inner.number("factor"),
        "original_max_seq_len": inner.count("original_max_position_embeddings", longest),
        "beta_fast": inner.number("beta_fast", 32.0),
        "beta_slow": inner.number("beta_slow", 1.0),
        "truncate": inner.flag("truncate", True),
        "attention_factor": inner.number("attention_factor", None),
        "mscale": inner.number("mscale", None),
        "mscale_all_dim": inner.number("mscale_all_dim", None),
    }


def _longrope(inner: Config, longest: Any) -> dict[str, Any]:
    original = inner.count("original_max_position_embeddings", longest)
    attention_factor = inner.number("attention_factor", None)
    factor = inner.number("factor", None)
    if attention_factor is None and factor is None and longest and original:
        factor = longest / original
    return {
        "kind": "longrope",
        "short_factor": inner.entries("short_factor", of=float),
        "long_factor": inner.entries("long_factor", of=float),
        "original_max_seq_len": original,
        "factor": None if attention_factor is not None else factor,
        "attention_factor": attention_factor,
    }


_SCALINGS: Mapping[str, Callable[[Config, Any], dict[str, Any]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def write_rope(positions: RotarySpec) -> dict[str, Any]:
    """The old keys, which every reader knows."""
    keys: dict[str, Any] = {"rope_theta": positions.base}
    if positions.fraction != 1.0:
        keys["partial_rotary_factor"] = positions.fraction
    scaling = positions.scaling
    if isinstance(scaling, LinearRopeScaling):
        keys["rope_scaling"] = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, DynamicRopeScaling):
        keys["rope_scaling"] = {"rope_type": "dynamic", "factor": scaling.factor}
    elif isinstance(scaling, Llama3RopeScaling):
        keys["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    elif isinstance(scaling, YarnRopeScaling | LongRopeScaling):
        said = scaling.model_dump(mode="json", exclude_none=True)
        del said["kind"]
        original = said.pop("original_max_seq_len")
        keys["rope_scaling"] = {"rope_type": scaling.kind, "original_max_position_embeddings": original} | said
    return keys
