"""Which layers lie on which pipeline stage; passes.py says which stage is on which rank."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

from megaspec.core.divisors import divisors, multiples, nearest
from megaspec.core.problems import one_of
from megaspec.core.weight_facts import WeightFacts
from megaspec.parallelism.passes import stage_number
from megaspec.parallelism.spec import ParallelismSpec

MOST_LAYERS = 10_000
_KEY = "parallelism.pipeline"
# Settings of a pipeline beside its layout that say how layers are divided, with the values that say nothing.
EVENLY = {"first_layers": None, "last_layers": None, "count_embedding": False, "count_loss": False}


@dataclass(frozen=True)
class Chunk:
    """A stage: consecutive layers that lie on one rank. It may be empty."""

    layers: tuple[int, ...]
    """Numbers of its layers."""
    embedding: bool = False
    head: bool = False
    """The last norm, the output head and the loss."""


@dataclass(frozen=True)
class _Split:
    """Everything that a division depends on."""

    n_layers: int
    pp: int
    virtual: int
    first: int | None
    last: int | None
    extra_first: int
    """1 when the embedding counts as a layer."""
    extra_last: int
    """1 when the output head counts as a layer."""
    layout: str | None
    is_v: bool

    @property
    def stages(self) -> int:
        return self.pp * self.virtual


@dataclass(frozen=True)
class _Division:
    """Layers of every stage, in the order of the model; or why there is no such division."""

    sizes: tuple[int, ...] = ()
    problem: tuple[str, str] | None = None


def stages_of(n_layers: int, parallelism: ParallelismSpec) -> tuple[tuple[Chunk, ...], ...]:
    """Chunks by pipeline rank and virtual stage. The split has to be possible, see `stage_problem`."""
    return _stages(_split(n_layers, parallelism))


def stage_sizes(n_layers: int, parallelism: ParallelismSpec) -> tuple[int, ...]:
    """Layers of each stage, in the order of the model. The split has to be possible, see `stage_problem`."""
    return _divide(_split(n_layers, parallelism)).sizes


def first_trained_stage(facts: Iterable[WeightFacts], n_layers: int, parallelism: ParallelismSpec) -> int:
    """The first stage, in the order of the model, with a parameter to train; 0 where a run trains all. `facts`: of all
    parameters of the model."""
    pp = parallelism.pp
    stage_of_layer: dict[int | None, int] = {}
    last = pp * parallelism.pipeline.virtual_stages - 1
    for rank, chunks in enumerate(stages_of(n_layers, parallelism)):
        for number, chunk in enumerate(chunks):
            stage = stage_number(rank, number, pp=pp, is_v=parallelism.pipeline.schedule == "zb_v")
            stage_of_layer |= dict.fromkeys(chunk.layers, stage)
    first = last
    for one in facts:
        if one.is_trained and one.stands == "embedding":
            return 0
        if one.is_trained and one.stands == "layer":
            first = min(first, stage_of_layer[one.layer])
    return first


def stage_problem(n_layers: int, parallelism: ParallelismSpec) -> tuple[str, str] | None:
    """Why layers can't be divided as asked: the key at fault, and the rule with the nearest legal values."""
    return _divide(_split(n_layers, parallelism)).problem


def parse_layout(text: str) -> tuple[str, ...]:
    """The letters of each stage of `Et*3|(tt|)*29,t|L`. Raises ValueError with what is wrong."""
    if len(text) > MOST_LAYERS:
        raise ValueError(f"is longer than {MOST_LAYERS:,} letters")
    tokens = re.findall(r"\*\d*|.", re.sub(r"[\s,]", "", text), re.DOTALL)
    # One list for the text and one for each ( that is open: letters, and groups that are closed, as one string each.
    open_groups: list[list[str]] = [[]]
    for token in tokens:
        here = open_groups[-1]
        if token in "EtL|":
            here.append(token)
        elif token == "(":
            open_groups.append([])
        elif token == ")":
            if len(open_groups) == 1:
                raise ValueError("has a ) without its (")
            open_groups.pop()
            open_groups[-1].append("".join(here))
        elif token.startswith("*"):
            # six digits at most, so that a number that is too long is never made
            times = token[1:7]
            if not times or not here:
                raise ValueError("has a * that is not between a letter or group and a number")
            if len(token) > 7 or len(here[-1]) * int(times) > MOST_LAYERS:
                raise ValueError(f"is longer than {MOST_LAYERS:,} letters")
            here[-1] *= int(times)
        else:
            raise ValueError(f"has {token!r}; its letters are E, t and L, with |, (..)*n and t*n")
    if len(open_groups) > 1:
        raise ValueError("has a ( without its )")
    return tuple("".join(open_groups[0]).split("|"))


