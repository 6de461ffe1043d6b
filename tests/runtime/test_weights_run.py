"""`megaspec checkpoint save` and `average`: runs of weights alone out of runs, whatever layouts saved them."""

import errno
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaspec import cli
from megaspec.checkpoint import publish, streamed
from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.contents import open_checkpoint
from megaspec.checkpoint.store import SavedPiece, Store
from megaspec.core import faults
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.belonging import is_imported
from megaspec.run_folder import make_folder, read_run, write_run
from tests.checkpoint.checkpoint_cases import FORKS
from tests.hf.folders import assert_same_tensors, save_tokenizer
from tests.runtime import lives
from tests.runtime.specs import TARGET, make_run, recipe

FP32 = {"precision.kind": "fp32", "data.vocab_size": 101, "model.vocab_size": 101}
STEPS = {"train.steps": 4, "optim.schedule.warmup_steps": 1, "checkpoint": {"every": 1, "keep": 9}}
RUNS = {
    "tp2": {"parallelism.tp": 2, "model.vocab_pad_to": 16},
    "dp2": {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "zero1", "train.seed": 7},
}


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> dict[str, Path]:
    """Runs of one model, saved after each of four steps by other layouts; each keeps a tokenizer."""
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for name, layout in RUNS.items():
        run = make_run(root / name, FP32 | STEPS | layout)
        spec = read_run(run).spec
        pool.run(lives.live, spec.model_dump_json(), str(run), ranks=spec.world_size)
        (run / "tokenizer").mkdir()
        save_tokenizer(run / "tokenizer")
        found[name] = run
    return found


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(streamed, "PIECE_BYTES", 1000)
    monkeypatch.setattr(streamed, "SLAB_BYTES", 300)


def checkpoint(*words: str | Path | int) -> int:
    return cli.main(["checkpoint", *map(str, words)])


def weights_of(run: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    with open_checkpoint(run, step) as reader:
        return {name: reader.read(name) for name in reader.names() if name.startswith(("model/", "router/"))}


def changed(run: Path, out: Path, change: Any) -> Path:
    """A copy of a run whose last checkpoint holds other tensors."""
    shutil.copytree(run, out)
    step = 4
    with open_checkpoint(out, step) as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
        spec, state = reader.spec, reader.state
    change(tensors)
    pieces = [SavedPiece(name, tuple(value.shape), (0,) * value.dim(), value) for name, value in tensors.items()]
    Store(out).save(step, pieces, spec=spec, state=state, comm=SoloComm())
    return out


@pytest.mark.parametrize("name", RUNS)
def test_the_weights_of_a_step_to_the_bit_and_nothing_else(name, runs, tmp_path, capsys) -> None:
    out = tmp_path / "new"
    assert checkpoint("save", runs[name], "--out", out, "--step", 2) == 0
    told = capsys.readouterr().out
    expected = weights_of(runs[name], 2)
    assert f"step 2 of {runs[name]}, {len(expected)} weights in float32" in told
    with open_checkpoint(out) as reader:
        assert reader.names() == sorted(expected)
        assert reader.state == {"holds": "weights"}
        digest = reader.manifest.digest
    found = weights_of(out)
    for stored, value in expected.items():
        assert torch.equal(value.view(torch.int32), found[stored].view(torch.int32)), stored
    assert (out / "tokenizer/tokenizer.json").read_bytes() == (runs[name] / "tokenizer/tokenizer.json").read_bytes()
    spec = read_run(out).spec
    (taken,) = spec.taken_from
    with open_checkpoint(runs[name], 2) as reader:
        assert (taken.path, taken.step, taken.digest) == (str(runs[name]), 2, reader.manifest.digest)
    assert spec.model == read_run(runs[name]).spec.model
    assert not taken.imported
    # and once more from there
    assert checkpoint("save", out, "--out", tmp_path / "again") == 0
    assert read_run(tmp_path / "again").spec.taken_from[0].digest == digest
    assert not is_imported(read_run(tmp_path / "again").spec)


def test_what_takes_a_run_takes_it(runs, tmp_path, capsys, pool) -> None:
    run, out = runs["tp2"], tmp_path / "new"
    assert checkpoint("save", run, "--out", out) == 0
    for words in (("list",), ("verify",), ("inspect",)):
        assert checkpoint(*words, out) == 0
    with open_checkpoint(run) as reader:
        expected = f"weights of step 4 of {run} ({reader.manifest.digest[:12]})"
    assert expected in " ".join(capsys.readouterr().out.split())
    assert checkpoint("diff", run, out) == 0
    n_weights = len(weights_of(out))
    assert f"{n_weights} of {n_weights} tensors are equal" in capsys.readouterr().out
    for source, folder in ((run, "a"), (out, "b")):
        assert cli.main(["hf", "export", str(source), str(tmp_path / folder)]) == 0
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    assert cli.main(["hf", "verify", str(out), str(tmp_path / "a")]) == 0
    capsys.readouterr()
    texts = []
    for source in (run, out):
        words = ["generate", str(source), "abc", "--tokens", "8", "--temperature", "0", "--json"]
        assert cli.main(words) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1]
    for words in (["resume", str(out)], ["resume", str(out), "--fork", str(tmp_path / "fork"), "train.steps=9"]):
        assert cli.main(words) == 64
        assert f"init.load={out}" in capsys.readouterr().err
    assert not (tmp_path / "fork").exists()
    spec = read_run(make_run_from(tmp_path / "next", out)).spec
    found = pool.run(lives.starting_weights, spec.model_dump_json(), ranks=spec.world_size)[0]
    for name, value in found.items():
        assert np.array_equal(value, weights_of(run)[f"model/{name}"].numpy()), name


