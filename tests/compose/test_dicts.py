"""Recipes from Python data: what a file would make of them, and the same words where they are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaspec.compose.compose import Composed, compose, compose_dicts
from megaspec.core.errors import RecipeError
from megaspec.estimate.target import Target
from megaspec.spec_from import spec_from

MODEL = {"kind": "decoder", "n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 37}
WHOLE: dict[str, Any] = {
    "name": "mine",
    "model": MODEL,
    "data": {"kind": "synthetic", "seq_len": 16, "vocab_size": 37},
    "train": {"steps": 20, "global_batch": 4},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where recipes of ours are found by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    return tmp_path


def told(*contents: Any, **more: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        compose_dicts(*contents, **more)
    return [str(problem) for problem in caught.value.problems]


def from_file(folder: Path, content: dict[str, Any]) -> Composed:
    """What a recipe of YAML makes of the same."""
    (folder / "recipes" / "mine.yaml").write_text(yaml.safe_dump(content))
    return compose("mine")


DATA: dict[str, dict[str, Any]] = {
    "whole": WHOLE,
    "optimizer": {**WHOLE, "optim": {"lr": 1e-3, "schedule": {"warmup_steps": 2}}},
    "words for counts": {**WHOLE, "train": {"steps": "1k", "global_batch": 4}},
    "references": {**WHOLE, "train": {"steps": 20, "global_batch": "${train.steps}"}},
    "other sections": {**WHOLE, "about": {"purpose": "x"}, "log": {"tensorboard": False}},
}


@pytest.mark.parametrize("name", DATA)
def test_a_dict_is_the_recipe_that_a_file_is(name: str, folder: Path) -> None:
    assert compose_dicts(DATA[name]).recipe == from_file(folder, DATA[name]).recipe


def test_the_dict_is_left_as_it_was() -> None:
    content = json.loads(json.dumps(WHOLE | {"optim": "sgd"}))
    compose_dicts(content, {"optim": {"lr": 0.5}})
    assert content == WHOLE | {"optim": "sgd"}


def test_origins_say_dict_or_the_file_below() -> None:
    one = compose_dicts(WHOLE)
    assert one.origins["model.n_layers"] == "dict"
    assert one.origins["precision.kind"] == "conf/precision/bf16.yaml:1"
    two = compose_dicts(WHOLE, {"train": {"steps": 9}})
    assert (two.origins["model.n_layers"], two.origins["train.steps"]) == ("dict 1", "dict 2")


def test_choices_by_name_and_keys_laid_over_them() -> None:
    recipe = compose_dicts(WHOLE | {"model": "hello", "optim": "sgd"}, {"model": {"n_layers": 3}}).recipe
    assert (recipe.model.n_layers, recipe.model.d_model, recipe.optim.kind, recipe.optim.lr) == (3, 128, "sgd", 0.1)
    again = compose_dicts({"model": {"n_layers": 3}}, WHOLE | {"model": "hello"}).recipe
    assert again.model == compose("hello").recipe.model


def test_starting_from_a_recipe() -> None:
    hello = compose("hello").recipe
    assert compose_dicts(start="hello").recipe == hello
    found = compose_dicts({"train": {"steps": 9}, "name": "mine"}, start="hello").recipe
    assert (found.name, found.train.steps, found.train.global_batch) == ("mine", 9, hello.train.global_batch)


def test_a_section_of_another_kind_replaces_what_it_lies_over() -> None:
    found = compose_dicts(WHOLE | {"optim": {"kind": "sgd", "lr": 0.5}})
    assert (found.recipe.optim.kind, found.recipe.optim.lr) == ("sgd", 0.5)
    assert found.left_out == ("optim.lr (conf/optim/adamw.yaml:2): dict says optim.kind=sgd",)
    assert found.origins["optim.lr"] == "dict"
    # the learning rate of AdamW is none for SGD
    assert told(WHOLE | {"optim": {"kind": "sgd"}})[0].startswith("optim.lr is missing; set it")
    kept = compose_dicts(WHOLE | {"optim": {"kind": "adamw", "weight_decay": 0.2}})
    assert (kept.recipe.optim.lr, kept.left_out) == (3e-4, ())


def test_a_part_of_another_kind_replaces_what_it_lies_over() -> None:
    positions = {"kind": "learned"}
    found = compose_dicts({"model": "llama3_8b"}, WHOLE | {"model": {"positions": positions, "n_layers": 2}})
    assert (found.recipe.model.positions.kind, found.recipe.model.d_model) == ("learned", 4096)
    (left,) = found.left_out
    assert left.startswith("model.positions.base (conf/model/llama3_8b.yaml:")
    assert left.endswith("dict 2 says model.positions.kind=learned")


def test_mistakes_read_as_those_of_a_file(folder: Path) -> None:
    wrong = WHOLE | {"train": {"steps": 2.5, "stepz": 5}, "optim": {"lr": "fast"}, "parallelism": {"tp": 0}, "modl": {}}
    with pytest.raises(RecipeError) as caught:
        from_file(folder, wrong)
    by_file = {(problem.key, problem.message, problem.code) for problem in caught.value.problems}
    with pytest.raises(RecipeError) as caught:
        compose_dicts(wrong)
    assert {(problem.key, problem.message, problem.code) for problem in caught.value.problems} == by_file
    assert len(by_file) >= 5
    assert "dict" in {problem.origin for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"train.steps": 4}, "train.steps: a key has no dot; write {'train': {'steps': ...}}   (dict)"),
        ({5: 6}, "5: a key is text, 5 is of type int; write '5'   (dict)"),
        (
            {"run_dir": Path("x")},
            "is of type PosixPath; a recipe holds text, numbers, True, False, None, lists and dicts",
        ),
        ({"data": {"blend": [{"prefix": b"x"}]}}, "data.blend.0.prefix=b'x' is of type bytes"),
        ({"model": "helo"}, "model=helo does not exist; did you mean hello? (a plug-in's kind: model.kind=helo"),
        ({"defaults": ["hello"]}, "defaults: a dict chooses with {'model': 'hello'}, and inherits with start='hello'"),
        ([1], "a recipe is a dict of keys to values, not a list"),
        ({"optim": {"_target_": "os.system"}}, "a recipe is data, it can't name code"),
        (WHOLE | {"name": None}, "name=null must be text"),
        ({"model": MODEL}, "name is missing; set it"),
        ({"train": None}, "train=null must be a section"),
    ],
)
def test_what_no_recipe_can_say_is_told(content: Any, words: str) -> None:
    assert any(words in line for line in told(content)), told(content)


def test_a_recipe_that_is_not_there_is_told() -> None:
    assert told(start="helo") == ["recipe=helo does not exist; did you mean hello?   (start)"]


def test_a_dict_that_holds_itself_is_refused() -> None:
    content: dict[str, Any] = {}
    content["model"] = content
    assert "nested deeper than 32" in told(content)[0]


def test_a_spec_at_once() -> None:
    spec = spec_from(WHOLE, target=Target(cores=1))
    assert (spec.train.steps, spec.model.n_kv_heads, spec.device) == (20, 4, "cpu")


def test_rules_are_told_with_what_is_of_the_wrong_type() -> None:
    target = Target(cores=16)
    with pytest.raises(RecipeError) as caught:
        spec_from(WHOLE, {"optim": {"lr": "fast"}, "parallelism": {"tp": 3}}, target=target)
    lines = [str(problem) for problem in caught.value.problems]
    assert any(line.startswith("optim.lr=fast must be a number") and line.endswith("(dict 2)") for line in lines)
    assert any("parallelism.tp=3" in line and "model.n_heads=4" in line for line in lines), lines
