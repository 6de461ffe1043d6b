"""Flags of the batch, the length, the optimizer, its schedules and number formats -> `train`, `optim`, `precision`."""

import re
from bisect import bisect_right
from itertools import pairwise
from math import isfinite

from megaspec.megatron.draft import Draft
from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.spec import BatchRamp, TrainSpec

_SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STYLES = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
_MAX_SAMPLES = 10**15


def translate_training(draft: Draft) -> None:
    """Everything that says how long is trained, on how much at a time, and with which updates."""
    draft.put("train.micro_batch", draft["--micro-batch-size"], "--micro-batch-size")
    batch, ramp = _batch(draft)
    names = ("--global-batch-size", "--decrease-batch-size-if-needed", "--step-batch-size-schedule")
    draft.put("train.global_batch", batch, *names)
    if ramp is not None:
        draft.put("train.batch_ramp", ramp, "--step-batch-size-schedule")
    schedule = _schedule(batch, ramp)
    steps = draft["--train-iters"]
    if steps is None and draft.is_given("--train-samples"):
        steps = _steps(schedule, draft["--train-samples"])
    remark = _of_samples(schedule, draft["--train-samples"]) if draft.is_given("--train-samples") else ""
    draft.put("train.steps", steps, "--train-iters", "--train-samples", remark=remark)
    draft.put("train.seed", draft["--seed"], "--seed", ours=1234)
    draft.put("train.deterministic", draft["--deterministic-mode"], "--deterministic-mode", ours=False)
    _optimizer(draft)
    _learning_rate(draft, schedule, steps)
    _weight_decay(draft, steps)
    _precision(draft)


def _batch(draft: Draft) -> tuple[int | None, dict[str, int] | None]:
    """The global batch, and the ramp to it."""
    if draft.is_given("--step-batch-size-schedule"):
        return _from_schedule(draft)
    batch, micro = draft["--global-batch-size"], draft["--micro-batch-size"]
    if micro is None or micro < 1:
        return batch, None
    unit = micro * draft.dp
    if batch is None:
        draft.change("--global-batch-size", f"not given: becomes --micro-batch-size times data-parallel ranks, {unit}")
        return unit, None
    if draft["--decrease-batch-size-if-needed"] and batch % unit and batch > unit:
        draft.change("--decrease-batch-size-if-needed", f"{batch} becomes {batch // unit * unit}, a multiple of {unit}")
        return batch // unit * unit, None
    return batch, None


def _from_schedule(draft: Draft) -> tuple[int | None, dict[str, int] | None]:
    """`0:768 250B:1536`: thresholds in samples, or in tokens where they have a suffix."""
    name, parts = "--step-batch-size-schedule", []
    for word in draft["--step-batch-size-schedule"].replace(",", " ").split():
        match = re.fullmatch(r"(\d{1,15})([KMBT]?):(\d{1,9})", word.strip("'\""))
        if match is None:
            draft.refuse(name, f"{word}: must be THRESHOLD:BATCH, such as 0:768 or 250B:1536")
            return None, None
        number, suffix, batch = match.groups()
        samples = int(number) * _SCALE[suffix] // ((draft.seq_len or 1) if suffix else 1)
        parts.append((samples, int(batch)))
    batches = [b for _, b in parts]
    if len(parts) < 2:
        return (batches[0] if batches else None), None
    starts, lengths = [s for s, _ in parts], {b[0] - a[0] for a, b in pairwise(parts)}
    increments = {b - a for a, b in pairwise(batches)}
    if starts[0] or len(lengths) > 1 or len(increments) > 1 or min(increments) < 1 or min(lengths) < 1:
        draft.lose(name, "train.batch_ramp grows in equal increments over equal numbers of samples")
        return batches[-1], None
    return batches[-1], {"start": batches[0], "increment": increments.pop(), "samples": starts[-1]}


def _schedule(batch: int | None, ramp: dict[str, int] | None) -> BatchSchedule | None:
    if batch is None or batch < 1:
        return None
    made = None if ramp is None else BatchRamp(**ramp)
    return BatchSchedule(TrainSpec(steps=1, global_batch=batch, batch_ramp=made))


def _steps(schedule: BatchSchedule | None, samples: int) -> int | None:
    """Whole steps that a number of samples makes."""
    if schedule is None:
        return None
    most = min(max(samples, 0), _MAX_SAMPLES)
    return bisect_right(range(most + 1), most, key=schedule.consumed) - 1


def _of_samples(schedule: BatchSchedule | None, samples: int) -> str:
    """What is said beside a number of steps that is from one of samples: steps are whole."""
    steps = _steps(schedule, samples)
    more = samples - schedule.consumed(steps) if schedule is not None and steps is not None else 0
    if more <= 0:
        return f"{samples:,} samples"
    hundredths = 100 * more // schedule.batch(steps)
    return f"{samples:,} samples: {steps:,}.{hundredths:02} steps, rounded down"


def _optimizer(draft: Draft) -> None:
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


def _formats(draft: Draft) -> None:
    if not draft["--use-precision-aware-optimizer"]:
        return
    draft.used.add("--use-precision-aware-optimizer")
    for name, key in (
        ("--main-params-dtype", "master"),
        ("--exp-avg-dtype", "exp_avg"),
        ("--exp-avg-sq-dtype", "exp_avg_sq"),
    ):
        draft.put(f"optim.formats.{key}", draft[name], name, ours="fp32")


