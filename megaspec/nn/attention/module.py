"""Causal self-attention with grouped queries."""

# B sequences, T tokens, D model, N query heads, K key and value heads, H head size

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaspec.nn.attention.spec import GroupedQuerySpec
from megaspec.nn.dropout import Dropout, Noise
from megaspec.nn.hashing import keep_mask, site_key
from megaspec.nn.linear import Linear
from megaspec.nn.rope.module import Angles, Rotation
from megaspec_kernels.registry import AttentionKernel


@dataclass(frozen=True)
class SequenceContext:
    """What every block needs to know of the batch beside its activations."""

    positions: Tensor
    """int64 [T], or [B, T] when documents are packed: of this rank's tokens, in their documents."""
    angles: tuple[Angles, ...] = ()
    """Cosine and sine of the rotary angles at `positions`, of every table of the model; empty without any."""
    documents: Tensor | None = None
    """int32 [B, S]: document of each token of the whole sequence; attention stays inside it. None: one document."""
    noise: Noise | None = None
    """Source of dropout masks; None switches dropout off."""
    index: Tensor | None = None
    """int64 [T]: places of this rank's tokens in the whole sequence."""
    length: int = 0
    """Tokens of the whole sequence."""
    aux_weight: Tensor | None = None
    """Scalar: weight of this micro batch's auxiliary losses in the loss that is differentiated; None: no gradients."""
    way: Any = None
    """How the ranks that hold the sequences attend, told to the core in the slot; None: all tokens are here."""


class CausalCore(nn.Module):
    """softmax(q kᵀ / √H) v over the past. The slot where other ways to attend are put.

    `first_head` is the global number of this rank's first query head.
    """

    def __init__(self, kernel: AttentionKernel, dropout: float, site: str):
        super().__init__()
        self.kernel = kernel
        self.dropout = dropout
        self.site = site
        self.first_head = 0
        self.register_buffer("site_key", site_key(site), persistent=False)

    def fill_buffers(self) -> None:
        """Computes the site's key; called once the module has left the meta device."""
        self.site_key.copy_(site_key(self.site))

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, context: SequenceContext) -> Tensor:
        """-> [B, T, N, H]"""
        drop = None
        noise = context.noise
        if noise is not None and self.dropout > 0:
            # a function, since torch 2.11 can't trace a call of a dataclass
            def drop(weights_BNTS: Tensor) -> Tensor:
                return drop_attention(
                    weights_BNTS,
                    self.dropout,
                    key=noise.key(self.site_key),
                    ids=noise.ids,
                    first_head=self.first_head,
                    queries=context.index,
                    keys=context.index,
                )

        return self.kernel.attend(q_BTNH, k_BTKH, v_BTKH, documents=context.documents, drop=drop)


def drop_attention(
    weights_BNTS: Tensor,
    probability: float,
    *,
    key: Tensor,
    ids: Tensor,
    first_head: int,
    queries: Tensor,
    keys: Tensor,
) -> Tensor:
    """Dropout of attention weights: the same mask for the same (sequence, head, query, key) in every layout.

    `key`: int64 scalar; `ids`: int64 [B]; `first_head`: the global number of the first of the N heads; `queries`,
    `keys`: int64 [T], [S], places in the whole sequence.
    """
    N, device = weights_BNTS.shape[1], weights_BNTS.device
    counters = (
        ids[:, None, None, None],
        torch.arange(first_head, first_head + N, device=device)[None, :, None, None],
        queries[None, None, :, None],
        keys[None, None, None, :],
    )
    return weights_BNTS * keep_mask(key, counters, 1.0 - probability) / (1.0 - probability)


class Attention(nn.Module):
    """wo(core(turn(norm(q)), turn(norm(k)), v)), [B, T, D] -> [B, T, D].

    `rotation` turns queries and keys by their positions; None: nothing does. Without `q_norm`, `k_norm`: not normed.
    """

    recompute_parts = frozenset({"core_attention"})

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        spec: GroupedQuerySpec,
        core: nn.Module,
        out: Dropout,
        rotation: Rotation | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ):
        super().__init__()
        self.d_head = d_head
        self.wqkv = Linear(d_model, n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_head, bias=spec.qkv_bias)
        self.wo = Linear(n_heads * d_head, d_model, bias=spec.out_bias, residual=True)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rotation = rotation
        self.core = core
        self.dropout = out

    @property
    def local_heads(self) -> int:
        """Query heads of this rank."""
        return self.wqkv.parts[0] // self.d_head

    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        qkv = self.wqkv(x_BTD)
        q, k, v = (part.unflatten(-1, (-1, self.d_head)) for part in qkv.split(self.wqkv.parts, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.rotation is not None:
            q, k = self.rotation(q, k, context.angles)
        o_BTNH = self.core(q, k, v, context)
        return self.dropout(self.wo(o_BTNH.flatten(-2)), context.noise)


@dataclass(frozen=True)
class AttentionSetting:
    """What attention is built with, beside its own options."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    kernel: AttentionKernel
    name: str
    """Global name of its module, which tells its sites of dropout apart."""
    dropout: float
    """On its output."""
    norm: Callable[[int], nn.Module]
    """Makes a norm over so many features."""
    rotation: Rotation | None
    """Turns queries and keys; None: nothing does."""


def grouped_query(spec: GroupedQuerySpec, setting: AttentionSetting) -> Attention:
    """Grouped-query attention of one layer."""
    norms_heads = spec.qk_norm == "per_head"
    return Attention(
        setting.d_model,
        n_heads=setting.n_heads,
        n_kv_heads=setting.n_kv_heads,
        d_head=setting.d_head,
        spec=spec,
        core=CausalCore(setting.kernel, spec.dropout, f"{setting.name}.core"),
        out=Dropout(setting.dropout, setting.name),
        rotation=setting.rotation,
        q_norm=setting.norm(setting.d_head) if norms_heads else None,
        k_norm=setting.norm(setting.d_head) if norms_heads else None,
    )
