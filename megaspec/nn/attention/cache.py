"""Keys and values that attention keeps of the tokens before, so that a text grows without computing them again.

Note "What is kept". A query sees no more of the past than its mask leaves: of a window of w keys the last w are kept,
of a chunk of c the c of the chunk. The key of position p lies at place p mod C of C places, where one lay before that
no query can see any more. Which positions lie there follows from the last one alone.

Note "Frequencies that follow the length". With dynamic and longrope scaling all rotary angles depend on the length of
the whole text, and so does all that layers made of it: behind the first layer, values too. What is kept then belongs to
another text, and no turning of keys mends that. Whoever feeds tokens starts such a text anew where its frequencies
change (Rope.effective_lengths): with longrope once, with dynamic scaling for each token past original_max_seq_len.
"""

# B sequences of a pass, T new tokens of each, S places that are read, R rows and C places of the cache,
# N query heads, K key and value heads, M = T · N / K, H head size

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaspec.core.errors import UsageError
from megaspec.nn.attention.module import Attention, CausalCore, SequenceContext
from megaspec.nn.decoder import Decoder
from megaspec.nn.layer.module import Layer
from megaspec_kernels.attention.sinks import with_sinks


@dataclass(frozen=True)
class NewTokens:
    """Which sequences a pass goes on with. It comes with the batch (SequenceContext.way), with `positions` [B, T].

    A pass starts sequences, or goes on with ones that were started: with one token of each then.
    """

    rows: Tensor
    """int64 [B]: rows of the cache, all different."""
    counts: Tensor
    """int64 [B]: tokens of each sequence; what lies behind them is padding, at the position of the last one."""
    starts: bool
    """Sequences begin with these tokens: what their rows held is forgotten."""
    longest: int
    """Tokens of the longest sequence, these included."""
    leading: bool
    """The rows are 0, 1, and so on: they are read without a copy."""


