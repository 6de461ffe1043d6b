"""Whole weights and gradients by global name, in every layout: exact to read and to set, one rank's to compute."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megaspec.core.errors import UsageError
from megaspec.core.layout import Layout
from megaspec.data.batch import Batch
from megaspec.parallelism.expert import buffers_of
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise, mesh_of, plain_model
from megaspec.runtime.step import train_step
from megaspec.runtime.weights import WeightShard, gradient_shards, gradients, set_weights, weight_shards, weights
from megaspec.verify.parity import divide, gather_global, gradient_errors
from tests.parity.cases import Case, alone, batches_of, spec_of
from tests.ranks import RankPool

CPU = torch.device("cpu")
TOLERANCE = 1e-10
EXPERTS = Case(router="sigmoid", shared="gate")
LAYOUTS = {
    "replicate": Case(dp=2, accumulate=2, mask="uneven"),
    "zero1 pad8": Case(dp=2, strategy="zero1", pad=8),
    "zero2": Case(dp=2, strategy="zero2", accumulate=2),
    "fsdp pad8": Case(dp=2, strategy="fsdp", pad=8, accumulate=2),
    "hsdp": Case(dp=4, strategy="hsdp", replicas=2),
    "tp2 sp pad64": Case(tp=2, sequence=True, pad=64, kv_heads=2),
    "pp2 tied": Case(pp=2, tied=True, accumulate=2),
    "cp2 zero1": Case(cp=2, dp=2, strategy="zero1"),
    "fp16 scale": Case(dp=2, scale=1024.0),
    "half on the cpu": Case(dp=2, strategy="zero1", also=(("parallelism.offload.optimizer", 0.5),)),
    "ep2 fsdp": replace(EXPERTS, dp=2, strategy="fsdp", ep=2),
    "pp2 experts": replace(EXPERTS, pp=2, accumulate=2),
}
SHARED_OUT = ("replicate", "zero1", "zero2", "fsdp")


def built_of(rank: int, case: Case) -> TrainState:
    spec = spec_of(case)
    built = build(spec, mesh=mesh_of(spec, rank=rank, device=CPU))
    initialise(built)
    return built


def values_for(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other values of the same shapes, the same on every rank; a zero with a sign among them."""
    draw = torch.Generator().manual_seed(23)
    values = {n: 0.1 * torch.randn(t.shape, generator=draw, dtype=torch.float64) for n, t in found.items()}
    for value in values.values():
        value.view(-1)[0] = -0.0
    return values


def arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def tensors(values: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def step(built: TrainState, case: Case, **more: Any) -> Any:
    batch = batches_of(case, [], 1)[0]
    scaler = build_scaler(built.spec.precision, device=built.device)
    scaler.scale.fill_(case.scale)
    mine = divide(batch, mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    return train_step(built, mine, lr=1e-2, weight_decay=0.1, scaler=scaler, **more)


def read_set_and_train(rank: int, case: Case) -> dict[str, Any]:
    """What a rank reads before and after it has set all weights, and after a step from there."""
    built = built_of(rank, case)
    started = weights(built)
    set_weights(built, values_for(started))
    kept = weights(built)
    seen: dict[str, Tensor] = {}
    result = step(built, case, on_gradients=lambda: seen.update(gradients(built)))
    with pytest.raises(UsageError, match="on_gradients"):
        gradients(built)
    one = next(reversed(started))
    assert weights(built, names=[one]).keys() == {one}
    return {
        "started": arrays(started),
        "kept": arrays(kept),
        "gradients": arrays(seen),
        "norm": result.grad_norm.item(),
        "trained": arrays(weights(built)),
        "loss": result.loss.item(),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_reads_and_sets_whole_weights(name: str, pool: RankPool) -> None:
    case = LAYOUTS[name]
    (truth,) = pool.run(read_set_and_train, alone(case), ranks=1)
    expected = arrays(values_for(tensors(truth["started"])))
    model = plain_model(spec_of(alone(case)), device=CPU)
    plain = {n: p.detach()[: len(truth["started"][n])] for n, p in model.named_parameters()}
    for found in pool.run(read_set_and_train, case, ranks=case.ranks):
        assert list(found["started"]) == list(truth["started"])
        for parameter, value in found["started"].items():
            assert value.tobytes() == truth["started"][parameter].tobytes(), parameter
            if parameter in plain:
                assert np.array_equal(value, plain[parameter].numpy()), parameter
        for parameter, value in found["kept"].items():
            assert value.tobytes() == expected[parameter].tobytes(), parameter
        assert found["loss"] == pytest.approx(truth["loss"], rel=1e-12)
        assert found["norm"] == pytest.approx(truth["norm"], rel=TOLERANCE)
        square = sum(float((g**2).sum()) for g in found["gradients"].values())
        assert found["norm"] == pytest.approx(square**0.5, rel=TOLERANCE)
        for what in ("gradients", "trained"):
            errors = gradient_errors(tensors(found[what]), tensors(truth[what]))
            assert max(errors.values()) <= TOLERANCE, (what, errors)


def shares(rank: int, case: Case) -> list[dict[str, np.ndarray]]:
    """Whole weights and gradients, and both put together from what each rank says that it holds; on rank 0."""
    built = built_of(rank, case)
    seen: list[tuple[dict[str, WeightShard], dict[str, Tensor]]] = []
    step(built, case, on_gradients=lambda: seen.append((gradient_shards(built), gradients(built))))
    seen.append((weight_shards(built), weights(built)))
    found = []
    for pieces, whole in seen:
        layouts: dict[str, Layout] = {name: share.layout for name, share in pieces.items()}
        gathered = gather_global({n: share.values for n, share in pieces.items()}, layouts, mesh=built.mesh)
        found += [arrays(gathered.values), arrays(whole)]
    return found


@pytest.mark.parametrize("name", ["hsdp", "tp2 sp pad64", "pp2 experts"])
def test_shares_are_pieces_of_the_whole(name: str, pool: RankPool) -> None:
    *pieces_and_wholes, gathered, whole = pool.run(shares, LAYOUTS[name], ranks=LAYOUTS[name].ranks)[0]
    for one, other in ((gathered, whole), tuple(pieces_and_wholes)):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def loss_of(model: Any, micro: Batch) -> Tensor:
    return model.loss(micro.tokens, micro.labels, micro.mask.to(torch.float64))


def by_hand(rank: int, case: Case) -> list[dict[str, np.ndarray]]:
    """Gradients behind `backward` calls of one's own: of all micro batches, of the first, of a step after one that
    nobody has read."""
    built = built_of(rank, case)
    micros = divide(batches_of(case, [], 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    with pytest.raises(UsageError, match="no backward pass"):
        gradients(built)
    for micro in micros:
        loss_of(built.model, micro).backward()
    found = [gradients(built)]
    assert all(torch.equal(again, found[0][name]) for name, again in gradients(built).items())
    loss_of(built.model, micros[0]).backward()
    found.append(gradients(built))
    loss_of(built.model, micros[0]).backward()
    seen: dict[str, Tensor] = {}
    step(built, case, on_gradients=lambda: seen.update(gradients(built)))
    return [arrays(one) for one in (*found, seen)]


@pytest.mark.parametrize("strategy", SHARED_OUT)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_behind_a_backward_of_ones_own(strategy: str, tied: bool, pool: RankPool) -> None:
    case = Case(dp=2, strategy=strategy, accumulate=2, pad=8, tied=tied)
    spec = spec_of(alone(case))
    batch = batches_of(case, [], 1)[0]
    size = spec_of(case).train.micro_batch
    (lone,) = pool.run(read_gradients, alone(case), ranks=1)
    # micro batch j of rank r begins at sequence (j · dp + r) · size
    firsts = batch.sequences(slice(2 * size))
    truths = [grad_of(spec, batch), grad_of(spec, firsts), tensors(lone)]
    for found in pool.run(by_hand, case, ranks=2):
        for one, truth in zip(found, truths, strict=True):
            assert max(gradient_errors(tensors(one), truth).values()) <= TOLERANCE


def read_gradients(rank: int, case: Case) -> dict[str, np.ndarray]:
    seen: dict[str, Tensor] = {}
    built = built_of(rank, case)
    step(built, case, on_gradients=lambda: seen.update(gradients(built)))
    return arrays(seen)


def grad_of(spec: Any, batch: Batch) -> dict[str, Tensor]:
    """Autograd's own, of a model without anything around it, and without the rows that pad the vocabulary."""
    model = plain_model(spec, device=CPU)
    loss_of(model, batch).backward()
    rows = spec.model.vocab_size
    cut = {"embed.weight", "head.weight"}
    return {n: p.grad[:rows] if n in cut else p.grad for n, p in model.named_parameters()}


def refused(rank: int, case: Case, what: str) -> str:
    """What a rank is told where rank 1 alone gives something else; nothing is set then."""
    built = built_of(rank, case)
    values = weights(built)
    before = {name: value.clone() for name, value in values.items()}
    if rank == 1 and what == "shape":
        values["norm.weight"] = torch.zeros(3)
    elif rank == 1 and what == "value":
        values["norm.weight"] = values["norm.weight"] + 1
    elif rank == 1 and what == "name":
        del values["norm.weight"]
    with pytest.raises(UsageError) as caught:
        set_weights(built, values)
    assert all(torch.equal(value, before[name]) for name, value in weights(built).items())
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "rank 1: norm.weight has shape [3], this model has [32]"),
        ("value", "norm.weight is another on rank 1 than on rank 0"),
        ("name", "norm.weight is another on rank 1 than on rank 0"),
    ],
)
def test_ranks_that_disagree_are_refused_together(what: str, words: str, pool: RankPool) -> None:
    for told in pool.run(refused, LAYOUTS["fsdp pad8"], what, ranks=2):
        assert words in told


def test_the_bias_of_a_router_is_among_the_weights() -> None:
    built = built_of(0, EXPERTS)
    step(built, EXPERTS)
    found = weights(built)
    biases = {name: value for name, value in buffers_of(built.chunks).items() if name.endswith(".expert_bias")}
    assert biases
    assert all(torch.equal(found[name], value) and value.any() for name, value in biases.items())
    other = built_of(0, EXPERTS)
    set_weights(other, found)
    tokens = batches_of(EXPERTS, [], 1)[0].tokens
    assert torch.equal(other.model(tokens), built.model(tokens))
