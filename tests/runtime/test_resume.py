"""Stopped after any step and gone on with: the same bytes and the same numbers as without a stop."""

import pytest

from tests.families import GPT2
from tests.runtime import lives
from tests.runtime.specs import SGD, spec

STEPS = 14
RAMP = {"train.batch_ramp": {"start": 4, "increment": 4, "samples": 40}, "train.global_batch": 12}
FP16 = {"kind": "fp16", "initial_scale": 2.0**24, "growth_interval": 3, "hysteresis": 2}
TP, DP = {"parallelism.tp": 2}, {"parallelism.dp_replicate": 2}
CASES = {
    "fp64 adamw tp2": TP,
    "fp32 sgd dp2": {"precision.kind": "fp32", "optim": SGD, **DP},
    "bf16 adamw dp2 ramp": {"precision.kind": "bf16", **DP, **RAMP},
    "fp16 adamw tp2 loss scale": {"precision": FP16, **TP},
    "fp16 sgd loss scale": {"precision": FP16, "optim": SGD},
    "bf16 sgd tp2 ramp": {"precision.kind": "bf16", "optim": SGD, **TP, **RAMP},
    "fp32 gpt tp2 dropout accumulation": {
        "precision.kind": "fp32",
        "model": GPT2 | {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 37, "dropout": 0.2},
        "train.micro_batch": 1,
        **TP,
    },
    "fp32 adamw dp2 attention dropout": {
        "precision.kind": "fp32",
        "model.attention": {"kind": "gqa", "dropout": 0.2},
        **DP,
    },
}


# What the other cases hold in another combination.
SLOW = (
    "fp64 adamw tp2",
    "fp32 sgd dp2",
    "bf16 sgd tp2 ramp",
    "fp16 sgd loss scale",
    "fp32 gpt tp2 dropout accumulation",
    # ramps are stopped in test_reshard.py as well
    "bf16 adamw dp2 ramp",
    # dropout's generators are there in each
    "fp32 adamw dp2 attention dropout",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_stopped_after_every_step(name, tmp_path, pool):
    changes = {"model.dropout": 0.1, "train.steps": STEPS, "train.eval_every": 5, "train.eval_samples": 3}
    made = spec(changes | CASES[name])
    whole = spec(changes | CASES[name] | {"checkpoint.every": 1})
    undisturbed = pool.run(lives.live, whole.model_dump_json(), str(tmp_path / "whole"), ranks=made.world_size)[0]
    stopped = pool.run(
        lives.lives, made.model_dump_json(), str(tmp_path / "stopped"), stops=STEPS, ranks=made.world_size
    )[0]
    steps = [e for e in undisturbed if "samples" in e]
    assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
    assert [e["first_sample"] for e in steps] == [0, *(e["samples"] for e in steps[:-1])]
    assert stopped == undisturbed
    expected, found = lives.read_all(tmp_path / "whole"), lives.read_all(tmp_path / "stopped")
    assert found.keys() == expected.keys() == set(range(1, STEPS + 1))
    for step, (tensors, state) in expected.items():
        assert found[step][1] == state, step
        assert found[step][0].keys() == tensors.keys()
        assert [n for n, data in tensors.items() if found[step][0][n] != data] == [], step
    if "loss scale" in name:
        scales = {state["loss_scale"]["scale"] for _, state in expected.values()}
        assert any(e["skipped"] for e in steps)
        assert len(scales) > 2
    for rank in range(made.world_size):
        assert len({tensors[f"rng/cpu/{rank}"] for tensors, _ in expected.values()}) == STEPS
