"""Rules about pipeline stages and the order of passes through them."""

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
    found = None if _way(case) else _split(case)
    if found is None or "; " in found.message:
        return found
    even = even_ways(case.recipe.model.n_layers, case.recipe.parallelism)
    ways = [Way(key, values, near) for key, values, near in even]
    way = way_out(case, *ways, key=found.key)
    stages = f", or say the stages' layers with {_KEY}.first_layers, last_layers or layout"
    return Problem(found.key, f"{found.message}; {way}{stages if found.key == 'parallelism.pp' else ''}")


def uneven_stages_hold_all_layers(case: Case) -> Problem | None:
    """With first_layers or last_layers, the stages between them share the remaining layers evenly."""
    return _split(case) if _way(case) == "uneven" else None


def layout_holds_all_layers(case: Case) -> Problem | None:
    """A layout has one E at its start, one L at its end, a t for each layer, and stages for every rank."""
    found = _split(case) if _way(case) == "layout" else None
    if found is None or "; try " in found.message:
        return found
    n_layers, stages = case.recipe.model.n_layers, case.pp * case.recipe.parallelism.pipeline.virtual_stages
    return Problem(found.key, f"{found.message}; try {_even_layout(n_layers, stages)}")


def _even_layout(n_layers: int, stages: int) -> str:
    """A layout of as equal stages as can be: `Ettt|ttt|ttt|ttL`."""
    layers, more = divmod(n_layers, stages)
    return layout_text([layers + (stage < more) for stage in range(stages)])


def _way(case: Case) -> str:
    """How the recipe divides layers: "layout", "uneven", or "" for evenly."""
    pipeline = case.recipe.parallelism.pipeline
    if pipeline.layout is not None:
        return "layout"
    return "uneven" if pipeline.first_layers or pipeline.last_layers else ""


def _split(case: Case) -> Problem | None:
    if case.pp == 1 or _answered_twice(case):
        return None
    found = stage_problem(case.recipe.model.n_layers, case.recipe.parallelism)
    return None if found is None else Problem(*found)


def stages_are_described_once(case: Case) -> Problem | None:
    """A layout, uneven stages and counting the embedding or loss as layers are three answers to one question."""
    twice = _answered_twice(case)
    if twice is None:
        return None
    (kept, _), (name, value) = twice
    key = f"parallelism.pipeline.{name}"
    text = f"{key}={show(value)} and parallelism.pipeline.{kept} both say how layers are divided"
    return Problem(key, f"{text}; drop one of them")


def _answered_twice(case: Case) -> tuple[tuple[str, object], tuple[str, object]] | None:
    """The first settings of two of the ways to divide layers; None when there is at most one way."""
    pipeline = case.recipe.parallelism.pipeline
    ways = (("layout",), _UNEVEN, _COUNTED)
    given = [
        [(name, getattr(pipeline, name)) for name in way if getattr(pipeline, name) not in (None, False)]
        for way in ways
    ]
    first = [way[0] for way in given if way]
    return (first[0], first[1]) if len(first) > 1 else None


def schedule_has_its_chunks(case: Case) -> Problem | None:
    """The interleaved schedule has two or more chunks per rank, zb_v has two, the others have one."""
    pipeline = case.recipe.parallelism.pipeline
    schedule, chunks = pipeline.schedule, pipeline.virtual_stages
    if case.pp == 1:
        return None
    key = "parallelism.pipeline.virtual_stages"
    if schedule == "interleaved" and chunks < 2:
        text = f"{key}={chunks} must be at least 2 with parallelism.pipeline.schedule=interleaved"
        ways = Way(key, (2, 3, 4, 5), most=1), Way(f"{_KEY}.schedule", ("1f1b",))
        return Problem(key, f"{text}; {way_out(case, *ways)}")
    if schedule == "zb_v" and chunks != 2:
        text = f"{key}={chunks} must be 2 with parallelism.pipeline.schedule=zb_v"
        return Problem(key, f"{text}; {way_out(case, Way(key, (2,)), Way(f'{_KEY}.schedule', ('1f1b',)))}")
    if schedule not in ("interleaved", "zb_v") and chunks != 1:
        text = f"{key}={chunks} must be 1 with parallelism.pipeline.schedule={schedule}"
        return Problem(key, f"{text}; {way_out(case, Way(key, (1,)), Way(f'{_KEY}.schedule', ('interleaved',)))}")
    return None


