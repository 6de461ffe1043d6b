"""Python data in, a Spec out: for programs that hold their settings in dicts. Torch-free."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaspec.checkable import PartlyError
from megaspec.compose.compose import compose_dicts
from megaspec.estimate.target import Target, detect_target
from megaspec.resolve.beside import with_rules
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.spec import Spec


def spec_from(
    *contents: Mapping[str, Any],
    start: str | None = None,
    config_dirs: Sequence[str | Path] = (),
    target: Target | None = None,
) -> Spec:
    """What will happen, from dicts that are laid out as a recipe; see `compose_dicts` for what they may say.

    `target`: the machine; None: this one. RecipeError: everything that is wrong, at once, as for a recipe of YAML.
    DataError: nothing but the data is wrong.
    """
    machine = detect_target() if target is None else target
    try:
        composed = compose_dicts(*contents, start=start, config_dirs=config_dirs)
    except PartlyError as error:
        raise with_rules(error, lambda recipe: machine, is_for_training=True) from None
    recipe = composed.recipe
    return resolve(recipe, machine, gather_facts(recipe), composed.origins, refused=unbuilt_problems)
