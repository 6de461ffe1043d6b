"""What a message suggests mends: every suggestion, applied, breaks no rule that was kept before."""

import json
import random
import re
from functools import cache

import pytest

from megaspec.compose.compose import compose
from megaspec.core.errors import DataError, Problem, RecipeError
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import settle
from megaspec.rules.examples import EXAMPLES, H200
from megaspec.rules.run_facts import Facts
from tests.rules.composed import composed

NOTHING = Facts(run_dir="runs/x")
# Recipes of many kinds: pipelines, context, experts, latent attention, fp8, a ramp.
RECIPES = ("llama3_8b", "llama3_70b", "gpt3_175b", "deepseek_v3", "qwen3_30b_a3b", "mixtral_8x7b", "llama3_8b_fp8")
KEYS = {
    **dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "dp_replicate", "dp_shard"), "parallelism"),
    **dict.fromkeys(("virtual_stages", "micro_batch_group", "first_layers"), "parallelism.pipeline"),
    **dict.fromkeys(("n_layers", "n_heads", "n_kv_heads", "d_model", "d_ffn", "max_seq_len"), "model"),
    **dict.fromkeys(("n_experts", "top_k", "d_expert", "d_shared", "first_dense"), "model.moe"),
    **dict.fromkeys(("n_groups", "group_top_k"), "model.moe.router"),
    **dict.fromkeys(("q_rank", "kv_rank", "d_rope"), "model.attention"),
    **dict.fromkeys(("global_batch", "micro_batch"), "train"),
    **dict.fromkeys(("start", "increment"), "train.batch_ramp"),
    "layers": "parallelism.recompute",
    "seq_len": "data",
    "ranks": "launcher",
    "warmup_steps": "optim.schedule",
}
MISTAKES = [20, pytest.param(200, marks=pytest.mark.slow)]
FACTORS = (0.5, 2, 3, 5, 7, 1.5)
OFFSETS = (-2, -1, 1, 2, 3, 6)
_NUMBERS = r"(\d+(?:, \d+)*(?: or \d+)?)"
_BARE = re.compile(rf"; (?:set it to|try) {_NUMBERS}(?=, or |   |$|;)")
_NAMED = re.compile(rf"(?:try|, or) ([a-z_]+(?:\.[a-z_]+)+)={_NUMBERS}(?=, or |   |$|;)")


@cache
def plain(name: str) -> str:
    return compose(name).recipe.model_dump_json()


def machine(recipe: Recipe) -> Target:
    return H200.model_copy(update={"gpus": max(8, recipe.launcher.ranks if recipe.launcher.ranks != "auto" else 8)})


def put(content: dict, key: str, value: int) -> bool:
    """Sets a number that is there, or open."""
    *above, last = key.split(".")
    for part in above:
        content = content.get(part)
        if not isinstance(content, dict):
            return False
    if not isinstance(content.get(last), int | str):
        return False
    content[last] = value
    return True


def broken(content: dict, target: Target, facts: Facts) -> list[Problem]:
    try:
        settle(Recipe.model_validate_json(json.dumps(content)), target, facts)
    except RecipeError as error:
        return error.problems
    except DataError:
        pass
    return []


def suggestions(problem: Problem) -> list[tuple[str, int]]:
    """Every key and number that a message suggests alone."""
    _, _, text = problem.message.rpartition("; ")
    text = f"; {text}"
    groups = [(problem.key, match) for match in _BARE.findall(text)] + _NAMED.findall(text)
    return [(key, int(number)) for key, numbers in groups for number in re.findall(r"\d+", numbers)]


def assert_mended(content: dict, target: Target, facts: Facts) -> int:
    problems = broken(content, target, facts)
    before = {p.code for p in problems}
    tried = 0
    for problem in problems:
        assert not re.search(r"=(?:$|,)|try (?:$|,|or)", problem.message), problem.message
        for key, number in suggestions(problem):
            changed = json.loads(json.dumps(content))
            *above, last = key.split(".")
            where = changed
            for part in above:
                where = where[part]
            where[last] = number
            after = {p.code for p in broken(changed, target, facts)}
            assert problem.code not in after, (problem.message, key, number)
            assert after <= before, (problem.message, key, number, after)
            tried += 1
    return tried


@pytest.mark.parametrize("code", EXAMPLES)
def test_what_examples_are_told_mends_them(code):
    one = EXAMPLES[code]
    assert_mended(json.loads(composed(one.recipe, one.overrides).recipe.model_dump_json()), one.target, one.facts)


@pytest.mark.parametrize("mistakes", MISTAKES)
@pytest.mark.parametrize("name", RECIPES)
def test_what_single_mistakes_are_told_mends_them(name, mistakes):
    draw, tried = random.Random(name), 0
    for _ in range(mistakes):
        content = json.loads(plain(name))
        last, section = draw.choice(sorted(KEYS.items()))
        here = content
        for part in section.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        old = here.get(last) if isinstance(here, dict) else None
        new = draw.choice(
            [int((old if isinstance(old, int) else 4) * f) for f in FACTORS]
            + [(old if isinstance(old, int) else 4) + o for o in OFFSETS]
        )
        if new > 0 and put(content, f"{section}.{last}", new):
            tried += assert_mended(content, machine(Recipe.model_validate_json(plain(name))), NOTHING)
    assert tried > mistakes / 4, tried
