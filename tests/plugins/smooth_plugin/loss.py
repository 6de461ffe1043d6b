"""What ranks call."""

# M tokens, D model, V vocabulary

from collections.abc import Callable

from torch import Tensor

from megaspec_kernels.cross_entropy.reference import VocabShard, linear_cross_entropy
from smooth_plugin import SmoothSpec


def smooth(spec: SmoothSpec) -> Callable[..., Tensor]:
    """(1 - share) · cross-entropy + share · the mean of -log p over the vocabulary; for tp=1."""

    def loss(x_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, weights_M: Tensor, shard: VocabShard) -> Tensor:
        sharp = linear_cross_entropy(x_MD, weight_VD, labels_M, weights_M, shard)
        logits_MV = x_MD @ weight_VD[: shard.valid].t()
        flat_M = -logits_MV.log_softmax(dim=-1).mean(dim=-1)
        return (1 - spec.share) * sharp + spec.share * (weights_M * flat_M).sum()

    return loss
