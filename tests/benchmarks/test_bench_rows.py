"""What a comparison rests on: the same rows on both sides, words that each script takes, no line that goes missing."""

import json
import os
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.step_time import step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec_kernels.catalog import PACKAGES
from tests.benchmarks import bench_layouts, bench_rows, bench_train, rank_processes, rows
from tests.benchmarks.packed_rows import packed_rows
from tests.benchmarks.peers import mcore_rows

RESULTS = Path(__file__).parent / "results"
H200 = HARDWARE["H200"]
# with every package that an implementation is made of
VERSIONS = {"torch": "2.11.0"} | dict.fromkeys(PACKAGES, "1")
TARGET = Target(gpus=1, gpu="NVIDIA H200", sm=90, gpu_memory=H200.memory, cores=16, versions=VERSIONS)
FOUR = TARGET.model_copy(update={"gpus": 4, "cores": 64})
WORKS = list(rows.all_works(16, quick=False))
RUNS = [pytest.param(work, run, id=f"{work.name}: {run.label}") for work in WORKS for run in work.runs]
WORKS_OF_FOUR = list(rows.four_gpu_works())
RUNS_OF_FOUR = [pytest.param(work, run, id=f"{work.name}: {run.label}") for work in WORKS_OF_FOUR for run in work.runs]
# Where `make bench` installs the peer without Transformer Engine.
PACKAGE = Path(os.environ.get("MEGATRON_CORE", Path(__file__).parents[2] / ".venv" / "megatron"))


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
    assert shape.qk_norm == (ours.get("attention", {}).get("qk_norm") == "per_head")
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


@cache
def spec_of(run):
    """What a layout of four GPUs is built from, and the sequences of a step."""
    args = bench_layouts.parser().parse_args([*run.words, run.layout])
    one = bench_layouts.arguments(run.layout, args, 4)
    return resolve(bench_train.recipe_of(one, 4), FOUR, Facts(run_dir="-")), args.sequences


@pytest.mark.parametrize(("work", "run"), RUNS_OF_FOUR)
def test_each_side_takes_its_words_over_four_gpus(work, run):
    assert run.beside in ("", *(one.label for one in work.runs if one.side == "mcore"))
    sequences = sequences_of(work)
    if run.side == "mcore":
        args = mcore_rows.parser().parse_args(run.words)
        replicas, left = divmod(4, args.tp * args.pp * args.cp)
        assert (replicas * args.mbs * args.accum, left) == (sequences, 0)
        # Megatron-core's own rules
        shape = mcore_rows.SHAPES[args.model]
        assert args.stages or shape.layers % (args.pp * args.chunks) == 0
        assert args.p2p == "batched" or args.chunks > 1
        return
    spec, own_sequences = spec_of(run)
    assert own_sequences == spec.train.global_batch == sequences
    assert unbuilt_problems(spec, {}) == []
    assert fullest(memory_of(spec)).total <= H200.room
    if "pipeline.layout=auto" in run.layout:
        assert spec.parallelism.pipeline.layout


def sequences_of(work):
    (sequences,) = {spec_of(run)[1] for run in work.runs if run.side == "ours"}
    return sequences


def test_the_peer_has_the_division_that_ours_has():
    (work,) = [one for one in WORKS_OF_FOUR if one.row == "pipelines_more"]
    found = {}
    for run in work.runs:
        if run.side == "ours":
            found[run.beside] = spec_of(run)[0].parallelism.pipeline.layout
        elif "--stages" in run.words:
            assert run.words[run.words.index("--stages") + 1] == found.pop(run.label)
    assert found == {}


