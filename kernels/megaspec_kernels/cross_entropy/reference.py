"""Output head and loss as their equation: Σ wᵢ (log Σⱼ exp(zᵢⱼ) − zᵢ_labelᵢ) of logits z = form(xᵢ·Wⱼ + bⱼ)."""

# M tokens, D model, V rows of the weight on this rank

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class VocabShard:
    """The columns of the logits that a rank holds, and how ranks combine what they computed from theirs.

    `sum` and `max` reduce over the ranks that share the vocabulary; the gradient of `sum` passes through unchanged.
    """

    first: int
    """Token id of the first column."""
    valid: int
    """Columns that are tokens; those after it are padding."""
    sum: Callable[[Tensor], Tensor] = _same
    max: Callable[[Tensor], Tensor] = _same


class WeightSum(Protocol):
    """Where the weight's gradient is added up beside autograd, in the forward pass of a loss whose gradient is 1."""

    def add(self, product: Callable[[Tensor, bool], None]) -> None:
        """`product(buffer, overwrite)` adds to the buffer [V, D], or overwrites it."""
        ...

    def arrived(self) -> None:
        """Called in the backward pass."""
        ...


@dataclass(frozen=True)
class LogitForm:
    """What the head's product becomes before the softmax: cap · tanh(scale · product / cap)."""

    scale: float = 1.0
    cap: float | None = None
    """None: scale · product, without a bound."""

    def shaped(self, product: Tensor) -> Tensor:
        """[..., V] in at least fp32 -> logits, the same shape and dtype."""
        scaled = product
        if self.scale != 1.0:
            scaled = product * self.scale
        if self.cap is None:
            return scaled
        return (scaled / self.cap).tanh() * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """d logits / d product where the logits are these: 1 − tanh² of what the cap has bent, times the scale."""
        if self.cap is None:
            return self.scale
        return (1 - (logits / self.cap).square()) * self.scale


PLAIN_LOGITS = LogitForm()


def linear_cross_entropy(
    x_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    shard: VocabShard,
    *,
    bias_V: Tensor | None = None,
    form: LogitForm = PLAIN_LOGITS,
) -> Tensor:
    """[M, D], [V, D], int64 [M], [M] in at least fp32 -> scalar in the dtype of `weights_M`, in at least fp32.

    `bias_V`: [V], added to the product; None: nothing is.
    """
    bias = None if bias_V is None else bias_V[: shard.valid]
    wide = torch.promote_types(x_MD.dtype, torch.float32)
    # the product has no name, so that it is gone once it is wide
    logits_MV = form.shaped(F.linear(x_MD, weight_VD[: shard.valid], bias).to(wide))
    lowest = logits_MV.new_full((len(logits_MV), 1), torch.finfo(logits_MV.dtype).min)
    peak_M = shard.max(torch.cat((logits_MV.detach(), lowest), dim=1).amax(dim=1))
    total_M = shard.sum((logits_MV - peak_M[:, None]).exp().sum(dim=1))
    here = (labels_M >= shard.first) & (labels_M < shard.first + shard.valid)
    column = (labels_M - shard.first).clamp(0, max(shard.valid - 1, 0))
    found_M = logits_MV.gather(1, column[:, None])[:, 0] * here if shard.valid else logits_MV.sum(dim=1)
    target_M = shard.sum(found_M)
    return (weights_M * (peak_M + total_M.log() - target_M)).sum()
