"""What the loader hands to the training step."""

# B sequences, T tokens

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
    documents: Tensor | None = None
    """int32 [B, T]: number of the document within the sequence, from 0; None without document mask."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device, copied without waiting when the source is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch with every tensor changed, one that is None left out."""
        changed = {}
        for name, tensor in vars(self).items():
            changed[name] = None if tensor is None else change(tensor)
        return Batch(**changed)