def pipeline_settings_need_a_pipeline(case: Case) -> Problem | None:
    """Settings of the pipeline need more than one stage: with pp=1 nothing reads them."""
    if case.pp > 1:
        return None
    pipeline = case.recipe.parallelism.pipeline
    idle: dict[str, object] = {"virtual_stages": 1, "layout": None}
    idle |= dict.fromkeys(_UNEVEN) | dict.fromkeys(_COUNTED, False)
    for setting, value in (("schedule", "1f1b"), ("micro_batch_group", 1)):
        if f"parallelism.pipeline.{setting}" not in case.decided:
            idle[setting] = value
    name = next((name for name, value in idle.items() if getattr(pipeline, name) != value), None)
    if name is None:
        return None
    key = f"parallelism.pipeline.{name}"
    text = f"{key}={show(getattr(pipeline, name))} needs parallelism.pp > 1, it is 1"
    return Problem(key, f"{text}; drop it or raise parallelism.pp")


def interleaving_has_its_micro_batches(case: Case) -> Problem | None:
    """An interleaved schedule has a micro batch for each pipeline rank at least."""
    train, pp = case.recipe.train, case.pp
    few = _fewest(case)
    if not _interleaves(case) or few is None or few >= pp:
        return None
    batch, unit = min(case.batches), train.micro_batch * case.dp
    ramp = train.batch_ramp if train.batch_ramp is not None and batch != train.global_batch else None
    key = "train.global_batch" if ramp is None else "train.batch_ramp.start"
    text = f"{key}={batch} is {few} micro batches a rank ({batch} / (micro_batch {train.micro_batch}"
    text += f" · dp {case.dp})), parallelism.pipeline.schedule=interleaved needs parallelism.pp={pp}"
    larger = [n * unit for n in range(pp, 2 * pp + 1)]
    if ramp is not None:
        larger = [batch + n * ramp.increment for n in range(1, 2 * pp * unit // ramp.increment + 2)]
        larger = [start for start in larger if start >= pp * unit]
    smaller = [m for m in divisors(batch // case.dp) if batch // case.dp // m >= pp]
    ways = (
        Way(key, larger, most=1),
        Way("train.micro_batch", smaller[::-1], most=1),
        Way(f"{_KEY}.virtual_stages", (1,)),
    )
    return Problem(key, f"{text}; {way_out(case, *ways)}")


def groups_fit_the_micro_batches(case: Case) -> Problem | None:
    """An interleaved schedule takes micro batches in groups of at least pp, of which no rest is smaller than pp."""
    group, pp = case.recipe.parallelism.pipeline.micro_batch_group, case.pp
    few = _fewest(case)
    if not _interleaves(case) or few is None or few < pp:
        return None
    key = "parallelism.pipeline.micro_batch_group"
    wrong = next((m for m in _counts(case) if not _groups(group, pp, m)), None)
    if wrong is None:
        return None
    legal = [g for g in range(pp, min(wrong, pp + 64) + 1) if all(_groups(g, pp, m) for m in _counts(case))]
    hint = way_out(case, Way(key, legal, group), _other_batch(case))
    if not pp <= group <= wrong:
        rule = f"must lie between parallelism.pp={pp} and the {wrong} micro batches of a rank"
    else:
        rule = f"leaves {wrong % group} of a rank's {wrong} micro batches, fewer than parallelism.pp={pp}"
    return Problem(key, f"{key}={group} {rule}; {hint}")


def _other_batch(case: Case) -> Way:
    batch = case.recipe.train.global_batch
    return Way("train.global_batch", multiples(batch, case.recipe.train.micro_batch * case.dp * case.pp), batch, most=2)


def groups_need_interleaving(case: Case) -> Problem | None:
    """Only the interleaved schedule takes micro batches in groups."""
    pipeline, key = case.recipe.parallelism.pipeline, "parallelism.pipeline.micro_batch_group"
    if case.pp == 1 or pipeline.schedule == "interleaved" or pipeline.micro_batch_group == case.pp:
        return None
    text = f"{key}={pipeline.micro_batch_group} needs parallelism.pipeline.schedule=interleaved"
    return Problem(key, f"{text}, it is {pipeline.schedule}; drop it")


def _interleaves(case: Case) -> bool:
    return case.pp > 1 and case.recipe.parallelism.pipeline.schedule == "interleaved"


def _counts(case: Case) -> list[int]:
    """Micro batches of a rank for every global batch that occurs."""
    unit = case.recipe.train.micro_batch * case.dp
    return [batch // unit for batch in case.batches]


def _fewest(case: Case) -> int | None:
    """Micro batches of a rank in the smallest step; None when a batch does not divide, which is told elsewhere."""
    unit = case.recipe.train.micro_batch * case.dp
    if any(batch % unit for batch in case.batches):
        return None
    return case.micro_batches


def _groups(group: int, pp: int, micro_batches: int) -> bool:
    rest = micro_batches % group
    return pp <= group <= micro_batches and (rest == 0 or rest >= pp)
