"""Is a checkpoint this run's own? Its Spec, and where it stands in the training order, against those of the run. Pure.

A checkpoint of the run was saved under the same experiment (difference.py), whatever was free to change since then. Two
runs of one experiment with the same data order are the same run. A fork begins with a checkpoint of another: the very
one that its Spec names. Other checkpoints of that run are no more the fork's own than those of a third.

Specs of earlier versions do not note whether their run began as a fork. Nothing that follows is claimed then.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaspec.checkpoint.format import LARGEST_NUMBER, Manifest, StoredTensor
from megaspec.checkpoint.remote import Identity, Owner, way_out_of_anothers
from megaspec.core.errors import WriteError, printable
from megaspec.core.problems import show
from megaspec.precision.spec import Fp16Precision, fp8_recipe
from megaspec.rules.difference import Change, differences, experiment_of
from megaspec.spec import UNKNOWN_ORIGIN, ForkPoint, Spec
from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.trainable import trained_names
from megaspec_kernels.gone import without_gone

MOST_KEYS = 3
# Of a value that is told.
_MOST_CHARACTERS = 80
# A loss that is scaled by more is infinite in fp32.
LARGEST_SCALE = 2.0**128
# The state of a checkpoint of a run of weights alone: there is no place in a training order.
WEIGHTS_ALONE = {"holds": "weights"}
# What a run knows of its own numbers (train/guard.py), in the state of its checkpoints; earlier versions have none.
NUMBERS = "numbers"
# What names begin with of the largest elements that delayed scales are made of.
FP8 = "fp8/"


def is_imported(run: Spec) -> bool:
    """True for a run of weights that no run of ours has trained."""
    return run.holds == "weights" and all(one.imported for one in run.taken_from)


def other_place(run: Spec) -> str | None:
    """Where a run saves what its folder does not take. None: nowhere; weights alone are written whole or not at all."""
    if run.holds == "weights":
        return None
    return run.checkpoint.fallback_dir


def holds_weights_alone(manifest: Manifest) -> bool:
    """True for a checkpoint without optimizer state: of an imported run, or the last one under
    checkpoint.last=weights."""
    return manifest.state.get("holds") == WEIGHTS_ALONE["holds"]


def last_of_weights(run_dir: Path | str) -> str:
    """Why nothing goes on from the last checkpoint of a run in that folder, and the way out; its name goes before."""
    text = "holds weights alone (checkpoint.last=weights), no optimizer state to go on with; start a run from them: "
    return f"{text}megaspec train recipe=NAME init.load={run_dir}"


def run_identity(saved: Mapping[str, Any]) -> str:
    """SHA-256 of what is the same in all checkpoints of one run and in none of another's.

    `saved`: the Spec of a manifest as it was written. Not as this version reads it: a field that came later would make
    another run of it.
    """
    segments = saved.get("segments") or ()
    fixed = {
        "experiment": experiment_of(saved),
        "data_fingerprint": saved.get("data_fingerprint", ""),
        "data_order": saved.get("data_order", 1),
        "samples_moved": saved.get("samples_moved", 0),
        "forked_from": saved.get("forked_from", UNKNOWN_ORIGIN),
        # a longer training appends to them
        "first_segment": segments[:1],
    }
    if saved.get("weights_from") is not None:
        fixed["weights_from"] = saved["weights_from"]["digest"]
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def fork_point(manifest: Manifest) -> ForkPoint:
    """Where a fork begins that takes this checkpoint."""
    return ForkPoint(
        source=run_identity(manifest.spec),
        manifest=manifest.digest,
        step=manifest.step,
        tokens=manifest.state["tokens"],
    )


def is_fork_point(manifest: Manifest, run: Spec) -> bool:
    """True for the checkpoint from which a fork began."""
    return isinstance(run.forked_from, ForkPoint) and run.forked_from.manifest == manifest.digest


def starts_optimizer_anew(manifest: Manifest, run: Spec) -> bool:
    """True where a fork trains a parameter that was frozen in the run that it began from. Optimizers correct moments by
    how many updates they have seen, one number for all parameters: so all begin with none."""
    if not is_fork_point(manifest, run):
        return False
    facts = run.model.facts
    there = trained_names(facts, manifest.spec["train"].get("trainable"))
    here = trained_names(facts, run.train.trainable)
    return bool((here - there) & facts.weights().keys())


def leaves_histories(manifest: Manifest, run: Spec) -> bool:
    """True where a fork has no use for what delayed scales remember in the run that it began from."""
    if not is_fork_point(manifest, run) or fp8_recipe(run.precision) == "delayed":
        return False
    return any(name.startswith(FP8) for name in manifest.tensors)


def began_as_fork(run: Spec) -> bool:
    """True for a run that surely did not begin with weights from the seed. Earlier versions note only some forks."""
    return isinstance(run.forked_from, ForkPoint) or run.samples_moved != 0


def fork_again(run: Spec) -> str:
    """The way out for a fork of which no good checkpoint is left: from step 0 it would be another run."""
    step = "a step"
    if isinstance(run.forked_from, ForkPoint):
        step = f"step {run.forked_from.step}"
    text = f"this run began as a fork, from {step} of another run, and can't start from step 0; put a checkpoint back, "
    return f"{text}or delete {run.run_dir} and fork again: megaspec resume SOURCE --fork {run.run_dir}"


def objections(manifest: Manifest, run: Spec) -> list[str]:
    """Why a run can't go on from a checkpoint, a line each: it is another run's, or it does not say where it stands.

    The bytes of its files, and the names and shapes of its tensors, are checked elsewhere.
    """
    if is_fork_point(manifest, run):
        # It was looked at when it was copied, under the Spec of its own run.
        return []
    try:
        saved = _as_read(manifest.spec)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("spec", *first["loc"])))
        return [printable(f"{key}: {first['msg']}; it holds no Spec that this version reads")]
    changes = _foreign(saved, run)
    if changes:
        text = (
            f"{_whose(manifest, saved, run)}: {in_words(changes)}; put it back there, and start a run "
            f"from it with megaspec resume {saved.run_dir} --fork NEW"
        )
        return [printable(text)]
    if saved.holds == "weights":
        return _more_than_weights(manifest)
    if holds_weights_alone(manifest):
        return _misplaced(manifest, saved) or _no_last_weights(manifest, saved)
    # the generators last: they are counted by the saved Spec's world size
    return _misplaced(manifest, saved) or _wrong_generators(manifest.tensors, saved)


def _as_read(saved: Mapping[str, Any]) -> Spec:
    """A Spec as it was written, as this version reads it. ValidationError."""
    # what computed it is free to change, and may be gone
    return Spec.model_validate_json(json.dumps(without_gone(saved)))


def owner_of(run: Spec) -> Owner:
    """How a run names itself where its checkpoints are copied to."""
    return Owner(run.name, run.run_dir, run_identity(run.model_dump(mode="json")))


def refuse_copies_of_another(found: Sequence[Identity], run: Spec) -> None:
    """WriteError: of what lies where a run copies its checkpoints to, something is another run's."""
    url = run.checkpoint.copy_to
    assert url is not None, "a run without copies"
    url = url.rstrip("/")
    written = run.model_dump(mode="json")
    for copy in found:
        changes = unlike(copy, written)
        if not changes:
            continue
        what = "spec.json"
        if copy.step is not None:
            what = f"step {copy.step}"
        whose = f"{_short(copy.spec.get('name'))} ({_short(copy.spec.get('run_dir'))})"
        text = f"checkpoint.copy_to={url} holds copies of another run: {what} is of {whose}: {in_words(changes)}"
        raise WriteError(printable(f"{text}; {way_out_of_anothers(url, run.name)}"))


