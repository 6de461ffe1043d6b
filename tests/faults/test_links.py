"""A run's folder that somebody else has filled: no link in it is followed, no device or FIFO opened, nothing hangs."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.commands import starting
from megaspec.core.errors import RecipeError
from megaspec.log.jsonl import read_metrics
from megaspec.log.sinks import open_sinks
from megaspec.log.spec import LogSpec
from megaspec.run_folder import make_folder, read_run, write_run
from megaspec.runtime.rank import read_spec
from tests.faults.runs import go, make_run, recipe
from tests.log.events_for_tests import step_done

KINDS = ("link", "dangling link", "fifo", "device")
# What a run reads and writes; environment.json, tensorboard and quarantine come with other runs than the one below.
PLACES = (
    "recipe.json",
    "target.json",
    "prediction.json",
    "spec.json",
    "environment.json",
    "metrics.jsonl",
    "exit_code.json",
    "tensorboard",
    "logs",
    "logs/rank-0.log",
    "logs/rank-1.log",
    "lock",
    "checkpoints",
    "checkpoints/quarantine",
)
FOLDERS = ("tensorboard", "logs", "lock", "checkpoints", "checkpoints/quarantine")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, factory):
    """A run of six steps with two checkpoints that has ended."""
    run = make_run(tmp_path_factory.mktemp("finished") / "run", recipe(steps=6))
    assert go(run, factory) == 0
    assert len(list((run / "checkpoints").iterdir())) == 2
    return run


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of it. No rank is started; what takes a minute hangs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    shutil.copytree(finished, "run")
    Path("home").mkdir()
    Path("home/precious").write_bytes(b"precious")

    def hangs(*_):
        raise AssertionError("it hangs")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    yield Path("run")
    signal.alarm(0)
    assert [f.name for f in Path("home").iterdir()] == ["precious"]
    assert Path("home/precious").read_bytes() == b"precious"


def replace(path: Path, kind: str, target: Path) -> None:
    """Puts something in the place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(target.resolve())
    elif kind == "dangling link":
        path.symlink_to(Path("home").resolve() / "new")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


def commands(run: Path, finished: Path) -> list[list[str]]:
    fork = ["resume", str(run), "--fork", "forked", "optim.lr=0.5"]
    return [
        ["resume", str(run)],
        fork,
        ["diff", str(run), str(finished)],
        ["diff", str(finished), str(run)],
        ["generate", str(run), "text"],
    ]


def test_a_plain_folder_meets_no_objection(run, finished, capsys):
    """What the tests below would see if they refused everything. No text comes of made-up data: 65."""
    assert [main(words) for words in commands(run, finished)] == [0, 0, 0, 0, 65]
    assert main(["train", "recipe=hello", f"run_dir={run}", "resume=auto", "data.seed=7"]) == 64
    assert "is no regular file" not in capsys.readouterr().err


def _each() -> list:
    """Each place and each kind by default, in turn."""
    found = []
    for place, name in enumerate(PLACES):
        for number, kind in enumerate(KINDS):
            marks = [pytest.mark.slow] * ((place + number) % 2)
            found.append(pytest.param(name, kind, marks=marks))
    return found


@pytest.mark.parametrize(("name", "kind"), _each())
def test_no_place_of_a_run_is_a_link(run, finished, name, kind, capsys):
    replace(run / name, kind, Path("home") if name in FOLDERS else Path("home/precious"))
    for words in commands(run, finished):
        assert main(words) == 64, words
        err = capsys.readouterr().err
        assert str(run / name) in err, words
        assert "link" in err or "is no regular file" in err or "is no folder" in err
    if name != "spec.json":
        assert main(["train", "recipe=hello", f"run_dir={run}", "resume=auto"]) == 64
        assert str(run / name) in capsys.readouterr().err
    assert not Path("forked").exists()


@pytest.mark.parametrize(
    "kind", [one if one in ("link", "fifo") else pytest.param(one, marks=pytest.mark.slow) for one in KINDS]
)
def test_no_file_of_a_checkpoint_or_lock_leads_elsewhere(run, finished, kind, capsys):
    """Each in turn: a fork takes the other checkpoint, or none; nothing of what lies behind a link gets into it."""
    steps = sorted((run / "checkpoints").iterdir())
    parts = [file.relative_to(run) for step in steps for file in (step, *sorted(step.iterdir()))]
    parts += [file.relative_to(run) for file in sorted((run / "lock").iterdir())]
    assert len(parts) > 8
    for number, part in enumerate(parts):
        shutil.rmtree("run")
        shutil.copytree(finished, "run")
        replace(run / part, kind, Path("home") if (finished / part).is_dir() else Path("home/precious"))
        code = main(["resume", "run", "--fork", f"forked-{number}", "optim.lr=0.5"])
        assert code == 0, (part, capsys.readouterr().err)
        copied = [file for file in Path(f"forked-{number}").rglob("*") if file.is_symlink() or not file.is_dir()]
        assert copied
        assert all(file.is_file() and not file.is_symlink() for file in copied)
        assert all(b"precious" not in file.read_bytes() for file in copied)
        if part.name == "manifest.json":
            assert main(["diff", str((run / part).parent), "run"]) == 66
            assert str(run / part) in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_can_not_be_taken_is_refused(run, kind, capsys):
    replace(run / "lock" / "flock", kind, Path("home/precious"))
    assert main(["resume", "run"]) == 73
    assert "run/lock/flock" in capsys.readouterr().err
    beats = [int(f.stem) for f in Path("run/lock").glob("*.released")]
    (run / "lock" / "flock").unlink()
    replace(run / "lock" / f"{max(beats) + 1:08d}.beat", kind, Path("home/precious"))
    assert main(["resume", "run"]) == 73
    assert f"{max(beats) + 1:08d}.beat" in capsys.readouterr().err


