"""Planted bugs: a line of shipped source is replaced before the module is imported."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

PROJECT = ("megaspec", "megaspec_kernels", "megaspec_launchers")


@dataclass(frozen=True)
class Patch:
    """`new` in place of `old`, which occurs exactly once in the module's source."""

    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The patched source. AssertionError when the original is not there once."""
        count = source.count(self.old)
        assert count == 1, f"{self.module} holds {self.old!r} {count} times, a patch needs it once"
        return source.replace(self.old, self.new)


def check(patch: Patch) -> None:
    """Refuses a patch whose original line is not in the source."""
    spec = find_spec(patch.module)
    assert spec is not None, f"no module {patch.module}"
    compile(patch.apply(Path(spec.origin).read_text()), spec.origin, "exec")


class _PatchedLoader(importlib.machinery.SourceFileLoader):
    patches: tuple[Patch, ...] = ()

    def get_code(self, fullname: str) -> CodeType:
        # past any cached bytecode, which would be the unpatched module's
        source = Path(self.path).read_text()
        for patch in self.patches:
            source = patch.apply(source)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches: Sequence[Patch]):
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        mine = tuple(p for p in self._patches if p.module == name)
        if not mine:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = _PatchedLoader(name, spec.origin)
        loader.patches = mine
        spec.loader = loader
        return spec


def install(patches: Sequence[Patch]) -> None:
    """From now on this process imports the project with the patches: call it before any task runs."""
    if not patches:
        return
    for name in list(sys.modules):
        if name.split(".")[0] in PROJECT:
            del sys.modules[name]
    sys.meta_path.insert(0, _Finder(patches))
