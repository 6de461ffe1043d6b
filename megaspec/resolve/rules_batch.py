"""Rules about batches, evaluation and data."""

from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.data.spec import IndexedSpec
from megaspec.resolve.case import LONGEST_RAMP, Case, divisors, multiples, nearest


def global_batch_divides(case: Case) -> Problem | None:
    """The global batch is whole micro batches on every data-parallel rank."""
    train, unit = case.recipe.train, case.recipe.train.micro_batch * case.dp
    if train.global_batch % (train.micro_batch if case.dp_is_open else unit) == 0:
        return None
    text = f"train.global_batch={train.global_batch} must be a multiple of train.micro_batch={train.micro_batch}"
    text += f" · dp={case.dp} = {unit}; try {one_of(multiples(train.global_batch, unit))}"
    if train.global_batch % case.dp == 0:
        legal = nearest(train.micro_batch, divisors(train.global_batch // case.dp), most=3)
        text += f", or train.micro_batch={one_of(legal)}"
    return Problem("train.global_batch", text)


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
        return Problem("train.batch_ramp.increment", f"{text}; try {rest // 100 or rest}")
    if rest % ramp.increment == 0:
        return None
    text = f"train.batch_ramp.increment={ramp.increment} must divide train.global_batch - train.batch_ramp.start"
    text += f" = {rest}; try {one_of(nearest(ramp.increment, divisors(rest)))}"
    return Problem("train.batch_ramp.increment", text)


def ramp_stages_divide(case: Case) -> Problem | None:
    """Every batch of a ramp is whole micro batches on every data-parallel rank."""
    train, ramp = case.recipe.train, case.recipe.train.batch_ramp
    unit = train.micro_batch * case.dp
    if case.dp_is_open or ramp is None or (ramp.start % unit == 0 and ramp.increment % unit == 0):
        return None
    key, value = ("start", ramp.start) if ramp.start % unit else ("increment", ramp.increment)
    text = f"train.batch_ramp.{key}={value} must be a multiple of train.micro_batch={train.micro_batch}"
    text += f" · dp={case.dp} = {unit}; try {one_of(multiples(value, unit))}"
    return Problem(f"train.batch_ramp.{key}", text)


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
