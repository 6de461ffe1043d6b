"""What a comparison rests on: the same rows on both sides, words that each script takes, no line that goes missing."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.target import Target
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec_kernels.catalog import PACKAGES
from tests.benchmarks import bench_rows, bench_train
from tests.benchmarks.packed_rows import packed_rows
from tests.benchmarks.peers import mcore_rows

H200 = HARDWARE["H200"]
# with every package that an implementation is made of
VERSIONS = {"torch": "2.11.0"} | dict.fromkeys(PACKAGES, "1")
TARGET = Target(gpus=1, gpu="NVIDIA H200", sm=90, gpu_memory=H200.memory, cores=16, versions=VERSIONS)
WORKS = list(bench_rows.all_works(16, quick=False))
RUNS = [pytest.param(work, run, id=f"{work.name}: {run.label}") for work in WORKS for run in work.runs]


def test_rows_are_cut_from_one_stream():
    rows = packed_rows(mean=100, rows=400, seq_len=256, vocab_size=50, seed=3)
    assert all(sum(row.lengths) == 256 and min(row.lengths) > 0 for row in rows)
    assert all(len(row.tokens) == 257 and row.tokens.min() >= 0 and row.tokens.max() < 50 for row in rows)
    # bounds lie as often at any place, one in a hundred; a row's first token is one by itself
    begins = sum(len(row.lengths) - 1 for row in rows)
    assert begins / (400 * 255) == pytest.approx(1 / 100, rel=0.1)
    again = packed_rows(mean=100, rows=400, seq_len=256, vocab_size=50, seed=3)
    assert all(a.starts == b.starts and (a.tokens == b.tokens).all() for a, b in zip(rows, again, strict=True))
    # long documents fill rows
    assert {row.starts for row in packed_rows(mean=10**6, rows=5, seq_len=8, vocab_size=9, seed=1)} == {(0, 8)}


def test_both_sides_train_on_the_same_documents():
    words = ["--model", "tiny", "--seq", "128", "--mbs", "2", "--documents", "20"]
    args = bench_train.parser().parse_args(words)
    spec = SimpleNamespace(model=SimpleNamespace(vocab_size=1024))
    mesh = SimpleNamespace(device=torch.device("cpu"), index=lambda axis: 0)
    pool, documents = bench_train.packed_pool(args, spec, mesh)
    theirs = mcore_rows.packed_batches(SimpleNamespace(documents=20, seq=128, mbs=2), 1024, torch.device("cpu"))
    assert len(pool) == len(theirs) == bench_train.POOL == mcore_rows.POOL
    assert bench_train.SEED == mcore_rows.SEED
    for tokens, ours, peer in zip(pool, documents, theirs, strict=True):
        assert torch.equal(tokens[:, :-1].flatten(), peer.tokens[0])
        assert torch.equal(tokens[:, 1:].flatten(), peer.labels[0])
        # without the empty ones that keep our shapes few
        lengths = ours.starts.diff()
        assert torch.equal(lengths[lengths > 0], peer.starts.diff())
        assert peer.longest >= peer.starts.diff().max()
        for begin, end in zip(peer.starts[:-1], peer.starts[1:], strict=True):
            assert torch.equal(peer.positions[0, begin:end], torch.arange(int(end - begin)))


@pytest.mark.parametrize("name", mcore_rows.SHAPES)
def test_a_peers_model_is_ours(name):
    shape = mcore_rows.SHAPES[name]
    ours = bench_train.MODELS[name]
    said = [ours[key] for key in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ffn", "vocab_size")]
    assert said == [shape.layers, shape.d_model, shape.heads, shape.kv_heads, shape.d_head, shape.d_ffn, shape.vocab]
    assert shape.rope_base == ours["positions"]["base"]
    assert shape.tied == ours.get("tied_embeddings", False)
    experts = ours.get("moe", {})
    assert (shape.experts, shape.top_k, shape.d_expert) == tuple(
        experts.get(key) for key in ("n_experts", "top_k", "d_expert")
    )


@pytest.mark.parametrize(("work", "run"), RUNS)
def test_each_side_takes_its_words(work, run):
    if run.side == "mcore":
        args = mcore_rows.parser().parse_args(run.words)
        assert args.documents == 0 or args.mbs in (1, 2)
    if run.side == "ours":
        spec = resolve(bench_train.recipe_of(bench_train.parser().parse_args(run.words), 1), TARGET, Facts(run_dir="-"))
        # what can't be trained yet is a line that says so
        if work.row != "gptoss":
            assert unbuilt_problems(spec, {}) == []
        if "fp8" in work.name:
            assert (spec.precision.kind, spec.precision.first_layers_bf16, spec.precision.last_layers_bf16) == (
                "fp8",
                0,
                0,
            )


@pytest.mark.parametrize("work", WORKS, ids=[work.name for work in WORKS])
def test_sides_of_a_work_have_the_same_tokens(work):
    same = {}
    for run in work.runs:
        parsed = {"--seq": "8192", "--mbs": "1", "--accum": "1", "--documents": "0", "--model": None}
        for key, value in zip(run.words, run.words[1:], strict=False):
            if key in parsed:
                parsed[key] = value
        same[tuple(parsed.items())] = run
    assert len(same) == 1


def args_of(*words: str) -> object:
    args = bench_rows.parser().parse_args(["--rows", "smoke", *words])
    args.warmup = 1
    args.steps = 1
    return args


def test_a_run_that_fails_is_a_line_with_its_reason(tmp_path, monkeypatch):
    scripts = {
        "good": "print('noise'); print('{\"tokens_per_s_gpu\": 5.0}')",
        "bad": "import sys; print('{\"half\": 1}'); raise ValueError('no such kernel')",
        "silent": "pass",
        "hangs": "import sys, time; print('at step 3', file=sys.stderr, flush=True); time.sleep(60)",
    }
    found = {}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(bench_rows, "OURS", tmp_path / name)
        found[name] = bench_rows.measured(bench_rows.ours(name), args_of("--limit", "5"))
    assert found["good"] == {"tokens_per_s_gpu": 5.0}
    assert found["bad"]["error"] == "ended with 1: ValueError: no such kernel"
    assert found["silent"]["error"] == "ended with 0: nothing"
    assert found["hangs"]["error"] == "took longer than 5 s; last it said: at step 3"
    missing = bench_rows.measured(bench_rows.Run("t", "torchtitan", ()), args_of("--peer-scripts", str(tmp_path)))
    assert "torchtitan_bench.py is not there" in missing["error"]


def test_the_table_has_a_row_for_every_run(monkeypatch, capsys):
    def answers(run, args):
        if "fails" in run.label:
            return {"error": "why | not"}
        rate = 100.0 if run.side == "ours" else 80.0
        clock = {"clock_mhz": 1500.0, "power_watts": 690.0}
        return {"tokens_per_s_gpu": rate, "step_ms": 3.0, "loss_first": 7.0, "loss_last": 6.5, "clock": clock}

    monkeypatch.setattr(bench_rows, "measured", answers)
    monkeypatch.setattr(sys, "argv", ["bench_rows.py", "--rows", "smoke", "--rounds", "2"])
    bench_rows.main()
    lines = capsys.readouterr().out.splitlines()
    raw = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(line["round"], line["run"]) for line in raw] == [
        (number, run) for number in (1, 2) for run in ("megaspec packed", "megaspec fails", "mcore+TE thd")
    ]
    rows = [line.split(" | ") for line in lines if line.startswith("| tiny")]
    assert [row[1] for row in rows] == ["megaspec packed", "megaspec fails", "mcore+TE thd"]
    assert rows[0][2:8] == ["100", "1.250", "2 of 2, 100 to 100", "3.0", "1,500", "690"]
    assert rows[1][2] == "why / not"
    assert np.unique([line.count("|") for line in lines if line.startswith("|")]).size == 1


def test_no_number_is_read_while_steps_are_under_way():
    begun = []

    def step(i: int) -> SimpleNamespace:
        begun.append(i)
        # whoever reads a number waits for all that the device has been given
        return SimpleNamespace(loss=SimpleNamespace(item=lambda: (i, len(begun))))

    times, losses = bench_train.timed(step, range(3, 7))
    assert losses == [(3, 4), (4, 4), (5, 4), (6, 4)]
    assert len(times) == 4
    assert bench_train.timed(step, range(0)) == ([], [])
