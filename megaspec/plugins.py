"""`--plugin PACKAGE`: the language with the kinds of a package. Torch-free; runtime/plugins.py has the builders.

A package offers PLUGIN, a `Plugin`. Its specs join the kinds that a Recipe chooses among before one is composed; each
names its builder as "module:name", which only ranks import. Only a command line names a package: no recipe and no run
folder ever makes anything be imported.
"""

import ast
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

from megaspec.core.errors import COMMAND_LINE, MegaspecError, Problem, RecipeError
from megaspec.core.frozen import Frozen
from megaspec.core.kinds import Kinds, tags_of
from megaspec.data.spec import SOURCE_KINDS, DataSpec
from megaspec.hf.config import Config
from megaspec.hf.family import Family
from megaspec.hf.table import FAMILIES, add_family
from megaspec.log.spec import SINK_KINDS
from megaspec.model.decoder.spec import ATTENTION_KINDS, POSITIONS_KINDS, DecoderSpec
from megaspec.nn.attention.spec import AttentionSpec
from megaspec.nn.embedding.spec import PositionsSpec
from megaspec.nn.mlp.spec import MLP_KINDS, MlpSpec
from megaspec.nn.norm.spec import NORM_KINDS, NormSpec
from megaspec.optim.spec import OPTIMIZER_KINDS, AdamWSpec, SgdSpec
from megaspec.recipe import MODEL_KINDS
from megaspec.train.spec import LOSS_KINDS

NAME = "PLUGIN"
_FLAG = "--plugin"
_MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")
_BUILDER = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Kind:
    """One kind that a plug-in adds."""

    spec: type[Frozen]
    """Its settings; `kind: Literal["..."]` chooses it."""
    build: str
    """`module:name` of what is called with the settings; see the fields of Plugin."""


@dataclass(frozen=True)
class Plugin:
    """What a package adds. Specs inherit from ours, which say what a plan asks of them."""

    models: tuple[Kind, ...] = ()
    """`model.kind`, from DecoderSpec. Built by `(spec, kernels, part builders) -> Decoder`."""
    norms: tuple[Kind, ...] = ()
    """`model.norm.kind`, from NormSpec. Built by `(width, spec) -> Norm`."""
    mlps: tuple[Kind, ...] = ()
    """`model.mlp.kind`, from MlpSpec. Built by `(d_model, d_ffn, spec, *, out) -> FeedForward`."""
    attentions: tuple[Kind, ...] = ()
    """`model.attention.kind`, from AttentionSpec. Built by `(spec, AttentionSetting) -> Attention`."""
    positions: tuple[Kind, ...] = ()
    """`model.positions.kind`, from PositionsSpec. Built by `(spec, *, d_model, d_head, max_seq_len) ->
    PositionModules`."""
    sources: tuple[Kind, ...] = ()
    """`data.kind`, from DataSpec and with `vocab_size`. Built by `(spec, *, split, seed, segments, vocab_size) ->
    Source`."""
    optimizers: tuple[Kind, ...] = ()
    """`optim.kind`, from AdamWSpec or SgdSpec. Built by `(parameters, spec) -> MasterOptimizer`."""
    losses: tuple[Kind, ...] = ()
    """`train.loss`, in place of cross-entropy. Built by `(spec) -> kernel`, a CrossEntropyKernel."""
    sinks: tuple[Kind, ...] = ()
    """Entries of `log.sinks`. Built by `(spec, run_dir, step) -> Sink`."""
    families: tuple[Family, ...] = ()
    """Hugging Face's model types: how a config.json is said and its tensors are called. They build nothing."""


@dataclass(frozen=True)
class _Place:
    """Where a recipe chooses among kinds, and what one has to be that is added there."""

    key: str
    kinds: Kinds
    bases: tuple[type[Frozen], ...]
    needs: tuple[str, ...] = ()
    """Fields that a spec has to have."""
    says: tuple[str, ...] = ()
    """What a spec has to say of itself, which its base leaves open."""
    called_with: tuple[str, ...] = ("spec",)
    """What a builder is called with, by position."""
    called_by_name: tuple[str, ...] = ()
    """And by name."""


