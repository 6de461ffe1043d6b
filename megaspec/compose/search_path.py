"""Where groups and recipes are looked for, and what a file of them may say. Torch-free and Hydra-free."""

import os
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from megaspec.compose.paths import conf_dir, recipes_dir
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.kinds import annotation_of, is_open
from megaspec.core.marked_yaml import MarkedYaml, parse_yaml, read_text
from megaspec.core.problems import did_you_mean, one_of
from megaspec.recipe import Recipe

_NAME = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*(?:/[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*)*"
)
# `# @package X`, with which a file of Hydra says where it is merged; here its folder says so.
_HEADER = re.compile(r"^\s*#\s*@\s*package\b\s*(\S*)", re.MULTILINE)
# Files that inherit from each other: more only come of a circle.
_MAX_INHERITANCE = 16


@dataclass(frozen=True)
class SourceFile:
    """One YAML file of a group or recipe, read and marked."""

    label: str
    body: dict[str, Any]
    defaults: list[Any]
    lines: dict[str, int]

    def origin(self, key: str) -> str:
        """`file:line` of a dotted path inside the file."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.label}:{self.lines.get(key, 1)}"


class SearchPath:
    """The shipped groups and recipes, `./recipes`, and each folder D given by the user: D/<group>/ and D/recipes/.

    A recipe that is given as a file adds the folder that it lies in. A name is found in exactly one place: two files of
    the same name are an error, never a silent choice.
    """

    def __init__(self, config_dirs: Sequence[str | Path] = ()):
        # a recipe that is given as a file is found in the folder that it lies in
        folders = []
        self._beside = []
        for given in config_dirs:
            if Path(given).is_file():
                self._beside.append(Path(given).parent)
            else:
                folders.append(Path(given))
        absent = [folder for folder in folders if not folder.is_dir()]
        if absent:
            raise RecipeError([Problem("", f"--config-dir {d}: no such folder", COMMAND_LINE, "path") for d in absent])
        self._groups = _unique([conf_dir(), *folders])
        self._recipes = _unique([recipes_dir(), Path("recipes"), *(d / "recipes" for d in folders), *self._beside])
        self._files: dict[str, SourceFile] = {}
        self.orders: dict[tuple[str, ...], list[tuple[str, SourceFile]]] = {}
        """What takes part in a recipe with these choices, as it was ordered before: (package, file)."""

    def exists(self, config_path: str) -> bool:
        """True for `group/choice`, `recipe/name` and `base` where such a file lies on the path."""
        return bool(_NAME.fullmatch(config_path)) and bool(self._found(config_path))

    def choices(self, group: str) -> list[str]:
        """Names of a group's choices, or of the recipes for `recipe`."""
        folders = self._recipes
        if group != "recipe":
            folders = [root / group for root in self._groups]
        names = set()
        for folder in folders:
            if folder.is_dir():
                names |= {str(file.relative_to(folder).with_suffix("")) for file in self._files_in(folder)}
        return sorted(name for name in names if _NAME.fullmatch(name))

    def _files_in(self, folder: Path) -> Iterator[Path]:
        """Its YAML files, and those below it unless it only happens to hold a recipe."""
        if folder in self._beside:
            return folder.glob("*.yaml")
        return folder.rglob("*.yaml")

    def read(self, config_path: str) -> SourceFile:
        """The file of a name that exists. RecipeError: two of them, or what `read_yaml` refuses."""
        if config_path not in self._files:
            found = self._found(config_path)
            assert found, f"{config_path} was not checked before it was read"
            if len(found) > 1:
                raise RecipeError([_ambiguous(config_path, found)])
            self._files[config_path] = _read(found[0], is_recipe=config_path.startswith("recipe/"))
        return self._files[config_path]

    def check_defaults(self, config_path: str, groups: Sequence[str], above: tuple[str, ...] = ()) -> list[Problem]:
        """Everything that is wrong with the defaults lists of a file and of all that it inherits from."""
        file = self.read(config_path)
        problems: list[Problem] = []
        for number, entry in enumerate(file.defaults):
            origin = file.origin(f"defaults.{number}")
            target, problem = _target(entry, config_path=config_path, groups=groups)
            if problem:
                problems.append(Problem("defaults", problem, origin, "defaults"))
            elif target is not None and not self.exists(target):
                group, _, name = target.partition("/")
                hint = choice_hint(group, name, self.choices(group))
                problems.append(Problem("defaults", f"{target} does not exist; {hint}", origin, "choice.unknown"))
            elif target in (*above, config_path) or len(above) >= _MAX_INHERITANCE:
                chain = " -> ".join([*above, config_path, str(target)])
                problems.append(Problem("defaults", f"inherits from itself: {chain}", origin, "defaults.cycle"))
            elif target is not None:
                problems += self.check_defaults(target, groups, (*above, config_path))
        return problems

    def closure(self, config_path: str) -> list[str]:
        """A group's choice after everything that it inherits from, in the order in which they are merged."""
        group = config_path.rpartition("/")[0]
        inherited: list[str] = []
        for entry in self.read(config_path).defaults:
            if isinstance(entry, str) and entry != "_self_":
                inherited += self.closure(_inherited_path(entry, group))
        return [*inherited, config_path]

    def _found(self, config_path: str) -> list[Path]:
        """The files of a name; several where folders hold the same one."""
        roots = self._groups
        if config_path.startswith("recipe/"):
            roots = self._recipes
        name = f"{config_path.removeprefix('recipe/')}.yaml"
        return _unique([root / name for root in roots if (root / name).is_file()])


