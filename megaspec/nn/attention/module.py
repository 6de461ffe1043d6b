"""Causal self-attention with grouped queries."""

# B sequences, T tokens, D model, N query heads, K key and value heads, H head size

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaspec.core.part_facts import ALL_OF_THE_PAST, Sight
from megaspec.nn.attention.spec import GroupedQuerySpec, LogTemperature
from megaspec.nn.dropout import Dropout, Noise
from megaspec.nn.fp8 import Fp8Input
from megaspec.nn.fp8_producers import turned
from megaspec.nn.hashing import keep_mask, site_key
from megaspec.nn.linear import Linear
from megaspec.nn.norm.module import RmsNorm
from megaspec.nn.norm.spec import RmsNormSpec
from megaspec.nn.range_names import ATTENTION
from megaspec.nn.ranges import marked
from megaspec.nn.rope.module import Angles, Rotation
from megaspec_kernels.attention.documents import Documents, chunks_of
from megaspec_kernels.attention.scoring import PLAIN, Scoring
from megaspec_kernels.registry import AttentionKernel
from megaspec_kernels.rope.form import Heads


@dataclass(frozen=True)
class SequenceContext:
    """What every block needs to know of the batch beside its activations."""

    positions: Tensor
    """int64 [T], or [B, T] when documents are packed: of this rank's tokens, in their documents."""
    angles: tuple[Angles, ...] = ()
    """Cosine and sine of the rotary angles at `positions`, of every table of the model; empty without any."""
    documents: Documents | None = None
    """Of the tokens of the whole sequences, [B, S]; attention stays inside them. None: one document."""
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