_PLACES = {
    "models": _Place("model", MODEL_KINDS, (DecoderSpec,), called_with=("spec", "kernels", "part_builders")),
    "norms": _Place(
        "model.norm",
        NORM_KINDS,
        (NormSpec,),
        says=("statistics", "vectors", "wide_copies"),
        called_with=("width", "spec"),
    ),
    "mlps": _Place(
        "model.mlp",
        MLP_KINDS,
        (MlpSpec,),
        says=("facts",),
        called_with=("d_model", "d_ffn", "spec"),
        called_by_name=("out",),
    ),
    "attentions": _Place(
        "model.attention", ATTENTION_KINDS, (AttentionSpec,), says=("facts",), called_with=("spec", "setting")
    ),
    "positions": _Place(
        "model.positions", POSITIONS_KINDS, (PositionsSpec,), called_by_name=("d_model", "d_head", "max_seq_len")
    ),
    "sources": _Place(
        "data",
        SOURCE_KINDS,
        (DataSpec,),
        ("seq_len", "vocab_size"),
        called_by_name=("split", "seed", "segments", "vocab_size"),
    ),
    "optimizers": _Place("optim", OPTIMIZER_KINDS, (AdamWSpec, SgdSpec), called_with=("parameters", "spec")),
    "losses": _Place("train.loss", LOSS_KINDS, (Frozen,)),
    "sinks": _Place("log.sinks", SINK_KINDS, (Frozen,), called_with=("spec", "run_dir", "step")),
}


@dataclass
class _Loaded:
    """What this process has taken in."""

    names: list[str] = field(default_factory=list)
    kinds: dict[str, list[Kind]] = field(default_factory=lambda: {place: [] for place in _PLACES})
    families: list[str] = field(default_factory=list)
    """Their model types."""


_LOADED = _Loaded()


def loaded() -> tuple[str, ...]:
    """Import names of the plugins of this process, sorted."""
    return tuple(sorted(_LOADED.names))


def plugin_flags() -> list[str]:
    """What a command line of another process needs to load the same, where it searches the same folders."""
    return [f"{_FLAG}={name}" for name in loaded()]


def added_kinds(place: str) -> tuple[Kind, ...]:
    """What plugins have added to one of the fields of Plugin."""
    return tuple(_LOADED.kinds[place])


