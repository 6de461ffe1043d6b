"""What of a model is updated together, while the forward pass runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateGroup:
    """Trained weights of a unit. Groups are in the order in which the forward pass needs them."""

    names: list[str]
    is_exposed: bool
    """The forward pass has nothing to run beside their update, so it waits."""
