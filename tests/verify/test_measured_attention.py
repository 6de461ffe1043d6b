"""From `bench throughput --only attention` to what `auto` takes and says, with stand-ins on a CPU."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from megaspec.cli import main
from megaspec.commands import bench_throughput as bench
from megaspec.estimate import attention_choice
from megaspec.estimate import throughput as throughput_module
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.throughput import ThroughputTable, read_throughput
from megaspec.verify import measured_throughput as module
from megaspec_kernels.registry import REGISTRY
from tests.kernels import cudnn_frontend
from tests.kernels.te import fake_transformer_engine
from tests.resolve.test_fill import H200, spec_of

SHIPPED = Path(throughput_module.__file__).parent / "measured" / "h200.json"
PACKAGES = {"nvidia-cudnn-frontend": "1.18.0", "transformer-engine": "2.20.2"}
HERE = H200.model_copy(update={"gpus": 1, "versions": H200.versions | PACKAGES})
ROW = 64
SEEN = {"causal": (ROW,), "window": (8, 16), "documents": (8, 24)}
# Milliseconds by implementation and kind: in any order of sums, and in one.
TAKES = {
    "sdpa": {"causal": 2.0, "window": 3.0, "documents": 4.0},
    "cudnn": {"window": 2.0, "documents": 1.0},
    "te": {"causal": 1.5, "window": 2.5, "documents": 2.0},
}
IN_ONE_ORDER = {
    "sdpa": {"causal": 5.0, "window": 3.5, "documents": 4.5},
    "te": {"causal": 6.0, "window": 2.7},
}


class Watch:
    """Does the work once, on the CPU, and tells what it is to take."""

    def __init__(self, device: torch.device):
        self.device = device

    def seconds(self, work: partial) -> float:
        kernel, inputs, grad, options = work.args
        name = next(name for name, one in REGISTRY["attention"].items() if one is kernel)
        kind = "window" if "window" in options else "documents" if "documents" in options else "causal"
        modes = []

        def attend(*given: torch.Tensor, **how: object) -> torch.Tensor:
            filled = torch.utils.deterministic.fill_uninitialized_memory
            modes.append((torch.are_deterministic_algorithms_enabled(), filled))
            return kernel.attend(*given, **how)

        try:
            work.func(replace(kernel, attend=attend), inputs, grad, options, **work.keywords)
        finally:
            # as training has it, and behind it as before
            assert modes == [(work.keywords["deterministic"], False)]
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.utils.deterministic.fill_uninitialized_memory
        takes = IN_ONE_ORDER if work.keywords["deterministic"] else TAKES
        return 1e-3 * takes[name][kind]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 with two packages, whose kernels a CPU stands in for; flex has no backward pass there, and none of what
    is measured of sdpa is measured of it again."""
    cudnn_frontend.put_in_place(monkeypatch)
    fake_transformer_engine(monkeypatch)
    monkeypatch.setattr(bench, "detect_target", lambda: HERE)

    @contextmanager
    def world(place: object) -> Iterator[torch.device]:
        yield torch.device("cpu")

    monkeypatch.setattr(bench, "_world", world)
    monkeypatch.setattr(module, "Stopwatch", Watch)
    monkeypatch.setattr(module, "source_of", lambda device, world: "1 x stand-in")
    monkeypatch.setattr(module, "RATE_TOKENS", ROW)
    monkeypatch.setattr(module, "SEEN", SEEN)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    shutil.copy(SHIPPED, tmp_path / "h200.json")
    return tmp_path / "h200.json"


def measured(table: Path, *more: str) -> ThroughputTable:
    assert main(["bench", "throughput", "--only", "attention", "--out", str(table), *more]) == 0
    return read_throughput(table).table


