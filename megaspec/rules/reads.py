"""Which settings a rule looks at: found by watching it look at the example that breaks it."""

from typing import Any, get_args

from megaspec.core.fields import ENTRY, NAME
from megaspec.core.frozen import Frozen
from megaspec.rules.case import Case, Rule


class _WatchedSection:
    """Stands for a section of a recipe, and notes the path of every field that is read."""

    def __init__(self, section: Frozen, path: str, seen: set[str]):
        self._section = section
        self._path = path
        self._seen = seen

    @property
    def __class__(self) -> type:
        """isinstance asks this: rules tell one kind of a section from another."""
        return type(self._section)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        if name not in type(self._section).model_fields:
            return value
        path = f"{self._path}{name}"
        if isinstance(value, Frozen):
            if type(None) in get_args(type(self._section).model_fields[name].annotation):
                self._seen.add(path)  # that it is there at all is a setting, too
            return _WatchedSection(value, f"{path}.", self._seen)
        self._seen.add(path)
        if isinstance(value, tuple) and value and isinstance(value[0], Frozen):
            return tuple(_WatchedSection(one, f"{path}.{ENTRY}.", self._seen) for one in value)
        if isinstance(value, dict) and any(isinstance(one, Frozen) for one in value.values()):
            return {name: _WatchedSection(one, f"{path}.{NAME}.", self._seen) for name, one in value.items()}
        return value


def fields_read(rule: Rule, case: Case) -> frozenset[str]:
    """Dotted paths of the fields that a rule reads of a case; entries of lists as `*`."""
    seen: set[str] = set()
    recipe: Any = _WatchedSection(case.recipe, "", seen)
    rule(Case(recipe, case.target, case.facts, case.decided, case.chosen))
    return frozenset(seen)
