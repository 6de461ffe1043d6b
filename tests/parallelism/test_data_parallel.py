"""Every strategy of data parallelism trains the model of one rank, and holds no more than it says."""

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.data.batch import Batch
from megaspec.nn.decoder import Decoder
from megaspec.nn.linear import WeightGradientQueue, WeightGradientSums
from megaspec.parallelism.data_parallel import DataParallel, Sharing
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, build_split_model, initialise, mesh_of
from megaspec.runtime.loop import Run
from megaspec.runtime.state import tensors_of
from megaspec.runtime.step import evaluate, train_step
from megaspec.spec import Spec
from megaspec.verify.parity import TOLERANCES, Tolerances, compare, divide, gradient_errors
from tests.halved import halved
from tests.parity.cases import Case, Empty, batches_of, empty_of, spec_of
from tests.parity.tasks import run_case, train, trajectory_of, truth_of
from tests.ranks import RankPool, gpu_of
from tests.runtime.lives import comm_of
from tests.runtime.specs import spec as run_spec
from tests.source_patch import Patch
from tests.source_patch import check as check_patch

STEPS = 3
# Rounding alone: 2e-14 was the most that was seen.
EXACT = Tolerances(loss=1e-13, norm=1e-13, gradient=1e-13, weight=1e-13)


def check(pool: RankPool, case: Case, tolerances: Tolerances = EXACT, *, device: str = "cpu") -> None:
    run, truth = run_case(pool, case, steps=STEPS, device=device), truth_of(case, steps=STEPS, device=device)
    wrong = [str(finding) for finding in compare(run, truth, tolerances) if not finding.passed]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


TWO = Case(dp=2, mask="uneven", kv_heads=2)
ODD = Case(dp=2, mask="uneven", kv_heads=2, d_model=37, d_head=10)
TIED = Case(dp=2, accumulate=3, mask="uneven", kv_heads=1, tied=True, pad=8)
GPT = Case(dp=2, accumulate=3, mask="empty_rank", family="gpt", tied=True, optimizer="sgd")
SPLIT = Case(tp=2, dp=2, sequence=True, accumulate=3, mask="uneven", kv_heads=1, pad=8)
FOUR = Case(dp=4, accumulate=3, mask="uneven", kv_heads=2, tied=True)
SHARED_OUT = ("zero1", "zero2", "fsdp")
ONE_BY_ONE = (("parallelism.overlap.grad_reduce", False), ("parallelism.overlap.param_gather", False))
CASES = [
    *(replace(case, strategy=strategy) for strategy in SHARED_OUT for case in (TWO, TIED, GPT, SPLIT, FOUR)),
    *(replace(FOUR, strategy=strategy, replicas=2) for strategy in ("zero1", "zero2", "hsdp")),
    replace(GPT, dp=4, accumulate=1, strategy="hsdp", replicas=2),
    *(replace(TIED, strategy=strategy, also=ONE_BY_ONE) for strategy in ("replicate", *SHARED_OUT)),
]


@pytest.mark.parametrize("case", halved(CASES), ids=str)
def test_a_strategy_trains_as_one_rank_does(pool: RankPool, case: Case) -> None:
    check(pool, case)


def train_unlike(rank: int, case: Case, empty: Empty) -> Any:
    """One step, on rank 0 without the compiler: gradients of norms arrive earlier there."""
    return train(rank, replace(case, compile="block" if rank else "none"), empty, 1)


@pytest.mark.parametrize(
    "case",
    [
        # torch 2.11 compiles no fused attention in fp64 on a CPU
        pytest.param(
            Case(dp=2, d_head=64, strategy="replicate", accumulate=2, mask="uneven", attention="reference"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(dp=2, ep=2, strategy="zero1", router="softmax", shared="gate", mask="uneven", attention="reference"),
            marks=pytest.mark.slow,
        ),
        Case(dp=2, strategy="fsdp", router="softmax", shared="gate", mask="uneven", attention="reference"),
    ],
    ids=str,
)
def test_a_rank_that_runs_what_the_other_has_compiled_sends_in_the_same_order(pool: RankPool, case: Case) -> None:
    run = trajectory_of(pool.run(train_unlike, case, empty_of(case), ranks=2)[0])
    findings = compare(run, truth_of(case, steps=1), TOLERANCES["fp64"])
    wrong = [str(finding) for finding in findings if not finding.passed]
    assert not wrong, "\n".join(wrong)


def narrow(strategy: str) -> Case:
    replicas = 2 if strategy == "hsdp" else 1
    return replace(FOUR, strategy=strategy, replicas=replicas, also=(("parallelism.grad_reduce", "bf16"),))


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "fsdp", "hsdp"])
def test_a_reduction_in_bf16_rounds_gradients_on_their_way_and_nothing_else(pool: RankPool, strategy: str) -> None:
    exact, found = truth_of(FOUR, steps=1), run_case(pool, narrow(strategy), steps=1)
    assert abs(found.losses[0] - exact.losses[0]) <= 1e-13 * exact.losses[0]
    errors = gradient_errors(found.gradients.values, exact.gradients.values)
    # a sum of four, of which each and every partial sum is rounded to 8 bits
    assert 1e-4 < max(errors.values()) < 4 * 2.0**-8
    assert not any(found.gradients.replica_gap.values())


