"""A flipped bit in a parquet file with page checksums gives the same text or an error; of one without it is told."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megaspec.cli import main
from megaspec.core.errors import DataError
from megaspec.data.inputs import carries_checksums, cut, find_inputs, read_documents
from megaspec.data.text_fields import TextFields

TEXTS = [f"row {i} " + "abcdefghij klmnop"[i % 9 :] for i in range(14)] + ["the same text"] * 6
FORMATS = [
    {"compression": "none", "use_dictionary": True, "data_page_version": "1.0"},
    {"compression": "snappy", "use_dictionary": False, "data_page_version": "2.0"},
    {"compression": "zstd", "use_dictionary": True, "data_page_version": "2.0"},
]


def write(path: Path, texts: list[str] = TEXTS, *, checksums: bool = True, **more) -> bytes:
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    fields = {"row_group_size": 8, "write_page_checksum": checksums, **more}
    pyarrow.parquet.write_table(table, path, **fields)
    return path.read_bytes()


def read(path: Path) -> list:
    """Everything that a worker reads of a file."""
    found = []
    for part in cut(find_inputs([str(path)])):
        for piece in part.slices:
            found += [text for _, text in read_documents(piece, "text")]
            carries_checksums(piece, "text")
    return found


def outcomes(path: Path, good: bytes, bits: list[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """How many flips are told, and those that are other text without a word."""
    errors, silent = [], []
    for at, bit in bits:
        data = bytearray(good)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        try:
            found = read(path)
        except DataError as error:
            errors.append(str(error))
            continue
        if found != TEXTS:
            silent.append((at, bit))
    assert all(str(path) in text for text in errors)
    return len(errors), silent


@pytest.mark.parametrize("made", FORMATS, ids=lambda made: made["compression"])
def test_a_flip_is_harmless_or_told(tmp_path, made):
    path = tmp_path / "t.parquet"
    good = write(path, **made)
    assert read(path) == TEXTS
    bits = [(at, (at // 2 + at // 16) % 8) for at in range(0, len(good), 2)]
    if made is FORMATS[0]:
        footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
        bits += [(at, 4) for at in range(footer, len(good))]  # among them the numbers of rows
    told, silent = outcomes(path, good, bits)
    assert not silent
    assert told > len(bits) // 4


@pytest.mark.slow
@pytest.mark.parametrize("made", FORMATS, ids=lambda made: made["compression"])
def test_every_flip_is_harmless_or_told(tmp_path, made):
    path = tmp_path / "t.parquet"
    good = write(path, **made)
    told, silent = outcomes(path, good, [(at, bit) for at in range(len(good)) for bit in range(8)])
    assert not silent
    assert told > 2 * len(good)


def test_without_checksums_a_flip_may_be_other_text(tmp_path):
    """Why the notice is there: the same flips are not all told."""
    path = tmp_path / "t.parquet"
    good = write(path, checksums=False, **FORMATS[0])
    _, silent = outcomes(path, good, [(at, 1) for at in range(len(good))])
    assert silent


@pytest.mark.parametrize("made", FORMATS, ids=lambda made: made["compression"])
@pytest.mark.parametrize("checksums", [True, False])
def test_whether_a_file_carries_checksums_is_seen(tmp_path, made, checksums):
    path = tmp_path / "t.parquet"
    write(path, checksums=checksums, **made)
    pieces = [piece for part in cut(find_inputs([str(path)])) for piece in part.slices]
    assert len(pieces) == 3
    assert [carries_checksums(piece, "text") for piece in pieces] == [checksums] * 3


def prepare(*words: object) -> int:
    return main(["data", "prepare", *map(str, words), "--workers", "1"])


def test_a_damaged_file_ends_with_bad_data_and_its_name(tmp_path, capsys):
    good = write(tmp_path / "t.parquet", compression="none")
    for number, at in enumerate([good.index(b"row 3"), good.index(b"same"), len(good) - 8]):
        data = bytearray(good)
        data[at] ^= 255
        (tmp_path / "t.parquet").write_bytes(data)
        assert prepare(tmp_path / "t.parquet", "--out", tmp_path / f"d{number}") == 65
        err = capsys.readouterr().err
        assert "t.parquet: " in err
        assert "damaged" in err
        assert "can't be written" not in err
        assert "Traceback" not in err


def test_files_without_checksums_are_named_once(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.parquet", checksums=False)
    write(folder / "b.parquet", checksums=True)
    write(folder / "c.parquet", checksums=False)
    assert prepare(folder, "--out", tmp_path / "d") == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "no checksums" in line]
    assert [line.split(":")[0].strip() for line in told] == [str(folder / "a.parquet"), str(folder / "c.parquet")]


def test_bytes_are_no_text(tmp_path):
    """A flip makes a text column one of bytes; so do writers that say nothing of what the bytes are."""
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"a", b"b"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: wrong type: column text must hold strings, found binary"):
        read(tmp_path / "t.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [["a"], ["b"]]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"column text must hold strings, found list"):
        read(tmp_path / "t.parquet")


def test_several_columns_and_fields_of_structs(tmp_path):
    table = pyarrow.table({"title": ["A", "", None], "meta": [{"body": "a"}, {"body": "b"}, {"body": "c"}]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    found = []
    for part in cut(find_inputs([str(tmp_path / "t.parquet")])):
        for piece in part.slices:
            found += [str(text) for _, text in read_documents(piece, TextFields(("title", "meta.body"), ": "))]
    assert found == ["A: a", "b", 'wrong type: "title" must be a string, found null']