def take_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The packages that `--plugin` names, wherever it stands before `--`, and the other words. Raises RecipeError."""
    names, rest = [], list(arguments)
    end = rest.index("--") if "--" in rest else len(rest)
    position = 0
    while position < end:
        word, equals, value = rest[position].partition("=")
        if word != _FLAG:
            position += 1
            continue
        count = 1 if equals else 2
        value = value if equals else next(iter(rest[position + 1 : end]), "")
        if not value or value.startswith("-"):
            raise RecipeError(f"{_FLAG}: its package is missing; give an import name, or a folder such as ./my_plugin")
        names.append(value)
        del rest[position : position + count]
        end -= count
    return names, rest


def load(packages: Sequence[str]) -> None:
    """Adds plugins to the language. A package is an import name, or the path of a folder or file of Python.

    One that is loaded already is passed over. RecipeError: what is wrong with one, all at once; nothing is added then.
    """
    for package in packages:
        name = _import_name(package)
        if name in _LOADED.names:
            continue
        plugin = getattr(_imported(name, package), NAME, None)
        problems = _problems(plugin, name, package)
        if problems:
            raise RecipeError([Problem("", f"{_FLAG} {package}: {p}", COMMAND_LINE, "plugin") for p in problems])
        for place, kind in _all_kinds(plugin):
            _LOADED.kinds[place].append(kind)
            _PLACES[place].kinds.add(kind.spec)
        for family in plugin.families:
            _LOADED.families.append(family.model_type)
            add_family(_guarded(family, name, package))
        _LOADED.names.append(name)


def demand(saved: Mapping[str, Any], label: str) -> None:
    """RecipeError: a saved Spec was made with plugins that this process has not loaded. `label`: what holds it."""
    names = saved.get("plugins", [])
    if not isinstance(names, list) or not all(isinstance(n, str) and n.isprintable() for n in names):
        names = ["?"]
    missing = [n for n in names if n not in _LOADED.names]
    if missing:
        flags = " ".join(f"{_FLAG} {_findable(name)}" for name in missing)
        text = f"{label} was made with plugins, which only a command line can name; add {flags}, or their folders"
        raise RecipeError([Problem("", text, "", "plugin-missing")])


def _findable(name: str) -> str:
    """What `--plugin` takes for an import name here: itself, or where it lies in the folder of this process."""
    for path in (Path(name), Path(f"{name}.py")):
        if "." not in name and not _is_installed(name) and path.exists():
            return f"./{path}"
    return name


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _is_path(package: str) -> bool:
    return "/" in package or package.endswith(".py")


def _import_name(package: str) -> str:
    """The import name of a package; the folder around a path joins the search path."""
    path = Path(package)
    if _is_path(package):
        if not path.exists():
            raise RecipeError(f"{_FLAG} {package}: no such folder or file")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)
        package = path.resolve().stem
    if not all(part.isidentifier() for part in package.split(".")):
        raise RecipeError(f"{_FLAG} {package}: no import name; letters, digits and underscores, with dots between")
    return package


def _imported(name: str, package: str) -> ModuleType:
    had_torch = "torch" in sys.modules
    try:
        module = import_module(name)
    # A package may raise anything while it is imported, and may even ask to leave: whatever it is, it is a mistake in
    # the package, told with its line.
    except (Exception, SystemExit) as error:
        text = f"{_FLAG} {package}: can't be imported: {import_failure(error, name)}"
        if isinstance(error, ModuleNotFoundError) and error.name in _packages_of(name):
            text = f"{_FLAG} {package}: can't be imported: {error}; install it, or give its folder: {_FLAG} ./{name}"
        raise RecipeError([Problem("", text, COMMAND_LINE, "plugin")]) from None
    if not had_torch and "torch" in sys.modules:
        text = f"{_FLAG} {package}: its specs import torch; name builders as text, module:name"
        raise RecipeError([Problem("", text, COMMAND_LINE, "plugin")])
    file = Path(module.__file__ or "").resolve()
    if _is_path(package) and Path(package).resolve() not in (file, file.parent):
        text = f"{_FLAG} {package}: {file} has the same name and is found first; rename yours"
        raise RecipeError([Problem("", text, COMMAND_LINE, "plugin")])
    return module


def import_failure(error: BaseException, name: str) -> str:
    """`file:line: KeyError: 'x'; mend it`: what a module raised while it was imported, and where.

    The line is the last one in the package of `name`: what it calls elsewhere is called from there.
    """
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
        return f"{place}: {type(error).__name__}: {error.msg}; mend it"
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    what = type(error).__name__
    if text:
        what += f": {text}"
    top = name.partition(".")[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.stem == top or top in path.parent.parts:
            return f"{frame.filename}:{frame.lineno}: {what}; mend it"
    return f"{what}; mend it"


def _packages_of(name: str) -> list[str]:
    """`a.b.c` -> a, a.b, a.b.c"""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _all_kinds(plugin: Plugin) -> Iterator[tuple[str, Kind]]:
    for place in _PLACES:
        for kind in getattr(plugin, place):
            yield place, kind


def _problems(plugin: Any, name: str, package: str) -> list[str]:
    """Why a plugin can't be added."""
    if not isinstance(plugin, Plugin):
        return [f"it has no {NAME} = megaspec.plugins.Plugin(...)"]
    found = list(_all_kinds(plugin))
    if not found and not plugin.families:
        return [f"its {NAME} adds nothing; give {', '.join(_PLACES)}, families"]
    taken = _taken_names()
    problems = []
    for place, kind in found:
        wrong = _wrong_kind(_PLACES[place], kind)
        if not wrong:
            name = (place, _tag(kind.spec))
            if name in taken:
                wrong = [f"{_PLACES[place].key}.kind={name[1]} is {taken[name]}'s; choose another name"]
            taken[name] = "its own already"
        problems += [f"{place}: {one}" for one in wrong]
    return [*problems, *_family_problems(plugin.families, name, package)]


