"""The layouts that a supervised run may take: which fits, what is refused, what `plan` shows."""

import json

import pytest

from megaspec.cli import main
from megaspec.commands.layouts import NO_LAYOUT, RECIPES_OWN, first_that_fits, layout_options, resolve_layout
from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.rules.examples import CPU, FACTS, H200

SMALLER = (
    "launcher.layouts=[['parallelism.tp=2','parallelism.dp_replicate=1'],"
    "['parallelism.tp=1','parallelism.dp_replicate=1']]"
)
RECIPE = ("hello", ["launcher.ranks=4", "parallelism.tp=2"])


def options_of(*words):
    name, base = RECIPE
    return layout_options(compose(name, [*base, *words]))


def places(n):
    return CPU.model_copy(update={"places": n})


def taken(options, target):
    found, spec = first_that_fits(options, target, lambda option: resolve_layout(option, target, FACTS))
    return found.index, spec.world_size


@pytest.mark.parametrize(
    ("n", "expected"), [(None, (0, 4)), (5, (0, 4)), (4, (0, 4)), (3, (1, 2)), (2, (1, 2)), (1, (2, 1))]
)
def test_the_first_layout_that_fits_is_taken(n, expected):
    assert taken(options_of(SMALLER), places(n)) == expected


def test_where_none_fits_each_says_why():
    with pytest.raises(RecipeError) as raised:
        taken(options_of(SMALLER), places(0))
    problems = raised.value.problems
    assert {problem.code for problem in problems} == {NO_LAYOUT}
    assert [problem.message for problem in problems[1:]] == [
        f"{RECIPES_OWN} needs 4 ranks, there is room for 0",
        "parallelism.tp=2 parallelism.dp_replicate=1 needs 2 ranks, there is room for 0",
        "parallelism.tp=1 parallelism.dp_replicate=1 needs 1 rank, there is room for 0",
    ]


def test_a_layout_has_as_many_ranks_as_torchrun_started():
    options = options_of(SMALLER)
    for world, expected in ((4, (0, 4)), (2, (1, 2)), (1, (2, 1))):
        assert taken(options, CPU.model_copy(update={"world_size": world})) == expected
    with pytest.raises(RecipeError) as raised:
        taken(options, CPU.model_copy(update={"world_size": 3}))
    assert {problem.code for problem in raised.value.problems} == {NO_LAYOUT}
    # without a list the problem is that of the recipe
    with pytest.raises(RecipeError, match=r"launcher\.ranks=4 must be the 2 that torchrun started"):
        taken(options_of(), CPU.model_copy(update={"world_size": 2}))


def test_a_recipe_that_leaves_its_ranks_open_takes_what_is_left():
    options = layout_options(compose("hello", ["parallelism.tp=1"]))
    # 3 do not divide the batch of 8
    assert taken(options, places(3)) == (0, 2)
    assert taken(options, places(9)) == (0, 8)
    assert taken(options, places(1)) == (0, 1)


def test_gpus_that_are_left_are_searched():
    options = layout_options(compose("hello", ["launcher.ranks=8", "parallelism=tp2", "launcher.layouts=search"]))
    for gpus, expected in ((8, (0, 8)), (4, (1, 4)), (1, (1, 1))):
        assert taken(options, H200.model_copy(update={"gpus": gpus, "gpu_memory": 150 << 30})) == expected


def test_what_is_wrong_for_another_reason_than_devices_is_told():
    options = options_of("parallelism.tp=3", SMALLER)
    with pytest.raises(RecipeError, match=r"parallelism\.tp=3"):
        taken(options, places(4))


def test_plan_shows_the_layouts_with_their_ranks(capsys):
    words = ["plan", "recipe=hello", "hardware=cpu", *RECIPE[1], SMALLER]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "Layouts of --supervise" in shown
    assert main([*words, "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert [(one["ranks"], one["axes"], one["micro_batch"], one["accumulation"]) for one in layouts] == [
        (4, {"tp": 2, "dp_replicate": 2}, 4, 1),
        (2, {"tp": 2}, 8, 1),
        (1, {}, 8, 1),
    ]


def test_the_step_time_and_memory_of_each_layout_are_planned(capsys):
    words = "launcher.layouts=[['parallelism=fsdp','launcher.ranks=4']]"
    assert main(["plan", "recipe=llama3_8b", "hardware=H200", "gpus=8", words, "--json"]) == 0
    own, other = json.loads(capsys.readouterr().out)["layouts"]
    assert (own["ranks"], other["ranks"]) == (8, 4)
    assert other["accumulation"] * other["micro_batch"] * 4 == own["accumulation"] * own["micro_batch"] * 4
    assert 1.5 < other["seconds"] / own["seconds"] < 2.5
    assert own["fits"]
    assert other["fits"]


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        ("[['optim.lr=1']]", "launcher.layouts.0: optim.lr=1 is no layout"),
        ("[['x']]", "launcher.layouts.0: x"),
        ("[['parallelism.tpp=2']]", "launcher.layouts.0: parallelism.tpp"),
        (
            "[['parallelism.tp=1'],['parallelism.tp=3']]",
            "launcher.layouts.1: parallelism.tp=3 must divide model.n_heads=4",
        ),
        ("[['parallelism=nothing']]", "launcher.layouts.0: parallelism=nothing does not exist"),
    ],
)
@pytest.mark.parametrize("command", [["plan"], ["train", "--supervise"]])
def test_a_wrong_layout_is_told_before_anything_starts(command, layouts, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["data=synthetic", "data.vocab_size=64", "data.seq_len=8", "model.vocab_size=64", "train.sample=null"]
    assert main([*command, "recipe=hello", *data, f"launcher.layouts={layouts}"]) == 64
    assert text in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "environment", "text"),
    [
        (["launcher.max_restarts=2"], {}, "launcher.max_restarts=2 is for runs without --supervise"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun has started this one"),
        (["-m", "train.seed=1,2"], {}, "--supervise keeps one run alive, and -m starts several"),
        (["launcher.restarts.without_progress=0"], {}, "launcher.restarts.without_progress=0 must be"),
        (["launcher.restarts.most=-1"], {}, "launcher.restarts.most=-1 must be"),
    ],
)
def test_what_a_supervisor_can_not_be_asked(words, environment, text, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "recipe=hello", "--supervise", *words]) == 64
    assert text in capsys.readouterr().err
