"""Where the shipped recipes and groups lie: inside the package of a wheel, beside it in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def _shipped(folder: str) -> Path:
    inside = _PACKAGE / "_data" / folder
    if inside.is_dir():
        return inside
    return _PACKAGE.parent / folder


def conf_dir() -> Path:
    """The folder of groups: one folder per section of a recipe, and base.yaml."""
    return _shipped("conf")


def recipes_dir() -> Path:
    """The folder of shipped recipes."""
    return _shipped("recipes")
