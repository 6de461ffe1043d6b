"""Profiles some steps of a run, on the ranks that the recipe names, and tells rank 0 what they showed."""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megaspec.checkpoint.comm import Comm
from megaspec.core.errors import printable
from megaspec.core.regular_files import make_folder_inside, write_beside
from megaspec.log.events import StepsProfiled, TimeOfKind
from megaspec.log.prediction import Prediction
from megaspec.profiling.kinds import ATTENTION, COPIES, ELEMENT_WISE, MATRIX_PRODUCTS, OPTIMIZER
from megaspec.profiling.recording import Recorded, Recording, packed
from megaspec.profiling.spec import PROFILES
from megaspec.profiling.trace import TraceError
from megaspec.runtime.build import TrainState
from megaspec.train.batch_schedule import BatchSchedule


def profile_of(
    recorded: Recorded,
    built: TrainState,
    steps: range,
    *,
    schedule: BatchSchedule,
    prediction: Prediction | None,
    files: list[str],
    unprofiled_seconds: float | None = None,
) -> StepsProfiled:
    """What a recording of `steps` (counted from 1) shows, beside what was predicted of this rank's work and time."""
    found = recorded.breakdown
    meter = recorded.clock_and_power
    samples = sum(schedule.batch(step - 1) for step in steps)
    micro_batches = samples // (built.spec.train.micro_batch * built.mesh.size("dp"))
    work = _work(prediction, built.mesh.index("pp"), micro_batches=micro_batches, steps=len(steps))
    planned, no_plan = _plan(prediction, is_full=samples == len(steps) * built.spec.train.global_batch)
    kinds = {}
    for kind, one in found.kinds.items():
        flops, moved = work.get(kind, (None, None))
        if kind == COPIES:
            moved = one.copied_bytes
        kinds[kind] = TimeOfKind(
            seconds=one.seconds,
            busy_seconds=one.busy_seconds,
            count=one.count,
            flops=flops,
            bytes=moved,
            planned_seconds=None if planned is None else planned.get(kind, 0.0),
        )
    return StepsProfiled(
        step=steps[-1],
        first_step=steps[0],
        rank=built.mesh.rank,
        device=device_name(built.device),
        seconds=found.seconds,
        accounted=found.accounted,
        kinds=kinds,
        largest_other=found.largest_other,
        no_plan=no_plan,
        clock_mhz=meter.clock_mhz,
        clock_mhz_lowest=meter.clock_mhz_lowest,
        clock_mhz_highest=meter.clock_mhz_highest,
        power_watts=meter.power_watts,
        power_limit_watts=meter.power_limit_watts,
        no_clock=meter.why_none or None,
        unprofiled_seconds=unprofiled_seconds,
        files=files,
    )


