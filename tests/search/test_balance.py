"""Layers divided by load: all are there, in order, and no rank has more to do than any other division leaves it."""

from functools import partial
from itertools import combinations, pairwise

import pytest

from megaspec.compose.compose import compose
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.step_time import least_seconds, step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.parallelism.stages import layout_text, parse_layout, stages_of
from megaspec.resolve.fill import plainly_filled
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.search.balance import divided, divided_by_load

H200 = HARDWARE["H200"]
SPEEDS = throughput_of(H200)
FACTS = Facts(run_dir="runs/x", vocab_size=128_256)


def target_of(gpus):
    return Target(
        gpus=gpus, gpu=H200.name, sm=90, gpu_memory=H200.memory, cores=64, versions={"torch": "2.13.0"}
    )  # fmt: skip


def resolved(recipe, *words, gpus):
    words = (*words, f"launcher.ranks={gpus}", "train.batch_ramp=null")
    return resolve(compose(recipe, words).recipe, target_of(gpus), FACTS)


EIGHT_B = ("parallelism.cp=1", "parallelism.pp=4", "train.global_batch=8", "train.micro_batch=1")


def busiest(sizes, layers, ends, ranks):
    starts = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    busy = [0] * (max(ranks) + 1)
    for stage, rank in enumerate(ranks):
        busy[rank] += ends[stage] + sum(layers[starts[stage] : starts[stage + 1]])
    return max(busy)


@pytest.mark.parametrize(
    ("layers", "ends", "ranks"),
    [
        ((10,) * 9, (1, 0, 25), (0, 1, 2)),
        ((10,) * 7, (0, 0, 0, 0), (0, 1, 2, 3)),
        ((10,) * 8, (2, 0, 0, 23), (0, 1, 1, 0)),  # zb_v: both ends on the first rank
        ((10,) * 8, (2, 0, 0, 0, 0, 31), (0, 1, 2, 0, 1, 2)),
        ((3, 3, 10, 10, 10, 10, 10, 10), (1, 0, 14), (0, 1, 2)),  # two dense layers, then experts
        ((10, 3) * 4, (1, 0, 8), (0, 1, 2)),
        ((6,) * 5 + (10,) * 3, (1, 0, 0, 14), (0, 1, 2, 3)),  # the last ones not in fp8
    ],
    ids=str,
)
def test_no_division_leaves_the_busiest_rank_less(layers, ends, ranks):
    sizes = divided(layers, ends, ranks)
    assert (len(sizes), sum(sizes), min(sizes) >= 0) == (len(ends), len(layers), True)
    assert busiest(sizes, layers, ends, ranks) == least_of_all(layers, ends, ranks)


@pytest.mark.parametrize("layers", [(3, 10, 10, 10, 10, 10), (6, 6, 6, 10, 10, 10), (10, 3, 10, 3, 10, 3)], ids=str)
def test_several_stages_a_rank_come_near_it_where_layers_differ(layers):
    """Found by moving one layer after the other: less than two kinds of layers differ away."""
    ends, ranks = (1, 0, 0, 14), (0, 1, 1, 0)
    sizes = divided(layers, ends, ranks)
    assert sum(sizes) == len(layers)
    more = busiest(sizes, layers, ends, ranks) - least_of_all(layers, ends, ranks)
    assert more < max(layers) - min(layers)


def least_of_all(layers, ends, ranks):
    every = []
    for cuts in combinations(range(len(layers) + len(ends) - 1), len(ends) - 1):
        edges = (-1, *cuts, len(layers) + len(ends) - 1)
        every.append([b - a - 1 for a, b in pairwise(edges)])
    return min(busiest(one, layers, ends, ranks) for one in every)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((3,), "EtttL"),
        ((2, 0, 4), "Ett||t*4L"),
        ((2, 3, 3, 3, 3, 3, 4, 4, 0), "Ett|(ttt|)*5t*4|t*4|L"),
        ((0, *(5,) * 4, 1), "E|(t*5|)*4tL"),
    ],
    ids=str,
)
def test_the_text_says_the_sizes(sizes, text):
    assert layout_text(sizes) == text
    assert tuple(stage.count("t") for stage in parse_layout(text)) == sizes


@pytest.mark.parametrize(
    "pipeline",
    [
        ("schedule=1f1b",),
        ("schedule=zb_h1",),
        ("schedule=zb_v", "virtual_stages=2"),
        ("schedule=interleaved", "virtual_stages=4"),
    ],
    ids=str,
)
def test_the_head_gets_fewer_layers_and_a_step_is_shorter(pipeline):
    words = [f"parallelism.pipeline.{word}" for word in pipeline]
    spec = resolved("llama3_8b", *EIGHT_B, *words, gpus=4)
    other = divided_by_load(spec, H200, SPEEDS)
    by_rank = [sum(len(c.layers) for c in chunks) for chunks in stages_of(other.model.n_layers, other.parallelism)]
    assert sum(by_rank) == 32
    assert by_rank[0 if "schedule=zb_v" in pipeline else -1] == min(by_rank) == 6
    seconds = partial(step_time, hardware=H200, throughput=SPEEDS)
    assert seconds(other).seconds < 0.94 * seconds(spec).seconds
    assert least_seconds(other, H200, SPEEDS) <= seconds(other).seconds


def test_layers_that_no_number_of_stages_divides():
    """DeepSeek-V3 has 61, of which three have no experts."""
    words = ("parallelism=auto", "launcher.ranks=256", "parallelism.pp=8", "parallelism.ep=8", "parallelism.tp=1")
    recipe = compose("deepseek_v3", words).recipe
    filled = plainly_filled(recipe, target_of(256), FACTS)
    other = divided_by_load(filled, H200, SPEEDS)
    by_rank = [sum(len(c.layers) for c in chunks) for chunks in stages_of(other.model.n_layers, other.parallelism)]
    assert sum(by_rank) == 61
    assert max(by_rank) - min(by_rank) <= 4


def test_auto_divides_layers_where_that_is_fastest_and_says_so():
    spec = resolved("llama3_8b", *EIGHT_B, "parallelism.pipeline.layout=auto", gpus=4)
    own = spec.parallelism.pipeline
    by_rank = [sum(len(c.layers) for c in chunks) for chunks in stages_of(spec.model.n_layers, spec.parallelism)]
    assert min(by_rank) < max(by_rank)
    reasons = {one.key: one.reason for one in spec.decisions}
    assert reasons["parallelism.pipeline.layout"].startswith("fastest that fits")
    even = resolved("llama3_8b", *EIGHT_B, f"parallelism.pipeline.schedule={own.schedule}", gpus=4)
    seconds = partial(step_time, hardware=H200, throughput=SPEEDS)
    assert seconds(spec).seconds < seconds(even).seconds
    assert fullest(memory_of(spec)).total <= H200.room


def test_auto_is_even_without_a_pipeline_a_known_gpu_or_where_another_setting_says_how():
    words = ("parallelism.pipeline.layout=auto",)
    assert resolved("llama3_2_1b", *words, gpus=4).parallelism.pipeline.layout is None
    on_cpu = Target(gpus=0, gpu="", sm=0, gpu_memory=0, cores=2, versions={"torch": "2.13.0"})
    spec = resolve(
        compose("hello", ("parallelism.pp=2", "parallelism.tp=1", *words)).recipe, on_cpu, Facts(run_dir="runs/x")
    )
    assert spec.parallelism.pipeline.layout is None
    counted = resolved("llama3_8b", *EIGHT_B, *words, "parallelism.pipeline.last_layers=5", gpus=4)
    assert counted.parallelism.pipeline.layout is None