def built_for(rank: int, case: Case, *, device: str = "cpu") -> TrainState:
    where = gpu_of(rank) if device == "cuda" else torch.device(device)
    made = spec_of(case, device=device)
    built = build(made, mesh=mesh_of(made, rank=rank, device=where))
    initialise(built)
    return built


def left_behind(rank: int, case: Case) -> list[str]:
    """What of a model is alive after a step, when nobody holds it any more."""
    built = built_for(rank, case)
    batch = divide(batches_of(case, [], 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    train_step(built, batch, lr=1e-3, weight_decay=0.1, scaler=build_scaler(built.spec.precision, device=built.device))
    parts = {
        "parameters": built.data_parallel,
        "reductions": built.data_parallel._reductions,
        "layers": built.chunks[0],
    }
    alive = {name: weakref.ref(part) for name, part in parts.items()}
    del built, parts
    gc.collect()
    return [name for name, part in alive.items() if part() is not None]


@pytest.mark.parametrize("strategy", ["replicate", *SHARED_OUT])
def test_a_model_that_nobody_holds_is_gone(pool: RankPool, strategy: str) -> None:
    for alive in pool.run(left_behind, replace(TIED, strategy=strategy), ranks=2):
        assert alive == []


def paddings(rank: int, case: Case) -> list[tuple[int, int]]:
    """Elements of each bucket without and with padding."""
    found = []
    for bucket in built_for(rank, case).data_parallel.buckets:
        found.append((sum(map(prod, bucket.division.shapes.values())), bucket.division.numel))
    return found


# in its buckets of few parameters zero1 pads no more than is borne
@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_widths_that_have_little_in_common_lie_apart(pool: RankPool, strategy: str) -> None:
    """Of 37, 40 and 48 a shard would be a multiple of 35,520 elements, more than the whole model has. Parity of such
    models: tests/parity/test_found.py."""
    usual, _ = pool.run(paddings, replace(TWO, strategy=strategy), ranks=2)
    apart, on_the_other = pool.run(paddings, replace(ODD, strategy=strategy), ranks=2)
    assert apart == on_the_other
    assert len(apart) > len(usual)
    assert sum(size for size, _ in apart) < 35_520
    assert sum(padded for _, padded in apart) < 2 * 35_520


def shares(rank: int, case: Case) -> dict[str, Any]:
    """What a rank holds before, inside and after a step."""
    built = built_for(rank, case)
    data = built.data_parallel
    held = {"parameters": {n: (p.dtype, tuple(p.shape)) for n, p in data.parameters.items()}}
    held["same"] = all(p is q for p, q in zip(built.chunks[0].parameters(), data.parameters.values(), strict=True))
    inside: list[tuple[int, int]] = []
    for layer in built.chunks[0].layers.values():
        layer.register_forward_hook(lambda *_: inside.append(memory(data)))
    batch = divide(batches_of(case, [], 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    held["before"] = memory(data)
    scaler = build_scaler(built.spec.precision, device=built.device)
    train_step(built, batch, lr=1e-3, weight_decay=0.1, scaler=scaler)
    held["after"], held["inside"] = memory(data), list(inside)
    loss = float(evaluate(built, batch))
    held["after evaluation"] = memory(data)
    with data.full_weights() as weights:
        rebuilt = {name: weight.detach().clone() for name, weight in weights.items()}
        held["whole"] = memory(data)
    held["after reading"] = memory(data)
    held["shares"] = all(
        torch.equal(rebuilt[name][data.rows(name)], weight.to(rebuilt[name].dtype))
        for name, weight in built.optimizer.masters.items()
    )
    held["elements"] = {name: weight.numel() for name, weight in data.weights.items()}
    held["finite"] = all(bool(weight.isfinite().all()) for weight in rebuilt.values()) and loss == loss
    return held


def memory(data: DataParallel) -> tuple[int, int]:
    """Bytes of whole weights and of whole sums of gradients."""
    weights = {b.weights.whole.untyped_storage() for b in data.buckets if b.weights is not None}
    sums = {b.sums.whole.untyped_storage() for b in data.buckets}
    return sum(s.nbytes() for s in weights), sum(s.nbytes() for s in sums)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_what_is_shared_out_is_held_in_shares(pool: RankPool, strategy: str) -> None:
    by_rank = pool.run(shares, replace(TIED, strategy=strategy, n_layers=4), ranks=2)
    for held in by_rank:
        assert held["same"]
        assert held["shares"]
        assert held["finite"]
        weights, sums = held["whole"]
        assert weights > 0
        for when in ("before", "after", "after evaluation", "after reading"):
            assert held[when] == (0 if strategy == "fsdp" else weights, sums), when
        assert (sums == 0) == (strategy != "zero1")
        if strategy == "fsdp":
            # in a layer's forward pass no more than it, the next unit and nothing of the one before
            assert all(0 < inside < 0.6 * weights for inside, _ in held["inside"])
    for name, (_, shape) in by_rank[0]["parameters"].items():
        assert sum(held["elements"][name] for held in by_rank) == torch.Size(shape).numel(), name
    total = sum(by_rank[0]["elements"].values()) + sum(by_rank[1]["elements"].values())
    assert abs(sum(by_rank[0]["elements"].values()) / total - 0.5) < 0.1


def backward_memory(rank: int, case: Case) -> tuple[list[tuple[int, int]], int, int]:
    """Whole weights and sums whenever a layer's backward pass has made its input's gradient. -> and all of both."""
    built = built_for(rank, case)
    data = built.data_parallel
    seen: list[tuple[int, int]] = []
    for unit in built.chunks[0].units[1:]:
        run = unit.run

        def watched(x: torch.Tensor, *rest: object, run: Any = run) -> torch.Tensor:
            x.register_hook(lambda _: seen.append(memory(data)))
            return run(x, *rest)

        unit.run = watched
    batch = divide(batches_of(case, [], 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    scaler = build_scaler(built.spec.precision, device=built.device)
    train_step(built, batch, lr=1e-3, weight_decay=0.1, scaler=scaler)
    weights = sum(b.weights._bytes for b in data.buckets)
    return seen, weights, sum(b.sums._bytes for b in data.buckets)


def test_a_backward_pass_holds_few_units_at_a_time(pool: RankPool) -> None:
    for seen, weights, sums in pool.run(backward_memory, replace(TIED, strategy="fsdp", n_layers=4), ranks=2):
        assert len(seen) == 15
        # this unit's, the next one's and, until that one starts, the last one's; the embedding's where it is tied
        assert max(w for w, _ in seen) < 0.9 * weights
        assert max(s for _, s in seen) < 0.6 * sums


def loss_of(model: Decoder, micro: Batch) -> torch.Tensor:
    return model.loss(micro.tokens, micro.labels, micro.mask.to(torch.float64))


def deferred(rank: int, case: Case, lag: int) -> dict[str, float]:
    """The errors of gradients when those of matrices are computed `lag` micro batches late."""
    found = []
    for late in (False, True):
        built = built_for(rank, case)
        data, queues = built.data_parallel, deque()
        whole = batches_of(case, [], 1)[0]
        micros = divide(whole, mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
        for _ in range(2):
            data.start_step()
            for number, micro in enumerate(micros):
                loss = loss_of(built.chunks[0], micro)
                data.start_backward(0, last=number == len(micros) - 1)
                queues.append(WeightGradientQueue())
                with built.pipeline.sums.defer(queues[-1] if late else None):
                    loss.backward()
                if len(queues) > lag:
                    queues.popleft().run()
            while queues:
                queues.popleft().run()
            data.finish_grads()
        found.append({name: gradient.clone() for name, gradient in data.gradients.items() if gradient.numel()})
    return gradient_errors(found[1], found[0])


@pytest.mark.parametrize("strategy", ["replicate", *SHARED_OUT])
def test_gradients_of_matrices_may_come_late(pool: RankPool, strategy: str) -> None:
    for lag in (1, 2):
        for errors in pool.run(deferred, replace(TIED, strategy=strategy), lag, ranks=2):
            assert max(errors.values()) <= 1e-13, errors


EXPERTS = frozenset({"layers.0.mlp.w_down.weight", "layers.1.mlp.w_gate_up.weight"})


def two_grids(rank: int, case: Case) -> dict[str, float]:
    """The largest error of each parameter's sum of gradients, with experts on two ranks, and what a step leaves."""
    made = spec_of(case)
    degrees = {"dp_replicate": made.parallelism.dp_replicate, "dp_shard": made.parallelism.dp_shard}
    mesh = Mesh(degrees, rank=rank, device=torch.device("cpu"), ep=2)
    sharing = Sharing(case.strategy, 20_000)
    held = spec_of(replace(case, strategy="replicate", replicas=1))
    split, plain_split = build_split_model(held, mesh=mesh), build_split_model(held, mesh=mesh)
    for model in (split.chunks[0], plain_split.chunks[0]):
        draw = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.1)
    facts = {name: replace(facts, is_expert=name in EXPERTS) for name, facts in split.facts.items()}
    data = DataParallel(mesh, sharing, facts=facts)
    data.apply(
        split.chunks,
        layouts=split.strategies.tensor.layouts,
        sums=WeightGradientSums(),
        shared=frozenset({"embed.weight"}),
    )
    assert ["embed.weight"] in [bucket.names for bucket in data.buckets]
    assert not any(set(bucket.names) & EXPERTS and set(bucket.names) - EXPERTS for bucket in data.buckets)
    mine = divide(batches_of(case, [], 1)[0], mesh=mesh, micro_batch=made.train.micro_batch)

    data.start_step()
    for number, micro in enumerate(mine):
        loss_of(plain_split.chunks[0], micro).backward()
        one = loss_of(split.chunks[0], micro)
        data.start_backward(0, last=number == len(mine) - 1)
        one.backward()
    data.finish_grads()
    errors = {}
    for name, parameter in plain_split.chunks[0].global_parameters().items():
        expected = parameter.grad.clone()
        group = mesh.group("edp" if name in EXPERTS else "dp-cp")
        dist.all_reduce(expected, group=group)
        rows = expected[data.rows(name)]
        assert rows.shape == data.gradients[name].shape == data.weights[name].shape
        errors[name] = float((rows - data.gradients[name]).abs().max()) if rows.numel() else 0.0
        pieces = data.shards[name].pieces
        assert all(piece.copies == (2 if case.replicas == 2 else 1) for piece in pieces)
    return errors


@pytest.mark.parametrize(
    "case", [*(replace(FOUR, strategy=s) for s in SHARED_OUT), replace(FOUR, strategy="hsdp", replicas=2)], ids=str
)
def test_experts_are_shared_by_ranks_of_their_own_grid(pool: RankPool, case: Case) -> None:
    for errors in pool.run(two_grids, case, ranks=4):
        assert max(errors.values()) <= 1e-13, errors


def go_on(rank: int, text: str, folder: str) -> list[float]:
    """A life of a run, from its newest checkpoint to its end. -> its losses"""
    made = Spec.model_validate_json(text)
    mesh = mesh_of(made, rank=rank, device=torch.device("cpu"))
    found = Run(build(made, mesh=mesh), Path(folder), Store(folder), comm_of(made, rank))
    losses: list[float] = []
    found.emit = lambda event: losses.append(event.loss) if type(event).__name__ == "StepDone" else None
    found.start()
    found.train()
    return losses


def checkpoint(folder: Any) -> dict[str, np.ndarray]:
    with Store(folder).newest_good(SoloComm(), repair=False) as reader:
        return {n: reader.read(n).numpy() for n in reader.names() if not n.startswith("rng/")}


def layout(strategy: str, shards: int, replicas: int = 1) -> dict[str, Any]:
    return {
        "parallelism.dp_strategy": strategy,
        "parallelism.dp_shard": shards,
        "parallelism.dp_replicate": replicas,
    }


# The strategy that writes a checkpoint, and the one that goes on from it.
MOVES = [
    (layout("replicate", 1), layout("zero1", 2)),
    (layout("zero1", 2), layout("fsdp", 4)),
    (layout("fsdp", 4), layout("hsdp", 2, 2)),
    (layout("hsdp", 2, 2), layout("zero2", 2)),
    (layout("zero2", 2), layout("replicate", 1, 2)),
]


def test_a_run_goes_on_under_another_strategy(pool: RankPool, tmp_path: Any) -> None:
    """What is read is bitwise what was written; after two more steps it is what an undisturbed run has."""
    common = {
        "train.micro_batch": 1,
        "optim.schedule": {"warmup_steps": 1, "decay_steps": 8},
        "model.tied_embeddings": True,
    }

    def part_of_four(where: dict[str, Any], steps: int) -> Spec:
        """The first steps of a run of four, in the order of its data."""
        made = run_spec({**common, **where, "train.steps": steps})
        return made.model_copy(update={"segments": run_spec({**common, **where, "train.steps": 4}).segments})

    def live(folder: str, where: dict[str, Any], steps: int) -> None:
        made = part_of_four(where, steps)
        pool.run(go_on, made.model_dump_json(), str(tmp_path / folder), ranks=made.world_size)

    live("whole", layout("replicate", 1), 4)
    expected = checkpoint(tmp_path / "whole")
    for number, (before, after) in enumerate(MOVES):
        live(f"moved-{number}", before, 2)
        written = checkpoint(tmp_path / f"moved-{number}")
        live(f"moved-{number}", after, 2)
        made = part_of_four(after, 2)
        arrays = pool.run(read_back, made.model_dump_json(), str(tmp_path / f"moved-{number}"), ranks=made.world_size)
        for found in arrays:
            for name, where, value in found:
                assert np.array_equal(value, written[name][where]), name
        live(f"moved-{number}", after, 4)
        moved = checkpoint(tmp_path / f"moved-{number}")
        assert moved.keys() == expected.keys()
        for name, value in expected.items():
            assert np.abs(moved[name] - value).max() <= 1e-12 * np.abs(value).max(), name


def read_back(rank: int, text: str, folder: str) -> list[tuple[str, tuple[slice, ...], np.ndarray]]:
    """Stored name, place and values of everything that this rank has read."""
    made = Spec.model_validate_json(text)
    mesh = mesh_of(made, rank=rank, device=torch.device("cpu"))
    found = Run(build(made, mesh=mesh), Path(folder), Store(folder), comm_of(made, rank))
    found.start()
    shards = found.built.shards
    return [
        (stored, piece.global_slices, tensor[piece.local_slices].numpy())
        for stored, (name, tensor) in tensors_of(found.built).items()
        for piece in shards[name].pieces
    ]


SUMS, BUCKET = "megaspec.parallelism.reductions", "megaspec.parallelism.bucket"
BUGS = [
    ("replicas of shards not summed", Patch(BUCKET, "if self.shard_group.sum is None:", "if True:"), "hsdp"),
    ("only the last micro batch reaches the shard", Patch(BUCKET, "if add:", "if False:"), "fsdp"),
    ("the shard is not emptied between steps", Patch(BUCKET, "if add:", "if True:"), "zero2"),
    (
        "weights not gathered",
        Patch(BUCKET, "all_gather_single(buffer.whole,", "all_gather_single(buffer.whole.clone(),"),
        "zero1",
    ),
    (
        "gradients not scattered",
        Patch(
            BUCKET,
            "reduce_scatter_single(self.division.own(whole, index)",
            "reduce_scatter_single(whole[: len(whole) // 2].clone()",
        ),
        "zero2",
    ),
    (
        "the first rank's shard on all",
        Patch(BUCKET, "mine = self.division.own(whole, index)", "mine = self.division.own(whole, 0)"),
        "fsdp",
    ),
    (
        "reduced while gradients are missing",
        Patch(SUMS, "while waiting and waiting[0].missing == 0:", "while waiting:"),
        "zero1",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "patch", "strategy"), BUGS, ids=[name for name, _, _ in BUGS])
def test_a_planted_bug_is_caught(name: str, patch: Patch, strategy: str) -> None:
    check_patch(patch)
    case = replace(FOUR, strategy=strategy, replicas=2) if strategy == "hsdp" else replace(TIED, strategy=strategy)
    with RankPool(patches=(patch,)) as ranks:
        found = compare(run_case(ranks, case, steps=STEPS), truth_of(case, steps=STEPS), EXACT)
    assert any(f.margin >= 100 for f in found if f.tolerance), found[0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("case", [c for c in CASES if c.ranks <= 2], ids=str)
def test_over_nccl_a_strategy_trains_as_one_gpu_does(case: Case, gpu_pool: RankPool) -> None:
    check(gpu_pool, case, TOLERANCES["fp64"], device="cuda")


def runs_ahead(rank: int, case: Case) -> None:
    """A step and an evaluation after the first ones, in which waiting for the GPU is an error."""
    built = built_for(rank, case, device="cuda")
    whole = batches_of(case, [], 1)[0]
    micros = divide(whole, mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    scaler = build_scaler(built.spec.precision, device=built.device)
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        train_step(built, micros, lr=1e-3, weight_decay=0.1, scaler=scaler)
        evaluate(built, micros)
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("strategy", ["replicate", *SHARED_OUT])
def test_the_host_waits_for_no_collective(strategy: str, gpu_pool: RankPool) -> None:
    gpu_pool.run(runs_ahead, replace(TIED, strategy=strategy, precision="bf16"), ranks=2)
