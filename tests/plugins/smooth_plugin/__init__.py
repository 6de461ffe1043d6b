"""A loss with label smoothing: its settings, and where it is built. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Frozen
from megaspec.plugins import Kind, Plugin


class SmoothSpec(Frozen):
    """Cross-entropy with label smoothing (Szegedy et al. 2016)."""

    kind: Literal["smooth"]
    share: Annotated[float, Field(ge=0, lt=1)]
    """Part of each label that is spread over the vocabulary."""


PLUGIN = Plugin(losses=(Kind(SmoothSpec, "smooth_plugin.loss:smooth"),))
