"""Ranks that compute or remember wrongly are found and named; nothing is found where nothing is wrong."""

import random

import pytest

from megaspec.train.guard import sampled
from tests.ranks import RankPool
from tests.runtime import troubles
from tests.runtime.specs import spec

DP4 = {"parallelism.dp_replicate": 4}
DP2 = {"parallelism.dp_replicate": 2}
FSDP = {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "fsdp"}
ZERO1 = {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "zero1"}
SMALL = {"precision.kind": "bf16", "train.steps": 12, "checkpoint.every": 0}
EVERY = 5
REPLICAS = {"train.checks": {"replicas_every": EVERY}}


def flips(count: int, *, ranks: int, kinds: tuple[str, ...], seed: int, steps: range) -> list[dict]:
    draw = random.Random(seed)
    found = []
    for number in range(count):
        found.append(
            {
                "on": draw.randrange(ranks),
                "step": draw.choice(steps),
                "kind": kinds[number % len(kinds)],
                "seed": draw.randrange(2**31),
            }
        )
    return found


def hit_of(results: list[list[dict]], number: int) -> str:
    """What a fault hit, from the rank that it was on."""
    (name,) = [name for of_rank in results for name in of_rank[number]["hit"]]
    return name


def check_found(results, faults, *, within, what="replicas", named=True):
    """Each was found within so many steps, on all ranks alike, and the rank and the tensor are right."""
    for number, fault in enumerate(faults):
        first = results[0][number]
        assert all(of_rank[number]["end"] == first["end"] for of_rank in results), number
        assert first["code"] == 77, (fault, first)
        (event,) = first["suspected"]
        assert fault["step"] <= event["step"] < fault["step"] + within, (fault, event)
        assert event["what"] == what
        if named:
            assert event["ranks"] == [fault["on"]], (fault, event)
            assert event["is_certain"]


def named_tensor(hit: str, event: dict) -> bool:
    """A difference that has spread within a step is told by the first tensor that it is in: of the same parameter."""
    return event["tensors"][0].split("/")[-1] == hit.split("/")[-1]


def test_flips_in_what_ranks_hold_alike_are_found_and_named(tmp_path, pool):
    """Four replicas: the one that differs from the others."""
    made = spec({**SMALL, **DP4, **REPLICAS})
    faults = flips(6, ranks=4, kinds=("master", "state", "weights"), seed=1, steps=range(1, 8))
    results = pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=4)
    check_found(results, faults, within=EVERY)
    for number in range(len(faults)):
        assert named_tensor(hit_of(results, number), results[0][number]["suspected"][0])
    text = results[0][0]["end"]
    assert text.startswith("HardwareError: step ")
    assert f"rank {faults[0]['on']} of 4 (host " in text
    assert "than other ranks, which should be a copy; ranks " in text
    assert "Nothing was saved since they last agreed; step 0 was the last that was found in order" in text


@pytest.mark.parametrize("adamw", ["torch", "reference"])
def test_of_two_copies_both_are_named(adamw, tmp_path, pool):
    """reference: updated as on a GPU, by an implementation of the registry."""
    made = spec({**SMALL, **DP2, **REPLICAS, "kernels.adamw": adamw})
    faults = flips(2, ranks=2, kinds=("master", "state"), seed=2, steps=range(2, 5))
    results = pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=2)
    check_found(results, faults, within=EVERY, named=False)
    for number in range(2):
        (event,) = results[0][number]["suspected"]
        assert (event["ranks"], event["is_certain"]) == ([0, 1], False)
        assert "which of them is wrong can't be told from this" in results[0][number]["end"]


def test_comparing_nothing_is_refused(tmp_path, pool):
    """What the rule can't know: stages that share nothing, each in shards."""
    layout = {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "1f1b"}, **FSDP}
    made = spec({**SMALL, **layout, **REPLICAS, "train.global_batch": 8, "train.micro_batch": 1})
    results = pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), [{"on": 9, "step": 1}], ranks=4)
    for of_rank in results:
        assert of_rank[0]["code"] == 64
        assert "train.checks.replicas_every=5 compares what several ranks hold alike, and none do" in of_rank[0]["end"]


def test_reading_memory_again_tells_which_of_two_it_is(tmp_path, pool):
    made = spec({**SMALL, **DP2, "train.checks": {"replicas_every": EVERY, "state": 1.0}})
    faults = flips(3, ranks=2, kinds=("master", "state", "weights"), seed=3, steps=range(2, 8))
    results = pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=2)
    check_found(results, faults, within=1, what="memory")
    for number in range(len(faults)):
        assert results[0][number]["suspected"][0]["tensors"] == [hit_of(results, number)]