def unlike(copy: Identity, run: Mapping[str, Any]) -> list[Change]:
    """In what a copy is not of a run; none where it is, or is the checkpoint with which the run began as a fork. `run`:
    its Spec as it was written.

    Two runs of one experiment are told apart by their names here, which stay when a run goes on: of checkpoints that
    one place can't hold both, none may take the other's.
    """
    origin = run.get("forked_from")
    if isinstance(origin, Mapping) and origin.get("manifest") == copy.digest:
        return []
    found = []
    if copy.spec.get("name") != run.get("name"):
        found.append(Change("name", copy.spec.get("name"), run.get("name"), False))
    try:
        saved = _as_read(copy.spec)
        ours = _as_read(run)
    except ValidationError:
        # of another version: it says itself whether it is the same
        before = run_identity(copy.spec)
        now = run_identity(run)
        if before != now:
            found.append(Change("run", before, now, True))
        return found
    for change in _foreign(saved, ours):
        # either may have been trained longer since the other was written
        is_longer = change.key == "segments" and saved.segments[:1] == ours.segments[:1]
        if not is_longer:
            found.append(change)
    return found


def _whose(manifest: Manifest, saved: Spec, run: Spec) -> str:
    """Whose a foreign checkpoint is, as far as this run's Spec tells."""
    origin = run.forked_from
    if isinstance(origin, ForkPoint) and origin.source == run_identity(manifest.spec):
        text = f"it belongs to the run that this was forked from, {saved.run_dir}, and is not the checkpoint of step "
        return f"{text}{origin.step} with which the fork began"
    text = f"it is a checkpoint of another run, {saved.run_dir}"
    if origin == UNKNOWN_ORIGIN:
        text += " (or of the one that this was forked from, if it was: "
        text += "its Spec is of an earlier version, which did not note it)"
    return text


