"""What ranks run for `megaspec bench step`: a run as `train` builds it, some steps of it, and where their time went.

FOLDER/spec.json        the run
FOLDER/prediction.json  what is predicted of it
FOLDER/profiles.json    written by rank 0: an object for each rank that was profiled, as log/events.py has it
"""

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm
from megaspec.core.errors import MegaspecError
from megaspec.data.loader import Loader
from megaspec.data.source import ResumableSource
from megaspec.launcher.rendezvous import Rendezvous
from megaspec.log.events import StepsProfiled
from megaspec.nn.moe.module import Moe
from megaspec.optim.schedule import learning_rate, weight_decay
from megaspec.plugins import load
from megaspec.precision.scaler import build_scaler
from megaspec.profiling.recording import Recording
from megaspec.profiling.trace import TraceError
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.runtime.loop import open_training_source
from megaspec.runtime.position import Position
from megaspec.runtime.profile import profile_of
from megaspec.runtime.rank import (
    RankInfo,
    bounded,
    exit_code_of,
    join_world,
    leave_world,
    pick_device,
    read_prediction,
    read_spec,
    seed_generators,
)
from megaspec.runtime.step import train_step
from megaspec.train.batch_schedule import BatchSchedule

PROFILES = "profiles.json"


def main(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int,
    store: Rendezvous,
    timeout_seconds: float,
    warm: int,
    steps: int,
    ranks: Sequence[int] = (0,),
    balanced: bool = False,
    plugins: Sequence[str] = (),
) -> int:
    """Trains `warm` steps, then twice `steps`, the second time under a profiler. -> exit code (core/errors.py).

    `ranks`: that are profiled. `balanced`: every expert gets as many tokens as any other, as in benchmarks.
    """
    me = RankInfo(rank, world_size, local_rank, attempt, store, timeout_seconds)

    def run() -> None:
        load(plugins)
        profile_steps(Path(run_dir), me, warm=warm, steps=steps, ranks=ranks, balanced=balanced)

    return exit_code_of(me, run)


def profile_steps(
    folder: Path, me: RankInfo, *, warm: int, steps: int, ranks: Sequence[int], balanced: bool
) -> list[StepsProfiled]:
    """Builds, trains and profiles. -> on rank 0, which writes it too, what each of `ranks` showed."""
    spec = read_spec(folder)
    device = pick_device(spec, me.local_rank)
    with ExitStack() as stack:
        comm: Comm = SoloComm()
        if me.world_size > 1:
            join_world(me, device)
            stack.push(leave_world)
            comm = DistComm(device=device)
        position = Position(device)
        stack.enter_context(bounded(position, me))
        seed_generators(spec.train.seed)
        timeout = timedelta(seconds=me.timeout_seconds)
        built = build(spec, mesh=mesh_of(spec, rank=me.rank, device=device, timeout=timeout), position=position)
        initialise(built)
        if balanced:
            force_balance(built)
        training = stack.enter_context(_Training(built, last_step=warm + 2 * steps))
        training.run(warm)
        unprofiled = statistics.median(training.run(steps))
        recording = None
        if me.rank in ranks:
            recording = stack.enter_context(Recording(device, memory=False))
        # a profiler takes its time to start, each its own
        comm.barrier()
        if recording is not None:
            recording.begin()
        first = training.step + 1
        training.run(steps, waits=False)
        told = None
        if recording is not None:
            try:
                recorded = recording.finish()
            except TraceError as error:
                told = {"failed": str(error)}
            else:
                event = profile_of(
                    recorded,
                    built,
                    range(first, training.step + 1),
                    schedule=training.schedule,
                    prediction=read_prediction(folder),
                    files=[],
                    unprofiled_seconds=unprofiled,
                )
                told = asdict(event)
        everyone = [one for one in comm.gather(told) if one is not None]
        for one in everyone:
            if "failed" in one:
                raise MegaspecError(f"bench step: {one['failed']}")
        if me.rank != 0:
            return []
        (folder / PROFILES).write_text(json.dumps(everyone))
        return [StepsProfiled.from_plain(one) for one in everyone]


def force_balance(built: TrainState) -> None:
    """From now on every expert gets as many tokens as any other."""
    for chunk in built.chunks:
        for module in chunk.modules():
            if isinstance(module, Moe):
                module.force_balance()


class _Training:
    """While entered: the steps of a run, one after the other, from the first on."""

    def __init__(self, built: TrainState, *, last_step: int):
        self.built = built
        self.step = 0
        spec = built.spec
        self.schedule = BatchSchedule(spec.train, moved=spec.samples_moved)
        self._scaler = build_scaler(spec.precision, device=built.device)
        self._source = open_training_source(spec)
        self._loader = Loader(
            self._source,
            self.schedule,
            start_step=0,
            steps=last_step,
            micro_batch=spec.train.micro_batch,
            dp_rank=built.mesh.index("dp"),
            dp_size=built.mesh.size("dp"),
            device=built.device,
            document_mask=spec.data.document_mask,
        )
        self._batches = iter(self._loader)

    def __enter__(self) -> "_Training":
        return self

    def __exit__(self, *_: object) -> None:
        # the source first: the loader's thread may be waiting for it
        if isinstance(self._source, ResumableSource):
            self._source.close()
        self._loader.close()

    def run(self, steps: int, *, waits: bool = True) -> list[float]:
        """-> seconds of each step; with `waits` the host waits for the device behind each."""
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            self._train(waits=waits)
            seconds.append(time.perf_counter() - began)
        return seconds

    def _train(self, *, waits: bool) -> None:
        spec = self.built.spec
        self.step += 1
        self.built.position.step = self.step
        batch = next(self._batches)
        train_step(
            self.built,
            batch.micro_batches,
            lr=learning_rate(spec.optim.schedule, spec.optim.lr, self.step),
            weight_decay=weight_decay(spec.optim, self.step),
            scaler=self._scaler,
        )
        if waits and self.built.device.type == "cuda":
            torch.cuda.synchronize(self.built.device)
