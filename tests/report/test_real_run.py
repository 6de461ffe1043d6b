"""A run that is trained, killed by nobody, and gone on with: its page says what its folder says."""

import re

from megaspec import cli
from megaspec.log.jsonl import read_metrics
from megaspec.report.folder import REPORT, RunFolder

WORDS = (
    "recipe=hello",
    "name=real",
    "data=random",
    "data.seq_len=32",
    "data.vocab_size=257",
    "~data.blend",
    "model.n_layers=1",
    "train.global_batch=4",
    "train.eval_every=2",
    "train.eval_samples=4",
    "train.sample=null",
    "train.steps=4",
    "checkpoint.every=2",
    "optim.schedule.warmup_steps=0",
    "log.console=quiet",
    "log.tensorboard=false",
    "launcher.ranks=1",
)


def test_a_trained_run_and_one_that_goes_on(tmp_path, monkeypatch, capsys, warm_launches):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["train", *WORDS]) == 0
    page = tmp_path / "runs" / "real" / REPORT
    assert not page.exists()
    assert cli.main(["resume", "runs/real", "train.steps=6", "log.report={every_seconds: 1}"]) == 0
    by_rank = page.read_text()
    assert "<b>6 / 6</b>" in by_rank
    last = [line for line in read_metrics("runs/real/metrics.jsonl") if line["event"] == "step"][-1]
    assert f"<b>{last['loss']:.5g}</b>" in by_rank
    capsys.readouterr()
    assert cli.main(["report", "runs/real"]) == 0
    # nothing was odd about the folder
    assert capsys.readouterr().out == "runs/real/report.html\n"
    by_command = page.read_text()
    run = RunFolder(page.parent)
    run.read()
    assert run.history.count["start"] == 2
    assert run.history.count["checkpoint"] == 3
    # but for when it was written they are one page
    written = r"written [-0-9]+ [:0-9]+ UTC"
    assert re.sub(written, "", by_rank) == re.sub(written, "", by_command)
