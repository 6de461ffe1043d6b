"""Which steps of a run are profiled."""

from typing import Annotated

from pydantic import Field

from megaspec.core.frozen import Frozen, NonNegativeInt, PositiveCount

PROFILES = "profiles"
"""Folder of a run that files of profiles are written into."""


class ProfileSpec(Frozen):
    """Where the time of some steps of a run goes: a table in metrics.jsonl, and files in the run's folder under
    profiles/. What is trained is the same to the bit; the steps that are profiled take longer."""

    steps: tuple[PositiveCount, PositiveCount] | None = None
    """The first and the last step to profile, as metrics.jsonl counts them, from 1. The first step of a start compiles,
    which a profile of it shows. None: none."""
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)
    """Ranks that are profiled."""
    memory: bool = True
    """Record where in the program a GPU's memory was allocated, too, for pytorch.org/memory_viz. A CPU has none."""
