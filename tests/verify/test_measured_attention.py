"""From `bench throughput --only attention` to what `auto` takes and says, with stand-ins on a CPU."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
# Milliseconds by implementation and kind.
TAKES = {
    "sdpa": {"causal": 2.0, "window": 3.0, "documents": 4.0},
    "cudnn": {"causal": 2.5, "window": 2.0, "documents": 1.0},
    "te": {"causal": 1.5, "window": 2.5, "documents": 2.0},
}


class Watch:
    """Does the work once, on the CPU, and tells what it is to take."""

    def __init__(self, device: torch.device):
        self.device = device

    def seconds(self, work: partial) -> float:
        kernel, _, _, options = work.args
        work()
        name = next(name for name, one in REGISTRY["attention"].items() if one is kernel)
        kind = "window" if "window" in options else "documents" if "documents" in options else "causal"
        if name == "flex":
            # through sdpa
            assert kind == "causal"
            name = "sdpa"
        return 1e-3 * TAKES[name][kind]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 with two packages, whose kernels a CPU stands in for; flex has no backward pass there."""
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
    points = {(one.implementation, one.head_size, one.kind, one.seen) for one in found.attention_rates}
    everywhere = [(kind, seen) for kind, several in SEEN.items() for seen in several]
    expected = {(name, size, *point) for name in TAKES for size in module.HEAD_SIZES for point in everywhere}
    # what hides nothing is sdpa's in flex, and runs here, too
    assert points - expected == {("flex", size, "causal", ROW) for size in module.HEAD_SIZES}
    assert expected <= points
    assert found.attention_source == "1 x stand-in"
    printed = capsys.readouterr()
    assert "heads of 64, 64 tokens, documents of 8: sdpa 4.00, cudnn 1.00, te 2.00 ms" in printed.out
    assert "no figure of flex, heads of 128, documents of 24: " in printed.err
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
    fastest = {kind: min(TAKES, key=lambda name: TAKES[name][kind]) for kind in SEEN}
    assert taken == fastest == {"causal": "te", "documents": "cudnn", "window": "cudnn"}
    # what is not installed here is not taken
    bare = HERE.model_copy(update={"versions": H200.versions})
    assert spec_of(*wide, "data.document_mask=true", target=bare).kernels.attention == "flex"


def test_when_the_seconds_are_over_the_rest_is_told(
    one_gpu: None, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sdpa begins at 0 s, cudnn at 50; te would at 100, and flex, which compiles, is the last."""
    monkeypatch.setattr(module, "perf_counter", iter(range(0, 1000, 50)).__next__)
    found = measured(table, "--seconds", "60")
    assert {one.implementation for one in found.attention_rates} == {"sdpa"}
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
