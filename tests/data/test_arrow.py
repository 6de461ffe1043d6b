"""Folders that `datasets` saved, as its version 5.2.0 writes them, and single .arrow files; damage is an error."""

import json
from pathlib import Path

import pyarrow
import pytest

from megaspec.core.errors import DataError
from megaspec.data import inputs as inputs_module
from megaspec.data.indexed import IndexedFile
from megaspec.data.inputs import cut, find_inputs, read_documents
from megaspec.data.prepare import prepare
from megaspec.data.text_fields import TextFields
from megaspec.data.tokenizer import ByteTokenizer

TEXTS = [f"row {i} " + "漢字 words"[i % 9 :] for i in range(40)]


def write_stream(path: Path, table: pyarrow.Table, rows: int = 6) -> Path:
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=rows)
    return path


def save_to_disk(folder: Path, table: pyarrow.Table, shards: int = 2, **state) -> Path:
    """What Dataset.save_to_disk leaves, with a cache of the library among it."""
    folder.mkdir(parents=True)
    each = -(-len(table) // shards)
    names = []
    for number in range(shards):
        # in another order than that of their names, which state.json says
        name = f"data-{shards - 1 - number:05d}-of-{shards:05d}.arrow"
        write_stream(folder / name, table.slice(number * each, each))
        names.append({"filename": name})
    write_stream(folder / "cache-0a1b.arrow", table.slice(0, 3))
    told = {"_data_files": names, "_fingerprint": "abc", "_format_columns": None, "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(told))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def table(**more) -> pyarrow.Table:
    return pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS, **more})


def read(path: Path, fields: str | TextFields = "text") -> list:
    found = []
    for part in cut(find_inputs([str(path)])):
        for piece in part.slices:
            found += read_documents(piece, fields)
    return found


@pytest.mark.parametrize("target", [100, 2**20])
def test_a_saved_data_set(tmp_path, monkeypatch, target):
    monkeypatch.setattr(inputs_module, "SMALLEST_PART", target)
    folder = save_to_disk(tmp_path / "saved", table())
    assert read(folder) == [(1 + i % 20, text) for i, text in enumerate(TEXTS)]
    prepared = prepare([str(folder)], tmp_path / "d", ByteTokenizer(), workers=2)
    file = IndexedFile(tmp_path / "d")
    assert [bytes(file.read(i)[:-1].astype("u1")).decode() for i in range(len(file))] == TEXTS
    assert prepared.manifest.bad_lines == {}
    # Arrow has no checksums, and its user is told
    assert len(prepared.without_checksums) == 2


def test_a_folder_of_several_and_other_files(tmp_path):
    save_to_disk(tmp_path / "in" / "b", table(), shards=1)
    (tmp_path / "in" / "a.txt").write_text("first")
    write_stream(tmp_path / "in" / "c.arrow", table().slice(0, 1))
    assert [text for _, text in read(tmp_path / "in")] == ["first", *TEXTS, TEXTS[0]]


def test_splits_have_to_be_named(tmp_path):
    for name in ("train", "test"):
        save_to_disk(tmp_path / "d" / name, table(), shards=1)
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(DataError, match=r"with the splits train, test; name the one to prepare: .*d/train or .*d/test"):
        find_inputs([str(tmp_path / "d")])
    with pytest.raises(DataError, match="with the splits train, test"):
        find_inputs([str(tmp_path)])
    assert len(read(tmp_path / "d" / "test")) == len(TEXTS)


def test_what_is_missing_or_was_not_written(tmp_path):
    folder = save_to_disk(tmp_path / "a", table())
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: is missing, state\.json names it"):
        find_inputs([str(folder)])
    chosen = save_to_disk(tmp_path / "b", table(), _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match=r"save it again after flatten_indices\(\)"):
        find_inputs([str(chosen)])
    for content, words in (("{", "no JSON"), ("[]", "no JSON object"), ("{}", "names no data files")):
        (folder / "state.json").write_text(content)
        with pytest.raises(DataError, match=words):
            find_inputs([str(folder)])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x.arrow"}]}))
    with pytest.raises(DataError, match=r"'\.\./x\.arrow' is no name of a file in its folder"):
        find_inputs([str(folder)])


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_type_of_text_and_the_file_format(tmp_path, kind):
    column = pyarrow.array(TEXTS)
    if kind == "dictionary":
        column = column.dictionary_encode()
    else:
        column = column.cast(getattr(pyarrow, kind)())
    made = pyarrow.table({"text": column})
    write_stream(tmp_path / "s.arrow", made)
    with pyarrow.ipc.new_file(tmp_path / "f.arrow", made.schema) as file:
        file.write_table(made, max_chunksize=6)
    for name in ("s.arrow", "f.arrow"):
        assert [text for _, text in read(tmp_path / name)] == TEXTS


def test_nested_and_several_columns_and_nulls(tmp_path):
    meta = [{"title": f"t{i}", "n": i} for i in range(len(TEXTS) - 2)]
    made = table(meta=[*meta, None, {"title": None, "n": 1}])
    write_stream(tmp_path / "s.arrow", made)
    found = read(tmp_path / "s.arrow", TextFields(("meta.title", "text"), ": "))
    assert found[7] == (8, f"t7: {TEXTS[7]}")
    assert [str(text) for _, text in found[-2:]] == ['wrong type: "meta.title" must be a string, found null'] * 2
    for key, words in (
        ("id", "wrong type: column id must hold strings, found int64"),
        ("meta", "column meta must hold strings, found struct"),
        ("meta.x", r"no meta\.x: meta is of type struct"),
        ("body", "no column body; --key names one of id, text, meta"),
    ):
        with pytest.raises(DataError, match=words):
            read(tmp_path / "s.arrow", key)
    write_stream(tmp_path / "n.arrow", pyarrow.table({"text": [None, None]}))
    assert [text.kind for _, text in read(tmp_path / "n.arrow")] == ["wrong type"] * 2


def test_bytes_that_are_no_utf8_are_one_bad_row(tmp_path):
    column = pyarrow.array([b"good", b"\xff", b"too"]).view(pyarrow.string())
    write_stream(tmp_path / "s.arrow", pyarrow.table({"text": column}))
    found = read(tmp_path / "s.arrow")
    assert (found[0][1], found[2][1]) == ("good", "too")
    assert str(found[1][1]) == "bad UTF-8: byte 0xff at byte 1"


def test_a_file_that_was_cut_off_anywhere_is_told(tmp_path):
    whole = write_stream(tmp_path / "s.arrow", table()).read_bytes()
    for length in range(0, len(whole) - 1, 37):
        (tmp_path / "s.arrow").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"s\.arrow: "):
            read(tmp_path / "s.arrow")


def test_flips_end_no_process_and_give_texts_or_an_error(tmp_path):
    """Offsets that point anywhere would end it."""
    whole = write_stream(tmp_path / "s.arrow", table()).read_bytes()
    told: list[str] = []
    for at in range(0, len(whole), 5):
        data = bytearray(whole)
        data[at] ^= 0x90
        (tmp_path / "s.arrow").write_bytes(data)
        try:
            read(tmp_path / "s.arrow")
        except DataError as error:
            told.append(str(error))
    assert len(told) > 50
    assert all("s.arrow: " in text for text in told)
