"""The fastest division of layers: as fast as the best of all divisions, within memory and rules, and found in a bounded
number of steps that are simulated."""

import json
import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from megaspec.compose.compose import compose
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.step_time import step_time
from megaspec.parallelism.stages import stage_sizes
from megaspec.plan.plan import make_plan
from megaspec.resolve.fill import plainly_filled
from megaspec.resolve.resolver import resolve
from megaspec.search import division
from megaspec.search.balance import divided_by_load, divided_within, with_sizes
from megaspec.search.division import MOST_WEIGHED, WORTH_MOVING, DivisionSearch, fastest_division
from megaspec.search.tune import tune
from tests.search.test_balance import EIGHT_B, FACTS, H200, SPEEDS, resolved, target_of
from tests.search.test_tune import grid_of

# No move of one layer saves more than WORTH_MOVING where a search ends: of these small cases no division does.
NEAR = 1 + 2 * WORTH_MOVING
DENSE = "llama3_8b"
# layers in windows and without, all with experts
WINDOWS = "gpt_oss_20b"
# the first layers are dense, the others have experts
EXPERTS = "deepseek_v3"
OF_EXPERTS = ("parallelism.pp=8", "parallelism.ep=8", "parallelism.tp=1")


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(division, "_KEPT", {})


def small(model, schedule, pp, *, chunks=1, layers=8, batch=8, words=()):
    """A filled recipe with few layers; they are divided in no way that counts."""
    changes = (
        "parallelism=auto",
        f"parallelism.pp={pp}",
        "parallelism.dp_strategy=replicate",
        "parallelism.tp=1",
        "parallelism.ep=1",
        "parallelism.cp=1",
        f"parallelism.pipeline.schedule={schedule}",
        f"parallelism.pipeline.virtual_stages={chunks}",
        "train.micro_batch=1",
        f"train.global_batch={batch}",
        "train.batch_ramp=null",
        f"model.n_layers={layers}",
        f"launcher.ranks={pp}",
    )
    return plainly_filled(compose(model, (*changes, *words)).recipe, target_of(pp), FACTS)


def every_division(layers, stages):
    for cuts in combinations(range(layers + stages - 1), stages - 1):
        edges = (-1, *cuts, layers + stages - 1)
        yield tuple(b - a - 1 for a, b in pairwise(edges))


def seconds_of(recipe):
    return step_time(recipe, H200, SPEEDS).seconds


def needs(recipe):
    return fullest(memory_of(recipe)).total


def sizes_of(recipe):
    return stage_sizes(recipe.model.n_layers, recipe.parallelism)


CASES = [
    (DENSE, "1f1b", 4, 1, 8),
    (DENSE, "1f1b", 3, 1, 6),
    (DENSE, "zb_h1", 4, 1, 8),
    (DENSE, "interleaved", 2, 2, 4),
    (DENSE, "interleaved", 3, 2, 6),
    pytest.param(DENSE, "interleaved", 2, 3, 8, marks=pytest.mark.slow),
    (DENSE, "zb_v", 2, 2, 8),
    pytest.param(DENSE, "zb_v", 3, 2, 6, marks=pytest.mark.slow),
    (WINDOWS, "1f1b", 4, 1, 8),
    (WINDOWS, "zb_v", 2, 2, 8),
    (EXPERTS, "1f1b", 3, 1, 6),
    (EXPERTS, "interleaved", 2, 2, 8),
]


@pytest.mark.parametrize(("model", "schedule", "pp", "chunks", "batch"), CASES, ids=str)
def test_it_is_as_fast_as_the_best_of_all_divisions(model, schedule, pp, chunks, batch):
    recipe = small(model, schedule, pp, chunks=chunks, batch=batch)
    # models with experts fit no single GPU of their stages
    room = H200.model_copy(update={"memory": 100 * H200.memory})
    found = fastest_division(recipe, room, SPEEDS)
    every = [seconds_of(with_sizes(recipe, sizes)) for sizes in every_division(8, pp * chunks)]
    assert sum(sizes_of(found)) == 8
    assert seconds_of(found) <= NEAR * min(every)
    assert seconds_of(found) <= seconds_of(divided_by_load(recipe, room, SPEEDS))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)], ids=str)
def test_of_little_memory_it_is_the_best_that_fits(schedule, chunks):
    """With room for what the division by load needs, and a hundredth more."""
    recipe = small(DENSE, schedule, 3, chunks=chunks, batch=6)
    most = needs(divided_by_load(recipe, H200, SPEEDS)) * 1.01
    tight = H200.model_copy(update={"memory": int(most / 0.95)})
    found = fastest_division(recipe, tight, SPEEDS)
    every = [with_sizes(recipe, sizes) for sizes in every_division(8, 3 * chunks)]
    fitting = [one for one in every if needs(one) <= tight.room]
    assert 0 < len(fitting) < len(every)
    assert needs(found) <= tight.room
    assert seconds_of(found) <= NEAR * min(map(seconds_of, fitting))


