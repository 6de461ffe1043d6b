"""On a GPU the kinds of a profile account for the step, and a trace and a snapshot of memory are written."""

import gzip
import json

import pytest
import torch

from megaspec.cli import main
from megaspec.log.jsonl import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

BASE = (
    "recipe=hello",
    "data=random",
    "data.seq_len=2048",
    "data.vocab_size=32000",
    "~data.blend",
    "model.vocab_size=32000",
    "model.max_seq_len=2048",
    "model.n_layers=4",
    "model.d_model=1024",
    "model.n_heads=16",
    "model.n_kv_heads=4",
    "model.d_ffn=4096",
    "model.d_head=64",
    "precision=bf16",
    "train.global_batch=8",
    "train.micro_batch=4",
    "train.eval_every=0",
    "train.sample=null",
    "optim.schedule.warmup_steps=1",
    "log.tensorboard=false",
    "launcher.ranks=1",
)
MODELS = {
    "dense": (),
    "eager": ("kernels.compile=none",),
    "recomputed": ("parallelism.recompute.kind=full",),
    "experts": ("model.moe={n_experts: 16, top_k: 4, d_expert: 512}", "--balanced"),
}


@pytest.mark.parametrize("name", MODELS)
def test_kinds_account_for_the_step(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "step", *BASE, *MODELS[name], "--out", "step.jsonl"]) == 0
    (line,) = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    kinds = line["kinds"]
    assert sum(one["seconds"] for one in kinds.values()) == pytest.approx(line["seconds"])
    assert line["accounted"] >= 0.97, line["largest_other"]
    for kind in ("matrix products", "attention", "element-wise", "optimizer"):
        assert kinds[kind]["seconds"] > 0, kind
    # the backward pass of attention takes longer than the forward pass: both are seen
    assert kinds["attention"]["count"] >= 4 * 2 * 2 * 3, "layers, micro batches, forward and backward, steps"
    assert 0 < kinds["matrix products"]["flops"] / kinds["matrix products"]["seconds"] < 2.5e15
    assert line["clock_mhz"] is not None or line["no_clock"]


def test_a_run_writes_its_trace_and_its_memory_and_trains_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    steady = ("train.steps=5", "train.deterministic=true")
    assert main(["train", *BASE, *steady, "name=plain"]) == 0
    assert main(["train", *BASE, *steady, "name=seen", "profile.steps=[3,4]"]) == 0
    losses = {}
    for name in ("plain", "seen"):
        lines = read_metrics(f"runs/{name}/metrics.jsonl")
        losses[name] = [line["loss"] for line in lines if line["event"] == "step"]
    assert losses["seen"] == losses["plain"]
    (event,) = [line for line in read_metrics("runs/seen/metrics.jsonl") if line["event"] == "profile"]
    assert event["accounted"] >= 0.97, event["largest_other"]
    stem = tmp_path / "runs/seen/profiles/steps-3-4-rank-0"
    trace = json.loads(gzip.decompress(stem.with_name(f"{stem.name}.trace.json.gz").read_bytes()))
    assert any(one.get("cat") == "kernel" for one in trace["traceEvents"])
    assert stem.with_name(f"{stem.name}.memory.pickle").stat().st_size > 1000
