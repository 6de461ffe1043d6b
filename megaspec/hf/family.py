"""What a family of Hugging Face's is: how its config.json is said in our options and back, and its tensors' names."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megaspec.core.errors import CheckpointError
from megaspec.hf.config import Config
from megaspec.hf.names import Names
from megaspec.model.decoder.spec import DecoderSpec


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    model_type: str
    architecture: str
    """transformers' class with an output head."""
    read: Callable[[Config], dict[str, Any]]
    """Asks for every key of a config.json -> the section `model` of a recipe."""
    write: Callable[[DecoderSpec], dict[str, Any]]
    """The other way round, as files on the hub have them; of a model with these `kinds`."""
    names: Callable[[DecoderSpec], Names]
    kinds: Mapping[str, str]
    """The kind of each part that has several: `write` may ask for the options of these."""
    has_experts: bool = False


# What changes nothing of what a trained model computes: how it is trained, and how its tables are laid out here.
OF_TRAINING = frozenset(
    {
        "vocab_pad_to",
        "dropout",
        "init_std",
        "attention.dropout",
        "moe.router.losses",
        "moe.router.z_loss",
        "moe.router.jitter",
        "moe.router.bias_rate",
        "moe.router.balancing",
        "moe.capacity_factor",
        "moe.drop",
        "moe.pad_to_capacity",
    }
)


def objections(family: Family, spec: DecoderSpec) -> list[str]:
    """What of a model a family can't say, a line each. Empty: it can be exported as this family.

    A model is said when what `write` makes of it is read as the same model, so that no option is forgotten here.
    """
    found = []
    for part, kind in family.kinds.items():
        mine = getattr(getattr(spec, part), "kind", "none")
        if mine != kind:
            found.append(f"model.{part}.kind={mine}, where {family.model_type} has {kind}")
    if (spec.moe is not None) != family.has_experts:
        has = "has experts" if family.has_experts else "has none"
        found.append(f"model.moe={'...' if spec.moe else 'null'}, where {family.model_type} {has}")
    if found:
        return found
    config = Config(family.write(spec), family.model_type)
    try:
        section = family.read(config)
        config.finish()
        said = typed(section)
    except CheckpointError as error:
        # it wrote what it has no reader for, such as another family's rotary scaling
        return [f"its configuration would not be read: {error}"]
    mine, theirs = comparable(spec, said)
    return list(_differences(mine, theirs, "", family.model_type))


def comparable(one: DecoderSpec, other: DecoderSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two models as plain data in which the same model says the same: of layers that differ, and of those with experts,
    what each is, however its section says it."""
    contents = (one.model_dump(mode="json"), other.model_dump(mode="json"))
    if one.layer_pattern or other.layer_pattern:
        layers = (_layers(one), _layers(other))
        has_tables = any(not spec.positions.is_rotary and spec.positions.kind != "none" for spec in (one, other))
        for content, said in zip(contents, layers, strict=True):
            del content["layer_types"], content["layer_pattern"]
            # a mask and a way to turn are said by each layer, a table of positions by the model
            content["attention"].pop("mask", None)
            if not has_tables:
                del content["positions"]
            content["layers"] = said
    if one.moe is not None and other.moe is not None:
        for content, spec in zip(contents, (one, other), strict=True):
            del content["moe"]["every"], content["moe"]["first_dense"]
            content["moe"]["layers"] = [int("moe" in mixers) for mixers in spec.mixers]
    return contents


def _layers(spec: DecoderSpec) -> dict[str, Any]:
    """What each layer of a model has of what layers may differ in."""
    found = {}
    for number, layer_type in enumerate(spec.types):
        attention = spec.attention_of(layer_type).model_dump(mode="json")
        found[str(number)] = {
            "mask": attention.get("mask"),
            "positions": spec.positions_of(layer_type).model_dump(mode="json"),
        }
    return found


def is_of_training(path: str) -> bool:
    """Whether a path in model.* changes nothing of what a trained model computes."""
    return any(path == one or path.startswith(f"{one}.") for one in OF_TRAINING)


def typed(section: Mapping[str, Any]) -> DecoderSpec:
    """The section `model` of a recipe, typed. CheckpointError: what a file says is no model."""
    try:
        return DecoderSpec.model_validate_json(json.dumps(section))
    except ValidationError as error:
        lines = []
        for one in error.errors():
            path = ".".join(str(word) for word in one["loc"])
            lines.append(f"model.{path}: {one['msg']}")
        raise CheckpointError(lines) from None


def _differences(mine: Any, said: Any, path: str, family: str) -> Iterator[str]:
    """Where two sections differ, but for what is of training alone."""
    if path in OF_TRAINING:
        return
    if isinstance(mine, dict) and isinstance(said, dict):
        for name in mine.keys() | said.keys():
            inner = f"{path}.{name}" if path else name
            yield from _differences(mine.get(name), said.get(name), inner, family)
    elif mine != said:
        yield f"model.{path}={mine}, where {family} has {said}"


def base_section(config: Config, *, has_head_dim: bool = True) -> dict[str, Any]:
    """What nearly every family says by the same keys. `has_head_dim`: the size of heads is one of them."""
    n_heads = config.count("num_attention_heads")
    d_model = config.count("hidden_size")
    d_head = None
    if n_heads is not None and d_model is not None:
        d_head = d_model // n_heads
    return {
        "kind": "decoder",
        "n_layers": config.count("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": config.count("num_key_value_heads", n_heads),
        "d_head": config.count("head_dim", d_head) if has_head_dim else d_head,
        "d_ffn": config.count("intermediate_size"),
        "vocab_size": config.count("vocab_size"),
        "max_seq_len": config.count("max_position_embeddings"),
        "init_std": config.number("initializer_range", 0.02),
    }


def base_keys(spec: DecoderSpec, *, has_head_dim: bool = True) -> dict[str, Any]:
    """`base_section`, the other way round."""
    keys = {
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.d_head,
        "intermediate_size": spec.d_ffn,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_seq_len,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    if not has_head_dim:
        del keys["head_dim"]
    return keys


ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "quick_gelu": "quick_gelu",
}
"""Ours by transformers' names."""
THEIR_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu_squared": "relu2",
    "quick_gelu": "quick_gelu",
}