def test_a_fork_copies_what_the_manifest_lists_and_nothing_else(run):
    for step in (run / "checkpoints").iterdir():
        (step / "more").symlink_to(Path("home/precious").resolve())
        (step / "home").symlink_to(Path("home").resolve())
        os.mkfifo(step / "pipe")
        (step / "mine").write_text("x")
    assert main(["resume", "run", "--fork", "forked", "optim.lr=0.5"]) == 0
    [copied] = Path("forked/checkpoints").iterdir()
    assert {f.name: f.read_bytes() for f in copied.iterdir()} == {
        f.name: f.read_bytes()
        for f in (run / "checkpoints" / copied.name).iterdir()
        if f.name == "manifest.json" or f.name.endswith(".safetensors")
    }


def test_checkpoints_on_another_disk_have_a_way_out(run, finished, capsys):
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(finished / "checkpoints", "disk")
    (run / "checkpoints").symlink_to(Path("disk").resolve())
    assert main(["resume", "run"]) == 64
    assert "for checkpoints on another disk set run_dir there" in capsys.readouterr().err
    # the way out: the whole folder lies there, and is reached through a link that the user names
    (run / "checkpoints").unlink()
    Path("disk").rename(run / "checkpoints")
    run.rename("elsewhere")
    run.symlink_to("elsewhere")
    for words in commands(run, finished)[:-1]:
        assert main(words) == 0, words
    run.unlink()


@pytest.mark.parametrize("name", ["spec.json", "recipe.json", "target.json"])
def test_what_a_file_can_not_be_is_told(run, finished, name, capsys):
    file = run / name
    deep = "[" * 100_000 + "]" * 100_000
    not_too_deep_for_python = '{"a":' * 900 + "1" + "}" * 900
    whole = json.loads(file.read_text())
    for bad in (
        deep.encode(),
        not_too_deep_for_python.encode(),
        json.dumps(whole | {"name": 0}).replace('"name": 0', f'"name": {not_too_deep_for_python}').encode(),
        b"\xff\xfe",
        b'{"name": ' + b"9" * 10_000 + b"}",
        b"[]",
        b"",
        b" " * (17 << 20) + b"{}",
    ):
        file.write_bytes(bad)
        for words in commands(run, finished):
            if name == "target.json" and words[0] != "diff":
                continue  # it is written anew
            assert main(words) == 64, (bad[:20], words)
            assert str(file) in capsys.readouterr().err
    os.truncate(file, 8 << 30)
    assert main(["diff", str(run), str(finished)]) == 64
    assert "more than 16,777,216 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_looks_empty_is_made_a_run_without_following_links(tmp_path, finished, kind, monkeypatch):
    """What an interrupted `train` may leave, and the name that a temporary file had."""
    monkeypatch.chdir(tmp_path)
    saved = read_run(finished)
    Path("home").mkdir()
    Path("home/precious").write_bytes(b"precious")
    for name in ("recipe.json", "target.json", "prediction.json", "lock"):
        Path("new").mkdir()
        replace(Path("new", name), kind, Path("home") if name == "lock" else Path("home/precious"))
        with pytest.raises(RecipeError, match=f"new/{name}"):
            make_folder(Path("new"))
        shutil.rmtree("new")
    Path("new").mkdir()
    for name in ("recipe.json", "target.json", "prediction.json", "spec.json"):
        replace(Path("new", f".{name}.{os.getpid()}.tmp"), kind, Path("home/precious"))
        replace(Path("new", name), kind, Path("home/precious"))
    write_run(Path("new"), recipe(), saved_target(finished), saved.spec)
    assert all(Path("new", n).is_file() and not Path("new", n).is_symlink() for n in ("recipe.json", "spec.json"))
    assert [f.name for f in Path("home").iterdir()] == ["precious"]
    assert Path("home/precious").read_bytes() == b"precious"


def saved_target(run: Path):
    from megaspec.run_folder import read_target

    return read_target(run)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_look_again(run, kind, capsys):
    """What has become a link since the launcher looked."""
    replace(run / "metrics.jsonl", kind, Path("home/precious"))
    replace(run / "spec.json", kind, Path("home/precious"))
    with open_sinks(LogSpec(console="quiet", tensorboard=False), run, step=0) as emit:
        emit(step_done(1))
    assert "run/metrics.jsonl" in capsys.readouterr().err
    with pytest.raises(RecipeError, match=r"run/spec\.json can't be read: is "):
        read_spec(run)


def test_a_history_of_lines_without_end_is_cut(run):
    """A line as long as a hole of 4 GiB, and one that is nested without end, behind the steps that are kept."""
    path = run / "metrics.jsonl"
    kept = [line for line in read_metrics(path) if line["step"] <= 3]
    for tail in ("[" * 100_000 + "]" * 100_000 + "\n", '{"step":' * 900 + "1" + "}" * 900 + "\n", None):
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        if tail is None:
            os.truncate(path, 4 << 30)
        else:
            with path.open("a") as file:
                file.write(tail)
        with open_sinks(LogSpec(console="quiet", tensorboard=False), run, step=3) as emit:
            emit(step_done(4))
        assert read_metrics(path)[:-1] == kept
