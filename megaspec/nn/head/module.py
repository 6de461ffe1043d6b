"""The output head and the loss."""

# B sequences, T tokens, D model, V vocabulary

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspec.nn.embedding.module import padded
from megaspec.nn.linear import TableSum
from megaspec_kernels.cross_entropy.reference import PLAIN_LOGITS, LogitForm, VocabShard
from megaspec_kernels.registry import CrossEntropyKernel


class OutputHead(nn.Module):
    """Logits and cross-entropy over the vocabulary. Rows of the weight past `vocab_size` are padding.

    `bias`: add a learned number to the product of each token; `form`: what becomes of it then. `table_sum`, when set,
    is where the weight's gradient goes in a step: see linear.py, note "Tables".
    """

    def __init__(
        self,
        vocab_size: int,
        d: int,
        kernel: CrossEntropyKernel,
        *,
        pad_to: int = 1,
        bias: bool = False,
        form: LogitForm = PLAIN_LOGITS,
    ):
        super().__init__()
        self.vocab_size = vocab_size
        self.pad_to = pad_to
        self.kernel = kernel
        self.form = form
        rows = padded(vocab_size, pad_to)
        self.weight = nn.Parameter(torch.empty(rows, d))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.table_sum: TableSum | None = None

    @property
    def sums_in_place(self) -> bool:
        """Whether the loss can add the weight's gradient to a sum itself: ours, with a kernel that takes one."""
        return type(self).loss is OutputHead.loss and "weight_sum" in signature(self.kernel).parameters

    @property
    def shard(self) -> VocabShard:
        """The whole vocabulary: one device."""
        return VocabShard(0, self.vocab_size)

    def gather(self, x_BTD: Tensor) -> Tensor:
        """The whole sequence, where it has been split: nothing to do on one device."""
        return x_BTD

    def forward(self, x_BTD: Tensor) -> Tensor:
        """-> logits [B, T, V]"""
        return self.whole_logits(self.gather(x_BTD))

    def whole_logits(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] of any tokens, with `gather` behind them -> logits [B, T, V]."""
        return self.logits(x_BTD)[..., : self.vocab_size]

    def logits(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> those of this rank's rows of the vocabulary, padding included, in the format of x."""
        product = F.linear(x_BTD, self.weight, self.bias)
        if self.form == PLAIN_LOGITS:
            return product
        wide = torch.promote_types(product.dtype, torch.float32)
        return self.form.shaped(product.to(wide)).to(product.dtype)

    def loss(self, x_BTD: Tensor, labels_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """Σ weight · cross-entropy over all tokens: a scalar in at least fp32."""
        x_MD = self.gather(x_BTD).flatten(0, 1)
        # a loss of a plug-in takes these where its model has them
        more: dict[str, Any] = {}
        if self.bias is not None or self.form != PLAIN_LOGITS:
            more = {"bias_V": self.bias, "form": self.form}
        if self.table_sum is not None and self.table_sum.is_open:
            more["weight_sum"] = self.table_sum
        return self.kernel(x_MD, self.weight, labels_BT.flatten(), weights_BT.flatten(), self.shard, **more)