def test_it_takes_more_memory_only_where_that_is_there():
    recipe = small(DENSE, "1f1b", 4)
    by_load = divided_by_load(recipe, H200, SPEEDS)
    found = fastest_division(recipe, H200, SPEEDS)
    assert needs(found) > needs(by_load)
    for memory in (needs(found) - 1, needs(by_load) - 1):
        tight = H200.model_copy(update={"memory": int(memory / 0.95)})
        other = fastest_division(recipe, tight, SPEEDS)
        assert other.parallelism.pipeline.layout != found.parallelism.pipeline.layout
        assert needs(other) <= memory


@pytest.mark.parametrize(
    ("model", "schedule", "pp", "chunks", "batch"),
    [
        (DENSE, "1f1b", 4, 1, 8),
        (DENSE, "1f1b", 3, 1, 6),
        (DENSE, "zb_h1", 4, 1, 8),
        pytest.param(DENSE, "interleaved", 2, 3, 8, marks=pytest.mark.slow),
        (DENSE, "zb_v", 3, 2, 6),
        (WINDOWS, "1f1b", 4, 1, 8),
        (EXPERTS, "interleaved", 2, 2, 8),
    ],
    ids=str,
)
def test_where_the_division_by_load_does_not_fit_it_is_the_best_that_does(model, schedule, pp, chunks, batch):
    """With room for exactly what one of all other divisions needs, down to the least."""
    recipe = small(model, schedule, pp, chunks=chunks, batch=batch)
    every = [with_sizes(recipe, sizes) for sizes in every_division(8, pp * chunks)]
    weighed = [(needs(one), seconds_of(one)) for one in every]
    by_load = divided_by_load(recipe, H200, SPEEDS)
    too_little = sorted({total for total, _ in weighed if total < needs(by_load)})
    for total in too_little[::3]:
        # a byte more, by which a share of the memory may be rounded
        tight = H200.model_copy(update={"memory": math.ceil((total + 1) / 0.95)})
        found = fastest_division(recipe, tight, SPEEDS)
        assert needs(found) <= tight.room < needs(by_load)
        best = min(seconds for needed, seconds in weighed if needed <= tight.room)
        assert seconds_of(found) <= NEAR * best


