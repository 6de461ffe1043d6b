"""What ranks call."""

# M tokens, D model, V vocabulary

from collections.abc import Callable

import torch
from torch import Tensor

from megaspec_kernels.cross_entropy.reference import VocabShard, linear_cross_entropy
from smooth_plugin import SmoothSpec


def smooth(spec: SmoothSpec) -> Callable[..., Tensor]:
    """(1 - share) · cross-entropy + share · the mean of -log p over the vocabulary, which ranks may share."""

    def loss(x_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, weights_M: Tensor, shard: VocabShard) -> Tensor:
        sharp = linear_cross_entropy(x_MD, weight_VD, labels_M, weights_M, shard)
        logits_MV = x_MD @ weight_VD[: shard.valid].t()
        logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        # a rank may hold padding only
        lowest_M1 = logits_MV.new_full((len(logits_MV), 1), torch.finfo(logits_MV.dtype).min)
        peak_M = shard.max(torch.cat((logits_MV.detach(), lowest_M1), dim=1).amax(dim=1))
        log_sum_M = peak_M + shard.sum((logits_MV - peak_M[:, None]).exp().sum(dim=1)).log()
        size_M = shard.sum(torch.full_like(peak_M, shard.valid))
        flat_M = log_sum_M - shard.sum(logits_MV.sum(dim=1)) / size_M
        return (1 - spec.share) * sharp + spec.share * (weights_M * flat_M).sum()

    return loss
