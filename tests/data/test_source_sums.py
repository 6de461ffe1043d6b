"""Finished parts belong to the bytes that they were made from: a source that changed behind their back is an error."""

import hashlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megaspec.commands import starting
from megaspec.core.errors import DataError
from megaspec.data import inputs as inputs_module
from megaspec.data import provenance, source_sums
from megaspec.data.inspect import inspect, print_report
from megaspec.data.manifest import load_manifest
from megaspec.data.prepare import JobProgress, prepare
from megaspec.data.source_sums import changes_at_start
from megaspec.data.spec import IndexedSpec
from megaspec.data.tokenizer import ByteTokenizer


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Several parts, and a last line that is bad."""
    monkeypatch.setattr(inputs_module, "SMALLEST_PART", 2000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " + "x" * 50}) + "\n" for i in range(200)) + "{")
    return path


def flip_silently(path: Path, at: int = 20) -> None:
    """A byte changes; size and time of change stay, as when a disk rots."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def interrupted(source: Path, out: Path) -> int:
    """How many parts a job finished that was stopped before it published them."""

    def stop(now: JobProgress) -> None:
        if now.stage == "files":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([str(source)], out, ByteTokenizer(), skip_bad=1, progress=stop)
    return len(list(Path(f"{out}.parts").glob("*.bin")))


def test_a_source_that_changed_between_parts_is_an_error(source, tmp_path):
    assert interrupted(source, tmp_path / "d") > 3
    flip_silently(source)
    with pytest.raises(DataError, match=r"a\.jsonl: sha256=.* though size and time are the same: damaged") as error:
        prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=1)
    assert "--restart" in str(error.value)
    assert not (tmp_path / "d.bin").exists()
    flip_silently(source)
    assert prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=1).parts_reused > 3


def test_starting_over_takes_the_source_as_it_is(source, tmp_path):
    interrupted(source, tmp_path / "d")
    flip_silently(source)
    again = prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=1, resume=False)
    assert again.parts_reused == 0
    assert inspect(tmp_path / "d").documents == 200


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'[{"name": 1}]'])
def test_sums_that_are_damaged_or_missing(source, tmp_path, content):
    interrupted(source, tmp_path / "d")
    (tmp_path / "d.parts" / "sources.json").write_bytes(content)
    with pytest.raises(DataError, match="--restart"):
        prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=1)
    (tmp_path / "d.parts" / "sources.json").unlink()
    assert prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=1).parts_reused == 0


def test_a_change_under_way_is_seen_though_size_and_time_are_put_back(source, tmp_path):
    seen = []

    def change(now: JobProgress) -> None:
        if now.stage == "tokens" and not seen:
            seen.append(now)
            flip_silently(source)

    with pytest.raises(DataError, match=r"a\.jsonl: (changed while it was read|sha256=)"):
        prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=1, progress=change)
    assert seen
    assert not (tmp_path / "d.bin").exists()


def test_inspect_says_what_became_of_the_sources(source, tmp_path):
    prepare([str(source)], tmp_path / "d", ByteTokenizer(), skip_bad=1)

    def shown() -> str:
        out = io.StringIO()
        print_report(inspect(tmp_path / "d"), Console(file=out, width=200))
        return next(line for line in out.getvalue().splitlines() if line.startswith("source"))

    assert shown().rstrip().endswith("bytes, as it was")
    flip_silently(source)
    assert shown().rstrip().endswith("bytes, changed since: not what the data was made from")
    source.unlink()
    assert shown().rstrip().endswith("bytes, not there to compare")


@pytest.fixture
def folder(tmp_path):
    """A folder of three files, prepared as d."""
    path = tmp_path / "in"
    path.mkdir()
    for name in "abc":
        (path / f"{name}.jsonl").write_text(json.dumps({"text": f"document {name}"}) + "\n")
    prepare([str(path)], tmp_path / "d", ByteTokenizer())
    return path


def test_the_manifest_has_a_sum_over_each_file(folder, tmp_path):
    manifest = load_manifest(tmp_path / "d")
    (record,) = manifest.sources
    assert [(file.name, file.sha256) for file in record.files] == [
        (f"{name}.jsonl", hashlib.sha256((folder / f"{name}.jsonl").read_bytes()).hexdigest()) for name in "abc"
    ]


def test_the_same_job_again_finds_a_source_that_changed_behind_its_back(folder, tmp_path):
    assert prepare([str(folder)], tmp_path / "d", ByteTokenizer()).was_there
    flip_silently(folder / "b.jsonl", at=14)
    with pytest.raises(DataError, match=r"--out .*/d: .*/in/b\.jsonl changed: sha256=\w+, it was \w+, though") as error:
        prepare([str(folder)], tmp_path / "d", ByteTokenizer())
    assert "a.jsonl" not in str(error.value)
    assert "restore it, or make the files again with --overwrite" in str(error.value)
    again = prepare([str(folder)], tmp_path / "d", ByteTokenizer(), overwrite=True)
    assert not again.was_there
    assert inspect(tmp_path / "d").sources[0][1] == "as it was"
    assert prepare([str(folder)], tmp_path / "d", ByteTokenizer()).was_there


