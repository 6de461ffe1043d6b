"""What a choice on the command line leaves out: keys that files set for a kind that is no longer chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaspec.compose.search_path import SourceFile
from megaspec.core.fields import tags_of
from megaspec.core.problems import models_of
from megaspec.recipe import Recipe

# (package, file) of everything that takes part, in the order in which it is merged.
Ordered = Sequence[tuple[str, SourceFile]]


@dataclass(frozen=True)
class Replaced:
    """A section whose kind the command line chooses anew."""

    group: str
    choice: str
    kind: str
    """Of the choice."""
    origin: str
    """Where the choice says its kind."""
    keys: tuple[str, ...]
    """Dotted paths of the keys of the kind that files chose, without those that the new kind has too."""


def replaced_kinds(chosen: Mapping[str, str], written: Ordered, ordered: Ordered) -> Iterator[Replaced]:
    """`chosen`: group -> choice of the command line. `written`: what takes part without these choices; `ordered`: with
    them."""
    for group, choice in chosen.items():
        models = {tag: m for m in models_of(Recipe.model_fields[group].annotation) for tag in tags_of(m)}
        before = [kind for file in written for kind, _ in _kinds(group, *file) if kind in models]
        after = [found for file in ordered if file[0] == group for found in _kinds(group, *file) if found[0] in models]
        if before and after and before[-1] != after[-1][0]:
            kind, origin = after[-1]
            own = models[kind].model_fields
            keys = tuple(f"{group}.{name}" for name in models[before[-1]].model_fields if name not in own)
            yield Replaced(group, choice, kind, origin, keys)


def _kinds(group: str, package: str, file: SourceFile) -> Iterator[tuple[str, str]]:
    """The kind that a file gives a section, if any, and its origin."""
    body = file.body if package == group else file.body.get(group) if not package else None
    if isinstance(body, dict) and isinstance(body.get("kind"), str):
        yield body["kind"], file.origin("kind" if package == group else f"{group}.kind")
