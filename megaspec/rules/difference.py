"""What of a recipe is the experiment, and what only says how it is computed: one table, for `resume` and for `diff`.

The experiment is the model, the data order, the batch, the optimizer and the number formats. Free to change are how the
work is divided and computed, how long the run is, and what it reports.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaspec.core.problems import value_at
from megaspec.recipe import Recipe
from megaspec.spec import Spec

FREE = (
    "about",
    "parallelism",
    "kernels",
    "launcher",
    "log",
    "profile",
    "checkpoint",
    "data.bad_lines",
    "data.cache",
    "data.document_lengths",
    "data.download_dir",
    "data.prepare",
    "data.valid",
    "data.workers",
    "model.vocab_pad_to",
    # to the bit the same weights, in fewer bytes: how they travel, as parallelism says who holds them
    "precision.gather_fp8",
    "run_dir",
    "train.steps",
    "train.micro_batch",
    "train.numbers",
    "train.checks",
    "train.eval_every",
    "train.eval_samples",
    "train.sample",
    "train.deterministic",
)
# Below a free path, and part of the experiment all the same: the format in which gradients are summed.
BOUND = ("parallelism.grad_reduce",)
# What two runs of one recipe may differ in without a word.
NAMES = ("name", "about", "run_dir")


@dataclass(frozen=True)
class Change:
    """A field that differs."""

    key: str
    was: Any
    now: Any
    is_experiment: bool
    """It changes what is computed, not only how."""


def is_free(key: str, *contents: Mapping[str, Any]) -> bool:
    """True for a path that may change within one experiment. `contents`: the recipes, as plain data, that it is of."""
    if key == "train.micro_batch" and any(map(balances_within_a_micro_batch, contents)):
        return False
    return _is_below(key, FREE) and not _is_below(key, BOUND)


def balances_within_a_micro_batch(content: Mapping[str, Any]) -> bool:
    """True where experts are balanced or limited by a statistic of a micro batch, so that its size changes the loss."""
    moe = value_at(content, "model.moe")
    if not isinstance(moe, Mapping):
        return False
    router = moe.get("router") or {}
    has_aux = any(loss.get("kind") == "aux" for loss in router.get("losses") or ())
    return has_aux or router.get("balancing") == "sinkhorn" or moe.get("capacity_factor") is not None


def changed(was: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, before, after) of everything that differs in plain data. Of two kinds of a section only what both have."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        is_same_kind = was.get("kind") == now.get("kind")
        # the names of both, each once, in the order of today's recipe
        for name in dict.fromkeys([*now, *was]):
            if is_same_kind or (name in was and name in now):
                yield from changed(was.get(name), now.get(name), _joined(prefix, name))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for number, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from changed(before, after, f"{prefix}.{number}")
    elif was != now:
        yield prefix, was, now


def experiment_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Path -> value of everything in a recipe or Spec, as plain data, that is the experiment."""
    recipe = {name: content[name] for name in Recipe.model_fields if name in content}
    found = {}
    for key, value in leaves(recipe):
        if not is_free(key, content) and not _is_below(key, NAMES):
            found[key] = value
    return found


def differences(was: Recipe, now: Recipe) -> list[Change]:
    """Everything in which two recipes differ, names left out. Of two Specs also the data that they were resolved with
    and the place in its order."""
    before = was.model_dump(mode="json")
    after = now.model_dump(mode="json")
    found = []
    for key, old, new in changed(_of_a_recipe(before), _of_a_recipe(after)):
        if not _is_below(key, NAMES):
            found.append(Change(key, old, new, is_experiment=not is_free(key, before, after)))
    if isinstance(was, Spec) and isinstance(now, Spec):
        if was.data_fingerprint and now.data_fingerprint and was.data_fingerprint != now.data_fingerprint:
            found.append(Change("data_fingerprint", was.data_fingerprint, now.data_fingerprint, True))
        if was.data_order != now.data_order:
            found.append(Change("data_order", was.data_order, now.data_order, True))
        if was.samples_moved != now.samples_moved:
            found.append(Change("samples_moved", was.samples_moved, now.samples_moved, True))
        if was.device != now.device:
            found.append(Change("device", was.device, now.device, False))
    return found


def verdict(found: list[Change]) -> str:
    """What two recipes are to each other."""
    if any(change.is_experiment for change in found):
        return "another experiment"
    if found:
        return "same experiment, other mapping"
    return "identical"


def leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every plain value of plain data; an empty section or list counts as one."""
    if not isinstance(content, dict | list) or not content:
        yield prefix, content
        return
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    for name, inner in entries:
        yield from leaves(inner, _joined(prefix, str(name)))


def _joined(prefix: str, name: str) -> str:
    """The path of a name below a prefix; "" is the root."""
    if not prefix:
        return name
    return f"{prefix}.{name}"


def _of_a_recipe(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: content[name] for name in Recipe.model_fields}


def _is_below(key: str, paths: tuple[str, ...]) -> bool:
    return any(key == path or key.startswith(f"{path}.") for path in paths)
