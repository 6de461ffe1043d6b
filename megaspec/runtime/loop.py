"""The one training loop: steps, evaluation, checkpoints, and stopping when asked."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Never

import numpy as np
import psutil
import torch

from megaspec.checkpoint.comm import Comm, on_first
from megaspec.checkpoint.copier import Copier, Tidying
from megaspec.checkpoint.examine import Inspect, newest_whole
from megaspec.checkpoint.fallback import adopt, file_elsewhere, is_own_place, put_aside_from, refuse_unwritable
from megaspec.checkpoint.files import DiskError
from megaspec.checkpoint.format import Manifest
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.remote import Found, Identity
from megaspec.checkpoint.retention import kept, kept_beside_newest
from megaspec.checkpoint.saver import MEET_SECONDS, Saved, Saver, Tries, build_saver, build_tries
from megaspec.checkpoint.shard import SavedPiece
from megaspec.checkpoint.store import START_ANEW, Store
from megaspec.core import counted
from megaspec.core.errors import CheckpointError, NonFiniteError, Preempted, WriteError, printable
from megaspec.core.faults import failpoint
from megaspec.data.loader import Loader, StepBatch, open_source
from megaspec.data.source import ResumableSource, Source
from megaspec.data.spec import ORDER_VERSION, StreamSpec
from megaspec.data.stream_files import check_unchanged
from megaspec.data.urls import data_here
from megaspec.launcher.stop import stop_requested
from megaspec.log.events import (
    CheckpointSaved,
    DataLeftOut,
    EvalDone,
    Event,
    RolledBack,
    RunStarted,
    Sampled,
    StepDone,
    UpdateSkipped,
)
from megaspec.log.jsonl import is_evaluated, losses_by_step
from megaspec.log.prediction import Prediction
from megaspec.log.sinks import METRICS
from megaspec.log.speed import speed_of
from megaspec.optim.schedule import learning_rate, weight_decay
from megaspec.precision.scaler import LossScaler, build_scaler
from megaspec.rules.belonging import (
    NUMBERS,
    WEIGHTS_ALONE,
    began_as_fork,
    fork_again,
    holds_weights_alone,
    is_fork_point,
    last_of_weights,
    objections,
    owner_of,
    refuse_copies_of_another,
    unlike,
)
from megaspec.runtime.build import TrainState
from megaspec.runtime.checks import Checks, Suspicion, build_checks
from megaspec.runtime.data_place import PLACE, place_of_all, place_piece, read_place
from megaspec.runtime.evaluation import Evaluation
from megaspec.runtime.generate import run_tokenizer, write_sample
from megaspec.runtime.held import memory_held
from megaspec.runtime.initial_weights import start_from_source
from megaspec.runtime.non_finite import explain, explain_end, first_seen
from megaspec.runtime.pace import Pace
from megaspec.runtime.plugins import loaded_builders
from megaspec.runtime.position import Position
from megaspec.runtime.profile import StepProfiler
from megaspec.runtime.roll_back import RollBack, only_before, open_before
from megaspec.runtime.router_metrics import router_numbers, routers_done
from megaspec.runtime.state import load, misfits, pieces_of, progress, tell_passed_over, weight_pieces_of
from megaspec.runtime.step import PHASES, StepResult, train_step
from megaspec.runtime.stragglers import BACKWARD, DATA, FORWARD, OPTIMIZER, REDUCE
from megaspec.runtime.text_passes import ModelOnRanks
from megaspec.spec import UNKNOWN_ORIGIN, ForkPoint, Spec
from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.guard import Guard, Window

Mark = float | torch.cuda.Event
MOST_KEPT_BYTES = 64 << 20
"""Of the GPU's memory, what tensors that are made for a save may take until they are copied."""


class StepClock:
    """Seconds of each step: by events on a GPU, since the host runs ahead of it."""

    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """The next lap begins now."""
        self._last = self.mark()

    def mark(self) -> Mark:
        """The point in time when the device has done all that it was given so far."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, mark: Mark) -> float:
        """Waits until the device has passed `mark`. -> seconds from the last lap to it."""
        last = self._last
        self._last = mark
        if not self.is_cuda:
            return mark - last
        mark.synchronize()
        return self.between(last, mark)

    def between(self, first: Mark, second: Mark) -> float:
        """Seconds between two points in time, both of which the device has passed."""
        if not self.is_cuda:
            return second - first
        return first.elapsed_time(second) / 1e3  # from milliseconds


class PhaseMarks:
    """Where the phases of a step end; it begins when this is made."""

    def __init__(self, clock: StepClock, position: Position):
        self._clock = clock
        self._began = clock.mark()
        self._ends: dict[str, Mark] = {}
        self._inside = [counted.seconds_inside()]
        self._passes = position.begin_passes()

    def end(self, phase: str) -> None:
        """The device was given all of a phase's work."""
        self._ends[phase] = self._clock.mark()
        self._inside.append(counted.seconds_inside())

    def seconds(self) -> dict[str, float]:
        """By phase, in the words of StepDone, once the device has passed them all."""
        found = {}
        last = self._began
        for phase in PHASES:
            found[f"{phase}_seconds"] = self._clock.between(last, self._ends[phase])
            last = self._ends[phase]
        return found

    def own_seconds(self, waited_seconds: float) -> dict[str, float]:
        """By phase, in the words of SlowRank, without what was spent inside of collectives (on a GPU not known)."""
        own = []
        for seconds, (before, after) in zip(self.seconds().values(), pairwise(self._inside), strict=True):
            # of a GPU's collectives the host knows only how long it took to ask for them
            waited = 0.0 if self._clock.is_cuda else after - before
            own.append(max(0.0, seconds - waited))
        forward_backward, reduce, update = own
        forward = min(forward_backward, self._passes.seconds(self._clock.between))
        return {
            DATA: waited_seconds,
            FORWARD: forward,
            BACKWARD: forward_backward - forward,
            REDUCE: reduce,
            OPTIMIZER: update,
        }