def test_another_job_is_told_which_input_changed(folder, tmp_path):
    (folder / "b.jsonl").write_text('{"text": "longer than it was before"}\n')
    (folder / "c.jsonl").unlink()
    (folder / "e.jsonl").write_text('{"text": "new"}\n')
    with pytest.raises(DataError) as error:
        prepare([str(folder)], tmp_path / "d", ByteTokenizer())
    told = str(error.value)
    assert "made before its input changed" in told
    for words in ("in/b.jsonl changed: sha256=", "in/c.jsonl is missing", "in/e.jsonl is new"):
        assert words in told
    assert told.endswith("choose another name, or replace it with --overwrite")


def test_input_of_the_same_content_is_not_called_changed(folder, tmp_path):
    os.utime(folder / "b.jsonl", (1, 1))
    with pytest.raises(DataError, match="made from input of the same content, with other options or another tokenizer"):
        prepare([str(folder)], tmp_path / "d", ByteTokenizer())


def test_a_missing_source_of_what_is_there_has_two_ways_out(folder, tmp_path):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(
        DataError, match=r"in: no such file or folder; .* train from .*/d as it is.* put the input back"
    ):
        prepare([str(folder)], tmp_path / "d", ByteTokenizer())
    with pytest.raises(DataError) as error:
        prepare([str(folder)], tmp_path / "other", ByteTokenizer())
    assert "as it is" not in str(error.value)


def test_a_source_that_can_not_be_read_is_told(folder, tmp_path, monkeypatch):
    def refuse(paths):
        raise DataError(f"{paths[0]}: can't be read: Permission denied")

    monkeypatch.setattr(provenance, "sha256_of_files", refuse)
    with pytest.raises(DataError, match=r"a\.jsonl: can't be read: Permission denied; make it readable, or train from"):
        prepare([str(folder)], tmp_path / "d", ByteTokenizer())
    assert inspect(tmp_path / "d").sources[0][1].startswith("can't be compared: ")
    (told,) = changes_at_start(str(tmp_path / "d"))
    assert "can't be seen: " in told
    assert told.endswith("Permission denied; make it readable, or move it away")


def test_a_link_to_nothing_in_a_folder_is_not_passed_over(folder, tmp_path):
    (folder / "c.jsonl").rename(tmp_path / "c.jsonl")
    (folder / "c.jsonl").symlink_to(tmp_path / "c.jsonl")
    assert prepare([str(folder)], tmp_path / "e", ByteTokenizer()).manifest.documents == 3
    (tmp_path / "c.jsonl").unlink()
    with pytest.raises(DataError, match=r"c\.jsonl: a link to nothing; put its file back, or remove the link"):
        prepare([str(folder)], tmp_path / "f", ByteTokenizer())


def test_a_folder_that_can_not_be_searched_is_not_passed_over(folder, tmp_path, monkeypatch):
    (folder / "more").mkdir()
    search = os.scandir

    def refuse(path):
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", str(path))
        return search(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"in/more: can't be read: Permission denied"):
        prepare([str(folder)], tmp_path / "f", ByteTokenizer())


def test_inspect_names_the_file_of_a_folder(folder, tmp_path):
    flip_silently(folder / "b.jsonl", at=14)
    state = inspect(tmp_path / "d").sources[0][1]
    assert state.startswith("changed since: not what the data was made from (")
    assert "in/b.jsonl changed: sha256=" in state


def test_a_training_is_told_of_sources_that_changed(folder, tmp_path, monkeypatch):
    prefix = str(tmp_path / "d")
    assert changes_at_start(prefix) == []
    flip_silently(folder / "b.jsonl", at=14)
    (told,) = changes_at_start(prefix)
    assert "in/b.jsonl changed: sha256=" in told
    assert told.endswith("holds what was there before; prepare it again with --overwrite for what is there now")
    # of large sources only what their sizes and times say
    monkeypatch.setattr(source_sums, "_READ_AT_START", 0)
    assert changes_at_start(prefix) == []
    later = (tmp_path / "d.manifest.json").stat().st_mtime + 10
    os.utime(folder / "b.jsonl", (later, later))
    (told,) = changes_at_start(prefix)
    assert "in/b.jsonl was written to since; `megaspec data inspect` says whether" in told
    (folder / "b.jsonl").write_text("longer\n" * 9)
    (told,) = changes_at_start(prefix)
    assert "in changed: bytes=" in told
    # data may be trained where its sources are not
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert changes_at_start(prefix) == []


def test_train_says_it_before_it_starts(folder, tmp_path, capsys):
    spec = SimpleNamespace(data=IndexedSpec(kind="indexed", seq_len=4, blend=({"prefix": str(tmp_path / "d")},)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "memory_warning", lambda spec, target: "")
        starting.warn(spec, None)
        assert capsys.readouterr().err == ""
        flip_silently(folder / "b.jsonl", at=14)
        starting.warn(spec, None)
    assert "megaspec: " in (err := capsys.readouterr().err)
    assert "in/b.jsonl changed: sha256=" in err


def test_a_name_that_is_no_utf8_leaves_a_manifest_that_can_be_read(folder, tmp_path):
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/a\xff.jsonl"))
    odd.write_text('{"text": "a"}\n')
    for given in (folder, odd):
        prepare([str(given)], tmp_path / "e", ByteTokenizer(), overwrite=True)
        (record,) = load_manifest(tmp_path / "e").sources
        assert "a\\xff.jsonl" in [record.name.rpartition("/")[2], *(file.name for file in record.files)]
