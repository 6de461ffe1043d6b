"""exit_code.json in a run folder: how the last start of the run ended, for who can't read it off a process.

    {"code": 75, "meaning": "stopped, what was trained is saved: start again", "step": 40, "in_a_row": 0,
     "time": "2026-12-01T10:00:00Z"}

torchrun turns every code of its ranks into 1, and a job step that a scheduler kills has none. `code` is null while a
start is under way, and stays so when all its processes died without a word. `step` is the newest that was saved.
`in_a_row` counts starts that failed one after the other without saving another step.

Only the holder of the run's lock writes here: a start that ends before it has the run leaves the file as it was. `time`
says when it was written. Torch-free.
"""

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megaspec.core.errors import printable
from megaspec.core.regular_files import open_inside, read_inside

EXIT_FILE = "exit_code.json"
# Exit codes of core/errors.py that are treated in their own way here.
INTERNAL = 70
HANG = 74
MOST_IN_A_ROW = 3
"""So many failures without progress, and a scheduler that starts again after 74 is told 70: a person has to look."""
MEANINGS = {
    0: "done",
    64: "bad recipe, or more memory than there is",
    65: "bad data",
    66: "no good checkpoint",
    INTERNAL: "internal error",
    73: "can't write",
    HANG: "a rank was killed, or a collective failed or hung: start again",
    75: "stopped, what was trained is saved: start again",
    76: "non-finite numbers, or an alert of the recipe that stops the run",
    77: "suspected hardware",
    78: "another job has the run",
}
# What another rank may have caused.
_WEAK = (0, HANG, 75)
_LIMIT = 4096


@dataclass(frozen=True)
class Exit:
    """How a start ended; `code` is None before it has."""

    code: int | None
    meaning: str
    step: int
    in_a_row: int
    time: str


def begin(run_dir: Path, *, step: int) -> None:
    """Says that a start is under way, in place of how the one before it ended."""
    # a scheduler's own stop between two failures says nothing against a third
    failed = _failed_before(read_exit(run_dir), step)
    _write(run_dir, Exit(None, "under way, or ended without a word", step, failed, _now()))


def end(run_dir: Path, code: int, *, step: int, gives_up: bool = True) -> int:
    """Says how a start ended. -> the code to end with: `code`, but INTERNAL for one HANG too many in a row.

    `gives_up`: False where a supervisor counts failures itself, by its own limits.
    Of several ranks that call this the first whose code names a cause is kept.
    """
    former = read_exit(run_dir)
    if former is not None and former.code is not None and _weight(code) <= _weight(former.code):
        return code
    failed = 0
    if code in (INTERNAL, HANG):
        failed = 1 + _failed_before(former, step)
    meaning = MEANINGS.get(code, MEANINGS[INTERNAL])
    if gives_up and code == HANG and failed >= MOST_IN_A_ROW:
        code = INTERNAL
        meaning = f"start {failed} in a row that ended so, and none saved a step: another would end so too"
        text = f"megaspec: {meaning}; exit code {INTERNAL} for {HANG}"
        print(printable(text), file=sys.stderr, flush=True)
    _write(run_dir, Exit(code, meaning, step, failed, _now()))
    return code


def end_for_good(run_dir: Path, code: int, meaning: str, *, step: int) -> None:
    """Says how a supervisor ended, in place of how its last attempt did."""
    former = read_exit(run_dir)
    failed = 0
    if former is not None:
        failed = former.in_a_row
    _write(run_dir, Exit(code, meaning, step, failed, _now()))


def _failed_before(former: Exit | None, step: int) -> int:
    """How many starts in a row failed up to the last one, where none has saved another step than `step`."""
    if former is None or former.step != step:
        return 0
    return former.in_a_row


def _weight(code: int) -> int:
    """How much a code says about the cause; an end replaces only one that says less."""
    if code in _WEAK:
        return 0
    if code == INTERNAL:
        return 1  # ranks that hear of another's failure through a collective end so, too
    return 2


def read_exit(run_dir: Path) -> Exit | None:
    """How the last start ended; None where that isn't said, or not by us."""
    try:
        raw = json.loads(read_inside(run_dir, EXIT_FILE, limit=_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    return _exit_of(raw)


def _exit_of(raw: Any) -> Exit | None:
    kinds = {"code": (int, type(None)), "meaning": (str,), "step": (int,), "in_a_row": (int,), "time": (str,)}
    if type(raw) is not dict or raw.keys() != kinds.keys():
        return None
    if any(type(raw[name]) not in kind for name, kind in kinds.items()):
        return None
    return Exit(**raw)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _write(run_dir: Path, what: Exit) -> None:
    """Whole or not at all. A folder that can't be written costs the file, never the run."""
    name = f".{EXIT_FILE}.{os.getpid()}.tmp"
    try:
        with suppress(FileNotFoundError):
            os.unlink(run_dir / name)
        with open(open_inside(run_dir, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            file.write(json.dumps(asdict(what)) + "\n")
        os.replace(run_dir / name, run_dir / EXIT_FILE)
    except OSError as error:
        print(
            printable(f"megaspec: {run_dir / EXIT_FILE}: {error.strerror}; the run goes on"),
            file=sys.stderr,
            flush=True,
        )
