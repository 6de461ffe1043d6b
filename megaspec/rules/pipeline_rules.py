"""Rules about pipeline stages and the order of passes through them."""

from typing import Literal

from megaspec.core.divisors import divisors, multiples
from megaspec.core.errors import Problem
from megaspec.core.problems import show
from megaspec.parallelism.stages import even_ways, layout_text, stage_problem
from megaspec.rules.case import Case
from megaspec.rules.ways import Way, way_out

_KEY = "parallelism.pipeline"
_UNEVEN = ("first_layers", "last_layers")
_COUNTED = ("count_embedding", "count_loss")


def layers_divide_into_stages(case: Case) -> Problem | None:
    """Every pipeline stage, and every chunk of it, has the same number of layers, unless the recipe says otherwise."""
    if _division(case) != "even":
        return None
    found = _stage_problem(case)
    if found is None or "; " in found.message:
        return found
    even = even_ways(case.recipe.model.n_layers, case.recipe.parallelism)
    ways = [Way(key, values, near) for key, values, near in even]
    text = f"{found.message}; {way_out(case, *ways, key=found.key)}"
    if found.key == "parallelism.pp":
        text += f", or say the stages' layers with {_KEY}.first_layers, last_layers or layout"
    return Problem(found.key, text)


def uneven_stages_hold_all_layers(case: Case) -> Problem | None:
    """With first_layers or last_layers, the stages between them share the remaining layers evenly."""
    if _division(case) != "uneven":
        return None
    return _stage_problem(case)


def layout_holds_all_layers(case: Case) -> Problem | None:
    """A layout has one E at its start, one L at its end, a t for each layer, and stages for every rank."""
    if _division(case) != "layout":
        return None
    found = _stage_problem(case)
    if found is None or "; try " in found.message:
        return found
    n_stages = case.pp * case.recipe.parallelism.pipeline.virtual_stages
    return Problem(found.key, f"{found.message}; try {_even_layout(case.recipe.model.n_layers, n_stages)}")


def _even_layout(n_layers: int, n_stages: int) -> str:
    """A layout of as equal stages as can be: `Ettt|ttt|ttt|ttL`."""
    fewest, rest = divmod(n_layers, n_stages)
    # the first stages have a layer more
    counts = [fewest + 1] * rest + [fewest] * (n_stages - rest)
    return layout_text(counts)


def _division(case: Case) -> Literal["layout", "uneven", "even"]:
    """How the recipe divides layers among stages."""
    pipeline = case.recipe.parallelism.pipeline
    if pipeline.layout is not None:
        return "layout"
    if pipeline.first_layers or pipeline.last_layers:
        return "uneven"
    return "even"


def _stage_problem(case: Case) -> Problem | None:
    """Why layers don't divide into stages the way that the recipe says."""
    if case.pp == 1 or _answered_twice(case):
        return None
    found = stage_problem(case.recipe.model.n_layers, case.recipe.parallelism)
    if found is None:
        return None
    return Problem(*found)


def stages_are_described_once(case: Case) -> Problem | None:
    """A layout, uneven stages and counting the embedding or loss as layers are three answers to one question."""
    twice = _answered_twice(case)
    if twice is None:
        return None
    (kept, _), (name, value) = twice
    key = f"{_KEY}.{name}"
    text = f"{key}={show(value)} and parallelism.pipeline.{kept} both say how layers are divided"
    return Problem(key, f"{text}; drop one of them")


def _answered_twice(case: Case) -> tuple[tuple[str, object], tuple[str, object]] | None:
    """The first settings of two of the ways to divide layers; None when there is at most one way."""
    pipeline = case.recipe.parallelism.pipeline
    firsts = []
    for way in (("layout",), _UNEVEN, _COUNTED):
        values = {name: getattr(pipeline, name) for name in way}
        given = [(name, value) for name, value in values.items() if value not in (None, False)]
        firsts += given[:1]
    if len(firsts) < 2:
        return None
    return firsts[0], firsts[1]


def schedule_has_its_chunks(case: Case) -> Problem | None:
    """The interleaved schedule has two or more chunks per rank, zb_v has two, the others have one."""
    pipeline = case.recipe.parallelism.pipeline
    schedule = pipeline.schedule
    chunks = pipeline.virtual_stages
    if case.pp == 1:
        return None
    key = f"{_KEY}.virtual_stages"
    if schedule == "interleaved" and chunks < 2:
        need = "at least 2"
        legal = Way(key, (2, 3, 4, 5), most=1)
        other = "1f1b"
    elif schedule == "zb_v" and chunks != 2:
        need = "2"
        legal = Way(key, (2,))
        other = "1f1b"
    elif schedule not in ("interleaved", "zb_v") and chunks != 1:
        need = "1"
        legal = Way(key, (1,))
        other = "interleaved"
    else:
        return None
    text = f"{key}={chunks} must be {need} with {_KEY}.schedule={schedule}"
    return Problem(key, f"{text}; {way_out(case, legal, Way(f'{_KEY}.schedule', (other,)))}")


