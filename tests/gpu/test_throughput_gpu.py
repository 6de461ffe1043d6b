"""Measuring throughput on a GPU: a table that is read back, with times that the data sheet and a plain timer allow."""

from collections import defaultdict
from time import sleep

import pytest
import torch

from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.target import detect_target
from megaspec.estimate.throughput import read_throughput
from megaspec.verify import measured_throughput as module
from megaspec.verify.measured_throughput import Stopwatch, measure, table_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

DEVICE = torch.device("cuda", 0)
SMALL = {
    "ROWS": (1024, 8192),
    "SIDES": (1024, 4096),
    "FEW_ROWS": (1024, 4096),
    "FEW_SIDES": (1024, 2048),
    "GROUP_ROWS": (256, 1024),
    "HEAD_ROWS": (2**16, 2**18),
    "LENGTHS": (1024, 8192),
    "MOVED": (2**20, 2**28),
    "SEEN": {"causal": (8192,), "documents": (1024,)},
}


def test_a_small_table_is_measured_and_read_back(monkeypatch, tmp_path):
    for name, grid in SMALL.items():
        monkeypatch.setattr(module, name, grid)
    target = detect_target()
    hardware = hardware_of(target)
    told = []
    table = measure(hardware, device=DEVICE, target=target, tell=told.append)
    (tmp_path / "mine.json").write_text(table_text(table))
    throughput = read_throughput(tmp_path / "mine.json")
    assert throughput.table == table
    assert len(told) >= 6
    assert set(table.products) == set(hardware.peak) - {"fp16"}
    for name in table.products:
        for kind in ("forward", "dgrad", "wgrad"):
            rate = 2 * 4096 * 2048 * 2048 / throughput.matmul_seconds(4096, 2048, 2048, precision=name, kind=kind)
            assert 0.25 < rate / hardware.peak[name] < 1.0, (name, kind, rate)
    assert 0.6 < 2**28 / throughput.memory_seconds(2**28) / hardware.memory_bandwidth < 1.0
    seconds = defaultdict(list)
    for one in table.attention_rates:
        seconds[one.implementation, one.deterministic, one.kind].append(one.seconds)
    in_both = {("sdpa", False), ("sdpa", True), ("flex", False), ("flex", True)}
    # flex leaves rows that hide nothing to cuDNN, whose kernel may take less for all pairs than flex for an eighth
    assert seconds["flex", False, "causal"] == seconds["sdpa", False, "causal"]
    measured = {(name, order) for name, order, _ in seconds}
    assert in_both <= measured
    for name, order in measured - {("flex", False)}:
        # documents of an eighth of the row are an eighth of the pairs, and of more than that
        causal = seconds[name, order, "causal"]
        packed = seconds[name, order, "documents"]
        assert len(causal) == len(module.HEAD_SIZES)
        if (name, order) == ("te", True):
            assert packed == []
            continue
        assert all(short < whole for short, whole in zip(packed, causal, strict=True)), (name, order)
    assert not torch.are_deterministic_algorithms_enabled()
    assert 1e-5 < table.launch_seconds < 0.1
    assert 1e-5 < table.layer_seconds < 0.1


def test_the_stopwatch_agrees_with_a_long_plain_run():
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    watched = Stopwatch(DEVICE).seconds(lambda: torch.mm(a, b, out=out))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(60):
        torch.mm(a, b, out=out)
    end.record()
    torch.cuda.synchronize()
    # clocks move by several per cent between two runs
    assert watched == pytest.approx(start.elapsed_time(end) / 60 / 1e3, rel=0.15)


def test_what_a_slow_host_queues_takes_what_the_gpu_does():
    """Two milliseconds on the host for a product that takes a tenth of one."""
    a, b = (torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def late():
        sleep(2e-3)
        torch.mm(a, b, out=out)

    watch = Stopwatch(DEVICE)
    alone = watch.seconds(lambda: torch.mm(a, b, out=out), calls=20)
    assert watch.seconds(late, calls=20) == pytest.approx(alone, rel=0.25)
