"""A corpus that ships with Python: its language manual (pydoc_data.topics) and the standard library's docstrings and
sources, read from the interpreter at run time.

The order of the documents is that of a hash of their names, so that every split gets some of each kind; a module's
docstrings stand right before its source. The same interpreter gives the same documents.
"""

import ast
import hashlib
import os
import platform
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "turtledemo"}


@dataclass(frozen=True)
class CorpusUnit:
    """One topic of the manual or one module of the standard library."""

    kind: str
    """`topic` or `module`."""
    name: str
    """Name of the topic, or path of the module within the standard library."""
    bytes: int
    """Size in bytes."""


@cache
def units() -> tuple[CorpusUnit, ...]:
    """Everything in the corpus, in order."""
    found = [CorpusUnit("topic", name, len(text.encode())) for name, text in topics.items()]
    root = _root()
    for folder, below, files in os.walk(root):
        # os.walk goes on into what is left of this list
        below[:] = [name for name in below if name not in _LEFT_OUT]
        for name in files:
            path = Path(folder, name)
            size = path.stat().st_size if name.endswith(".py") else 0
            if size:
                found.append(CorpusUnit("module", path.relative_to(root).as_posix(), size))
    return tuple(sorted(found, key=lambda unit: hashlib.sha256(f"{unit.kind}:{unit.name}".encode()).digest()))


def documents(kind: str, name: str) -> Iterator[str]:
    """The texts of a unit; none when a source is not valid text."""
    if kind == "topic":
        yield topics[name]
        return
    try:
        with tokenize.open(_root() / name) as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    docstrings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                docstrings.append(text)
    if docstrings:
        yield "\n\n".join(docstrings)
    yield source


def identity() -> str:
    """The interpreter and the shape of its corpus, as a line of text."""
    listed = "\n".join(f"{unit.kind}:{unit.name}:{unit.bytes}" for unit in units())
    return f"python {platform.python_version()} {hashlib.sha256(listed.encode()).hexdigest()}"


def content_sha256() -> str:
    """Hash of all texts that the corpus is made of."""
    digest = hashlib.sha256()
    for unit in units():
        raw = topics[unit.name].encode() if unit.kind == "topic" else (_root() / unit.name).read_bytes()
        digest.update(f"{unit.kind}:{unit.name}:{len(raw)}\n".encode())
        digest.update(raw)
    return digest.hexdigest()


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))
