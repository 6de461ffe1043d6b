"""The one training loop: steps, evaluation, checkpoints, and stopping when asked."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import psutil
import torch

from megaspec.checkpoint.comm import Comm
from megaspec.checkpoint.format import Manifest
from megaspec.checkpoint.store import START_ANEW, Store
from megaspec.core.errors import CheckpointError, Preempted, printable
from megaspec.core.faults import failpoint
from megaspec.data.loader import Loader, StepBatch, eval_batches, open_source
from megaspec.data.source import Source
from megaspec.data.spec import ORDER_VERSION
from megaspec.launcher.stop import stop_requested
from megaspec.log.events import CheckpointSaved, EvalDone, Event, Sampled, StepDone
from megaspec.log.sinks import METRICS
from megaspec.optim.schedule import learning_rate, weight_decay
from megaspec.precision.scaler import LossScaler, build_scaler
from megaspec.rules.belonging import began_as_fork, fork_again, objections
from megaspec.runtime.build import TrainState, initialise
from megaspec.runtime.generate import Draw, encode, generate, length_multiple, on_all_ranks, run_tokenizer
from megaspec.runtime.non_finite import explain
from megaspec.runtime.plugins import loaded_builders
from megaspec.runtime.router_metrics import router_numbers, routers_done
from megaspec.runtime.state import load, misfits, pieces_of, progress, tell_passed_over
from megaspec.runtime.step import StepResult, evaluate, train_step
from megaspec.spec import UNKNOWN_ORIGIN
from megaspec.train.batch_schedule import BatchSchedule

Mark = float | torch.cuda.Event


class StepClock:
    """Seconds of each step: by events on a GPU, since the host runs ahead of it."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """The next lap begins now."""
        self._last = self.mark()

    def mark(self) -> Mark:
        """The point in time when the device has done all that it was given so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, mark: Mark) -> float:
        """Waits until the device has passed `mark`. -> seconds from the last lap to it."""
        last = self._last
        self._last = mark
        if not self._cuda:
            return mark - last
        mark.synchronize()
        return last.elapsed_time(mark) / 1e3  # from milliseconds


def numbers_of(result: StepResult, routers: torch.Tensor) -> torch.Tensor:
    """float64 [6 + n] on the CPU: loss, gradient norm, tokens, skipped, loss scale, stop, and those of `routers`.

    From a GPU they are there once it has passed a mark that is set after this call. The copy is queued here, behind its
    own step: asked for later, it would queue, and its reader wait, behind the steps that were begun meanwhile.
    """
    scalars = (result.loss, result.grad_norm, result.tokens, result.skipped, result.loss_scale, result.stop)
    of_step = torch.stack([scalar.to(torch.float64) for scalar in scalars])
    numbers = torch.cat([of_step, routers.flatten()])
    if numbers.device.type == "cpu":
        return numbers
    return torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)


