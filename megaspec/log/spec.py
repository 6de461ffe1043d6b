"""What a run reports, and where."""

from typing import Annotated, Literal, Never

from pydantic import Field

from megaspec.core.frozen import Auto, Frozen, PositiveInt
from megaspec.core.kinds import Kinds

SINK_KINDS = Kinds()


class LogSpec(Frozen):
    """metrics.jsonl in the run folder is always written."""

    every: PositiveInt = 10
    """Steps between lines on the console."""
    console: Literal["live", "plain", "quiet"] = "live"
    """live: one line that is rewritten on a terminal, plain lines elsewhere."""
    tensorboard: Auto[bool] = "auto"
    """Write TensorBoard event files. auto: where tensorboard is installed."""
    sinks: tuple[Annotated[Never, SINK_KINDS], ...] = Field((), exclude_if=lambda sinks: not sinks)
    """Sinks of plug-ins, beside those of megaspec."""
