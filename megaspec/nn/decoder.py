"""What every decoder of equal blocks has in common: the way from tokens to the loss."""

# B sequences, T tokens, D model

import torch
from torch import Tensor, nn

from megaspec.core.placement import Row
from megaspec.nn.attention import SequenceContext
from megaspec.nn.dropout import Noise
from megaspec.nn.loss import OutputHead


def document_positions(documents: Tensor) -> Tensor:
    """int32 [B, T] document numbers -> int64 [B, T] positions that start at 0 in each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


class Decoder(nn.Module):
    """Base of the families: `embed_tokens` and `context` are theirs, the rest is the same."""

    layers: nn.ModuleDict
    norm: nn.Module
    head: OutputHead
    placement: tuple[Row, ...]

    def embed_tokens(self, tokens_BT: Tensor, context: SequenceContext) -> Tensor:
        """-> [B, T, D]"""
        raise NotImplementedError

    def context(self, tokens_BT: Tensor, documents: Tensor | None, noise: Noise | None) -> SequenceContext:
        """Positions and what follows from them."""
        raise NotImplementedError

    def hidden(self, tokens_BT: Tensor, documents: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """The last block's output after the final norm, [B, T, D]."""
        context = self.context(tokens_BT, documents, noise)
        x_BTD = self.embed_tokens(tokens_BT, context)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, context)
        return self.norm(x_BTD)

    def forward(self, tokens_BT: Tensor, documents: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """int64 [B, T] -> logits [B, T, V]"""
        return self.head(self.hidden(tokens_BT, documents, noise))

    def loss(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        weights_BT: Tensor,
        *,
        documents: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        """Σ weight · cross-entropy: a scalar in at least fp32."""
        return self.head.loss(self.hidden(tokens_BT, documents, noise), labels_BT, weights_BT)
