"""`megaspec bench kernel` on a machine without GPU: what passes gets a figure, what does not gets none."""

import json
from dataclasses import replace

import pytest
import torch

from megaspec.cli import main
from megaspec.commands import bench_kernel
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.throughput import throughput_of
from megaspec_kernels import bench
from megaspec_kernels.bench import Row, measure
from megaspec_kernels.benches import BENCHES
from megaspec_kernels.catalog import CATALOG
from megaspec_kernels.registry import REGISTRY

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "WARM_UP", 1)
    monkeypatch.setattr(bench, "SECONDS", 0.0)


def test_every_operation_has_a_bench():
    assert list(BENCHES) == list(CATALOG)


@pytest.mark.parametrize("operation", CATALOG)
def test_every_implementation_is_held_and_timed_or_says_what_it_needs(operation):
    rows = list(measure(operation, BENCHES[operation], device=CPU, sm=0))
    assert {row.implementation for row in rows} == set(CATALOG[operation].implementations)
    for row in rows:
        if row.seconds is None:
            assert row.why == "needs cuda, the target is cpu"
        else:
            assert 0 <= row.error <= 1
            assert row.seconds > 0
            assert row.amount > 0
    assert any(row.implementation == "reference" and row.seconds for row in rows)


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [("cross_entropy", "chunked"), ("grouped", "torch"), ("unpermute", "triton")],
)
def test_an_implementation_that_is_off_gets_no_figure(operation, implementation, monkeypatch, capsys):
    kernel = REGISTRY[operation]["reference"]
    right = kernel.product if operation == "grouped" else kernel

    def off(*args, **how):
        return right(*args, **how) * 1.001

    wrong = replace(kernel, product=off) if operation == "grouped" else off
    monkeypatch.setitem(REGISTRY[operation], implementation, wrong)
    here = (implementation, "reference")
    monkeypatch.setattr(bench, "unmet", lambda _, name, **__: None if name in here else "not asked for")
    assert main(["bench", "kernel", operation, "--json"]) == 70
    out, err = capsys.readouterr()
    rows = {row["implementation"]: row for row in map(json.loads, out.splitlines())}
    assert rows[implementation]["error"] > 1
    assert rows[implementation]["seconds"] is None
    assert rows["reference"]["seconds"] > 0
    assert f"the gate does not pass: {operation}={implementation} (" in err


def test_what_is_no_number_does_not_pass(monkeypatch):
    right = REGISTRY["unpermute"]["reference"]
    monkeypatch.setitem(REGISTRY["unpermute"], "triton", lambda *args: right(*args) * float("nan"))
    monkeypatch.setattr(bench, "unmet", lambda *_, **__: None)
    row = next(iter(measure("unpermute", BENCHES["unpermute"], device=CPU, sm=0)))
    assert row.is_red
    assert row.seconds is None


def test_an_operation_that_is_none(capsys):
    assert main(["bench", "kernel", "unpermut"]) == 64
    assert "bench kernel unpermut: no such operation; did you mean unpermute?" in capsys.readouterr().err
    assert main(["bench", "kernel", "x"]) == 64
    assert "there are attention, " in capsys.readouterr().err


def test_a_copy_moves_what_is_asked_for():
    """And is timed beside casts."""
    call = bench.copy_of(1 << 20, CPU)
    copied = call()
    assert copied.numel() * copied.itemsize == 1 << 19
    rows = list(measure("fp8_cast", BENCHES["fp8_cast"], device=CPU, sm=0, only=("reference",)))
    in_one_pass = (
        "known scale",
        "columns of fp8",
        "cast of groups",
        "the same, gathered",
        "elements of 32 matrices",
        "of all rows and columns",
        "of rows and of columns",
        "1x128 and 128x1",
    )
    expected = [any(words in row.name for words in in_one_pass) for row in rows]
    assert [row.copy_seconds is not None for row in rows] == expected


def test_what_is_reached_is_compared_with_what_the_machine_was_measured_to_reach():
    throughput = throughput_of(HARDWARE["H200"])
    moved = 2.0**30
    row = Row("unpermute", "triton", "a shape", 0.5, 2 * throughput.memory_seconds(moved), moved, "bytes")
    assert bench_kernel.share_of(row, throughput) == pytest.approx(0.5)
    assert bench_kernel.share_of(row, None) is None
    assert bench_kernel.as_text(row, throughput).endswith("  50 %")
    beside_a_copy = replace(row, copy_seconds=0.75 * row.seconds)
    assert bench_kernel.as_text(beside_a_copy, throughput).endswith("  50 %   75 % of a copy")
    seconds = throughput.matmul_seconds(8192, 8192, 4096, precision="bf16", kind="forward")
    product = Row("grouped", "torch", "a shape", 0.5, seconds, 2.0 * 8192 * 8192 * 4096, "flops")
    assert bench_kernel.share_of(product, throughput) == pytest.approx(1)


def test_one_implementation_alone(capsys):
    assert main(["bench", "kernel", "unpermute=reference", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(one["operation"], one["implementation"]) for one in lines} == {("unpermute", "reference")}
    assert main(["bench", "kernel", "attention=cuddn"]) != 0
    assert "bench kernel attention=cuddn: no such implementation; did you mean cudnn?" in capsys.readouterr().err
    # an empty name is none of them, and not all
    assert main(["bench", "kernel", "unpermute="]) == 64
    assert "bench kernel unpermute=: no such implementation; there are triton, reference" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_what_is_asked_for_by_name_and_cannot_run_is_no_success(capsys, flags):
    words = ["unpermute=triton", "unpermute=reference"]
    assert main(["bench", "kernel", *words, *flags]) == 64
    out, err = capsys.readouterr()
    assert "megaspec: can't run here: unpermute=triton needs cuda, the target is cpu" in err
    # the others are measured all the same
    if flags:
        rows = {row["implementation"]: row for row in map(json.loads, out.splitlines())}
        assert rows["reference"]["seconds"] > 0
        assert rows["triton"]["why"] == "needs cuda, the target is cpu"
    else:
        assert "can't run here: needs cuda, the target is cpu" in out
        assert "of the gate" in out


def test_what_is_merely_listed_says_what_it_needs(capsys):
    assert main(["bench", "kernel", "unpermute"]) == 0
    out, err = capsys.readouterr()
    assert "can't run here: needs cuda, the target is cpu" in out
    assert err == ""


def test_the_longest_name_stands_apart_from_what_is_said_of_it(capsys):
    assert main(["bench", "kernel", "attention=flash_attn_2"]) == 64
    assert "flash_attn_2 can't run here" in capsys.readouterr().out
