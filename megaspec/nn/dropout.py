"""Dropout whose mask depends on the token, not on where the token is computed."""

# B sequences, T tokens, D features

from dataclasses import dataclass

import torch
from torch import Tensor

from megaspec.nn.by_position import ByPosition
from megaspec.nn.hashing import keep_mask, mix, site_key


@dataclass(frozen=True)
class Noise:
    """What random masks are drawn from: the seed and each token's place in the run's sample order."""

    seed: int
    ids: Tensor
    """int64 [B]: places of the sequences."""
    index: Tensor
    """int64 [T]: places of this rank's tokens in their sequences."""

    def key(self, site: Tensor) -> Tensor:
        """int64 scalar: the key of a site's masks in this run. `site`: see hashing.site_key."""
        return mix(site ^ self.seed)


class Dropout(ByPosition):
    """Zeroes features with `probability` and scales the rest, [B, T, D] -> [B, T, D].

    `site` is a name that is unique in the model.
    """

    def __init__(self, probability: float, site: str):
        super().__init__()
        self.probability = probability
        self.site = site
        self.register_buffer("site_key", site_key(site), persistent=False)

    def fill_buffers(self) -> None:
        """Computes the site's key; called once the module has left the meta device."""
        self.site_key.copy_(site_key(self.site))

    def forward(self, x_BTD: Tensor, noise: Noise | None) -> Tensor:
        if noise is None or self.probability == 0.0:
            return x_BTD
        _, T, D = x_BTD.shape
        position = self.places_here(noise.index, T)
        feature = torch.arange(D, device=x_BTD.device)
        counters = (noise.ids[:, None, None], position[None, :, None], feature[None, None, :])
        keep = keep_mask(noise.key(self.site_key), counters, 1.0 - self.probability)
        return x_BTD * keep / (1.0 - self.probability)
