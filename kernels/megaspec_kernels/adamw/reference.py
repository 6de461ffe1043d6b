"""AdamW whose states may be kept in narrow formats, in plain PyTorch: what every other implementation computes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspec_kernels.adamw.formats import (
    Format,
    decoded,
    decoded_square,
    draws,
    encoded,
    encoded_square,
    joined,
    scale_for,
    split,
)


@dataclass
class Moments:
    """One moment of n tensors. `scale` and `largest`, [n]: of each what its values are multiplied by, and the largest
    magnitude (of a root, where that is kept) that it holds; the latter is kept up where a moment has a scale."""

    values: list[Tensor]
    form: Format | None
    scale: Tensor
    largest: Tensor

    @property
    def has_scale(self) -> bool:
        """Others are multiplied by 1."""
        return self.form is not None and self.form.has_scale


@dataclass(frozen=True)
class Step:
    """What a step is made with. On the device: `divide_by`, `skip` (1: nothing happens) and `updates` before it."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    divide_by: Tensor
    skip: Tensor
    updates: Tensor


def next_scales(first: Moments, second: Moments, gradients: Sequence[Tensor], step: Step) -> tuple[Tensor, Tensor]:
    """[n], [n]: scales that hold whatever the step makes of the moments, from the largest gradient of each tensor."""
    # of moments and gradients; both averages are at most the average of the largest
    largest = torch.stack(torch._foreach_norm(list(gradients), ord=float("inf"))) / step.divide_by
    bound = step.beta1 * first.largest + (1 - step.beta1) * largest
    root = (step.beta2 * second.largest**2 + (1 - step.beta2) * largest**2).sqrt()
    return scale_for(bound, first.form), scale_for(root, second.form)


@torch.no_grad()
def adamw_(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    first: Moments,
    second: Moments,
    gradients: Sequence[Tensor],
    decays: Sequence[bool],
    keys: Tensor,
    step: Step,
) -> None:
    """m = β₁ m + (1 − β₁) g;  v = β₂ v + (1 − β₂) g²;  w = w − lr (m̂ / (√v̂ + eps) + weight decay · w).

    `masters`: the weights themselves, copies in at least fp32, or in int16 what bf16 weights lack of fp32. `keys`:
    int64 [n], of 32 bits, for the draws; see formats.py. Everything is computed in the dtype of the master weight.
    """
    apply = step.skip == 0
    t = (step.updates + 1).to(torch.float64)
    # m̂ = m / bias1, v̂ = v / bias2
    bias1 = 1 - step.beta1**t
    bias2 = 1 - step.beta2**t
    scales = next_scales(first, second, gradients, step)
    for i, (weight, kept, gradient) in enumerate(zip(weights, masters, gradients, strict=True)):
        master = joined(weight, kept) if kept.dtype == torch.int16 else kept
        wide = master.dtype
        g = gradient.to(wide) / step.divide_by.to(wide)
        m = decoded(first.values[i], first.scale[i], wide).lerp(g, 1 - step.beta1)
        v = decoded_square(second.values[i], second.form, second.scale[i], wide).lerp(g.square(), 1 - step.beta2)
        change = m / bias1.to(wide) / ((v / bias2.to(wide)).sqrt() + step.eps)
        new = master * (1 - step.lr * step.weight_decay * decays[i]) - step.lr * change
        drawn = draws(keys[i], weight.shape)
        for moments, value, scale, encode, draw in (
            (first, m, scales[0][i], encoded, drawn[0]),
            (second, v, scales[1][i], encoded_square, drawn[1]),
        ):
            stored = encode(value, moments.form, scale.to(wide), draw.to(wide))
            moments.values[i].copy_(torch.where(apply, stored.to(wide), moments.values[i].to(wide)))
            moments.scale[i] = torch.where(apply, scale, moments.scale[i])
            if first.has_scale or second.has_scale:
                moments.largest[i] = decoded(moments.values[i], moments.scale[i], wide).abs().max()
        new = torch.where(apply, new, master)
        if kept.dtype == torch.int16:
            high, low = split(new)
            weight.copy_(high)
            kept.copy_(low)
        else:
            kept.copy_(new)
            weight.copy_(new)
