"""The output head and the loss."""

# B sequences, T tokens, D model, V vocabulary

import torch
from torch import Tensor, nn

from megaspec.nn.embedding.module import padded
from megaspec_kernels.cross_entropy.reference import VocabShard
from megaspec_kernels.registry import CrossEntropyKernel


class OutputHead(nn.Module):
    """Logits and cross-entropy over the vocabulary. Rows of the weight past `vocab_size` are padding."""

    def __init__(self, vocab_size: int, d: int, kernel: CrossEntropyKernel, *, pad_to: int = 1):
        super().__init__()
        self.vocab_size = vocab_size
        self.pad_to = pad_to
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(padded(vocab_size, pad_to), d))

    @property
    def shard(self) -> VocabShard:
        """The whole vocabulary: one device."""
        return VocabShard(0, self.vocab_size)

    def gather(self, x_BTD: Tensor) -> Tensor:
        """The whole sequence, where it has been split: nothing to do on one device."""
        return x_BTD

    def forward(self, x_BTD: Tensor) -> Tensor:
        """-> logits [B, T, V]"""
        return (self.gather(x_BTD) @ self.weight.t())[..., : self.vocab_size]

    def loss(self, x_BTD: Tensor, labels_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """Σ weight · cross-entropy over all tokens: a scalar in at least fp32."""
        x_MD = self.gather(x_BTD).flatten(0, 1)
        return self.kernel(x_MD, self.weight, labels_BT.flatten(), weights_BT.flatten(), self.shard)
