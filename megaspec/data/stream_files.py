"""Which files a stream reads, what they are known by, and what is wrong with them before a run. Torch-free."""

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megaspec.core.errors import DataError
from megaspec.data.inputs import PYTHON_CORPUS, BadLine, InputSlice, find_inputs, read_documents
from megaspec.data.spec import StreamFiles, StreamSpec
from megaspec.data.urls import RemoteData, noted_of

if TYPE_CHECKING:
    from megaspec.data.tokenizer import Tokenizer

OTHER_FILES = (
    "data.files: names, sizes or times of change of the files, or the tokenizer, are other than those that the run "
    "began with, so its samples would be others; put the old files back with their times (cp -p, rsync -a), or give "
    "--fork NAME"
)
# Files whose beginning is read before a run; of more the first so many, the others when it comes to them.
STREAMED = ("jsonl", "text", "parquet")
"""Kinds of files that can be read from any place on."""
TRIED_FILES = 512
# Of a file that is tried, the bytes in which its first document begins.
_BEGINNING = 2**16


@dataclass(frozen=True)
class StreamFile:
    """One file of a stream."""

    kind: str
    """`jsonl`, `text` or `parquet`."""
    path: str
    bytes: int
    written: int
    """Time of change in ns."""


@dataclass(frozen=True)
class FileGroup:
    """Files that are one collection: a pass takes each of their documents once."""

    share: float
    """Of the samples."""
    files: tuple[StreamFile, ...]


def find_groups(spec: StreamSpec) -> tuple[FileGroup, ...]:
    """The files of a stream, in the order of their paths within each entry.

    Raises DataError for an entry that names nothing, or the same file as another, and for weights that are no shares.
    """
    found = [_files_of(number, entry) for number, entry in enumerate(spec.files)]
    _refuse_repeated(found)
    weights = [entry.weight for entry in spec.files]
    if all(weight is None for weight in weights):
        files = [file for of_entry in found for file in of_entry]
        return (FileGroup(1.0, tuple(files)),)
    if None in weights:
        bare = weights.index(None)
        path = spec.files[bare].path
        text = f"data.files.{bare}.path={path} has no weight, other entries have one"
        raise DataError(f"{text}; set a weight for each, or drop all of them")
    total = sum(weights)
    groups = []
    for number, files in enumerate(found):
        share = weights[number] / total
        if not 0 < share <= 1:
            text = f"data.files.{number}.weight={weights[number]} is no share of the weights' sum {total}"
            raise DataError(f"{text}; set weights nearer to 1")
        groups.append(FileGroup(share, tuple(files)))
    return tuple(groups)


def _files_of(number: int, entry: StreamFiles) -> list[StreamFile]:
    key = f"data.files.{number}.path={entry.path}"
    if entry.path == PYTHON_CORPUS:
        raise DataError(f"{key}: the Python corpus has no files; `megaspec data prepare python` makes data of it")
    names = [entry.path]
    if not Path(entry.path).exists() and glob.has_magic(entry.path):
        names = sorted(glob.glob(entry.path, recursive=True))
        if not names:
            raise DataError(f"{key}: no file has such a name")
    files = []
    try:
        for given in find_inputs(names):
            for file in given.files:
                files.append(_streamed(StreamFile(*file)))
    except DataError as error:
        raise DataError(f"{key}: {error}") from None
    return files


def _streamed(file: StreamFile) -> StreamFile:
    """The file, if it can be read from its middle on. Raises DataError."""
    if file.kind in STREAMED:
        return file
    text = f"{file.path} can't be read from its middle on, as a stream does; unpack it to .jsonl"
    raise DataError(f"{text}, or make token files of it with `megaspec data prepare`")


def _refuse_repeated(found: Sequence[Sequence[StreamFile]]) -> None:
    """Raises DataError for a file that two entries name, or one entry twice."""
    entry_of: dict[str, int] = {}
    for number, files in enumerate(found):
        for file in files:
            real = str(Path(file.path).resolve())
            if real in entry_of:
                text = f"{file.path} is read for data.files.{entry_of[real]} already"
                raise DataError(f"data.files.{number}.path: {text}; name it once, a weight says how often it is read")
            entry_of[real] = number


