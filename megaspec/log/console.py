"""Progress on the terminal. Torch-free."""

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from megaspec.core.errors import printable
from megaspec.core.units import counted
from megaspec.log.alerts import alert_text
from megaspec.log.events import (
    AlertRaised,
    CheckpointSaved,
    DataLeftOut,
    EvalDone,
    Event,
    HardwareSuspected,
    RolledBack,
    RoutersDone,
    RunEnded,
    RunStarted,
    Sampled,
    SlowRank,
    StepDone,
    StepsProfiled,
    UpdateSkipped,
)
from megaspec.log.profile_table import table_lines
from megaspec.log.speed import speed_of

# Steps over which speed is averaged, and how often the live line is drawn at most.
WINDOW = 20
REDRAW_SECONDS = 0.1
# Share of the time that the host waits for data from which on a line says so.
WORTH_A_WORD = 0.05
CLEAR_LINE = "\r\x1b[2K"
_BETWEEN = "  "


class ConsoleSink:
    """One line that is rewritten at every step on a terminal; elsewhere, or with `live` false, a line every few steps.

    `every`: steps between lines that stay. Everything that is not a step gets a line of its own.
    """

    def __init__(self, *, every: int, live: bool, stream: TextIO | None = None):
        self._stream = sys.stdout if stream is None else stream
        self._every = every
        self._live = live and self._stream.isatty()
        self._run = RunStarted(step=0, steps=0)
        self._recent: deque[StepDone] = deque(maxlen=WINDOW)
        self._routers: RoutersDone | None = None
        self._drawn_at = -math.inf
        self._live_text = ""

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._run = event
                self._recent.clear()
                if event.why:
                    self._line(printable(f"attempt {event.attempt}: {event.why}"))
                if event.step:
                    self._line(f"going on after step {event.step}")
            case RoutersDone():
                self._routers = event
            case StepDone():
                self._step(event)
            case UpdateSkipped():
                self._line(printable(skipped_text(event)))
            case RolledBack():
                self._recent.clear()
                self._line(printable(rolled_back_text(event)))
            case DataLeftOut():
                last = event.first_sample + event.samples - 1
                self._line(f"step {event.step}/{event.steps}  left out: samples {event.first_sample} to {last}")
            case HardwareSuspected():
                # the error that ends the run says it
                pass
            case StepsProfiled():
                self._line(printable("\n".join(table_lines(event)), keep="\n"))
            case SlowRank():
                self._line(printable(slow_text(event)))
            case AlertRaised():
                self._line(printable(f"step {event.step}  ALERT {alert_text(event)}"))
            case EvalDone():
                self._evaluated(event)
            case CheckpointSaved():
                self._line(printable(f"step {event.step}  saved {event.path}, {_saving_seconds(event)}"))
            case Sampled():
                text = printable(event.prompt + event.text, keep="\n\t")
                self._line(f"step {event.step}  sample:\n{text}")
            case RunEnded():
                text = ""
                if event.how != "done":
                    text = f"ended after step {event.step}: {event.how}"
                self._line(text)

    def close(self) -> None:
        """Leaves the terminal at the start of a line."""
        if self._live_text:
            self._line("")

    def _evaluated(self, event: EvalDone) -> None:
        seconds = f", {event.seconds:.1f} s"
        if len(event.sets) == 1:
            (name,) = event.sets
            self._line(f"step {event.step}  {loss_text(name, event.loss)}{seconds}")
            return
        for name, loss in event.sets.items():
            self._line(f"step {event.step}  {loss_text(name, loss)}")
        self._line(f"step {event.step}  valid loss {event.loss:.4f}, the mean of {len(event.sets)} sets{seconds}")

    def _step(self, event: StepDone) -> None:
        # the first step of an attempt pays for compilation and caches: it says nothing about the others
        if event.step != self._run.step + 1:
            self._recent.append(event)
        parts = step_parts(event, self._recent, self._run, self._routers)
        is_due = event.step % self._every == 0 or event.step == event.steps or event.skipped
        if not self._live:
            if is_due:
                self._write(_BETWEEN.join(parts) + "\n")
            return
        now = time.monotonic()
        if is_due or now - self._drawn_at >= REDRAW_SECONDS:
            columns = shutil.get_terminal_size().columns
            self._live_text = fitted(parts, columns - 1)
            self._drawn_at = now
            self._write(CLEAR_LINE + self._live_text)

    def _line(self, text: str) -> None:
        """A line that stays, above the live one."""
        if text:
            text += "\n"
        if not self._live:
            if text:
                self._write(text)
            return
        kept = CLEAR_LINE
        if self._live_text:
            # the step's own numbers stay where something else happened
            kept = f"{CLEAR_LINE}{self._live_text}\n"
        self._live_text = ""
        self._write(kept + text)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def skipped_text(event: UpdateSkipped) -> str:
    """Why an update was not applied, and how many more may not be."""
    last = event.first_sample + event.samples - 1
    text = f"step {event.step}  {bad_numbers(event)}: update skipped, {event.recent} of {event.allowed} within"
    return f"{text} {event.within} steps; seen in the {event.where}; samples {event.first_sample} to {last}"