class CachedCore(CausalCore):
    """A CausalCore that keeps keys and values of `rows` sequences of up to `length` tokens, in the format in which they
    come. It is of one rank, which has all tokens and may have some of the heads. There is no dropout."""

    def __init__(self, core: CausalCore, *, rows: int, length: int):
        """`core`: what attends without keeping anything."""
        super().__init__(core.kernel, 0.0, core.site, sight=core.sight, scoring=core.scoring)
        self.rows = rows
        self.places = length
        for most in (core.sight.window, core.sight.chunk):
            if most is not None:
                self.places = min(self.places, most)
        # of heads in front of places: what is read of them needs no copy
        self.keys_RKCH: Tensor | None = None
        self.values_RKCH: Tensor | None = None

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        context: SequenceContext,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """-> [B, T, N, H]"""
        new: NewTokens = context.way
        if self.keys_RKCH is None:
            self.keys_RKCH = self._memory(k_BTKH)
            self.values_RKCH = self._memory(v_BTKH)
        if new.starts:
            self._keep_first(k_BTKH, v_BTKH, new)
            return self.attend_whole(q_BTNH, k_BTKH, v_BTKH, documents=None, sinks_N=sinks_N, drop=None)
        # where sequences are split over ranks, a token has padding behind it
        last_B = context.positions[:, 0]
        self._keep_one(k_BTKH[:, 0], v_BTKH[:, 0], last_B, new)
        return self._attend_kept(q_BTNH, last_B, new, sinks_N)

    def _memory(self, x_BTKH: Tensor) -> Tensor:
        _, _, K, H = x_BTKH.shape
        return x_BTKH.new_zeros(self.rows, K, self.places, H)

    def _keep_first(self, k_BTKH: Tensor, v_BTKH: Tensor, new: NewTokens) -> None:
        """The last tokens of each sequence, as many as there are places."""
        place_T = torch.arange(k_BTKH.shape[1], device=k_BTKH.device)
        is_kept_BT = (place_T < new.counts[:, None]) & (place_T >= new.counts[:, None] - self.places)
        sequence, token = is_kept_BT.nonzero(as_tuple=True)
        rows = new.rows[sequence]
        self.keys_RKCH[rows, :, token % self.places] = k_BTKH[sequence, token]
        self.values_RKCH[rows, :, token % self.places] = v_BTKH[sequence, token]

    def _keep_one(self, k_BKH: Tensor, v_BKH: Tensor, position_B: Tensor, new: NewTokens) -> None:
        place_B = position_B % self.places
        self.keys_RKCH[new.rows, :, place_B] = k_BKH
        self.values_RKCH[new.rows, :, place_B] = v_BKH

    def _attend_kept(self, q_BTNH: Tensor, last_B: Tensor, new: NewTokens, sinks_N: Tensor | None) -> Tensor:
        """Queries at the position `last` of each sequence against what is kept of it."""
        B, T, N, _ = q_BTNH.shape
        n_read = min(self.places, new.longest)
        rows = slice(B) if new.leading else new.rows
        k_BSKH = self.keys_RKCH[rows, :, :n_read].transpose(1, 2)
        v_BSKH = self.values_RKCH[rows, :, :n_read].transpose(1, 2)
        is_seen_BS = self._seen(last_B, torch.arange(n_read, device=last_B.device))
        # the queries of a group stand one behind the other, as if they were tokens: so no kernel copies their keys
        K = k_BSKH.shape[2]
        M = T * N // K
        mask_B1MS = is_seen_BS[:, None, None].expand(B, 1, M, n_read)
        q_BMKH = q_BTNH.unflatten(2, (K, -1)).transpose(2, 3).flatten(1, 2)
        out_BMKH, lse_BKM = self.kernel.block_forward(
            q_BMKH, k_BSKH, v_BSKH, causal=False, mask=mask_B1MS, scoring=self.scoring
        )
        out_BTNH = out_BMKH.unflatten(1, (T, -1)).transpose(2, 3).flatten(2, 3)
        if sinks_N is not None:
            lse_BNT = lse_BKM.unflatten(2, (T, -1)).transpose(2, 3).flatten(1, 2)
            out_BTNH, _ = with_sinks(out_BTNH, lse_BNT, sinks_N)
        return out_BTNH

    def _seen(self, last_B: Tensor, place_S: Tensor) -> Tensor:
        """bool [B, S]: whether the newest token of a sequence sees the key at a place."""
        # the last position with that place; below 0 where nothing was laid there yet
        key_BS = last_B[:, None] - (last_B[:, None] - place_S) % self.places
        is_seen_BS = key_BS >= 0
        if self.sight.chunk is not None:
            is_seen_BS &= key_BS // self.sight.chunk == last_B[:, None] // self.sight.chunk
        return is_seen_BS


def uncached(chunks: Sequence[Decoder]) -> list[str]:
    """What of a model can't keep keys and values, in words: a part that is none of ours may look at other tokens in a
    way that nobody here knows."""
    found = []
    for chunk in chunks:
        for number, layer in chunk.layers.items():
            if type(layer) is not Layer:
                found.append(f"layers.{number} is a {type(layer).__name__}")
                continue
            attention = getattr(layer, "attn", None)
            if attention is None:
                continue
            if type(attention) is not Attention:
                found.append(f"layers.{number}.attn is a {type(attention).__name__}")
            elif type(attention.core) is not CausalCore:
                found.append(f"layers.{number}.attn.core is a {type(attention.core).__name__}")
    return found


@contextmanager
def cached(chunks: Sequence[Decoder], *, rows: int, length: int) -> Iterator[None]:
    """While it lasts, every attention keeps keys and values of `rows` sequences of up to `length` tokens, and takes a
    NewTokens with each batch. Raises UsageError for a model that can't."""
    refused = uncached(chunks)
    if refused:
        raise UsageError(f"{refused[0]}, which keeps no keys and values; generate without a cache")
    attentions: list[nn.Module] = []
    for chunk in chunks:
        for layer in chunk.layers.values():
            if hasattr(layer, "attn"):
                attentions.append(layer.attn)
    cores = [attention.core for attention in attentions]
    for attention, core in zip(attentions, cores, strict=True):
        with core.site_key.device:
            attention.core = CachedCore(core, rows=rows, length=length)
    try:
        yield
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = core