def test_where_none_fits_it_is_left_for_who_asks_to_say_so():
    recipe = small(DENSE, "1f1b", 4)
    least = min(needs(with_sizes(recipe, sizes)) for sizes in every_division(8, 4))
    by_load = divided_by_load(recipe, H200, SPEEDS)
    for memory in (least - 1, least // 2):
        tight = H200.model_copy(update={"memory": int(memory / 0.95)})
        assert divided_within(by_load, tight.room) is None
        assert sizes_of(fastest_division(recipe, tight, SPEEDS)) == sizes_of(by_load)


def test_tune_finds_a_division_that_fits_where_neither_equal_layers_nor_equal_loads_do():
    """The first rank keeps four micro batches, the last one: of equal layers it needs 84 GB, and no other over 65."""
    words = ("parallelism.tp=1", "parallelism.dp_strategy=replicate", "parallelism.recompute.kind=none")
    grid = grid_of("llama3_8b", *EIGHT_B, *words, "train.batch_ramp=null", gpus=4)
    tight = H200.model_copy(update={"memory": 80_000_000_000})
    grid = replace(grid, open=frozenset({"parallelism.pipeline.layout"}), hardware=tight)
    evenly = grid.recipe
    assert evenly.parallelism.pipeline.layout is None
    for one in (evenly, divided_by_load(evenly, tight, SPEEDS)):
        assert needs(one) > tight.room
    [found] = tune(grid).best
    assert found.fits
    assert needs(found.recipe) == found.memory.total <= tight.room
    assert sizes_of(found.recipe) == (7, 9, 9, 7)
    # the fastest that fits, as `auto` divides it
    assert sizes_of(fastest_division(evenly, tight, SPEEDS)) == (7, 9, 9, 7)
    assert found.time.seconds < seconds_of(evenly)


def test_rules_that_the_division_by_load_keeps_stay_kept():
    recipe = resolved("llama3_8b", *EIGHT_B, "parallelism.offload.layers=8", gpus=4)
    offload = recipe.parallelism.offload.model_copy(update={"layers": 9})
    parallelism = recipe.parallelism.model_copy(update={"offload": offload})
    by_load = divided_by_load(recipe.model_copy(update={"parallelism": parallelism}), H200, SPEEDS)
    search = DivisionSearch(by_load, H200, SPEEDS)
    assert search.fits((9, 9, 8, 6))
    # no stage has nine layers that could be offloaded
    assert not search.fits((8, 8, 8, 8))


@pytest.mark.parametrize(
    ("schedule", "chunks", "sizes", "by_load"),
    [
        ("1f1b", 1, (9, 9, 8, 6), 2.0800),
        ("zb_h1", 1, (9, 9, 8, 6), 1.8238),
        ("interleaved", 2, (4, 4, 4, 4, 5, 5, 4, 2), 1.8022),
        ("interleaved", 4, (*(2,) * 12, 3, 3, 2, 0), 1.7329),
        ("zb_v", 2, (5, 5, 4, 4, 4, 4, 4, 2), 1.6647),
    ],
    ids=str,
)
def test_divisions_of_llama_3_8b(schedule, chunks, sizes, by_load):
    """`by_load`: seconds of a step with the layers divided by load, of a rank's equal stages the first having more."""
    words = (f"parallelism.pipeline.schedule={schedule}", f"parallelism.pipeline.virtual_stages={chunks}")
    found = fastest_division(resolved("llama3_8b", *EIGHT_B, *words, gpus=4), H200, SPEEDS)
    assert sizes_of(found) == sizes
    assert seconds_of(found) < 0.997 * by_load
    assert needs(found) <= H200.room


@pytest.mark.parametrize(
    ("name", "gpus", "words"),
    [
        ("llama3_8b", 4, (*EIGHT_B, "schedule=interleaved", "virtual_stages=8")),
        ("llama3_1_405b", 1024, ("parallelism.pp=16", "schedule=interleaved", "virtual_stages=8")),
        ("deepseek_v3", 256, (*OF_EXPERTS, "schedule=zb_v", "virtual_stages=2")),
    ],
    ids=["8b", "405b", "experts"],
)
def test_what_is_simulated_is_bounded_and_asked_for_once(name, gpus, words, monkeypatch):
    n_simulated = 0

    def counting(*args, **more):
        nonlocal n_simulated
        n_simulated += 1
        return step_time(*args, **more)

    monkeypatch.setattr(division, "step_time", counting)
    in_full = [f"parallelism.pipeline.{word}" if word.startswith(("schedule", "virtual")) else word for word in words]
    changes = ("parallelism=auto", f"launcher.ranks={gpus}", "train.batch_ramp=null", *in_full)
    recipe = plainly_filled(compose(name, changes).recipe, target_of(gpus), FACTS)
    found = fastest_division(recipe, H200, SPEEDS)
    assert 0 <= n_simulated <= MOST_WEIGHED
    before = n_simulated
    # the same by value
    again = type(recipe).model_validate_json(recipe.model_dump_json())
    assert sizes_of(fastest_division(again, H200, SPEEDS)) == sizes_of(found)
    assert n_simulated == before
    division._KEPT.clear()
    assert sizes_of(fastest_division(again, H200, SPEEDS)) == sizes_of(found)


def test_passes_that_are_simulated_are_bounded_too(monkeypatch):
    recipe = small(DENSE, "1f1b", 4)
    monkeypatch.setattr(division, "MOST_PASSES", 5 * 4 * 8 * 2)
    search = DivisionSearch(divided_by_load(recipe, H200, SPEEDS), H200, SPEEDS)
    search.run()
    # the first one, and five of 4 ranks, 8 micro batches and 2 passes
    assert len(search.seconds) == 6


def test_plan_says_what_the_fastest_division_would_give():
    spec = resolved("llama3_8b", *EIGHT_B, gpus=4)
    shown = make_plan(spec, target_of(4), hardware=H200, throughput=SPEEDS).bubble
    assert shown.layout_by_time == fastest_division(spec, H200, SPEEDS).parallelism.pipeline.layout
    content = json.loads(spec.model_dump_json())
    content["parallelism"]["pipeline"]["layout"] = shown.layout_by_time
    then = type(spec).model_validate_json(json.dumps(content))
    plan = make_plan(then, target_of(4), hardware=H200, throughput=SPEEDS)
    assert plan.step_time.seconds == pytest.approx(shown.seconds_by_time) == seconds_of(then)
    assert plan.bubble.layout_by_time is None


def test_what_tune_names_is_what_auto_divides_and_plan_predicts():
    grid = grid_of("llama3_8b", *EIGHT_B, "train.batch_ramp=null", gpus=4)
    # the degrees stay
    grid = replace(grid, open=grid.open - {"parallelism.pp", "parallelism.tp", "parallelism.cp"})
    named = tune(grid).best
    divided = [one for one in named if one.recipe.parallelism.pipeline.layout is not None]
    assert divided
    for one in divided:
        own = one.recipe.parallelism.pipeline
        assert fastest_division(one.recipe, H200, SPEEDS).parallelism.pipeline.layout == own.layout
        content = json.loads(one.recipe.model_dump_json())
        content["parallelism"]["pipeline"]["layout"] = "auto"
        spec = resolve(type(one.recipe).model_validate_json(json.dumps(content)), grid.target, FACTS)
        assert spec.parallelism.pipeline.layout == own.layout
        plan = make_plan(spec, grid.target, hardware=H200, throughput=SPEEDS)
        assert plan.step_time.seconds == pytest.approx(one.time.seconds)
        assert plan.memory.total == one.memory.total
