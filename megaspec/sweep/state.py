"""The folder of a sweep: sweep.json says what it is, points.jsonl what became of every point. Torch-free.

sweeps/<name>/sweep.json         SweepHead; written last when a sweep is made
sweeps/<name>/points.jsonl       a line for every change of a point; the last line of a number is what it is now
sweeps/<name>/<point>/           the run of a point
sweeps/<name>/logs/<point>.log   what its launcher wrote
sweeps/<name>/index.html         the page

The folder may come from somebody else: what its files say is checked, and below it no link is followed.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from megaspec.checkpoint.lock import LOCK_FOLDER
from megaspec.core.bounded_json import MAX_BYTES, parse_json
from megaspec.core.errors import Problem, RecipeError
from megaspec.core.frozen import Frozen
from megaspec.core.regular_files import check_kinds, make_folder_inside, open_inside, read_inside
from megaspec.data.files import write_atomically, write_error
from megaspec.recipe import Recipe
from megaspec.run_folder import is_run, refuse_links
from megaspec.sweep.spec import SweepSpec

HEAD, POINTS, LOGS, PAGE, STOP = "sweep.json", "points.jsonl", "logs", "index.html", "stop"
# Bytes of points.jsonl, and of a line of it; 10,000 points with recipes of 6 kB take a quarter of that.
MAX_POINTS_BYTES, MAX_LINE = 256 << 20, 4 << 20
# What a sweep that was killed while it was made leaves.
_UNFINISHED = ("lock", POINTS, LOGS)

# `03-lr-0.001-tp-2`: a name, so that no point has its run outside of the sweep's folder or in another file's place.
PointFolder = Annotated[str, Field(pattern=r"^[0-9]{1,9}(-[A-Za-z0-9.-]*)?$", max_length=96)]
# Of a process; 2^22 is the most that Linux has.
Pid = Annotated[int, Field(gt=1, lt=2**31)]
PointNumber = Annotated[int, Field(gt=0, lt=10**9)]

State = Literal["waiting", "running", "done", "failed", "interrupted", "pruned", "invalid", "repeated"]
# States that a sweep which is started again does not go on from.
ENDED: tuple[State, ...] = ("done", "failed", "pruned", "invalid", "repeated")


class Point(Frozen):
    """A point of a sweep, and what became of it so far."""

    number: PointNumber
    """From 1 on."""
    overrides: tuple[str, ...]
    """The words that only this point has."""
    folder: PointFolder
    """Name of its run folder, inside that of the sweep; begins with the point's number."""
    fingerprint: str
    """Hash of its recipe without name and folder."""
    recipe: dict[str, Any] | None = None
    """The recipe. None: an earlier line of points.jsonl has it."""
    params: dict[str, Any] | None = None
    """What a search has asked for, as it names it."""
    ranks: Annotated[int, Field(ge=0, le=2**20)] = 0
    """World size that it was planned with."""
    state: State = "waiting"
    code: Annotated[int, Field(ge=0, le=255)] | None = None
    """Exit code of the run, where it has ended."""
    reason: str = ""
    """Why it failed, can't be run or was stopped."""
    pid: Pid | None = None
    """Process of a point that is running."""

    @model_validator(mode="after")
    def _has_a_folder_of_its_own(self) -> Self:
        if int(self.folder.partition("-")[0]) != self.number:
            raise ValueError(f"folder={self.folder} must begin with the number {self.number}")
        return self

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
        return os.path.lexists(self.path / HEAD)

    def make(self, head: SweepHead, points: Sequence[Point]) -> None:
        """A new sweep. RecipeError: the folder holds something else."""
        for entry in self.path.iterdir():
            is_left_over = entry.name in _UNFINISHED or entry.name.endswith(".tmp")
            if not is_left_over or is_run(entry):
                text = f"sweep.folder={self.path} exists and is not empty; choose another sweep.folder or sweep.name"
                raise RecipeError([Problem("sweep.folder", text, code="sweep-exists")])
        try:
            make_folder_inside(self.path, LOGS)
        except OSError as error:
            raise write_error(self.path / LOGS, error) from None
        write_atomically(self.path / POINTS, [_line(point) for point in points])
        # last: a folder with sweep.json is a sweep, and has all its points
        self.write_head(head)

    def write_head(self, head: SweepHead) -> None:
        """Replaces sweep.json."""
        write_atomically(self.path / HEAD, [(head.model_dump_json(indent=1) + "\n").encode()])

    def head(self) -> SweepHead:
        """What the sweep is. RecipeError: there is none, or it is damaged."""
        if not self.exists():
            hint = "give the folder that `megaspec train -m` named"
            if not self.path.exists():
                hint = "there is no such folder"
            near = SweepFolder(Path("sweeps", self.path.name))
            if near.exists():
                hint = f"did you mean {near.path}?"
            raise RecipeError([Problem("", f"{self.path} holds no sweep (no {HEAD}); {hint}", code="sweep-missing")])
        self.refuse_links()
        try:
            content = parse_json(read_inside(self.path, HEAD, limit=MAX_BYTES))
            return SweepHead.model_validate_json(json.dumps(content))
        except (OSError, ValueError) as error:
            raise _damaged(self.path / HEAD, error) from None

    def append(self, point: Point) -> None:
        """A change of a point, with one write, so that a killed process leaves at most a line without its end."""
        try:
            fd = open_inside(self.path, POINTS, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                line = _line(point)
                size = os.fstat(fd).st_size
                is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                if is_torn:
                    line = b"\n" + line
                os.write(fd, line)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise write_error(self.path / POINTS, error) from None

    def points(self) -> list[Point]:
        """Every point as it is now, by number. RecipeError: a line is damaged; one without its end doesn't count."""
        self.refuse_links()
        found: dict[int, Point] = {}
        for number, line in self._lines():
            try:
                content = parse_json(line)
            except ValueError:
                continue  # torn by a kill
            if not isinstance(content, dict):
                continue
            try:
                point = Point.model_validate_json(json.dumps(content))
            except ValidationError as error:
                raise _damaged(self.path / POINTS, error, line=number) from None
            before = found.get(point.number)
            if before is not None and point.folder != before.folder:
                raise _damaged(self.path / POINTS, f"point {point.number} has two folders", line=number)
            if point.recipe is None and before is not None:
                point = point.model_copy(update={"recipe": before.recipe})
            found[point.number] = point
        return [found[number] for number in sorted(found)]

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines of points.jsonl with their numbers from 1 on. RecipeError: it can't be read, or is too large."""
        try:
            with open(open_inside(self.path, POINTS), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_POINTS_BYTES:
                    raise _damaged(self.path / POINTS, f"it has {size:,} bytes, more than {MAX_POINTS_BYTES:,}")
                number = 0
                while line := file.readline(MAX_LINE):
                    number += 1
                    yield number, line
        except OSError as error:
            raise _damaged(self.path / POINTS, error) from None

    def refuse_links(self, *point_folders: str) -> None:
        """RecipeError: a file or folder of the sweep is there as a link or device; so is one of a point's run."""
        try:
            check_kinds(self.path, files=(HEAD, POINTS, STOP), folders=(LOGS, LOCK_FOLDER, *point_folders))
        except OSError as error:
            raise _damaged(Path(str(error.filename)), error) from None
        for name in point_folders:
            refuse_links(self.path / name)

    def ask_to_stop(self) -> None:
        """Leaves the file that asks the jobs of a Hydra launcher to end."""
        try:
            os.close(open_inside(self.path, STOP, os.O_WRONLY | os.O_CREAT))
        except OSError as error:
            raise write_error(self.path / STOP, error) from None

    def is_asked_to_stop(self) -> bool:
        """Whether that file is there."""
        return os.path.lexists(self.path / STOP)

    def take_stop_back(self) -> None:
        """Removes that file."""
        try:
            (self.path / STOP).unlink(missing_ok=True)
        except OSError as error:
            raise write_error(self.path / STOP, error) from None

    def new_hydra_logs(self) -> Path:
        """A new folder for what Hydra and its launcher write, which no one can have filled: logs/hydra-1, -2, ..."""
        number = 1
        while True:
            folder = self.path.resolve() / LOGS / f"hydra-{number}"
            try:
                make_folder_inside(self.path, LOGS)
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
            except OSError as error:
                raise write_error(folder, error) from None

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
        what = f"its recipe can't be read: {_first_error(error)}"
        text = f"point {point.number}: {what}; name the plugins that the sweep was made with"
        raise RecipeError([Problem("", text, code="sweep-damaged")]) from None


def _line(point: Point) -> bytes:
    """A line of points.jsonl. The recipe, which is most of it, stands in the first line of a point."""
    if point.state != "waiting":
        point = point.model_copy(update={"recipe": None})
    return point.model_dump_json(exclude_defaults=True).encode() + b"\n"


def _damaged(path: Path, cause: Exception | str, *, line: int | None = None) -> RecipeError:
    """`path` can't be read as what it is; `cause` says why. `line`: where in it."""
    if isinstance(cause, OSError):
        return RecipeError([Problem("", f"{path} can't be read: {cause.strerror}", code="sweep-damaged")])
    found = str(cause)
    if isinstance(cause, ValidationError):
        found = _first_error(cause)
    text = f"{path} is damaged"
    if line is not None:
        text += f" in line {line}"
    return RecipeError([Problem("", f"{text}: {found}", code="sweep-damaged")])


def _first_error(error: ValidationError) -> str:
    """`path.to.field: what is wrong with it`, of the first field that is wrong."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    return f"{path}: {first['msg']}"
