"""A checkpoint of any layout goes on in any other: weights and optimizer state to the bit, then the same step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError
from megaspec.core.layout import whole
from megaspec.parallelism.expert import buffers_of
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.runtime.state import load, pieces_of, progress, tensors_of
from megaspec.runtime.step import train_step
from megaspec.verify.parity import divide, gather_global
from tests.conftest import Tell
from tests.parity.bugs import LOADED, Bug
from tests.parity.cases import SEQUENCES, Case, alone, batches_of, empty_of, spec_of
from tests.parity.test_planted_bugs import MARGIN
from tests.ranks import RankPool
from tests.source_patch import check

SAVED_AFTER = 2
MODEL = Case(n_layers=4, mask="uneven", kv_heads=2)
DENSE = {
    "one rank": {},
    "tp2 pad8": {"tp": 2, "pad": 8},
    "tp4 sp pad64": {"tp": 4, "sequence": True, "pad": 64},
    "pp2": {"pp": 2, "accumulate": 3},
    "pp2 chunks": {"pp": 2, "schedule": "interleaved", "virtual": 2, "accumulate": 2, "pad": 8},
    "pp4": {"pp": 4, "schedule": "zb_h1", "accumulate": 4},
    "pp2 there and back": {"pp": 2, "schedule": "zb_v", "virtual": 2, "accumulate": 3},
    "cp2": {"cp": 2, "context": "all_gather"},
    "cp2 zero2": {"cp": 2, "dp": 2, "strategy": "zero2", "pad": 8},
    "zero1": {"dp": 2, "strategy": "zero1", "accumulate": 2},
    "fsdp4": {"dp": 4, "strategy": "fsdp", "pad": 8},
    "tp2 pp2": {"tp": 2, "sequence": True, "pp": 2, "accumulate": 2},
}
EXPERTS = {
    "one rank": {},
    "ep2 replicate": {"dp": 2, "ep": 2},
    "ep2 fsdp": {"dp": 2, "strategy": "fsdp", "ep": 2, "pad": 8},
    "ep4 zero1": {"dp": 4, "strategy": "zero1", "ep": 4},
    "ep2 etp2": {"dp": 4, "ep": 2, "etp": 2, "dispatch": "all_gather"},
    "tp4 ep2": {"tp": 4, "sequence": True, "ep": 2, "pad": 64},
    "tp2 etp2 zero1": {"tp": 2, "sequence": True, "etp": 2, "dp": 2, "strategy": "zero1"},
    "cp2 ep2": {"cp": 2, "ep": 2, "accumulate": 2},
    "pp2 zero2": {"pp": 2, "dp": 2, "strategy": "zero2", "accumulate": 2, "pad": 8},
    "pp2 chunks": {"pp": 2, "schedule": "interleaved", "virtual": 2, "accumulate": 2},
    "pp2 there and back": {"pp": 2, "schedule": "zb_v", "virtual": 2, "accumulate": 3},
    "hsdp": {"dp": 4, "strategy": "hsdp", "replicas": 2, "ep": 2},
}


@dataclass(frozen=True)
class Begun:
    """A model in a layout, and the steps that it goes."""

    built: TrainState
    case: Case
    comm: Comm

    def step(self, number: int) -> tuple[float, float]:
        """Trains on the batch of step `number`. -> loss and gradient norm"""
        spec, empty = self.built.spec, empty_of(MODEL)
        batch = batches_of(self.case, empty.sequences, number + 1)[number]
        result = train_step(
            self.built,
            divide(batch, mesh=self.built.mesh, micro_batch=spec.train.micro_batch),
            lr=spec.optim.lr,
            weight_decay=spec.optim.weight_decay,
            scaler=build_scaler(spec.precision, device=self.built.device),
        )
        return result.loss.item(), result.grad_norm.item()

    def state(self) -> dict[str, np.ndarray]:
        """Everything that a checkpoint holds but random generators, put together; on rank 0."""
        tensors, layouts = {}, {}
        for stored, (name, tensor) in tensors_of(self.built).items():
            tensors[stored], layouts[stored] = tensor, replace(self.built.shards[name], name=stored)
        for name, tensor in buffers_of(self.built.chunks).items():
            tensors[f"router/{name}"], layouts[f"router/{name}"] = tensor, whole(f"router/{name}", tuple(tensor.shape))
        for name, tensor in self.built.fp8.state().items():
            tensors[f"fp8/{name}"], layouts[f"fp8/{name}"] = tensor, whole(f"fp8/{name}", tuple(tensor.shape))
        gathered = gather_global(tensors, layouts, mesh=self.built.mesh)
        assert not any(gathered.replica_gap.values()), gathered.replica_gap
        assert not any(gathered.padding.values()), gathered.padding
        return {name: value.numpy() for name, value in gathered.values.items()}


def begin(rank: int, case: Case) -> Begun:
    spec = spec_of(case)
    built = build(spec, mesh=mesh_of(spec, rank=rank, device=torch.device("cpu")))
    return Begun(built, case, DistComm() if dist.is_initialized() else SoloComm())


def save(rank: int, case: Case, folder: str) -> None:
    """Trains two steps, saves, trains one more; what both left is written beside the checkpoint."""
    run = begin(rank, case)
    initialise(run.built)
    for number in range(SAVED_AFTER):
        run.step(number)
    state = progress(run.built, step=SAVED_AFTER, samples=SAVED_AFTER * SEQUENCES, tokens=0, scaler=None, numbers={})
    spec = run.built.spec.model_dump(mode="json")
    Store(folder).save(SAVED_AFTER, pieces_of(run.built), spec=spec, state=state, comm=run.comm)
    saved = run.state()
    loss, norm = run.step(SAVED_AFTER)
    after = run.state()
    if rank == 0:
        np.savez(Path(folder) / "saved.npz", **saved)
        np.savez(Path(folder) / "after.npz", loss=loss, norm=norm, **after)


def go_on(rank: int, case: Case, folders: list[str], *, trains_from: int = 1) -> dict[str, dict[str, Any]] | None:
    """Loads one checkpoint after the other, and trains a step from each of the last `trains_from`. -> by folder what
    differed, from rank 0"""
    run = begin(rank, case)
    found = {}
    for i, folder in enumerate(folders):
        load(run.built, Store(folder).newest_good(run.comm, repair=False))
        loaded = run.state()
        if rank == 0:
            with np.load(Path(folder) / "saved.npz") as saved:
                assert loaded.keys() == set(saved.files), loaded.keys() ^ set(saved.files)
                found[folder] = {"changed": [name for name in loaded if not np.array_equal(loaded[name], saved[name])]}
        if i < len(folders) - trains_from:
            continue
        loss, norm = run.step(SAVED_AFTER)
        after = run.state()
        if rank == 0:
            with np.load(Path(folder) / "after.npz") as expected:
                found[folder]["step"] = step_off(expected, loss, norm, after)
    return found if rank == 0 else None


def step_off(expected: Mapping[str, np.ndarray], loss: float, norm: float, after: dict[str, np.ndarray]) -> dict:
    """How far a step is from the one that the saving ranks went, by the keys of TOLERANCES."""
    worst = 0.0
    for name, value in after.items():
        largest = abs(expected[name]).max() or 1.0
        worst = max(worst, abs(value - expected[name]).max() / largest)
    return {
        "loss": abs(loss / float(expected["loss"]) - 1),
        "norm": abs(norm / float(expected["norm"]) - 1),
        "after": worst,
    }


TOLERANCES = {"loss": 1e-12, "norm": 1e-10, "after": 1e-10}
"""Of the step that comes next: its loss, its gradient norm, and all state behind it; the optimizer's is made of the
gradients."""


def each_into_others(
    pool: RankPool,
    model: Case,
    layouts: dict[str, dict],
    folder: Path,
    tell: Tell,
    *,
    others: int | None = None,
    each_trains: bool = False,
) -> None:
    """Loads the checkpoint of each layout into `others` others, None: all. A step is trained from that of its neighbour
    alone, or from each, its own as well, where `each_trains`."""
    others = len(layouts) - 1 if others is None else others
    cases = {name: replace(model, **layout) for name, layout in layouts.items()}
    folders = {name: str(folder / name.replace(" ", "-")) for name in cases}
    for name, case in cases.items():
        Path(folders[name]).mkdir()
        pool.run(save, case, folders[name], ranks=case.ranks)
    worst = dict.fromkeys(TOLERANCES, 0.0)
    for i, (target, case) in enumerate(cases.items()):
        # its own first; it goes on from that of its neighbour
        before = [*folders.values()][i::-1] + [*folders.values()][:i:-1]
        sources = before[:1] + before[len(before) - others :]
        trains_from = len(sources) if each_trains else 1
        differs = pool.run(go_on, case, sources, ranks=case.ranks, trains_from=trains_from)[0]
        for source, found in differs.items():
            pair = f"{Path(source).name} -> {target}"
            assert not found["changed"], f"{pair}: {found['changed']}"
            for what, error in found.get("step", {}).items():
                worst[what] = max(error, worst[what])
                assert error <= TOLERANCES[what], f"{pair}: {what} {error:.1e} off"
    pairs = f"{len(cases)} layouts, {len(cases) * others} pairs"
    tell(f"{pairs}: all bits, then {', '.join(f'{w} {e:.1e}' for w, e in worst.items())}")


BESIDE = 1
"""Other layouts that take the checkpoint of one, where not all do."""
OFTEN = dict(islice(EXPERTS.items(), 0, None, 2))
"""Every second layout."""


def model_with_experts(*, tied: bool) -> Case:
    return replace(MODEL, router="sigmoid", experts="bias", shared="gate", every=2, tied=tied)


def test_layouts_of_experts(pool: RankPool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(pool, model_with_experts(tied=True), OFTEN, tmp_path, tell, others=BESIDE)


# as many micro batches in all, since each has scales of its own
FP8 = {
    "one rank": {"accumulate": 4},
    "tp2 sp": {"tp": 2, "sequence": True, "accumulate": 4},
    "zero1": {"dp": 2, "strategy": "zero1", "accumulate": 2},
    "fsdp": {"dp": 2, "strategy": "fsdp", "accumulate": 2},
    "cp2": {"cp": 2, "accumulate": 4},
    "pp2 there and back": {"pp": 2, "schedule": "zb_v", "virtual": 2, "accumulate": 4},
    "cp2 fsdp": {"cp": 2, "context": "all_gather", "dp": 2, "strategy": "fsdp", "accumulate": 2},
}
FP8_OFTEN = dict(islice(FP8.items(), 6))
"""Those of at most two ranks."""
FP8_BESIDE = 3
"""Of these, others that take the checkpoint of one: every two of them meet, in one direction at least."""
FP8_EXPERTS = {
    "one rank": {"accumulate": 2},
    "ep2 fsdp": {"dp": 2, "strategy": "fsdp", "ep": 2},
    "cp2 ep2": {"cp": 2, "ep": 2, "accumulate": 2},
    "tp2 sp ep2": {"tp": 2, "sequence": True, "ep": 2, "accumulate": 2},
    "tp2 sp etp2": {"tp": 2, "sequence": True, "etp": 2, "accumulate": 2},
    "ep4 zero1": {"dp": 4, "strategy": "zero1", "ep": 4},
    "ep2 etp2": {"dp": 4, "ep": 2, "etp": 2, "dispatch": "all_gather"},
    "pp2 there and back": {"pp": 2, "schedule": "zb_v", "virtual": 2, "accumulate": 2},
}
FP8_EXPERTS_OFTEN = dict(islice(FP8_EXPERTS.items(), 3))
DELAYED = replace(MODEL, precision="fp8 delayed")
DELAYED_EXPERTS = replace(model_with_experts(tied=False), precision="fp8 delayed")


def check_remembered(folder: Path) -> None:
    """Whether what the checkpoints of all layouts hold of steps before is there to be lost: of all layers that compute
    in fp8, other numbers for each step, so that one in the place of another is felt."""
    with np.load(folder / "one-rank" / "saved.npz") as saved:
        largest = {name: saved[name] for name in saved.files if name.startswith("fp8/")}
        weights = {name for name in saved.files if name.startswith("model/layers.")}
    # experts that every token takes compute in the model's format
    products = ("attn.wqkv", "attn.wo", "mlp.w_gate_up", "mlp.w_down", "experts.w_gate_up", "experts.w_down")
    endings = tuple(f"{product}.weight" for product in products)
    in_fp8 = {name.removeprefix("model/") for name in weights if name.endswith(endings)}
    assert {name.removeprefix("fp8/") for name in largest} == in_fp8
    # R roles, S steps
    for name, largest_RS in largest.items():
        assert largest_RS.shape == (2, SAVED_AFTER), name
        assert np.unique(largest_RS).size == largest_RS.size, name
        assert np.all(largest_RS), name


def test_layouts_with_delayed_scales_of_fp8(pool: RankPool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(pool, DELAYED, FP8_OFTEN, tmp_path, tell, others=FP8_BESIDE)
    check_remembered(tmp_path)


def test_experts_with_delayed_scales_of_fp8(pool: RankPool, tmp_path: Path, tell: Tell) -> None:
    # a layer of either kind
    model = replace(DELAYED_EXPERTS, n_layers=2)
    each_into_others(pool, model, FP8_EXPERTS_OFTEN, tmp_path, tell)
    check_remembered(tmp_path)


# by default one that the bits alone show, and one that the step alone shows
LOADED_CASES = [*LOADED[:2], *(pytest.param(bug, marks=pytest.mark.slow) for bug in LOADED[2:])]


@pytest.mark.parametrize("bug", LOADED_CASES, ids=str)
def test_bugs_of_what_is_remembered_are_caught(bug: Bug, tmp_path: Path, tell: Tell) -> None:
    check(bug.patch)
    with RankPool(patches=(bug.patch,)) as wrong:
        check_caught(bug, wrong, tmp_path, tell)


def check_caught(bug: Bug, wrong: RankPool, folder: Path, tell: Tell) -> None:
    """Whether loading a checkpoint of the bug's case on one rank, and the other way round, shows it: in what is
    remembered, or else in the step that comes next. `wrong`: ranks that have it."""
    cases = {"layout": bug.case, "one rank": replace(alone(bug.case), also=bug.case.also)}
    for name, case in cases.items():
        (folder / name).mkdir()
        wrong.run(save, case, str(folder / name), ranks=case.ranks)
    fired = []
    losses = []
    for source, target in permutations(cases):
        case = cases[target]
        (found,) = wrong.run(go_on, case, [str(folder / source)], ranks=case.ranks)[0].values()
        changed = found["changed"]
        assert all(name.startswith("fp8/") for name in changed), changed
        losses.append(found["step"]["loss"])
        if changed:
            fired.append(f"{source} -> {target}: {changed[0]} and {len(changed) - 1} more differ")
        for what, error in found["step"].items():
            if error >= MARGIN * TOLERANCES[what]:
                fired.append(f"{source} -> {target}: {what} {error:.1e} off")
    assert fired, "not caught"
    assert (max(losses) <= TOLERANCES["loss"]) == bug.invisible, losses
    tell(f"{bug}: {'; '.join(fired)}")


def test_delayed_scales_begin_anew_behind_another_precision(tmp_path: Path, capsys) -> None:
    case = replace(MODEL, accumulate=4)
    save(0, case, str(tmp_path))
    run = begin(0, replace(case, precision="fp8 delayed"))
    load(run.built, Store(tmp_path).newest_good(run.comm, repair=False))
    text = capsys.readouterr().err
    assert "holds no fp8/layers.0.attn.wqkv.weight: delayed scales begin anew" in text
    loss, norm = run.step(SAVED_AFTER)
    with np.load(tmp_path / "after.npz") as expected:
        # by scales of the tensors themselves, a step in fp8 is near the one in fp64
        assert abs(norm / float(expected["norm"]) - 1) < 0.1
        assert 0 < abs(loss / float(expected["loss"]) - 1) < 0.01
    # and the other way round: another precision leaves them
    torch.manual_seed(0)
    folder = tmp_path / "fp8"
    folder.mkdir()
    save(0, replace(case, precision="fp8 delayed"), str(folder))
    plain = begin(0, case)
    load(plain.built, Store(folder).newest_good(plain.comm, repair=False))


BOTH_ENDS_IN_BF16 = (("precision.first_layers_bf16", 1), ("precision.last_layers_bf16", 1))


def largest_after(rank: int, case: Case, folder: str) -> dict[str, list]:
    """What a rank's delayed scales are made of, by layer, once a checkpoint is loaded."""
    run = begin(rank, case)
    load(run.built, Store(folder).newest_good(run.comm, repair=False))
    return {name: largest.tolist() for name, largest in run.built.fp8.state().items()}


