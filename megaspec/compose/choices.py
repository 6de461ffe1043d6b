"""What Hydra asks about groups and their choices while it orders defaults lists. A part of compose/compose.py."""

from collections.abc import Sequence
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from megaspec.compose.search_path import SearchPath


class Repository(ConfigRepository):
    """What Hydra asks while it orders the defaults lists, answered from our own reader."""

    def __init__(self, search: SearchPath, groups: Sequence[str]):
        self._search = search
        self._groups = groups
        self.sources = []

    def load_config(self, config_path: str) -> ConfigResult | None:
        if not self._search.exists(config_path):
            return None  # a group that base.yaml leaves to the recipe, which may write the section out instead
        entries = self._search.read(config_path).defaults
        # Hydra passes over an optional entry that names no file
        defaults = OmegaConf.create([_optional(_plain(e)) for e in entries])
        # a recipe is merged at the top, a choice at the section of its group
        header = {"package": None}
        if config_path.startswith("recipe/"):
            header["package"] = "_global_"
        result = ConfigResult(provider="megaspec", path=config_path, config=OmegaConf.create({}), header=header)
        result.defaults_list = self._create_defaults_list(config_path, defaults)
        return result

    def group_exists(self, config_path: str) -> bool:
        return config_path in self._groups

    def config_exists(self, config_path: str) -> bool:
        return self._search.exists(config_path)

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        return self._search.choices(group_name)


def _plain(entry: Any) -> Any:
    """An entry of a defaults list with its texts as OmegaConf takes them: no class of ours."""
    if not isinstance(entry, dict):
        return str(entry)
    plain = {}
    for name, choice in entry.items():
        plain[str(name)] = None if choice is None else str(choice)
    return plain


def _optional(entry: Any) -> Any:
    """An entry of a defaults list; one that chooses nothing is optional."""
    if isinstance(entry, dict) and list(entry.values()) == [None]:
        return {f"optional {next(iter(entry))}": None}
    return entry
