"""A config.json, every key of which must be asked for: what nobody has asked for is an error, never dropped."""

import json
from collections.abc import Mapping
from typing import Any

from megaspec.core.errors import CheckpointError
from megaspec.core.problems import did_you_mean

_MISSING = object()
# What the entries of a list may be, and in words. true is no number here.
_ENTRIES: Mapping[type, tuple[tuple[type, ...], str]] = {
    str: ((str,), "texts"),
    int: ((int,), "whole numbers"),
    float: ((int, float), "numbers"),
}

# Keys that every family may have and that say nothing of the model's numbers.
ABOUT: Mapping[str, str] = {
    "_name_or_path": "where the file is from",
    "_attn_implementation": "how transformers attends",
    "_attn_implementation_autoset": "how transformers attends",
    "architectures": "names transformers' class",
    "auto_map": "names code, which is never run",
    "bad_words_ids": "of generation",
    "begin_suppress_tokens": "of generation",
    "bos_token_id": "of the tokenizer",
    "chunk_size_feed_forward": "how transformers computes",
    "dtype": "the tensors say their own",
    "eos_token_id": "of the tokenizer",
    "finetuning_task": "of the file's history",
    "id2label": "of classification",
    "label2id": "of classification",
    "model_type": "names the family",
    "output_attentions": "how transformers computes",
    "output_hidden_states": "how transformers computes",
    "pad_token_id": "of the tokenizer",
    "prefix": "of generation",
    "pretraining_tp": "how transformers computes",
    "problem_type": "of classification",
    "return_dict": "how transformers computes",
    "return_dict_in_generate": "of generation",
    "sep_token_id": "of the tokenizer",
    "task_specific_params": "of generation",
    "tf_legacy_loss": "how transformers computes",
    "tokenizer_class": "of the tokenizer",
    "torch_dtype": "the tensors say their own",
    "torchscript": "how transformers computes",
    "transformers_version": "of the file's history",
    "use_bfloat16": "how transformers computes",
    "use_cache": "of generation",
}
# Keys that every file may have, with the one value that a decoder's has.
PLAIN: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}


class Config:
    """Reads a config.json key by key, and gathers everything that is wrong with it."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where
        self.asked: dict[str, str] = {}
        """Every key that was asked for, and what it is for."""
        self.problems: list[str] = []

    def has(self, name: str) -> bool:
        """Whether a key is there and not null."""
        return self.values.get(name) is not None

    def count(self, name: str, default: Any = _MISSING, *, least: int = 1) -> Any:
        """A whole number of at least `least`."""
        return self._get(name, default, lambda v: type(v) is int and v >= least, f"a whole number of at least {least}")

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A number, as a float."""
        value = self._get(name, default, lambda v: type(v) in (int, float), "a number")
        return float(value) if type(value) is int else value

    def flag(self, name: str, default: Any = _MISSING) -> Any:
        """true or false."""
        return self._get(name, default, lambda v: type(v) is bool, "true or false")

    def text(self, name: str, default: Any = _MISSING) -> Any:
        """A text."""
        return self._get(name, default, lambda v: isinstance(v, str), "a text")

    def one_of(self, name: str, values: Mapping[str, Any], default: Any = _MISSING) -> Any:
        """What a text stands for."""
        text = self._get(name, default, lambda v: v in values, f"one of {', '.join(values)}")
        return values.get(text)

    def section(self, name: str, default: Any = _MISSING) -> Any:
        """An object."""
        return self._get(name, default, lambda v: isinstance(v, dict), "an object")

    def entries(self, name: str, default: Any = _MISSING, *, of: type) -> Any:
        """A list. `of`: str for texts, int for whole numbers, float for any."""
        types, what = _ENTRIES[of]

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(type(one) in types for one in value)

        return self._get(name, default, fits, f"a list of {what}")

    def fixed(self, name: str, value: Any, because: str) -> None:
        """A key that may have one value alone."""
        self.asked[name] = f"must be {_shown(value)}: {because}"
        found = self.values.get(name, value)
        if found != value:
            self.problems.append(f"{name}={_shown(found)}: only {_shown(value)} can be said, since {because}")

    def ignore(self, name: str, because: str) -> None:
        """A key that changes no number of the model."""
        self.asked[name] = f"not needed: {because}"

    def refuse(self, problem: str) -> None:
        """Something that can't be said in our options."""
        self.problems.append(problem)

    def finish(self) -> None:
        """CheckpointError: everything that is wrong, and every key that nobody has asked for."""
        for name, because in ABOUT.items():
            self.ignore(name, because)
        for name, value in PLAIN.items():
            self.fixed(name, value, "a decoder alone is trained")
        for name, value in self.values.items():
            if name not in self.asked:
                near = did_you_mean(name, self.asked)
                self.problems.append(f"{name}={_shown(value)} is mapped to nothing{'; ' + near if near else ''}")
        if self.problems:
            raise CheckpointError([f"{self.where}: {problem}" for problem in self.problems])

    def _get(self, name: str, default: Any, fits: Any, what: str) -> Any:
        """A key's value; null and a missing one are the default. A wrong one is gathered, and the default returned."""
        self.asked.setdefault(name, what)
        value = self.values.get(name)
        if value is None:
            if default is _MISSING:
                self.problems.append(f"{name} is missing; it must be {what}")
                return None
            return default
        if not fits(value):
            self.problems.append(f"{name}={_shown(value)} must be {what}")
            return None if default is _MISSING else default
        return value


def _shown(value: Any) -> str:
    """A value as JSON writes it, cut."""
    text = json.dumps(value)
    if len(text) <= 60:
        return text
    return text[:57] + "..."