def in_words(changes: Sequence[Change]) -> str:
    """What differs, `key=before (this run: now), ...`, at most MOST_KEYS of them."""
    texts = [f"{change.key}={_short(change.was)} (this run: {_short(change.now)})" for change in changes[:MOST_KEYS]]
    text = ", ".join(texts)
    if len(changes) > MOST_KEYS:
        text += f" and {len(changes) - MOST_KEYS} more"
    return text


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict | list | tuple) else show(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS - 3]}..."


def _foreign(saved: Spec, run: Spec) -> list[Change]:
    """In what a checkpoint's Spec is of another experiment, or of another order of the data."""
    found = []
    for change in differences(saved, run):
        if change.is_experiment and change.key != "data_fingerprint":
            found.append(change)
    # Here also where one has none: what a run was saved with stays as it is.
    if saved.data_fingerprint != run.data_fingerprint:
        found.append(Change("data_fingerprint", saved.data_fingerprint, run.data_fingerprint, True))
    if not _may_have_one_origin(saved, run):
        found.append(Change("forked_from", _origin(saved), _origin(run), True))
    if _weights_digest(saved) != _weights_digest(run):
        found.append(Change("weights_from", _weights_digest(saved), _weights_digest(run), True))
    if saved.holds != run.holds:
        found.append(Change("holds", saved.holds, run.holds, True))
    # A longer training appends segments and never changes one.
    if saved.segments != run.segments[: len(saved.segments)]:
        found.append(Change("segments", saved.segments, run.segments, True))
    return found


def _may_have_one_origin(saved: Spec, run: Spec) -> bool:
    """Whether two Specs may be of runs that began with the same weights, as far as they tell."""
    if saved.forked_from == run.forked_from:
        return True
    # A version that notes where a fork began notes it in all its files, so that no fork's are among the unknown ones.
    is_unknown = UNKNOWN_ORIGIN in (saved.forked_from, run.forked_from)
    return is_unknown and None in (saved.forked_from, run.forked_from)


def _origin(spec: Spec) -> Any:
    """Where a run began, as JSON."""
    if isinstance(spec.forked_from, ForkPoint):
        return spec.forked_from.model_dump(mode="json")
    return spec.forked_from


