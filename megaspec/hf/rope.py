"""Rotary positions in a config.json: `rope_theta` and `rope_scaling`, as files on the hub have them, and
`rope_parameters`, as transformers 5 writes them."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.nn.rope.spec import Llama3RopeScaling, RotarySpec

_OLD = ("rope_theta", "rope_scaling")


def read_rope(config: Config, *, base: float = 10_000.0) -> dict[str, Any]:
    """The section model.positions. `base`: transformers' own for the family, where the file does not say it."""
    parameters = config.section("rope_parameters", None)
    theta = config.number("rope_theta", None)
    scaling = config.section("rope_scaling", None)
    if parameters is None:
        parameters = dict(scaling or {})
        parameters.setdefault("rope_theta", base if theta is None else theta)
    else:
        _refuse_other(config, "rope_theta", theta, parameters.get("rope_theta", theta))
    return rotary_section(config, parameters, base=base)


def _refuse_other(config: Config, name: str, old: Any, new: Any) -> None:
    """Both forms are there, as in files that were written for old and new readers: they must say the same."""
    if old is not None and old != new:
        config.refuse(f"{name}={old} and rope_parameters.{name}={new} contradict each other")


def rotary_section(config: Config, parameters: dict[str, Any], *, base: float) -> dict[str, Any]:
    """One set of rope parameters, flat."""
    inner = Config(parameters, "")
    inner.ignore("type", "the old name of rope_type")
    kind = inner.text("rope_type", parameters.get("type", "default"))
    section = {"kind": "rotary", "base": inner.number("rope_theta", base)}
    if kind == "llama3":
        section["scaling"] = {
            "kind": "llama3",
            "factor": inner.number("factor"),
            "low_freq_factor": inner.number("low_freq_factor"),
            "high_freq_factor": inner.number("high_freq_factor"),
            "original_max_seq_len": inner.count("original_max_position_embeddings"),
        }
    elif kind != "default":
        config.refuse(f"rope_type={kind!r} is none of default, llama3")
    for name in parameters:
        if name not in inner.asked:
            inner.refuse(f"{name} is mapped to nothing where rope_type={kind}")
    for problem in inner.problems:
        config.refuse(f"rope_parameters.{problem}")
    return section


def write_rope(positions: RotarySpec) -> dict[str, Any]:
    """The old keys, which every reader knows."""
    keys: dict[str, Any] = {"rope_theta": positions.base}
    scaling = positions.scaling
    if isinstance(scaling, Llama3RopeScaling):
        keys["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return keys
