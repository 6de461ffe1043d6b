"""train.trainable: what is frozen stays, what is trained learns as in a plain loop, and runs go on in other layouts."""

import json

import numpy as np
import pytest
import torch

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.core.errors import RecipeError, UsageError
from megaspec.estimate.target import Target
from megaspec.optim.freeze import PartOptimizer
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.resolve.resume import fork, resume
from megaspec.rules.belonging import fork_point
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import build, initialise, plain_model
from megaspec.runtime.step import train_step
from megaspec.runtime.weights import gradients, weights
from megaspec.spec import Spec
from megaspec.train.trainable import trained_names
from megaspec.verify.parity import divide
from tests.parity.cases import Case, batches_of, spec_of
from tests.runtime import lives
from tests.runtime.specs import recipe, spec

CPU = torch.device("cpu")
SOME = ["layers.1.*", "norm.*"]
STEPS = 3


def one_rank(made: Spec):
    built = build(made, mesh=Mesh({"tp": 1, "dp_replicate": 1}, rank=0, device=CPU))
    initialise(built)
    return built


@pytest.mark.parametrize("trainable", ["upper", "head", "norms", "embedding"])
def test_one_rank_trains_what_a_plain_loop_trains(trainable):
    """Clipping and weight decay included; frozen weights are the same to the bit."""
    case = Case(n_layers=4, trainable=trainable, mask="uneven", attention="reference", cross_entropy="reference")
    made = spec_of(case)
    built = one_rank(made)
    model = plain_model(made, device=CPU)
    start = {name: one.detach().clone() for name, one in model.global_parameters().items()}
    learning = {name: one for name, one in model.global_parameters().items() if one.requires_grad}
    assert learning.keys() == trained_names(model.facts, made.train.trainable)
    decayed = [one for one in learning.values() if one.dim() > 1]
    others = [one for one in learning.values() if one.dim() == 1]
    optim = made.optim
    plain = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    scaler = build_scaler(made.precision, device=CPU)
    for batch in batches_of(case, [], STEPS):
        micro = divide(batch, mesh=built.mesh, micro_batch=made.train.micro_batch)
        result = train_step(built, micro, lr=optim.lr, weight_decay=optim.weight_decay, scaler=scaler)
        share = batch.mask.to(torch.float64) / batch.mask.sum()
        plain.zero_grad()
        loss = model.loss(batch.tokens, batch.labels, share)
        loss.backward()
        norm = torch.cat([one.grad.flatten() for one in learning.values()]).norm()
        for one in learning.values():
            one.grad *= optim.clip / norm.clamp(min=optim.clip)
        plain.step()
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-10)
    here = weights(built)
    for name, one in model.global_parameters().items():
        if name in learning:
            assert not torch.equal(here[name], start[name]), name
            torch.testing.assert_close(here[name], one.detach(), rtol=1e-8, atol=1e-10)
        else:
            assert torch.equal(here[name], start[name]), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_frozen_weight_lies_in_the_model_alone(precision):
    built = one_rank(spec({"precision": {"kind": precision}, "train.trainable": SOME}))
    trained = {name for name, facts in built.facts.items() if facts.is_trained}
    assert trained == {name for name in built.parameters if name.startswith("layers.1.") or name == "norm.weight"}
    assert isinstance(built.optimizer, PartOptimizer)
    for kind, tensors in built.optimizer.state().items():
        assert tensors.keys() == trained, kind
    assert built.data_parallel.gradients.keys() == trained
    for name, master in built.optimizer.masters.items():
        is_copy = master.data_ptr() != built.parameters[name].data_ptr()
        assert is_copy == (name in trained), name
        assert (master.dtype == torch.float32) == (name in trained), name
        assert built.parameters[name].requires_grad == (name in trained)
    for name, linear in built.data_parallel._linears.items():
        assert name in trained
        assert linear.main_grad is not None
    assert built.model.layers["0"].attn.wqkv.main_grad is None