def test_layers_that_come_to_fp8_leave_the_scales_of_others_alone(pool: RankPool, tmp_path: Path, capfd) -> None:
    """Whichever ranks have them: the first of two stages here has one of either kind, as has the second."""
    case = replace(MODEL, precision="fp8 delayed", accumulate=4)
    save(0, replace(case, also=BOTH_ENDS_IN_BF16), str(tmp_path))
    whole = largest_after(0, case, str(tmp_path))
    assert "delayed scales begin anew there and in 7 more of 16" in capfd.readouterr().err
    with np.load(tmp_path / "saved.npz") as saved:
        for name, largest in whole.items():
            if name.split(".")[1] in ("0", "3"):
                assert not np.any(largest), name
            else:
                assert np.array_equal(largest, saved[f"fp8/{name}"]), name
                assert np.all(largest), name
    stages = pool.run(largest_after, replace(case, pp=2), str(tmp_path), ranks=2)
    assert stages[0] | stages[1] == whole


MUON = {
    "one rank": {},
    "zero1": {"dp": 2, "strategy": "zero1", "accumulate": 2},
    "fsdp pad8": {"dp": 2, "strategy": "fsdp", "pad": 8},
    "tp2 sp": {"tp": 2, "sequence": True},
    "pp2 there and back": {"pp": 2, "schedule": "zb_v", "virtual": 2, "accumulate": 3},
}
ON_THE_CPU = (("parallelism.offload.optimizer", 0.5),)
OFFLOADED = {
    "one rank": {},
    "half": {"dp": 2, "strategy": "zero1", "also": ON_THE_CPU},
    "half of pp2": {"pp": 2, "also": ON_THE_CPU},
}

