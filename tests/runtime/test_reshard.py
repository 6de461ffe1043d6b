"""A run goes on with another layout: the same samples, and the same numbers as a run that never changed."""

import numpy as np
import pytest

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from tests.families import GPT2
from tests.runtime import lives
from tests.runtime.specs import SGD, spec

ONE = {"parallelism.tp": 1, "parallelism.dp_replicate": 1}
TP = {"parallelism.tp": 2, "parallelism.dp_replicate": 1}
DP = {"parallelism.tp": 1, "parallelism.dp_replicate": 2}
HALF = 12
# Measured: at most 5e-16 of a loss or norm, 3e-15 of a weight or of optimizer state.
CLOSE = 1e-12
GPT = {"model": GPT2 | {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 37}}
CASES = {
    "tp2 to dp2, adamw": (TP, DP, {}),
    "dp2 to tp2, adamw, tied": (DP, TP, {"model.tied_embeddings": True}),
    "tp2 to dp2, sgd, tied gpt": (TP, DP, {"optim": SGD, **GPT}),
    "dp2 to tp2, sgd, dropout": (DP, TP, {"optim": SGD, "model.dropout": 0.1}),
    "one to tp2": (ONE, TP, {}),
    "dp2 to one, batch ramp": (DP, ONE, {"train.batch_ramp": {"start": 2, "increment": 2, "samples": 40}}),
    "tp2, another padding": (
        TP | {"model.vocab_pad_to": 8},
        TP | {"model.vocab_pad_to": 1, "parallelism.sequence_parallel": False},
        {},
    ),
}


def train(pool, folder, changes, steps):
    made = spec({**changes, "train.steps": steps, "optim.schedule.decay_steps": 2 * HALF, "train.eval_every": 6})
    # the whole order, so that the first half is of the same one
    whole = made.model_copy(update={"segments": spec({**changes, "train.steps": 2 * HALF}).segments})
    return pool.run(lives.live, whole.model_dump_json(), str(folder), ranks=made.world_size)[0]


def final(folder):
    with Store(folder).newest_good(SoloComm(), repair=False) as reader:
        return reader.step, {n: reader.read(n).numpy() for n in reader.names() if not n.startswith("rng/")}


# what the other cases hold in another combination
SLOW = (
    "tp2, another padding",
    "tp2 to dp2, sgd, tied gpt",
    "one to tp2",
    "dp2 to tp2, sgd, dropout",
    "tp2 to dp2, adamw",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_another_layout_goes_on_in_the_same_run(name, tmp_path, pool):
    before, after, changes = CASES[name]
    undisturbed = train(pool, tmp_path / "whole", {**changes, **before}, 2 * HALF)
    first = train(pool, tmp_path / "moved", {**changes, **before}, HALF)
    second = train(pool, tmp_path / "moved", {**changes, **after}, 2 * HALF)
    moved = first + second
    keys = ("step", "first_sample", "samples", "tokens", "lr", "sequence_tokens")
    assert [[e.get(k) for k in keys] for e in moved] == [[e.get(k) for k in keys] for e in undisturbed]
    for one, other in zip(moved, undisturbed, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=CLOSE, abs=0), one["step"]
        if "grad_norm" in one:
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=CLOSE, abs=0), one["step"]
    step, weights = final(tmp_path / "moved")
    truth_step, truth = final(tmp_path / "whole")
    assert step == truth_step == 2 * HALF
    assert weights.keys() == truth.keys()
    for name, expected in truth.items():
        assert weights[name].shape == expected.shape
        assert np.abs(weights[name] - expected).max() <= CLOSE * np.abs(expected).max(), name


@pytest.mark.parametrize("layout", [ONE, TP, DP])
def test_ranks_read_the_samples_that_the_history_tells(layout, pool):
    made = spec({**layout, "train.micro_batch": 1, "train.batch_ramp": {"start": 2, "increment": 2, "samples": 9}})
    by_rank = pool.run(lives.sample_ids, made.model_dump_json(), ranks=made.world_size)
    tp = made.parallelism.tp
    for step, (first, count, _) in enumerate(by_rank[0]):
        taken = sorted(i for rank in by_rank[::tp] for i in rank[step][2])
        assert taken == list(range(first, first + count))
        for group in range(0, len(by_rank), tp):
            assert all(by_rank[group + t][step] == by_rank[group][step] for t in range(tp))
    ends = [first + count for first, count, _ in by_rank[0]]
    assert [first for first, _, _ in by_rank[0]] == [0, *ends[:-1]]
