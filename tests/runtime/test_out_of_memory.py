"""A GPU's memory that runs out is told in the words of the plan."""

import pytest
import torch
import torch.distributed as dist

from megaspec.core.errors import MemoryRunOut
from megaspec.core.units import GIB
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.target import Target
from megaspec.launcher.rendezvous import FileRendezvous
from megaspec.log import prediction
from megaspec.plan.predict import predict
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.runtime.out_of_memory import out_of_memory
from megaspec.runtime.position import Position
from megaspec.runtime.rank import RankInfo, bounded, explained
from megaspec.search.remedies import savings
from tests.parity.cases import Case, spec_of
from tests.search.test_remedies import changed, eight_b

TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB\nand more"


def test_rank_place_prediction_and_what_saves_most() -> None:
    spec = spec_of(Case(tp=2))
    target = Target(gpus=2, gpu="NVIDIA H200", sm=90, gpu_memory=HARDWARE["H200"].memory, versions={"torch": ""})
    where = "step 3, backward of micro batch 1, layers.0"
    error = out_of_memory(predict(spec, target), rank="1 of 2", stage=0, where=where, cause=TORCH)
    first, second, *_ = str(error).splitlines()
    assert error.exit_code == 64
    assert first == f"rank 1 of 2 ran out of memory in {where}: {TORCH.splitlines()[0]}"
    assert second.startswith(f"predicted for this rank: {memory_of(spec)[0].total / GIB:,.1f} GiB (weights ")


def test_the_three_changes_that_save_most() -> None:
    gpu = HARDWARE["H100"]
    target = Target(gpus=8, gpu=gpu.name, sm=gpu.sm, gpu_memory=gpu.memory, versions={"torch": ""})
    recipe = eight_b({"dp_replicate": 8})
    spec = resolve(changed(recipe, ["launcher.ranks=8"]), target, Facts(run_dir="-"))
    *_, last = str(out_of_memory(predict(spec, target), rank="3 of 8", stage=0, where="here", cause=TORCH)).splitlines()
    said = last.removeprefix("what saves most, as predicted for the fullest rank: ").split("; ")
    ways = savings(spec, gpu)
    assert said == [f"{' '.join(way.overrides)} ({way.total / GIB:,.1f} GiB)" for way in ways]
    assert len(ways) == 3


def test_savings_are_real_legal_and_sorted() -> None:
    recipe, gpu = eight_b({"dp_replicate": 8}), HARDWARE["H100"]
    ways = savings(recipe, gpu, most=50)
    assert [w.total for w in ways] == sorted(w.total for w in ways)
    assert all(w.total < fullest(memory_of(recipe)).total for w in ways)
    assert savings(recipe, gpu) == ways[:3]
    assert ways
    assert all("=" in word for way in ways for word in way.overrides)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(TORCH),
        dist.DistBackendError("NCCL error in: a.cpp\nCuda failure 2 'out of memory'"),
        dist.DistBackendError("NCCL error in: a.cpp\nLast error:\nFailed to CUDA calloc 8388608 bytes"),
        torch.AcceleratorError("CUDA error: out of memory\nand more"),
    ],
    ids=["torch", "NCCL", "NCCL calloc", "CUDA"],
)
def test_a_rank_raises_it(tmp_path, error: RuntimeError) -> None:
    spec = spec_of(Case(tp=2))
    target = Target(gpus=2, gpu="NVIDIA H200", sm=90, gpu_memory=HARDWARE["H200"].memory, versions={"torch": ""})
    (tmp_path / prediction.FILE_NAME).write_text(predict(spec, target).model_dump_json())
    position = Position(torch.device("cpu"), step=2)
    position.mark("forward of micro batch 0, head")
    me = RankInfo(1, 2, 1, 0, FileRendezvous(""), 20.0)
    words = "rank 1 of 2 ran out of memory in step 2, forward of micro batch 0, head: .*(out of memory|CUDA calloc)"
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(MemoryRunOut, match=words), explained(spec, tmp_path, position, me), bounded(position, me):
            raise error
    finally:
        dist.destroy_process_group()


def test_another_failure_of_a_collective_stays_what_it_is(tmp_path) -> None:
    spec, me = spec_of(Case(tp=2)), RankInfo(1, 2, 1, 0, FileRendezvous(""), 20.0)
    gone = dist.DistBackendError("NCCL error in: a.cpp\nsocket closed")
    with pytest.raises(dist.DistBackendError), explained(spec, tmp_path, Position(torch.device("cpu")), me):
        raise gone