def layout_text(sizes: Sequence[int]) -> str:
    """The layout of stages with so many layers: `Et*4|(t*5|)*6t*4|ttL`."""
    letters = [_repeated("t", size) for size in sizes]
    if len(letters) == 1:
        return f"E{letters[0]}L"
    middle = ""
    for stage, alike in groupby(letters[1:-1]):
        times = len(list(alike))
        if times > 3:
            middle += f"({stage}|)*{times}"
        else:
            middle += f"{stage}|" * times
    return f"E{letters[0]}|{middle}{letters[-1]}L"


def _repeated(letter: str, times: int) -> str:
    """`ttt`, or `t*4` where that is shorter to read."""
    if times > 3:
        return f"{letter}*{times}"
    return letter * times


def _split(n_layers: int, parallelism: ParallelismSpec) -> _Split:
    pipeline = parallelism.pipeline
    return _Split(
        n_layers=n_layers,
        pp=parallelism.pp,
        virtual=pipeline.virtual_stages,
        first=pipeline.first_layers,
        last=pipeline.last_layers,
        extra_first=int(pipeline.count_embedding),
        extra_last=int(pipeline.count_loss),
        layout=pipeline.layout,
        is_v=pipeline.schedule == "zb_v",
    )


@lru_cache(maxsize=4096)
def _stages(split: _Split) -> tuple[tuple[Chunk, ...], ...]:
    division = _divide(split)
    assert division.problem is None, division.problem
    # the number of the first layer of each stage, and of the one behind the last
    starts = [0, *accumulate(division.sizes)]

    def chunk(rank: int, number: int) -> Chunk:
        stage = stage_number(rank, number, pp=split.pp, is_v=split.is_v)
        layers = tuple(range(starts[stage], starts[stage + 1]))
        return Chunk(layers, embedding=stage == 0, head=stage == split.stages - 1)

    ranks: list[tuple[Chunk, ...]] = []
    for rank in range(split.pp):
        ranks.append(tuple(chunk(rank, number) for number in range(split.virtual)))
    return tuple(ranks)


@lru_cache(maxsize=4096)
def _divide(split: _Split) -> _Division:
    if split.n_layers > MOST_LAYERS:
        text = f"model.n_layers={split.n_layers} must be at most {MOST_LAYERS:,}; a recipe says layers, not parameters"
        return _Division(problem=("model.n_layers", text))
    if split.layout is not None:
        return _by_layout(split, split.layout)
    if split.first is not None or split.last is not None:
        return _uneven(split)
    return _even(split)


