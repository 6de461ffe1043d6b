"""What `megaspec doctor` finds. Torch-free."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megaspec.core.errors import HangError, HardwareError, MegaspecError, RecipeError, WriteError

Level = Literal["ok", "warn", "error"]
# What a person looks at first: the exit code of the doctor where several things are wrong.
_WEIGHT = (
    HardwareError.exit_code,
    HangError.exit_code,
    WriteError.exit_code,
    RecipeError.exit_code,
    MegaspecError.exit_code,
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    area: str
    """`gpu 3`, `software`, `links`, `shm`, `disk`, `limits`, `environment`, `probe`."""
    level: Level
    what: str
    """What is there, with its number."""
    why: str = ""
    """Why it matters; "" where all is well."""
    do: str = ""
    """What to do; "" where all is well."""
    code: int = 0
    """Exit code (core/errors.py) that an error ends the doctor with; 0 of others."""
    host: str = ""
    """Where it was looked at; "" before that is known."""

    def __post_init__(self) -> None:
        assert (self.level == "error") == (self.code != 0), f"{self.what}: level {self.level}, code {self.code}"
        if self.level != "ok":
            assert self.why, f"{self.what}: no reason"
            assert self.do, f"{self.what}: nothing to do"

    def as_json(self) -> dict[str, Any]:
        """What a program reads."""
        return asdict(self)


def ok(area: str, what: str) -> Finding:
    """Looked at, and well."""
    return Finding(area, "ok", what)


def warn(area: str, what: str, *, why: str, do: str) -> Finding:
    """Trains, and is slower or nearer to a failure than it has to be."""
    return Finding(area, "warn", what, why, do)


def error(area: str, what: str, *, why: str, do: str, code: int) -> Finding:
    """Does not train, or not rightly."""
    return Finding(area, "error", what, why, do, code)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where nothing is an error; else the code that a person looks at first, suspected hardware before all."""
    codes = {finding.code for finding in findings if finding.code}
    for code in _WEIGHT:
        if code in codes:
            return code
    return 0