def _family_problems(families: Sequence[Any], name: str, package: str) -> Iterator[str]:
    """Why families can't be added."""
    own: set[str] = set()
    for family in families:
        if not isinstance(family, Family):
            yield f"families: {family!r} must be a megaspec.hf.family.Family"
            continue
        model_type = family.model_type
        label = f"families: model_type={model_type!r}"
        if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
            yield f"{label} must be a name such as my_model, as config.json has it"
            continue
        if model_type in FAMILIES or model_type in own:
            whose = "megaspec's"
            if model_type in own:
                whose = "its own already"
            elif model_type in _LOADED.families:
                whose = "another plugin's"
            yield f"families: model_type={model_type} is {whose}; choose another name"
            continue
        own.add(model_type)
        wrong = list(_wrong_family(family))
        yield from (f"families: {model_type}: {one}" for one in wrong)
        if not wrong:
            yield from _unread(family, name, package)


def _wrong_family(family: Family) -> Iterator[str]:
    """What one family lacks."""
    if not isinstance(family.architecture, str) or not family.architecture.isidentifier():
        yield f"architecture={family.architecture!r} must be a class of transformers', such as MyForCausalLM"
    for name in ("read", "write", "names"):
        if not callable(getattr(family, name)):
            yield f"{name}={getattr(family, name)!r} must be a function of one argument"
    if not isinstance(family.kinds, Mapping):
        yield f"kinds={family.kinds!r} must say of parts of a model which kind they are of, such as {{'norm': 'rms'}}"
        return
    for part in family.kinds:
        if part not in DecoderSpec.model_fields:
            yield f"kinds has {part!r}, and model has no such section; there are attention, layer, mlp, norm, positions"


def _unread(family: Family, name: str, package: str) -> Iterator[str]:
    """Why its keys can't be asked for: an empty configuration is read, as `megaspec hf families` does."""
    try:
        section = _guarded(family, name, package).read(Config({}, family.model_type))
    except RecipeError as error:
        yield f"families: {family.model_type}: of an empty configuration, {error.problems[0].message}"
        return
    if not isinstance(section, Mapping) or "kind" not in section:
        yield f"families: {family.model_type}: read gives no section with a kind, such as model: {{kind: decoder}}"


def _guarded(family: Family, name: str, package: str) -> Family:
    """A family of which a mistake is told with its line."""

    def guard(what: str) -> Callable[[Any], Any]:
        function = getattr(family, what)

        def called(argument: Any) -> Any:
            try:
                return function(argument)
            except MegaspecError:
                raise
            # A family's functions may raise anything, as a package may that is imported.
            except Exception as error:
                text = f"{_FLAG} {package}: {what} of {family.model_type}: {import_failure(error, name)}"
                raise RecipeError([Problem("", text, COMMAND_LINE, "plugin")]) from None

        return called

    return replace(family, read=guard("read"), write=guard("write"), names=guard("names"))


def _taken_names() -> dict[tuple[str, str], str]:
    """(place, name of a kind) -> whose it is."""
    taken = {}
    for name, place in _PLACES.items():
        for spec in place.kinds.ours:
            taken[name, _tag(spec)] = "megaspec"
        for spec in place.kinds.added:
            taken[name, _tag(spec)] = "another plugin"
    return taken


