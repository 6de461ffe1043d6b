"""`megaspec bench throughput` on a machine without GPU, and what it prints of a table."""

import json

import pytest

from megaspec.cli import main
from megaspec.commands import bench_throughput as bench
from megaspec.core.errors import WriteError
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import ThroughputTable, throughput_of
from megaspec.verify.measured_throughput import table_text

TABLE = throughput_of(HARDWARE["H200"]).table


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (Target(), "no GPU here"),
        (Target(gpus=1, gpu="NVIDIA H200", versions={"torch": "2.13.0+cpu"}), "torch 2.13.0+cpu can't use the GPUs"),
        (Target(gpus=1, gpu="NVIDIA T4"), "NVIDIA T4 is not in the hardware table"),
    ],
)
def test_without_a_gpu_that_is_known(monkeypatch, capsys, target, told):
    monkeypatch.setattr(bench, "detect_target", lambda: target)
    assert main(["bench", "throughput"]) == 64
    assert told in capsys.readouterr().err


def test_a_file_that_cant_be_written_is_told_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "detect_target", lambda: Target(gpus=1, gpu="NVIDIA H200"))
    for out in (tmp_path, tmp_path / "absent" / "file.json"):
        assert main(["bench", "throughput", "--out", str(out)]) == WriteError.exit_code


def test_the_file_reads_back_and_stays_reviewable():
    text = table_text(TABLE)
    assert ThroughputTable.model_validate_json(text) == TABLE
    assert [line.split(":")[0] for line in text.splitlines()[1:3]] == ['"hardware"', '"source"']
    assert len(text.splitlines()) == len(json.loads(text)) + 2


def test_the_summary_says_what_was_reached():
    lines = list(bench.summary(TABLE))
    flops = 2 * 8192 * 8192 * 4096
    seconds = throughput_of(HARDWARE["H200"]).matmul_seconds(8192, 8192, 4096, precision="bf16", kind="forward")
    assert f"{flops / seconds / 1e12:,.0f}, " in lines[0]
    assert "TFLOP/s, 67% of the peak" in lines[0]
    assert any(line.startswith("all_reduce over 4 GPUs, 256 MiB: ") for line in lines)
    # of attention a line for each size of heads and each use that was measured, in any order of sums and in one
    assert len(lines) == 4 + 2 + 2 * 12 + 1 + 10 + 1
