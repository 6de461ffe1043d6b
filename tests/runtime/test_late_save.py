"""A save beside training that fails is told within a step, also where the host runs ahead of its device.

A GPU is stood in for: the host reads a step's numbers one step late, and the copy of the state is made when the device
has passed the step behind the save, which the host learns as it reads that step's numbers.
"""

import os
import select
import signal
from pathlib import Path

import pytest

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.saver import AsyncSaver
from megaspec.checkpoint.store import Store
from megaspec.core.errors import WriteError
from megaspec.log.events import CheckpointSaved, StepDone
from megaspec.runtime import rank as runtime
from megaspec.runtime.loop import Run
from tests.runtime.lives import build_here
from tests.runtime.specs import spec

EVERY = 10


class CopyEvent:
    """Of a copy that the device makes beside step `step`."""

    def __init__(self, run: Run, passed: list[int], step: int):
        self._run = run
        self._passed = passed
        self._step = step

    def query(self) -> bool:
        return not self._run.lag or self._passed[-1] >= self._step

    def synchronize(self) -> None:
        """The host waits for what was given to the device: it passes all of it."""
        self._passed.append(self._run.step)


class LateRun:
    """A run of 20 steps that saves at 10 and 20, and what happened when: steps by the host's count."""

    def __init__(self, folder: Path, *, lag: int, dies: bool):
        made = spec(
            {
                "train.steps": 2 * EVERY,
                "checkpoint": {"every": EVERY, "keep": 9, "saving": "async", "retries": 0},
                "precision.kind": "fp32",
            }
        )
        runtime.seed_generators(made.train.seed)
        self.run = Run(build_here(made, 0), folder, Store(folder), SoloComm())
        self.run.lag = lag
        self.passed = [0]
        self.sent: list[tuple[str, int]] = []
        """Jobs of the writer, and the step that the host had begun last."""
        self.told: list[tuple[int, int]] = []
        """Steps that were published, and when the host said so."""
        self.run.start()
        self.run.emit = self._emit
        saver = self.run.saver
        assert isinstance(saver, AsyncSaver)
        copy = saver._copy

        def copy_late(*words, **keywords):
            held = copy(*words, **keywords)
            saver._copied = CopyEvent(self.run, self.passed, self.run.step + 1)
            return held

        saver._copy = copy_late
        send = saver.writer.send

        def send_and_note(job):
            send(job)
            self.sent.append((job["do"], self.run.step))
            if dies and job["do"] == "write":
                os.kill(saver.writer.pid, signal.SIGKILL)
            # its answer is there at once: what is counted are steps, not seconds
            assert select.select([saver.writer._socket], [], [], 60.0)[0]

        saver.writer.send = send_and_note

    def _emit(self, event) -> None:
        if isinstance(event, StepDone):
            self.passed.append(event.step)
        if isinstance(event, CheckpointSaved):
            self.told.append((event.step, self.run.step))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_writer_that_dies_is_told_within_a_step(tmp_path, lag) -> None:
    late = LateRun(tmp_path, lag=lag, dies=True)
    with pytest.raises(WriteError, match="was killed by SIGKILL"):
        late.run.train()
    (job,) = [step for what, step in late.sent if what == "write"]
    # the host begins one step more than the device has passed when the copy is made
    assert job == EVERY + 2 * lag
    assert late.run.step == job + 1


@pytest.mark.parametrize("lag", [0, 1])
def test_a_save_is_published_as_soon_as_its_file_is_there(tmp_path, lag) -> None:
    late = LateRun(tmp_path, lag=lag, dies=False)
    late.run.train()
    assert [what for what, _ in late.sent] == ["write", "publish"] * 2
    write, publish = [step for _, step in late.sent][:2]
    # that the file is there is said when the next step begins, and that it is published in the one behind that
    assert (write, publish) == (EVERY + 2 * lag, EVERY + 2 * lag + 1)
    assert late.told[0] == (EVERY, publish + 1)
