"""Planted bugs: a line of shipped source is replaced before the module is imported, or in the functions of a module
that has been imported and has not run yet."""

import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

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
    """From now on this process runs the project with the patches: call it before any task runs.

    Modules that are loaded already keep everything but the functions that a patch touches. Where it touches what is
    computed as a module is imported, all of the project is imported anew.
    """
    if not patches:
        return
    if not all(_put_into_loaded(module, patches) for module in {p.module for p in patches}):
        forget_project()
    sys.meta_path.insert(0, _Finder(patches))


def forget_project() -> None:
    """What is imported of the project from now on is read anew."""
    for name in list(sys.modules):
        if name.split(".")[0] in PROJECT:
            del sys.modules[name]


def _put_into_loaded(name: str, patches: Sequence[Patch]) -> bool:
    """Gives the functions of a loaded module their patched code. -> False, nothing having been changed, when the
    patches touch something else; True, too, where the module is not loaded: its import finds the patches."""
    if name not in sys.modules:
        return True
    module = sys.modules[name]
    source = Path(module.__file__).read_text()
    for patch in patches:
        if patch.module == name:
            source = patch.apply(source)
    before = module.__spec__.loader.get_code(name)
    after = compile(source, module.__file__, "exec", dont_inherit=True)
    new_codes = _changed(before, after)
    functions = [_function_of(module, code) for code in new_codes]
    if not functions or None in functions:
        return False
    for function in functions:
        function.__code__ = new_codes[function.__code__]
    return True


def _function_of(module: ModuleType, code: CodeType) -> FunctionType | None:
    """The function or method that has a code, by its name. None where it is not found, as what is run once only while
    the module is imported."""
    found: object = module
    for part in code.co_qualname.split("."):
        found = vars(found).get(part)
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        if found is None:
            return None
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    if not isinstance(found, FunctionType) or found.__code__ != code:
        return None
    return found


def _changed(before: CodeType, after: CodeType) -> dict[CodeType, CodeType]:
    """The codes of functions that differ, old -> new: of functions in functions the outermost. Empty when anything else
    differs, or what a function takes from around it."""
    if _around_functions(before) != _around_functions(after):
        return {}
    found: dict[CodeType, CodeType] = {}
    for old, new in zip(_inner(before), _inner(after), strict=True):
        if old == new:
            continue
        if old.co_flags & inspect.CO_OPTIMIZED:
            if (old.co_name, old.co_freevars) != (new.co_name, new.co_freevars):
                return {}
            found[old] = new
            continue
        inside = _changed(old, new)
        if not inside and _text(old) != _text(new):
            return {}
        found |= inside
    return found


def _inner(code: CodeType) -> list[CodeType]:
    return [one for one in code.co_consts if isinstance(one, CodeType)]


def _around_functions(code: CodeType) -> tuple:
    """What a module or a class body does, whatever lines it stands in."""
    constants = ["code" if isinstance(one, CodeType) else one for one in code.co_consts]
    return code.co_name, code.co_code, repr(constants), code.co_names, code.co_freevars, code.co_cellvars


def _text(code: CodeType) -> tuple:
    return _around_functions(code), [_text(one) for one in _inner(code)]


@contextmanager
def planted(patch: Patch) -> Iterator[None]:
    """While entered, functions of a module that is loaded have a patch in them."""
    module = importlib.import_module(patch.module)
    before = module.__spec__.loader.get_code(patch.module)
    after = compile(patch.apply(Path(module.__file__).read_text()), module.__file__, "exec", dont_inherit=True)
    new_codes = _changed(before, after)
    functions = [_function_of(module, code) for code in new_codes]
    assert functions, f"{patch} touches what runs once, as the module is imported"
    assert None not in functions, f"{patch} touches a function that is not found by its name"
    olds = [function.__code__ for function in functions]
    for function in functions:
        function.__code__ = new_codes[function.__code__]
    try:
        yield
    finally:
        for function, old in zip(functions, olds, strict=True):
            function.__code__ = old