def _learning_rate(draft: Draft, schedule: BatchSchedule | None, steps: int | None) -> None:
    key, style = "optim.schedule.", draft["--lr-decay-style"]
    draft.put(f"{key}kind", _STYLES.get(style, style), "--lr-decay-style")
    decay = _length(draft, f"{key}decay_steps", ("--lr-decay-iters", "--lr-decay-samples"), schedule) or steps
    if draft.is_given("--lr-warmup-fraction") and not isfinite(draft["--lr-warmup-fraction"]):
        draft.refuse("--lr-warmup-fraction", "a share of the decay is a finite number")
    elif draft.is_given("--lr-warmup-fraction"):
        exact = draft["--lr-warmup-fraction"] * (decay or 0)
        warmup = round(exact)
        remark = f"of {decay:,} steps" if decay else ""
        remark += f", rounded from {exact:,.2f}" if abs(exact - warmup) >= 0.005 else ""
        draft.put(f"{key}warmup_steps", warmup, "--lr-warmup-fraction", remark=remark)
    else:
        _length(draft, f"{key}warmup_steps", ("--lr-warmup-iters", "--lr-warmup-samples"), schedule)
    draft.put(f"{key}init_lr", draft["--lr-warmup-init"], "--lr-warmup-init", ours=0.0)
    if style == "constant":
        _leave_out_decay(draft, key)
    else:
        draft.put(f"{key}min_lr", draft["--min-lr"], "--min-lr", ours=0.0)
    if style == "WSD":
        _length(draft, f"{key}wsd_decay_steps", ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"), schedule)
        draft.put(f"{key}wsd_decay", draft["--lr-wsd-decay-style"], "--lr-wsd-decay-style", ours="linear")


def _leave_out_decay(draft: Draft, key: str) -> None:
    """A constant rate has no decay and no lowest value: Megatron takes the flags and reads neither."""
    draft.content["optim"]["schedule"].pop("decay_steps", None)
    draft.remarks.pop(f"{key}decay_steps", None)
    for name in ("--min-lr", "--lr-decay-iters", "--lr-decay-samples"):
        if draft.is_given(name):
            draft.note(name, "a constant rate stays: it is not read")


def _length(draft: Draft, key: str, names: tuple[str, str], schedule: BatchSchedule | None) -> int | None:
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


def _weight_decay(draft: Draft, steps: int | None) -> None:
    start, kind = draft["--start-weight-decay"], draft["--weight-decay-incr-style"]
    first = draft["--weight-decay"] if start is None or kind == "constant" else start
    draft.put("optim.weight_decay", first, "--weight-decay", *(["--start-weight-decay"] if first == start else []))
    if kind != "constant":
        ramp = "optim.weight_decay_ramp."
        draft.put(f"{ramp}kind", kind, "--weight-decay-incr-style")
        draft.put(f"{ramp}end", draft["--end-weight-decay"], "--end-weight-decay")
        draft.put(f"{ramp}steps", steps, remark="the whole run")


def _precision(draft: Draft) -> None:
    if draft["--fp8-format"] is not None:
        return _fp8(draft)
    if draft["--fp16"] and draft["--bf16"]:
        draft.refuse("--fp16", "with --bf16; give one")
    kind = "fp16" if draft["--fp16"] else "bf16" if draft["--bf16"] else "fp32"
    if kind != "bf16":
        draft.choices["precision"] = kind
    draft.put("precision.kind", kind, f"--{kind}" if kind != "fp32" else "--bf16")
    if kind == "fp16":
        for name, key in (
            ("--initial-loss-scale", "initial_scale"),
            ("--min-loss-scale", "min_scale"),
            ("--loss-scale-window", "growth_interval"),
            ("--hysteresis", "hysteresis"),
        ):
            value = draft[name]
            draft.put(f"precision.{key}", int(value) if key == "growth_interval" else value, name)
    return None


def _fp8(draft: Draft) -> None:
    recipe = draft["--fp8-recipe"]
    if recipe in ("delayed", "custom"):
        draft.lose("--fp8-recipe", "precision.recipe is tensorwise, blockwise or mxfp8")
        recipe = "tensorwise"
    if not draft["--bf16"]:
        draft.lose("--fp8-format", "without --bf16; what is not fp8 is bf16 here")
    draft.put("precision.kind", "fp8", "--fp8-format", "--bf16")
    draft.put("precision.recipe", recipe, "--fp8-recipe")
    draft.put("precision.format", draft["--fp8-format"], "--fp8-format")
    if draft["--first-last-layers-bf16"]:
        for name, key in (
            ("--num-layers-at-start-in-bf16", "first_layers_bf16"),
            ("--num-layers-at-end-in-bf16", "last_layers_bf16"),
        ):
            draft.put(f"precision.{key}", draft[name], name, "--first-last-layers-bf16")
    if draft["--fp8-param-gather"] and not draft["--use-torch-fsdp2"]:
        draft.put("precision.gather_fp8", True, "--fp8-param-gather")