def rolled_back_text(event: RolledBack) -> str:
    """Where a run goes back to, and what it leaves out from there."""
    last = event.first_sample + event.samples - 1
    text = f"step {event.from_step}  {bad_numbers(event)}, seen in the {event.where}: back to step {event.step}, "
    text += f"rollback {event.rollbacks} of {event.allowed}; the data of steps {event.first_left_out} to "
    return f"{text}{event.last_left_out} is left out, samples {event.first_sample} to {last}"


def bad_numbers(event: UpdateSkipped | RolledBack) -> str:
    """The numbers of a step that were too much."""
    what = "not finite" if event.kind == "nonfinite" else "a spike"
    return f"{what}: loss {event.loss:.4g}, grad norm {event.grad_norm:.4g}"


def fitted(parts: Sequence[str], width: int) -> str:
    """As many parts of a step as fit into a line: the first ones, and how long the run still takes, the last."""
    kept = list(parts)
    while len(kept) > 2 and len(_BETWEEN.join(kept)) > width:
        kept.pop(-2)
    return _BETWEEN.join(kept)[:width]


def step_parts(
    event: StepDone, recent: deque[StepDone], run: RunStarted, routers: RoutersDone | None = None
) -> list[str]:
    """A step in short texts. `recent`: the steps that speed is averaged over, none of them 0 s long in sum, or empty.
    `routers`: of the same step, shown by their worst layer."""
    parts = [
        f"step {event.step}/{event.steps}",
        f"loss {event.loss:.4f}",
        f"lr {event.lr:.2e}",
        f"grad norm {event.grad_norm:.3f}",
    ]
    seconds = sum(step.seconds for step in recent)
    speed = speed_of(sum(step.sequence_tokens for step in recent), seconds, run)
    if speed.tokens_per_second is not None:
        parts.append(f"{quantity(speed.tokens_per_second)} tokens/s")
    if speed.mfu_causal is not None and speed.mfu_full is not None:
        parts.append(f"MFU {100 * speed.mfu_causal:.1f} % causal, {100 * speed.mfu_full:.1f} % full")
    if seconds > 0:
        waited = sum(step.data_seconds or 0.0 for step in recent) / seconds
        if waited >= WORTH_A_WORD:
            parts.append(f"waits for data {100 * waited:.0f} % of the time")
    if event.memory_bytes is not None:
        parts.append(f"{event.memory_bytes / 1e9:.1f} GB")
    if routers is not None:
        load = f"expert load up to {1 + max(routers.max_violation):.2f}x"
        if any(routers.drops):
            load += f", {100 * max(routers.drops):.1f} % dropped"
        parts.append(load)
    if event.loss_scale is not None:
        parts.append(f"loss scale {event.loss_scale:g}")
    if event.fp8_saturated:
        parts.append(f"{counted(event.fp8_saturated, 'element')} saturated in fp8")
    if event.skipped:
        parts.append("update skipped: gradient not finite")
    if seconds > 0:
        parts.append(f"ETA {duration(seconds / len(recent) * (event.steps - event.step))}")
    return parts


def slow_text(event: SlowRank) -> str:
    """`step 250  rank 3 is slow (node2, cuda:3): 0.120 s a step, 24 %, most in backward, ...`."""
    of = "a save" if event.phase == "save" else "a step"
    text = f"step {event.step}  rank {event.rank} is slow ({event.host}, {event.device}): "
    text += f"it loses {event.seconds:.3g} s {of}, {100 * event.share:.0f} %, most in {event.phase}"
    return f"{text}, which takes the others {event.usual_seconds:.3g} s"


def quantity(number: float) -> str:
    """Three digits and a power of ten: 41.2k."""
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 1000 * limit:
            return f"{number / limit:.0f}{suffix}"  # past the largest power: .3g would write 1e+03
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def loss_text(name: str, loss: float) -> str:
    """`web loss 2.9870 (perplexity 19.83)`."""
    return f"{name} loss {loss:.4f} ({perplexity(loss)})"


def perplexity(loss: float) -> str:
    """exp(loss), the number of equally likely tokens that the model hesitates between."""
    if loss >= 20:
        return "perplexity over 10^8"
    return f"perplexity {math.exp(loss):.2f}"


def _saving_seconds(event: CheckpointSaved) -> str:
    """`7.1 s`; `7.1 s, of which training stood still for 0.4 s` where it went on meanwhile."""
    text = f"{event.seconds:.1f} s"
    if event.stall_seconds is not None and event.stall_seconds < event.seconds:
        text += f", of which training stood still for {event.stall_seconds:.1f} s"
    return text
