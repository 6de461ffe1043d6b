import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspec.core.errors import DataError, WriteError
from megaspec.data.indexed import IndexedFile, IndexedWriter, index_bytes, read_index, token_dtype
from tests.data.helpers import write_dataset

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "indexed_dataset.json").read_text())


def test_files_equal_megatrons(tmp_path):
    lengths = GOLDEN["doc_lengths"]
    with IndexedWriter(tmp_path / "u16", dtype=np.dtype("<u2")) as writer:
        start = 0
        for length in lengths:
            writer.add_document(np.arange(start, start + length))
            start += length
    for name, expected in GOLDEN["files"].items():
        data = (tmp_path / name).read_bytes()
        assert len(data) == expected["bytes"]
        assert data[:64].hex() == expected["hex_first_64"]
        assert hashlib.sha256(data).hexdigest() == expected["sha256"]


def test_dtype_codes_are_megatrons():
    for name, code in GOLDEN["dtype_codes"].items():
        assert index_bytes(np.dtype(name), np.zeros(0))[0][17] == code


@pytest.mark.parametrize(("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (2**17, "int32")])
def test_dtype_rule(vocab_size, name):
    assert token_dtype(vocab_size).name == name


@settings(deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65000), max_size=9), max_size=12),
    wide=st.booleans(),
    parts=st.integers(1, 3),
)
def test_what_is_written_is_read(tmp_path_factory, documents, wide, parts):
    folder = tmp_path_factory.mktemp("d")
    dtype = np.dtype("<i4") if wide else np.dtype("<u2")
    with IndexedWriter(folder / "whole", dtype=dtype) as writer:
        for document in documents:
            writer.add_document(document)
    with IndexedWriter(folder / "merged", dtype=dtype) as merged:
        for k in range(parts):
            with IndexedWriter(folder / f"part{k}", dtype=dtype) as part:
                for document in documents[k * len(documents) // parts : (k + 1) * len(documents) // parts]:
                    part.add_document(document)
            merged.add_index(folder / f"part{k}")
    file = IndexedFile(folder / "whole")
    assert [file.read(i).tolist() for i in range(len(file))] == documents
    assert file.tokens == sum(map(len, documents))
    for ending in (".bin", ".idx"):
        assert (folder / f"merged{ending}").read_bytes() == (folder / f"whole{ending}").read_bytes()


def test_several_sequences_in_a_document(tmp_path):
    with IndexedWriter(tmp_path / "d", dtype=np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3, 4, 5], lengths=[2, 3])
        writer.add_document([6])
    index = read_index(tmp_path / "d")
    assert index.lengths.tolist() == [2, 3, 1]
    assert index.documents.tolist() == [0, 2, 3]
    assert index.offsets.tolist() == [0, 4, 10]
    assert IndexedFile(tmp_path / "d").read(1, 1, 3).tolist() == [4, 5]


def test_a_failed_block_leaves_nothing(tmp_path):
    def fail():
        with IndexedWriter(tmp_path / "d", dtype=np.dtype("<u2")) as writer:
            writer.add_document([1])
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_merging_other_dtypes_is_refused(tmp_path):
    write_dataset(tmp_path / "a", [3], vocab_size=70000)
    with IndexedWriter(tmp_path / "b", dtype=np.dtype("<u2")) as writer:
        with pytest.raises(DataError, match="dtype=int32"):
            writer.add_index(tmp_path / "a")
        writer.add_document([1])


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(WriteError, match="nowhere"):
        IndexedWriter(tmp_path / "nowhere" / "d", dtype=np.dtype("<u2"))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"d\.idx: can't be read"):
        IndexedFile(tmp_path / "d")
    write_dataset(tmp_path / "d", [3], manifest=False)
    (tmp_path / "d.bin").unlink()
    with pytest.raises(DataError, match=r"d\.bin: can't be read"):
        IndexedFile(tmp_path / "d")


def test_multimodal_and_float_files_are_refused(tmp_path):
    write_dataset(tmp_path / "d", [3, 4], manifest=False)
    path = tmp_path / "d.idx"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0\0")
    with pytest.raises(DataError, match="multimodal"):
        IndexedFile(tmp_path / "d")
    path.write_bytes(whole[:17] + struct.pack("<B", 7) + whole[18:])
    with pytest.raises(DataError, match="float32"):
        IndexedFile(tmp_path / "d")


def test_blocks_are_checked_when_they_are_touched(tmp_path):
    """Damage of one block doesn't keep the others from being read, and is found before its tokens are used."""
    lengths = [100_000] * 20
    tokens = write_dataset(tmp_path / "d", lengths, vocab_size=1000)
    file = IndexedFile(tmp_path / "d")
    assert file.n_blocks == 4
    data = bytearray((tmp_path / "d.bin").read_bytes())
    data[3_000_000] ^= 1
    (tmp_path / "d.bin").write_bytes(data)
    file = IndexedFile(tmp_path / "d")
    assert np.array_equal(file.read(0), tokens[:100_000])
    with pytest.raises(DataError, match=r"d\.bin: crc32 of block 2"):
        file.read(15)