@pytest.mark.parametrize("layout", [FSDP, ZERO1], ids=["fsdp", "zero1"])
def test_flips_in_shards_are_found_at_once_at_rate_1(layout, tmp_path, pool):
    made = spec({**SMALL, **layout, "train.checks": {"state": 1.0}})
    faults = flips(3, ranks=2, kinds=("master", "state", "weights"), seed=4, steps=range(2, 10))
    # rows that pad the vocabulary are memory, too: rank 1 holds nothing else of the embedding
    faults.append({"on": 1, "step": 3, "kind": "master", "seed": 0, "name": "model/embed.weight"})
    results = pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=2)
    check_found(results, faults, within=1, what="memory")
    for number in range(len(faults)):
        assert results[0][number]["suspected"][0]["tensors"] == [hit_of(results, number)]


@pytest.mark.parametrize(
    "layout", [DP2, FSDP, pytest.param(ZERO1, marks=pytest.mark.slow)], ids=["dp", "fsdp", "zero1"]
)
def test_wrong_gradients_are_found_by_computing_again(layout, tmp_path, pool):
    made = spec({**SMALL, **layout, "train.deterministic": True, "train.checks": {"recompute": 1.0}})
    faults = flips(3, ranks=2, kinds=("gradient",), seed=5, steps=range(1, 10))
    results = pool.run(troubles.with_wrong_gradients, made.model_dump_json(), str(tmp_path), faults, ranks=2)
    check_found(results, faults, within=1, what="recompute")
    assert "computes the same step twice and comes to another gradient of " in results[0][0]["end"]


def test_a_flip_that_makes_nan_is_the_hardware_s(tmp_path, pool):
    """Of an exponent: the rank is named, not a learning rate, and nothing is skipped for it."""
    made = spec({**SMALL, **DP4, "train.checks": {"replicas_every": 12}, "train.numbers": {"skips": 3}})
    # found among random ones: an exponent of the embedding or so
    faults = [{"on": 1, "step": 1, "kind": "weights", "seed": 1912169913}]
    results = pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=4)
    check_found(results, faults, within=1)
    assert named_tensor(hit_of(results, 0), results[0][0]["suspected"][0])
    unchecked = spec({**SMALL, **DP4})
    ((found, *_), *_) = pool.run(
        troubles.with_flips, unchecked.model_dump_json(), str(tmp_path / "unchecked"), faults, ranks=4
    )
    assert found["code"] == 76


def test_computing_again_tells_which_of_two_copies_it_is(tmp_path, pool):
    """A rank that has computed wrongly, and does so again."""
    made = spec({**SMALL, **DP2, **REPLICAS, "train.deterministic": True})
    faults = [{"on": 1, "step": 3, "kind": "master", "seed": 5, "always_wrong": True}]
    results = pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=2)
    check_found(results, faults, within=EVERY)


def test_nothing_is_saved_once_copies_differ(tmp_path, pool):
    """A checkpoint between the flip and the next comparison is looked at, too."""
    made = spec({**SMALL, **DP4, "checkpoint.every": 2, "train.checks": {"replicas_every": 12}})
    faults = [{"on": 2, "step": 6, "kind": "master", "seed": 9}]
    results = pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=4)
    check_found(results, faults, within=1)
    assert results[0][0]["saved"] == [2, 4]
    assert "step 4 was the last that was found in order" in results[0][0]["end"]


LAYOUTS = {
    "dp4": DP4,
    "tp2 dp2": {"parallelism.tp": 2, **DP2},
    "tp2 sequence parallel": {"parallelism.tp": 2, "parallelism.sequence_parallel": True, **DP2},
    "hsdp": {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "hsdp", **DP2},
    "cp2 zero1": {"parallelism.cp": 2, "parallelism.dp_shard": 2, "parallelism.dp_strategy": "zero1"},
    "pp2 dp2": {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "1f1b"}, **DP2},
    "zero bubble": {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "zb_h1"}, **DP2},
    "ep2 dp2": {
        "model.moe": {
            "n_experts": 4,
            "top_k": 2,
            "router": {"score": "sigmoid", "expert_bias": True, "bias_rate": 0.02},
        },
        "parallelism.ep": 2,
        **DP4,
    },
    "muon": {"optim": {"kind": "muon", "lr": 1e-2, "schedule": {"warmup_steps": 4}}, **DP2},
    "fp16": {"precision": {"kind": "fp16", "initial_scale": 2.0**24}, **DP2},
    "fp8 delayed": {
        "model.n_layers": 4,
        "model.n_heads": 2,
        "precision": {"kind": "fp8", "recipe": "delayed", "amax_history": 4, "first_layers_bf16": 1},
        **DP2,
    },
}


