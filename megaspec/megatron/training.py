"""Flags of the batch, the length, the optimizer, its schedules and number formats -> `train`, `optim`, `precision`."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from megaspec.core.problems import value_at
from megaspec.megatron.draft import RecipeDraft
from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.spec import BatchRamp, TrainSpec

_SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MAX_STAGES = 1_000
_STYLES = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
_MAX_SAMPLES = 10**15


def translate_training(draft: RecipeDraft) -> None:
    """Everything that says how long is trained, on how much at a time, and with which updates."""
    draft.put("train.micro_batch", draft["--micro-batch-size"], "--micro-batch-size")
    batch, ramp = _batch(draft)
    names = ("--global-batch-size", "--decrease-batch-size-if-needed", "--step-batch-size-schedule")
    remark = ""
    if draft.is_given("--global-batch-size") and draft.is_given("--step-batch-size-schedule"):
        remark = "Megatron refuses both together"
    draft.put("train.global_batch", batch, *names, remark=remark)
    if ramp is not None:
        draft.put("train.batch_ramp", ramp, "--step-batch-size-schedule")
    schedule = _schedule(batch, ramp)
    steps = draft["--train-iters"]
    remark = ""
    if steps is None and draft.is_given("--train-samples"):
        steps, remark = _length_of_training(draft, schedule)
    draft.put("train.steps", steps, "--train-iters", "--train-samples", remark=remark)
    draft.put("train.seed", draft["--seed"], "--seed", ours=1234)
    draft.put("train.deterministic", draft["--deterministic-mode"], "--deterministic-mode", ours=False)
    _optimizer(draft)
    _learning_rate(draft, schedule, steps)
    if draft.is_given("--step-batch-size-schedule"):
        _tell_lengths(draft, schedule, steps)
    _weight_decay(draft, steps)
    _precision(draft)


def _batch(draft: RecipeDraft) -> tuple[int | None, dict[str, int] | None]:
    """The global batch, and the ramp to it."""
    if draft.is_given("--step-batch-size-schedule"):
        return _from_schedule(draft)
    _tell_rampup(draft)
    batch = draft["--global-batch-size"]
    micro_batch = draft["--micro-batch-size"]
    if micro_batch is None or micro_batch < 1:
        return batch, None
    unit = draft.unit
    if batch is None:
        draft.change("--global-batch-size", f"not given: becomes --micro-batch-size times data-parallel ranks, {unit}")
        return unit, None
    if draft["--decrease-batch-size-if-needed"] and batch % unit and batch > unit:
        smaller = batch // unit * unit
        draft.change("--decrease-batch-size-if-needed", f"{batch} becomes {smaller}, a multiple of {unit}")
        return smaller, None
    return batch, None


def _from_schedule(draft: RecipeDraft) -> tuple[int | None, dict[str, int] | None]:
    """`0:768 250B:1536`: batches of 768, and of 1536 from 250 billion tokens on."""
    stages = _stages(draft)
    if stages is None:
        return None, None
    _check_last(draft, stages[-1].batch)
    if draft["--decrease-batch-size-if-needed"]:
        draft.refuse(
            "--decrease-batch-size-if-needed", "with --step-batch-size-schedule; Megatron refuses both, give one"
        )
    if len(stages) == 1:
        return stages[0].batch, None
    ramp = _as_ramp(stages)
    if ramp is None:
        what = "train.batch_ramp grows in equal increments over equal numbers of samples"
        draft.lose("--step-batch-size-schedule", what)
    return stages[-1].batch, ramp


def _check_last(draft: RecipeDraft, last: int) -> None:
    """Megatron refuses a batch beside a schedule, in its own example for GPT-3, too; where both say the same it is
    taken here."""
    name = "--global-batch-size"
    if draft.is_given(name) and draft[name] != last:
        draft.refuse(name, f"with --step-batch-size-schedule, which ends with {last}; Megatron refuses both, give one")


@dataclass(frozen=True)
class _BatchStage:
    """A part of --step-batch-size-schedule."""

    first_sample: int
    """Samples that lie before it."""
    batch: int
    """Sequences of a step."""


def _stages(draft: RecipeDraft) -> list[_BatchStage] | None:
    """The stages of --step-batch-size-schedule, in order. None: it is wrong, which is told.

    Thresholds are tokens, with and without a suffix, since Megatron passes the sequence length along; they become
    whole samples, rounded down.
    """
    name = "--step-batch-size-schedule"
    stages = []
    for word in draft[name].replace(",", " ").split():
        threshold, _, batch = word.strip("'\"").partition(":")
        tokens = _whole(threshold)
        sequences = _whole(batch)
        if tokens is None or not sequences:
            draft.refuse(name, f"{word}: must be THRESHOLD:BATCH, such as 0:768 or 2.4B:1536")
            return None
        stages.append(_BatchStage(tokens // max(1, draft.seq_len or 1), sequences))
    stages.sort(key=lambda stage: stage.first_sample)
    what = _wrong_stages(stages, draft.seq_len)
    if what:
        draft.refuse(name, what)
        return None
    return stages


def _wrong_stages(stages: list[_BatchStage], seq_len: int | None) -> str:
    """What is wrong with stages in order; "" where nothing is."""
    if not stages or stages[0].first_sample != 0:
        return "its first threshold must be 0"
    if len(stages) > _MAX_STAGES:
        return f"{len(stages):,} batch sizes; {_MAX_STAGES:,} at most"
    for before, after in pairwise(stages):
        if before.first_sample == after.first_sample:
            where = f"sample {after.first_sample:,} (of {seq_len:,} tokens each)"
            return f"batches {before.batch} and {after.batch} both begin at {where}; give one"
    return ""


def _whole(text: str) -> int | None:
    """The whole number that `768` or `2.4B` stands for, rounded down through a float as Megatron does it. None: it is
    no number."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{0,15})?)([KMBT]?)", text.upper())
    if match is None:
        return None
    number, suffix = match.groups()
    return int(float(number) * _SCALE[suffix])