def test_every_implementation_that_runs_is_measured_at_every_point(
    one_gpu: None, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(table)
    expected = set()
    for deterministic, takes in ((False, TAKES), (True, IN_ONE_ORDER)):
        for name, size, kind in product(takes, module.HEAD_SIZES, SEEN):
            if kind in takes[name]:
                expected |= {(name, size, kind, seen, deterministic, takes[name][kind]) for seen in SEEN[kind]}
    # what hides nothing is sdpa's in any order
    for name, size in product(("flex", "cudnn"), module.HEAD_SIZES):
        expected.add((name, size, "causal", ROW, False, TAKES["sdpa"]["causal"]))
    points = [
        (one.implementation, one.head_size, one.kind, one.seen, one.deterministic, round(1e3 * one.seconds, 6))
        for one in found.attention_rates
    ]
    assert len(points) == len(expected)
    assert set(points) == expected
    assert found.attention_source == "1 x stand-in"
    printed = capsys.readouterr()
    before_use = "a layer's attention, forward and backward, heads of 64, 64 tokens, "
    for told in (
        "causal: sdpa 2.00, cudnn 2.00, te 1.50, flex 2.00 ms",
        "causal, sums in one order: sdpa 5.00, te 6.00 ms",
        "documents of 8: sdpa 4.00, cudnn 1.00, te 2.00 ms",
        "documents of 8, sums in one order: sdpa 4.50 ms",
    ):
        assert f"{before_use}{told}\n" in printed.out
    assert "no figure of flex, heads of 128, documents of 24: " in printed.err
    assert "no figure of flex, heads of 64, causal of 64, in one order: " in printed.err
    # all else stays
    before = read_throughput(SHIPPED).table
    kept = {"attention_rates": before.attention_rates, "attention_source": before.attention_source}
    assert found.model_copy(update=kept) == before


def test_auto_takes_what_was_measured_and_says_so(one_gpu: None, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(table)
    monkeypatch.setattr(attention_choice, "throughput_of", lambda hardware: read_throughput(table, hardware))
    wide = ("model.d_head=128", "precision.kind=bf16")
    window = "model.attention.mask={kind: window, size: 8}"
    taken = {}
    for kind, words in {"causal": (), "documents": ("data.document_mask=true",), "window": (window,)}.items():
        spec = spec_of(*wide, *words, target=HERE)
        taken[kind] = spec.kernels.attention
        reason = next(one.reason for one in spec.decisions if one.key == "kernels.attention")
        assert "the fastest that was measured on NVIDIA H200 for heads of 128" in reason
    assert taken == {"causal": "te", "documents": "cudnn", "window": "cudnn"}
    # what is not installed here is not taken
    bare = HERE.model_copy(update={"versions": H200.versions})
    assert spec_of(*wide, "data.document_mask=true", target=bare).kernels.attention == "flex"


def test_auto_takes_what_is_the_fastest_in_the_order_that_is_asked_for(
    one_gpu: None, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """te in any order, sdpa in one; of documents nothing else was measured in one."""
    measured(table)
    monkeypatch.setattr(attention_choice, "throughput_of", lambda hardware: read_throughput(table, hardware))
    exact = ("model.d_head=128", "precision.kind=bf16", "train.deterministic=true")
    spec = spec_of(*exact, target=HERE)
    assert spec.kernels.attention == "sdpa"
    reason = next(one.reason for one in spec.decisions if one.key == "kernels.attention")
    assert "measured on NVIDIA H200 for heads of 128 with sums in one order" in reason
    assert "left out" not in reason
    assert spec_of(*exact, "data.document_mask=true", target=HERE).kernels.attention == "flex"


@pytest.mark.parametrize("mode", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_order_is_as_before_whatever_happens(mode: tuple[bool, bool], deterministic: bool) -> None:
    asked, only_warns = mode

    def fails(*given: torch.Tensor) -> torch.Tensor:
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        raise RuntimeError("no such heads")

    kernel = replace(REGISTRY["attention"]["sdpa"], attend=fails)
    torch.use_deterministic_algorithms(asked, warn_only=only_warns)
    try:
        with pytest.raises(RuntimeError, match="no such heads"):
            module._attend(kernel, [], torch.zeros(1), {}, deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() == asked
        assert torch.is_deterministic_algorithms_warn_only_enabled() == only_warns
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_when_the_seconds_are_over_the_rest_is_told(
    one_gpu: None, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sdpa begins at 0 s, cudnn at 50; te would at 100, and flex, which compiles, is the last."""
    monkeypatch.setattr(module, "perf_counter", iter(range(0, 1000, 50)).__next__)
    found = measured(table, "--seconds", "60")
    assert {one.implementation for one in found.attention_rates} == {"sdpa"}
    assert {one.deterministic for one in found.attention_rates} == {False, True}
    told = capsys.readouterr().err
    for name in ("cudnn", "te", "flex"):
        assert f"no attention through {name}: 60 s are over" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--only", "attention"), "--only attention needs --out FILE"),
        (("--only", "attention", "--out", "{folder}/none.json"), "none.json is no file"),
        (("--only", "attention", "--out", "{table}", "--seconds", "0"), "--seconds 0 must be above 0; try 60"),
        (("--seconds", "60"), "--seconds 60 goes with --only attention"),
    ],
)
def test_what_can_not_be_measured_alone(
    one_gpu: None, table: Path, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = table.read_text()
    words = tuple(word.format(folder=table.parent, table=table) for word in words)
    assert main(["bench", "throughput", *words]) == 64
    assert told in capsys.readouterr().err
    assert table.read_text() == before


def test_a_table_of_another_gpu_is_left_alone(
    one_gpu: None, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "detect_target", lambda: HERE.model_copy(update={"gpu": HARDWARE["H100"].name}))
    monkeypatch.setattr(bench, "hardware_of", lambda target: HARDWARE["H100"])
    assert main(["bench", "throughput", "--only", "attention", "--out", str(table)]) == 64
    assert "is of hardware=H200, this GPU is H100" in capsys.readouterr().err
