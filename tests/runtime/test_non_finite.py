"""NaN and Inf end a run with what, where and which rank; a loss scale that is too high only costs a step."""

from itertools import pairwise
from math import isfinite

import pytest

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.log.jsonl import read_metrics
from megaspec_launchers.local import launch
from tests.runtime import lives
from tests.runtime.specs import make_run, spec

WEIGHT, LAYER0 = "layers.1.attn.wo.weight", "layers.0.mlp.w_down.weight"
TP, DP = {"parallelism.tp": 2}, {"parallelism.dp_replicate": 2}


def weights_are_finite(folder):
    reader = Store(folder).newest_good(SoloComm(), repair=False)
    with reader:
        return reader.step, all(bool(reader.read(n).isfinite().all()) for n in reader.names() if "rng/" not in n)


# each layout and each rank once by default
@pytest.mark.parametrize(
    ("layout", "on"),
    [
        pytest.param(TP, 0, id="tp2-0"),
        pytest.param(DP, 1, id="dp2-1"),
        pytest.param(TP, 1, id="tp2-1", marks=pytest.mark.slow),
        pytest.param(DP, 0, id="dp2-0", marks=pytest.mark.slow),
    ],
)
def test_a_weight(layout, on, tmp_path, factory, capfd):
    run = make_run(tmp_path / "run", {**layout, "checkpoint.every": 2, "train.steps": 9})
    fault = {"on": on, "what": f"weight:{WEIGHT}", "step": 6}
    assert launch_with(run, factory, fault) == 76
    said = capfd.readouterr().err
    assert f"step 6: loss=nan is not finite, first seen in the weight {WEIGHT} on rank {on} of 2" in said
    assert "look at samples 20 to 23" in said
    assert "Traceback" not in said
    assert weights_are_finite(run) == (4, True)
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3, 4, 5]
    assert (lines[-1]["event"], lines[-1]["how"]) == ("end", "NonFiniteError")
    # the fault is gone: the run goes on from what it saved
    assert launch_with(run, factory, None) == 0
    assert weights_are_finite(run) == (9, True)


def launch_with(run, factory, fault):
    return launch(
        str(run),
        ranks=2,
        entry="tests.runtime.lives:main",
        timeout_seconds=20,
        arguments={"fault": fault},
        factory=factory,
    )


@pytest.mark.parametrize(
    ("layout", "what", "words"),
    [
        # a sum over the ranks: all of them have it
        (DP, f"gradient:{LAYER0}", f"gradient of {LAYER0} on ranks 0, 1 of 2"),
        (TP, f"gradient:{LAYER0}", f"gradient of {LAYER0} on rank 1 of 2"),
        (DP, "loss:", "loss of rank 1 of 2"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_where_it_was_first_seen(layout, what, words, value, tmp_path, pool):
    made = spec({**layout, "train.steps": 6})
    fault = {"on": 1, "what": what, "step": 3, "value": value}
    told = pool.run(lives.fails, made.model_dump_json(), str(tmp_path), fault, ranks=2)
    assert told[0] == told[1]
    name, text, updates = told[0]
    assert name == "NonFiniteError"
    number = "loss=" if what == "loss:" else "gradient norm="
    assert text.startswith(f"step 3: {number}{value} is not finite, first seen in the {words}; the update was not")
    assert updates == 2


def test_the_first_gradient_of_the_backward_pass_is_named(tmp_path, pool):
    """A NaN that goes through the layers below it does not hide where it began."""
    made = spec({"train.steps": 6})
    fault = {"on": 0, "what": "backward:layers.1.mlp.w_down.weight", "step": 2}
    ((_, text, _),) = pool.run(lives.fails, made.model_dump_json(), str(tmp_path), fault, ranks=1)
    assert "first seen in the gradient of layers.1.mlp.w_down.weight on rank 0 of 1" in text


FP16 = {"kind": "fp16", "growth_interval": 1000, "hysteresis": 1}


@pytest.mark.parametrize("optim", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_loss_scale_that_is_too_high_costs_steps_and_changes_nothing(optim, tmp_path, pool):
    changes = {"precision": FP16 | {"initial_scale": 2.0**30}, "optim.kind": optim, "checkpoint.every": 1, **TP}
    made = spec({**changes, "train.steps": 20})
    events = pool.run(lives.live, made.model_dump_json(), str(tmp_path), ranks=2)[0]
    skipped = [e["step"] for e in events if e["skipped"]]
    assert skipped == list(range(1, len(skipped) + 1))
    assert 2 <= len(skipped) < 20
    for event, next_event in pairwise(events):
        assert next_event["loss_scale"] == event["loss_scale"] / (2 if event["skipped"] else 1)
    saved = lives.read_all(tmp_path)
    trained = {s: {n: d for n, d in tensors.items() if "rng/" not in n} for s, (tensors, _) in saved.items()}
    for step in range(2, 21):
        has_moved = trained[step] != trained[step - 1]
        assert has_moved == (step not in skipped), step
        assert saved[step][1]["optimizer_updates"] == step - sum(s <= step for s in skipped)
    assert all(isfinite(e["grad_norm"]) for e in events if not e["skipped"])


@pytest.mark.parametrize(("low", "fails_at"), [(2.0**30, 1), (2.0**28, 3)])
def test_an_overflow_at_the_lowest_loss_scale_ends_the_run(low, fails_at, tmp_path, pool):
    """The lowest scale is tried before the run is given up."""
    made = spec({"precision": FP16 | {"initial_scale": 2.0**30, "min_scale": low}, **DP})
    nothing = {"on": 5, "what": "", "step": 1}
    name, text, _ = pool.run(lives.fails, made.model_dump_json(), str(tmp_path), nothing, ranks=2)[0]
    assert name == "NonFiniteError"
    assert text.startswith(f"step {fails_at}: gradient norm=")


def test_no_loss_scale_cures_a_loss(tmp_path, pool):
    made = spec({"precision": FP16, **DP})
    fault = {"on": 0, "what": f"weight:{WEIGHT}", "step": 2}
    name, text, _ = pool.run(lives.fails, made.model_dump_json(), str(tmp_path), fault, ranks=2)[0]
    assert name == "NonFiniteError"
    assert text.startswith("step 2: loss=nan")