def _even(split: _Split) -> _Division:
    # the embedding and the loss may count as a layer each, of the first and of the last stage
    counted = split.n_layers + split.extra_first + split.extra_last
    if counted % split.stages:
        return _Division(problem=_not_even(split, counted))
    sizes = [counted // split.stages] * split.stages
    sizes[0] -= split.extra_first
    sizes[-1] -= split.extra_last
    if min(sizes) < 0:
        text = f"{_KEY}.count_embedding and count_loss leave {min(sizes)} layers to a stage; set one of them to false"
        return _Division(problem=(f"{_KEY}.count_embedding", text))
    return _Division(tuple(sizes))


def _not_even(split: _Split, counted: int) -> tuple[str, str]:
    extra = " + 1 embedding" * split.extra_first + " + 1 loss" * split.extra_last
    total = f"model.n_layers={split.n_layers}"
    if extra:
        total += f"{extra} = {counted}"
    if split.virtual > 1 and counted % split.pp == 0:
        text = f"{_KEY}.virtual_stages={split.virtual} must divide the {counted // split.pp} layers of each of "
        return f"{_KEY}.virtual_stages", f"{text}parallelism.pp={split.pp} ranks ({total})"
    stages = f"parallelism.pp={split.pp}"
    if split.virtual > 1:
        stages += f" · virtual_stages={split.virtual}"
    return "parallelism.pp", f"{stages} must divide {total}"


def even_ways(n_layers: int, parallelism: ParallelismSpec) -> list[tuple[str, list[int], int]]:
    """Settings with which layers divide evenly: the key, its values, and the value that it has."""
    split = _split(n_layers, parallelism)
    extra = split.extra_first + split.extra_last
    counted = split.n_layers + extra
    # pipeline degrees whose ranks can divide their layers into virtual stages
    degrees = [d for d in divisors(counted) if counted // d % split.virtual == 0]
    layers = [m - extra for m in nearest(counted, multiples(counted, split.stages), most=2) if m > extra]
    ways = [("parallelism.pp", degrees, split.pp), ("model.n_layers", layers, split.n_layers)]
    if split.virtual > 1 and counted % split.pp == 0:
        ways.insert(0, (f"{_KEY}.virtual_stages", divisors(counted // split.pp), split.virtual))
    return ways


def _uneven(split: _Split) -> _Division:
    """The first and last rank have as many layers as they are said to, the ranks between share the rest evenly."""
    # what is said of the two ends; the first of them is named in problems
    ends: dict[str, int] = {}
    if split.first is not None:
        ends["first_layers"] = split.first
    if split.last is not None:
        ends["last_layers"] = split.last
    name, value = next(iter(ends.items()))
    key = f"{_KEY}.{name}"
    if split.is_v and split.last is not None:
        text = f"{_KEY}.last_layers={split.last}: with zb_v the first rank holds the last stage too"
        return _Division(problem=(f"{_KEY}.last_layers", f"{text}; take it away and set first_layers"))
    if split.pp == 1:
        text = f"{key}={value} needs parallelism.pp of at least 2, it is 1; take it away or raise pp"
        return _Division(problem=(key, text))

    middle_ranks = split.pp - len(ends)
    rest = split.n_layers - sum(ends.values())
    wrong = _uneven_rest(split, rest)
    if wrong:
        said = " + ".join(f"{end}={layers}" for end, layers in ends.items())
        text = f"{_KEY}.{said} leaves {rest} of model.n_layers={split.n_layers} to {middle_ranks} ranks in the middle"
        return _Division(problem=(key, f"{text}, {wrong}; {_uneven_way_out(split, rest, key, value)}"))
    by_rank = [0] * split.pp
    if middle_ranks:
        by_rank = [rest // middle_ranks] * split.pp
    if split.first is not None:
        by_rank[0] = split.first
    if split.last is not None:
        by_rank[-1] = split.last
    if any(layers % split.virtual for layers in by_rank):
        text = f"{_KEY}.virtual_stages={split.virtual} must divide the layers of every rank, {one_of(by_rank)}"
        common = [d for d in divisors(by_rank[0]) if not any(layers % d for layers in by_rank)]
        return _Division(problem=(f"{_KEY}.virtual_stages", f"{text}; try {one_of(common)}"))
    sizes = [0] * split.stages
    for rank, layers in enumerate(by_rank):
        for chunk in range(split.virtual):
            sizes[stage_number(rank, chunk, pp=split.pp, is_v=split.is_v)] = layers // split.virtual
    return _Division(tuple(sizes))


def _uneven_way_out(split: _Split, rest: int, key: str, value: int) -> str:
    """Other values for the end that is named, with which the ranks in the middle can share what is left."""
    legal = []
    for layers in range(split.virtual, split.n_layers, split.virtual):
        rest_then = rest + value - layers
        if not _uneven_rest(split, rest_then):
            legal.append(layers)
    if not legal:
        return "try another parallelism.pp"
    return f"try {key}={one_of(nearest(value, legal))}"


def _uneven_rest(split: _Split, rest: int) -> str:
    """Why the ranks in the middle can't share `rest` layers; "" when they can."""
    middle_ranks = split.pp - (split.first is not None) - (split.last is not None)
    if middle_ranks == 0:
        return "which must be 0" if rest else ""
    if rest <= 0:
        return "which must have one each at least"
    chunks = middle_ranks * split.virtual
    if rest % chunks:
        return f"which must be a multiple of {chunks}"
    return ""


def _by_layout(split: _Split, text: str) -> _Division:
    key = f"{_KEY}.layout"
    try:
        stages = parse_layout(text)
    except ValueError as error:
        return _Division(problem=(key, f"{key}={_short(text)} {error}"))
    wrong = _wrong_letters(stages, split.n_layers)
    if wrong:
        return _Division(problem=(key, f"{key}={_short(text)} {wrong}"))
    if len(stages) != split.stages:
        asked = f"parallelism.pp={split.pp} · virtual_stages={split.virtual} = {split.stages}"
        problem = f"{key}={_short(text)} has {len(stages)} stages and must have {asked}"
        chunks, remainder = divmod(len(stages), split.pp)
        if not remainder:
            problem += f"; try {_KEY}.virtual_stages={chunks}"
        return _Division(problem=(key, problem))
    return _Division(tuple(stage.count("t") for stage in stages))


def _wrong_letters(stages: tuple[str, ...], n_layers: int) -> str:
    letters = "".join(stages)
    if letters.count("E") != 1 or not stages[0].startswith("E"):
        return "must start with its only E, the embedding"
    if letters.count("L") != 1 or not stages[-1].endswith("L"):
        return "must end with its only L, the output head and loss"
    count = letters.count("t")
    if count != n_layers:
        return f"has {count} layers (t) and must have model.n_layers={n_layers}"
    return ""


def _short(text: str) -> str:
    if len(text) > 60:
        return f"{text[:57]}..."
    return text


def layer_ranges(layers: Sequence[int]) -> str:
    """`0-7, 16-23`: numbers of layers in words; `none` when there are none."""
    runs: list[list[int]] = []  # [first, last] of layers that lie one behind the other
    for number in sorted(layers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words) or "none"
