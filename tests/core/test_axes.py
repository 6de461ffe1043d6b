"""Rank groups of both grids, held against Megatron-LM's."""

import json
from pathlib import Path

import pytest

from megaspec.core.axes import (
    DENSE_AXES,
    DENSE_GROUPS,
    EXPERT_AXES,
    coordinates,
    expert_degrees,
    fewest_gpus,
    rank_groups,
    rank_of,
    world_size,
)

# The golden file's names of groups over the expert grid: the axes that they span.
EXPERT_SPANS = {
    "tp": ("etp",),
    "ep": ("ep",),
    "dp": ("edp",),
    "pp": ("pp",),
    "tp-ep": ("ep", "etp"),
    "tp-ep-pp": ("pp", "ep", "etp"),
}
CASES = json.loads((Path(__file__).parents[1] / "golden" / "rank_groups.json").read_text())["cases"]


def dense(case):
    return {"pp": case["pp"], "dp_replicate": case["dp"], "cp": case["cp"], "tp": case["tp"]}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"w{c['world']}tp{c['tp']}cp{c['cp']}pp{c['pp']}ep{c['ep']}")
def test_groups_equal_megatrons(case):
    assert case["order"] == "tp-cp-ep-dp-pp"
    sizes = dense(case)
    assert world_size(sizes) == case["world"]
    for name, groups in case["dense"].items():
        assert rank_groups(DENSE_GROUPS[name], sizes) == groups, name
    experts = expert_degrees(sizes, ep=case["ep"], etp=case["etp"])
    assert experts["edp"] == case["edp"]
    assert world_size(experts, EXPERT_AXES) == case["world"]
    for name, groups in case["expert"].items():
        assert rank_groups(EXPERT_SPANS[name], experts, EXPERT_AXES) == groups, name


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["world"]))
def test_sharding_data_parallel_ranks_leaves_the_groups_of_all_of_them(case):
    sizes = dense(case)
    for shard in (d for d in range(2, case["dp"] + 1) if case["dp"] % d == 0):
        split = sizes | {"dp_replicate": case["dp"] // shard, "dp_shard": shard}
        for name, groups in case["dense"].items():
            assert rank_groups(DENSE_GROUPS[name], split) == groups, (name, shard)


def test_a_rank_and_its_coordinates_are_inverse():
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 4}
    places = [coordinates(rank, sizes) for rank in range(world_size(sizes))]
    assert [rank_of(place, sizes) for place in places] == list(range(96))
    assert places[1] == {axis: int(axis == "tp") for axis in DENSE_AXES}
    assert places[48]["pp"] == 1


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["world"]))
def test_the_fewest_gpus_hold_both_grids_and_fewer_do_not(case):
    fewest = fewest_gpus(**{axis: case[axis] for axis in ("tp", "cp", "pp", "ep", "etp")})
    assert case["world"] % fewest == 0
    for world in range(1, fewest + 1):
        dense_fits = world % (case["tp"] * case["cp"] * case["pp"]) == 0
        experts_fit = world % (case["etp"] * case["ep"] * case["pp"]) == 0
        assert (dense_fits and experts_fit) == (world == fewest)
