"""The host runs ahead of a GPU: it waits neither within a step nor for the step that it has just begun."""

import pytest
import torch

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.data.loader import pinned, read_batch
from megaspec.data.synthetic import SyntheticSource
from megaspec.estimate.target import Target
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime import loop
from megaspec.runtime.build import build, initialise
from megaspec.runtime.step import train_step
from tests.runtime.specs import spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

H200 = Target(gpus=1, gpu="NVIDIA H200", sm=90, cores=2)
BASE = {"precision.kind": "bf16", "kernels.compile": "none", "train.steps": 6}


def built_on_gpu(changes):
    made = spec(BASE | changes, H200)
    return build(made, mesh=Mesh({}, rank=0, device=torch.device("cuda", 0)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": {"kind": "fp16"}},
        {"model.dropout": 0.1, "data.document_mask": True},
        {"precision": {"kind": "fp8", "recipe": "tensorwise", "first_layers_bf16": 1}, "model.n_layers": 4},
        {
            "precision": {"kind": "fp8", "recipe": "delayed", "amax_history": 16, "first_layers_bf16": 1},
            "model.n_layers": 4,
        },
    ],
    ids=["bf16", "fp16", "dropout and documents", "fp8 of tensors", "fp8 delayed"],
)
def test_a_step_never_waits_for_the_gpu(changes):
    built = built_on_gpu(changes)
    initialise(built)
    data = built.spec.data
    source = SyntheticSource(data, split="train", seed=data.seed, segments=(100,))
    batches = [pinned(read_batch(source, [i, i + 1], document_mask=data.document_mask)) for i in (0, 2)]
    scaler = build_scaler(built.spec.precision, device=built.device)

    def one_step():
        moved = [b.to(built.device) for b in batches]
        result = train_step(built, moved, lr=1e-3, weight_decay=0.1, scaler=scaler)
        return loop.numbers_of(result, torch.zeros(0, device=result.loss.device))

    # libraries and kernels are loaded, also those of steps that have one before them
    one_step()
    one_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_of_a_step_are_read_while_the_next_one_runs(tmp_path, monkeypatch):
    """Each step keeps the GPU busy for a quarter of a second; reports come while it still is."""
    run = loop.Run(built_on_gpu({}), tmp_path, Store(tmp_path), SoloComm())
    run.start()
    ends, was_busy, was_busy_at_word = {}, {}, {}
    step = loop.train_step

    def slow_step(*arguments, **more):
        result = step(*arguments, **more)
        torch.cuda._sleep(500_000_000)
        ends[run.step + 1] = torch.cuda.Event()
        ends[run.step + 1].record()
        return result

    def note(event):
        if isinstance(event, loop.StepDone):
            was_busy[event.step] = not ends[run.step].query()

    read = run.saving_word.read

    def read_and_note():
        found = read()
        was_busy_at_word[run.step] = not ends[run.step].query()
        return found

    monkeypatch.setattr(loop, "train_step", slow_step)
    monkeypatch.setattr(run.saving_word, "read", read_and_note)
    run.emit = note
    run.train()
    # the last step is waited for: there is none after it
    assert was_busy == {n: n < 6 for n in range(1, 7)}
    # what ranks say of a save is known while the very step that it was said in still runs
    assert was_busy_at_word == was_busy