def device_name(device: torch.device) -> str:
    """The GPU's, or that it is a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()})"


Amounts = dict[str, tuple[float | None, float | None]]
"""Kind -> FLOPs and bytes."""


def _work(prediction: Prediction | None, stage: int, *, micro_batches: int, steps: int) -> Amounts:
    """Of a rank of a pipeline stage, in all steps."""
    if prediction is None or not prediction.works:
        return {}
    work = prediction.works[stage]
    return {
        MATRIX_PRODUCTS: (work.product_flops * micro_batches, None),
        ATTENTION: (work.attention_flops * micro_batches, None),
        ELEMENT_WISE: (None, work.element_wise_bytes * micro_batches),
        OPTIMIZER: (None, work.optimizer_bytes * steps),
    }


def _plan(prediction: Prediction | None, *, is_full: bool) -> tuple[dict[str, float] | None, str | None]:
    """Seconds of a step by kind, or why they are not known."""
    if prediction is None:
        return None, "nothing was predicted of this run"
    if prediction.step_seconds is None:
        return None, prediction.no_step_seconds or "the run was started by an earlier version"
    if not is_full:
        return None, "the batch is still growing, and a plan is of the full one"
    return prediction.step_seconds, None


class StepProfiler:
    """Profiles the steps that `profile.steps` names and that are still to come. Every rank makes one, and calls it at
    the same steps; what the profiled ones find is told on rank 0.

    A profiler that fails costs the profile, never the run: what went wrong is told on stderr.
    """

    def __init__(
        self,
        built: TrainState,
        run_dir: Path,
        comm: Comm,
        *,
        schedule: BatchSchedule,
        prediction: Prediction | None,
        done_steps: int,
        is_ours: Callable[[], bool],
    ):
        """`is_ours`: on rank 0, whether the run's folder is still this job's."""
        self._built = built
        self._run_dir = run_dir
        self._comm = comm
        self._schedule = schedule
        self._prediction = prediction
        self._is_ours = is_ours
        profile = built.spec.profile
        self._is_profiled = comm.rank in profile.ranks
        self._memory = profile.memory
        self._steps = range(0)
        if profile.steps is not None:
            first, last = profile.steps
            self._steps = range(max(first, done_steps + 1), last + 1)
            if done_steps >= first and comm.rank == 0:
                # a run that goes on keeps the setting that it began with
                rest = f"steps {done_steps + 1} to {last} are profiled" if self._steps else "nothing is profiled"
                self._tell(f"profile.steps=[{first}, {last}]: {done_steps} steps are done; {rest}")
        self._recording: Recording | None = None
        self._stack = ExitStack()

    def _tell(self, text: str) -> None:
        print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)

    def begins_behind(self, step: int) -> bool:
        """Whether the next step is the first to profile: time to `begin`. 0: before the first step."""
        return bool(self._steps) and step == self._steps[0] - 1

    def ends_behind(self, step: int) -> bool:
        """Whether this step was the last to profile: time to `end`."""
        return bool(self._steps) and step == self._steps[-1]

    def borders(self, step: int) -> bool:
        """Whether the host has to have seen all of the device's work before it goes on."""
        return self.begins_behind(step) or self.ends_behind(step)

    @contextmanager
    def rest(self) -> Iterator[None]:
        """What happens in here is no part of a step."""
        if self._recording is None:
            yield
        else:
            with self._recording.rest():
                yield

    def begin(self) -> None:
        """The next step is profiled. All ranks meet here."""
        if self._is_profiled:
            self._recording = self._stack.enter_context(Recording(self._built.device, memory=self._memory))
        # a profiler takes its time to start, each its own
        self._comm.barrier()
        if self._recording is not None:
            self._recording.begin()

    def end(self) -> list[StepsProfiled]:
        """The steps are done, and the device has done all of their work. -> on rank 0 what was found, by rank."""
        may_write = self._comm.broadcast(self._comm.rank == 0 and self._is_ours())
        mine: dict[str, Any] | None = None
        if self._recording is not None:
            mine = self._finish(self._recording, may_write=may_write)
        self.close()
        # in one place, so that one rank's failure is no other's wait
        everyone = self._comm.gather(mine)
        if self._comm.rank != 0:
            return []
        found = []
        for rank, told in enumerate(everyone):
            if told is None:
                continue
            for what in ("failed", "not_written"):
                if what in told:
                    self._tell(f"profile of rank {rank}: {told[what]}; training goes on")
            if "event" in told:
                found.append(StepsProfiled.from_plain(told["event"]))
        return found

    def close(self) -> None:
        """Ends what has begun, where steps end before the profile does."""
        self._stack.close()
        self._recording = None

    def _finish(self, recording: Recording, *, may_write: bool) -> dict[str, Any]:
        """This rank's profile as plain data: `event`, or `failed` with why there is none; `not_written` with why its
        files could not be written."""
        contents: dict[str, bytes] = {}
        try:
            with tempfile.TemporaryDirectory(prefix="megaspec-memory-") as folder:
                memory = Path(folder, "memory.pickle")
                if recording.write_memory(memory):
                    contents["memory.pickle"] = memory.read_bytes()
            recorded = recording.finish()
        except (TraceError, OSError, RuntimeError) as error:
            return {"failed": str(error)}
        contents["trace.json.gz"] = packed(recorded.trace)
        event = profile_of(
            recorded, self._built, self._steps, schedule=self._schedule, prediction=self._prediction, files=[]
        )
        told: dict[str, Any] = {}
        if may_write:
            try:
                event = replace(event, files=self._write(event, contents))
            except OSError as error:
                told["not_written"] = f"{error.filename or self._run_dir} can't be written: {error.strerror}"
        return told | {"event": asdict(event)}

    def _write(self, event: StepsProfiled, contents: dict[str, bytes]) -> list[str]:
        """Writes the files and the event itself, each whole or not at all. -> their names in the run's folder."""
        stem = f"steps-{event.first_step}-{event.step}-rank-{event.rank}"
        names = [f"{PROFILES}/{stem}.{suffix}" for suffix in (*contents, "json")]
        as_json = json.dumps(asdict(replace(event, files=names)), indent=1) + "\n"
        make_folder_inside(self._run_dir, PROFILES)
        for name, content in zip(names, (*contents.values(), as_json.encode()), strict=True):
            path = self._run_dir / name
            temporary = write_beside(path, [content])
            try:
                os.replace(temporary, path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise OSError(error.errno, error.strerror, str(path)) from None
        return names
