"""What the runs of a sweep have come to so far, from their metrics.jsonl. Torch-free."""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

METRICS = "metrics.jsonl"


@dataclass
class Result:
    """Numbers of one run, by step."""

    steps: int = 0
    """Of the whole run; 0 until it has started."""
    loss: dict[int, float] = field(default_factory=dict)
    valid_loss: dict[int, float] = field(default_factory=dict)
    speed: dict[int, float] = field(default_factory=dict)
    """Tokens per second of a step."""
    is_done: bool = False
    """The run has said that all steps are done."""

    @property
    def step(self) -> int:
        """The last step that is done."""
        return max(self.loss, default=0)

    def metric(self, name: str) -> float | None:
        """`loss`, `valid_loss`: of the last step that has one; `tokens_per_second`: the median. None: nothing yet."""
        if name == "tokens_per_second":
            return median(self.speed.values()) if self.speed else None
        values = self.curve(name)
        return values[max(values)] if values else None

    def curve(self, name: str) -> dict[int, float]:
        """A number by step."""
        return {"loss": self.loss, "valid_loss": self.valid_loss, "tokens_per_second": self.speed}[name]


class Follower:
    """Reads a metrics.jsonl that grows, each line once, and from its beginning again when it was cut."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / METRICS
        self.restart()

    def restart(self) -> None:
        """Forget what was read: the run goes on from an earlier step."""
        self.result = Result()
        self._offset = 0

    def read(self) -> Result:
        """What the run has come to."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self.restart()
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.result
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._take(line)
        self._offset += len(whole)
        return self.result

    def _take(self, line: bytes) -> None:
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError:
            return  # the file was cut and has grown past the place that was read to
        step, kind = event.get("step"), event.get("event")
        if kind == "end":
            self.result.is_done = event["how"] == "done"
        elif kind == "start":
            self.result.steps, self.result.is_done = event["steps"], False
            for curve in (self.result.loss, self.result.valid_loss, self.result.speed):
                for later in [s for s in curve if s > step]:
                    del curve[later]
        elif kind == "step":
            self.result.steps = event["steps"]
            self.result.loss[step] = float(event["loss"])
            self.result.speed[step] = event["sequence_tokens"] / max(event["seconds"], 1e-9)
        elif kind == "eval" and event["split"] == "valid":
            self.result.valid_loss[step] = float(event["loss"])


def is_better(one: float, other: float, direction: str) -> bool:
    """Whether a metric beats another; one that is not finite beats none."""
    if not math.isfinite(one) or not math.isfinite(other):
        return math.isfinite(one)
    return one < other if direction == "minimize" else one > other
