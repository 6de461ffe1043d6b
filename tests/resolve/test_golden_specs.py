"""Every shipped recipe resolves to the Spec that was last looked at; `make golden` writes it anew."""

import json
from functools import cache
from pathlib import Path

import pytest
import yaml

from megaspec.compose.compose import compose
from megaspec.compose.search_path import SearchPath
from megaspec.core.axes import expert_degrees
from megaspec.core.errors import RecipeError
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec
from tests import write_golden
from tests.golden_specs import FOLDER, golden_cases, resolved, targets

RECIPES = Path(__file__).parents[2] / "recipes"
# Layouts as the literature states them, that of deepseek_v3 as `megaspec tune` finds it: GPUs, then every degree but
# those that are 1.
PUBLISHED = {
    "llama3_8b": (8, {"cp": 2, "dp": 4}),
    "llama3_70b": (64, {"tp": 4, "pp": 4, "cp": 2, "dp": 2}),
    "llama3_1_405b": (1024, {"tp": 8, "pp": 8, "cp": 2, "dp": 8}),
    "gpt3_175b": (128, {"tp": 4, "pp": 8, "dp": 4}),
    "llama2_7b": (8, {"dp": 8}),
    "llama2_13b": (8, {"tp": 2, "dp": 4}),
    "llama3_70b_32gpu": (32, {"tp": 4, "pp": 2, "dp": 4}),
    "gpt3_175b_128gpu": (128, {"tp": 8, "pp": 4, "dp": 4}),
    "llama3_1_405b_256gpu": (256, {"tp": 8, "pp": 8, "dp": 4}),
    "deepseek_v3": (256, {"pp": 32, "ep": 8, "dp": 8}),
    "deepseek_v3_tp8_ep32": (256, {"tp": 8, "ep": 32, "dp": 32}),
    "llama3_8b_fp8": (8, {"cp": 2, "dp": 4}),
    "mixtral_8x7b": (64, {"pp": 4, "ep": 8, "dp": 16}),
    "qwen3_30b_a3b": (16, {"tp": 4, "pp": 2, "ep": 4, "dp": 2}),
}


# Not while tests are collected: each worker would do it.
resolved_once = cache(resolved)


def spec_of(name: str) -> Spec:
    return Spec.model_validate_json(json.dumps(resolved_once()[f"{name}.json"]))


def test_no_golden_spec_is_missing_or_left_over():
    assert {f"{name}{ending}.json" for name, ending in golden_cases()} == set(resolved_once()), "run `make golden`"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.json")))
def test_spec(name):
    assert name in resolved_once(), "run `make golden`"
    assert json.loads((FOLDER / name).read_text()) == resolved_once()[name]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("train: {steps: 10}", "warmup_steps=20 must be below train.steps=10"),
        ("train: {stepss: 10}", "did you mean steps or skip_steps?"),
        ("launcher: {ranks: 4}", "launcher.ranks=4 without about.hardware"),
        ("launcher: {ranks: 4}\nabout: {hardware: GB200}", "about.hardware=GB200 is not in GPUS"),
    ],
)
def test_a_recipe_that_has_no_golden_spec_is_named_and_nothing_is_deleted(body, said, tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(f"defaults:\n  - hello\n{body}\n")
    (tmp_path / "old.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(write_golden, "FOLDER", tmp_path)
    with pytest.raises((RecipeError, AssertionError)) as caught:
        write_golden.main()
    assert said in str(caught.value)
    assert caught.value.__notes__ == ["golden Spec of recipes/mine.yaml"]
    assert (tmp_path / "old.json").exists()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layout(name):
    gpus, expected = PUBLISHED[name]
    spec = spec_of(name)
    own = spec.parallelism
    found = {axis: getattr(own, axis) for axis in ("tp", "pp", "cp", "ep", "etp")}
    found["dp"] = own.dp_replicate * own.dp_shard
    assert spec.world_size == gpus
    assert {axis: degree for axis, degree in found.items() if degree != 1} == expected


def test_the_experts_of_deepseek_stand_on_eight_gpus_each():
    own = spec_of("deepseek_v3_tp8_ep32").parallelism
    assert expert_degrees(own.degrees, ep=own.ep, etp=own.etp) == {"pp": 1, "edp": 8, "ep": 32, "etp": 1}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("llama2_7b", 2e12),
        ("llama3_8b", 15e12),
        ("llama3_1_405b", 15.6e12),
        ("gpt3_175b", 300e9),
        ("deepseek_v3", 14.8e12),
        ("qwen3_30b_a3b", 30e12),
    ],
)
def test_published_tokens(name, tokens):
    spec = spec_of(name)
    assert sum(spec.segments) * spec.data.seq_len == pytest.approx(tokens, rel=1e-4)


@pytest.mark.parametrize("ranks", [128, 256, 512])
def test_gpt3_on_more_gpus(ranks):
    recipe = compose("gpt3_175b", [f"launcher.ranks={ranks}"]).recipe
    (target,) = targets(recipe).values()
    assert resolve(recipe, target, Facts(run_dir="x")).parallelism.dp_shard == ranks // 32


@pytest.mark.parametrize("name", SearchPath().choices("recipe"))
def test_a_recipe_is_short_and_repeats_nothing_that_it_inherits(name):
    text = (RECIPES / f"{name}.yaml").read_text()
    assert len(text.splitlines()) <= 40
    body = yaml.safe_load(text)
    parents = [entry for entry in body.pop("defaults") if isinstance(entry, str)]
    for parent in parents:
        inherited = compose(parent).recipe.model_dump(mode="json")
        assert [key for key, value in leaves(body) if value_of(inherited, key) == value] == []
    assert compose(name).recipe.about.purpose


def leaves(content, prefix=""):
    for name, inner in content.items():
        if isinstance(inner, dict):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def value_of(content, key):
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content