def memory_of(device: torch.device) -> int:
    """Bytes: the most that a GPU has held, on the CPU what this process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def ignore(event: Event) -> None:
    """What ranks other than 0 do with an event."""


@dataclass(frozen=True)
class PendingStep:
    """A step that the device was given, and whose numbers the host has not read yet."""

    step: int
    batch: StepBatch
    result: StepResult
    numbers: torch.Tensor
    """As `numbers_of` makes them; there once the device has passed `mark`."""
    mark: Mark


@dataclass
class Run:
    """One rank's run. `emit` takes events; rank 0 sets it."""

    built: TrainState
    run_dir: Path
    store: Store
    comm: Comm
    emit: Callable[[Event], None] = ignore
    step: int = 0
    tokens: int = 0
    last_saved: int = -1
    valid: Source | None = None
    """What evaluations read, opened and checked by the first of them."""
    scaler: LossScaler = field(init=False)
    schedule: BatchSchedule = field(init=False)

    def __post_init__(self) -> None:
        self.scaler = build_scaler(self.built.spec.precision, device=self.built.device)
        spec = self.built.spec
        self.schedule = BatchSchedule(spec.train, moved=spec.samples_moved)

    def start(self) -> None:
        """Goes on from the newest good checkpoint, or starts the weights from the seed.

        CheckpointError: there is no good one, though some were saved or the run began as a fork.
        """
        spec = self.built.spec
        is_fork = began_as_fork(spec)
        way_out = fork_again(spec) if is_fork else START_ANEW
        reader = self.store.newest_good(self.comm, inspect=self._objections, way_out=way_out)
        if reader is None and is_fork:
            raise CheckpointError(f"{self.store.folder}: no checkpoint is left; {way_out}")
        if reader is None:
            if self.comm.rank == 0:
                self._tell_new_start()
            initialise(self.built)
            return
        if self.comm.rank == 0:
            tell_passed_over(reader)
        with reader:
            load(self.built, reader)
            self.step = reader.state["step"]
            self.tokens = reader.state["tokens"]
            self.scaler.load_state(reader.state["loss_scale"])
            self.last_saved = self.step

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
        return objections(manifest, self.built.spec) or misfits(self.built, manifest)

    def train(self) -> None:
        """Trains to the last step. Raises Preempted once a stop was asked for and the run is saved."""
        spec = self.built.spec
        source = self._source("train")
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
        try:
            for batch in loader:
                result = self._one_step(batch)
                self.step += 1
                routers = router_numbers(self.built, result.routers)
                numbers = numbers_of(result, routers)
                # the mark after the numbers: their copy is a part of what it waits for
                pending.append(PendingStep(self.step, batch, result, numbers, clock.mark()))
                at_rest = self._wants_rest()
                # The host reads a step's numbers one step late on a GPU, so that the GPU never waits for it.
                lag = 1 if self.built.device.type == "cuda" and not at_rest else 0
                stop = False
                while len(pending) > lag:
                    stop = self._report(pending.pop(0), clock) or stop
                # before a stop is honoured: the resumed run goes on behind it
                if self._due(spec.train.eval_every):
                    self._evaluate()
                if stop:
                    # what is saved has been looked at: a step that is not finite raises here
                    while pending:
                        self._report(pending.pop(0), clock)
                    self._save()
                    raise Preempted(f"stopped after step {self.step} and saved; megaspec resume {self.run_dir} goes on")
                if self._due(spec.checkpoint.every) or self.step == spec.train.steps:
                    self._save()
                if at_rest:
                    # evaluating and saving are no part of the next step's time
                    clock.restart()
        finally:
            loader.close()
        self._sample()

    def _one_step(self, batch: StepBatch) -> StepResult:
        spec = self.built.spec
        self.built.position.step = self.step + 1
        failpoint("step")
        return train_step(
            self.built,
            batch.micro_batches,
            lr=learning_rate(spec.optim.schedule, spec.optim.lr, self.step + 1),
            weight_decay=weight_decay(spec.optim, self.step + 1),
            scaler=self.scaler,
            stop=stop_requested(),
        )

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _wants_rest(self) -> bool:
        """Whether the host has to have seen everything before it goes on."""
        spec = self.built.spec
        return self._due(spec.train.eval_every) or self._due(spec.checkpoint.every) or self.step == spec.train.steps

    def _report(self, pending: PendingStep, clock: StepClock) -> bool:
        """Reads a step's numbers, checks and emits them. -> whether some rank asked to stop."""
        spec = self.built.spec
        step = pending.step
        # this waits for the device, so the numbers are read after it
        seconds = clock.lap(pending.mark)
        loss, norm, tokens, skipped, loss_scale, stop, *of_routers = pending.numbers.tolist()
        self.tokens += int(tokens)
        # a smaller loss scale cures gradients that overflow, never a loss
        if not isfinite(loss) or not (isfinite(norm) or self.scaler.may_lower(loss_scale)):
            samples = range(self.schedule.consumed(step - 1), self.schedule.consumed(step))
            raise explain(
                self.built, self.comm, step=step, loss=loss, norm=norm, result=pending.result, samples=samples
            )
        event = StepDone(
            step=step,
            steps=spec.train.steps,
            loss=loss,
            lr=learning_rate(spec.optim.schedule, spec.optim.lr, step),
            grad_norm=norm,
            tokens=int(tokens),
            samples=self.schedule.consumed(step),
            first_sample=pending.batch.ids[0],
            skipped=bool(skipped),
            loss_scale=loss_scale if self.scaler.may_skip else None,
            seconds=seconds,
            sequence_tokens=self.schedule.batch(step - 1) * spec.data.seq_len,
            memory_bytes=memory_of(self.built.device),
        )
        routers = routers_done(self.built, step, of_routers, steps=spec.train.steps)
        if routers is not None:
            self.emit(routers)
        self.emit(event)
        return stop > 0

    def _evaluate(self) -> None:
        spec = self.built.spec
        start = time.perf_counter()
        if self.valid is None:
            self.valid = self._source("valid")
        for chunk in self.built.chunks:
            chunk.eval()
        batches = eval_batches(
            self.valid,
            spec.train.eval_samples,
            micro_batch=spec.train.micro_batch,
            dp_rank=self.built.mesh.index("dp"),
            dp_size=self.built.mesh.size("dp"),
            device=self.built.device,
            document_mask=spec.data.document_mask,
        )
        self.built.position.mark("evaluation")
        failpoint("evaluate")
        loss = float(evaluate(self.built, batches))
        for chunk in self.built.chunks:
            chunk.train()
        self.emit(EvalDone(step=self.step, split="valid", loss=loss, seconds=time.perf_counter() - start))

    def _save(self) -> None:
        if self.last_saved == self.step:
            return
        self.built.position.mark("saving")
        spec = self.built.spec
        start = time.perf_counter()
        state = progress(
            self.built,
            step=self.step,
            samples=self.schedule.consumed(self.step),
            tokens=self.tokens,
            scaler=self.scaler.state(),
        )
        path = self.store.save(
            self.step, pieces_of(self.built), spec=spec.model_dump(mode="json"), state=state, comm=self.comm
        )
        self.last_saved = self.step
        if self.comm.rank == 0 and spec.checkpoint.keep != "all":
            self.store.prune(spec.checkpoint.keep, inspect=lambda manifest: objections(manifest, spec))
        self.emit(CheckpointSaved(step=self.step, path=str(path), seconds=time.perf_counter() - start))

    def _sample(self) -> None:
        """Writes a text at the end of a run, where the recipe asks for one and the data have a tokenizer."""
        spec = self.built.spec
        if spec.train.sample is None or spec.train.sample.tokens == 0:
            return
        tokenizer = run_tokenizer(spec.data, self.run_dir)
        for chunk in self.built.chunks:
            chunk.eval()
        written = generate(
            on_all_ranks(self.built, Draw(spec.train.sample.temperature, spec.train.seed)),
            encode(tokenizer, spec.train.sample.prompt),
            tokens=spec.train.sample.tokens,
            max_seq_len=spec.model.max_seq_len,
            end=tokenizer.eod,
            multiple=length_multiple(spec),
        )
        self.emit(Sampled(step=self.step, prompt=spec.train.sample.prompt, text=tokenizer.decode(written)))

    def _source(self, split: str) -> Source:
        spec = self.built.spec
        assert spec.data_order == ORDER_VERSION, f"order {spec.data_order} of the data, {ORDER_VERSION} is what is made"
        return open_source(
            spec.data,
            split=split,
            seed=spec.data.seed,
            segments=spec.segments,
            vocab_size=spec.model.vocab_size,
            sources=loaded_builders().sources,
        )
