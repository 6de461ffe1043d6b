"""Only models know families: what is counted, checked, searched, planned, split and run asks a part's facts."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "megaspec"
ROOMS = ("estimate", "rules", "search", "resolve", "plan", "parallelism", "runtime")
BRANDS = re.compile(r"llama|gpt|mixtral|mistral|qwen|deepseek|gemma|olmo|phi\d", re.IGNORECASE)
# A way to stretch rotary frequencies is named after the model that brought it.
ALLOWED = re.compile(r"Llama3RopeScaling|llama3\b|Llama 3 has 1 and 4|model=gpt2_124m")
# What all families have in common.
SHARED = ("megaspec.model.builders", "megaspec.model.part_builders", "megaspec.model.spec")


def files() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def brands_in(tree: ast.Module) -> Iterator[str]:
    """Names of families in code and in texts; docstrings and comments may say what a number was measured on."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        words = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.append(node.value)
        for field in ("id", "attr", "name", "arg", "module"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                words.append(word)
        for word in words:
            if BRANDS.search(ALLOWED.sub("", word)):
                yield f"line {getattr(node, 'lineno', '?')}: {word}"


def family_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            modules.append(node.module)
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        for module in modules:
            if module.startswith("megaspec.model.") and module not in SHARED:
                yield f"line {node.lineno}: {module}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_family_is_known(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [*brands_in(tree), *family_imports(tree)]


def test_a_family_would_be_found() -> None:
    tree = ast.parse("from megaspec.model.decoder.spec import DecoderSpec\nif model.kind == 'llama':\n    pass\n")
    assert len(list(brands_in(tree))) == 1
    assert len(list(family_imports(tree))) == 1
