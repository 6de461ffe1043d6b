"""What `make train` does: real text, two tensor-parallel ranks, and a model that has learnt more than letter counts."""

import json
from pathlib import Path

import numpy as np
import pytest

from megaspec.cli import main
from megaspec.data.indexed import read_lengths
from megaspec.data.indices import split_bounds
from megaspec.run_folder import read_run
from tests.short_corpus import shorten

pytestmark = pytest.mark.usefixtures("warm_launches")


def unigram_entropy(prefix: str, split: tuple[float, ...]) -> float:
    """Nats per token of the validation split, for a model that knows how often each token occurs in it."""
    lengths = read_lengths(prefix)
    bounds = split_bounds(split, len(lengths))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)[ends[bounds[1]] : ends[bounds[2]]]
    shares = np.bincount(tokens) / len(tokens)
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


def train(*overrides: str) -> list[dict]:
    assert main(["data", "prepare", "python", "--out", "data/hello", "--tokenizer", "byte"]) == 0
    assert main(["train", "recipe=hello", "log.console=quiet", *overrides]) == 0
    lines = Path("runs/hello/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    shorten(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)


def assert_learnt(events: list[dict], *, below: float) -> None:
    spec = read_run(Path("runs/hello")).spec
    entropy = unigram_entropy("data/hello", spec.data.split)
    assert 3 < entropy < 3.6
    last = [e for e in events if e["event"] == "eval"][-1]
    assert last["step"] == spec.train.steps
    assert last["loss"] < entropy - below, f"validation loss {last['loss']:.3f}, unigram entropy {entropy:.3f}"


def test_a_short_run_is_below_the_unigram_entropy_already(capfd):
    short = ("train.steps=40", "optim.schedule.warmup_steps=5", "data.seq_len=128")
    events = train(*short, "train.eval_every=40", "train.sample.tokens=8")
    assert_learnt(events, below=0.3)
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 41))
    assert all(1e8 < e["memory_bytes"] < 1e11 for e in steps)
    texts = []
    for seed in ("1", "1", "2"):
        capfd.readouterr()
        assert main(["generate", "runs/hello", "The ", "--tokens", "12", "--seed", seed]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0].startswith("The ")
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_the_whole_recipe():
    assert_learnt(train(), below=1.0)
