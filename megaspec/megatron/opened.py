"""What both formats of a checkpoint come to: the args of the training, and tensors of the whole model. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaspec.megatron.pickled import Made
from megaspec.megatron.whole_tensors import WholeTensor

_EXTRA_STATE = re.compile(r".*\._extra_state(/.*)?")
_COUNTS = re.compile(r".*\.(local|global)_tokens_per_expert")
_FREQUENCIES = re.compile(r"(.*\.)?rotary_pos_emb\.inv_freq")
_IGNORED = (
    (_EXTRA_STATE, "what Transformer Engine keeps of fp8, which is no weight"),
    (_COUNTS, "how many tokens experts have taken, which is counted anew"),
    (_FREQUENCIES, "rotary frequencies, which follow from the base"),
)
_MODULE = "module."
# Transformer Engine fuses a norm with the product behind it, and calls it after that.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint of Megatron's whose files have been looked at."""

    iteration: int
    args: Mapping[str, Any] | None
    """The args of the training by their names; None: it keeps none."""
    tensors: Mapping[str, WholeTensor]
    """By the names of checkpoint_names.py."""
    left_out: Mapping[str, int]
    """Why tensors are left out, and how many."""
    format: str
    """legacy or torch_dist."""


def why_ignored(name: str) -> str | None:
    """Why nothing is read of what a model's state has under a name; None: it is a weight."""
    for pattern, because in _IGNORED:
        if pattern.fullmatch(name):
            return because
    return None


def plain_name(name: str) -> str:
    """A name without a wrapper's prefix, norms apart from products."""
    name = name.removeprefix(_MODULE)
    for fused, apart in _FUSED_NORMS:
        name = name.replace(fused, apart)
    return name


def entries_of(value: Any) -> dict[Any, Any] | None:
    """What a dict or an OrderedDict of a pickle holds; None: it is neither."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Made) and str(value.function) == "collections.OrderedDict":
        return value.pairs
    return None


def fields_of(value: Any, *names: str) -> dict[str, Any] | None:
    """The attributes of an object of a pickle whose class has one of these names; None: it is another."""
    if not isinstance(value, Made) or value.function is None or value.function.name not in names:
        return None
    state = value.state
    # an object with slots has two: attributes, and slots
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]
    if not isinstance(state, dict) or not all(type(name) is str for name in state):
        return None
    return state


def args_of(value: Any) -> dict[str, Any] | None:
    """The args of a training, as MLM keeps them."""
    return fields_of(value, "Namespace", "SimpleNamespace")
