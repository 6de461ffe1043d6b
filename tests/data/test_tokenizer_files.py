"""SentencePiece's .model and GPT-2's vocab.json with merges.txt: the same ids as their own libraries give."""

import io
import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from tokenizers import Tokenizer as HfTokenizer

from megaspec.cli import main
from megaspec.core.errors import DataError
from megaspec.data import sentencepiece_model
from megaspec.data.indexed import IndexedFile
from megaspec.data.inspect import inspect
from megaspec.data.prepare import prepare
from megaspec.data.provenance import tokenizer_of
from megaspec.data.tokenizer import BpeRequest, load_tokenizer, parse_tokenizer, train_bpe

LINES = [line for text in topics.values() for line in text.split("\n") if line.strip()][:3000]
PIECES = ["the", " ", "  ", "\t", "\n", "\u00a0", "\u3000",
          "é", "e\u0301", "漢字", "🙂", "👩‍👩‍👧", "𝔘", "\u200b", "ﬁ", "Ａ", "\x00", "▁",
          "<s>", "</s>", "<unk>", "<0x41>", "if x:", "१२", "\ufeff", "ß", "ӝ", "!!", "a" * 30, "\r\n"]  # fmt: skip


def odd_texts(count: int) -> list[str]:
    """Texts of what breaks tokenizers: white space, marks that combine, names of special tokens, emojis."""
    rng = random.Random(0)
    return ["".join(rng.choices(PIECES, k=rng.randint(0, 40))) for _ in range(count)]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def model(request, tmp_path_factory) -> Path:
    spm = pytest.importorskip("sentencepiece", reason="the extra megaspec[sentencepiece]")
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, vocab_size=1000, model_type=request.param,
        byte_fallback=True, character_coverage=0.99, minloglevel=2, num_threads=1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return path


def test_sentencepiece_ids_are_those_of_its_library(model, tmp_path):
    """Of thousands of odd texts, through the workers and the files."""
    from sentencepiece import SentencePieceProcessor

    truth = SentencePieceProcessor(model_file=str(model))
    texts = [text for text in (*odd_texts(3000), *LINES[:500], *list(topics.values())[:10]) if text.strip()]
    # what its normalizer leaves nothing of is no document
    texts = [text for text in texts if truth.encode(text)]
    assert len(texts) > 3000
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared = prepare([str(tmp_path / "a.jsonl")], tmp_path / "d", load_tokenizer(model), allow_lossy=True)
    file = IndexedFile(tmp_path / "d")
    assert len(file) == len(texts)
    for number, text in enumerate(texts):
        assert file.read(number).tolist() == [*truth.encode(text), truth.eos_id()], repr(text)
    record = prepared.manifest.tokenizer
    assert (record.eod, record.eod_token, record.ending) == (truth.eos_id(), "</s>", ".model")
    assert (tmp_path / "d.tokenizer.model").read_bytes() == model.read_bytes()
    carried = tokenizer_of(tmp_path / "d")
    assert carried.decode(truth.encode("if x: 漢字")) == truth.decode(truth.encode("if x: 漢字"))
    assert "if x:" in " ".join(sample.text for sample in inspect(tmp_path / "d", samples=500).samples)


def test_sentencepiece_without_byte_fallback_tells_what_is_lost(tmp_path):
    spm = pytest.importorskip("sentencepiece", reason="the extra megaspec[sentencepiece]")
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, vocab_size=500, minloglevel=2, num_threads=1
    )
    path = tmp_path / "t.model"
    path.write_bytes(written.getvalue())
    tokenizer = load_tokenizer(path)
    assert tokenizer.lost("the  words") == {}
    assert tokenizer.lost("the 漢漢 words") == {"漢": 2}


def test_the_token_that_ends_a_document_can_be_named(model):
    assert load_tokenizer(model, eod="<s>").eod_token == "<s>"
    with pytest.raises(DataError, match=r"--eod <end>: .* has no such piece; its own is </s>"):
        load_tokenizer(model, eod="<end>")
    # a folder with both takes the tokenizer.json
    assert load_tokenizer(model.parent).ending == ".model"


