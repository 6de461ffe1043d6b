"""`megaspec schema`: what the shipped files are held by, with a validator that is not ours."""

import json
from functools import cache
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from megaspec.cli import main
from megaspec.commands.schema import schema
from megaspec.compose.compose import compose
from megaspec.compose.search_path import SearchPath
from megaspec.core.errors import RecipeError, WriteError
from megaspec.core.marked_yaml import parse_yaml
from megaspec.recipe import SECTIONS

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CHOICES = sorted((ROOT / "conf").glob("*/*.yaml"))
GROUPS = ("recipe", *SECTIONS)


@cache
def validator(group):
    return Draft202012Validator(json.loads(json.dumps(schema(group, SearchPath()))))


def readings(text):
    """As our own reader takes a file, and as a YAML 1.1 reader does, which takes 1e6 for text."""
    return parse_yaml(text, label="x").content, yaml.safe_load(text) or {}


def is_valid(text, group="recipe"):
    return [validator(group).is_valid(content) for content in readings(text)]


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_a_schema(group):
    checked = dict(validator(group).schema)
    if group != "recipe":
        # a second for each group, whose classes are those that are checked with recipes
        assert checked.pop("$defs") == validator("recipe").schema["$defs"]
    Draft202012Validator.check_schema(checked)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(path):
    assert is_valid(path.read_text()) == [True, True]


@pytest.mark.parametrize("path", CHOICES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_shipped_choices_are_valid(path):
    assert is_valid(path.read_text(), path.parent.name) == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "train: {steps: 15T, global_batch: 1_024, micro_batch: auto}",
        "train: {steps: 1e6}",
        "data: {vocab_size: '${model.vocab_size}', seq_len: '???'}",
        "model: {moe: null, attention: {kind: mla, kv_rank: 8, d_nope: 8, d_rope: 8, d_value: 8, q_rank: null}}",
        "model: {positions: {base: 500_000.0}, moe: {n_experts: 8, router: {losses: [{kind: aux, coefficient: 1}]}}}",
        "optim: {lr: 3e-4, clip: null}",
        "optim: {kind: sgd, momentum: 0.0}",
        "defaults: [hello, {override /model: mine}, _self_]",
        "parallelism: {recompute: '${x.y}'}",
        "name: a-run",
        "data: {split: [9, 1, 0]}",
    ],
)
def test_what_a_recipe_may_say(text):
    assert is_valid(text) == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "parallelism: {tpp: 3}",
        "parallelism: {tp: 0}",
        "parallelism: {tp: many}",
        "parallelism: {dp_strategy: zero3}",
        "optim: {lrr: 1}",
        "optim: {kind: adam}",
        "optim: {kind: sgd, beta1: 0.9}",
        "optim: {lr: -1.0}",
        "optim: {schedule: {kind: cosinus}}",
        "train: {steps: 1.5}",
        "train: {steps: 15X}",
        "train: {deterministic: 3}",
        "model: {dropout: 1.5}",
        "model: {moe: {router: {losses: [{kind: aux}]}}}",
        "model: {moe: {n_expert: 8}}",
        "data: {blend: [{weight: 1.0}]}",
        "data: {blend: []}",
        "data: {split: [1, 2]}",
        "modell: {}",
        "name: '-a'",
        "defaults: [{model: x}]",
        "defaults: hello",
        "defaults: [{override /modell: x}]",
    ],
)
def test_what_it_may_not_say(text):
    """Each is refused by `compose` too: the schema is not stricter than the language."""
    assert is_valid(text) == [False, False]


def test_the_schema_is_not_stricter_than_the_language(tmp_path, monkeypatch):
    """Files that are wrong above are refused when they are composed on top of hello."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (wrong,) = [m for m in test_what_it_may_not_say.pytestmark if m.name == "parametrize"]
    for text in wrong.args[1]:
        is_about_defaults = text.startswith("defaults")
        (tmp_path / "recipes" / "x.yaml").write_text(text if is_about_defaults else f"defaults: [hello]\n{text}\n")
        with pytest.raises(RecipeError):
            compose("x")


def test_groups_know_their_own_keys():
    assert is_valid("kind: decoder\nn_layers: 4", "model") == [True, True]
    assert is_valid("defaults: [llama3_8b]\nn_layers: 4", "model") == [True, True]
    assert is_valid("kind: decoder\nlr: 4", "model") == [False, False]
    assert is_valid("defaults: [{override /data: x}]", "model") == [False, False]


def test_keys_are_explained_and_choices_offered():
    found = validator("recipe").schema
    lr = found["$defs"]["AdamWSpec"]["properties"]["lr"]
    assert lr["description"] == "Highest learning rate."
    offered = found["properties"]["defaults"]["items"]["anyOf"][1]["properties"]["override /model"]["anyOf"][0]["enum"]
    assert "llama3_8b" in offered
    assert found["$defs"]["TrainSpec"]["properties"]["micro_batch"]["default"] == "auto"


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == validator("recipe").schema
    assert main(["schema", "optim", "--out", "schemas/optim.json"]) == 0
    assert "# yaml-language-server: $schema=schemas/optim.json" in capsys.readouterr().out
    assert json.loads(Path("schemas/optim.json").read_text()) == validator("optim").schema
    assert main(["schema", "optimm"]) == 64
    assert "did you mean optim?" in capsys.readouterr().err


def test_the_line_that_names_a_schema_leaves_a_recipe_as_it_is(tmp_path, monkeypatch):
    """Below the package line, and above it too: our reader takes neither for anything but a comment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    lines = ["# @package _global_", "# yaml-language-server: $schema=recipe.json"]
    for order in (lines, lines[::-1]):
        text = "\n".join([*order, "defaults:", "  - hello", "train: {steps: 7}"])
        (tmp_path / "recipes" / "mine.yaml").write_text(text)
        assert compose("mine").recipe.train.steps == 7


def test_a_file_that_cant_be_written_is_an_error_without_traceback(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert main(["schema", "--out", str(tmp_path / "file" / "schema.json")]) == WriteError.exit_code
    assert "can't be written" in capsys.readouterr().err
