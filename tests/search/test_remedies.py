"""What would make a run fit: it does, it keeps the rules, and the cheapest comes first."""

import json

import pytest

from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, memory_of
from megaspec.parallelism.spec import ContextSpec
from megaspec.recipe import Recipe
from megaspec.search.remedies import LEVERS, remedies, savings
from tests.plan.plans import MOE, plan

WIDE = {"kind": "decoder", "n_layers": 32, "d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "d_ffn": 14336}
EIGHT_B = WIDE | {"vocab_size": 128256, "max_seq_len": 8192}
STEP = {"data.seq_len": 8192, "train": {"steps": 8, "global_batch": 16, "micro_batch": 1}}


def eight_b(parallelism, **model):
    return plan(EIGHT_B | model, STEP | {"parallelism": {"tp": 1, **parallelism}})


def changed(recipe, overrides):
    content = json.loads(recipe.model_dump_json())
    for override in overrides:
        path, _, value = override.partition("=")
        *sections, name = path.split(".")
        place = content
        for section in sections:
            place = place[section]
        plain = value.strip("[]").split(",") if value.startswith("[") else value
        place[name] = {"true": True, "false": False, "null": None}.get(value, int(value) if value.isdigit() else plain)
    return Recipe.model_validate_json(json.dumps(content))


def test_groups_of_micro_batches_can_be_as_short_as_the_pipeline():
    pipeline = {"schedule": "interleaved", "virtual_stages": 2, "micro_batch_group": 64}
    step = {"data.seq_len": 8192, "train": {"steps": 8, "global_batch": 256, "micro_batch": 1}}
    found = plan(EIGHT_B, step | {"parallelism": {"tp": 1, "pp": 4, "dp_replicate": 2, "pipeline": pipeline}})
    assert remedies(found, HARDWARE["H200"])[0].overrides == ("parallelism.pipeline.micro_batch_group=4",)


def test_a_change_that_no_schedule_has_is_left_out():
    # twice the stages would take groups of 8, and 12 micro batches leave 4 over
    pipeline = {"schedule": "interleaved", "virtual_stages": 2, "micro_batch_group": 6}
    found = plan(
        EIGHT_B,
        {"data.seq_len": 8192, "train": {"steps": 8, "global_batch": 12, "micro_batch": 1}}
        | {"parallelism": {"tp": 1, "pp": 4, "dp_replicate": 2, "pipeline": pipeline}},
    )
    ways = [way for way in remedies(found, HARDWARE["A100-40"]) if not way.overrides[0].startswith("hardware=")]
    assert ways
    for way in ways:
        own = changed(found, way.overrides).parallelism
        assert own.pipeline.schedule != "interleaved" or 12 % (own.dp_replicate * own.pipeline.micro_batch_group) == 0


def test_nothing_for_what_fits():
    assert remedies(eight_b({"dp_strategy": "fsdp", "dp_replicate": 1, "dp_shard": 8}), HARDWARE["H100"]) == []


@pytest.mark.parametrize("hardware", ["A100-40", "A100-80", "H100", "H200"])
@pytest.mark.parametrize(
    "recipe",
    [
        eight_b({"dp_replicate": 8}),
        eight_b({"dp_replicate": 16}, n_layers=48),
        eight_b({"dp_replicate": 16}, moe=MOE | {"d_expert": 4096, "d_shared": 4096}),
    ],
    ids=["8b", "12b", "experts"],
)
def test_each_fits_and_leads_to_its_total(recipe, hardware):
    gpu = HARDWARE[hardware]
    ways = remedies(recipe, gpu)
    assert len(ways) <= 4
    assert len({way.overrides for way in ways}) == len(ways)
    for way in ways:
        if way.overrides[0].startswith("hardware="):
            assert way.total <= 0.95 * HARDWARE[way.overrides[0].partition("=")[2]].memory
            continue
        other = changed(recipe, way.overrides)
        assert fullest(memory_of(other)).total == way.total <= 0.95 * gpu.memory
        own = other.parallelism
        assert own.tp * own.pp * own.cp * own.dp_replicate * own.dp_shard == recipe.launcher.ranks
        assert own.tp <= gpu.node_size


def test_the_cheapest_comes_first():
    # 8 B weights on one H200: with 18 bytes each they don't fit
    first, *others = remedies(eight_b({"dp_replicate": 8}), HARDWARE["H200"])
    assert first.overrides[0] == "parallelism.dp_strategy=zero1"
    assert all(other.overrides[0] != "parallelism.dp_strategy=zero1" for other in others)


def test_a_larger_gpu_comes_last():
    ways = remedies(eight_b({"dp_replicate": 1, "dp_strategy": "replicate"}, n_layers=16), HARDWARE["H100"])
    assert ways[-1].overrides == ("hardware=H200",)


@pytest.mark.parametrize(
    ("pipeline", "overrides"),
    [
        ({"schedule": "zb_h1"}, ("parallelism.pipeline.schedule=1f1b",)),
        (
            {"schedule": "zb_v", "virtual_stages": 2, "layout": "Et*4|t*5|t*5|t*4|t*4|t*4|t*4|ttL"},
            (
                "parallelism.pipeline.schedule=1f1b",
                "parallelism.pipeline.virtual_stages=1",
                "parallelism.pipeline.layout=null",
            ),
        ),
    ],
    ids=lambda one: one.get("schedule") if isinstance(one, dict) else "",
)
def test_a_schedule_that_holds_more_can_go(pipeline, overrides):
    """Zero bubble keeps whole gradients of all layers where a strategy would share them out."""
    sharded = {"pp": 4, "dp_strategy": "fsdp", "dp_replicate": 1, "dp_shard": 4}
    recipe = eight_b(sharded | {"pipeline": pipeline | {"micro_batch_group": 4}})
    every = {one.overrides: one.total for one in savings(recipe, HARDWARE["H100"], most=20)}
    assert every[overrides] == fullest(memory_of(changed(recipe, overrides))).total < fullest(memory_of(recipe)).total
    plain = savings(eight_b(sharded), HARDWARE["H100"], most=20)
    assert plain
    assert not any("schedule" in word for one in plain for word in one.overrides)


def test_parts_of_sequences_come_with_attention_that_has_them():
    found = eight_b({"dp_replicate": 8})
    flex = found.model_copy(update={"kernels": found.kernels.model_copy(update={"attention": "flex"})})
    doubled = next(lever for lever in LEVERS if lever.field == "cp").turn
    assert doubled(found).kernels.attention == found.kernels.attention
    assert doubled(flex).kernels.attention == "sdpa"
    whole = flex.parallelism.model_copy(update={"context": ContextSpec(kind="all_to_all")})
    assert doubled(flex.model_copy(update={"parallelism": whole})).kernels.attention == "flex"