def _weights_digest(spec: Spec) -> str | None:
    """What the weights were that a run began with; where they lay is no matter."""
    return None if spec.weights_from is None else spec.weights_from.digest


def _more_than_weights(manifest: Manifest) -> list[str]:
    """What a checkpoint of a run of weights alone holds beside them."""
    if manifest.state != WEIGHTS_ALONE or manifest.step != 0:
        found = f"step={manifest.step} and state {_short(manifest.state)}"
        return [printable(f"{found}, expected step=0 and {_short(WEIGHTS_ALONE)}: its run holds weights alone")]
    return _beside_weights(manifest)


def _no_last_weights(manifest: Manifest, saved: Spec) -> list[str]:
    """Why a checkpoint that says that it holds weights alone can't be the last one of its run."""
    if manifest.step != saved.train.steps or saved.checkpoint.last != "weights":
        expected = f"checkpoint.last=weights and the last step, {saved.train.steps}"
        return [f"state: it holds weights alone after step {manifest.step}, which is said of {expected}"]
    return _beside_weights(manifest)


def _beside_weights(manifest: Manifest) -> list[str]:
    for name in manifest.tensors:
        if not name.startswith(("model/", "router/")):
            return [printable(f"{name}: expected weights alone, as its state says")]
    return []


def _misplaced(manifest: Manifest, saved: Spec) -> list[str]:
    """Where the state is not what the saved Spec makes of the step, or holds what no run writes."""
    state = manifest.state
    step = manifest.step
    keys = {"step", "samples", "tokens", "optimizer_updates", "loss_scale"}
    if holds_weights_alone(manifest):
        keys.add("holds")
    # files of earlier versions know of no such settings, and say nothing of what came of them
    if "numbers" in manifest.spec["train"]:
        keys.add(NUMBERS)
    if set(state) != keys:
        return [printable(f"state: expected the keys {sorted(keys)}, found {sorted(state)[:8]}")]
    schedule = BatchSchedule(saved.train, moved=saved.samples_moved)
    samples = schedule.consumed(step)
    first_step = 0
    first_tokens = 0
    if isinstance(saved.forked_from, ForkPoint):
        first_step = saved.forked_from.step
        first_tokens = saved.forked_from.tokens
    most_tokens = first_tokens + (samples - schedule.consumed(first_step)) * saved.data.seq_len
    skipped = 0
    if NUMBERS in keys:
        wrong_numbers = _wrong_numbers(state[NUMBERS], step)
        if wrong_numbers:
            return wrong_numbers
        skipped = state[NUMBERS]["skipped"]
    # Each step of the run itself updates the weights, is counted as skipped, or ends the run. A fork's source may have
    # had a loss scale.
    least_updates = max(0, step - first_step - skipped)
    most_updates = step
    if saved.forked_from is None:
        most_updates = step - skipped
    if isinstance(saved.precision, Fp16Precision):
        least_updates = 0
    if saved.forked_from == UNKNOWN_ORIGIN:
        # What the source of a fork had learned from and skipped, if there was one.
        most_tokens = LARGEST_NUMBER
        least_updates = 0
    problems = [
        *_outside(state, "step", step, step),
        *_outside(state, "samples", samples, samples),
        *_outside(state, "tokens", first_tokens, most_tokens),
        *_outside(state, "optimizer_updates", least_updates, most_updates),
    ]
    if samples > sum(saved.segments):
        problems.append(f"state: samples={samples} lie behind the {sum(saved.segments)} of its training order")
    if step < first_step:
        problems.append(f"step={step} lies before step {first_step}, with which the fork began")
    return problems or _wrong_scale(state["loss_scale"], saved, step, skipped=step - state["optimizer_updates"])


