"""A sweep's folder is data: nothing that stands in one runs, and no word of it reaches Hydra unchecked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.sweep.state import SweepFolder
from tests.sweep.conftest import states, sweep

pytestmark = pytest.mark.usefixtures("stubbed")

# os.system would do where Hydra doesn't know it; it has a list of names that it refuses, and no list is complete
TOUCH = "{_target_: pathlib.Path.touch, self: victim}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where sweeps are kept that several tests begin with."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def unfinished(made: Path) -> Callable[..., Path]:
    """Makes the folder of a sweep of two points, neither of which was run. -> its sweep.json."""

    def make(launcher: str = "basic", *words: str) -> Path:
        kept = made / "-".join((launcher, *words))
        if not kept.exists():
            assert sweep("data.seed=1,2", f"hydra/launcher={launcher}", *words) == 0
            shutil.copytree("sweeps", kept)
        shutil.rmtree("sweeps", ignore_errors=True)
        shutil.copytree(kept, "sweeps")
        return left_over()

    return make


def left_over() -> Path:
    lines = Path("sweeps/s/points.jsonl").read_text().splitlines(keepends=True)
    Path("sweeps/s/points.jsonl").write_text("".join(lines[:2]))
    assert states() == ["waiting", "waiting"]
    return Path("sweeps/s/sweep.json")


def change(file: Path, **fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "interrupted"} | fields))


@pytest.mark.parametrize(
    "word",
    [
        f"+hydra.callbacks.x={TOUCH}",
        f"++hydra.callbacks.x={TOUCH}",
        f"hydra.launcher={TOUCH}",
        f"+hydra.launcher.x={TOUCH}",
        f"hydra.launcher.n_jobs={TOUCH}",
        f"hydra.launcher.n_jobs=[[{TOUCH}]]",
        "hydra.launcher._target_=os.system",
        "hydra.launcher@x._target_=os.system",
        "hydra/callbacks=x",
        "hydra/launcher=other",
        "hydra.searchpath=[file:///tmp]",
        "hydra.sweep.dir=/tmp/elsewhere",
        "hydra.launcher.n_jobs=${oc.env:HOME}",
        "hydra.launcher.n_jobs=1,2",
        "folder=/tmp/elsewhere",
        "plugins=[victim]",
    ],
)
def test_no_word_of_a_file_reaches_hydra_unchecked(word, unfinished, capsys):
    file = unfinished("joblib", "hydra.launcher.n_jobs=1")
    change(file, launcher_words=[word])
    assert main(["sweep", "resume", "sweeps/s"]) == 64
    err = capsys.readouterr().err
    assert "sweeps/s/sweep.json" in err
    assert word.partition("=")[0] in err
    assert not Path("victim").exists()
    assert states() == ["waiting", "waiting"]


@pytest.mark.parametrize("launcher", ["other", "basic,joblib", "../basic", "megaspec_points", "basic\n", ""])
def test_launchers_are_those_that_we_know(launcher, unfinished, capsys):
    file = unfinished()
    change(file, launcher=launcher, launcher_words=["hydra.launcher.n_jobs=1"])
    assert main(["sweep", "resume", "sweeps/s"]) == 64
    assert "hydra/launcher=" in capsys.readouterr().err
    assert states() == ["waiting", "waiting"]


def test_what_runs_commands_or_writes_elsewhere_is_said_by_a_command_line_alone(unfinished, capsys, monkeypatch):
    file = unfinished()
    given = []
    monkeypatch.setattr("hydra_plugins.megaspec_launcher.jobs.run_points", lambda *args, **_: given.append(args) or "")
    words = ["hydra.launcher.setup=['touch victim']", "hydra.launcher.partition=gpu", "hydra.launcher.comment='a b'"]
    monkeypatch.setattr("megaspec.sweep.hydra_jobs.refuse_missing", lambda launcher, origin: None)  # as on a cluster
    change(file, launcher="submitit_slurm", launcher_words=words)
    assert main(["sweep", "resume", "sweeps/s"]) == 64
    err = capsys.readouterr().err
    assert "hydra.launcher.setup" in err
    assert "only a command line can say this" in err
    assert not given
    for word in (
        "submitit_folder=/tmp/x",
        "additional_parameters={a: b}",
        "partition='a\\nb'",
        "additional_parameters.a=b",
    ):
        change(file, launcher_words=[f"hydra.launcher.{word}"])
        assert main(["sweep", "resume", "sweeps/s"]) == 64
        assert not given
    change(file, launcher_words=words)
    assert main(["sweep", "resume", "sweeps/s", "hydra.launcher.setup=['module load x']"]) == 0
    [(_, numbers, launcher, settings)] = given
    assert (numbers, launcher) == ([1, 2], "submitit_slurm")
    assert settings == (*words[1:], "hydra.launcher.setup=['module load x']")
    change(file, launcher="joblib", launcher_words=["hydra.launcher.pre_dispatch=__import__(chr(97))"])
    assert main(["sweep", "resume", "sweeps/s"]) == 64


@pytest.mark.parametrize("word", ["hydra.launcher._target_=os.system", f"hydra.launcher.n_jobs={TOUCH}"])
def test_a_command_line_meets_the_same_check(word, capsys):
    assert sweep("data.seed=1,2", "hydra/launcher=joblib", word) == 64
    assert word.partition("=")[0] in capsys.readouterr().err
    assert not Path("sweeps").exists()
    assert not Path("victim").exists()


def test_no_file_of_a_config_folder_reaches_hydra(capsys):
    """Groups of --config-dir are ours alone: one that is called as one of Hydra's is nobody's."""
    for name in ("mine", "basic"):
        file = Path("more", "hydra", "launcher", f"{name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("_target_: pathlib.Path.touch\nself: victim\n")
    assert sweep("data.seed=1,2", "hydra/launcher=mine", "--config-dir=more") == 64
    assert "choose megaspec, basic, joblib" in capsys.readouterr().err
    assert sweep("data.seed=1,2", "hydra/launcher=basic", "--config-dir=more") == 0
    assert states() == ["done", "done"]
    assert not Path("victim").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("defaults: [hello, override /hydra/launcher: basic]", "hydra/launcher is no group"),
        (f"defaults: [hello]\nhydra: {{callbacks: {{x: {TOUCH}}}}}", "hydra"),
        (f"defaults: [hello]\nhydra/launcher: {TOUCH}", "hydra/launcher"),
        (f"defaults: [hello]\nabout: {TOUCH}", "can't name code"),
        ("# @package hydra\ndefaults: [hello]", "@package"),
    ],
)
def test_no_recipe_names_code(text, told, capsys):
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text(text)
    assert sweep("data.seed=1,2", "recipe=mine", "hydra/launcher=basic") == 64
    assert told in capsys.readouterr().err
    assert not Path("victim").exists()


def test_words_of_points_are_a_recipes_alone(capsys):
    """A search composes its points from the words of sweep.json: they meet the check of a command line."""
    pytest.importorskip("optuna")
    assert sweep("optim.lr=interval(1e-4,1e-2)", "sweep.kind=optuna", "sweep.trials=2") == 0
    file = Path("sweeps/s/sweep.json")
    head = json.loads(file.read_text())
    Path("sweeps/s/points.jsonl").write_text("")
    for bad in (
        {"plain": [*head["plain"], f"+hydra.callbacks.x={TOUCH}"]},
        {"axes": [{"key": "+hydra.callbacks.x._target_", "words": [f"+hydra.callbacks.x={TOUCH}"]}]},
        {"axes": [{"key": "about", "words": [f"about={TOUCH}"]}]},
    ):
        change(file, **head | bad)
        assert main(["sweep", "resume", "sweeps/s"]) == 64
        assert not Path("victim").exists()
        Path("sweeps/s/points.jsonl").write_text("")
    capsys.readouterr()


def test_a_folder_with_an_odd_name_is_taken_as_it_is(unfinished):
    unfinished()
    odd = Path("it's ${oc.env:HOME} \\${x} a\\")
    Path("sweeps/s").rename(odd)
    assert main(["sweep", "resume", str(odd)]) == 0
    assert [p.state for p in SweepFolder(odd).points()] == ["done", "done"]
    assert (odd / "logs" / "hydra-1" / "multirun.yaml").is_file()