def test_auto_divides_no_worse_than_what_was_measured():
    """The divisions of pipelines_four_h200.jsonl, as the plan of today sees them and its own."""
    divided = {}
    for text in (RESULTS / "pipelines_four_h200.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["side"] == "ours" and "pipeline.layout" in line["layout"]:
            divided[line["run"]] = line["layout"]
    (work,) = [one for one in WORKS_OF_FOUR if one.row == "pipelines"]
    runs = [run for run in work.runs if "pipeline.layout=auto" in run.layout]
    assert {run.label for run in runs} == set(divided)
    for run in runs:
        measured, _ = spec_of(replace(run, layout=divided[run.label]))
        found, _ = spec_of(run)
        before = step_time(measured, H200, throughput_of(H200)).seconds
        assert step_time(found, H200, throughput_of(H200)).seconds <= 1.001 * before, run.label


def test_what_tune_names_is_what_is_measured():
    """A layout that was found is told to the benchmark with all that makes its time."""
    (work,) = rows.tuned_works(8, top=3)
    assert (work.row, work.gpus, work.is_tuned, len(work.runs)) == ("tune8", 4, True, 3)
    for run in work.runs:
        spec, sequences = spec_of(run)
        assert sequences == 8
        predicted = step_time(spec, H200, throughput_of(H200)).seconds
        assert 1e3 * predicted == pytest.approx(run.planned_ms, rel=1e-4), run.label
    assert [run.label.startswith(rows.FIRST) for run in work.runs] == [True, False, False]
    planned = [run.planned_ms for run in work.runs]
    assert planned == sorted(planned)
    (behind,) = rows.tuned_works(8, top=3, skip=2)
    assert behind.runs == work.runs[2:]


def test_parts_of_a_sequence_have_as_much_to_attend_to():
    parts = [mcore_rows.part_of_sequence(16, 2, rank, torch.device("cpu")).tolist() for rank in range(2)]
    assert parts == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    parts = [mcore_rows.part_of_sequence(32, 4, rank, torch.device("cpu")) for rank in range(4)]
    assert sorted(torch.cat(parts).tolist()) == list(range(32))
    assert len({int(part.sum()) for part in parts}) == 1


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_peers_of_one_machine_don_t_meet(monkeypatch):
    for name in LAUNCHED:
        # set first, so that what is set below is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    mcore_rows.complete_environment()
    # the first stays while the second begins
    stores = [next(torch.distributed.rendezvous("env://")) for _ in range(2)]
    assert [(rank, world) for _, rank, world in stores] == [(0, 1), (0, 1)]
    assert stores[0][0].port != stores[1][0].port


def test_ranks_of_a_launch_stay_as_they_are(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    mcore_rows.complete_environment()
    assert {name: os.environ[name] for name in LAUNCHED} == LAUNCHED


def args_of(*words: str) -> object:
    return bench_rows.parser().parse_args(["--rows", "smoke", "--warmup", "1", "--steps", "1", *words])


def only(run, *words):
    """What a run on one GPU gives."""
    ((_, line),) = bench_rows.measured([run], rows.Work("row", "work", (run,)), args_of(*words))
    return line


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
        found[name] = only(rows.ours(name), "--limit", "5")
    assert found["good"] == {"tokens_per_s_gpu": 5.0}
    assert found["bad"]["error"] == "ended with 1: ValueError: no such kernel"
    assert found["silent"]["error"] == "ended with 0: nothing"
    assert found["hangs"]["error"] == "took longer than 5 s; last it said: at step 3"
    missing = only(rows.Run("t", "torchtitan", ()), "--peer-scripts", str(tmp_path))
    assert "torchtitan_bench.py is not there" in missing["error"]


# Stands for bench_layouts.py: a layout says itself what becomes of it.
LAYOUTS = """
import faulthandler, json, os, sys, time
words = sys.argv[1:]
out, patience = (words[words.index(name) + 1] for name in ("--out", "--patience"))
layouts = words[words.index("--out") + 2:]
rank = int(os.environ["RANK"])
with open(os.environ["STARTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")

def stuck():
    time.sleep(60)

for layout in layouts:
    faulthandler.dump_traceback_later(float(patience), exit=True)
    if layout == "raises" and rank == 1:
        raise ValueError("out of memory")
    if layout in ("hangs", "raises"):
        stuck()
    if layout == "silent":
        faulthandler.cancel_dump_traceback_later()
        stuck()
    if rank == 0:
        with open(out, "a") as file:
            line = {"tokens_per_s_gpu": 5.0, "layout": layout, "world": os.environ["WORLD_SIZE"]}
            file.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def four(tmp_path, monkeypatch):
    """-> what becomes of layouts over two ranks, by label, and how often ranks were started. None of them is left."""
    (tmp_path / "layouts.py").write_text(LAYOUTS)
    monkeypatch.setattr(bench_rows, "LAYOUTS", tmp_path / "layouts.py")
    monkeypatch.setattr(bench_rows, "GRACE", 2.0)
    monkeypatch.setattr(rank_processes, "AFTER_A_FAILURE", 1.0)
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))

    def run(*layouts, words=("--limit", "1"), seconds=None):
        runs = [rows.layout(name, name, ("--same",)) for name in layouts]
        work = rows.Work("row", "work", tuple(runs), 2)
        args = args_of(*words)
        until = time.monotonic() + seconds if seconds else float("inf")
        found = [(run.label.split()[-1], line) for run, line in bench_rows.measured(runs, work, args, until=until)]
        pids = [int(text) for text in (tmp_path / "started").read_text().split()]
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        return found, len(pids)

    return run


def test_layouts_share_a_launch(four):
    found, n_started = four("a", "b", "c")
    assert [(name, line["layout"], line["world"]) for name, line in found] == [(x, x, "2") for x in "abc"]
    assert n_started == 2


def test_a_layout_that_hangs_costs_its_own_row_alone_and_says_where_ranks_stood(four, tmp_path):
    found, n_started = four("a", "hangs", "b", words=("--limit", "1", "--log", str(tmp_path / "log")))
    assert [name for name, _ in found] == ["a", "hangs", "b"]
    assert n_started == 4
    good = {name: line for name, line in found if "error" not in line}
    assert {name: line["layout"] for name, line in good.items()} == {"a": "a", "b": "b"}
    assert found[1][1]["error"].startswith("rank 0, 1 ended with 1: stood in layouts.py:")
    assert "stuck" in found[1][1]["error"]
    assert "=== work: megaspec hangs" in (tmp_path / "log").read_text()


def test_ranks_that_wait_for_one_that_failed_are_ended(four):
    found, _ = four("raises", "b", words=("--limit", "30"))
    assert found[0][1]["error"].startswith("rank 0 took longer than 30 s; last it said: nothing; rank 1 ended with 1: ")
    assert "ValueError: out of memory" in found[0][1]["error"]
    assert found[1][1]["layout"] == "b"


def test_ranks_that_say_nothing_are_ended(four):
    found, _ = four("silent", "b")
    assert found[0][1]["error"] == "rank 0, 1 took longer than 1 s; last it said: nothing"
    assert found[1][1]["layout"] == "b"


def test_when_the_time_is_over_everything_ends(four):
    begun = time.monotonic()
    found, n_started = four("a", "silent", "b", words=("--limit", "30", "--total", "3"), seconds=3)
    assert time.monotonic() - begun < 10
    assert [line.get("error") for _, line in found] == [
        None,
        "not done when 3 s were over",
        "not begun: 3 s were over",
    ]
    assert n_started == 2


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGE.is_dir(), reason="no folder with megatron-core")
def test_stages_of_the_peer_do_not_wait_for_each_other(tmp_path):
    """Over four ranks of a CPU, which send in the order of GPUs: 1F1B, and interleaved in both ways of sending."""
    (tmp_path / "mcore").symlink_to(PACKAGE)
    words = ("--model", "tiny16", "--seq", "32", "--accum", "8", "--device", "cpu")
    runs = [rows.mcore("one rank", *words)]
    stages = (*words, "--pp", "4")
    divided = (*stages, "--stages", "Et*4|t*5|t*4|tttL")
    runs += [rows.mcore("1F1B", *stages), rows.mcore("1F1B, divided", *divided)]
    for way in ("batched", "overlapped"):
        runs.append(rows.mcore(f"interleaved, {way}", *stages, "--chunks", "2", "--p2p", way))
    args = bench_rows.parser().parse_args(
        ["--warmup", "1", "--steps", "2", "--limit", "100", "--peer-path", str(tmp_path)]
    )
    found = {}
    for run in runs:
        work = rows.Work("row", "work", (run,), 1 if run.label.endswith("one rank") else 4)
        ((_, found[run.label]),) = bench_rows.measured([run], work, args)
    losses = {}
    for label, line in found.items():
        losses[label] = (line.get("loss_first", line.get("error")), line.get("loss_last"))
    one_first, one_last = losses["mcore+TE one rank"]
    assert one_last < one_first - 0.5, losses
    for first, last in losses.values():
        # Weights are drawn rank by rank, of the same size: by the last of three steps losses differ by 0.03, and by 0.4
        # and more where a message is freed before it is sent.
        assert first == pytest.approx(one_first, abs=0.15), losses
        assert last == pytest.approx(one_last, abs=0.15), losses


def test_the_table_has_a_row_for_every_run(monkeypatch, capsys):
    def answers(runs, work, args, *, until):
        for run in runs:
            if "fails" in run.label:
                yield run, {"error": "why | not"}
                continue
            rate = 100.0 if run.side == "ours" else 80.0
            clock = {"clock_mhz": 1500.0, "power_watts": 690.0}
            line = {"tokens_per_s_gpu": rate, "step_ms": 4.0, "loss_first": 7.0, "loss_last": 6.5, "clock": clock}
            if run.side == "ours":
                line |= {"plan_ms": 4.1, "plan_gib": 1.98, "max_memory_allocated": 2 * 2**30}
            yield run, line

    monkeypatch.setattr(bench_rows, "measured", answers)
    monkeypatch.setattr(sys, "argv", ["bench_rows.py", "--rows", "smoke", "--rounds", "2", "--peer-rounds", "1"])
    bench_rows.main()
    lines = capsys.readouterr().out.splitlines()
    raw = [json.loads(line) for line in lines if line.startswith("{")]
    ours = ["megaspec packed", "megaspec fails"]
    assert [(line["round"], line["run"]) for line in raw] == [
        *((1, run) for run in (*ours, "mcore+TE thd")),
        *((2, run) for run in ours),
    ]
    shown = [line.split(" | ") for line in lines if line.startswith("| tiny")]
    assert [row[1] for row in shown] == ["megaspec packed", "megaspec fails", "mcore+TE thd"]
    assert shown[0][2:6] == ["100", "1.250", "", "2 of 2, 100 to 100"]
    assert shown[0][6:12] == ["4.0", "+2.5 %", "1,500", "690", "2.00", "-1.0 %"]
    assert shown[1][2] == "why / not"
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


def test_a_run_is_compared_with_the_peers_same_schedule():
    work = rows.pipelines()
    rates = {"megaspec 1f1b": 90.0, "megaspec zb_v": 120.0, "mcore+TE 1F1B": 100.0}
    rates["mcore+TE interleaved, 4 chunks"] = 110.0
    lines = []
    for label, rate in rates.items():
        lines.append({"work": work.name, "run": label, "tokens_per_s_gpu": rate, "step_ms": 1.0})
    shown = {}
    _, _, *told = bench_rows.table([work], lines).splitlines()
    for line in told:
        cells = line.split(" | ")
        shown[cells[1]] = cells[2:5]
    assert shown["megaspec 1f1b"] == ["90", "0.818", "0.900"]
    assert shown["megaspec zb_v"] == ["120", "1.091", ""]
    assert shown["megaspec zb_h1"][0] == "was not run"


def test_the_first_that_tune_names_is_held_to_the_best():
    work = rows.Work("tune8", "8 sequences", (), 4, is_tuned=True)

    def verdict(*steps):
        lines = [{"work": "64 sequences", "run": "megaspec 1: a", "step_ms": 1.0}]
        for number, step in enumerate(steps, start=1):
            line = {"work": work.name, "run": f"megaspec {number}: tp={number}"}
            lines.append(line | ({"step_ms": step} if step else {"error": "why"}))
        return bench_rows.verdict(work, lines)

    assert verdict(100.0, 98.0).endswith("2.0 % more than the best of 2 (megaspec 2: tp=2, 98.0 ms): within 3 %")
    assert verdict(100.0, 90.0).endswith("not within 3 %")
    assert verdict(100.0, None).endswith("0.0 % more than the best of 1 (megaspec 1: tp=1, 100.0 ms): within 3 %")
    assert verdict(None, 90.0) == "8 sequences: the first was not measured"


def test_what_tune_names_may_be_measured_by_two_commands(monkeypatch, capsys, tmp_path):
    def answers(runs, work, args, *, until):
        for run in runs:
            yield run, {"tokens_per_s_gpu": 1.0, "step_ms": 100.0 if run.label.startswith(rows.FIRST) else 90.0}

    found = rows.tuned(8, top=3, hardware="h200")
    # the first of three is the first of one, for which nothing is searched again
    monkeypatch.setattr(rows, "tuned", lambda *_, **__: found)
    monkeypatch.setattr(bench_rows, "measured", answers)
    words = ["bench_rows.py", "--rows", "tune8", "--rounds", "1", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*words, "--top", "1"])
    bench_rows.main()
    assert "best of 1" in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(sys, "argv", [*words, "--top", "3", "--skip", "1"])
    bench_rows.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert "the first takes 100.0 ms, 11.1 % more than the best of 3 (megaspec 2: " in last
