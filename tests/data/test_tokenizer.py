import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspec.core.errors import DataError
from megaspec.data import tokenizer as tokenizer_module
from megaspec.data.provenance import record_of, tokenizer_of
from megaspec.data.tokenizer import (
    BpeRequest,
    ByteTokenizer,
    FileTokenizer,
    load_tokenizer,
    parse_tokenizer,
    train_bpe,
)
from tests.data.helpers import add_manifest, write_dataset

TEXTS = ["the quick brown fox jumps over the lazy dog, again and again", "def f(x):\n    return x + 1\n"] * 20


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


@given(st.text())
def test_bytes_lose_nothing(text):
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bpe_loses_nothing(text):
    tokenizer = trained()
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 300 for i in ids)


_TRAINED: list[FileTokenizer] = []


def trained() -> FileTokenizer:
    if not _TRAINED:
        _TRAINED.append(train_bpe(TEXTS, 300))
    return _TRAINED[0]


def test_training_is_deterministic(bpe):
    assert train_bpe(TEXTS, 300).text == bpe.text
    assert (bpe.vocab_size, bpe.eod, bpe.name) == (300, 299, "bpe:300")


def test_too_few_texts_say_how_many_ids_there_are():
    with pytest.raises(DataError, match=r"bpe:4000: the input is enough for \d+ ids only; ask for bpe:\d+"):
        train_bpe(["a b c"], 4000)


def test_file_and_folder(bpe, tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(bpe.text)
    for where in (folder, folder / "tokenizer.json"):
        loaded = load_tokenizer(where)
        assert loaded.sha256 == hashlib.sha256(bpe.text).hexdigest()
        assert (loaded.name, loaded.vocab_size, loaded.eod) == ("some-model", 300, 299)
    for eos in ("the", {"content": "the"}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(folder).decode([load_tokenizer(folder).eod]) == "the"
    assert load_tokenizer(folder, eod="<|endoftext|>").eod == 299


def test_a_token_that_is_not_there(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(bpe.text)
    with pytest.raises(DataError, match=r"--eod </s>: .* has no such token; its added tokens are <\|endoftext\|>"):
        load_tokenizer(tmp_path, eod="</s>")


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04", b'{"model": 1}', b"[" * 10000, b"\xff\xfe"])
def test_what_is_no_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_too_large_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "TOKENIZER_LIMIT", 100)
    (tmp_path / "tokenizer.json").write_bytes(b" " * 101)
    with pytest.raises(DataError, match="larger than 100 bytes"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("./nothing.json", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("bpe:many", "the size is a number"),
        ("bpe", "the size is a number"),
        ("bpe:257", "above 257"),
        ("bpe:-5", "the size is a number"),
    ],
)
def test_choices_that_name_nothing(choice, words):
    with pytest.raises(DataError, match=words):
        parse_tokenizer(choice)


def test_choices():
    assert isinstance(parse_tokenizer("byte"), ByteTokenizer)
    assert parse_tokenizer("bpe:8192") == BpeRequest(8192)
    for choice in ("byte", "bpe:300"):
        with pytest.raises(DataError, match="--eod x"):
            parse_tokenizer(choice, eod="x")


def test_the_copy_beside_the_data_has_to_be_the_one(bpe, tmp_path):
    write_dataset(tmp_path / "d", [3], vocab_size=300, manifest=False)
    with pytest.raises(DataError, match=r"manifest\.json: missing"):
        tokenizer_of(tmp_path / "d")
    add_manifest(tmp_path / "d", vocab_size=300, documents=1, tokens=3, tokenizer="bpe:300")
    with pytest.raises(DataError, match=r"d\.tokenizer\.json: can't be read"):
        tokenizer_of(tmp_path / "d")
    (tmp_path / "d.tokenizer.json").write_bytes(bpe.text)
    with pytest.raises(DataError, match="not its tokenizer"):
        tokenizer_of(tmp_path / "d")
    assert record_of(bpe).eod == 299