def pipeline_settings_need_a_pipeline(case: Case) -> Problem | None:
    """Settings of the pipeline need more than one stage: with pp=1 nothing reads them."""
    if case.pp > 1:
        return None
    pipeline = case.recipe.parallelism.pipeline
    idle: dict[str, object] = {"virtual_stages": 1, "layout": None}
    idle |= dict.fromkeys(_UNEVEN)
    idle |= dict.fromkeys(_COUNTED, False)
    # where the resolver decided these, nobody asked for them
    for name, value in (("schedule", "1f1b"), ("micro_batch_group", 1)):
        if f"{_KEY}.{name}" not in case.decided:
            idle[name] = value
    for name, value in idle.items():
        given = getattr(pipeline, name)
        if given != value:
            text = f"{_KEY}.{name}={show(given)} needs parallelism.pp > 1, it is 1"
            return Problem(f"{_KEY}.{name}", f"{text}; drop it or raise parallelism.pp")
    return None


def interleaving_has_its_micro_batches(case: Case) -> Problem | None:
    """An interleaved schedule has a micro batch for each pipeline rank at least."""
    train = case.recipe.train
    pp = case.pp
    few = _fewest_micro_batches(case)
    if not _interleaves(case) or few is None or few >= pp:
        return None
    batch = min(case.batches)
    # sequences of one micro batch on every data-parallel rank
    unit = train.micro_batch * case.dp
    # the smallest batch is where the ramp starts, or the only one
    key = "train.global_batch"
    larger = [n * unit for n in range(pp, 2 * pp + 1)]
    ramp = train.batch_ramp
    if ramp is not None and batch != train.global_batch:
        key = "train.batch_ramp.start"
        later = range(batch + ramp.increment, batch + 2 * pp * unit + ramp.increment + 1, ramp.increment)
        larger = [start for start in later if start >= pp * unit]
    text = f"{key}={batch} is {few} micro batches a rank ({batch} / (micro_batch {train.micro_batch}"
    text += f" · dp {case.dp})), {_KEY}.schedule=interleaved needs parallelism.pp={pp}"
    per_rank = batch // case.dp
    smaller = [size for size in divisors(per_rank) if per_rank // size >= pp]
    way = way_out(
        case,
        Way(key, larger, most=1),
        Way("train.micro_batch", smaller[::-1], most=1),
        Way(f"{_KEY}.virtual_stages", (1,)),
    )
    return Problem(key, f"{text}; {way}")


def groups_fit_the_micro_batches(case: Case) -> Problem | None:
    """An interleaved schedule takes micro batches in groups of at least pp, of which no rest is smaller than pp."""
    group = case.recipe.parallelism.pipeline.micro_batch_group
    pp = case.pp
    few = _fewest_micro_batches(case)
    if not _interleaves(case) or few is None or few < pp:
        return None
    counts = _micro_batch_counts(case)
    wrong = next((count for count in counts if not _divides_into_groups(count, group, pp)), None)
    if wrong is None:
        return None
    legal = []
    for size in range(pp, min(wrong, pp + 64) + 1):
        if all(_divides_into_groups(count, size, pp) for count in counts):
            legal.append(size)
    key = f"{_KEY}.micro_batch_group"
    hint = way_out(case, Way(key, legal, group), _other_batch(case))
    if not pp <= group <= wrong:
        rule = f"must lie between parallelism.pp={pp} and the {wrong} micro batches of a rank"
    else:
        rule = f"leaves {wrong % group} of a rank's {wrong} micro batches, fewer than parallelism.pp={pp}"
    return Problem(key, f"{key}={group} {rule}; {hint}")


def _other_batch(case: Case) -> Way:
    """Global batches of which a rank has a multiple of pp micro batches."""
    train = case.recipe.train
    unit = train.micro_batch * case.dp * case.pp
    return Way("train.global_batch", multiples(train.global_batch, unit), train.global_batch, most=2)


def groups_need_interleaving(case: Case) -> Problem | None:
    """Only the interleaved schedule takes micro batches in groups."""
    pipeline = case.recipe.parallelism.pipeline
    if case.pp == 1 or pipeline.schedule == "interleaved" or pipeline.micro_batch_group == case.pp:
        return None
    key = f"{_KEY}.micro_batch_group"
    text = f"{key}={pipeline.micro_batch_group} needs {_KEY}.schedule=interleaved"
    return Problem(key, f"{text}, it is {pipeline.schedule}; drop it")


def _interleaves(case: Case) -> bool:
    return case.pp > 1 and case.recipe.parallelism.pipeline.schedule == "interleaved"


def _micro_batch_counts(case: Case) -> list[int]:
    """Micro batches of a rank for every global batch that occurs."""
    unit = case.recipe.train.micro_batch * case.dp
    return [batch // unit for batch in case.batches]


def _fewest_micro_batches(case: Case) -> int | None:
    """Micro batches of a rank in the smallest step; None when a batch does not divide, which is told elsewhere."""
    unit = case.recipe.train.micro_batch * case.dp
    if any(batch % unit for batch in case.batches):
        return None
    return case.micro_batches


def _divides_into_groups(micro_batches: int, group: int, pp: int) -> bool:
    rest = micro_batches % group
    return pp <= group <= micro_batches and (rest == 0 or rest >= pp)
