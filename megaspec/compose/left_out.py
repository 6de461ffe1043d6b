"""What a choice on the command line leaves out: keys that files set for a kind that is no longer chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaspec.compose.search_path import SourceFile
from megaspec.core.fields import kinds_below
from megaspec.core.problems import value_at
from megaspec.recipe import Recipe

# (package, file) of everything that takes part, in the order in which it is merged.
Ordered = Sequence[tuple[str, SourceFile]]


@dataclass(frozen=True)
class Replaced:
    """A section whose kind the command line chooses anew."""

    section: str
    """Dotted path: the group itself, or a part inside of it."""
    group: str
    choice: str
    kind: str
    """Of the section, as the choice has it."""
    origin: str
    """Where the choice says its kind."""
    keys: tuple[str, ...]
    """Dotted paths of the keys of the kind that files chose, without those that the new kind has too."""


def replaced_kinds(chosen: Mapping[str, str], written: Ordered, ordered: Ordered) -> Iterator[Replaced]:
    """`chosen`: group -> choice of the command line. `written`: what takes part without these choices; `ordered`: with
    them."""
    for group, choice in chosen.items():
        chosen_files = [(package, file) for package, file in ordered if package == group]
        for section, class_of in kinds_below(Recipe, group).items():
            before = None
            for kind, _ in _kinds_said(section, written):
                if kind in class_of:
                    before = kind
            after = None
            for kind, origin in _kinds_said(section, chosen_files):
                if kind in class_of:
                    after = (kind, origin)
            if before is None or after is None or before == after[0]:
                continue
            kind, origin = after
            new_keys = class_of[kind].model_fields
            lost = tuple(f"{section}.{name}" for name in class_of[before].model_fields if name not in new_keys)
            yield Replaced(section, group, choice, kind, origin, lost)


def _kinds_said(section: str, files: Ordered) -> Iterator[tuple[str, str]]:
    """The kinds that files give a section, each with its origin; of several the last one counts, as in a merge."""
    for package, file in files:
        key = f"{section}.kind"
        if package:
            # a choice of a group holds what lies in that group alone
            if not key.startswith(f"{package}."):
                continue
            key = key.removeprefix(f"{package}.")
        kind = value_at(file.body, key)
        if isinstance(kind, str):
            yield kind, file.origin(key)
