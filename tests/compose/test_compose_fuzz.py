"""Mutated recipe files and command lines: typed errors only, nothing runs, a second and 200 MB at most."""

import json
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# compose imports it when it first needs it, which no recipe decides
import megaspec.compose.choices  # noqa: F401
from megaspec.compose.compose import compose
from megaspec.compose.paths import recipes_dir
from megaspec.core.errors import Problem, RecipeError
from megaspec.core.problems import field_paths
from megaspec.recipe import Recipe
from tests.pace import within

LONGEST = 1.0
ROOM = 200 * 2**20
CANARY = "megaspec_canary"
# What they import when they first need it, whatever is in the recipe.
LAZY = ("antlr4", "encodings", "hydra", "omegaconf")
SHIPPED = [p.read_text() for p in sorted(recipes_dir().glob("*.yaml"))]

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
WIDE = "k: &k {" + ", ".join(f"a{i}: {i}" for i in range(900)) + "}\nz: [" + ", ".join(["*k"] * 900) + "]\n"
LINES = (
    BOMB,
    WIDE,
    f"x: !!python/object/apply:{CANARY}.run [1]",
    f"x: !!python/object:{CANARY}.Thing {{}}",
    f"x: !!python/module:{CANARY}",
    f"!!python/name:{CANARY}.run : 1",
    f"model: {{_target_: {CANARY}.run}}",
    f"train: {{_target_: {CANARY}.run, _args_: [1], _partial_: true}}",
    f"run_dir: ${{{CANARY}:1}}",
    "run_dir: ${oc.env:HOME}",
    "name: ${oc.decode:1}",
    "name: ${name}",
    "train: ${train}",
    "optim: {lr: ${optim.lr}}",
    "run_dir: ${data}",
    "defaults: [hello, {override /model: hello}, {override /model: gpt2_124m}]",
    "defaults: [fuzz]",
    "defaults: [../../etc/passwd]",
    "defaults: [{override /model: ../../x}]",
    "defaults: {a: 1}",
    "defaults: [_self_, hello, _self_]",
    "defaults: [hello, hello]",
    "hydra: {run: {dir: /tmp/x}, searchpath: [file:///]}",
    "x: " + "[" * 200,
    "x: " + "{a: " * 200,
    "- " * 300 + "x",
    "train: {steps: " + "9" * 5000 + "}",
    "train: {steps: 1e999}",
    "optim: {lr: 1e-5000}",
    "optim: {lr: .nan}",
    "train: {seed: -0}",
    "<<: {a: 1}",
    "? {a: 1}\n: 1",
    "? [a, b]\n: 1",
    "a: 1\na: 2",
    "--- 1\n--- 2",
    "%YAML 1.2\n---\na: 1",
    "%TAG ! tag:x,2000:\n---\na: !x 1",
    "a: &a {b: *a}",
    "a: |\n  x\n y",
    "a: >\n\n\n  x",
    'a: "\\x00\\u202e\\ud800"',
    "a: '\u202e\u0000'",
    "\ufeffa: 1",
    "a: \u2028b",
    "\ta: 1",
    "é: 1\né: 2",
    "model.n_layers: 3",
    "model: null",
    "model: []",
    "data: {blend: {prefix: x}}",
    "data: {blend: [{prefix: x}, null, 3]}",
    "parallelism: auto",
    "null: 1",
    "true: 1",
    "3: 1",
    "'': 1",
    "name: " + "n" * 5000,
    "# @package model",
    "#" * 1000,
)
PIECES = (
    "[",
    "]",
    "{",
    "}",
    ":",
    "- ",
    "&a ",
    "*a",
    "!!str ",
    "!x ",
    "|",
    ">",
    "'",
    '"',
    "#",
    "%",
    "@",
    "`",
    "\t",
    "\r",
    "\0",
    "???",
    "${",
    "}}",
    ",",
    "\u202e",
    "😀",
    "\ufeff",
    "null",
    "-1",
    "0x1",
    "1e400",
    "\n\n",
    "\\",
)
KEYS = (
    "train.steps",
    "optim.lr",
    "model.n_layers",
    "data.blend",
    "data.blend.0.prefix",
    "model",
    "train",
    "name",
    "run_dir",
    "model.moe",
    "parallelism.tp",
    "optim.schedule",
    "a",
    "model.x.y.z",
    "hydra.run.dir",
    "recipe",
    "data.split",
    "train.sample",
    "x" * 3000,
    ".".join("a" * 300),
    "",
    ".",
    "a..b",
    "_target_",
    "model._target_",
    "é",
    "data.blend.-1",
    "data.blend.99999999999999999999",
    "data.split.0.1",
    "defaults",
)
VALUES = (
    "1",
    "-1",
    "1.5",
    "1e6",
    "1e400",
    "9" * 5000,
    "null",
    "true",
    "on",
    "nan",
    "inf",
    "???",
    "",
    "hello",
    "a b",
    "'a b'",
    '"',
    "'",
    "\\",
    "\\'",
    "a,b",
    "[1,2",
    "[1,2]",
    "[" * 300,
    "[" * 60 + "]" * 60,
    "{a:" * 60 + "1" + "}" * 60,
    "{" * 300,
    "{a: 1, a: 2}",
    "{}",
    "[]",
    "[[]]",
    "{1: 2}",
    "{null: 1}",
    "range(1,3)",
    "range(1,999999999)",
    "choice(1,2)",
    "interval(1,2)",
    "glob(*)",
    "shuffle(1,2)",
    "sort(3,2,1)",
    "int(3)",
    "int('x')",
    "float(nan)",
    "json_str({a: 1})",
    "extend_list(1)",
    "bool(on)",
    "str(1)",
    f"{CANARY}.run",
    f"{{_target_: {CANARY}.run}}",
    f"${{{CANARY}:1}}",
    "${oc.env:HOME}",
    "${train.steps}",
    "${..}",
    "${" * 200,
    "${a" * 50 + "}" * 50,
    "$" * 100,
    "\u202e",
    "\0",
    "\n",
    "a\nb: 1",
    "😀",
    "é",
    "!!python/object/apply:os.system",
    "${.lr}",
    "${......lr}",
    "${data.blend}",
    "${model}",
    "x" * 10000,
    "(" * 300,
    "tag(a,b)",
    "tag(" * 50,
    "[" * 5000,
    "[" * 2000 + "]" * 2000,
    "{a:" * 2000 + "1" + "}" * 2000,
    "(" * 5000,
    "1," * 5000,
    "[" + "1," * 20000 + "1]",
    "x" * 10**6,
    "a." * 5000,
    "'" * 5001,
)

