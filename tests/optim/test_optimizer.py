"""Optimizers against their formulas, written out with numpy in fp64."""

import json
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from megaspec.estimate.memory import state_bytes
from megaspec.optim.optimizer import build_optimizer
from megaspec.optim.spec import AdamWSpec, OptimizerSpec, OptimSpec

SHAPES = {"matrix": (5, 3), "norm": (4,), "other": (2, 7)}
ADAMW = {"kind": "adamw", "lr": 1.0, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
SGD = {"kind": "sgd", "lr": 1.0, "momentum": 0.7}
PLAIN = {"kind": "sgd", "lr": 1.0, "momentum": 0.0}


# By kind. An optimizer whose formula stands in a file of its own is made there, too.
FORMULAS = {"adamw": [ADAMW], "sgd": [SGD, PLAIN]}
WITH_FORMULA = [content for contents in FORMULAS.values() for content in contents]


def kinds():
    """Class of settings by kind, of every optimizer that a recipe can choose."""
    classes = get_args(get_args(OptimSpec)[0])
    return {get_args(one.model_fields["kind"].annotation)[0]: one for one in classes}


def made(content, dtype=torch.float64, *, adamw="torch"):
    torch.manual_seed(1)
    parameters = {
        name: nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for name, shape in SHAPES.items()
    }
    spec = TypeAdapter(OptimSpec).validate_json(json.dumps(content))
    return parameters, build_optimizer(parameters, spec, adamw=adamw)


def gradients(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for n, s in SHAPES.items()}


def by_formula(content, weights, steps):
    """steps: (gradients, lr, weight decay) of each update."""
    weights = {n: w.copy() for n, w in weights.items()}
    first, second = ({n: np.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    for t, (grads, lr, decay) in enumerate(steps, start=1):
        for name, weight in weights.items():
            grad, rate = grads[name], decay if weight.ndim >= 2 else 0.0
            if content["kind"] == "adamw":
                b1, b2 = content["beta1"], content["beta2"]
                first[name] = b1 * first[name] + (1 - b1) * grad
                second[name] = b2 * second[name] + (1 - b2) * grad**2
                m, v = first[name] / (1 - b1**t), second[name] / (1 - b2**t)
                weights[name] = weight - lr * (m / (np.sqrt(v) + content["eps"]) + rate * weight)
            else:
                first[name] = content["momentum"] * first[name] + grad
                weights[name] = weight - lr * (first[name] + rate * weight)
    return weights, first, second


@pytest.mark.parametrize("kind", kinds())
def test_every_optimizer_is_held_to_its_formula(kind):
    own_file = Path(__file__).parent / f"test_{kind}.py"
    assert kind in FORMULAS or own_file.exists(), f"add {kind} to FORMULAS, or {own_file.name}"


@pytest.mark.parametrize("content", WITH_FORMULA, ids=str)
def test_a_plan_counts_what_an_optimizer_keeps(content):
    parameters, optimizer = made(content, torch.bfloat16)
    kept = [*optimizer.masters.values()]
    for moments in optimizer.state().values():
        kept += moments.values()
    elements = sum(p.numel() for p in parameters.values())
    spec = TypeAdapter(OptimSpec).validate_json(json.dumps(content))
    assert sum(t.nbytes for t in kept) == elements * state_bytes(spec, width=2)


def test_a_kind_without_a_builder_does_not_train_as_another():
    class Borrowed(AdamWSpec):
        kind: Literal["borrowed"]

    with pytest.raises(AssertionError, match=r"optim\.kind=borrowed has no builder: add Borrowed to OPTIMIZERS"):
        build_optimizer({"w": torch.zeros(2, 2)}, Borrowed(kind="borrowed", lr=1.0), adamw="torch")


def test_an_optimizer_says_how_many_moments_it_keeps():
    for kind, one in kinds().items():
        assert one.n_moments is not OptimizerSpec.n_moments, kind


@pytest.mark.parametrize(
    ("content", "adamw"), [*((one, "torch") for one in WITH_FORMULA), (ADAMW, "reference")], ids=str
)
def test_updates(content, adamw):
    parameters, optimizer = made(content, adamw=adamw)
    before = {n: p.detach().numpy().copy() for n, p in parameters.items()}
    steps = []
    for step in range(6):
        lr, decay, scale = 0.1 / (step + 1), 0.05 * step, 2.0**step
        grads = gradients(step)
        steps.append(({n: g.numpy() / scale for n, g in grads.items()}, lr, decay))
        optimizer.update(
            {n: g.clone() for n, g in grads.items()},
            lr=lr,
            weight_decay=decay,
            divide_by=torch.tensor(scale, dtype=torch.float64),
            skip=torch.zeros(()),
        )
    weights, first, second = by_formula(content, before, steps)
    expected = {"exp_avg": first, "exp_avg_sq": second} if content["kind"] == "adamw" else {"velocity": first}
    assert optimizer.updates == 6
    for name, parameter in parameters.items():
        # a weight of about 1 that comes to almost nothing keeps the rounding of 1
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=1e-13, atol=1e-15)
        for kind, tensors in optimizer.state().items():
            np.testing.assert_allclose(tensors[name].numpy(), expected[kind][name], rtol=1e-13)
    assert optimizer.state().keys() == (set() if content is PLAIN else expected.keys())


@pytest.mark.parametrize("content", [ADAMW, SGD, PLAIN], ids=["adamw", "sgd", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_skipped_update_changes_no_byte(content, dtype):
    parameters, optimizer = made(content, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    one = torch.ones((), dtype=wide)

    def update(grads, skip):
        optimizer.update(grads, lr=0.1, weight_decay=0.1, divide_by=one, skip=torch.tensor(float(skip)))

    def everything():
        tensors = [*parameters.values(), *optimizer.masters.values()]
        tensors += [t for kind in optimizer.state().values() for t in kind.values()]
        return [t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]

    update(gradients(1, wide), 0)
    before, updates = everything(), optimizer.updates
    poisoned = gradients(2, wide)
    for grad in poisoned.values():
        grad.view(-1)[0] = float("nan")
        grad.view(-1)[1] = float("inf")
    update(poisoned, 1)
    assert everything() == before
    assert optimizer.updates == updates == 1
    update(gradients(2, wide), 0)
    assert everything() != before
    assert optimizer.updates == 2


@pytest.mark.parametrize("content", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_keep_what_the_format_of_the_model_can_not(content, dtype):
    parameters, optimizer = made(content, dtype)
    start = {n: m.clone() for n, m in optimizer.masters.items()}
    for step in range(20):
        optimizer.update(
            gradients(step, torch.float32), lr=1e-5, weight_decay=0.0, divide_by=torch.ones(()), skip=torch.zeros(())
        )
    for name, master in optimizer.masters.items():
        assert master.dtype == torch.float32
        assert not torch.equal(master, start[name])
        assert torch.equal(parameters[name], master.to(dtype))
        # each update alone is lost in the format of the model
        assert (master - start[name]).abs().max() < 20 * 1e-4


def test_state_that_was_read_goes_on_as_if_it_had_not_stopped():
    ends = []
    for stop in (None, 3):
        parameters, optimizer = made(ADAMW)
        for step in range(6):
            if step == stop:
                weights = {n: m.clone() for n, m in optimizer.masters.items()}
                state, updates = optimizer.state(), optimizer.updates
                parameters, optimizer = made(ADAMW)
                with torch.no_grad():
                    for name, master in optimizer.masters.items():
                        master.copy_(weights[name])
                        for kind in state:
                            optimizer.state()[kind][name].copy_(state[kind][name])
                optimizer.updates = updates
            optimizer.update(
                gradients(step),
                lr=0.1,
                weight_decay=0.1,
                divide_by=torch.ones((), dtype=torch.float64),
                skip=torch.zeros(()),
            )
        ends.append([p.detach().numpy().tobytes() for p in parameters.values()])
    assert ends[0] == ends[1]
