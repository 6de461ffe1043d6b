"""Saves beside training on a GPU: copies run beside the next step, and no step is mixed into another."""

import os
import signal
from pathlib import Path

import pytest
import torch

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.saver import AsyncSaver, Tries
from megaspec.checkpoint.shard import SavedPiece
from megaspec.checkpoint.shared_buffer import SharedBuffer
from megaspec.checkpoint.store import Store
from megaspec.estimate.target import Target
from tests.runtime import lives
from tests.runtime.specs import spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

ONE_GPU = Target(gpus=1, gpu="NVIDIA H200", sm=90, cores=2)
ELEMENTS = 1 << 26
"""256 MiB: some 5 ms of copying, 0.1 ms of an update."""


def saver_in(folder: Path) -> AsyncSaver:
    return AsyncSaver(Tries(Store(folder)), SoloComm(), device=torch.device("cuda", 0))


def save(saver: AsyncSaver, step: int, state: list[torch.Tensor]) -> None:
    pieces = [SavedPiece(f"model/{i}", tuple(one.shape), (0,), one) for i, one in enumerate(state)]
    saver.save(step, pieces, spec={}, state={"step": step}, is_steady=lambda piece: piece.name != "model/1")


def test_the_shared_memory_is_page_locked():
    device = torch.device("cuda", 0)
    buffer = SharedBuffer(1 << 20, device=device)
    assert buffer.part(0, torch.empty(1 << 18, device=device)).is_pinned()
    buffer.close()


def test_a_save_holds_one_step_whatever_is_updated_behind_it(tmp_path):
    device = torch.device("cuda", 0)
    saver = saver_in(tmp_path)
    state = [torch.zeros(ELEMENTS, device=device) for _ in range(3)]
    for step in range(1, 13):
        # what is not steady is changed at once by the next forward pass
        state[1].add_(1.0)
        saver.before_update()
        state[0].add_(1.0)
        state[2].add_(1.0)
        if step % 4 == 0:
            save(saver, step, state)
    saver.finish()
    saver.close()
    store = Store(tmp_path)
    assert store.steps() == [4, 8, 12]
    for step in store.steps():
        with store.open(step, SoloComm()) as reader:
            for name in reader.names():
                held = reader.read(name)
                assert bool((held == step).all()), f"{name} of step {step}: {held.min()} to {held.max()}"


def test_the_host_does_not_wait_for_the_copies(tmp_path):
    """They are begun while the device is busy, and the call returns before it is done."""
    device = torch.device("cuda", 0)
    saver = saver_in(tmp_path)
    state = [torch.zeros(ELEMENTS, device=device) for _ in range(3)]
    pieces = [SavedPiece(f"model/{i}", tuple(one.shape), (0,), one) for i, one in enumerate(state)]
    saver.prepare(pieces)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # about a second
    save(saver, 1, state)
    assert not torch.cuda.current_stream().query(), "the call waited for the device"
    saver.finish()
    saver.close()


def test_a_writer_that_is_killed_on_a_gpu_rank(tmp_path):
    device = torch.device("cuda", 0)
    saver = saver_in(tmp_path)
    state = [torch.full((ELEMENTS,), 7.0, device=device)]
    saver.prepare([SavedPiece("model/0", tuple(state[0].shape), (0,), state[0])])
    assert saver.writer.pid is not None
    save(saver, 7, state)
    os.kill(saver.writer.pid, signal.SIGKILL)
    # as the optimizer does before it changes a weight: otherwise a slow copy holds some of what comes next
    saver.before_update()
    state[0].zero_()
    assert [one.step for one in saver.finish()] == [7]
    saver.close()
    with Store(tmp_path).open(7, SoloComm()) as reader:
        assert bool((reader.read("model/0") == 7).all())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_run_saves_the_same_tensors_either_way(tmp_path, gpu_pool, precision):
    """bf16, and fp8 by delayed scales, whose history a forward pass changes."""
    changes = {"precision.kind": "bf16", "kernels.compile": "none", "train.steps": 6}
    if precision == "fp8":
        changes["precision"] = {"kind": "fp8", "recipe": "delayed", "amax_history": 4, "first_layers_bf16": 1}
        changes["model.n_layers"] = 4
    found = {}
    for saving in ("blocking", "async"):
        made = spec(
            changes | {"checkpoint": {"every": 1, "keep": 9, "saving": saving}, "train.deterministic": True},
            ONE_GPU,
        )
        gpu_pool.run(lives.live, made.model_dump_json(), str(tmp_path / saving), ranks=1)
        found[saving] = lives.read_all(tmp_path / saving)
    assert list(found["async"]) == [1, 2, 3, 4, 5, 6]
    assert found["async"] == found["blocking"]