def stream_tokenizer(spec: StreamSpec) -> "Tokenizer":
    """The tokenizer of a stream. Raises DataError where there is none."""
    from megaspec.data.tokenizer import ByteTokenizer, load_tokenizer  # the library, only where text is read

    if spec.tokenizer == ByteTokenizer.name:
        return ByteTokenizer()
    # what a hub serves may be other on the next start, and ranks may not reach it
    if not Path(spec.tokenizer).exists():
        text = f"data.tokenizer={spec.tokenizer}: no such file or folder here"
        raise DataError(f"{text}; it is byte, a tokenizer.json or a folder with one")
    return load_tokenizer(spec.tokenizer)


def fingerprint(spec: StreamSpec, tokenizer: "Tokenizer", remote: Sequence[RemoteData] = ()) -> str:
    """Hash of the tokenizer, and of the files' names, sizes and times of change: their content is not read. Of files
    that a URL names it is what `remote` notes of them. Raises DataError for an entry that names nothing."""
    digest = hashlib.sha256(tokenizer.sha256.encode())
    for number, files in enumerate(_by_collection(spec, remote)):
        for file in files:
            digest.update(f"\n{number} {file}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _by_collection(spec: StreamSpec, remote: Sequence[RemoteData]) -> list[list[str]]:
    """What each collection's files are known by: with weights each entry is one, without any all together are."""
    found = []
    for number, entry in enumerate(spec.files):
        record = noted_of(entry.path, remote)
        if record is not None:
            found.append([f"{record.bytes} {record.digest} {record.url}"])
        else:
            found.append([f"{file.bytes} {file.written} {file.path}" for file in _files_of(number, entry)])
    if all(entry.weight is None for entry in spec.files):
        return [[file for files in found for file in files]]
    return found


def check_unchanged(spec: StreamSpec, said: str, remote: Sequence[RemoteData] = ()) -> None:
    """Raises DataError where files or tokenizer are not those that the run was resolved with.

    said: their hash then; "" for a Spec that was made without looking at them. remote: what it notes of URLs.
    """
    if not said or fingerprint(spec, stream_tokenizer(spec), remote) == said:
        return
    raise DataError(OTHER_FILES)


def file_problems(spec: StreamSpec, groups: Sequence[FileGroup]) -> list[str]:
    """What is wrong with the first document of each file."""
    files = [file for group in groups for file in group.files]
    problems = []
    for file in files[:TRIED_FILES]:
        wrong = _wrong_beginning(file, spec)
        if wrong:
            problems.append(wrong)
    return problems


def _wrong_beginning(file: StreamFile, spec: StreamSpec) -> str:
    """Why a file holds no document at its beginning; "" where it does."""
    if not file.bytes:
        if spec.bad_lines == "skip":
            return ""
        return f"{file.path}: an empty file; remove it, or set data.bad_lines=skip"
    stop = min(file.bytes, _BEGINNING)
    if file.kind == "parquet":
        stop = 1
    elif file.kind == "text":
        stop = file.bytes
    try:
        for line, text in read_documents(InputSlice(file.kind, file.path, 0, stop), spec.key):
            if not isinstance(text, BadLine):
                return ""
            if spec.bad_lines == "refuse":
                return bad_line(file.path, line, text, spec.key)
    except DataError as error:
        return in_recipe_words(error)
    # lines that are all left out; an empty row group or the beginning of a long line tells nothing
    return ""


def bad_line(path: str, line: int, bad: BadLine, key: str) -> str:
    """What is said of a line that is no document."""
    way_out = "mend it, or set data.bad_lines=skip to leave such lines out"
    if bad.kind in ("missing key", "wrong type"):
        way_out = f"data.key={key} must name a text; {way_out}"
    return f"{path}:{line}: {bad}; {way_out}"


def in_recipe_words(error: DataError) -> str:
    """An error of the readers, which speak of the options of `data prepare`."""
    return str(error).replace("--key names", "data.key names")


def described(spec: StreamSpec) -> str:
    """The files and the tokenizer in words, for `plan`. Raises DataError."""
    from megaspec.core.units import bytes_in_words

    groups = find_groups(spec)
    tokenizer = stream_tokenizer(spec)
    parts = []
    for group in groups:
        n_bytes = sum(file.bytes for file in group.files)
        plural = "" if len(group.files) == 1 else "s"
        text = f"{len(group.files):,} file{plural}, {bytes_in_words(n_bytes)}"
        if len(groups) > 1:
            text += f" ({group.share:.1%} of the samples)"
        parts.append(text)
    ids = f"{tokenizer.name} ({tokenizer.vocab_size:,} ids)"
    return f"stream of {', '.join(parts)}; tokenizer {ids}; how many tokens a pass has shows once it has been read"
