"""What the sources may not say, and tables that have to agree with the folders. Part of `make lint`."""

import ast
import shutil
import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from megaspec.core.problems import field_paths
from megaspec.recipe import SECTIONS, Recipe
from megaspec.rules.unbuilt import UNBUILT
from megaspec.spec import Spec
from megaspec.sweep.multirun import SWEEPS

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for room in ("megaspec", "kernels", "launchers") for p in (ROOT / room).rglob("*.py"))
# Where parity is held in fp64, "in fp32" means at least fp32: torch.promote_types, never .float().
WIDE = ("megaspec/nn/", "megaspec/parallelism/")
# Reading a file may execute nothing that is in it.
NO_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
NO_CALLS = {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "__import__"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(tree: ast.AST) -> list[tuple[str, int]]:
    return [(name_of(n.func), n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Call)]


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    """True for an except of all errors that does not hand the error on (to another thread, or as our own)."""
    catches_all = handler.type is None or name_of(handler.type) in ("Exception", "BaseException")
    used = {n.id for part in handler.body for n in ast.walk(part) if isinstance(n, ast.Name)}
    return catches_all and handler.name not in used


def violations(tree: ast.AST, *, wide: bool) -> list[str]:
    found = []
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        found += [f"{node.lineno}: import {m}" for m in modules if m.partition(".")[0] in NO_MODULES]
        if isinstance(node, ast.ExceptHandler) and swallows_everything(node):
            found.append(f"{node.lineno}: an except that catches everything and drops it")
    for name, line in calls(tree):
        if name in NO_CALLS:
            found.append(f"{line}: {name}(")
        if wide and name.endswith(".float"):
            found.append(f"{line}: .float() breaks fp64 parity; use torch.promote_types")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_source(path):
    wide = label(path).startswith(WIDE) or path.name == "reference.py"
    assert violations(tree_of(path), wide=wide) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec(x)",
        "torch.load(p)",
        "yaml.load(s)",
        "x.float()",
        "try:\n  f()\nexcept Exception:\n  pass",
        "try:\n  f()\nexcept:\n  pass",
        "try:\n  f()\nexcept BaseException as error:\n  pass",
    ],
)
def test_what_is_refused(text):
    assert len(violations(ast.parse(text), wide=True)) == 1


@pytest.mark.parametrize(
    "text", ["model.eval()", "torch.finfo(x)", "yaml.parse(s)", "try:\n  f()\nexcept Exception as e:\n  put(e)"]
)
def test_what_is_allowed(text):
    assert violations(ast.parse(text), wide=True) == []


def test_every_field_is_read_by_some_code():
    """A key that nothing reads would be ignored without a word."""
    read = set()
    for path in SOURCES:
        tree = tree_of(path)
        if path.name in ("spec.py", "recipe.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Call) and name_of(node.func) == "getattr" and len(node.args) > 1:
                read |= {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()
    paths = {*field_paths(Recipe), *Spec.model_fields}
    later = tuple(path for one in UNBUILT for path in one.fields)
    unread = sorted(p for p in paths if p.rpartition(".")[2] not in read and not p.startswith(later))
    assert unread == []


def test_every_section_is_typed_and_built_where_the_table_says():
    assert set(SECTIONS) == {p.name for p in (ROOT / "conf").iterdir() if p.is_dir()}
    for name, section in SECTIONS.items():
        field = Recipe.model_fields[name].annotation
        classes = [field] if isinstance(field, type) else list(field.__args__)
        assert {c.__module__ for c in classes} == set(section.typed), name
        module, _, attribute = section.built.partition(":")
        assert hasattr(import_module(module), attribute), name


def test_package_files_stay_empty():
    """Importing a spec must not drag in what lies beside it; only the public surface of megaspec is filled, lazily."""
    filled = [label(p) for p in SOURCES if p.name == "__init__.py" and p.read_text().strip()]
    assert filled == ["megaspec/__init__.py"]


def test_source_roots_shadow_nothing():
    for folder in ("kernels", "launchers", "conf", "recipes"):
        assert not (ROOT / folder / "__init__.py").exists()


def tracked(root: Path, folder: str) -> list[Path]:
    """The files of a folder that git knows: beside them a user keeps their own."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    done = subprocess.run(["git", "-C", str(root), "ls-files", "-z", "--", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"needs a clone: {done.stderr.strip()}")
    return [root / name for name in done.stdout.split("\0") if name and (root / name).exists()]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_recipe_of_a_users_own_is_none_that_ships(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "recipes").mkdir()
    for name in ("ours", "mine"):
        (tmp_path / "recipes" / f"{name}.yaml").write_text("defaults: [hello]\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "recipes/ours.yaml"], check=True)
    assert tracked(tmp_path, "recipes") == [tmp_path / "recipes" / "ours.yaml"]


def test_yaml_that_ships_is_short_and_says_what_it_is():
    recipes = [path for path in tracked(ROOT, "recipes") if path.suffix == ".yaml"]
    assert recipes
    for path in recipes:
        lines = path.read_text().splitlines()
        assert len(lines) <= 40, path
        assert lines[0].startswith("# "), path


def test_what_runs_leave_in_a_clone_is_ignored():
    assert {"/runs/", f"/{SWEEPS}/"} <= set((ROOT / ".gitignore").read_text().splitlines())
