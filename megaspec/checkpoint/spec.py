"""When checkpoints are written and how many are kept."""

from typing import Literal

from megaspec.core.frozen import Frozen, NonNegativeCount, PositiveInt


class CheckpointSpec(Frozen):
    """Checkpoints of a run. One is always written at the last step and when the run is asked to stop."""

    every: NonNegativeCount = 0
    """Steps between checkpoints; 0 writes only at the end."""
    keep: PositiveInt | Literal["all"] = 2
    """How many of the newest good checkpoints stay on disk. all: every one; the disk has to hold them."""
