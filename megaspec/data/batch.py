"""What the loader hands to the training step."""

# B sequences, T tokens

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspec_kernels.attention.documents import Documents


@dataclass(frozen=True)
class Batch:
    """One micro batch of one rank."""

    tokens: Tensor
    """int64 [B, T]: inputs."""
    labels: Tensor
    """int64 [B, T]: the token that follows each input."""
    mask: Tensor
    """bool [B, T]: which labels count in the loss."""
    ids: Tensor
    """int64 [B]: place of each sequence in the run's sample order (0 is the first sequence of the run)."""
    documents: Documents | None = None
    """Documents in each sequence, with bounds on their number and length; None without document mask."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device, copied without waiting when the source is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def tensors(self) -> list[Tensor]:
        """All that the batch consists of."""
        found = [self.tokens, self.labels, self.mask, self.ids]
        if self.documents is not None:
            found += [self.documents.number, self.documents.starts]
        return found

    def sequences(self, which: slice) -> "Batch":
        """Some of the sequences."""
        part = {}
        for name, value in vars(self).items():
            if isinstance(value, Documents):
                part[name] = value.of_rows(which)
            elif value is not None:
                part[name] = value[which]
        return Batch(**part)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch with every tensor changed, one that is None left out."""
        changed = {}
        for name, value in vars(self).items():
            if isinstance(value, Documents):
                changed[name] = value.map(change)
            elif value is not None:
                changed[name] = change(value)
        return Batch(**changed)
