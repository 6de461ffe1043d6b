"""Mutated recipes through typing and resolving: typed errors only, quickly, and never a value that was set changed."""

import json
from copy import deepcopy
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from megaspec.compose.compose import compose
from megaspec.compose.paths import recipes_dir
from megaspec.core.errors import DataError, Problem, RecipeError
from megaspec.core.frozen import AUTO, parse_count
from megaspec.core.problems import field_paths, typed_problems, value_at
from megaspec.recipe import SECTIONS, Recipe
from megaspec.resolve.resolver import Settled, settle
from megaspec.rules.examples import CPU, FACTS, H200, V100
from megaspec.rules.run_facts import Facts
from tests.pace import within

NAMES = sorted(p.stem for p in recipes_dir().glob("*.yaml"))
TARGETS = (
    CPU,
    H200,
    V100,
    H200.model_copy(update={"gpus": 2048}),
    H200.model_copy(update={"gpus": 2048, "sm": 100}),
    CPU.model_copy(update={"world_size": 4, "local_ranks": 4}),
)
NOTHING_KNOWN = Facts(run_dir="runs/x")
LONGEST = 1.0
# A search for a layout weighs thousands of them on 2048 GPUs.
LONGEST_SEARCH = 10.0
NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 96, 127, 128, 256, 1000, 1024, 8192, 10**5, 10**6, 10**9)
HUGE = (2**31, 2**63 - 1, 2**63, 10**18, 10**30, 10**400, 1e308, 1e400, -1e308, float("nan"), 5e-324, 0.1, 1.5, -0.5)
TEXTS = (
    "",
    "auto",
    "???",
    "1e6",
    "15T",
    "64k",
    "1.5",
    "yes",
    "on",
    "0x10",
    "none",
    "null",
    "a\nb",
    "\0",
    "ａ",
    "é" * 300,
    "${x}",
)
NESTED = ([], {}, [0], [1, 2], [[]], [None], {"kind": "x"}, {"kind": None}, {"a": {"b": 1}}, [{"kind": "aux"}], [{}])
DEGREES = ("tp", "pp", "cp", "ep", "etp", "dp_replicate", "dp_shard")


def words(annotation: Any) -> set[str]:
    """Every word that some field below an annotation may say."""
    if get_origin(annotation) is Literal:
        return {w for w in get_args(annotation) if isinstance(w, str)}
    if get_origin(annotation) is dict:
        return set()
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    inner = [f.annotation for f in annotation.model_fields.values()] if is_model else get_args(annotation)
    return {word for one in inner for word in words(one)}


def fields(annotation: Any, prefix: str = "") -> dict[str, Any]:
    """The annotation of every field below one, by its dotted path; of fields of the same path the last."""
    if get_origin(annotation) is dict:
        # the names are the user's own, and what stands below them stands elsewhere, too
        return {}
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return {k: v for inner in get_args(annotation) for k, v in fields(inner, prefix).items()}
    found = {}
    for name, field in annotation.model_fields.items():
        found[f"{prefix}{name}"] = field.annotation
        found |= fields(field.annotation, f"{prefix}{name}.")
    return found


def plausible(annotation: Any) -> list[Any]:
    """Values that a field of an annotation may well hold."""
    text, found = str(annotation), sorted(words(annotation))
    found += [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 1024, 10**9, 10**18] if "int" in text else []
    found += [0.0, 0.1, 0.5, 1.0, 1.25, 3.0] if "float" in text else []
    found += [True, False] if "bool" in text else []
    return found + ([None] if "None" in text else [])


FIELDS = {k: plausible(v) for k, v in fields(Recipe).items()}
FIELDS = {k: v for k, v in FIELDS.items() if v and not k.endswith("kind") and ".blend" not in k}
SECTIONS_MADE = {
    "parallelism": {
        **dict.fromkeys(("tp", "pp", "cp", "ep", "dp_strategy"), "auto"),
        "recompute": {"kind": "auto"},
        "pipeline": {"virtual_stages": "auto"},
    },
    "model.moe": {"n_experts": 8},
    "model.attention": {"kind": "mla", "q_rank": 32, "kv_rank": 32, "d_nope": 16, "d_rope": 16, "d_value": 32},
    "train.batch_ramp": {"start": 4, "increment": 4, "samples": 64},
    "model.moe.router.losses": [{"kind": "aux", "coefficient": 0.01}],
    "model.moe.layers": [0, 1, 1, 1],
    "parallelism.recompute.parts": ["norm", "moe"],
    "parallelism.context.factors": [2, 2],
    "parallelism.pipeline.layout": "E(t|)*3tL",
}
PATHS = field_paths(Recipe)
WORDS = sorted(words(Recipe))


@cache
def plain(name: str) -> str:
    return compose(name).recipe.model_dump_json()