def test_a_copy_of_another_tokenizer_goes(model, tmp_path):
    (tmp_path / "a.txt").write_text("the words")
    source = str(tmp_path / "a.txt")
    prepare([source], tmp_path / "d", load_tokenizer(model))
    prepare([source], tmp_path / "d", parse_tokenizer("byte"), overwrite=True)
    assert not (tmp_path / "d.tokenizer.model").exists()
    inspect(tmp_path / "d")


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"nothing", b"\xff" * 100])
def test_what_is_no_sentencepiece_model(tmp_path, content):
    pytest.importorskip("sentencepiece", reason="the extra megaspec[sentencepiece]")
    (tmp_path / "t.model").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.model: not a SentencePiece model"):
        load_tokenizer(tmp_path / "t.model")


def test_tiktoken_ranks_are_told(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(DataError, match=r"ranks of tiktoken, no SentencePiece model; take the tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    (tmp_path / "t.model").write_bytes(b"\x0a")
    with pytest.raises(DataError, match=r"install the extra megaspec\[sentencepiece\]"):
        sentencepiece_model.SentencePieceTokenizer(b"\x0a", name="t")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A folder with vocab.json and merges.txt; all.json is the tokenizer.json of the same."""
    folder = tmp_path_factory.mktemp("gpt2")
    trained = train_bpe(LINES, 1500)
    (folder / "all.json").write_bytes(trained.text)
    content = json.loads(trained.text)["model"]
    vocab = content["vocab"] | {"<|endoftext|>": trained.eod}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    return folder


def test_vocab_and_merges_give_the_ids_of_the_tokenizer_json(gpt2, tmp_path):
    made = load_tokenizer(gpt2)
    truth = HfTokenizer.from_file(str(gpt2 / "all.json"))
    texts = [*odd_texts(3000), *LINES[:500], "a<|endoftext|>b", " <|endoftext|> "]
    expected = [one.ids for one in truth.encode_batch(texts, add_special_tokens=False)]
    assert made.encode_batch(texts) == expected
    assert [made.decode(ids) for ids in expected[:500]] == [truth.decode(ids) for ids in expected[:500]]
    assert (made.eod, made.eod_token, made.vocab_size) == (1499, "<|endoftext|>", 1500)
    assert not any(made.lost(text) for text in texts[:500])
    (tmp_path / "a.txt").write_text("the words")
    prepare([str(tmp_path / "a.txt")], tmp_path / "d", made)
    assert tokenizer_of(tmp_path / "d").decode(IndexedFile(tmp_path / "d").read(0)[:-1]) == "the words"


def test_vocab_and_merges_by_their_names(gpt2, tmp_path):
    """As Megatron's users have them: gpt2-vocab.json and gpt2-merges.txt."""
    (tmp_path / "gpt2-vocab.json").write_bytes((gpt2 / "vocab.json").read_bytes())
    vocab = str(tmp_path / "gpt2-vocab.json")
    with pytest.raises(
        DataError, match=r"a vocabulary without its merges, .*gpt2-merges\.txt is not there; .*--merges"
    ):
        parse_tokenizer(vocab)
    by_name = parse_tokenizer(vocab, merges=str(gpt2 / "merges.txt"))
    (tmp_path / "gpt2-merges.txt").write_bytes((gpt2 / "merges.txt").read_bytes())
    assert parse_tokenizer(vocab).sha256 == by_name.sha256 == load_tokenizer(gpt2).sha256
    with pytest.raises(DataError, match=r"--merges x: belongs to a vocab\.json, --tokenizer byte is none"):
        parse_tokenizer("byte", merges="x")


@pytest.mark.parametrize(
    ("vocab", "merges", "words"),
    [
        ('{"a": 0, "b": 0}', "a b\n", "two tokens have one id"),
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\na b\nb b\n", r"merges\.txt:3: 'bb' is no token of .*vocab\.json"),
        ('{"a": 0, "b": 1, "ab": 2}', "a b ab\n", r"merges\.txt:1: a merge must be two tokens"),
        ('{"a": 0, "b": 1, "ab": 2}', "\n", r"merges\.txt: holds no merges"),
        ('{"a": 0.5}', "a b\n", r"not a tokenizer\.json"),
    ],
)
def test_vocab_and_merges_that_do_not_belong_together(tmp_path, vocab, merges, words):
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(DataError, match=words):
        load_tokenizer(tmp_path)


def test_the_command_says_which_token_ends_a_document(gpt2, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the words")
    words = ["data", "prepare", tmp_path / "a.txt", "--out", tmp_path / "d", "--tokenizer", gpt2, "--workers", "1"]
    assert main([str(word) for word in words]) == 0
    assert "each document ends with 1499, <|endoftext|>" in capsys.readouterr().out
    assert isinstance(parse_tokenizer("bpe:300"), BpeRequest)