def search_path(config_dirs: Sequence[str | Path] | SearchPath) -> SearchPath:
    """Of these folders; one that is made already stays, with the files that it has read.

    Where only what ships is looked through, it is the same one each time, until a file there is another.
    """
    if isinstance(config_dirs, SearchPath):
        return config_dirs
    own = Path("recipes")
    if config_dirs or (own.exists() and own.resolve() != recipes_dir().resolve()):
        return SearchPath(config_dirs)
    shipped = (conf_dir(), recipes_dir())
    return _shipped(tuple((_label(folder), _state_of(folder)) for folder in shipped))


@lru_cache(maxsize=4)
def _shipped(_: Hashable) -> SearchPath:
    """Told apart by how messages name it from the working folder, and by the state of its files."""
    return SearchPath()


def _state_of(folder: Path) -> Hashable:
    """Of each file below it what changes when it is written."""
    files = []
    for root, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".yaml"):
                continue
            path = os.path.join(root, name)
            # one that has just been removed counts as none
            with suppress(FileNotFoundError):
                stat = os.stat(path)
                files.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(files))


def _ambiguous(config_path: str, found: Sequence[Path]) -> Problem:
    """Several files of one name."""
    group, _, name = config_path.partition("/")
    labels = [_label(file) for file in found]
    if len(set(labels)) < len(labels):  # another checkout is the working folder
        labels = [str(file.resolve()) for file in found]
    text = f"{group}={name} is in {one_of(labels)}; rename one".replace(" or ", " and ")
    return Problem(group, text, "", "choice.ambiguous")


def _inherited_path(entry: str, group: str) -> str:
    """`group/choice` of an entry that a file of the group inherits: `choice`, or `/group/choice`."""
    if entry.startswith("/"):
        return entry[1:]
    return f"{group}/{entry}"


def _target(entry: Any, *, config_path: str, groups: Sequence[str]) -> tuple[str | None, str | None]:
    """What an entry of a defaults list names, or what is wrong with it: (`group/choice`, None) or (None, problem)."""
    if entry == "_self_":
        return None, None
    if isinstance(entry, str):
        return _inherited_target(entry, config_path.rpartition("/")[0])
    if not isinstance(entry, dict) or len(entry) != 1:
        return None, "an entry is a name, or `override /group: choice`"
    [(key, choice)] = entry.items()
    words = key.split()
    group = ""
    if words:
        group = words[-1].removeprefix("/")
    if group not in groups:
        hint = did_you_mean(group, groups) or f"groups are {', '.join(groups)}"
        return None, f"{key}: {group} is no group; {hint}"
    is_base = config_path == "base"
    is_recipe = config_path.startswith("recipe/")
    if choice is not None and (not isinstance(choice, str) or not _NAME.fullmatch(choice)):
        return None, f"{key}: {choice} is no name of a file; letters, digits, dots, dashes and underscores"
    if not is_base and (words != ["override", f"/{group}"] or group == "recipe" or not is_recipe):
        return None, f"{key}: a recipe chooses with `override /group: choice`, after what it inherits"
    if choice is None:
        # no file: whoever reads this entry writes the section out
        return None, None
    return f"{group}/{choice}", None


def _inherited_target(entry: str, group: str) -> tuple[str | None, str | None]:
    """As `_target`, of an entry that is a name: what a file of the group inherits."""
    target = _inherited_path(entry, group)
    if not _NAME.fullmatch(target):
        return None, f"{entry} is no name of a file; letters, digits, dots, dashes and underscores"
    if target.partition("/")[0] != group.partition("/")[0]:
        return None, f"{entry}: a file inherits from its own group; choose another with `override /group: choice`"
    return target, None


# what ships, and a few files more; nobody changes what was read
@lru_cache(maxsize=256)
def _parsed(text: str, label: str) -> MarkedYaml:
    return parse_yaml(text, label=label)


def _read(path: Path, *, is_recipe: bool) -> SourceFile:
    label = _label(path)
    text = read_text(path, label=label)
    marked = _parsed(text, label)
    for match in _HEADER.finditer(text):
        if not is_recipe or match.group(1) != "_global_":
            what = (
                f"@package {match.group(1)}: a recipe is global and a choice belongs to its folder's section; drop it"
            )
            raise RecipeError([Problem("", what, label, "yaml.package")])
    body = dict(marked.content)
    defaults = body.pop("defaults", [])
    if not isinstance(defaults, list):
        raise RecipeError(
            [Problem("defaults", "defaults is a list", f"{label}:{marked.lines['defaults']}", "defaults")]
        )
    return SourceFile(label, body, defaults, marked.lines)


def _unique(paths: Sequence[Path]) -> list[Path]:
    seen: dict[Path, Path] = {}
    for path in paths:
        seen.setdefault(path.resolve(), path)
    return list(seen.values())


def _label(path: Path) -> str:
    """A file as messages name it: from the working folder, from the shipped root, or in full."""
    resolved = path.resolve()
    for root in _roots():
        if resolved.is_relative_to(root):
            return str(resolved.relative_to(root))
    return str(path)


def _roots() -> Iterator[Path]:
    yield Path.cwd()
    yield conf_dir().parent


def choice_hint(group: str, name: str, options: Sequence[str]) -> str:
    """What to write in place of a choice that does not exist, and where plug-ins may add kinds how one is chosen."""
    hint = did_you_mean(name, options)
    if group == "recipe" and not hint:
        # a path where a name is due: recipes/mine.yaml
        stem = PurePath(name).stem
        if stem in options:
            hint = f"did you mean {stem}?"
        else:
            hint = f"recipes of your own are looked for in {Path('recipes').absolute()}; choose {one_of(options)}"
    if not hint:
        hint = f"choose {one_of(options)}"
    field = Recipe.model_fields.get(group)
    if field is not None and is_open(annotation_of(field)):
        hint = f"{hint} (a plug-in's kind: {group}.kind={name}, with --plugin PACKAGE)"
    return hint
