"""Flags of data, evaluation, checkpoints and the log -> `data`, `train`, `checkpoint`, `log`."""

import re
from pathlib import Path
from typing import Any

from megaspec.core.bounded_json import MAX_BYTES, parse_json
from megaspec.megatron.draft import RecipeDraft

# What keeps documents apart: their positions, what they attend to, the token between them in the loss.
_MASKS = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
# What names the data sets of each split.
_PER_SPLIT = ("--train-data-path", "--valid-data-path", "--per-split-data-args-path")
# With one of these a checkpoint is not gone on with: a training starts from its weights, or from another step.
_STARTS = ("--load-main-params-from-ckpt", "--finetune", "--ckpt-step", "--override-ckpt-iteration")


def translate_data(draft: RecipeDraft) -> None:
    """Where tokens come from, how documents are kept apart."""
    per_split = _per_split(draft)
    blend, name = _blend(draft, per_split)
    if draft["--mock-data"]:
        draft.choices["data"] = "random"
        draft.put("data.kind", "random", "--mock-data")
        size = draft.content["model"].get("vocab_size")
        if size == "auto":
            draft.refuse("--mock-data", "its vocabulary is not known; give --vocab-size, too")
        draft.put("data.vocab_size", size, remark="model.vocab_size")
        for name in ("--split", "--data-cache-path", "--data-path", *_PER_SPLIT):
            draft.note(name, "random data have no files")
    else:
        draft.choices["data"] = "indexed"
        draft.put("data.blend", blend, name)
        if not draft[name]:
            draft.refuse("--data-path", "is missing; give it, or --mock-data")
        if name != "--data-path":
            draft.put("data.split", [1.0, 0.0, 0.0], name)
            _validation(draft, per_split)
        else:
            draft.put("data.split", _split(draft), "--split", ours=[969.0, 30.0, 1.0])
        if draft.is_given("--data-cache-path"):
            draft.put("data.cache", draft["--data-cache-path"], "--data-cache-path")
    name = "--seq-length" if draft.is_given("--seq-length") else "--encoder-seq-length"
    draft.put("data.seq_len", draft.seq_len, name)
    _masks(draft)


def _per_split(draft: RecipeDraft) -> dict[str, list[str]]:
    """What the file of --per-split-data-args-path says of `train`, `valid` and `test`; nothing where none is given."""
    name = "--per-split-data-args-path"
    if not draft.is_given(name):
        return {}
    for other in ("--data-path", "--train-data-path", "--valid-data-path"):
        if draft.is_given(other):
            draft.refuse(name, f"says the data sets, and so does {other}; give one of them")
    try:
        content = parse_json(Path(draft[name]).read_bytes()[:MAX_BYTES])
    except (OSError, ValueError) as error:
        draft.refuse(name, f"can't be read as JSON: {error}")
        return {}
    words = {}
    for split in ("train", "valid", "test"):
        said = content.get(split) if isinstance(content, dict) else None
        if said is not None and not isinstance(said, list):
            draft.refuse(name, f"must hold a list of weights and prefixes under {split}")
            said = None
        words[split] = [str(word) for word in said or []]
    if not words["train"]:
        draft.refuse(name, "names no data set under train")
    return words


def _validation(draft: RecipeDraft, per_split: dict[str, list[str]]) -> None:
    """The data sets that are evaluated, as one set."""
    name = "--valid-data-path"
    words = draft[name] or []
    if per_split:
        name = "--per-split-data-args-path"
        words = per_split["valid"]
        if per_split["test"]:
            draft.notes[name] = "its data sets under test are read by no training; megaspec eval RUN --data does"
    if words:
        draft.put("data.valid", {"valid": {"blend": _blend_of(draft, name, words)}}, name)


def _blend(draft: RecipeDraft, per_split: dict[str, list[str]]) -> tuple[list[dict[str, Any]], str]:
    """The data sets of the training, and the flag that says them."""
    if per_split:
        name = "--per-split-data-args-path"
        return _blend_of(draft, name, per_split["train"]), name
    name = "--train-data-path" if draft.is_given("--train-data-path") else "--data-path"
    return _blend_of(draft, name, draft[name] or []), name


def _blend_of(draft: RecipeDraft, name: str, words: list[str]) -> list[dict[str, Any]]:
    """Data sets, of prefixes, or of weights and prefixes in turn."""
    prefixes = words[1::2]
    weights = [_number(word) for word in words[::2]]
    has_no_weights = all(weight is None for weight in weights)
    if len(words) % 2 == 1 or has_no_weights:
        return [{"prefix": prefix} for prefix in words]
    if None in weights:
        draft.refuse(name, "must be weights and prefixes in turn, or prefixes only")
        return []
    if name != "--data-path" and len(weights) == 1:
        # Megatron drops the weight here and keeps it in --data-path, where it changes the order (data/order.py).
        return [{"prefix": prefixes[0]}]
    blend = []
    for weight, prefix in zip(weights, prefixes, strict=True):
        blend.append({"prefix": prefix, "weight": weight})
    return blend


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _split(draft: RecipeDraft) -> list[float]:
    """Shares of training, validation and test data, 0 for those that are not given."""
    numbers = re.findall(r"\d*\.?\d+|\d+", draft["--split"])
    if not 1 <= len(numbers) <= 3:
        draft.refuse("--split", "must be up to three shares, such as 969,30,1")
    return [*map(float, numbers), 0.0, 0.0][:3]