def _wrong_numbers(value: Any, step: int) -> list[str]:
    """What is wrong with what a run knows of its numbers (train/guard.py)."""
    keys = {"rollbacks", "skipped", "windows", "recent", "values"}
    if type(value) is not dict or set(value) != keys:
        return [printable(f"state: numbers={_short(value)}, expected an object of {sorted(keys)}")]
    problems = _outside(value, "skipped", 0, step)
    windows = value["windows"]
    if type(windows) is list:
        # each time the run goes back it leaves something out
        problems += _outside(value, "rollbacks", len(windows), len(windows))
    if not _are_rows(windows, (int, int)) or any(not 1 <= first <= last for first, last in windows):
        problems.append(printable(f"state: windows={_short(windows)}, expected pairs of a first and a last step"))
    recent = value["recent"]
    if type(recent) is not list or any(type(one) is not int or not 1 <= one <= step for one in recent):
        problems.append(printable(f"state: recent={_short(recent)}, expected steps up to {step}"))
    values = value["values"]
    if not _are_rows(values, (int, float, float)):
        problems.append(printable(f"state: values={_short(values)}, expected rows of a step, a loss and a norm"))
    elif [row[0] for row in values] != sorted({row[0] for row in values}) or any(row[0] > step for row in values):
        problems.append(f"state: values are not of steps up to {step}, in order")
    return problems


def _are_rows(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is a list of lists of these kinds."""
    if type(value) is not list:
        return False
    return all(type(row) is list and tuple(map(type, row)) == kinds for row in value)


def _outside(values: Mapping[str, Any], key: str, least: int, most: int) -> list[str]:
    value = values[key]
    if type(value) is int and least <= value <= most:
        return []
    expected = str(least)
    if least != most:
        expected = f"a whole number from {least} to {most}"
    return [printable(f"state: {key}={_short(value)}, expected {expected} after its step")]


def _wrong_scale(value: Any, saved: Spec, step: int, *, skipped: int) -> list[str]:
    """What is wrong with the state of the loss scale (precision/scaler.py). `skipped`: steps without an update."""
    if not isinstance(saved.precision, Fp16Precision):
        if value is None:
            return []
        return [printable(f"state: loss_scale={_short(value)}, expected null")]
    keys = ["scale", "finite_in_row", "forgiven_left"]
    if type(value) is not dict or set(value) != set(keys):
        return [printable(f"state: loss_scale={_short(value)}, expected an object of {keys}")]
    scale = value["scale"]
    problems = []
    if type(scale) is not float or not 0 < scale < LARGEST_SCALE:
        problems.append(printable(f"state: scale={_short(scale)}, expected a number above 0 and below {LARGEST_SCALE}"))
    # a step that is skipped takes one of what is forgiven
    least = saved.precision.hysteresis - skipped
    most = saved.precision.hysteresis
    if saved.forked_from is not None:
        # It may have begun with another hysteresis.
        least = 1 - step
        most = LARGEST_NUMBER
    return [
        *problems,
        *_outside(value, "finite_in_row", 0, step - skipped),
        *_outside(value, "forgiven_left", least, most),
    ]


def _wrong_generators(tensors: Mapping[str, StoredTensor], saved: Spec) -> list[str]:
    """Every rank saved the bytes of its generators. Their number is torch's affair (runtime/state.py)."""
    kinds = ["cpu"]
    if saved.device == "cuda":
        kinds.append("cuda")
    n_found = sum(name.startswith("rng/") for name in tensors)
    # Counted before they are listed: nothing bounds a world size that somebody made up.
    if n_found != len(kinds) * saved.world_size:
        return [f"{n_found} random generators, expected {' and '.join(kinds)} of {saved.world_size} ranks"]
    for kind, rank in product(kinds, range(saved.world_size)):
        name = f"rng/{kind}/{rank}"
        if name not in tensors:
            return [f"{name} is missing"]
        tensor = tensors[name]
        if tensor.dtype != "U8" or len(tensor.shape) != 1:
            return [f"{name}: dtype {tensor.dtype} and shape {list(tensor.shape)}, expected bytes"]
    return []