def numbers_of(result: StepResult, routers: torch.Tensor) -> torch.Tensor:
    """float64 [11 + n] on the CPU: loss, gradient norm, tokens, skipped, loss scale, ranks that ask to stop, broken
    losses, the three of `Found`, elements that saturated (-1: none can), and those of `routers`.

    From a GPU they are there once it has passed a mark that is set after this call. The copy is queued here, behind its
    own step: asked for later, it would queue, and its reader wait, behind the steps that were begun meanwhile.
    """
    found = result.found
    scalars = (
        result.loss,
        result.grad_norm,
        result.tokens,
        result.skipped,
        result.loss_scale,
        result.asked_to_stop,
        result.broken_losses,
        found.changed,
        found.recomputed,
        found.differing,
    )
    of_step = torch.stack([scalar.to(torch.float64) for scalar in scalars])
    saturated = of_step.new_full((1,), -1.0)
    if result.saturated is not None:
        saturated = result.saturated.to(torch.float64)
    numbers = torch.cat([of_step, saturated, routers.flatten()])
    if numbers.device.type == "cpu":
        return numbers
    return torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)


def memory_of(device: torch.device) -> int:
    """Bytes: the most that a GPU has held, on the CPU what this process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


@dataclass(frozen=True)
class ReadBatch:
    """A step's batch, and how long the host waited for it."""

    batch: StepBatch
    waited_seconds: float


def read_batches(loader: Iterable[StepBatch]) -> Iterator[ReadBatch]:
    """What a loader gives."""
    batches = iter(loader)
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield ReadBatch(batch, time.perf_counter() - began)


def ignore(event: Event) -> None:
    """What ranks other than 0 do with an event."""


def always() -> bool:
    """Who has the run folder to itself."""
    return True


@dataclass(frozen=True)
class PendingStep:
    """A step that the device was given, and whose numbers the host has not read yet."""

    step: int
    read: ReadBatch
    result: StepResult
    numbers: torch.Tensor
    """As `numbers_of` makes them; there once the device has passed `mark`."""
    phases: PhaseMarks
    mark: Mark


