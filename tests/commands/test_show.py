"""`megaspec show`: what it prints is a recipe, and the same one."""

import json
from pathlib import Path

import pytest
import yaml

from megaspec.cli import main
from megaspec.compose.compose import compose
from megaspec.compose.search_path import SearchPath
from megaspec.core.marked_yaml import parse_yaml
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.run_folder import write_run
from tests.golden_specs import CPU, targets

NAMES = SearchPath().choices("recipe")
# Recipes, and what is changed in them: each form of override, kinds that files chose otherwise, numbers and texts that
# YAML may take for others.
CHANGED = [
    ("hello", ["optim=sgd", "optim.lr=1e-5", "optim.weight_decay=5e-324"]),
    ("hello", ["optim=muon", "precision=bf16", "parallelism=tp2", "kernels=reference", "log=quiet"]),
    ("hello", ["data=synthetic", "~data.blend", "train.sample=null"]),
    ("hello", ["data.blend=[{prefix: 'a: b, #c', weight: 3}, {prefix: '1e5', weight: 0.1}]"]),
    ("hello", ["optim.schedule={kind: wsd, wsd_decay_steps: 40}", "optim.schedule.min_lr=${..lr}", "name='1e5'"]),
    ("hello", ["model=deepseek_v3", "train.sample.prompt='Once: \\'\t \u2028'", "about.purpose=null_"]),
    ("hello", ["model=gpt2_124m", "train.batch_ramp={start: 2, increment: 2, samples: 1k}"]),
    ("llama3_1_405b_256gpu", ["parallelism.recompute.parts=[mlp]", "launcher.ranks=512"]),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    Path("recipes").mkdir()


def shown(capsys, *words):
    assert main(["show", *words]) == 0
    return capsys.readouterr().out


def composed_again(text):
    """The recipe of a text that was saved as one."""
    Path("recipes/mine.yaml").write_text(text)
    return compose("mine")


@pytest.mark.parametrize(("name", "words"), [*((name, []) for name in NAMES), *CHANGED])
def test_it_is_the_same_recipe_and_gives_the_same_spec(name, words, capsys):
    recipe = compose(name, words).recipe
    plain = shown(capsys, f"recipe={name}", *words)
    again = composed_again(plain)
    assert again.recipe == recipe
    assert again.left_out == ()
    with_origins = shown(capsys, f"recipe={name}", *words, "--origins")
    assert composed_again(with_origins).recipe == recipe
    # YAML 1.1 reads the same
    assert yaml.safe_load(plain) == parse_yaml(plain, label="x").content
    if not words:
        for target in targets(recipe).values():
            facts = Facts(run_dir="runs/x")
            spec = resolve(recipe, target, facts)
            assert resolve(again.recipe, target, facts).model_dump_json() == spec.model_dump_json()


def test_nothing_of_a_choice_comes_back_into_what_was_saved(capsys, tmp_path):
    """Were a group's choice to grow a key, a saved recipe would not."""
    text = shown(capsys, "recipe=hello")
    folder = tmp_path / "groups" / "optim"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("kind: adamw\nbeta1: 0.5\n")
    Path("recipes/plain.yaml").write_text("defaults: [hello, {override /optim: mine}]\n")
    assert compose("plain", config_dirs=[tmp_path / "groups"]).recipe.optim.beta1 == 0.5
    saved = composed_again(text).origins
    assert {where.rpartition(":")[0] for where in saved.values()} == {"recipes/mine.yaml"}
    # and it is changed as any other recipe is
    changed = compose("mine", ["optim=sgd", "optim.lr=0.5"])
    assert (changed.recipe.optim.kind, changed.recipe.optim.lr) == ("sgd", 0.5)
    assert any(text.startswith("optim.beta1 (recipes/mine.yaml:") for text in changed.left_out)


def test_origins_stand_behind_each_value(capsys):
    text = shown(capsys, "recipe=hello", "train.steps=300", "optim=sgd", "--origins")
    remarks = {}
    for line in text.splitlines():
        value, _, origin = line.partition("  # ")
        remarks[" ".join(value.split())] = origin
    assert remarks["steps: 300"] == "command line"
    assert remarks["seq_len: 256"] == "recipes/hello.yaml:9"
    assert remarks["- prefix: data/hello"] == "recipes/hello.yaml:7"
    assert remarks["kind: sgd"].startswith("conf/optim/sgd.yaml:")
    assert remarks["tp: auto"] == "conf/parallelism/default.yaml:2"
    assert remarks["bucket_mb: 100.0"] == "default"
    values = [line for line in text.splitlines()[1:] if not line.endswith(":") and "override" not in line]
    assert all("  # " in line for line in values)


def test_a_path_restricts_it(capsys):
    Path("data").mkdir()
    assert list(yaml.safe_load(shown(capsys, "recipe=hello", "data"))) == ["data"]
    content = yaml.safe_load(shown(capsys, "parallelism", "recipe=hello", "optim.schedule.min_lr", "optim.lr"))
    assert list(content) == ["parallelism", "optim"]
    assert content["optim"] == {"schedule": {"min_lr": 3e-4}, "lr": 3e-3}
    assert content["parallelism"] == compose("hello").recipe.parallelism.model_dump(mode="json")


def test_resolved_it_has_no_auto_and_is_the_recipe_of_what_plan_says(capsys):
    text = shown(capsys, "recipe=hello", "hardware=cpu", "--resolved", "--origins")
    assert " auto " not in text
    assert "# decided: no GPU" in text
    again = composed_again(text)
    assert main(["plan", "recipe=hello", "hardware=cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert again.recipe.parallelism.tp == plan["mesh"]["tp"]
    for decision in plan["decisions"]:
        assert decision["value"] != "auto"


def test_a_run_shows_what_it_trains(capsys):
    recipe = compose("hello", ["data=synthetic", "train.sample=null"]).recipe
    spec = resolve(recipe, CPU, Facts(run_dir="runs/x"))
    Path("runs/x").mkdir(parents=True)
    write_run(Path("runs/x"), recipe, CPU, spec)
    text = shown(capsys, "runs/x", "--origins")
    assert "run_dir: runs/x" in text
    assert "# runs/x/recipe.json" in text
    recipe_again = composed_again(text).recipe
    for name in type(recipe_again).model_fields:
        assert getattr(recipe_again, name) == getattr(spec, name)
    assert yaml.safe_load(shown(capsys, "runs/x", "parallelism.tp")) == {"parallelism": {"tp": spec.parallelism.tp}}


def test_plan_has_the_composed_recipe_in_its_json(capsys):
    assert main(["plan", "recipe=hello", "hardware=cpu", "train.steps=300", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recipe"] == compose("hello", ["train.steps=300"]).recipe.model_dump(mode="json")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe=helo"], "recipe=helo does not exist; did you mean hello?"),
        ([], "recipe=NAME is missing"),
        (["recipe=hello", "optim.lrr=3"], "optim.lrr=3: lrr is no key when optim.kind=adamw; did you mean lr?"),
        (["recipe=hello", "hardware=H999"], "hardware=H999 is not known"),
        (["recipe=hello", "paralelism"], "paralelism: no section or key of this recipe; did you mean parallelism"),
        (["recipe=hello", "optim.nothing"], "optim.nothing: no section or key of this recipe"),
        (["recipe=hello", "parallelism.tp=3", "hardware=cpu", "--resolved"], "parallelism.tp=3 must divide"),
        (["nowhere/run"], "nowhere/run holds no run (no spec.json); there is no such folder"),
        (["recipes"], "recipes holds no run"),
        (["recipes", "optim.lr=3"], "recipes optim.lr=3: a run is shown by itself"),
    ],
)
def test_mistakes_are_told_as_plan_tells_them(words, says, capsys):
    assert main(["show", *words]) == 64
    assert says in capsys.readouterr().err


def test_what_a_choice_leaves_out_is_told(capsys):
    assert main(["show", "recipe=hello", "data=synthetic", "train.sample=null"]) == 0
    out, err = capsys.readouterr()
    assert "left out: data.blend (recipes/hello.yaml:7)" in err
    assert "left out" not in out
