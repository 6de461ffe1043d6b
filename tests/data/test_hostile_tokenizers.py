"""A tokenizer.json that fails, hangs or makes no sense ends as bad data that names it, never as a traceback."""

import copy
import json
import random
from typing import Any

import pytest

from megaspec.cli import main
from megaspec.core.errors import DataError
from megaspec.data import prepare as prepare_module
from megaspec.data.inspect import inspect
from megaspec.data.prepare import prepare
from megaspec.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, train_bpe

BACKTRACKS = "(a+)+b"


def content(**more: Any) -> dict[str, Any]:
    """A tokenizer.json of single characters."""
    vocab = {chr(code): code - 32 for code in range(32, 127)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        **more,
    }


def splitting(pattern: str) -> dict[str, Any]:
    return content(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    )


@pytest.fixture
def job(tmp_path):
    """Runs `data prepare` with a tokenizer on a text; the exit code."""

    def run(tokenizer: dict[str, Any], text: str) -> int:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "tokenizer.json").write_text(json.dumps(tokenizer))
        lines = [json.dumps({"text": one}) + "\n" for one in ("well", text)]
        (tmp_path / "a.jsonl").write_text("".join(lines))
        words = ["data", "prepare", tmp_path / "a.jsonl", "--out", tmp_path / "d", "--tokenizer", tmp_path / "made"]
        return main([str(word) for word in (*words, "--eod", "none", "--workers", "1")])

    return run


HOSTILE = {
    "backtracking pre-tokenizer": (splitting(BACKTRACKS), "retry-limit-in-match over; a regular expression in it"),
    "backtracking normalizer": (
        content(normalizer={"type": "Replace", "pattern": {"Regex": BACKTRACKS}, "content": "c"}),
        "retry-limit-in-match over; a regular expression in it",
    ),
    "nothing for what it doesn't know": (
        content(model={"type": "WordLevel", "vocab": {"well": 0}, "unk_token": "[UNK]"}),
        "Missing [UNK] token",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_fails_on_a_text_is_named(job, tmp_path, name, capfd):
    tokenizer, said = HOSTILE[name]
    assert job(tokenizer, "a" * 40) == 65
    err = capfd.readouterr().err
    assert f"{tmp_path}/made/tokenizer.json: this tokenizer fails on a text" in err
    assert said in err
    assert f"(the text is in {tmp_path}/a.jsonl:1 to 2)" in err
    assert "Traceback" not in err
    assert "stack backtrace" not in err


def test_a_tokenizer_that_never_ends_is_ended(job, tmp_path, monkeypatch, capfd):
    """Each position stays below the library's own limit; all together would take minutes."""
    monkeypatch.setattr(prepare_module, "TOKENIZER_SECONDS", 0.5)
    assert job(splitting("(a|aa)+c"), ("a" * 28 + "b") * 200) == 65
    err = capfd.readouterr().err
    assert f"{tmp_path}/made/tokenizer.json: this tokenizer takes more than 0.5 s of CPU time" in err
    assert "a regular expression in it backtracks" in err
    assert "Traceback" not in err


def test_a_decoder_that_backtracks(tmp_path):
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}]}
    decoder["decoders"].append({"type": "Replace", "pattern": {"Regex": BACKTRACKS}, "content": "c"})
    (tmp_path / "made.json").write_text(json.dumps(content(decoder=decoder)))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "A" * 40}))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "d", ByteTokenizer(), append_eod=False)
    with pytest.raises(DataError, match=r"made\.json: this tokenizer fails on ids: .*retry-limit"):
        inspect(tmp_path / "d", vocab_size=257, tokenizer=load_tokenizer(tmp_path / "made.json"))


@pytest.mark.parametrize(
    "model",
    [
        {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []},
        {"type": "BPE", "vocab": {"a": 2**24}, "merges": []},
        {"type": "BPE", "vocab": {"a": 2**32}, "merges": []},
        {"type": "BPE", "vocab": {}, "merges": []},
        {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]},
        {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 5},
        {"type": "Unigram", "vocab": []},
        {"type": "nothing"},
        None,
    ],
    ids=str,
)
def test_models_that_make_no_sense(tmp_path, model):
    (tmp_path / "made.json").write_text(json.dumps(content(model=model)))
    with pytest.raises(DataError, match=r"made\.json: (not a tokenizer\.json|vocabulary size)"):
        load_tokenizer(tmp_path / "made.json")


@pytest.mark.parametrize("pattern", ["(", "[", "\\p{Nothing}", "*"])
def test_patterns_that_make_no_sense(tmp_path, pattern):
    (tmp_path / "made.json").write_text(json.dumps(splitting(pattern)))
    with pytest.raises(DataError, match=r"made\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path / "made.json")


VALUES = [None, True, 0, -1, 1, 2**32 - 1, 2**63, 0.5, 1e308, "", "a", "\0", "é" * 20, BACKTRACKS, "[", [], {}, [[]]]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    if isinstance(value, dict):
        inner = [place for key in value for place in places(value[key], (*path, key))]
    elif isinstance(value, list):
        inner = [place for number in range(min(len(value), 3)) for place in places(value[number], (*path, number))]
    else:
        inner = []
    return [path, *inner]


def mutant(original: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The content with one value replaced, mostly by one of its type."""
    made = copy.deepcopy(original)
    *above, last = rng.choice([place for place in places(made) if place and "vocab" not in place])
    where = made
    for key in above:
        where = where[key]
    alike = [value for value in VALUES if type(value) is type(where[last])]
    where[last] = copy.deepcopy(rng.choice(alike if alike and rng.random() < 0.8 else VALUES))
    return made


def test_any_change_of_a_tokenizer_is_one_or_bad_data():
    rng = random.Random(5)
    trained = json.loads(train_bpe(["the quick brown fox", "é"] * 20, 270).text)
    normalizers = [{"type": "NFC"}, {"type": "Prepend", "prepend": "_"}, {"type": "Strip", "strip_left": True}]
    normalizers[-1]["strip_right"] = True
    trained |= {"normalizer": {"type": "Sequence", "normalizers": normalizers}, "padding": None}
    works = refused = 0
    for _ in range(600):
        try:
            tokenizer = FileTokenizer(json.dumps(mutant(trained, rng)).encode(), name="made")
            (ids,) = tokenizer.encode_batch(["the quick é " + "a" * 40])
            tokenizer.decode(ids)
            tokenizer.lost("the quick é " + "a" * 40)
            works += 1
        except DataError as error:
            refused += str(error).startswith("made: ")
    assert works + refused == 600
    assert min(works, refused) > 100


def test_a_pattern_of_a_kind_that_is_used_works(tmp_path):
    (tmp_path / "made.json").write_text(json.dumps(splitting(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words, 123 of them: " * 1000}))
    found = prepare(
        [str(tmp_path / "a.jsonl")], tmp_path / "d", load_tokenizer(tmp_path / "made.json"), append_eod=False
    )
    assert found.manifest.sample.lost_characters == 0
    assert found.manifest.tokens == 25 * 1000
