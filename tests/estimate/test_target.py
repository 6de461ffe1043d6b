"""Targets: JSON both ways, GPU lists, what torchrun says, and no torch."""

import subprocess
import sys

import pytest

from megaspec.estimate import target as module
from megaspec.estimate.target import DetectedGpu, Target, detect_target, parse_gpu_lines

H200 = DetectedGpu("NVIDIA H200", 90, 2**37)
H100 = DetectedGpu("NVIDIA H100", 90, 2**36)


def test_json_both_ways():
    target = Target(gpus=2, gpu="NVIDIA H200", sm=90, gpu_memory=150 * 10**9, cores=8, versions={"torch": "2.13.0"})
    assert Target.model_validate_json(target.model_dump_json()) == target
    assert target.device == "cuda"


def test_gpu_lines():
    lines = ["NVIDIA H200, 9.0, 143771", "NVIDIA A100-SXM4-80GB, 8.0, 81920", "[N/A], [N/A], [N/A]", "broken", ""]
    assert parse_gpu_lines(lines) == [
        ("NVIDIA H200", 90, 143771 * 2**20),
        ("NVIDIA A100-SXM4-80GB", 80, 81920 * 2**20),
    ]
    assert parse_gpu_lines(["NVIDIA B200, 10.0, 1"])[0].sm == 100


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,7,1", 1), ("GPU-1234", 1)],
)
def test_visible_gpus(monkeypatch, visible, count):
    monkeypatch.setattr(module, "_gpus_by_nvml", lambda: [H200, H100])
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert detect_target(environment).gpus == count
    assert detect_target({"CUDA_VISIBLE_DEVICES": "1"}).gpu == "NVIDIA H100"


def test_torchruns_world(monkeypatch):
    monkeypatch.setattr(module, "_gpus_by_nvml", list)
    monkeypatch.setattr(module, "_gpus_by_command", list)
    inside = detect_target({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (inside.world_size, inside.local_ranks, inside.gpus) == (8, 4, 0)
    assert detect_target({"WORLD_SIZE": "8"}).world_size is None
    assert detect_target({}).cores >= 1


def test_peaks():
    h200 = Target(gpus=1, gpu="NVIDIA H200", sm=90)
    assert h200.peak_flops("bf16") == 989e12
    assert h200.peak_flops("fp32") == 67e12
    assert h200.peak_flops("fp8") == 1979e12
    assert Target(gpus=1, gpu="NVIDIA A100-SXM4-80GB", sm=80).peak_flops("fp8") is None
    assert Target(gpus=1, gpu="NVIDIA GB200", sm=100).peak_flops("bf16") == 2.5e15
    assert Target(gpus=1, gpu="Unknown 1", sm=90).peak_flops("bf16") is None
    assert Target().peak_flops("bf16") is None


def test_detecting_imports_no_torch():
    program = "import sys; from megaspec.estimate.target import detect_target; detect_target();"
    subprocess.run([sys.executable, "-c", program + "assert 'torch' not in sys.modules"], check=True)