FIELDS = field_paths(Recipe)
SANE = (
    "1",
    "2",
    "1.5",
    "64k",
    "null",
    "true",
    "auto",
    "hello",
    "[1,2]",
    "[]",
    "{}",
    "{a: 1}",
    "{kind: llama}",
    "${train.steps}",
    "${model}",
    "${.x}",
    "???",
    "a b",
)
EVIL = {
    "aliases of lists": BOMB,
    "aliases of mappings": WIDE,
    "many keys": "defaults: [hello]\ntrain:\n" + "".join(f"  k{i}: 1\n" for i in range(15_000)),
    "many sections": "defaults: [hello]\n" + "".join(f"k{i}: {{a: 1}}\n" for i in range(9000)),
    "long keys": "defaults: [hello]\n"
    + "".join(f"{' ' * i}{'k' * 7000}:\n" for i in range(30))
    + f"{' ' * 30}[{'1,' * 1500}1]",
    "keys as long as may be": "defaults: [hello]\n"
    + "".join(f"{' ' * i}{'k' * 99}:\n" for i in range(29))
    + f"{' ' * 29}[{'1,' * 18_000}1]",
    "references": "defaults: [hello]\nabout: {purpose: '" + "${name}" * 20_000 + "'}",
    "references to sections": "defaults: [hello]\nx: &x [" + "1," * 2000 + "1]\ny: [" + "'${x}'," * 90 + "1]",
    "long text": "defaults: [hello]\nname: " + "x" * 200_000,
    "long numbers": "defaults: [hello]\nx: [" + f"{'9' * 31}," * 7000 + "1]",
    "problems": "defaults: [hello]\ndata: {blend: [" + "{prefix: 1}," * 6000 + "{}]}",
    "deep": "x: " + "[" * 120_000,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder, where a module lies that must never be imported."""
    root = tmp_path_factory.mktemp("fuzz")
    (root / "recipes").mkdir()
    (root / f"{CANARY}.py").write_text("raise SystemExit('imported')\n")
    before = Path.cwd()
    os.chdir(root)
    sys.path.insert(0, str(root))
    yield root
    sys.path.remove(str(root))
    os.chdir(before)


@contextmanager
def bounded_memory(room: int) -> Iterator[None]:
    """MemoryError for whoever takes more than `room` bytes on top of what the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check(recipe: str, overrides: Sequence[str]) -> str:
    """How it ended: "refused" or "composed"."""
    modules, problems, ending = set(sys.modules), [], "refused"
    with within(LONGEST, overrides), bounded_memory(ROOM):
        try:
            composed = compose(recipe, overrides)
            ending = "composed"
        except RecipeError as error:
            problems = error.problems or [Problem("", "")]
    imported = [name for name in set(sys.modules) - modules if name.partition(".")[0] not in LAZY]
    assert not imported, imported
    for problem in problems:
        assert problem.message.strip(), problem
        assert str(problem).isprintable(), problem
    if ending == "composed":
        again = Recipe.model_validate_json(composed.recipe.model_dump_json())
        assert again == composed.recipe
        assert json.loads(composed.recipe.model_dump_json())
    return ending


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A shipped recipe's text, changed in one to four places."""
    lines = draw(st.sampled_from(SHIPPED)).splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(lines) - 1)))
        match draw(
            st.sampled_from(("insert", "insert", "delete", "indent", "piece", "twice", "value", "swap", "cut", "text"))
        ):
            case "insert":
                lines.insert(at, draw(st.sampled_from(LINES)))
            case "delete":
                del lines[at : at + 1]
            case "indent":
                lines[at : at + 1] = [" " * draw(st.integers(0, 5)) + line.lstrip() for line in lines[at : at + 1]]
            case "piece":
                where = draw(st.integers(0, 60))
                lines[at : at + 1] = [
                    f"{x[:where]}{draw(st.sampled_from(PIECES))}{x[where:]}" for x in lines[at : at + 1]
                ]
            case "twice":
                lines.insert(draw(st.integers(0, len(lines))), lines[at] if lines else "a: 1")
            case "value":
                value = draw(st.sampled_from(VALUES))
                lines[at : at + 1] = [f"{x.partition(':')[0]}: {value}" for x in lines[at : at + 1]]
            case "swap":
                lines[at : at + 2] = lines[at : at + 2][::-1]
            case "cut":
                lines[at : at + 1] = [x[: draw(st.integers(0, 40))] for x in lines[at : at + 1]]
            case "text":
                lines.insert(at, draw(st.text(max_size=20)))
    raw = "\n".join(lines).encode("utf-8", "surrogatepass")
    return raw + draw(st.one_of(st.just(b""), st.binary(max_size=4)))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Words as someone could type them after `megaspec train`."""
    one = st.one_of(
        st.builds(
            lambda sign, key, value: f"{sign}{key}={value}",
            st.sampled_from(("", "", "", "+", "++", "~", "@")),
            st.sampled_from(KEYS),
            st.one_of(st.sampled_from(VALUES), st.text(max_size=8)),
        ),
        st.builds(lambda key: f"~{key}", st.sampled_from(KEYS)),
        st.sampled_from((*KEYS, *VALUES)),
        st.text(max_size=12),
    )
    likely = st.builds(lambda key, value: f"{key}={value}", st.sampled_from(FIELDS), st.sampled_from(SANE))
    return draw(st.one_of(st.lists(one, min_size=1, max_size=4), st.lists(likely, min_size=1, max_size=4)))


def refuse_or_compose(folder: Path, raw: bytes, overrides: list[str]) -> str:
    (folder / "recipes" / "fuzz.yaml").write_bytes(raw)
    return check("fuzz", overrides)


@pytest.mark.parametrize("text", EVIL.values(), ids=EVIL)
def test_what_would_take_time_or_memory(folder, text):
    assert refuse_or_compose(folder, text.encode(), []) == "refused"


@given(raw=files(), overrides=st.one_of(st.just([]), command_lines()))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_mutated_files(folder, raw, overrides):
    refuse_or_compose(folder, raw, overrides)


@given(overrides=command_lines())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_mutated_command_lines(folder, overrides):
    check("hello", overrides)
