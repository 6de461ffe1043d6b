import io
import json

import numpy as np
import pytest
from rich.console import Console

from megaspec.core.errors import DataError
from megaspec.data.indexed import IndexedWriter
from megaspec.data.inspect import inspect, print_report
from megaspec.data.prepare import prepare
from megaspec.data.tokenizer import ByteTokenizer
from tests.data.helpers import write_dataset


@pytest.fixture
def prepared(tmp_path):
    texts = ["first\x1b[31m document", "second", "third " * 50]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "d", ByteTokenizer())
    return tmp_path / "d"


def printed(report) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=100))
    return out.getvalue()


def test_a_whole_data_set(prepared):
    report = inspect(prepared, samples=2)
    assert (report.documents, report.sequences, report.tokens) == (3, 3, 19 + 6 + 300 + 3)
    assert (report.smallest_id, report.largest_id) == (27, 256)
    assert [(one.shortest, one.longest, one.documents) for one in report.lengths.bins] == [
        (4, 7, 1),
        (16, 31, 1),
        (256, 511, 1),
    ]
    assert [sample.number for sample in report.samples] == [0, 2]
    assert report.samples[1].text.startswith("third third")
    assert report.unseen == ()
    text = printed(report)
    assert "328" in text
    assert "every checksum" in text
    assert "first" in text
    assert "\x1b" not in text, "a corpus doesn't steer the terminal"


def test_without_a_manifest_it_says_what_cannot_be_seen(prepared):
    prepared.with_suffix(".manifest.json").unlink()
    text = printed(inspect(prepared, tokenizer=ByteTokenizer()))
    assert "these can't be seen" in text
    assert "document bounds" in text
    assert "uint16 read as int16" in text
    assert "every checksum" not in text
    assert "third third" in text


def test_a_truncated_bin(prepared):
    path = prepared.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"d\.bin: size=654, d\.manifest\.json says 656"):
        inspect(prepared)
    prepared.with_suffix(".manifest.json").unlink()
    with pytest.raises(DataError, match=r"d\.bin: size=654, the lengths in d\.idx ask for 328 tokens"):
        inspect(prepared)


def test_an_idx_that_lies(prepared):
    path = prepared.with_suffix(".idx")
    data = bytearray(path.read_bytes())
    data[34] += 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"d\.idx: offset of sequence 1=40, the lengths before it end at byte 42"):
        inspect(prepared)


def test_an_id_outside_the_vocabulary(tmp_path):
    with IndexedWriter(tmp_path / "d", dtype=np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 500, 6])
    with pytest.raises(DataError, match=r"token id=500 at token 4 \(sequence 1\).*vocabulary size=257"):
        inspect(tmp_path / "d", tokenizer=ByteTokenizer())
    assert inspect(tmp_path / "d").largest_id == 500
    assert inspect(tmp_path / "d", vocab_size=501).largest_id == 500


def test_every_damaged_block_is_named(tmp_path):
    write_dataset(tmp_path / "d", [100_000] * 20)
    data = bytearray((tmp_path / "d.bin").read_bytes())
    for at in (5, 3_500_000):
        data[at] ^= 1
    (tmp_path / "d.bin").write_bytes(data)
    with pytest.raises(DataError) as error:
        inspect(tmp_path / "d", tokenizer=ByteTokenizer())
    assert "block 0 (" in str(error.value)
    assert "block 3 (" in str(error.value)


def test_no_files(tmp_path):
    with pytest.raises(DataError, match=r"d\.idx: can't be read"):
        inspect(tmp_path / "d")
