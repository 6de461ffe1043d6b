"""Rules about batches, evaluation and data."""

from math import isinf, lcm
from pathlib import PurePath

from megaspec.core.divisors import divisors, multiples
from megaspec.core.errors import Problem
from megaspec.core.frozen import AUTO
from megaspec.core.problems import show
from megaspec.core.units import counted
from megaspec.data.spec import DataSpec, IndexedSpec, RandomSpec, StreamSpec, shares_documents
from megaspec.data.urls import all_url_places
from megaspec.rules.case import Case, sequence_unit
from megaspec.rules.ways import Way, way_out
from megaspec.train.batch_schedule import LONGEST_RAMP, BatchSchedule, ramp_is_too_long


def global_batch_divides(case: Case) -> Problem | None:
    """The global batch is whole micro batches on every data-parallel rank."""
    train = case.recipe.train
    # sequences of one micro batch on every data-parallel rank
    unit = train.micro_batch * case.dp
    divisor = unit
    if case.dp_is_open:
        divisor = train.micro_batch
    if train.global_batch % divisor == 0:
        return None
    text = f"train.global_batch={train.global_batch} must be a multiple of train.micro_batch={train.micro_batch}"
    text += f" · dp={case.dp} = {unit}"
    micro_batches: list[int] = []
    if train.global_batch % case.dp == 0:
        micro_batches = divisors(train.global_batch // case.dp)
    way = way_out(
        case,
        Way("train.global_batch", multiples(train.global_batch, unit), train.global_batch, most=2),
        Way("train.micro_batch", micro_batches, train.micro_batch, most=3),
    )
    return Problem("train.global_batch", f"{text}; {way}")


def ramp_starts_below_the_batch(case: Case) -> Problem | None:
    """A ramp grows: it starts below the global batch."""
    ramp = case.recipe.train.batch_ramp
    full = case.recipe.train.global_batch
    if ramp is None or ramp.start < full:
        return None
    text = f"train.batch_ramp.start={ramp.start} must be below train.global_batch={full}"
    return Problem("train.batch_ramp.start", f"{text}; lower it or drop the ramp")


def ramp_reaches_the_batch(case: Case) -> Problem | None:
    """Whole increments, at most 10,000, lead from the start of a ramp to the global batch."""
    ramp = case.recipe.train.batch_ramp
    full = case.recipe.train.global_batch
    if ramp is None or ramp.start >= full:
        return None
    rest = full - ramp.start
    if ramp_is_too_long(case.recipe.train):
        text = f"train.batch_ramp.increment={ramp.increment} leads from {ramp.start} to train.global_batch={full} in"
        text += f" {rest // ramp.increment} increments, {LONGEST_RAMP} at most are possible"
        return Problem("train.batch_ramp.increment", f"{text}; {_other_ramp(case)}")
    if rest % ramp.increment == 0:
        return None
    text = f"train.batch_ramp.increment={ramp.increment} must divide train.global_batch - train.batch_ramp.start"
    return Problem("train.batch_ramp.increment", f"{text} = {rest}; {_other_ramp(case)}")


def _other_ramp(case: Case) -> str:
    """Ways to whole increments, each of whole micro batches on every data-parallel rank where there is such a one."""
    train = case.recipe.train
    ramp = train.batch_ramp
    rest = train.global_batch - ramp.start
    unit = train.micro_batch * case.dp
    increments = [n for n in divisors(rest) if rest // n <= LONGEST_RAMP]
    divisible = [n for n in increments if n % unit == 0]
    batches = [ramp.start + grown for grown in multiples(rest, ramp.increment)]
    return way_out(
        case,
        Way("train.batch_ramp.increment", divisible or increments, ramp.increment),
        Way("train.batch_ramp.start", _other_starts(case), ramp.start, most=3),
        Way("train.global_batch", batches, train.global_batch, most=2),
    )


def _other_starts(case: Case) -> list[int]:
    """First batches from which whole increments lead to the global batch, those near the one that is set."""
    train = case.recipe.train
    ramp = train.batch_ramp
    # a start that lies whole steps below the global batch is divided by the ranks as that is
    step = lcm(train.micro_batch * case.dp, ramp.increment)
    n_steps = (train.global_batch - ramp.start) // step
    starts = []
    for n in range(max(1, n_steps - 6), n_steps + 7):
        start = train.global_batch - n * step
        if start > 0:
            starts.append(start)
    return starts


def ramp_stages_divide(case: Case) -> Problem | None:
    """Every batch of a ramp is whole micro batches on every data-parallel rank."""
    train = case.recipe.train
    ramp = train.batch_ramp
    unit = train.micro_batch * case.dp
    if case.dp_is_open or ramp is None or (ramp.start % unit == 0 and ramp.increment % unit == 0):
        return None
    rest = train.global_batch - ramp.start
    if ramp.start % unit:
        key = "train.batch_ramp.start"
        value = ramp.start
        others = _other_starts(case)
    else:
        key = "train.batch_ramp.increment"
        value = ramp.increment
        others = [n for n in divisors(max(1, rest)) if n % unit == 0]
    text = f"{key}={value} must be a multiple of train.micro_batch={train.micro_batch}"
    text += f" · dp={case.dp} = {unit}"
    # sequences of a rank; where the global batch is no multiple of dp, only micro batches of one may do
    per_rank = 1
    if train.global_batch % case.dp == 0:
        per_rank = train.global_batch // case.dp
    way = way_out(
        case,
        Way(key, others or multiples(value, unit), value, most=2),
        Way("train.micro_batch", divisors(per_rank), train.micro_batch, most=3),
    )
    return Problem(key, f"{text}; {way}")


def blend_weights_make_shares(case: Case) -> Problem | None:
    """All data sets of a blend have a weight, or none has; each weight is a share of their sum."""
    problem = _uneven_weights("data", case.recipe.data)
    for name, one in case.recipe.data.valid.items():
        problem = problem or _uneven_weights(f"data.valid.{name}", one)
    return problem


def _uneven_weights(key: str, data: DataSpec) -> Problem | None:
    if not isinstance(data, IndexedSpec) or len(data.blend) == 1:
        return None
    key = f"{key}.blend"
    missing = [number for number, part in enumerate(data.blend) if part.weight is None]
    if len(missing) == len(data.blend):
        return None
    if missing:
        text = f"{key}: {data.blend[missing[0]].prefix} has no weight, other data sets have one"
        return Problem(key, f"{text}; set a weight for each, or drop all of them")
    total = sum(part.weight for part in data.blend)
    for part in data.blend:
        if isinf(total) or part.weight / total == 0:
            text = f"{key}: the weight {part.weight} of {part.prefix} is no share of the weights' sum {total}"
            return Problem(key, f"{text}; set weights nearer to 1")
    return None


def blend_without_weights_is_one_pass(case: Case) -> Problem | None:
    """A blend without weights takes each sequence once at most."""
    data = case.recipe.data
    train = case.recipe.train
    available = case.facts.train_samples
    if not isinstance(data, IndexedSpec) or len(data.blend) == 1 or available is None:
        return None
    if any(part.weight is not None for part in data.blend) or ramp_is_too_long(train):
        return None
    needed = BatchSchedule(train).consumed(train.steps)
    if needed <= available:
        return None
    text = f"train.steps={train.steps} takes {needed} sequences, data.blend without weights is one pass of {available}"
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
    data = case.recipe.data
    every = case.recipe.train.eval_every
    if not every or data.valid:
        return None
    if isinstance(data, StreamSpec):
        text = f"train.eval_every={every} needs validation data, data.kind=stream trains on all of its files"
        return Problem("train.eval_every", f"{text}; set train.eval_every=0, or data.valid.NAME=PREFIX")
    if not isinstance(data, IndexedSpec) or data.split[1] > 0:
        return None
    text = f"train.eval_every={every} needs validation data, data.split={list(data.split)} leaves none"
    return Problem(
        "train.eval_every", f"{text}; set train.eval_every=0, data.split=[969,30,1] or data.valid.NAME=PREFIX"
    )


def training_split_fills_a_sequence(case: Case) -> Problem | None:
    """One pass over the training data gives a sequence at least."""
    return _enough(case, "training", case.facts.train_tokens)


def validation_split_fills_a_sequence(case: Case) -> Problem | None:
    """One pass over the validation data gives a sequence at least."""
    data = case.recipe.data
    every = case.recipe.train.eval_every
    if not every or data.valid or (isinstance(data, IndexedSpec) and data.split[1] == 0):
        return None
    return _enough(case, "validation", case.facts.valid_tokens)


def _enough(case: Case, split: str, tokens: int | None) -> Problem | None:
    seq_len = case.recipe.data.seq_len
    if tokens is None or tokens > seq_len:
        return None
    text = f"data.seq_len={seq_len} needs {seq_len + 1} tokens for {split}, the data has {tokens}"
    return Problem("data.seq_len", f"{text}; shorten it, change data.split or prepare more data")


def evaluation_sets_fill_a_sequence(case: Case) -> Problem | None:
    """One pass over each evaluation set gives a sequence at least."""
    for name, one in case.recipe.data.valid.items():
        facts = case.facts.valid_sets.get(name)
        if facts is None or facts.samples is None or facts.samples > 0:
            continue
        key = f"data.valid.{name}"
        text = f"{key}: no data set of it has the {one.seq_len + 1} tokens that a sequence of {one.seq_len} needs"
        if isinstance(one, IndexedSpec):
            text += f" in the second share of {key}.split={list(one.split)}"
        return Problem(key, f"{text}; prepare more data, or drop it: ~{key}")
    return None


def evaluation_sets_fit_the_vocabulary(case: Case) -> Problem | None:
    """The model has an id for each token of its evaluation sets."""
    vocab_size = case.recipe.model.vocab_size
    for name in case.recipe.data.valid:
        facts = case.facts.valid_sets.get(name)
        if facts is not None and facts.vocab_size is not None and facts.vocab_size > vocab_size:
            key = f"data.valid.{name}"
            text = f"{key} has a vocabulary of {facts.vocab_size}, model.vocab_size={vocab_size} must be at least that"
            way = f"set model.vocab_size={facts.vocab_size}, or drop it: ~{key}"
            return Problem(key, f"{text}; {way}")
    return None


def evaluation_lengths_fit(case: Case) -> Problem | None:
    """The sequences of an evaluation set are as long as the model allows, and divide among ranks as all do."""
    longest = case.recipe.model.max_seq_len
    unit = sequence_unit(case)
    training = case.recipe.data.seq_len
    for name, one in case.recipe.data.valid.items():
        if one.seq_len == training:
            continue  # told of the training data
        key = f"data.valid.{name}.seq_len"
        text = ""
        if one.seq_len > longest:
            text = f"{key}={one.seq_len} must be at most model.max_seq_len={longest}"
        elif one.seq_len % unit:
            text = f"{key}={one.seq_len} must be a multiple of {unit}, since ranks divide sequences"
        if text:
            return Problem(key, f"{text}; drop it, and data.seq_len={training} holds")
    return None


def evaluation_masks_as_training(case: Case) -> Problem | None:
    """A sequence of an evaluation set keeps documents apart as one of the training data does."""
    mask = case.recipe.data.document_mask
    for name, one in case.recipe.data.valid.items():
        if one.document_mask != mask:
            key = f"data.valid.{name}.document_mask"
            text = (
                f"{key}={show(one.document_mask)} must be data.document_mask={show(mask)}: a model is evaluated as it"
            )
            return Problem(key, f"{text} is trained; drop it")
    return None


def lengths_of_documents_need_a_mask(case: Case) -> Problem | None:
    """How long documents are is said where a mask keeps them apart, and of what is trained on."""
    training = case.recipe.data
    if not training.document_mask:
        for key, value in _said_of_documents("data", training).items():
            text = f"{key}={value} needs data.document_mask=true, without which nothing asks where documents end"
            return Problem(key, f"{text}; set data.document_mask=true, or drop {key}")
    for name, one in case.recipe.data.valid.items():
        prefix = f"data.valid.{name}"
        said = _said_of_documents(prefix, one)
        key = f"{prefix}.document_lengths"
        if key in said and one.document_lengths != training.document_lengths:
            text = f"{key}={said[key]} is read by nothing: plans weigh what is trained on"
            return Problem(key, f"{text}; drop it: ~{key}")
        key = f"{prefix}.document_length"
        if key in said and not one.document_mask:
            text = f"{key}={said[key]} needs data.document_mask=true, without which nothing asks where documents end"
            return Problem(key, f"{text}; set data.document_mask=true, or drop it: ~{key}")
    return None


def _said_of_documents(prefix: str, data: DataSpec) -> dict[str, str]:
    """Path -> value of what is set of a source about how long documents are."""
    said = {}
    if isinstance(data, RandomSpec) and data.document_length is not None:
        said[f"{prefix}.document_length"] = show(data.document_length)
    lengths = data.document_lengths
    if lengths is not None and lengths != AUTO:
        said[f"{prefix}.document_lengths"] = f"[{counted(len(lengths), 'bin')}]"
    return said


def no_secret_in_data_urls(case: Case) -> Problem | None:
    """URLs of data hold no user and no password: recipes and run folders are read by others."""
    for place in all_url_places(case.recipe.data):
        if place.wrong:
            return Problem(place.key, place.wrong)
    return None


def evaluation_sets_are_not_trained_on(case: Case) -> Problem | None:
    """No document is in an evaluation set and in the training data."""
    data = case.recipe.data
    if not isinstance(data, IndexedSpec):
        return None
    trained = {PurePath(part.prefix) for part in data.blend}
    for name, one in data.valid.items():
        if not isinstance(one, IndexedSpec) or not shares_documents(data, one):
            continue
        for number, part in enumerate(one.blend):
            if PurePath(part.prefix) in trained:
                key = f"data.valid.{name}.blend.{number}.prefix"
                text = f"{key}={part.prefix} is training data, too: the model would be evaluated on what it has seen"
                share = f"data.valid.{name}.split={list(data.split)}".replace(" ", "")
                way = "take other data"
                if data.split[1]:
                    way += f", or the share that training leaves: {share}"
                return Problem(key, f"{text}; {way}")
    return None


def sampling_has_a_tokenizer(case: Case) -> Problem | None:
    """A text can be written only with the tokenizer of data that is made from text."""
    if case.recipe.train.sample is None or isinstance(case.recipe.data, IndexedSpec | StreamSpec):
        return None
    text = f"train.sample needs a tokenizer, data.kind={case.recipe.data.kind} has none; set train.sample=null"
    return Problem("train.sample", text)


def sampling_draws(case: Case) -> Problem | None:
    """What a token is drawn from says nothing where none is drawn."""
    sample = case.recipe.train.sample
    if sample is None or sample.temperature > 0:
        return None
    for name in ("top_k", "top_p", "min_p"):
        value = getattr(sample, name)
        if value is not None:
            key = f"train.sample.{name}"
            text = f"{key}={show(value)} says what to draw from, train.sample.temperature=0 takes the likeliest token"
            return Problem(key, f"{text}; set {key}=null, or a temperature above 0")
    return None