def _as_ramp(stages: list[_BatchStage]) -> dict[str, int] | None:
    """The ramp that takes each batch from the same step on as the stages. None: there is none."""
    batches = [stage.batch for stage in stages]
    increments = {after - before for before, after in pairwise(batches)}
    if len(increments) > 1 or min(increments) < 1:
        return None
    last = stages[-1]
    # Rounded thresholds lie one off from equal distances: a sample more or less may still make the same steps.
    for samples in (last.first_sample, last.first_sample - 1, last.first_sample + 1):
        ramp = {"start": batches[0], "increment": min(increments), "samples": samples}
        if samples > 0 and _makes(_schedule(last.batch, ramp), stages):
            return ramp
    return None


def _makes(schedule: BatchSchedule | None, stages: list[_BatchStage]) -> bool:
    """Whether each stage begins with the step with which Megatron begins it: the first one behind its threshold."""
    assert schedule is not None, stages
    step = 0  # the first of the stage
    sample = 0  # what the steps before it have taken
    for stage, following in pairwise(stages):
        # a last step may go past the threshold: rounded up
        n_steps = max(0, -(-(following.first_sample - sample) // stage.batch))
        if n_steps:
            # between its ends a batch that only grows is the same
            first = schedule.batch(step)
            last = schedule.batch(step + n_steps - 1)
            if first != stage.batch or last != stage.batch:
                return False
        step += n_steps
        sample += n_steps * stage.batch
    return schedule.batch(step) == stages[-1].batch


def _tell_rampup(draft: RecipeDraft) -> None:
    """--rampup-batch-size START INCREMENT SAMPLES, which says two things, by the release."""
    name = "--rampup-batch-size"
    if not draft.is_given(name):
        return
    ramp = "train.batch_ramp"
    words = draft.command.values[name]
    if len(words) == 3 and all(re.fullmatch(r"\d[\d_]*", word) for word in words):
        start, increment, samples = (word.replace("_", "") for word in words)
        ramp += f"={{start: {start}, increment: {increment}, samples: {samples}}}"
    what = "read nowhere since core_v0.18.0 (21 April 2026), where --global-batch-size counts from the first step; "
    what += f"older releases grow the batch by it. Drop it, and for what they do set {ramp} in the recipe"
    draft.lose(name, what)


def _schedule(batch: int | None, ramp: dict[str, int] | None) -> BatchSchedule | None:
    """The batch of each step. None: there is no batch."""
    if batch is None or batch < 1:
        return None
    batch_ramp = None if ramp is None else BatchRamp(**ramp)
    # its number of steps says nothing about their batches
    return BatchSchedule(TrainSpec(steps=1, global_batch=batch, batch_ramp=batch_ramp))


def _steps(schedule: BatchSchedule | None, samples: int) -> int | None:
    """Whole steps that a number of samples makes."""
    if schedule is None:
        return None
    most = min(max(samples, 0), _MAX_SAMPLES)
    return bisect_right(range(most + 1), most, key=schedule.consumed) - 1


def _length_of_training(draft: RecipeDraft, schedule: BatchSchedule | None) -> tuple[int | None, str]:
    """Steps of --train-samples, and what is said beside them."""
    samples = draft["--train-samples"]
    steps = _steps(schedule, samples)
    if schedule is None or steps is None or not draft.is_given("--step-batch-size-schedule"):
        return steps, _of_samples(schedule, samples)
    if schedule.consumed(steps) >= samples:
        return steps, f"{samples:,} samples"
    # Megatron rounds a constant batch's steps down, and begins a last step where batches follow a schedule.
    return steps + 1, f"{samples:,} samples, the last step goes past them: rounded up, as with any such schedule"


def _of_samples(schedule: BatchSchedule | None, samples: int) -> str:
    """What is said beside a number of steps that is from one of samples: steps are whole."""
    text = f"{samples:,} samples"
    steps = _steps(schedule, samples)
    if schedule is None or steps is None:
        return text
    left_over = samples - schedule.consumed(steps)
    if left_over <= 0:
        return text
    hundredths = 100 * left_over // schedule.batch(steps)
    return f"{text}: {steps:,}.{hundredths:02} steps, rounded down"


def _optimizer(draft: RecipeDraft) -> None:
    kind = draft["--optimizer"]
    if kind not in ("adam", "sgd"):
        draft.lose("--optimizer", "optim.kind is adamw or sgd")
    if kind == "sgd":
        draft.choices["optim"] = "sgd"
        draft.put("optim.kind", "sgd", "--optimizer")
        draft.put("optim.momentum", draft["--sgd-momentum"], "--sgd-momentum", ours=0.9)
        if draft["--sgd-momentum"] and draft["--weight-decay"]:
            draft.lose("--weight-decay", "with --optimizer sgd: it passes through the momentum there, beside it here")
    else:
        draft.put("optim.kind", "adamw", "--optimizer", ours="adamw")
        for name, key, ours in (
            ("--adam-beta1", "beta1", 0.9),
            ("--adam-beta2", "beta2", 0.95),
            ("--adam-eps", "eps", 1e-8),
        ):
            draft.put(f"optim.{key}", draft[name], name, ours=ours)
        _formats(draft)
    draft.put("optim.lr", draft["--lr"], "--lr")
    draft.put("optim.clip", draft["--clip-grad"] or None, "--clip-grad", ours=1.0)


def _formats(draft: RecipeDraft) -> None:
    if not draft["--use-precision-aware-optimizer"]:
        return
    draft.used.add("--use-precision-aware-optimizer")
    for name, key in (
        ("--main-params-dtype", "master"),
        ("--exp-avg-dtype", "exp_avg"),
        ("--exp-avg-sq-dtype", "exp_avg_sq"),
    ):
        draft.put(f"optim.formats.{key}", draft[name], name, ours="fp32")


def _learning_rate(draft: RecipeDraft, schedule: BatchSchedule | None, steps: int | None) -> None:
    """The learning rate over the steps: warm-up, decay, and where they end."""
    key = "optim.schedule."
    style = draft["--lr-decay-style"]
    draft.put(f"{key}kind", _STYLES.get(style, style), "--lr-decay-style")
    decay = _length(draft, f"{key}decay_steps", ("--lr-decay-iters", "--lr-decay-samples"), schedule) or steps
    if draft.is_given("--lr-warmup-fraction"):
        _warmup_fraction(draft, decay)
    else:
        _length(draft, f"{key}warmup_steps", ("--lr-warmup-iters", "--lr-warmup-samples"), schedule)
    if draft["--lr-warmup-init"] and not draft.content["optim"]["schedule"].get("warmup_steps"):
        draft.note("--lr-warmup-init", "without a warm-up it is not read")
    else:
        draft.put(f"{key}init_lr", draft["--lr-warmup-init"], "--lr-warmup-init", ours=0.0)
    if style == "constant":
        _leave_out_decay(draft, key)
    else:
        draft.put(f"{key}min_lr", draft["--min-lr"], "--min-lr", ours=0.0)
    if style == "WSD":
        _length(draft, f"{key}wsd_decay_steps", ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"), schedule)
        draft.put(f"{key}wsd_decay", draft["--lr-wsd-decay-style"], "--lr-wsd-decay-style", ours="linear")


def _warmup_fraction(draft: RecipeDraft, decay: int | None) -> None:
    """A warm-up that is a share of the decay's steps; a recipe has whole ones."""
    name = "--lr-warmup-fraction"
    if not isfinite(draft[name]):
        draft.refuse(name, "a share of the decay is a finite number")
        return
    exact = draft[name] * (decay or 0)
    warmup = round(exact)
    remark = ""
    if decay:
        remark = f"of {decay:,} steps"
    # what two digits show
    if abs(exact - warmup) >= 0.005:
        remark += f", rounded from {exact:,.2f}"
    draft.put("optim.schedule.warmup_steps", warmup, name, remark=remark)


def _tell_lengths(draft: RecipeDraft, schedule: BatchSchedule | None, steps: int | None) -> None:
    """Megatron's learning rate follows samples, ours follows steps: not the same where the batch changes."""
    warms_up = any(draft[name] for name in ("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction"))
    is_constant = draft["--lr-decay-style"] == "constant" and not warms_up
    if schedule is None or steps is None or is_constant:
        return
    if draft.is_given("--train-iters"):
        unit = draft.unit
        if schedule.batches == (unit,):
            return
        decay = draft["--lr-decay-iters"] or steps
        # the first step behind decay · unit samples
        end = _steps(schedule, decay * unit)
        assert end is not None, schedule
        if schedule.consumed(end) < decay * unit:
            end += 1
        what = "with --step-batch-size-schedule lengths of the learning rate, given in steps, are taken times "
        what += f"--micro-batch-size and data-parallel ranks, {unit:,}, and counted in samples: a decay over {decay:,} "
        what += f"steps ends at step {end:,} there, at {decay:,} here; with --train-samples it would not"
        draft.change("--lr-decay-iters", what)
    elif len(schedule.batches) > 1:
        what = "the learning rate follows samples, here steps: its ends are the same, between them it differs "
        what += "while the batch grows"
        draft.change("--lr-decay-style", what)


def _leave_out_decay(draft: RecipeDraft, key: str) -> None:
    """A constant rate has no decay and no lowest value: Megatron takes the flags and reads neither."""
    draft.content["optim"]["schedule"].pop("decay_steps", None)
    draft.remarks.pop(f"{key}decay_steps", None)
    for name in ("--min-lr", "--lr-decay-iters", "--lr-decay-samples"):
        if draft.is_given(name):
            draft.note(name, "a constant rate stays: it is not read")


def _length(draft: RecipeDraft, key: str, names: tuple[str, str], schedule: BatchSchedule | None) -> int | None:
    """A length in steps, from a flag in steps or one in samples. None: neither was given."""
    in_steps, in_samples = names
    if draft.is_given(in_steps):
        draft.put(key, draft[in_steps], in_steps)
        return draft[in_steps]
    if draft.is_given(in_samples):
        length = _steps(schedule, draft[in_samples])
        draft.put(key, length, in_samples, remark=_of_samples(schedule, draft[in_samples]))
        return length
    return None


def _weight_decay(draft: RecipeDraft, steps: int | None) -> None:
    """The weight decay, and its ramp over the whole run where it has one."""
    style = draft["--weight-decay-incr-style"]
    start = draft["--start-weight-decay"]
    names = ["--weight-decay"]
    first = draft["--weight-decay"]
    if style != "constant" and start is not None:
        first = start
    if first == start:
        names.append("--start-weight-decay")
    draft.put("optim.weight_decay", first, *names)
    if style != "constant":
        ramp = "optim.weight_decay_ramp."
        draft.put(f"{ramp}kind", style, "--weight-decay-incr-style")
        draft.put(f"{ramp}end", draft["--end-weight-decay"], "--end-weight-decay")
        draft.put(f"{ramp}steps", steps, remark="the whole run")


def _precision(draft: RecipeDraft) -> None:
    """The number format of weights and products."""
    if draft["--fp8-format"] is not None and draft["--fp4-format"] is not None:
        draft.refuse("--fp4-format", "with --fp8-format; give one")
    if draft["--fp8-format"] is not None:
        return _fp8(draft)
    if draft["--fp4-format"] is not None:
        return _fp4(draft)
    if draft["--fp16"] and draft["--bf16"]:
        draft.refuse("--fp16", "with --bf16; give one")
    kind = "fp32"
    name = "--bf16"  # which says fp32 by being absent
    if draft["--bf16"]:
        kind = "bf16"
    if draft["--fp16"]:
        kind = "fp16"
        name = "--fp16"
    if kind != "bf16":
        draft.choices["precision"] = kind
    draft.put("precision.kind", kind, name)
    if kind == "fp16":
        _loss_scale(draft)
    return None


def _loss_scale(draft: RecipeDraft) -> None:
    """How the loss is scaled, so that small gradients don't become 0 in fp16."""
    for name, key in (
        ("--initial-loss-scale", "initial_scale"),
        ("--min-loss-scale", "min_scale"),
        ("--loss-scale-window", "growth_interval"),
        ("--hysteresis", "hysteresis"),
    ):
        value = draft[name]
        if key == "growth_interval":
            value = int(value)  # Megatron reads its number of steps as a float
        draft.put(f"precision.{key}", value, name)


def _fp8(draft: RecipeDraft) -> None:
    recipe = draft["--fp8-recipe"]
    remark = ""
    if recipe == "custom":
        draft.lose("--fp8-recipe", "what a quantizer factory makes can't be said")
        remark = f"in place of {recipe}, which is lost"
        recipe = "tensorwise"
    if not draft["--bf16"]:
        draft.lose("--fp8-format", "without --bf16; what is not fp8 is bf16 here")
    draft.put("precision.kind", "fp8", "--fp8-format", "--bf16")
    draft.put("precision.recipe", recipe, "--fp8-recipe", remark=remark)
    draft.put("precision.format", draft["--fp8-format"], "--fp8-format")
    _fp8_scales(draft, is_delayed=recipe == "delayed")
    _layers_in_bf16(draft)
    _fp8_gather(draft, recipe)


def _fp4(draft: RecipeDraft) -> None:
    remark = ""
    if draft["--fp4-recipe"] == "custom":
        draft.lose("--fp4-recipe", "what a quantizer factory makes can't be said")
        remark = "in place of custom, which is lost"
    if not draft["--bf16"]:
        draft.lose("--fp4-format", "without --bf16; what is not fp4 is bf16 here")
    draft.put("precision.kind", "fp8", "--fp4-format", "--bf16")
    draft.put("precision.recipe", "nvfp4", "--fp4-recipe", "--fp4-format", remark=remark)
    _layers_in_bf16(draft)


def _layers_in_bf16(draft: RecipeDraft) -> None:
    """Those at the ends, whose products take nothing narrower."""
    for name, key in (
        ("--num-layers-at-start-in-bf16", "first_layers_bf16"),
        ("--num-layers-at-end-in-bf16", "last_layers_bf16"),
    ):
        if draft["--first-last-layers-bf16"]:
            draft.put(f"precision.{key}", draft[name], name, "--first-last-layers-bf16")
        else:
            # without the switch Megatron has none
            draft.put(f"precision.{key}", 0, "--first-last-layers-bf16")


def _fp8_gather(draft: RecipeDraft, recipe: str) -> None:
    """In which bytes weights are sent, which here changes no number. Megatron's distributed optimizer (zero1) sends
    them in fp8, too."""
    name = "--fp8-param-gather"
    # with torch's FSDP2 Megatron itself turns it off: silent.py
    if not draft[name] or draft["--use-torch-fsdp2"]:
        return
    strategy = value_at(draft.content, "parallelism.dp_strategy") or "replicate"
    if strategy not in ("fsdp", "hsdp"):
        draft.note(name, f"with parallelism.dp_strategy={strategy} no weights are sent in fp8 here, with fsdp alone")
    elif recipe not in ("tensorwise", "delayed"):
        draft.note(name, f"weights of precision.recipe={recipe} are sent in bf16: a tensor has several scales")
    else:
        draft.put("precision.gather_fp8", True, name)


def _fp8_scales(draft: RecipeDraft, *, is_delayed: bool) -> None:
    """What delayed scales look back at."""
    length = draft["--fp8-amax-history-len"]
    margin = draft["--fp8-margin"]
    looks_at_one = draft["--fp8-amax-compute-algo"] == "most_recent"
    names = ("--fp8-amax-history-len", "--fp8-amax-compute-algo")
    if not is_delayed:
        for name in (*names, "--fp8-margin"):
            if draft.is_given(name):
                draft.note(name, "only delayed scales look back")
        return
    remark = ""
    if looks_at_one and length > 1:
        remark = f"the newest of {length} alone"
    elif length > 1:
        # Transformer Engine's history moves with each forward pass
        remark = "of steps; Megatron's are of micro batches"
    draft.put("precision.amax_history", 1 if looks_at_one else length, *names, remark=remark)
    draft.put("precision.margin", margin, "--fp8-margin", ours=0)
