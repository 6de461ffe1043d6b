"""On a GPU the host reads a step late: bad numbers are taken back, bad hardware is found, all the same."""

import pytest
import torch

from megaspec.estimate.target import Target
from tests.ranks import needs_gpus
from tests.runtime import lives, troubles
from tests.runtime.specs import spec
from tests.runtime.test_checks import check_found, flips, hit_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

BASE = {
    "train.steps": 16,
    "train.deterministic": True,
    "checkpoint.every": 4,
    "model.dropout": 0.1,
    "kernels.compile": "none",
    "precision.kind": "bf16",
}


def h200(gpus: int) -> Target:
    return Target(gpus=gpus, gpu="NVIDIA H200", sm=90, cores=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_going_back_is_to_the_bit_a_run_that_was_told_from_the_start(ranks, tmp_path, gpu_pool):
    needs_gpus(ranks)
    content = {**BASE, "parallelism.dp_replicate": ranks}
    content["train.numbers"] = {"skips": 1, "within": 6, "rollbacks": 2, "spikes": {"window": 8, "threshold": 100.0}}
    made = spec(content, h200(ranks)).model_dump_json()
    fault = {"on": ranks - 1, "what": "loss:", "steps": [10, 11]}
    back = gpu_pool.run(troubles.live_through, made, str(tmp_path / "back"), fault, ranks=ranks)[0]
    assert back["end"] == ""
    ahead = spec({**content, "train.skip_steps": [{"first": 10, "last": 11}]}, h200(ranks)).model_dump_json()
    nothing = {"on": 0, "what": "loss:", "steps": []}
    gpu_pool.run(troubles.live_through, ahead, str(tmp_path / "told"), nothing, ranks=ranks)
    whole, moved = lives.read_all(tmp_path / "told"), lives.read_all(tmp_path / "back")
    assert moved.keys() == whole.keys()
    for step, (tensors, state) in whole.items():
        assert moved[step][0] == tensors, step
        assert moved[step][1]["numbers"]["values"] == state["numbers"]["values"]


def test_memory_that_changes_is_found(tmp_path, gpu_pool):
    made = spec({**BASE, "train.checks": {"state": 1.0}}, h200(1))
    faults = flips(6, ranks=1, kinds=("master", "state", "weights"), seed=11, steps=range(2, 10))
    results = gpu_pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=1)
    check_found(results, faults, within=1, what="memory")
    for number in range(len(faults)):
        assert results[0][number]["suspected"][0]["tensors"] == [hit_of(results, number)]
    assert "GPU-" in results[0][0]["suspected"][0]["devices"][0]


def test_wrong_gradients_are_found(tmp_path, gpu_pool):
    needs_gpus(2)
    content = {**BASE, "parallelism.dp_shard": 2, "parallelism.dp_strategy": "fsdp"}
    made = spec({**content, "train.checks": {"recompute": 1.0}}, h200(2))
    faults = flips(4, ranks=2, kinds=("gradient",), seed=12, steps=range(1, 8))
    results = gpu_pool.run(troubles.with_wrong_gradients, made.model_dump_json(), str(tmp_path), faults, ranks=2)
    check_found(results, faults, within=1, what="recompute")


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "fsdp"])
def test_nothing_is_found_where_nothing_is_wrong(strategy, tmp_path, gpu_pool):
    needs_gpus(2)
    checks = {"state": 1.0, "recompute": 1.0}
    layout = {"parallelism.dp_shard": 2, "parallelism.dp_strategy": strategy}
    if strategy == "replicate":
        layout = {"parallelism.dp_replicate": 2}
    if strategy != "fsdp":
        checks["replicas_every"] = 2
    made = spec({**BASE, **layout, "train.checks": checks}, h200(2))
    for result in gpu_pool.run(troubles.is_clean, made.model_dump_json(), str(tmp_path), ranks=2):
        assert (result["end"], result["step"]) == ("", 16)


def test_of_two_copies_both_are_named(tmp_path, gpu_pool):
    needs_gpus(2)
    made = spec({**BASE, "parallelism.dp_replicate": 2, "train.checks": {"replicas_every": 5}}, h200(2))
    faults = flips(2, ranks=2, kinds=("master", "state"), seed=13, steps=range(2, 3))
    results = gpu_pool.run(troubles.with_flips, made.model_dump_json(), str(tmp_path), faults, ranks=2)
    check_found(results, faults, within=5, named=False)
