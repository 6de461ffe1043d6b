"""Weights of low precision: what is set lasts, in the master weights and in the model's copy; what would not is
refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megaspec.core.errors import UsageError
from megaspec.data.loader import read_batch
from megaspec.data.synthetic import SyntheticSource
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise
from megaspec.runtime.step import train_step
from megaspec.runtime.weights import set_weights, weights
from tests.runtime.specs import SGD, spec

BF16 = {"precision": {"kind": "bf16"}}
NARROW = {"master": "fp16", "exp_avg": "bf16", "exp_avg_sq": "bf16"}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp16": {"precision": {"kind": "fp16"}},
    "fp32": {"precision": {"kind": "fp32"}},
    "half masters": {**BF16, "optim.formats": NARROW, "parallelism.dp_strategy": "zero1"},
    "offload": {**BF16, "parallelism.offload": {"optimizer": 0.5}},
    "sgd": {**BF16, "optim": SGD},
    "muon": {**BF16, "optim": {"kind": "muon", "lr": 1e-2, "schedule": {"warmup_steps": 4}}},
}


def built_of(changes: dict[str, Any]) -> TrainState:
    built = build(spec(changes), mesh=Mesh({}, rank=0, device=torch.device("cpu")))
    initialise(built)
    return built


def step(built: TrainState, *, lr: float) -> float:
    """A step without weight decay. -> its loss"""
    source = SyntheticSource(built.spec.data, split="train", seed=built.spec.data.seed, segments=(100,))
    batch = read_batch(source, [0, 1, 2, 3], document_mask=False)
    scaler = build_scaler(built.spec.precision, device=built.device)
    result = train_step(built, [batch], lr=lr, weight_decay=0.0, scaler=scaler)
    assert result.skipped.item() == 0
    return result.loss.item()


def other_values(built: TrainState) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {name: 0.05 * torch.randn(value.shape, generator=draw) for name, value in weights(built).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_set_outlasts_a_step(kind: str) -> None:
    """A step of no length writes the master weights over the model's copy."""
    built = built_of(KINDS[kind])
    values = other_values(built)
    set_weights(built, values)
    for _ in range(2):
        found = weights(built)
        copies = weights(built, dtype=built.parameters["embed.weight"].dtype)
        for name, value in values.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], value), name
            held = built.parameters[name].detach()[: len(value)]
            assert torch.equal(held, copies[name]), name
        step(built, lr=0.0)


def test_one_weight_may_be_set_alone() -> None:
    built = built_of(BF16)
    before = weights(built)
    set_weights(built, {"norm.weight": 2 * before["norm.weight"].to(torch.bfloat16)})
    after = weights(built)
    assert torch.equal(after.pop("norm.weight"), 2 * before["norm.weight"])
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert not torch.equal(weights(built, names="norm.weight")["norm.weight"], before["norm.weight"])


def test_what_was_read_is_a_copy() -> None:
    built = built_of({"precision": {"kind": "fp32"}})
    found = weights(built)
    kept = {name: value.clone() for name, value in found.items()}
    step(built, lr=0.1)
    assert all(torch.equal(value, kept[name]) for name, value in found.items())
    assert any(not torch.equal(value, kept[name]) for name, value in weights(built).items())


def test_rows_that_pad_the_vocabulary_stay_zero() -> None:
    built = built_of({**BF16, "model.vocab_pad_to": 64})
    values = other_values(built)
    assert values["embed.weight"].shape == (37, 32)
    set_weights(built, values)
    assert built.parameters["embed.weight"].shape == (64, 32)
    assert not built.parameters["embed.weight"][37:].any()
    assert not built.optimizer.masters["embed.weight"][37:].any()


WRONG: dict[str, tuple[Any, str]] = {
    "unknown": (
        lambda w: {"embd.weight": w["embed.weight"]},
        "embd.weight: this model has no such weight; did you mean",
    ),
    "far": (lambda w: {"q": w["embed.weight"]}, "q: this model has no such weight; its weights are embed.weight, "),
    "shape": (
        lambda w: {"embed.weight": torch.zeros(64, 32)},
        "embed.weight has shape [64, 32], this model has [37, 32]; give the whole tensor, without padding",
    ),
    "kind": (lambda w: {"norm.weight": torch.ones(32, dtype=torch.int64)}, "norm.weight has dtype torch.int64"),
    "array": (lambda w: {"norm.weight": np.ones(32)}, "norm.weight is a ndarray, weights are torch tensors"),
    "meta": (lambda w: {"norm.weight": torch.ones(32, device="meta")}, "norm.weight is on the meta device"),
    "nothing": (lambda w: {}, "set_weights: there are no values; give {name: tensor}"),
    "no mapping": (lambda w: [*w.values()], "set_weights: there are no values; give {name: tensor}"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_told_and_nothing_is_set(what: str) -> None:
    built = built_of(BF16)
    before = weights(built)
    make, words = WRONG[what]
    values = make(before)
    if isinstance(values, dict) and values:
        values["head.weight"] = before["head.weight"] + 1
    with pytest.raises(UsageError) as caught:
        set_weights(built, values)
    assert words in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in weights(built).items())


def test_all_that_does_not_fit_is_told_at_once() -> None:
    built = built_of(BF16)
    with pytest.raises(UsageError) as caught:
        set_weights(built, {name: torch.zeros(1, 2, 3) for name in (*weights(built), "more")})
    lines = str(caught.value).splitlines()
    assert len(lines) == len(weights(built)) + 1
    many = {f"more.{i}": torch.zeros(1) for i in range(100)}
    with pytest.raises(UsageError, match="80 more do not fit"):
        set_weights(built, many)


def test_a_tied_head_is_set_as_the_embedding() -> None:
    built = built_of({**BF16, "model.tied_embeddings": True})
    assert "head.weight" not in weights(built)
    with pytest.raises(UsageError, match=r"head.weight.*its output head is the embedding .*set embed.weight"):
        set_weights(built, {"head.weight": torch.zeros(37, 32)})


def test_a_name_that_nothing_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"norm.wieght: .* did you mean norm.weight"):
        weights(built_of(BF16), names=["norm.wieght"])


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_load_state_dict_refuses_what_a_step_would_undo(kind: str) -> None:
    built = built_of(KINDS[kind])
    state = {name: torch.zeros_like(value) for name, value in built.model.state_dict().items()}
    part = {name: torch.zeros_like(value) for name, value in built.model.norm.state_dict().items()}
    before = weights(built)
    for load in (lambda: built.model.load_state_dict(state), lambda: built.model.norm.load_state_dict(part)):
        with pytest.raises(UsageError, match=r"megaspec\.set_weights\(built, values\)"):
            load()
    assert all(torch.equal(value, before[name]) for name, value in weights(built).items())
    assert built.parameters["norm.weight"].all()