def _wrong_kind(place: _Place, kind: Any) -> list[str]:
    """What one kind lacks."""
    spec = getattr(kind, "spec", None)
    if not isinstance(kind, Kind) or not isinstance(spec, type) or not issubclass(spec, Frozen):
        return [f"{kind!r} must be a megaspec.plugins.Kind of a spec class and a builder"]
    problems = []
    if not issubclass(spec, place.bases):
        names = " or ".join(f"{b.__module__}.{b.__name__}" for b in place.bases)
        problems.append(f"{spec.__name__} must inherit from {names}")
    if not _tag(spec):
        problems.append(f'{spec.__name__} lacks kind: Literal["name"], one name, which chooses it')
    absent = [name for name in place.needs if name not in spec.model_fields]
    problems += [f"{spec.__name__} lacks the field {name}" for name in absent]
    unsaid = [name for name in place.says if _is_left_open(spec, name, place.bases)]
    problems += [f"{spec.__name__} doesn't say its {name}" for name in unsaid]
    match = _BUILDER.fullmatch(kind.build) if isinstance(kind.build, str) else None
    if match is None:
        problems.append(f"build={kind.build!r} must be text such as my_plugin.model:MyModel")
    else:
        problems += _wrong_builder(place, *match.groups())
    return problems


def _is_left_open(spec: type[Frozen], name: str, bases: tuple[type[Frozen], ...]) -> bool:
    """Whether a spec has no `name` but that of the base."""
    said = getattr(spec, name, None)
    return said is None or any(said is getattr(base, name, None) for base in bases)


def _wrong_builder(place: _Place, module: str, name: str) -> list[str]:
    """Why a builder can't be called. Its source is read, not run: it may import torch."""
    found = None
    if _is_installed(module):
        found = find_spec(module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return [f"build={module}:{name}: there is no module {module}"]
    file = Path(found.origin)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, ValueError) as error:
        return [f"build={module}:{name}: can't be read: {import_failure(error, module)}"]
    if name not in set(_top_names(tree)):
        return [f"build={module}:{name}: {module} defines no {name}"]
    return _wrong_call(place, tree, f"build={module}:{name}", name)


def _wrong_call(place: _Place, tree: ast.Module, label: str, name: str) -> list[str]:
    """Why what is defined as `name` does not take what it is called with; nothing where the source does not tell."""
    parameters = _parameters(tree, name)
    if parameters is None:
        return []
    try:
        parameters.bind(*place.called_with, **dict.fromkeys(place.called_by_name))
    except TypeError as error:
        given = [*place.called_with]
        given += [f"{one}=" for one in place.called_by_name]
        return [f"{label}: is called with ({', '.join(given)}): {error}"]
    return []


def _parameters(tree: ast.Module, name: str) -> Signature | None:
    """What a function takes, or the `__init__` of a class; None where it is inherited, imported or decorated."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name != name or node.decorator_list:
            continue
        if isinstance(node, ast.FunctionDef):
            return _signature(node.args, skip=0)
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__" and not inner.decorator_list:
                return _signature(inner.args, skip=1)
    return None


def _signature(arguments: ast.arguments, *, skip: int) -> Signature:
    """Of a definition, without its first `skip` arguments, such as self."""
    positional = [*arguments.posonlyargs, *arguments.args]
    n_required = len(positional) - len(arguments.defaults)
    parameters = []
    for number, argument in enumerate(positional):
        kind = Parameter.POSITIONAL_OR_KEYWORD
        if number < len(arguments.posonlyargs):
            kind = Parameter.POSITIONAL_ONLY
        default = Parameter.empty if number < n_required else None
        parameters.append(Parameter(argument.arg, kind, default=default))
    if arguments.vararg is not None:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = Parameter.empty if value is None else None
        parameters.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=default))
    if arguments.kwarg is not None:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters[skip:])


def _top_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name))


def _tag(spec: type[Frozen]) -> str:
    """The one name of a spec's `kind`, else ""."""
    names = tags_of(spec)
    return names[0] if len(names) == 1 and isinstance(names[0], str) else ""