# What the others hold in another combination.
SLOW = ("dp4", "tp2 sequence parallel", "hsdp", "cp2 zero1", "pp2 dp2", "muon", "fp16", "fp8 delayed")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in LAYOUTS])
def test_nothing_is_found_where_nothing_is_wrong(name, tmp_path, pool):
    checks = {"replicas_every": 2, "state": 1.0, "recompute": 1.0}
    content = {**SMALL, "train.steps": 5, "train.global_batch": 8, "train.micro_batch": 1, "checkpoint.every": 4}
    made = spec({**content, "train.deterministic": True, **LAYOUTS[name], "train.checks": checks})
    results = pool.run(troubles.is_clean, made.model_dump_json(), str(tmp_path), ranks=made.world_size)
    for result in results:
        assert (result["end"], result["step"], result["agreed"]) == ("", 5, 5)
        assert result["copies"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_a_hundred_flips_in_what_ranks_hold_alike(form, tmp_path, pool):
    """Issue 21, silent corruption: all found within N steps, and named."""
    made = spec({**SMALL, **DP4, **REPLICAS, "precision.kind": form})
    for number in range(10):
        faults = flips(10, ranks=4, kinds=("master", "state", "weights"), seed=100 + number, steps=range(1, 8))
        folder = tmp_path / str(number)
        results = pool.run(troubles.with_flips, made.model_dump_json(), str(folder), faults, ranks=4)
        check_found(results, faults, within=EVERY)
        for one in range(len(faults)):
            assert named_tensor(hit_of(results, one), results[0][one]["suspected"][0])


def found_share(results, what):
    """Of the runs, those in which something was found; all of it is right."""
    found = 0
    for first in results[0]:
        if first["code"] == 77:
            (event,) = first["suspected"]
            assert event["what"] == what
            found += 1
        else:
            # an exponent where nobody looked may still make NaN, which names nobody
            assert first["code"] in (0, 76), first
    return found / len(results[0])


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_flips_in_shards_are_found_as_often_as_memory_is_read_again(rate, tmp_path, pool):
    """At rate 1 all of 100; at 0.1 those before whose update it was read: of steps in a row one in ten."""
    made = spec({**SMALL, **FSDP, "train.checks": {"state": rate}})
    faults = []
    for number in range(10):
        faults += flips(10, ranks=2, kinds=("master", "state", "weights"), seed=200 + number, steps=range(2, 12))
    results = [[], []]
    for begin in range(0, 100, 20):
        folder = tmp_path / str(begin)
        part = pool.run(troubles.with_flips, made.model_dump_json(), str(folder), faults[begin : begin + 20], ranks=2)
        results = [of_rank + more for of_rank, more in zip(results, part, strict=True)]
    looked_at = sum(sampled(fault["step"] - 1, rate) for fault in faults) / len(faults)
    assert found_share(results, "memory") == looked_at
    assert looked_at == 1 if rate == 1 else 0.02 <= looked_at <= 0.25


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("layout", [DP2, FSDP], ids=["dp", "fsdp"])
def test_wrong_gradients_are_found_as_often_as_steps_are_computed_again(layout, rate, tmp_path, pool):
    made = spec({**SMALL, **layout, "train.deterministic": True, "train.checks": {"recompute": rate}})
    faults = []
    for number in range(5):
        faults += flips(10, ranks=2, kinds=("gradient",), seed=300 + number, steps=range(1, 12))
    results = [[], []]
    for begin in range(0, 50, 10):
        folder = tmp_path / str(begin)
        part = pool.run(
            troubles.with_wrong_gradients, made.model_dump_json(), str(folder), faults[begin : begin + 10], ranks=2
        )
        results = [of_rank + more for of_rank, more in zip(results, part, strict=True)]
    looked_at = sum(sampled(fault["step"], rate) for fault in faults) / len(faults)
    # a bit of a gradient may spoil the loss: such an update is skipped, or ends the run, before anybody is named
    assert found_share(results, "recompute") == looked_at
    assert looked_at == 1 if rate == 1 else 0.02 <= looked_at <= 0.25


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_found_in_ten_thousand_clean_steps(ranks, tmp_path):
    checks = {"state": 1.0, "recompute": 0.2}
    if ranks > 1:
        checks["replicas_every"] = 3
    content = {
        "model": {"kind": "decoder", "n_layers": 1, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "d_ffn": 8},
        "model.vocab_size": 37,
        "data": {"kind": "synthetic", "vocab_size": 37, "seq_len": 4},
    }
    made = spec(
        {
            **content,
            "parallelism.dp_replicate": ranks,
            "precision.kind": "bf16",
            "train.steps": 10_000,
            "train.global_batch": ranks,
            "checkpoint.every": 1000,
            "checkpoint.keep": 1,
            "train.deterministic": True,
            "train.checks": checks,
        }
    )
    patient = RankPool(timeout=900)
    with patient:
        results = patient.run(troubles.is_clean, made.model_dump_json(), str(tmp_path), ranks=ranks)
    for result in results:
        assert (result["end"], result["step"], result["agreed"]) == ("", 10_000, 10_000)
