"""What a sweep's command line may say, and what is refused before anything starts."""

from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.compose.compose import Swept, split_sweep
from megaspec.core.errors import RecipeError
from megaspec.sweep.words import default_name, read_words
from tests.sweep.conftest import TINY, sweep


def test_hydras_grammar_is_read():
    plain, swept = split_sweep(
        [
            "a.b=1e-3,3e-4",
            "~data.blend",
            "x=tag(log,interval(1e-4,1e-2))",
            "y=int(interval(1,8))",
            "z=range(1,7,2)",
            "model=glob(llama3_2*)",
            "q='1,2',choice",
            "l=[1,2],[3]",
            "recipe=hello,gpt2_124m",
        ]
    )
    assert plain == ["~data.blend"]
    assert swept == [
        Swept("a.b", ("a.b=0.001", "a.b=0.0003")),
        Swept("x", (), bounds=(1e-4, 1e-2), is_log=True),
        Swept("y", (), bounds=(1, 8)),
        Swept("z", ("z=1", "z=3", "z=5"), is_range=True),
        Swept("model", ("model=llama3_2_1b",)),
        Swept("q", ("q='1,2'", "q=choice")),
        Swept("l", ("l=[1,2]", "l=[3]")),
        Swept("recipe", ("recipe=hello", "recipe=gpt2_124m")),
    ]
    assert [type(b) for b in swept[2].bounds] == [int, int]


def test_a_sweeps_own_words_are_typed_and_taken_out():
    words = read_words(["recipe=hello", "a=1,2", "sweep.slots=2", "sweep.keep_going=false", "hydra/launcher=basic"])
    assert words.plain == ("recipe=hello",)
    assert (words.spec.slots, words.spec.keep_going, words.launcher) == (2, False, "basic")
    assert read_words(["a=1,2", "sweep=optuna"]).spec.kind == "optuna"
    assert read_words(["a=interval(0,1)", "hydra/sweeper=optuna"]).spec.kind == "optuna"


def test_the_same_command_finds_its_sweep_and_another_does_not():
    def name(*words):
        return default_name(read_words(["recipe=hello", *words]))

    assert name("a.b=1,2", "c=3").startswith("hello-b-")
    assert name("a.b=1,2", "c=3") == name("c=3", "a.b=2,1", "sweep.slots=4")
    assert len({name("a.b=1,2"), name("a.b=1,3"), name("a.b=1,2", "c=3"), name("a.b=1,2", "sweep.kind=optuna")}) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "-m without a key of several values"),
        (["optim.lr=range(5,1)"], "no value at all"),
        (["model=glob(zz*)"], "no value at all"),
        (["optim.lr=1e-3,"], "not an override"),
        (["optim.lr=interval(1e-4,1e-2)"], "a grid can't enumerate an interval"),
        (["optim.lr=tag(log,interval(0,1))", "sweep.kind=optuna"], "begins above 0"),
        (["optim.lr=1,2", "optim.lr=3"], "optim.lr is given more than once"),
        (["name=a,b"], "name can't be swept"),
        (["run_dir=a,b"], "run_dir can't be swept"),
        (["sweep.slots=1,2"], "several values"),
        (["optim.lr=1,2", "run_dir=x"], "set sweep.folder instead"),
        (["optim.lr=1,2", "sweep.slot=2"], "sweep.slot=2: slot is no key of a sweep; did you mean slots?"),
        (["optim.lr=1,2", "sweep.slots=0"], "sweep.slots=0 must be greater than 0"),
        (["optim.lr=1,2", "sweep.kind=grit"], "did you mean grid?"),
        (["optim.lr=1,2", "resume=always"], "resume=auto or never"),
        (["optim.lr=1,2", "hydra/launcher=jobli"], "did you mean joblib?"),
        (["optim.lr=1,2", "hydra.sweeper.n_trials=3"], "write sweep.trials=3"),
        (["optim.lr=1,2", "hydra.launcher.n_jobs=3"], "set sweep.slots or sweep.gpus"),
        (["optim.lr=1,2", "hydra.verbose=true"], "no setting of a sweep"),
        (["optim.lr=1,2", "sweep.kind=optuna", "hydra/launcher=joblib"], "a search runs on hydra/launcher=megaspec"),
        (["optim.lr=range(1,102)", "data.seed=range(0,100)"], "10,100 points are more than 10,000"),
        (["data.seed=range(0,1000000000)"], "points are more than 10,000"),
        (["optim.lr=1,2", "sweep.gpus=2"], "this machine has no GPU"),
    ],
)
def test_refused(words, text, capsys):
    assert sweep(*words) == 64
    err = capsys.readouterr().err
    assert text in err, err
    assert not Path("sweeps").exists()


def test_under_torchrun_it_is_refused_with_the_right_command(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "recipe=hello", "-m", "optim.lr=1e-3,3e-4"]) == 64
    assert "give it by itself: megaspec train recipe=hello optim.lr=1e-3,3e-4 -m" in capsys.readouterr().err


def test_values_of_a_sweep_without_the_flag_name_it(capsys):
    assert main(["train", *TINY, "optim.lr=1e-3,3e-4"]) == 64
    assert "train -m runs each" in capsys.readouterr().err


def test_only_train_sweeps(capsys):
    for flag in ("-m", "--multirun"):
        assert main(["plan", "recipe=hello", flag]) == 64
        assert "only `megaspec train` runs several points" in capsys.readouterr().err


def test_every_problem_is_told_at_once():
    with pytest.raises(RecipeError) as error:
        read_words(["name=a,b", "run_dir=x", "optim.lr=interval(1,2)"])
    assert len(error.value.problems) == 3
