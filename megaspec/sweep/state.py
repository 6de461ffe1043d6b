"""The folder of a sweep: sweep.json says what it is, points.jsonl what became of every point. Torch-free.

sweeps/<name>/sweep.json         SweepHead; written last when a sweep is made
sweeps/<name>/points.jsonl       a line for every change of a point; the last line of a number is what it is now
sweeps/<name>/<point>/           the run of a point
sweeps/<name>/logs/<point>.log   what its launcher wrote
sweeps/<name>/index.html         the page
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.frozen import Frozen, PositiveInt
from megaspec.data.files import write_atomically, write_error
from megaspec.recipe import Recipe
from megaspec.run_folder import is_run
from megaspec.sweep.spec import SweepSpec

HEAD, POINTS, LOGS, PAGE, STOP = "sweep.json", "points.jsonl", "logs", "index.html", "stop"
# What a sweep that was killed while it was made leaves.
_UNFINISHED = ("lock", POINTS, LOGS)

State = Literal["waiting", "running", "done", "failed", "interrupted", "pruned", "invalid", "repeated"]
# States that a sweep which is started again does not go on from.
ENDED: tuple[State, ...] = ("done", "failed", "pruned", "invalid", "repeated")


class Point(Frozen):
    """A point of a sweep, and what became of it so far."""

    number: PositiveInt
    """From 1 on."""
    overrides: tuple[str, ...]
    """The words that only this point has."""
    folder: str
    """Name of its run folder, inside that of the sweep."""
    fingerprint: str
    """Hash of its recipe without name and folder."""
    recipe: dict[str, Any] | None = None
    """The recipe. None: an earlier line of points.jsonl has it."""
    params: dict[str, Any] | None = None
    """What a search has asked for, as it names it."""
    ranks: int = 0
    """World size that it was planned with."""
    state: State = "waiting"
    code: int | None = None
    """Exit code of the run, where it has ended."""
    reason: str = ""
    """Why it failed, can't be run or was stopped."""
    pid: int | None = None
    """Process of a point that is running."""

    def to(self, state: State, **fields: Any) -> "Point":
        """The point in another state; process, code and reason are those of `fields`."""
        return self.model_copy(update={"code": None, "reason": "", "pid": None, **fields, "state": state})


class Axis(Frozen):
    """A key that is swept, as compose.Swept has it."""

    key: str
    words: tuple[str, ...] = ()
    is_range: bool = False
    bounds: tuple[int, int] | tuple[float, float] | None = None
    is_log: bool = False


class SweepHead(Frozen):
    """What a sweep is."""

    name: str
    spec: SweepSpec
    plain: tuple[str, ...]
    """Words that every point has."""
    config_dirs: tuple[str, ...]
    axes: tuple[Axis, ...]
    metric: Literal["loss", "valid_loss", "tokens_per_second"]
    direction: Literal["minimize", "maximize"]
    launcher: str
    launcher_words: tuple[str, ...] = ()
    memory: Literal["check", "ignore"] = "check"
    """Whether points that are predicted not to fit their GPUs are refused."""
    state: Literal["running", "interrupted", "failed", "done"] = "running"


class SweepFolder:
    """Reads and writes the files of a sweep. WriteError where they can't be written."""

    def __init__(self, path: Path):
        self.path = path

    def exists(self) -> bool:
        """True once a sweep was made here."""
        return (self.path / HEAD).is_file()

    def make(self, head: SweepHead, points: Sequence[Point]) -> None:
        """A new sweep. RecipeError: the folder holds something else."""
        foreign = [f for f in self.path.iterdir() if f.name not in _UNFINISHED and not f.name.endswith(".tmp")]
        if foreign or any(is_run(f) for f in self.path.iterdir()):
            text = f"sweep.folder={self.path} exists and is not empty; choose another sweep.folder or sweep.name"
            raise RecipeError([Problem("sweep.folder", text, code="sweep-exists")])
        (self.path / LOGS).mkdir(exist_ok=True)
        write_atomically(self.path / POINTS, [_line(point) for point in points])
        self.write_head(head)

    def write_head(self, head: SweepHead) -> None:
        """Replaces sweep.json."""
        write_atomically(self.path / HEAD, [(head.model_dump_json(indent=1) + "\n").encode()])

    def head(self) -> SweepHead:
        """What the sweep is. RecipeError: there is none, or it is damaged."""
        if not self.exists():
            raise RecipeError([Problem("", f"{self.path} holds no sweep (no {HEAD})", code="sweep-missing")])
        try:
            return SweepHead.model_validate_json((self.path / HEAD).read_bytes())
        except ValidationError as error:
            raise _damaged(self.path / HEAD, error) from None

    def append(self, point: Point) -> None:
        """A change of a point, with one write, so that a killed process leaves at most a line without its end."""
        path = self.path / POINTS
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                os.write(fd, (b"\n" if torn else b"") + _line(point))
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise write_error(path, error) from None

    def points(self) -> list[Point]:
        """Every point as it is now, by number. RecipeError: a line is damaged; one without its end doesn't count."""
        found: dict[int, Point] = {}
        lines = (self.path / POINTS).read_bytes().splitlines()
        for line in lines:
            if not _is_whole(line):
                continue
            try:
                point = Point.model_validate_json(line)
            except ValidationError as error:
                raise _damaged(self.path / POINTS, error) from None
            before = found.get(point.number)
            if point.recipe is None and before is not None:
                point = point.model_copy(update={"recipe": before.recipe})
            found[point.number] = point
        return [found[number] for number in sorted(found)]

    def run(self, point: Point) -> Path:
        """The run folder of a point."""
        return self.path / point.folder

    def log(self, point: Point) -> Path:
        """What a point's launcher writes."""
        return self.path / LOGS / f"{point.folder}.log"


def recipe_of(point: Point) -> Recipe:
    """The recipe of a point. RecipeError: this process can't read it."""
    try:
        return Recipe.model_validate_json(json.dumps(point.recipe))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        text = f"point {point.number}: its recipe can't be read: {what}; name the plugins that the sweep was made with"
        raise RecipeError([Problem("", text, code="sweep-damaged")]) from None


def _line(point: Point) -> bytes:
    known = point if point.state == "waiting" else point.model_copy(update={"recipe": None})
    return known.model_dump_json(exclude_defaults=True).encode() + b"\n"


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _damaged(path: Path, error: ValidationError) -> RecipeError:
    return RecipeError([Problem("", f"{path} is damaged: {str(error).splitlines()[0]}", code="sweep-damaged")])
