"""Rules about batches, evaluation and data."""

from math import isinf, lcm

from megaspec.core.divisors import divisors, multiples
from megaspec.core.errors import Problem
from megaspec.data.spec import IndexedSpec
from megaspec.rules.case import LONGEST_RAMP, Case
from megaspec.rules.ways import Way, way_out
from megaspec.train.batch_schedule import BatchSchedule


def global_batch_divides(case: Case) -> Problem | None:
    """The global batch is whole micro batches on every data-parallel rank."""
    train, unit = case.recipe.train, case.recipe.train.micro_batch * case.dp
    if train.global_batch % (train.micro_batch if case.dp_is_open else unit) == 0:
        return None
    text = f"train.global_batch={train.global_batch} must be a multiple of train.micro_batch={train.micro_batch}"
    text += f" · dp={case.dp} = {unit}"
    shares = divisors(train.global_batch // case.dp) if train.global_batch % case.dp == 0 else []
    way = way_out(
        case,
        Way("train.global_batch", multiples(train.global_batch, unit), train.global_batch, most=2),
        Way("train.micro_batch", shares, train.micro_batch, most=3),
    )
    return Problem("train.global_batch", f"{text}; {way}")


def ramp_starts_below_the_batch(case: Case) -> Problem | None:
    """A ramp grows: it starts below the global batch."""
    ramp, full = case.recipe.train.batch_ramp, case.recipe.train.global_batch
    if ramp is None or ramp.start < full:
        return None
    text = f"train.batch_ramp.start={ramp.start} must be below train.global_batch={full}"
    return Problem("train.batch_ramp.start", f"{text}; lower it or drop the ramp")


def ramp_reaches_the_batch(case: Case) -> Problem | None:
    """Whole increments, at most 10,000, lead from the start of a ramp to the global batch."""
    ramp, full = case.recipe.train.batch_ramp, case.recipe.train.global_batch
    if ramp is None or ramp.start >= full:
        return None
    rest = full - ramp.start
    if rest // ramp.increment > LONGEST_RAMP:
        text = f"train.batch_ramp.increment={ramp.increment} leads from {ramp.start} to train.global_batch={full} in"
        text += f" {rest // ramp.increment} increments, {LONGEST_RAMP} at most are possible"
        return Problem("train.batch_ramp.increment", f"{text}; {_other_ramp(case)}")
    if rest % ramp.increment == 0:
        return None
    text = f"train.batch_ramp.increment={ramp.increment} must divide train.global_batch - train.batch_ramp.start"
    return Problem("train.batch_ramp.increment", f"{text} = {rest}; {_other_ramp(case)}")


def _other_ramp(case: Case) -> str:
    train, ramp = case.recipe.train, case.recipe.train.batch_ramp
    rest, unit = train.global_batch - ramp.start, train.micro_batch * case.dp
    legal = [n for n in divisors(rest) if rest // n <= LONGEST_RAMP]
    whole = [n for n in legal if n % unit == 0] or legal
    return way_out(
        case,
        Way("train.batch_ramp.increment", whole, ramp.increment),
        Way("train.batch_ramp.start", _other_starts(case), ramp.start, most=3),
        Way(
            "train.global_batch", [ramp.start + m for m in multiples(rest, ramp.increment)], train.global_batch, most=2
        ),
    )


def _other_starts(case: Case) -> list[int]:
    """First batches from which whole increments lead to the global batch, those near the one that is set."""
    train, ramp = case.recipe.train, case.recipe.train.batch_ramp
    step = lcm(train.micro_batch * case.dp, ramp.increment)
    first = (train.global_batch - ramp.start) // step
    starts = [train.global_batch - n * step for n in range(max(1, first - 6), first + 7)]
    return [start for start in starts if start > 0]


def ramp_stages_divide(case: Case) -> Problem | None:
    """Every batch of a ramp is whole micro batches on every data-parallel rank."""
    train, ramp = case.recipe.train, case.recipe.train.batch_ramp
    unit = train.micro_batch * case.dp
    if case.dp_is_open or ramp is None or (ramp.start % unit == 0 and ramp.increment % unit == 0):
        return None
    key, value = ("start", ramp.start) if ramp.start % unit else ("increment", ramp.increment)
    text = f"train.batch_ramp.{key}={value} must be a multiple of train.micro_batch={train.micro_batch}"
    text += f" · dp={case.dp} = {unit}"
    rest = train.global_batch - ramp.start
    legal = _other_starts(case) if key == "start" else [n for n in divisors(max(1, rest)) if n % unit == 0]
    share = train.global_batch // case.dp if train.global_batch % case.dp == 0 else 1
    way = way_out(
        case,
        Way(f"train.batch_ramp.{key}", legal or multiples(value, unit), value, most=2),
        Way("train.micro_batch", divisors(share), train.micro_batch, most=3),
    )
    return Problem(f"train.batch_ramp.{key}", f"{text}; {way}")


def blend_weights_make_shares(case: Case) -> Problem | None:
    """All data sets of a blend have a weight, or none has; each weight is a share of their sum."""
    data = case.recipe.data
    if not isinstance(data, IndexedSpec) or len(data.blend) == 1:
        return None
    missing = [number for number, part in enumerate(data.blend) if part.weight is None]
    if len(missing) == len(data.blend):
        return None
    if missing:
        text = f"data.blend: {data.blend[missing[0]].prefix} has no weight, other data sets have one"
        return Problem("data.blend", f"{text}; set a weight for each, or drop all of them")
    total = sum(part.weight for part in data.blend)
    for part in data.blend:
        if isinf(total) or part.weight / total == 0:
            text = f"data.blend: the weight {part.weight} of {part.prefix} is no share of the weights' sum {total}"
            return Problem("data.blend", f"{text}; set weights nearer to 1")
    return None


def blend_without_weights_is_one_pass(case: Case) -> Problem | None:
    """A blend without weights takes each sequence once at most."""
    data, train, there = case.recipe.data, case.recipe.train, case.facts.train_samples
    if not isinstance(data, IndexedSpec) or len(data.blend) == 1 or there is None:
        return None
    if any(part.weight is not None for part in data.blend):
        return None
    needed = BatchSchedule(train).consumed(train.steps)
    if needed <= there:
        return None
    text = f"train.steps={train.steps} takes {needed} sequences, data.blend without weights is one pass of {there}"
    return Problem("train.steps", f"{text}; give each data set a weight, or train fewer steps")


def split_holds_training_data(case: Case) -> Problem | None:
    """Some documents are for training."""
    data = case.recipe.data
    if not isinstance(data, IndexedSpec) or data.split[0] > 0:
        return None
    text = f"data.split={list(data.split)} must give training a share above 0; try [969, 30, 1]"
    return Problem("data.split", text)


def evaluation_has_data(case: Case) -> Problem | None:
    """Evaluation needs documents that are not for training."""
    data, every = case.recipe.data, case.recipe.train.eval_every
    if not every or not isinstance(data, IndexedSpec) or data.split[1] > 0:
        return None
    text = f"train.eval_every={every} needs validation data, data.split={list(data.split)} leaves none"
    return Problem("train.eval_every", f"{text}; set train.eval_every=0 or data.split=[969,30,1]")


def training_split_fills_a_sequence(case: Case) -> Problem | None:
    """One pass over the training data gives a sequence at least."""
    return _enough(case, "training", case.facts.train_tokens)


def validation_split_fills_a_sequence(case: Case) -> Problem | None:
    """One pass over the validation data gives a sequence at least."""
    data, every = case.recipe.data, case.recipe.train.eval_every
    if not every or (isinstance(data, IndexedSpec) and data.split[1] == 0):
        return None
    return _enough(case, "validation", case.facts.valid_tokens)


def _enough(case: Case, split: str, tokens: int | None) -> Problem | None:
    seq_len = case.recipe.data.seq_len
    if tokens is None or tokens > seq_len:
        return None
    text = f"data.seq_len={seq_len} needs {seq_len + 1} tokens for {split}, the data has {tokens}"
    return Problem("data.seq_len", f"{text}; shorten it, change data.split or prepare more data")


def sampling_has_a_tokenizer(case: Case) -> Problem | None:
    """A text can be written only with the tokenizer of prepared data."""
    if case.recipe.train.sample is None or isinstance(case.recipe.data, IndexedSpec):
        return None
    text = f"train.sample needs a tokenizer, data.kind={case.recipe.data.kind} has none; set train.sample=null"
    return Problem("train.sample", text)