class SavingWord:
    """What the ranks say of the save under way in a step, read while that step runs.

    It is summed before all else of the step, and its copy to the host is queued there: a GPU has made it when it begins
    with the step, for which the host waits anyway (it reads the numbers of the step before). Read with the step's own
    numbers it would come a step later, since those are read while the next one runs.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def take(self, summed: torch.Tensor) -> None:
        """Right behind the sum, before the device is given anything else."""
        self._copied = None
        self._sum = summed
        if summed.device.type == "cuda":
            self._sum = torch.empty_like(summed, device="cpu", pin_memory=True).copy_(summed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> int:
        """0 where no step was taken since the last time."""
        if self._sum is None:
            return 0
        if self._copied is not None:
            self._copied.synchronize()
        found = int(self._sum)
        self._sum = None
        return found


def changes_in_updates_alone(piece: SavedPiece) -> bool:
    """Whether nothing but the optimizer's update, and what follows it, changes what a piece is of: neither a forward
    pass, as it does the largest elements of fp8, nor a backward pass."""
    return piece.name.startswith(("model/", "optim/"))


@dataclass
class Run:
    """One rank's run. `emit` takes events; rank 0 sets it."""

    built: TrainState
    run_dir: Path
    store: Store
    comm: Comm
    emit: Callable[[Event], None] = ignore
    started: RunStarted = field(default_factory=lambda: RunStarted(step=0, steps=0))
    """What speed is measured against."""
    prediction: Prediction | None = None
    """What profiles are compared with."""
    is_ours: Callable[[], bool] = always
    """Rank 0: whether the run's folder is still this job's."""
    step: int = 0
    tokens: int = 0
    last_saved: int = -1
    last_path: Path | None = None
    """Of the checkpoint that the run goes on from."""
    evaluation: Evaluation = field(init=False)
    pace: Pace = field(init=False)
    place: np.ndarray | None = None
    """Where this rank's source stands after `step`, for a source that has to be told when the run goes on."""
    scaler: LossScaler = field(init=False)
    guard: Guard = field(init=False)
    checks: Checks | None = field(init=False, default=None)
    tries: Tries = field(init=False)
    saver: Saver = field(init=False)
    copier: Copier | None = field(init=False, default=None)
    """Rank 0, where checkpoints are copied."""
    losses: dict[int, float] = field(default_factory=dict)
    """Rank 0: by step, of the evaluations that say which checkpoints are best."""
    schedule: BatchSchedule = field(init=False)
    has_told_memory: bool = False
    saving_word: SavingWord = field(default_factory=SavingWord)
    lag: int = field(init=False)
    """Steps by which the host reads a step's numbers late: one on a GPU, which so never waits for the host."""

    def __post_init__(self) -> None:
        self.lag = 1 if self.built.device.type == "cuda" else 0
        self.evaluation = Evaluation(self.built)
        self.pace = Pace(self.built.mesh, self.comm, self.built.device)
        self.scaler = build_scaler(self.built.spec.precision, device=self.built.device)
        spec = self.built.spec
        self.guard = Guard(spec.train.numbers, spec.train.skip_steps)
        self.schedule = BatchSchedule(spec.train, moved=spec.samples_moved)
        on_first(self.comm, self._refuse_bad_fallback)
        self.tries = build_tries(spec.checkpoint, self.store)
        self.saver = build_saver(
            spec.checkpoint, self.tries, self.comm, device=self.built.device, on_wait=self._wait_for_writer
        )
        if spec.checkpoint.copy_to is not None and self.comm.rank == 0:
            tidying = Tidying(self._may_go_there, self._goes_there)
            self.copier = Copier(spec.checkpoint.copy_to, self.run_dir, owner=owner_of(spec), tidying=tidying)

    def start(self) -> None:
        """Goes on from the newest good checkpoint, or starts with the weights that `init` names, or from the seed.

        CheckpointError: there is no good one, though some were saved or the run began as a fork.
        """
        spec = self.built.spec
        is_fork = began_as_fork(spec)
        way_out = fork_again(spec) if is_fork else START_ANEW
        place = self._fetch_from_elsewhere()
        reader = self._newest_elsewhere(place, inspect=self._objections, repair=True)
        if reader is None:
            reader = self.store.newest_good(self.comm, inspect=self._objections, way_out=way_out)
        if reader is None and is_fork:
            raise CheckpointError(f"{self.store.folder}: no checkpoint is left; {way_out}")
        if reader is None:
            if self.comm.rank == 0:
                self._tell_new_start()
            start_from_source(self.built, self.comm)
            return
        if self.comm.rank == 0:
            tell_passed_over(reader)
        with reader:
            if holds_weights_alone(reader.manifest) and reader.step < spec.train.steps:
                raise CheckpointError(f"{reader.path} {last_of_weights(self.run_dir)}")
            self._load(reader)
            self.guard.load_state(self._numbers_of(reader))
            self.last_saved = self.step
            self.last_path = reader.path

    def _newest_elsewhere(self, place: Path | None, *, inspect: Inspect, repair: bool) -> Reader | None:
        """The newest good checkpoint of those that the run folder has no room for, where it is newer than all there.

        `place`: their folder; None: there are none. `repair`: see Store.newest_good.
        """
        if place is None:
            return None
        newest_at_home = on_first(self.comm, lambda: newest_whole(self.store.folder, inspect))
        is_own = is_own_place(place, self.built.spec.checkpoint.fallback_dir, self.run_dir)
        store = Store(place.parent, lock=self.store.lock if is_own else None)
        try:
            reader = store.newest_good(self.comm, repair=repair and is_own, inspect=inspect)
        except DiskError:
            # it may be whole: to go on from an older one would lose what it holds
            raise
        except CheckpointError as error:
            self._tell([str(error)])
            return None
        if reader is None:
            return None
        if newest_at_home is not None and reader.step <= newest_at_home:
            reader.close()
            return None
        self._tell([f"the run goes on from step {reader.step} in {place}"])
        return reader

    def _load(self, reader: Reader) -> None:
        """All that a run is from a checkpoint, but for what it knows of its numbers."""
        load(self.built, reader, comm=self.comm)
        if self.checks is not None:
            self.checks.forget()
        self.step = reader.state["step"]
        self.tokens = reader.state["tokens"]
        self.scaler.load_state(reader.state["loss_scale"])
        # a fork to another stream begins that at its beginning, also where it comes back to where it began
        self.place = None
        if self.schedule.consumed(self.step) > 0:
            self.place = read_place(reader)

    def _numbers_of(self, reader: Reader) -> dict[str, Any]:
        """What the run knows of its numbers there; nothing of those before a fork, and of an earlier version."""
        if is_fork_point(reader.manifest, self.built.spec):
            return {}
        return reader.state.get(NUMBERS, {})

    def _refuse_bad_fallback(self) -> None:
        """Rank 0: WriteError where nothing can be saved in the other place."""
        fallback_dir = self.built.spec.checkpoint.fallback_dir
        if fallback_dir is not None:
            refuse_unwritable(fallback_dir, self.run_dir)

    def _fetch_from_elsewhere(self) -> Path | None:
        """Moves home what an earlier start saved in another place. -> as `_bring_home`."""
        on_first(self.comm, self._check_copies)
        return self._bring_home(partial(objections, run=self.built.spec))

    def _check_copies(self) -> None:
        """Rank 0: WriteError where copies would not arrive, or would be among another run's."""
        if self.copier is not None:
            self.copier.check(partial(refuse_copies_of_another, run=self.built.spec))

    def _bring_home(self, inspect: Inspect) -> Path | None:
        """Moves home what was saved in another place, and tells of it. -> the folder in which the newest stays, since
        the run folder has no room for it; None where that has it."""

        def bring() -> dict[str, Any]:
            losses = self._losses_on_disk()
            done = adopt(self.run_dir, self.built.spec.checkpoint, inspect, losses=losses)
            place = None if done.place is None else str(done.place)
            return {"lines": [*done.lines, *done.left], "place": place}

        done = on_first(self.comm, bring)
        self._tell(done["lines"])
        return None if done["place"] is None else Path(done["place"])

    def _losses_on_disk(self) -> dict[int, float]:
        """Rank 0: by step, of the evaluations that say which checkpoints are best; none where nothing asks for it."""
        checkpoint = self.built.spec.checkpoint
        if not checkpoint.keep_best:
            return {}
        elsewhere = file_elsewhere(checkpoint.fallback_dir, self.run_dir, METRICS)
        return losses_by_step(self.run_dir / METRICS, checkpoint.best_by, elsewhere=elsewhere)

    def _tell(self, lines: Sequence[str]) -> None:
        """On rank 0's stderr."""
        for line in lines:
            if self.comm.rank == 0:
                print(printable(f"megaspec: {line}"), file=sys.stderr, flush=True)

    def _tell_new_start(self) -> None:
        """Says on stderr that a run which was under way before, or may have been, starts with weights from the seed."""
        text = f"megaspec: {self.run_dir} has no checkpoint: starting from step 0"
        if self.built.spec.forked_from == UNKNOWN_ORIGIN:
            text += "; its Spec is of an earlier version, which did not note whether it began as a fork: "
            text += "if it did, stop it, delete it and fork again"
        elif not (self.run_dir / METRICS).exists():
            return
        print(printable(text), file=sys.stderr, flush=True)

    def _objections(self, manifest: Manifest) -> list[str]:
        """Why this rank can't go on from a checkpoint."""
        spec = self.built.spec
        found = objections(manifest, spec) or misfits(self.built, manifest)
        if (
            isinstance(spec.data, StreamSpec)
            and self.schedule.consumed(manifest.step)
            and PLACE not in manifest.tensors
            and not holds_weights_alone(manifest)
        ):
            found = [*found, f"holds no {PLACE}: where the stream of its data stood"]
        return found

    def train(self) -> None:
        """Trains to the last step.

        Raises Preempted once a stop was asked for and the run is saved, NonFiniteError where bad numbers are beyond
        their budget, or where the run ends in them.
        """
        try:
            self._begin_saving()
            while True:
                try:
                    self._train_on()
                    break
                except RollBack as back:
                    self._roll_back(back)
        except NonFiniteError:
            # all ranks raise it together, so what is being saved, of a step before, can be saved to its end
            self._finish_saving()
            raise
        finally:
            self.saver.close()
            if self.copier is not None:
                self.copier.close()
        self._refuse_bad_end()
        self._sample()

    def _refuse_bad_end(self) -> None:
        """NonFiniteError, on all ranks: the run is at its end, and learned nothing, or nothing in its last steps."""
        spec = self.built.spec
        first = 1
        if isinstance(spec.forked_from, ForkPoint):
            first = spec.forked_from.step + 1
        error = explain_end(self.guard, steps=range(first, self.step + 1), lr=spec.optim.lr)
        if error is not None:
            raise error

    def _train_on(self) -> None:
        """Trains to the last step, or raises RollBack where the run has to go on from an earlier one."""
        spec = self.built.spec
        self.checks = build_checks(self.built, self.comm, step=self.step)
        if self.comm.rank == 0:
            self.losses = self._losses_on_disk()
        if self._owes_evaluation():
            self._evaluate()
        source = open_training_source(spec)
        if isinstance(source, ResumableSource) and self.place is not None:
            source.go_to(self.place)
        loader = Loader(
            source,
            self.schedule,
            start_step=self.step,
            steps=spec.train.steps - self.step,
            micro_batch=spec.train.micro_batch,
            dp_rank=self.built.mesh.index("dp"),
            dp_size=self.built.mesh.size("dp"),
            device=self.built.device,
            document_mask=spec.data.document_mask,
        )
        clock = StepClock(self.built.device)
        pending: list[PendingStep] = []
        profiler = StepProfiler(
            self.built,
            self.run_dir,
            self.comm,
            schedule=self.schedule,
            prediction=self.prediction,
            done_steps=self.step,
            is_ours=self.is_ours,
        )
        try:
            if profiler.begins_behind(self.step):
                profiler.begin()
                clock.restart()
            for read in read_batches(loader):
                stop = False
                if self.guard.leaves_out(self.step + 1):
                    stop = self._report_all(pending, clock)
                    self._leave_out(read.batch)
                    at_rest = True
                else:
                    phases = PhaseMarks(clock, self.built.position)
                    result = self._one_step(read.batch, on_phase=phases.end)
                    self.step += 1
                    self.place = read.batch.place
                    routers = router_numbers(self.built, result.routers)
                    numbers = numbers_of(result, routers)
                    # the mark after the numbers: their copy is a part of what it waits for
                    pending.append(PendingStep(self.step, read, result, numbers, phases, clock.mark()))
                    at_rest = self._wants_rest() or profiler.borders(self.step)
                lag = 0 if at_rest else self.lag
                while len(pending) > lag:
                    stop = self._report(pending.pop(0), clock) or stop
                if self.copier is not None:
                    self.copier.poll()
                if self.saving_word.read() >= self.comm.size:
                    self._saved(self.saver.settle())
                if stop:
                    # what is saved has been looked at: a step that is not finite raises here
                    self._report_all(pending, clock)
                    # an evaluation that is due is made up for by the resumed run: it may take longer than the grace
                    self._save()
                    self._finish_saving()
                    raise Preempted(f"stopped after step {self.step} and saved; {self._goes_on()}")
                if profiler.ends_behind(self.step):
                    for event in profiler.end():
                        self.emit(event)
                with profiler.rest():
                    if self._evaluation_due():
                        self._evaluate()
                    if self._due(spec.checkpoint.every) or self.step == spec.train.steps:
                        self._save()
                if profiler.begins_behind(self.step):
                    profiler.begin()
                if at_rest:
                    # evaluating, saving and a profiler's start are no part of the next step's time
                    clock.restart()
            self._finish_saving()
            self._finish_copying()
        finally:
            profiler.close()
            # the source first: the loader's thread may be waiting for it
            if isinstance(source, ResumableSource):
                source.close()
            loader.close()

    def _leave_out(self, batch: StepBatch) -> None:
        """Takes a step that updates nothing."""
        self.step += 1
        self.place = batch.place
        self.guard.note_left_out(self.step)
        first, count = batch.ids
        steps = self.built.spec.train.steps
        self.emit(DataLeftOut(step=self.step, steps=steps, first_sample=first, samples=count))

    def _report_all(self, pending: list[PendingStep], clock: StepClock) -> bool:
        """Reports what was not yet. -> whether some rank asked to stop."""
        stop = False
        while pending:
            stop = self._report(pending.pop(0), clock) or stop
        return stop

    def _roll_back(self, back: RollBack) -> None:
        """Goes back before the window of `back`, and saves there that it is left out."""
        window = back.verdict.window
        # what is being saved is of a step before: it may be what the run goes back to
        self._finish_saving()
        if self.built.device.type == "cuda":
            # steps that were begun behind the bad one still write
            torch.cuda.synchronize(self.built.device)
        before = only_before(window, self._objections)
        place = self._bring_home_before(window)
        saved_before = on_first(self.comm, self.store.steps)
        elsewhere = self._newest_elsewhere(place, inspect=before, repair=False)
        with open_before(self.store, self.comm, back, elsewhere, inspect=before) as reader:
            self._load(reader)
            self.guard.roll_back(window, to=self._numbers_of(reader))
        on_first(self.comm, lambda: self._leave_behind(self.step, saved_before))
        first_sample = self.schedule.consumed(window.first - 1)
        event = RolledBack(
            step=self.step,
            from_step=back.verdict.step,
            first_left_out=window.first,
            last_left_out=window.last,
            first_sample=first_sample,
            samples=self.schedule.consumed(window.last) - first_sample,
            kind=back.verdict.kind,
            loss=back.loss,
            grad_norm=back.grad_norm,
            where=back.where,
            rollbacks=self.guard.rollbacks,
            allowed=self.guard.spec.rollbacks,
        )
        self.emit(event)
        # so that a run that is killed now leaves the same data out
        self.last_saved = -1
        self._save()

    def _bring_home_before(self, window: Window) -> Path | None:
        """Moves home what was saved in another place before a window. -> as `_bring_home`."""
        try:
            return self._bring_home(only_before(window, partial(objections, run=self.built.spec)))
        except WriteError as error:
            # of a place that is this run's no more: it goes back as far as its own folder says
            self._tell([str(error)])
            return None

    def _leave_behind(self, step: int, saved_before: Sequence[int]) -> None:
        """Rank 0: the run went back to a step; no start, and nobody who fetches a copy, is to go on from a later one.
        `saved_before`: steps that its folder held."""
        fallback_dir = self.built.spec.checkpoint.fallback_dir
        elsewhere = put_aside_from(self.run_dir, fallback_dir, step + 1, f"the run went back to step {step}")
        if self.copier is not None:
            for gone in {*saved_before, *elsewhere} - set(self.store.steps()):
                self.copier.drop(gone)

    def _one_step(self, batch: StepBatch, *, on_phase: Callable[[str], object]) -> StepResult:
        spec = self.built.spec
        self.built.position.step = self.step + 1
        failpoint("step")
        if self.checks is not None:
            self.checks.begin(self.step + 1)
        return train_step(
            self.built,
            batch.micro_batches,
            lr=learning_rate(spec.optim.schedule, spec.optim.lr, self.step + 1),
            weight_decay=weight_decay(spec.optim, self.step + 1),
            scaler=self.scaler,
            stop=stop_requested(),
            limits=self.guard.limits(self.step + 1),
            checks=self.checks,
            saving=self.saver.word(),
            on_saving=self.saving_word.take,
            before_update=self.saver.before_update,
            on_phase=on_phase,
        )

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _evaluation_due(self) -> bool:
        """After every train.eval_every-th step and after the last one; never where that is 0."""
        train = self.built.spec.train
        return train.eval_every > 0 and (self._due(train.eval_every) or self.step == train.steps)

    def _wants_rest(self) -> bool:
        """Whether the host has to have seen everything before it goes on."""
        spec = self.built.spec
        return self._evaluation_due() or self._due(spec.checkpoint.every) or self.step == spec.train.steps

    def _report(self, pending: PendingStep, clock: StepClock) -> bool:
        """Reads a step's numbers, checks and emits them. -> whether some rank asked to stop."""
        spec = self.built.spec
        step = pending.step
        # this waits for the device, so the numbers are read after it
        seconds = clock.lap(pending.mark)
        loss, norm, tokens, skipped, loss_scale, stop, broken_losses, *others = pending.numbers.tolist()
        changed, recomputed, differing, saturated, *of_routers = others
        self.tokens += int(tokens)
        if self.checks is not None:
            self._look_at_checks(step, changed, recomputed, differing)
        # a smaller loss scale cures gradients that overflow, never a loss
        overflows = not broken_losses and not isfinite(norm) and self.scaler.may_lower(loss_scale)
        if not skipped:
            self.guard.note_applied(step, loss=loss, grad_norm=norm)
        elif overflows:
            self.guard.note_overflow(step)
        else:
            is_finite = not broken_losses and isfinite(norm)
            self._skipped(pending, is_finite=is_finite, loss=loss, norm=norm)
        sequence_tokens = self.schedule.batch(step - 1) * spec.data.seq_len
        event = StepDone(
            step=step,
            steps=spec.train.steps,
            loss=loss,
            lr=learning_rate(spec.optim.schedule, spec.optim.lr, step),
            grad_norm=norm,
            tokens=int(tokens),
            samples=self.schedule.consumed(step),
            first_sample=pending.read.batch.ids[0],
            skipped=bool(skipped),
            loss_scale=loss_scale if self.scaler.may_skip else None,
            fp8_saturated=int(saturated) if saturated >= 0 else None,
            seconds=seconds,
            sequence_tokens=sequence_tokens,
            memory_bytes=memory_of(self.built.device),
            data_seconds=pending.read.waited_seconds,
            **pending.phases.seconds(),
            **asdict(speed_of(sequence_tokens, seconds, self.started)),
        )
        self.pace.add(pending.phases.own_seconds(pending.read.waited_seconds))
        for found in self.pace.events(step):
            self.emit(found)
        self.built.position.finished(step=step, steps=spec.train.steps, loss=loss)
        routers = routers_done(self.built, step, of_routers, steps=spec.train.steps)
        if routers is not None:
            self.emit(routers)
        self.emit(event)
        if not self.has_told_memory:
            self.has_told_memory = True
            if self.comm.rank == 0:
                self.emit(memory_held(self.built, step=step))
        return stop > 0

    def _look_at_checks(self, step: int, changed: float, recomputed: float, differing: float) -> None:
        """Raises HardwareError where something was found in a step. Numbers are the same on all ranks."""
        if not (changed or recomputed or differing):
            self.checks.note_clean(step)
            return
        self._suspect(self.checks.accuse(step, n_changed=changed, n_recomputed=recomputed, n_differing=differing))

    def _look_now(self, step: int) -> None:
        """Raises HardwareError where ranks hold what they should not behind a step."""
        suspicion = self.checks.look_now(step)
        if suspicion is not None:
            self._suspect(suspicion)

    def _suspect(self, suspicion: Suspicion) -> Never:
        self.emit(suspicion.event)
        raise suspicion.error

    def _skipped(self, pending: PendingStep, *, is_finite: bool, loss: float, norm: float) -> None:
        """What to do about a step whose numbers were too much: goes on, or raises RollBack or NonFiniteError.

        `is_finite`: all of them are, on all ranks. `loss`: as this rank has it."""
        step = pending.step
        if self.checks is not None:
            self._look_now(step)
        verdict = self.guard.judge(step, is_finite=is_finite)
        where = first_seen(self.built, self.comm, verdict=verdict, result=pending.result)
        samples = range(self.schedule.consumed(step - 1), self.schedule.consumed(step))
        error = explain(self.built, self.guard, verdict, loss=loss, norm=norm, where=where, samples=samples)
        if verdict.action == "stop":
            raise error
        if verdict.action == "roll_back":
            raise RollBack(verdict, loss, norm, where, error)
        self.guard.note_skipped(verdict)
        event = UpdateSkipped(
            step=step,
            kind=verdict.kind,
            loss=loss,
            grad_norm=norm,
            loss_limit=verdict.limits.loss,
            grad_norm_limit=verdict.limits.grad_norm,
            where=where,
            first_sample=samples[0],
            samples=len(samples),
            recent=len(verdict.recent),
            allowed=self.guard.spec.skips,
            within=self.guard.spec.within,
        )
        self.emit(event)

    def _evaluate(self) -> None:
        """Evaluates, or raises Preempted where a stop was asked for meanwhile: the resumed run evaluates anew."""
        start = time.perf_counter()
        evaluated = self.evaluation.run()
        if evaluated is None:
            self._save()
            self._finish_saving()
            raise Preempted(f"stopped in the evaluation after step {self.step} and saved; {self._goes_on()}")
        losses = {name: one.loss for name, one in evaluated.sets.items()}
        tokens = {name: one.tokens for name, one in evaluated.sets.items()}
        by = self.built.spec.checkpoint.best_by
        self.losses[self.step] = evaluated.loss if by == "mean" else losses[by]
        seconds = time.perf_counter() - start
        self.emit(EvalDone(step=self.step, loss=evaluated.loss, sets=losses, tokens=tokens, seconds=seconds))

    def _owes_evaluation(self) -> bool:
        """Whether the run stopped before, or in, the evaluation of the step that it goes on after."""
        spec = self.built.spec
        is_fork_start = isinstance(spec.forked_from, ForkPoint) and spec.forked_from.step == self.step
        if self.step == 0 or is_fork_start or not self._evaluation_due():
            return False
        # the first rank's word: the file may look different from another machine
        elsewhere = file_elsewhere(spec.checkpoint.fallback_dir, self.run_dir, METRICS)
        is_done = self.comm.rank == 0 and is_evaluated(self.run_dir / METRICS, self.step, elsewhere=elsewhere)
        return not self.comm.broadcast(is_done)

    def _goes_on(self) -> str:
        return f"megaspec resume {self.run_dir} goes on"

    def _save(self) -> None:
        if self.last_saved == self.step:
            return
        self.built.position.mark("saving")
        if self.checks is not None:
            self._look_now(self.step)
        spec = self.built.spec
        allocated_before = self._allocated()
        state = progress(
            self.built,
            step=self.step,
            samples=self.schedule.consumed(self.step),
            tokens=self.tokens,
            scaler=self.scaler.state(),
            numbers=self.guard.state(),
        )
        # a run that is not at its end has to go on from what it saves
        is_alone = spec.checkpoint.last == "weights" and self.step == spec.train.steps
        pieces = weight_pieces_of(self.built) if is_alone else self._pieces()
        if is_alone:
            state |= WEIGHTS_ALONE
        start = time.perf_counter()
        inside = counted.seconds_inside()
        saved = self.saver.save(
            self.step,
            pieces,
            spec=spec.model_dump(mode="json"),
            state=state,
            is_steady=changes_in_updates_alone,
        )
        if self._allocated() - allocated_before > MOST_KEPT_BYTES:
            # tensors that were made for this save would take the room of the next step's activations
            self.saver.wait_for_copies()
        self.pace.saved(time.perf_counter() - start - (counted.seconds_inside() - inside))
        self.last_saved = self.step
        self._saved(saved)

    def _pieces(self) -> list[SavedPiece]:
        """What this rank writes of a whole checkpoint."""
        pieces = pieces_of(self.built)
        if self.place is not None:
            place = place_of_all(self.place, device=self.built.device)
            if self.comm.rank == 0:
                pieces.append(place_piece(place))
        return pieces

    def _allocated(self) -> int:
        """Bytes of the GPU's memory that tensors take."""
        if self.built.device.type != "cuda":
            return 0
        return torch.cuda.memory_allocated(self.built.device)

    def _saved(self, published: Sequence[Saved]) -> None:
        """Tells of checkpoints that are published, and lets go of those that are not kept."""
        spec = self.built.spec
        for saved in published:
            if self.comm.rank == 0 and spec.checkpoint.keep != "all":
                for step in self._prune(saved):
                    if self.copier is not None:
                        self.copier.drop(step)
            if self.copier is not None:
                self.copier.copy(saved.path, saved.step)
            self.emit(
                CheckpointSaved(
                    step=saved.step, path=str(saved.path), seconds=saved.seconds, stall_seconds=saved.stall_seconds
                )
            )

    def _prune(self, saved: Saved) -> list[int]:
        """Rank 0: removes checkpoints that are not kept where one was published. -> their steps. What a failing disk
        doesn't let be removed now costs room, and no run: the next save tries again."""
        spec = self.built.spec
        try:
            return self.tries.store_of(saved.path).prune(
                spec.checkpoint.keep,
                inspect=partial(objections, run=spec),
                beside=partial(kept_beside_newest, spec=spec.checkpoint, losses=self.losses),
                remove=self.saver.remove,
            )
        except (WriteError, DiskError) as error:
            if not self.is_ours():
                raise
            self._tell([f"older checkpoints were not removed: {error}; the next save tries again"])
            return []

    def _begin_saving(self) -> None:
        """Takes what saves will need."""
        if self.copier is not None:
            # by which it is known what of an earlier start's copies goes
            self.losses = self._losses_on_disk()
        if self.copier is not None and self.last_saved > 0:
            # the start before may have ended before it was copied
            assert self.last_path is not None, "a step that was saved nowhere"
            self.copier.copy(self.last_path, self.last_saved)
        if self.built.spec.checkpoint.saving == "async":
            self.saver.prepare(self._pieces())

    def _may_go_there(self, there: Found, newest: int) -> list[int]:
        """Rank 0: of the copies in a store, those that are not here and that the recipe does not keep, older than the
        one that was copied last; and newer ones that may have learned from data that is left out since. None that is
        newer goes for another reason: who fetches it has what is lost here."""
        checkpoint = self.built.spec.checkpoint
        here = set(self.store.steps())
        if self.tries.fallback is not None:
            here.update(self.tries.fallback.steps())
        stay = here | kept({*there.whole, *here}, checkpoint, self.losses)
        may_go = [step for step in there.whole if step < newest and step not in stay]
        may_go += [step for step in there.partial if step < newest and step not in here]
        if self.guard.windows:
            may_go += [step for step in there.whole if step > newest and step not in here]
        return may_go

    def _goes_there(self, copy: Identity, newest: int) -> bool:
        """Rank 0: whether a copy that may go does: it is this run's, and, where it is newer than what was copied last,
        has learned from data that is left out now."""
        if unlike(copy, self.built.spec.model_dump(mode="json")):
            return False
        if copy.step < newest:
            return True
        left_out_there = copy.state.get(NUMBERS, {}).get("windows", [])
        return any(
            copy.step >= window.first and [window.first, window.last] not in left_out_there
            for window in self.guard.windows
        )

    def _finish_saving(self) -> None:
        """Waits until what is being saved is published, and what was deleted is gone."""
        self._wait_for_writer()
        self._saved(self.saver.finish())
        self.saver.finish()

    def _wait_for_writer(self) -> None:
        """Says to the watchdog that what takes so long is no hang."""
        self.built.position.mark("waiting for a checkpoint to be written")

    def _finish_copying(self) -> None:
        """Waits until the last checkpoint is copied. WriteError, on all ranks: it could not be."""
        if self.built.spec.checkpoint.copy_to is None:
            return
        # in short waits, so that none is longer than a collective may take
        while not on_first(self.comm, self._are_copies_made):
            self.built.position.mark("waiting for a checkpoint to be copied")

    def _are_copies_made(self) -> bool:
        assert self.copier is not None, "rank 0 without a copier"
        return self.copier.finish(MEET_SECONDS)

    def _sample(self) -> None:
        """Writes a text at the end of a run, where the recipe asks for one and the data have a tokenizer."""
        spec = self.built.spec
        if spec.train.sample is None or spec.train.sample.tokens == 0:
            return
        tokenizer = run_tokenizer(spec, self.run_dir)
        for chunk in self.built.chunks:
            chunk.eval()
        text = write_sample(ModelOnRanks.of_run(self.built), spec.train.sample, tokenizer)
        self.emit(Sampled(step=self.step, prompt=spec.train.sample.prompt, text=text))


def open_training_source(spec: Spec) -> Source:
    """Where a run's training data come from. DataError: they are not what the run was resolved with."""
    assert spec.data_order == ORDER_VERSION, f"order {spec.data_order} of the data, {ORDER_VERSION} is what is made"
    if isinstance(spec.data, StreamSpec):
        check_unchanged(spec.data, spec.data_fingerprint, spec.remote)
    return open_source(
        data_here(spec.data, spec.remote),
        split="train",
        seed=spec.data.seed,
        segments=spec.segments,
        vocab_size=spec.model.vocab_size,
        sources=loaded_builders().sources,
    )