def leaves(content: Any, prefix: str = "") -> dict[str, Any]:
    """Every plain value of plain data by its dotted path."""
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else None
    if parts is None:
        return {prefix: content}
    return {
        k: v for name, inner in parts for k, v in leaves(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def paths_of(content: Any) -> list[str]:
    """Every dotted path of plain data, sections included."""
    every = leaves(content)
    return sorted({k.rsplit(".", n)[0] for k in every for n in range(k.count(".") + 1)})


def put(content: Any, key: str, value: Any, *, name: str | None = None) -> None:
    """Sets a path, or deletes it (`...`), or moves it to another name, where its section exists."""
    section, _, last = key.rpartition(".")
    here = value_at(content, section) if section else content
    if isinstance(here, list) and last.isdigit() and int(last) < len(here):
        here[int(last)] = None if value is ... else value
    elif isinstance(here, dict) and value is ...:
        here.pop(last, None)
    elif isinstance(here, dict):
        here[last] = value


VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(HUGE),
    st.sampled_from(TEXTS),
    st.sampled_from(NESTED),
    st.sampled_from(WORDS),
    st.sampled_from((None, True, False)),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)


@st.composite
def likely(draw: st.DrawFn) -> dict[str, Any]:
    """A shipped recipe as plain data, in which some fields say something else that they may say."""
    content = json.loads(plain(draw(st.sampled_from(NAMES))))
    for key in draw(st.lists(st.sampled_from(sorted(SECTIONS_MADE)), max_size=3)):
        put(content, key, deepcopy(SECTIONS_MADE[key]))
    for _ in range(draw(st.integers(1, 4))):
        known = [k for k in paths_of(content) if k in FIELDS]
        near = st.sampled_from([k for k in known if k.startswith(("parallelism.", "model.", "train."))])
        key = draw(st.one_of(near, st.sampled_from(known)))
        put(content, key, draw(st.sampled_from(FIELDS[key])))
    return content


@st.composite
def mutants(draw: st.DrawFn) -> dict[str, Any]:
    """A shipped recipe as plain data, changed in one to six places."""
    content = json.loads(plain(draw(st.sampled_from(NAMES))))
    for _ in range(draw(st.integers(1, 6))):
        here = st.sampled_from(paths_of(content) or [""])
        match draw(st.sampled_from(("set", "set", "add", "word", "degree", "degree", "delete", "rename", "swap"))):
            case "set":
                put(content, draw(here), deepcopy(draw(VALUES)))
            case "add":
                put(content, draw(st.sampled_from(PATHS)), deepcopy(draw(VALUES)))
            case "word":
                put(content, draw(st.sampled_from(PATHS)), draw(st.sampled_from((*WORDS, True, 1, 2, 4))))
            case "degree":
                put(content, f"parallelism.{draw(st.sampled_from(DEGREES))}", draw(st.sampled_from(NUMBERS)))
            case "delete":
                put(content, draw(here), ...)
            case "rename":
                key = draw(here)
                value = deepcopy(value_at(content, key))
                put(content, key, ...)
                put(content, draw(st.sampled_from((f"{key}s", key[:-1] or "x", "model.x", "x"))), value)
            case "swap":
                one, other = draw(here), draw(here)
                first, second = deepcopy(value_at(content, one)), deepcopy(value_at(content, other))
                put(content, one, second)
                put(content, other, first)
    return content


def typed(content: dict[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise RecipeError(
            typed_problems(error, model=Recipe, content=content, origins={}, choices=dict.fromkeys(SECTIONS, ("a",)))
        ) from None


def check(content: dict[str, Any], target: Any, facts: Facts) -> str:
    """How it ended: "typed", "rules", "data" or "runs"."""
    problems, ending = [], "typed"
    searches = any(value == AUTO for key, value in leaves(content.get("parallelism", {})).items() if key != "tp")
    with within(LONGEST_SEARCH if searches else LONGEST, content):
        try:
            recipe = typed(content)
            ending = "rules"
            settled = settle(recipe, target, facts)
            settled.spec((settled.samples(),))
            ending = "runs"
            holds_what_was_set(content, settled)
        except RecipeError as error:
            problems = error.problems or [Problem("", "")]
        except DataError:
            ending = "data"
    for problem in problems:
        assert problem.message.strip(), problem
        assert problem.message.isprintable(), problem
        assert len(problem.message) < 1000, problem
        assert problem.code, problem
    return ending


def holds_what_was_set(content: dict[str, Any], settled: Settled) -> None:
    """Whatever the user wrote is in the filled recipe, with its value and type."""
    held = leaves(json.loads(settled.recipe.model_dump_json()))
    for key, value in leaves(content).items():
        if value == AUTO or value in ([], {}):
            continue
        assert key in held, key
        assert type(held[key]) is type(value) or isinstance(value, int | float | str), (key, value, held[key])
        assert isinstance(held[key], bool) == isinstance(value, bool), (key, value, held[key])
        wanted = parse_count(value) if isinstance(held[key], int) and not isinstance(value, bool) else value
        # of a large whole number a field that takes fractions holds the nearest one that it can
        wanted = float(value) if isinstance(held[key], float) else wanted
        assert held[key] == wanted, (key, value, held[key])


@given(st.one_of(mutants(), likely(), likely()), st.sampled_from(TARGETS), st.sampled_from((FACTS, NOTHING_KNOWN)))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_mutated_recipes(content, target, facts):
    check(content, target, facts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.one_of(mutants(), likely(), likely()), st.sampled_from(TARGETS), st.sampled_from((FACTS, NOTHING_KNOWN)))
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_ten_thousand_mutated_recipes(content, target, facts):
    check(content, target, facts)