def make_run_from(folder: Path, source: Path) -> Path:
    """A run that begins with the weights of another."""
    made = recipe(FP32 | RUNS["dp2"] | {"init.load": str(source)})
    make_folder(folder)
    write_run(folder, made, TARGET, resolve(made, TARGET, replace(gather_facts(made), run_dir=str(folder))))
    return folder


@pytest.mark.usefixtures("warm_launches")
def test_the_losses_are_those_of_the_run(runs, tmp_path, capfd) -> None:
    losses = []
    assert checkpoint("save", runs["dp2"], "--out", tmp_path / "new") == 0
    capfd.readouterr()
    for source in (runs["dp2"], tmp_path / "new"):
        assert (
            cli.main(["eval", str(source), "--json", "parallelism.dp_shard=1", "parallelism.dp_strategy=replicate"])
            == 0
        )
        losses.append(json.loads(capfd.readouterr().out)["sets"])
    assert losses[0] == losses[1]


def test_rounded(runs, tmp_path, capsys) -> None:
    assert checkpoint("save", runs["tp2"], "--out", tmp_path / "new", "--dtype", "bf16") == 0
    expected = weights_of(runs["tp2"])
    for name, value in weights_of(tmp_path / "new").items():
        assert torch.equal(value, expected[name].bfloat16()), name

    def too_large(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model/norm.weight"][3] = 1e5

    run = changed(runs["tp2"], tmp_path / "large", too_large)
    assert checkpoint("save", run, "--out", tmp_path / "half", "--dtype", "fp16") == 66
    assert "model/norm.weight holds numbers that float16 has no room for; take --dtype bf16" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()


def truth(parts: list[dict[str, torch.Tensor]], shares: list[float]) -> dict[str, np.ndarray]:
    """The mean in numpy's fp64."""
    found = {}
    for name in parts[0]:
        terms = [share * part[name].numpy().astype(np.float64) for part, share in zip(parts, shares, strict=True)]
        found[name] = np.sum(terms, axis=0)
    return found


def assert_mean(run: Path, expected: dict[str, np.ndarray], eps: float) -> None:
    """Rounded once: within half a unit in the last place of the exact mean, but for what fp64 itself rounds."""
    found = weights_of(run)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        apart = np.abs(value.double().numpy() - expected[name])
        bound = np.abs(expected[name]) * (eps / 2 + 1e-15) + 1e-17
        assert (apart <= bound).all(), (name, apart.max())


def test_steps_of_a_run(runs, tmp_path, capsys) -> None:
    out = tmp_path / "mean"
    shares = ("--weights", "0.5,0.25,0.25")
    assert checkpoint("average", runs["tp2"], "--out", out, "--steps", "1,3,4", *shares) == 0
    assert f"0.25 of step 3 of {runs['tp2']}" in capsys.readouterr().out
    parts = [weights_of(runs["tp2"], step) for step in (1, 3, 4)]
    expected = truth(parts, [0.5, 0.25, 0.25])
    assert_mean(out, expected, 2.0**-23)
    assert any((expected[name] != parts[0][name].double().numpy()).any() for name in expected)
    taken = read_run(out).spec.taken_from
    assert [(one.step, one.weight) for one in taken] == [(1, 0.5), (3, 0.25), (4, 0.25)]
    for words in (("inspect", out), ("verify", out), ("diff", out, runs["tp2"])):
        assert checkpoint(*words) == 0
    assert cli.main(["hf", "export", str(out), str(tmp_path / "theirs")]) == 0
    assert cli.main(["resume", str(out)]) == 64
    # a mean may be taken into another, and go beyond what it is of
    assert checkpoint("average", out, runs["tp2"], "--out", tmp_path / "more", "--weights=-0.5,1.5") == 0
    assert_mean(tmp_path / "more", truth([weights_of(out), parts[2]], [-0.5, 1.5]), 2.0**-23)


def test_runs_of_other_layouts(runs, tmp_path) -> None:
    out = tmp_path / "mean"
    assert checkpoint("average", *runs.values(), "--out", out, "--last", "2", "--dtype", "bf16") == 0
    parts = [weights_of(run, step) for run in runs.values() for step in (3, 4)]
    assert_mean(out, truth(parts, [0.25] * 4), 2.0**-7)
    assert {value.dtype for value in weights_of(out).values()} == {torch.bfloat16}
    # the newest of each
    assert checkpoint("average", *runs.values(), "--out", tmp_path / "newest") == 0
    assert_mean(tmp_path / "newest", truth([parts[1], parts[3]], [0.5, 0.5]), 2.0**-23)


def test_what_routers_keep_is_averaged_in_its_own_format(tmp_path) -> None:
    readers = []
    for number, value in enumerate((0.1, 0.2, -0.0)):
        folder = tmp_path / str(number)
        pieces = []
        for name, dtype in (("router/bias", torch.float32), ("model/w", torch.bfloat16), ("optim/m/w", torch.float32)):
            pieces.append(SavedPiece(name, (3, 2), (0, 0), torch.full((3, 2), value, dtype=dtype)))
        readers.append(open_checkpoint(Store(folder).save(1, pieces, spec={}, state={}, comm=SoloComm())))
    mean = streamed.MeanWeights(readers[:2], (0.5, 0.5), torch.float16)
    assert mean.names() == ["model/w", "router/bias"]
    assert "optim/m/w" not in mean
    assert (mean.dtype("router/bias"), mean.dtype("model/w")) == (torch.float32, torch.float16)
    terms = torch.tensor([0.1, 0.2]).double()
    assert torch.equal(mean.read("router/bias"), torch.full((3, 2), terms.mean().item()))
    terms = torch.tensor([0.1, 0.2]).bfloat16().double()
    assert torch.equal(mean.read("model/w", (1, 1), (2, 1)), torch.full((2, 1), terms.mean().item()).half())
    # 0 with its sign
    assert torch.signbit(streamed.MeanWeights(readers[2:], (1.0,)).read("model/w")).all()
    for reader in readers:
        reader.close()


def test_what_differs_is_told_at_once_and_nothing_is_written(runs, tmp_path, capsys) -> None:
    others = {
        "wide": {"model.d_ffn": 64, "model.norm": {"kind": "layer"}},
        "words": {"data.vocab_size": 130, "model.vocab_size": 130},
    }
    made = [runs["tp2"]]
    for name, changes in others.items():
        run = make_run(tmp_path / name, FP32 | {"train.steps": 1, "optim.schedule.warmup_steps": 0} | changes)
        lives.live(0, read_run(run).spec.model_dump_json(), str(run))
        made.append(run)
    (made[1] / "tokenizer").mkdir()
    save_tokenizer(made[1] / "tokenizer")
    path = made[1] / "tokenizer/tokenizer.json"
    path.write_text(path.read_text() + "\n")
    capsys.readouterr()
    assert checkpoint("average", *made, "--out", tmp_path / "mean") == 64
    told = capsys.readouterr().err
    for expected in (
        f"{made[1]}: model.d_ffn=64, in {made[0]} 48",
        "model/layers.0.mlp.w_down.weight has shape [32, 64]",
        f"{made[1]}: its tokenizer is sha256",
        f"{made[2]}: model.vocab_size=130, in {made[0]} 101",
        "model/embed.weight has shape [130, 32]",
    ):
        assert expected in " ".join(told.split()), expected
    assert not list(tmp_path.glob(".mean*"))
    assert not (tmp_path / "mean").exists()


MISTAKES = {
    "one": ((), 64, "one checkpoint has no mean"),
    "shares": (("--last", "2", "--weights", "0.5,0.6"), 64, "must be 1 together, they are 1.1"),
    "number of shares": (("--last", "2", "--weights", "1"), 64, "has 1 shares for 2 checkpoints"),
    "no number": (("--last", "2", "--weights", "nan,1"), 64, "must be finite"),
    "no words": (("--last", "2", "--weights", "a,b"), 64, "must be numbers"),
    "no steps": (("--steps", "1,x"), 64, "must be whole numbers"),
    "twice": (("--steps", "1,1"), 64, "names a step twice"),
    "not there": (("--steps", "1,9"), 66, "step 9: "),
    "too many": (("--last", "5"), 66, "has checkpoints of 1, 2, 3, 4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, runs, tmp_path, capsys) -> None:
    words, code, told = MISTAKES[name]
    assert checkpoint("average", runs["tp2"], "--out", tmp_path / "new", *words) == code
    assert told in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_the_same_checkpoint_twice(runs, tmp_path, capsys) -> None:
    assert checkpoint("average", runs["tp2"], runs["tp2"], "--out", tmp_path / "new") == 64
    assert f"step 4 of {runs['tp2']} is named more than once" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["save", "average"])
def test_what_is_no_number_is_refused(command, runs, tmp_path, capsys) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model/layers.1.attn.wo.weight"][5, 2] = float("nan")

    run = changed(runs["tp2"], tmp_path / "spoiled", spoil)
    words = ("--steps", "3,4") if command == "average" else ()
    assert checkpoint(command, run, "--out", tmp_path / "new", *words) == 66
    assert "model/layers.1.attn.wo.weight holds NaN or infinities" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["spoiled"]


@pytest.mark.parametrize("command", ["save", "average"])
def test_a_full_disk_and_a_target_that_is_there(command, runs, tmp_path, capsys, monkeypatch) -> None:
    words = ("--last", "2") if command == "average" else ()
    (tmp_path / "there").mkdir()
    assert checkpoint(command, runs["tp2"], "--out", tmp_path / "there", *words) == 73
    assert "exists; name one that does not" in capsys.readouterr().err

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(publish, "write_file", full)
        assert checkpoint(command, runs["tp2"], "--out", tmp_path / "new", *words) == 73
    with monkeypatch.context() as patched:
        patched.setattr("megaspec.weights_run.free_bytes", lambda _: 10)
        assert checkpoint(command, runs["tp2"], "--out", tmp_path / "new", *words) == 73
    assert "10 bytes are free; make room there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_damage_is_named(runs, tmp_path, capsys) -> None:
    run = shutil.copytree(runs["tp2"], tmp_path / "run")
    file = run / "checkpoints/step-00000003/rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert checkpoint("average", run, "--out", tmp_path / "new", "--last", "2") == 66
    assert "step-00000003/rank-00001.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


LAST = FP32 | {"train.steps": 6, "optim.schedule.warmup_steps": 1, "model.dropout": 0.1}


@pytest.mark.parametrize("layout", RUNS)
def test_the_last_checkpoint_may_hold_weights_alone(layout, tmp_path, pool, capsys) -> None:
    folders = []
    for name, last in (("whole", "training"), ("alone", "weights")):
        run = make_run(tmp_path / name, LAST | RUNS[layout] | {"checkpoint": {"every": 4, "keep": 2, "last": last}})
        spec = read_run(run).spec
        # stopped after each step, so that it goes on from what it saves
        pool.run(lives.lives, spec.model_dump_json(), str(run), stops=6, ranks=spec.world_size)
        folders.append(run)
    whole, alone = folders
    expected = weights_of(whole, 6)
    with open_checkpoint(alone) as reader:
        assert reader.names() == sorted(expected)
        assert (reader.step, reader.state["holds"], reader.state["step"]) == (6, "weights", 6)
    for name, value in weights_of(alone).items():
        assert torch.equal(value, expected[name]), name
    with open_checkpoint(alone, 5) as reader:
        assert any(name.startswith("optim/") for name in reader.names())
    assert checkpoint("verify", alone) == 0
    capsys.readouterr()
    # it is loaded where no step is left, and only there
    spec = read_run(alone).spec
    assert pool.run(lives.live, spec.model_dump_json(), str(alone), ranks=spec.world_size)[0] == []
    for words in (["train.steps=9"], ["train.steps=9", "--fork", str(tmp_path / "fork")]):
        assert cli.main(["resume", str(alone), *words]) == 64
        told = " ".join(capsys.readouterr().err.split())
        assert "step 6 of" in told
        assert f"init.load={alone}" in told
    assert not (tmp_path / "fork").exists()
    assert cli.main(["hf", "export", str(alone), str(tmp_path / "theirs")]) == 0
    assert checkpoint("save", alone, "--out", tmp_path / "new") == 0
    assert checkpoint("average", alone, "--out", tmp_path / "mean", "--steps", "5,6") == 0
    longer = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": 9})})
    with pytest.raises(Exception, match="holds weights alone"):
        pool.run(lives.live, longer.model_dump_json(), str(alone), ranks=spec.world_size)


def killed_at(point: str, run: str, out: str) -> None:
    """Dies at `point` while it averages."""
    faults.arm(point)
    checkpoint("average", run, "--out", out, "--last", 2)


@pytest.mark.parametrize("point", ["before_chunk_write", "after_manifest", "after_publish"])
def test_killed_in_the_middle_there_is_no_such_run(point, runs, tmp_path) -> None:
    out = tmp_path / "new"
    process = FORKS.Process(target=killed_at, args=(point, str(runs["tp2"]), str(out)))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    # and nothing is in the way of another attempt
    assert checkpoint("average", runs["tp2"], "--out", out, "--last", 2) == 0
    assert checkpoint("verify", out) == 0