APART = {
    "one rank": {},
    "zero2": {"dp": 2, "strategy": "zero2", "accumulate": 2},
    "fsdp4 pad8": {"dp": 4, "strategy": "fsdp", "pad": 8},
}


def test_states_of_muon(pool: RankPool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(pool, replace(MODEL, optimizer="muon"), MUON, tmp_path, tell, others=BESIDE)


def test_widths_that_lie_in_buffers_of_their_own(pool: RankPool, tmp_path: Path, tell: Tell) -> None:
    model = replace(MODEL, n_layers=2, d_model=37, d_head=10)
    each_into_others(pool, model, APART, tmp_path, tell)


def test_states_on_the_cpu(pool: RankPool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(pool, MODEL, OFFLOADED, tmp_path, tell)


@pytest.mark.parametrize("tied", [True, False])
def test_never_between_tied_and_untied(tied: bool, tmp_path: Path) -> None:
    case = replace(MODEL, tied=tied)
    save(0, case, str(tmp_path))
    other = begin(0, replace(case, tied=not tied))
    initialise(other.built)
    before = other.state()
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        load(other.built, Store(str(tmp_path)).newest_good(other.comm, repair=False))
    after = other.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_layouts_of_experts_into_every_other(pool: RankPool, tied: bool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(pool, model_with_experts(tied=tied), EXPERTS, tmp_path, tell)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_dense_layouts_into_every_other(pool: RankPool, tied: bool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(pool, replace(MODEL, tied=tied), DENSE, tmp_path, tell)


@pytest.mark.slow
def test_delayed_scales_of_fp8_into_every_other(pool: RankPool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(pool, DELAYED, FP8, tmp_path, tell, each_trains=True)
    check_remembered(tmp_path)


@pytest.mark.slow
def test_delayed_scales_of_experts_into_every_other(pool: RankPool, tmp_path: Path, tell: Tell) -> None:
    each_into_others(pool, DELAYED_EXPERTS, FP8_EXPERTS, tmp_path, tell, each_trains=True)
    check_remembered(tmp_path)
