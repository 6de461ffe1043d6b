"""An update under the next forward pass makes the weights of one that is made at once, to the bit, and whoever reads
weights waits for it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaspec.data.batch import Batch
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.runtime.state import pieces_of
from megaspec.runtime.step import StepResult, evaluate, train_step
from megaspec.verify.parity import divide
from tests.parity.cases import Case, batches_of, spec_of
from tests.ranks import RankPool
from tests.source_patch import Patch
from tests.source_patch import check as check_patch

STEPS = 4
LATE = ("parallelism.update", "under_forward")
# a bucket for every few weights, so that units share some of them and have others for themselves
SMALL = ("parallelism.bucket_mb", 0.005)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


def built_for(rank: int, case: Case) -> TrainState:
    made = spec_of(case)
    built = build(made, mesh=mesh_of(made, rank=rank, device=torch.device("cpu")))
    initialise(built)
    return built


def stepped(built: TrainState, batch: Batch, *, on_gradients: Callable[[], None] | None = None) -> StepResult:
    """A step on this rank's part of a batch."""
    micros = divide(batch, mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
    scaler = build_scaler(built.spec.precision, device=built.device)
    return train_step(built, micros, lr=1e-2, weight_decay=0.1, scaler=scaler, on_gradients=on_gradients)


def saved(built: TrainState) -> dict[str, bytes]:
    """What a rank writes of a checkpoint, but for random generators."""
    found = {}
    for piece in pieces_of(built):
        if not piece.name.startswith("rng/"):
            found[f"{piece.name} {piece.start}"] = piece.tensor.clone().numpy().tobytes()
    return found


def trained(rank: int, case: Case, *, between: str = "") -> dict[str, Any]:
    """Losses of some steps and what is saved behind them; `between`: what is done after the second one."""
    built = built_for(rank, case)
    found: dict[str, Any] = {"losses": [], "between": None}
    for number, batch in enumerate(batches_of(case, [], STEPS)):
        result = stepped(built, batch)
        found["losses"].append((result.loss.item(), result.grad_norm.item()))
        if number != 1:
            continue
        if between == "evaluated":
            micros = divide(batch, mesh=built.mesh, micro_batch=built.spec.train.micro_batch)
            found["between"] = evaluate(built, micros).item()
        elif between == "saved":
            found["between"] = saved(built)
        elif between == "read":
            with built.data_parallel.full_weights() as weights:
                found["between"] = {name: one.detach().clone().numpy().tobytes() for name, one in weights.items()}
    found["saved"] = saved(built)
    found["updates"] = built.optimizer.updates
    return found


DEEP = Case(n_layers=4, accumulate=2, mask="uneven", precision="fp32", also=(SMALL,))
CASES = [
    DEEP,
    replace(DEEP, tied=True),
    replace(DEEP, trainable="upper"),
    replace(DEEP, router="sigmoid", shared="gate"),
    replace(
        DEEP,
        precision="bf16",
        also=(SMALL, ("optim.formats", {"exp_avg": "bf16", "exp_avg_sq": "fp8"}), ("kernels.adamw", "reference")),
    ),
    replace(DEEP, precision="bf16", dp=2),
    replace(DEEP, precision="fp8 delayed", wide=True),
    *(replace(DEEP, dp=2, strategy=strategy) for strategy in ("zero1", "zero2", "fsdp")),
    replace(DEEP, dp=2, strategy="zero1", tied=True, also=(SMALL, ("parallelism.overlap.param_gather", False))),
    replace(DEEP, dp=2, strategy="zero1", ep=2, router="softmax"),
    replace(DEEP, tp=2, sequence=True),
    *(replace(DEEP, pp=2, accumulate=3, schedule=schedule) for schedule in ("1f1b", "zb_h1")),
    *(
        replace(DEEP, pp=2, accumulate=3, schedule=schedule, virtual=2, tied=True)
        for schedule in ("interleaved", "zb_v")
    ),
    replace(
        DEEP, accumulate=1, also=(SMALL, ("parallelism.recompute.kind", "full"), ("parallelism.recompute.layers", 2))
    ),
]


def late(case: Case) -> Case:
    return replace(case, also=(*case.also, LATE))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_makes_the_same_weights_to_the_bit(pool: RankPool, case: Case) -> None:
    at_once = pool.run(trained, case, ranks=case.ranks)
    under_forward = pool.run(trained, late(case), ranks=case.ranks)
    for expected, found in zip(at_once, under_forward, strict=True):
        assert found["losses"] == expected["losses"]
        assert found["saved"] == expected["saved"]
        assert found["updates"] == expected["updates"] == STEPS


@pytest.mark.parametrize("between", ["evaluated", "saved", "read"])
@pytest.mark.parametrize("strategy", ["replicate", "zero1", "fsdp"])
def test_who_reads_weights_between_steps_finds_them_updated(pool: RankPool, strategy: str, between: str) -> None:
    case = replace(DEEP, dp=2, strategy=strategy)
    at_once = pool.run(trained, case, between=between, ranks=2)
    under_forward = pool.run(trained, late(case), between=between, ranks=2)
    assert at_once[0]["between"] is not None
    assert under_forward == at_once


GATHERS = "megaspec.parallelism.gathers"
DATA = "megaspec.parallelism.data_parallel"
OPTIMIZER = "megaspec.optim.under_forward"
BUGS = {
    # what is computed from them, and what is saved later, differs
    "weights are not waited for": (Patch(GATHERS, "self._before(bucket)\n", "\n"), DEEP),
    "shards are gathered before they are updated": (
        Patch(GATHERS, "            self._before(bucket)\n            bucket.gather()", "            bucket.gather()"),
        replace(DEEP, dp=2, strategy="zero1"),
    ),
    "a bucket waits for the first of its units alone": (
        Patch(DATA, "for number in bucket.updates:", "for number in bucket.updates[:1]:"),
        replace(DEEP, also=(("parallelism.bucket_mb", 100.0),)),
    ),
    "weights are not gathered again": (
        Patch(GATHERS, "                bucket.is_gathered = False\n            return", "            return"),
        replace(DEEP, dp=2, strategy="zero1"),
    ),
    "a checkpoint holds what was before the update": (
        Patch(OPTIMIZER, "        self._deferred.join()\n        by_part = {id", "        by_part = {id"),
        DEEP,
        # either of them waits for both
        Patch(OPTIMIZER, "        self._deferred.join()\n        by_kind: dict", "        by_kind: dict"),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_wait_that_is_left_out_is_seen(name: str) -> None:
    patch, case, *more = BUGS[name]
    patches = (patch, *more)
    for one in patches:
        check_patch(one)
    with RankPool(patches=patches) as planted:
        at_once = planted.run(trained, case, between="saved", ranks=case.ranks)[0]
        under_forward = planted.run(trained, late(case), between="saved", ranks=case.ranks)[0]
    assert under_forward != at_once


def skipped(rank: int, case: Case) -> dict[str, Any]:
    """What is saved behind a step with an update, one without, since a gradient is not finite, and another one with."""
    built = built_for(rank, case)
    batches = batches_of(case, [], 3)
    gradients = built.data_parallel.gradients

    def spoil() -> None:
        next(iter(gradients.values())).fill_(float("inf"))

    stepped(built, batches[0])
    before = saved(built)
    is_skipped = bool(stepped(built, batches[1], on_gradients=spoil).skipped)
    after = saved(built)
    stepped(built, batches[2])
    return {"is_skipped": is_skipped, "stays": before == after, "saved": saved(built), "n": built.optimizer.updates}


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_a_step_that_is_not_finite_is_skipped(pool: RankPool, strategy: str) -> None:
    case = replace(DEEP, dp=2, strategy=strategy)
    at_once = pool.run(skipped, case, ranks=2)
    under_forward = pool.run(skipped, late(case), ranks=2)
    assert under_forward == at_once
    assert all(one["is_skipped"] and one["stays"] and one["n"] == 2 for one in under_forward)


def order(rank: int, case: Case) -> list[str]:
    """What is done in a step's forward pass: updates by their first weight, and units."""
    built = built_for(rank, case)
    batches = batches_of(case, [], 2)
    stepped(built, batches[0])
    done: list[str] = []
    for group, part in zip(built.data_parallel.update_groups, built.optimizer.parts, strict=True):
        done_before = part.update

        def update(*args: Any, names: list[str] = group.names, run: Any = done_before, **options: Any) -> None:
            done.append(f"update {unit_of(names[0])}")
            run(*args, **options)

        part.update = update
    for unit in built.model.units:
        for module in unit.modules:
            module.register_forward_pre_hook(lambda *_, name=unit.name: done.append(f"run {name}"))
    stepped(built, batches[1])
    done.clear()
    stepped(built, batches[1])
    return done


def unit_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else {"norm": "head"}.get(parts[0], parts[0])


def test_each_unit_is_updated_before_it_runs_and_no_earlier_than_beside_the_one_before(pool: RankPool) -> None:
    # buckets of one parameter: none is shared by two units
    case = replace(DEEP, accumulate=1, also=(("parallelism.bucket_mb", 1e-6),))
    done = pool.run(order, late(case), ranks=1)[0]
    units = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    updated = [one for one in done if one.startswith("update")]
    assert updated == [f"update {unit}" for unit in units]
    for number, unit in enumerate(units):
        place = done.index(f"update {unit}")
        assert place < done.index(f"run {unit}")
        if number > 1:
            # the unit before the one before has run: nothing is updated all at once
            assert done.index(f"run {units[number - 2]}") < place