def test_gradients_are_of_what_is_trained():
    built = one_rank(spec({"train.trainable": SOME}))
    made = spec_of(Case())
    batch = batches_of(Case(), [], 1)[0]
    batch = type(batch)(batch.tokens % 37, batch.labels % 37, batch.mask, batch.ids)
    seen = {}

    def look():
        seen.update(gradients(built))
        with pytest.raises(UsageError, match=r"embed.weight is frozen \(train.trainable\), and has no gradient"):
            gradients(built, names=["embed.weight"])

    scaler = build_scaler(made.precision, device=CPU)
    train_step(built, [batch], lr=0.0, weight_decay=0.0, scaler=scaler, on_gradients=look)
    assert seen.keys() == built.data_parallel.gradients.keys()


LAYOUTS = {
    "tp": {"parallelism.tp": 2, "parallelism.dp_replicate": 1},
    "zero1": {"parallelism.dp_strategy": "zero1", "parallelism.dp_shard": 2},
    "fsdp": {"parallelism.dp_strategy": "fsdp", "parallelism.dp_shard": 2},
    "pp": {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "zb_h1"}},
}


def live(pool, folder, changes, steps, **more):
    made = spec({**changes, "train.steps": steps, "optim.schedule.decay_steps": 8})
    whole = made.model_copy(update={"segments": spec({**changes, "train.steps": 8}).segments, **more})
    pool.run(lives.live, whole.model_dump_json(), str(folder), ranks=made.world_size)
    return whole


def held(folder):
    with Store(folder).newest_good(SoloComm(), repair=False) as reader:
        return {name: reader.read(name).to(torch.float64).numpy() for name in reader.names() if name[:4] != "rng/"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_holds_the_state_of_what_is_trained_and_goes_on_elsewhere(layout, tmp_path, pool):
    common = {"train.trainable": SOME, "precision": {"kind": "bf16"}}
    live(pool, tmp_path / "run", common | LAYOUTS[layout], 4)
    first = held(tmp_path / "run")
    made = spec(common)
    trained = trained_names(made.model.facts, made.train.trainable)
    assert {name[len("model/") :] for name in first if name.startswith("model/")} == made.model.facts.weights().keys()
    assert {name for name in first if name.startswith("optim/")} == {
        f"optim/{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in trained
    }
    # read on one rank and saved from there: to the bit
    pool.run(lives.save_anew, made.model_dump_json(), str(tmp_path / "run"), str(tmp_path / "anew"), ranks=1)
    again = held(tmp_path / "anew")
    assert again.keys() == first.keys()
    for name, values in first.items():
        assert np.array_equal(again[name], values), name
    # and on from it
    live(pool, tmp_path / "run", common, 6)
    last = held(tmp_path / "run")
    for name, values in last.items():
        is_frozen = name.startswith("model/") and name[len("model/") :] not in trained
        assert np.array_equal(values, first[name]) == is_frozen, name


def test_a_change_asks_for_a_fork():
    old = spec({"train.trainable": SOME})
    with pytest.raises(RecipeError, match=r"train.trainable=.* changes the experiment, .*give --fork NAME"):
        resume(old, recipe({"train.trainable": ["layers.0.*"]}), Target(cores=2), Facts(run_dir="run"))


@pytest.mark.parametrize(
    ("there", "here", "is_anew"), [(SOME, None, True), (None, SOME, False), (SOME, ["layers.1.*"], False)]
)
def test_a_fork_keeps_the_state_or_begins_anew(there, here, is_anew, tmp_path, pool):
    """What was frozen has no moments, and moments are corrected by one count of updates."""
    old = live(pool, tmp_path / "run", {"train.trainable": there}, 4)
    before = held(tmp_path / "run")
    with Store(tmp_path / "run").newest_good(SoloComm(), repair=False) as reader:
        began = fork_point(reader.manifest)
    new = fork(
        old,
        recipe({"train.trainable": here, "train.steps": 8}),
        Target(cores=2),
        Facts(run_dir="new"),
        done_steps=4,
        done_samples=16,
        forked_from=began,
    )
    (found,) = pool.run(lives.loaded, new.model_dump_json(), str(tmp_path / "run"), ranks=1)
    assert found["updates"] == (0 if is_anew else 4)
    for name, value in found["state"].items():
        if is_anew:
            assert not value.any(), name
        else:
            assert np.array_equal(value, before[name]), name
    assert json.loads(new.model_dump_json())["train"]["trainable"] == here
