"""Tokens out of logits, and text out of tokens."""

import math

import pytest
import torch
from torch import Tensor

from megaspec.data.tokenizer import ByteTokenizer, train_bpe
from megaspec.nn.hashing import uniform_53
from megaspec.runtime.draw import NOT_FINITE, Draw, Sampling, probabilities, text_key
from megaspec.runtime.text_stream import TextStream

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 2.0, -3.0], dtype=torch.float64)


def kept(sampling: Sampling) -> list[int]:
    return probabilities(LOGITS, sampling).nonzero().flatten().tolist()


def test_what_tokens_are_drawn_from() -> None:
    plain = probabilities(LOGITS, Sampling(temperature=0.5))
    assert torch.allclose(plain, (LOGITS / 0.5).softmax(0), rtol=1e-14, atol=0)
    # as likely as the last of them stays
    assert kept(Sampling(1.0, top_k=1)) == [1, 4]
    assert kept(Sampling(1.0, top_k=3)) == [1, 3, 4]
    assert kept(Sampling(1.0, top_k=99)) == list(range(6))
    # 0.347, 0.347, 0.210, 0.077, ...
    assert kept(Sampling(1.0, top_p=0.3)) == [1]
    assert kept(Sampling(1.0, top_p=0.36)) == [1, 4]
    assert kept(Sampling(1.0, top_p=0.7)) == [1, 3, 4]
    assert kept(Sampling(1.0, top_p=1.0)) == list(range(6))
    assert kept(Sampling(1.0, min_p=math.exp(-0.51))) == [1, 3, 4]
    assert kept(Sampling(1.0, min_p=1.0)) == [1, 4]
    # each cuts what the one before has left, of which probabilities are taken anew: half and half
    assert kept(Sampling(1.0, top_k=2, top_p=0.5)) == [1]
    assert kept(Sampling(1e-300)) == [1, 4]
    for sampling in (Sampling(1.0, top_k=3, top_p=0.9, min_p=0.1), Sampling(2.0, top_p=0.8)):
        assert probabilities(LOGITS, sampling).sum() == pytest.approx(1.0, abs=1e-15)


def test_transformers_draws_from_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        logits = torch.randn(1, 50, generator=generator, dtype=torch.float64) * 2
        sampling = Sampling(0.7, top_k=20, top_p=0.8, min_p=0.05)
        theirs = logits / sampling.temperature
        for warper in (
            transformers.TopKLogitsWarper(sampling.top_k),
            transformers.TopPLogitsWarper(sampling.top_p),
            transformers.MinPLogitsWarper(sampling.min_p),
        ):
            theirs = warper(torch.zeros(1, 1, dtype=torch.int64), theirs)
        assert (theirs.softmax(-1)[0] - probabilities(logits[0], sampling)).abs().max() < 1e-14


def test_tokens_come_as_often_as_they_are_likely() -> None:
    sampling = Sampling(1.0, top_k=3, seed=3)
    wanted = probabilities(LOGITS, sampling)
    key = text_key(3, [1, 2], 0)
    draw = Draw(sampling)
    counts = torch.zeros(6)
    n = 4000
    for counter in range(n):
        counts[draw(LOGITS[None], [key], [counter])[0]] += 1
    # four standard deviations
    assert ((counts / n - wanted).abs() <= 4 * (wanted * (1 - wanted) / n).sqrt()).all()
    assert draw(LOGITS[None].expand(2, -1), [key, key + 1], [5, 5]) == [
        draw(LOGITS[None], [key], [5])[0],
        draw(LOGITS[None], [key + 1], [5])[0],
    ]


def test_numbers_are_spread_evenly() -> None:
    values = torch.tensor([uniform_53(text_key(0, [7], 0), n) for n in range(4000)], dtype=torch.float64)
    assert values.min() >= 0
    assert values.max() < 1
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert (values < share).double().mean() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_marked(bad: float, temperature: float) -> None:
    logits = torch.stack((LOGITS, LOGITS.clone()))
    logits[1, 2] = bad
    good, marked = Draw(Sampling(temperature))(logits, [1, 1], [0, 0])
    assert good >= 0
    assert marked == NOT_FINITE


def streamed(tokens: list[int], *stops: str) -> tuple[list[str], TextStream]:
    stream = TextStream(ByteTokenizer(), [72, 105], stops)
    pieces = []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.is_stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return pieces, stream


def test_a_character_waits_for_its_last_token() -> None:
    text = "aé€🙂b"
    pieces, stream = streamed(list(text.encode()))
    assert stream.text == text
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "🙂", "b", ""]
    # one that is never complete is shown as what it is at the end
    assert streamed([97, 0xE2, 0x82])[0] == ["a", "", "", "�"]
    # and bytes that are no text do not wait for ever
    pieces, stream = streamed([0xFF] * 40 + [98])
    assert any(pieces[:20])
    assert stream.text == "�" * 40 + "b"


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("cd",), "ab"),
        (("€x", "d€"), "abc"),
        (("€",), "abcd"),
        (("zz", "ef"), "abcd€"),
        (("f", "ef"), "abcd€"),
        (("abcd€efgh",), "abcd€efg"),
        (("a",), ""),
        (("g",), "abcd€ef"),
    ],
)
def test_a_stop_ends_the_text_wherever_its_tokens_are_cut(stops: tuple[str, ...], text: str) -> None:
    _, stream = streamed(list("abcd€efg".encode()), *stops)
    assert stream.text == text
    assert stream.is_stopped == (text != "abcd€efg")


def test_what_may_begin_a_stop_is_held() -> None:
    assert streamed(list(b"a--b--c"), "--c")[0] == ["a", "", "", "--b", "", "", "", ""]
    assert streamed(list(b"a-"), "--c")[0] == ["a", "", "-"]


def test_text_of_a_tokenizer_file_is_that_of_all_tokens_together() -> None:
    source = "the cat sat on the mat, naïve façade — 猫 and 🙂 " * 20
    tokenizer = train_bpe([source], 280)
    ids = [int(i) for i in tokenizer.encode_batch(["naïve 🙂 猫 cat — sat"])[0]]
    prompts = [tokenizer.decode(ids[:cut]) for cut in range(len(ids))]
    cuts = [cut for cut, prompt in enumerate(prompts) if not prompt.endswith("�")]
    assert 4 < len(cuts) < len(ids)
    for cut in cuts:
        stream = TextStream(tokenizer, ids[:cut])
        for token in ids[cut:]:
            stream.add(token)
        stream.finish()
        assert prompts[cut] + stream.text == "naïve 🙂 猫 cat — sat"


def test_the_space_of_a_first_word_is_no_part_of_the_prompt() -> None:
    """SentencePiece gives the space of a first piece away: behind a prompt it is there."""
    tokenizer = WordTokenizer()
    stream = TextStream(tokenizer, [1, 2])
    assert [stream.add(token) for token in (3, 4)] == [" c", " d"]
    assert TextStream(tokenizer, []).add(3) == "c"


class WordTokenizer(ByteTokenizer):
    """A word a token."""

    def decode(self, ids: list[int]) -> str:
        return " ".join("_abcd"[i] for i in ids)


def test_temperature_0_takes_the_likeliest() -> None:
    logits: Tensor = torch.stack((LOGITS, -LOGITS))
    assert Draw(Sampling(0.0))(logits, [0, 0], [0, 0]) == [1, 5]
