"""Implementations that a file of another version names and the catalog does not have. Torch-free.

What was computed with them stands: weights, states and the order of data are the same whatever computes next. Who goes
on has to say by what, since nothing replaces what was asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaspec.core.frozen import AUTO
from megaspec_kernels.catalog import CATALOG

PLAIN = "reference"
"""Every operation has it: stands in where only what was computed is read."""


@dataclass(frozen=True)
class GoneKernel:
    """A name that no implementation of an operation has."""

    operation: str
    name: str

    @property
    def key(self) -> str:
        return f"kernels.{self.operation}"

    @property
    def names(self) -> tuple[str, ...]:
        """Those that there are."""
        return tuple(CATALOG[self.operation].implementations)

    def instead(self, device: str) -> str:
        """The best that runs on `device` and needs no package."""
        for name, needs in CATALOG[self.operation].implementations.items():
            if device in needs.devices and not needs.package:
                return name
        return PLAIN


def gone_kernels(content: Mapping[str, Any]) -> tuple[GoneKernel, ...]:
    """Those that a recipe or a Spec names, as plain data. What is no text is left for typing to refuse."""
    section = content.get("kernels")
    if not isinstance(section, dict):
        return ()
    found = []
    for operation, known in CATALOG.items():
        name = section.get(operation)
        if isinstance(name, str) and name != AUTO and name not in known.implementations:
            found.append(GoneKernel(operation, name))
    return tuple(found)


def without_gone(content: Mapping[str, Any], *, instead: str = PLAIN) -> dict[str, Any]:
    """A recipe or a Spec, as plain data, with another name in place of those; why they were decided goes with them."""
    gone = gone_kernels(content)
    if not gone:
        return dict(content)
    changed = dict(content)
    changed["kernels"] = content["kernels"] | dict.fromkeys((one.operation for one in gone), instead)
    keys = {one.key for one in gone}
    if isinstance(content.get("decisions"), list):
        changed["decisions"] = [
            one for one in content["decisions"] if not (isinstance(one, dict) and one.get("key") in keys)
        ]
    return changed
