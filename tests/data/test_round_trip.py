"""What a tokenizer loses is counted, shown, and stops `data prepare` unless it is allowed."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from megaspec.cli import main
from megaspec.data.manifest import load_manifest
from megaspec.data.tokenizer import FileTokenizer, train_bpe

LETTERS = "abcdefghijklmnoprstuvwx"  # without q, y, z
TEXT = "The quick brown fox, \n\tjumps: “über” 漢字 é e\u0301 1,234!  Twice  spaced."


def opened(tokenizer: Tokenizer) -> FileTokenizer:
    return FileTokenizer(tokenizer.to_str().encode(), name="made")


def of_characters(characters: str, **more) -> Tokenizer:
    """One token for each character, nothing for others."""
    return Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, [], **more))


def pieces(*words: str) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def gpt2_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(pieces(*sorted(pre_tokenizers.ByteLevel.alphabet())), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def gpt2_without_a_decoder() -> Tokenizer:
    content = json.loads(gpt2_like().to_str())
    return Tokenizer.from_str(json.dumps(content | {"decoder": None}))


def qwen_like() -> Tokenizer:
    tokenizer = gpt2_like()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def llama_like() -> Tokenizer:
    vocabulary = pieces("<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Thequick")
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def bert_like() -> Tokenizer:
    known = [c for c in normalizers.BertNormalizer().normalize_str(TEXT) if not c.isspace()]
    tokenizer = Tokenizer(models.WordPiece(pieces("[UNK]", *known, *(f"##{c}" for c in known)), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


def t5_like() -> Tokenizer:
    known = [(c, -1.0) for c in dict.fromkeys(normalizers.NFKC().normalize_str(TEXT)) if not c.isspace()]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -2.0), *known], 0, False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


KINDS = [gpt2_like, gpt2_without_a_decoder, qwen_like, llama_like, bert_like, t5_like]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", [TEXT, f"  {TEXT}\n"])
def test_what_a_tokenizer_normalizes_is_not_lost(make, text):
    """Lower case, accents, NFC, a space in front, spaces between words of WordPiece: said in its file."""
    assert opened(make()).lost(text) == {}


def test_tokens_that_a_text_names_are_not_lost():
    tokenizer = bert_like()
    tokenizer.add_special_tokens(["[SEP]"])
    assert opened(tokenizer).lost("quick [SEP] fox") == {}


@pytest.mark.parametrize("make", [gpt2_like, gpt2_without_a_decoder, llama_like], ids=lambda make: make.__name__)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=60, deadline=None)
def test_byte_level_tokenizers_lose_nothing_of_any_text(make, text):
    assert opened(make()).lost(text) == {}


def test_our_own_loses_nothing():
    tokenizer = train_bpe([TEXT] * 20, 300)
    assert tokenizer.lost(TEXT) == {}


def test_characters_that_are_not_in_the_vocabulary():
    assert opened(of_characters(LETTERS + " ")).lost("the quick lazy fox") == {"q": 1, "z": 1, "y": 1}
    assert opened(of_characters(LETTERS)).lost("the fox") == {" ": 1}
    assert opened(of_characters(LETTERS + " ")).lost("a\nb\n") == {"\n": 1}, "line ends at an end are nobody's"


def test_unknown_tokens():
    tokenizer = opened(of_characters(LETTERS + " <>", unk_token="x"))
    assert tokenizer.lost("lazy fox") == {"z": 1, "y": 1}
    tokenizer = bert_like()
    assert opened(tokenizer).lost("the ∑ fox") == {"∑": 1}
    tokenizer.add_special_tokens(["[UNK]"])
    assert opened(tokenizer).lost("the [UNK] fox") == {}, "a text that says the token's name"
    assert opened(tokenizer).lost("the [UNK] ∑ fox") == {"∑": 1}
    assert opened(t5_like()).lost("brown ∑ fox") == {"∑": 1}


def test_a_pre_tokenizer_that_takes_characters_away():
    tokenizer = of_characters(LETTERS + " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("k", "removed")
    assert opened(tokenizer).lost("the kick") == {"k": 2}


def test_bytes_that_are_not_in_the_vocabulary():
    tokenizer = Tokenizer(models.BPE(pieces(*sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"æ"})), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert opened(tokenizer).lost("ab 漢 cd") == {"漢": 1}


@pytest.fixture
def lossy(tmp_path) -> Path:
    (tmp_path / "small.json").write_text(of_characters(LETTERS + " ").to_str())
    texts = ["the fox", "the quick lazy fox", "a box", "lazy"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def prepare(folder: Path, *more: object, out: str = "d") -> int:
    words = ["data", "prepare", folder / "a.jsonl", "--out", folder / out, "--tokenizer", folder / "small.json"]
    return main([str(word) for word in (*words, "--eod", "none", "--workers", "2", *more)])


def test_a_loss_stops_the_job_and_is_counted(lossy, capsys):
    assert prepare(lossy) == 65
    err = capsys.readouterr().err
    assert f"{lossy}/small.json: this tokenizer loses 5 of 34 characters in 2 of 4 sampled documents" in err
    assert "('y' 2, 'z' 2, 'q' 1)" in err
    assert f"  {lossy}/a.jsonl:2\n  {lossy}/a.jsonl:4\n" in err
    assert "--allow-lossy-tokenizer" in err
    assert not (lossy / "d.bin").exists()


def test_a_loss_that_is_allowed_is_counted_too(lossy, capsys):
    assert prepare(lossy) == 65
    assert prepare(lossy, "--allow-lossy-tokenizer") == 0
    out = capsys.readouterr().out
    assert "1 parts were there from a job that was stopped" in out
    assert "lost by the tokenizer: 5 of 34 characters in 2 of 4 sampled documents ('y' 2, 'z' 2, 'q' 1)" in out
    sample = load_manifest(lossy / "d").sample
    assert (sample.documents, sample.lossy_documents, sample.lost_characters) == (4, 2, 5)
    assert main(["data", "inspect", str(lossy / "d"), "--samples", "0"]) == 0
    assert "5 of 34 characters" in capsys.readouterr().out
    assert prepare(lossy, "--allow-lossy-tokenizer") == 0
    assert "was already prepared" in capsys.readouterr().out
    assert prepare(lossy) == 65


def test_the_sample_depends_on_the_input_alone(lossy, monkeypatch, capsys):
    from megaspec.data import inputs

    monkeypatch.setattr(inputs, "SMALLEST_PART", 20_000)
    lines = [json.dumps({"text": f"{'lazy ' * (i % 40)}fox"}) + "\n" for i in range(2000)]
    (lossy / "a.jsonl").write_text("".join(lines))
    for workers in (1, 3):
        assert prepare(lossy, "--allow-lossy-tokenizer", "--workers", workers, out=f"d{workers}") == 0
    one, three = load_manifest(lossy / "d1"), load_manifest(lossy / "d3")
    assert one == three
    assert 100 < one.sample.documents < 2000
    assert one.sample.lost["z"] > 50
