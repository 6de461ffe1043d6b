"""Ranks that torchrun started."""

import pytest

from megaspec.core.errors import RecipeError
from megaspec_launchers.environment import RankPlace, TcpRendezvous, rank_from_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "job 7/x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def without(name):
    return {k: v for k, v in TORCHRUN.items() if k != name}


def test_torchrun():
    assert rank_from_environment(TORCHRUN) == RankPlace(
        rank=5,
        world_size=8,
        local_rank=1,
        attempt=2,
        store=TcpRendezvous(host="node-0", port=29500, prefix="megaspec/job-7-x/2", is_open=True),
    )


def test_anything_that_sets_the_plain_variables():
    plain = {k: TORCHRUN[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    place = rank_from_environment(plain)
    assert place.attempt == 0
    assert not place.store.is_open


def test_every_attempt_has_its_own_keys():
    prefixes = {rank_from_environment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": str(n)}).store.prefix for n in range(5)}
    assert len(prefixes) == 5


def test_no_world_to_join():
    assert rank_from_environment(without("RANK")) is None
    assert rank_from_environment({}) is None


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name):
    with pytest.raises(RecipeError, match=f"^{name} is not set"):
        rank_from_environment(without(name))


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "x"), ("RANK", "-1"), ("RANK", "8"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "1e3")]
)
def test_a_wrong_variable_is_named_with_its_value(name, value):
    with pytest.raises(RecipeError, match=f"^{name}={value} must be"):
        rank_from_environment(TORCHRUN | {name: value})
