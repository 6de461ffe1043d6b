"""The search for a layout: legal, fitting, sorted, complete; and what `parallelism=auto` takes from it."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.core.frozen import AUTO
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.step_time import step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.resolve.fill import plainly_filled
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.tune import SEARCHED, Grid, layouts, tune
from tests.pace import within

FACTS = Facts(run_dir="runs/x", vocab_size=128_256)


def target_of(name: str, gpus: int) -> Target:
    hardware = HARDWARE[name]
    return Target(
        gpus=gpus, gpu=hardware.name, sm=hardware.sm, gpu_memory=hardware.memory, cores=64, versions={"torch": "2.13.0"}
    )


def grid_of(recipe: str, *overrides: str, gpus: int, hardware: str = "H200", trainable: bool = False) -> Grid:
    target = target_of(hardware, gpus)
    opened = ("parallelism.dp_replicate=auto", "parallelism.dp_shard=auto", "parallelism.sequence_parallel=auto")
    words = (*opened, "train.micro_batch=auto", f"launcher.ranks={gpus}", *overrides)
    base = plainly_filled(compose(recipe, words).recipe, target, FACTS)
    one = HARDWARE[hardware]
    return Grid(base, target, FACTS, one, throughput_of(one), frozenset(SEARCHED), is_for_training=trainable)


def without(grid: Grid, *keys: str) -> Grid:
    """The same, where these fields stay what the recipe has."""
    return Grid(**{**vars(grid), "open": grid.open - {*keys}})


@pytest.mark.parametrize(
    ("recipe", "batch", "gpus"), [("llama3_8b", 16, 4), pytest.param("llama3_70b", 64, 32, marks=pytest.mark.slow)]
)
def test_every_layout_that_is_found_resolves_fits_and_is_no_slower_than_the_next(recipe, batch, gpus):
    grid = grid_of(recipe, f"train.global_batch={batch}", gpus=gpus)
    found = tune(grid)
    assert len(found.best) == 10
    assert len(found.best) <= found.considered
    seconds = [one.time.seconds for one in found.best]
    assert seconds == sorted(seconds)
    for one in found.best:
        assert one.memory.total <= 0.95 * grid.hardware.memory
        spec = resolve(one.recipe, grid.target, FACTS)
        assert spec.parallelism == one.recipe.parallelism
        assert spec.world_size == gpus
        assert one.limit


def test_layouts_are_all_that_the_rules_let_pass():
    """Against a plain loop over every degree, each resolved in full."""
    grid = grid_of("llama3_2_1b", gpus=8)
    seen = {(r.parallelism.tp, r.parallelism.pp, r.parallelism.cp) for r in layouts(grid)}
    legal = set()
    for tp, pp, cp in product((1, 2, 3, 4, 8), repeat=3):
        if tp * pp * cp > 8:
            continue
        words = [f"parallelism.tp={tp}", f"parallelism.pp={pp}", f"parallelism.cp={cp}", "launcher.ranks=8"]
        try:
            resolve(compose("llama3_2_1b", words).recipe, grid.target, FACTS)
        except RecipeError:
            continue
        legal.add((tp, pp, cp))
    assert seen == legal
    assert len(legal) > 10


def test_layouts_have_the_attention_that_auto_takes_for_them():
    """Of kernels flex alone caps scores, of whole sequences alone: a layout with parts of them is weighed with what it
    would run."""
    words = ("model.attention.score_cap=30.0", "parallelism.tp=1", "parallelism.pp=1")
    grid = without(grid_of("llama3_2_1b", *words, gpus=4), "parallelism.tp", "parallelism.pp")
    assert grid.recipe.kernels.attention == "flex"
    # the user named it
    assert {layout.parallelism.cp for layout in layouts(grid)} == {1}
    grid = replace(grid, decided=frozenset({"kernels.attention"}))
    taken = {layout.parallelism.cp: layout.kernels.attention for layout in layouts(grid)}
    assert taken == {1: "flex", 2: "reference", 4: "reference"}
    for cp, attention in taken.items():
        spec = resolve(
            compose("llama3_2_1b", [*words, f"parallelism.cp={cp}", "launcher.ranks=4"]).recipe, grid.target, FACTS
        )
        assert spec.kernels.attention == attention


def test_a_ramp_of_any_length_is_searched_at_once():
    """One of 250 million increments is refused by a rule, behind the search for a layout."""
    words = ("data=random", "parallelism=auto", "train.micro_batch=auto", "launcher.ranks=8")
    ramp = ("train.global_batch=1000000000", "train.batch_ramp={start: 4, increment: 4, samples: 1000}")
    recipe = compose("llama3_8b", (*words, *ramp)).recipe
    with within(5), pytest.raises(RecipeError, match="in 249999999 increments, 10000 at most are possible"):
        resolve(recipe, target_of("H200", 8), FACTS)


def test_more_recomputation_than_is_needed_only_costs_time():
    """Why the search stops at the least that fits."""
    for layout in list(layouts(grid_of("llama3_8b", gpus=8)))[::9]:
        own = layout.parallelism
        taken = []
        for kind in ("none", "selective", "full"):
            changed = own.model_copy(update={"recompute": own.recompute.model_copy(update={"kind": kind})})
            recipe = layout.model_copy(update={"parallelism": changed})
            taken.append(step_time(recipe, HARDWARE["H200"], throughput_of(HARDWARE["H200"])).seconds)
        assert taken == sorted(taken)


def test_only_what_can_be_trained_today():
    grid = grid_of("llama3_2_1b", gpus=4, trainable=True)
    for one in tune(grid).best:
        assert unbuilt_problems(one.recipe) == []


def test_what_is_fixed_stays():
    grid = without(grid_of("llama3_70b", "parallelism.tp=8", gpus=64), "parallelism.tp")
    assert {r.parallelism.tp for r in layouts(grid)} == {8}


@pytest.mark.parametrize("override", ["precision.gather_fp8=true", "optim.formats.exp_avg=bf16"])
def test_what_only_sharing_ranks_can_do_leaves_layouts_in_which_they_share(override):
    words = ("precision=fp8", "precision.recipe=delayed", override)
    # of pipelines and context parallel nothing is asked
    base = without(grid_of("llama3_8b", *words, gpus=8), "parallelism.pp", "parallelism.cp")
    for keys in (base.open, base.open - {"parallelism.dp_strategy"}):
        grid = Grid(**{**vars(base), "open": frozenset(keys)})
        if "parallelism.dp_strategy" not in keys:
            parallelism = grid.recipe.parallelism.model_copy(update={"dp_strategy": "fsdp"})
            grid = Grid(**{**vars(grid), "recipe": grid.recipe.model_copy(update={"parallelism": parallelism})})
        found = tune(grid)
        assert found.best
        for one in found.best:
            assert one.fits
            spec = resolve(one.recipe, grid.target, FACTS)
            assert spec.parallelism.dp_strategy != "replicate"
    auto = ("parallelism.dp_strategy=auto", "parallelism.dp_replicate=auto", "parallelism.dp_shard=auto")
    spec = resolve(compose("llama3_8b", (*words, *auto, "launcher.ranks=8")).recipe, base.target, FACTS)
    assert spec.parallelism.dp_strategy in ("zero1", "zero2", "fsdp", "hsdp")


@pytest.mark.slow
def test_experts_are_spread():
    fixed = ("tp", "pp", "cp", "etp", "recompute.kind")
    grid = grid_of("qwen3_30b_a3b", "train.global_batch=16", gpus=8)
    found = tune(without(grid, *(f"parallelism.{name}" for name in fixed)), most=3)
    assert found.best[0].fits
    assert {one.recipe.parallelism.ep for one in found.best} != {1}


def test_when_nothing_fits_the_smallest_is_told():
    found = tune(grid_of("llama3_1_405b", gpus=4))
    (one,) = found.best
    assert not one.fits
    assert one.memory.total > HARDWARE["H200"].memory


@pytest.mark.parametrize(("name", "hardware", "gpus"), [("llama3_2_1b", "H200", 4), ("llama3_8b_half", "H100", 8)])
def test_parallelism_auto_takes_the_best_that_can_be_trained_and_says_so(name, hardware, gpus):
    grid = grid_of(name, "parallelism=auto", gpus=gpus, hardware=hardware, trainable=True)
    best = tune(grid, most=1).best[0]
    with within(3.0):
        recipe = compose(name, ["parallelism=auto", f"launcher.ranks={gpus}"]).recipe
        spec = resolve(recipe, target_of(hardware, gpus), FACTS)
    assert spec.parallelism.tp == best.recipe.parallelism.tp
    assert spec.train.micro_batch == best.recipe.train.micro_batch
    assert unbuilt_problems(spec) == []
    (reason,) = {d.reason for d in spec.decisions if d.key == "parallelism.pp"}
    assert "considered (megaspec tune)" in reason


def test_auto_without_a_gpu_is_plain():
    cpu = Target(cores=2, versions={"torch": "2.13.0+cpu"})
    spec = resolve(compose("hello", ["parallelism=auto"]).recipe, cpu, Facts(run_dir="runs/x", vocab_size=257))
    assert (spec.parallelism.pp, spec.parallelism.tp, spec.parallelism.recompute.kind) == (1, 2, "none")
    assert AUTO not in str(spec.parallelism)


MEASURED = {  # step ms of the 1B on four H200 at 16 sequences of 8,192: (tp, micro batch)
    (1, 4): 609.47, (1, 2): 612.86, (1, 1): 629.35,
    (2, 4): 709.18, (2, 2): 730.88, (2, 1): 720.14,
    (4, 4): 832.86, (4, 2): 862.57, (4, 1): 837.47,
}  # fmt: skip


def test_the_predicted_order_of_layouts_is_the_measured_one():
    """tests/benchmarks/results/layouts_four_h200.jsonl. Pairs within 3 % of each other count as equal."""
    one = HARDWARE["H200"]
    predicted = {}
    for tp, micro_batch in MEASURED:
        words = ("train.global_batch=16", "train.batch_ramp=null", f"parallelism.tp={tp}")
        grid = grid_of("llama3_2_1b", *words, f"train.micro_batch={micro_batch}", gpus=4)
        recipe = resolve(grid.recipe, grid.target, FACTS)
        predicted[tp, micro_batch] = step_time(recipe, one, throughput_of(one)).seconds * 1e3
        assert fullest(memory_of(recipe)).total < one.memory
    for a, b in product(MEASURED, MEASURED):
        if MEASURED[a] < 0.97 * MEASURED[b]:
            assert predicted[a] < predicted[b], (a, b, predicted)


def reason_of(name, *overrides, gpus):
    recipe = compose(name, ["parallelism=auto", "train.micro_batch=auto", f"launcher.ranks={gpus}", *overrides]).recipe
    spec = resolve(recipe, target_of("H100", gpus), Facts(run_dir="runs/x", vocab_size=None))
    (reason,) = {d.reason for d in spec.decisions if d.key == "parallelism.pp"}
    return spec, reason


def test_where_nothing_fits_auto_takes_what_needs_least():
    spec, reason = reason_of("llama3_1_405b", gpus=8)
    assert unbuilt_problems(spec) == []
    assert reason.startswith("nothing leaves 5 % of the memory free; it needs least")


@pytest.mark.slow
def test_auto_of_experts_searches_their_layouts_too():
    spec, reason = reason_of("mixtral_8x7b", gpus=16)
    assert reason.startswith("fastest that fits")
    assert fullest(memory_of(spec)).total <= HARDWARE["H100"].memory
    assert spec.parallelism.ep > 1


@pytest.mark.parametrize(
    ("names", "gpus", "n_layouts"),
    [
        (("llama8b_two_h200",), 2, 6),
        pytest.param(("dimensions_four_h200", "divided_four_h200", "tuned_four_h200"), 4, 16, marks=pytest.mark.slow),
    ],
    ids=["2", "4"],
)
def test_the_best_layout_that_is_found_is_the_best_that_was_measured(names, gpus, n_layouts):
    """Of the layouts of Llama-3-8B at 8 sequences a step in files of tests/benchmarks/results, within 3 %."""
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    measured = {}
    for row in (json.loads(line) for name in names for line in (results / f"{name}.jsonl").read_text().splitlines()):
        sequences = round(row["tokens_per_s"] * row["step_ms"] / 1e3 / row["seq"])
        if row["peer"] == "megaspec" and row["model"] == "llama8b" and sequences == 8:
            own = row["parallelism"]
            layout = layout_of(own["dp_strategy"], own["tp"], own["pp"], own["pipeline"], row["mbs"])
            measured[layout] = min(row["step_ms"], measured.get(layout, row["step_ms"]))
    assert len(measured) == n_layouts
    grid = grid_of("llama3_8b", "train.global_batch=8", "train.batch_ramp=null", gpus=gpus, trainable=True)
    best = tune(grid).best[0].recipe
    own = best.parallelism
    assert (best.data.seq_len, own.cp, own.recompute.kind) == (8192, 1, "none")
    pipeline = own.pipeline.model_dump(mode="json")
    taken = measured[layout_of(own.dp_strategy, own.tp, own.pp, pipeline, best.train.micro_batch)]
    assert taken <= 1.03 * min(measured.values())


def layout_of(strategy, tp, pp, pipeline, micro_batch):
    """What tells measured layouts apart."""
    stages = (pipeline["schedule"], pipeline["virtual_stages"], pipeline["layout"]) if pp > 1 else ()
    return strategy, tp, pp, *stages, micro_batch


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ("H200", ("kernels.linear=te",)),
        ("B200", ("model.moe={n_experts: 8, top_k: 2}", "kernels.scaled_grouped=reference")),
    ],
    ids=str,
)
def test_a_kernel_that_was_chosen_and_one_that_was_not_are_told_apart(hardware: str, words: tuple[str, ...]) -> None:
    """Transformer Engine takes no casts that are chosen, and experts are dequantised where that is chosen."""
    target = target_of(hardware, 8)
    versions = target.versions | {"transformer-engine": "2.20.2"}
    target = target.model_copy(update={"versions": versions})
    searched = ("parallelism=auto", "launcher.ranks=8", "precision={kind: fp8, recipe: tensorwise}", *words)
    spec = resolve(compose("llama3_2_1b", searched).recipe, target, FACTS)
    (decision,) = [one for one in spec.decisions if one.key == "parallelism.dp_strategy"]
    assert decision.reason.startswith("fastest that fits")
