"""Finished parts belong to the bytes that they were made from: a source that changed behind their back is an error."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from megaspec.core.errors import DataError
from megaspec.data import inputs as inputs_module
from megaspec.data.inspect import inspect, print_report
from megaspec.data.prepare import Progress, prepare
from megaspec.data.tokenizer import ByteTokenizer


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Several parts, and a last line that stops the job when all others are done."""
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
    """How many parts a job finished that was stopped by the bad line."""
    with pytest.raises(DataError, match="1 bad lines"):
        prepare([str(source)], out, ByteTokenizer())
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

    def change(now: Progress) -> None:
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