def document_positions(documents: Tensor) -> Tensor:
    """int32 [B, S] document numbers -> int64 [B, S] positions that start at 0 in each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


class CausalCore(nn.Module):
    """softmax(score(q, k)) v over what of the past a query sees. The slot where other ways to attend are put.

    `first_head` is the global number of this rank's first query head.
    """

    def __init__(
        self,
        kernel: AttentionKernel,
        dropout: float,
        site: str,
        *,
        sight: Sight = ALL_OF_THE_PAST,
        scoring: Scoring = PLAIN,
    ):
        super().__init__()
        self.kernel = kernel
        self.dropout = dropout
        self.site = site
        self.sight = sight
        self.scoring = scoring
        self.first_head = 0
        self.register_buffer("site_key", site_key(site), persistent=False)

    def fill_buffers(self) -> None:
        """Computes the site's key; called once the module has left the meta device."""
        self.site_key.copy_(site_key(self.site))

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        context: SequenceContext,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """-> [B, T, N, H]. `sinks_N`: a logit for each head, in the softmax's denominator."""
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

        return self.attend_whole(q_BTNH, k_BTKH, v_BTKH, documents=context.documents, sinks_N=sinks_N, drop=drop)

    def attend_whole(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        *,
        documents: Documents | None,
        sinks_N: Tensor | None,
        drop: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """Attention of whole sequences in one call of the kernel."""
        length = q_BTNH.shape[1]
        return self.kernel.attend(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            documents=self.segments(documents, length, device=q_BTNH.device),
            window=self.window(length),
            scoring=self.scoring,
            sinks=sinks_N,
            drop=drop,
        )

    def window(self, length: int) -> int | None:
        """Keys that a query sees, where a sequence of this length has more."""
        if self.sight.window is None or self.sight.window >= length:
            return None
        return self.sight.window

    def segments(self, documents: Documents | None, length: int, *, device: torch.device) -> Documents | None:
        """What attention stays inside of, in rows of `length` tokens. A chunk of a document is a document to it."""
        chunk = self.sight.chunk
        if chunk is None or chunk >= length:
            return documents
        if documents is None:
            positions_BT = torch.arange(length, device=device)[None]
        else:
            positions_BT = document_positions(documents.number)
        return chunks_of(positions_BT, chunk, documents=documents)


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


class MeanSquares(nn.Module):
    """Means of the squares of a token's queries, and of its keys, over all heads: the slot for heads that lie on
    several ranks."""

    def forward(self, q_BTI: Tensor, k_BTI: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, N · H], [B, T, K · H] in at least fp32 -> [B, T, 1] twice"""
        return mean_square(q_BTI), mean_square(k_BTI)


def mean_square(x_BTI: Tensor) -> Tensor:
    """[B, T, I] -> [B, T, 1]"""
    return x_BTI.square().mean(dim=-1, keepdim=True)


def warmed(q_BTNH: Tensor, positions: Tensor, spec: LogTemperature) -> Tensor:
    """Queries times what they have at int64 [T] or [B, T] positions; see LogTemperature."""
    wide = torch.promote_types(q_BTNH.dtype, torch.float32)
    positions_BT = positions.expand(q_BTNH.shape[:2])
    steps = torch.floor((positions_BT.to(wide) + 1) / spec.floor_scale)
    factor = 1 + spec.scale * torch.log1p(steps)
    return (q_BTNH.to(wide) * factor[..., None, None]).to(q_BTNH.dtype)


class Attention(nn.Module):
    """wo(core(turn(norm(q)), turn(norm(k)), v)), [B, T, D] -> [B, T, D].

    `rotation` turns queries and keys by their positions; None: nothing does. `norm(width)` makes what norms queries and
    keys, where `spec.qk_norm` says so; `norm_eps` is its eps.
    """

    recompute_parts = frozenset({"core_attention"})
    fp8_producer = ""
    """The implementation of the rotation that writes the gradient of wqkv in fp8; none: that layer does."""

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
        norm: Callable[[int], nn.Module] | None = None,
        norm_eps: float = 0.0,
    ):
        super().__init__()
        self.d_head = d_head
        self.spec = spec
        queries = n_heads * d_head
        keys = n_kv_heads * d_head
        gate = (queries,) if spec.output_gate else ()
        self.wqkv = Linear(d_model, queries, keys, keys, *gate, bias=spec.qkv_bias)
        self.wo = Linear(queries, d_model, bias=spec.out_bias, residual=True)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.mean_squares: nn.Module | None = None
        if spec.qk_norm == "per_head":
            self.q_norm = norm(d_head)
            self.k_norm = norm(d_head)
        if spec.qk_norm == "whole":
            self.q_norm = norm(queries)
            self.k_norm = norm(keys)
            self.mean_squares = MeanSquares()
        self.l2_norm: nn.Module | None = None
        if spec.qk_norm == "l2" and rotation is not None:
            self.l2_norm = RmsNorm(d_head, RmsNormSpec(eps=norm_eps, weight="none"))
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            self.sinks = nn.Parameter(torch.empty(n_heads))
        self.rotation = rotation
        self.turns_product = rotation is not None and spec.turns_product
        self.core = core
        self.dropout = out

    @property
    def local_heads(self) -> int:
        """Query heads of this rank."""
        return self.wqkv.parts[0] // self.d_head

    @property
    def entry(self) -> Linear | None:
        """The one layer that takes the input, and nothing else does; None: it can't be said of what derives from it."""
        if type(self).forward is not Attention.forward:
            return None
        return self.wqkv

    @property
    def heads(self) -> Heads:
        """Of this rank, in the product of all three."""
        return Heads(self.local_heads, self.wqkv.parts[1] // self.d_head, self.d_head)

    def forward(self, x_BTD: Tensor | Fp8Input, context: SequenceContext) -> Tensor:
        if self.turns_product:
            q, k, v = self._turned(x_BTD, context)
            gate = None
        else:
            q, k, v, gate = self._made(x_BTD, context)
        with marked(ATTENTION):
            o_BTI = self.core(q, k, v, context, self.sinks).flatten(-2)
        if gate is not None:
            o_BTI = o_BTI * torch.sigmoid(gate)
        return self.dropout(self.wo(o_BTI), context.noise)

    def _turned(self, x_BTD: Tensor | Fp8Input, context: SequenceContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, where nothing stands between their product and the rotation."""
        if self.fp8_producer:
            cos, sin = self.rotation.of(context.angles)
            qkv_BTC, slots = self.wqkv.with_slots(x_BTD)
            q, k, v = turned(
                qkv_BTC, slots, cos, sin, heads=self.heads, implementation=self.fp8_producer, before=self.wqkv
            )
        else:
            q, k, v = self.rotation.of_product(self.wqkv(x_BTD), self.heads, context.angles)
        if self.l2_norm is not None:
            q = self.l2_norm(q)
            k = self.l2_norm(k)
        return q, k, v

    def _made(self, x_BTD: Tensor | Fp8Input, context: SequenceContext) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, step by step, and what the output's gate is made of."""
        q, k, v, *gate = self.wqkv(x_BTD).split(self.wqkv.parts, dim=-1)
        if self.mean_squares is not None:
            q, k = self._normed_whole(q, k)
        q, k, v = (part.unflatten(-1, (-1, self.d_head)) for part in (q, k, v))
        if self.mean_squares is None and self.q_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.spec.clip_qkv is not None:
            most = self.spec.clip_qkv
            q, k, v = (part.clamp(-most, most) for part in (q, k, v))
        q, k = self._at_positions(q, k, context)
        return q, k, v, gate[0] if gate else None

    def _normed_whole(self, q_BTI: Tensor, k_BTI: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys normed over all heads of a token."""
        # once for the squares and the norms, which keep them
        wide = torch.promote_types(q_BTI.dtype, torch.float32)
        q_wide = q_BTI.to(wide)
        k_wide = k_BTI.to(wide)
        q_square, k_square = self.mean_squares(q_wide, k_wide)
        return self.q_norm(q_wide, q_square).to(q_BTI.dtype), self.k_norm(k_wide, k_square).to(k_BTI.dtype)

    def _at_positions(self, q_BTNH: Tensor, k_BTKH: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """Queries and keys with what their positions do to them."""
        if self.rotation is None:
            if isinstance(self.spec.temperature, LogTemperature):
                q_BTNH = warmed(q_BTNH, context.positions, self.spec.temperature)
            return q_BTNH, k_BTKH
        q_BTNH, k_BTKH = self.rotation(q_BTNH, k_BTKH, context.angles)
        if self.l2_norm is None:
            return q_BTNH, k_BTKH
        return self.l2_norm(q_BTNH), self.l2_norm(k_BTKH)


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
    norm_eps: float
    """What the model's norms add to a mean square."""
    rotation: Rotation | None
    """Turns queries and keys; None: nothing does."""


def grouped_query(spec: GroupedQuerySpec, setting: AttentionSetting) -> Attention:
    """Grouped-query attention of one layer."""
    core = CausalCore(
        setting.kernel,
        spec.dropout,
        f"{setting.name}.core",
        sight=spec.mask.sight,
        scoring=Scoring(spec.score_scale, spec.score_cap),
    )
    return Attention(
        setting.d_model,
        n_heads=setting.n_heads,
        n_kv_heads=setting.n_kv_heads,
        d_head=setting.d_head,
        spec=spec,
        core=core,
        out=Dropout(setting.dropout, setting.name),
        rotation=setting.rotation,
        norm=setting.norm,
        norm_eps=setting.norm_eps,
    )
