"""Errors as JSON, so that they go from rank to rank and from the writer of checkpoints to its rank. Torch-free."""

from typing import Any

from megaspec.checkpoint.files import DiskError, UnreadableError
from megaspec.core.errors import (
    CheckpointError,
    MegaspecError,
    MemoryRunOut,
    RunLockedError,
    UsageError,
    WriteError,
)

# The gravest first: of several ranks' failures, that of the first of these is raised on all of them.
KINDS: dict[str, type[MegaspecError]] = {
    "locked": RunLockedError,
    "disk": DiskError,
    "unreadable": UnreadableError,
    "checkpoint": CheckpointError,
    "write": WriteError,
    "memory": MemoryRunOut,
    "usage": UsageError,
    "other": MegaspecError,
}
UNTOLD: dict[str, Any] = {"kind": "other", "lines": ["failed; its own error says why"]}
"""Of an error that is no MegaspecError."""


def failure_of(error: MegaspecError) -> dict[str, Any]:
    """An error's kind and lines."""
    # subclasses stand before what they derive from
    for kind, cls in KINDS.items():
        if isinstance(error, cls):
            return {"kind": kind, "lines": [str(problem) for problem in error.problems]}
    raise AssertionError(f"{type(error).__name__} is no MegaspecError")
