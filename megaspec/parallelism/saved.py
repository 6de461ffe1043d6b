"""What is kept in the place of the tensors that operations save for their backward passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Kept(Protocol):
    """Stands for a tensor until the backward pass asks for it."""

    def tensor(self) -> Tensor:
        """The tensor, as it was saved."""


class Keeper(Protocol):
    """Decides about each tensor that is saved while it is in charge."""

    def keep(self, x: Tensor) -> Kept | None:
        """What is kept in place of `x`; None: somebody else's to decide."""


class SavedTensors:
    """The keepers in charge. torch asks the innermost hooks alone; here the outer keepers are asked after the inner."""

    def __init__(self) -> None:
        self._keepers: list[Keeper] = []

    @contextmanager
    def under(self, keeper: Keeper) -> Iterator[None]:
        """Puts a keeper in charge of what is saved inside."""
        self._keepers.append(keeper)
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._keepers.pop()

    def _pack(self, x: Tensor) -> Tensor | Kept:
        for keeper in reversed(self._keepers):
            kept = keeper.keep(x)
            if kept is not None:
                return kept
        # not x itself, which would hold the graph that holds it
        return x.detach()


def _unpack(kept: Tensor | Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()