def _masks(draft: RecipeDraft) -> None:
    """How documents of one sequence are kept apart: Megatron's three switches are one key here."""
    given = [name for name in _MASKS if draft[name]]
    if not given:
        draft.note("--calculate-per-token-loss", "the loss is always a mean over the valid tokens of the global batch")
        return
    draft.put("data.document_mask", True, *_MASKS, "--calculate-per-token-loss")
    if len(given) < len(_MASKS):
        absent = ", ".join(name for name in _MASKS if name not in given)
        draft.lose(given[0], f"without {absent}; data.document_mask does all three")
    if not draft["--calculate-per-token-loss"]:
        what = "without --calculate-per-token-loss; each valid token of a global batch weighs the same here"
        draft.lose("--eod-mask-loss", what)


def translate_evaluation(draft: RecipeDraft) -> None:
    """How often and on how much the validation split is evaluated."""
    every = draft["--eval-interval"] or 0
    iterations = draft["--eval-iters"]
    split = draft.content["data"].get("split")
    has_no_data = split is not None and split[1] == 0 and not draft["--mock-data"]
    if draft.content["data"].get("valid"):
        has_no_data = False
    remark = ""
    if not iterations:
        every = 0
    if every and has_no_data:
        every = 0
        remark = _tell_no_evaluation(draft)
    draft.put("train.eval_every", every, "--eval-interval", ours=0, remark=remark)
    batch = _evaluation_batch(draft)
    if every and batch:
        remark = f"{iterations} batches of {batch}"
        draft.put("train.eval_samples", iterations * batch, "--eval-iters", "--eval-global-batch-size", remark=remark)


def _evaluation_batch(draft: RecipeDraft) -> int | None:
    """Sequences of a batch of the evaluation."""
    if draft.is_given("--eval-global-batch-size"):
        return draft["--eval-global-batch-size"]
    if draft.is_given("--step-batch-size-schedule"):
        # The global batch then is not given, and the one that Megatron makes up does not grow.
        return draft.unit
    return draft.content["train"].get("global_batch")


def _tell_no_evaluation(draft: RecipeDraft) -> str:
    """Why there is no data for it, as what stands behind the key; told where Megatron does without, too."""
    name = "--eval-interval"
    if draft.is_given("--per-split-data-args-path"):
        draft.change(name, "no evaluation, because the file of --per-split-data-args-path names nothing under valid")
    elif draft.is_given("--train-data-path"):
        draft.change(name, "no evaluation, because --train-data-path without --valid-data-path leaves nothing for it")
    else:
        draft.change(name, "no evaluation, because --split leaves nothing for validation")
    return "there is nothing to evaluate"


def translate_output(draft: RecipeDraft) -> None:
    """Checkpoints and the log."""
    _checkpoints(draft)
    draft.note("--tensorboard-dir", "TensorBoard's files lie in the run folder, where tensorboard is installed")
    if draft.is_given("--load"):
        starts_anew = any(draft.is_given(name) for name in _STARTS)
        goes_on = draft["--load"] == draft["--save"] and not starts_anew
        if goes_on:
            draft.note("--load", "a run goes on with `megaspec train ... resume=auto`, or `megaspec resume RUN`")
        else:
            draft.lose("--load", "weights are made from the seed; Megatron's checkpoints are not read")
    draft.put("log.every", draft["--log-interval"], "--log-interval")


def _checkpoints(draft: RecipeDraft) -> None:
    """When checkpoints are written, and which of them stay."""
    interval = "--save-interval"
    retained = "--save-retain-interval"
    if draft.is_given(interval):
        draft.put("checkpoint.every", draft[interval], interval)
        if not draft.is_given("--save"):
            draft.change(interval, "writes nothing without --save; here checkpoints lie in the run folder")
    remark = "Megatron deletes none"
    if draft.is_given(retained):
        what = "there the newest checkpoint and every multiple of it stay; here all, since a recipe counts the newest"
        draft.note(retained, what)
        remark = ""
    given = [name for name in (interval, "--save") if draft.is_given(name)]
    if given:
        draft.put("checkpoint.keep", "all", *given, remark=remark)
    draft.note("--save", "checkpoints lie in the run folder: run_dir=")
    draft.note("--async-save", "how a checkpoint is written is the store's")
