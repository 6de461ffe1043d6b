"""Context parallelism: the tokens of a sequence lie on several ranks, attention still sees all of them.

ring: keys and values go round (Liu et al. 2023), all_gather: every rank gathers them (Llama 3), all_to_all: tokens are
swapped for heads (Jacobs et al. 2023), hierarchical: all-to-all among neighbours, a ring over their groups.

Note on balance: under a causal mask late tokens have more to do than early ones, so the sequence is cut into two chunks
a rank and rank r of n holds chunks r and 2n-1-r (zig-zag). Then in each step of the ring every rank has half a block to
compute: all of its queries see the first chunk of an earlier rank and nothing of the second, and its second chunk of
queries sees both chunks of a later rank while the first sees nothing.
"""

# B sequences, T tokens of this rank, S tokens of the whole sequence,
# N query heads, K key and value heads, H head size; 2 in front: keys and values; lse: log-sum-exp of a query's scores

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspec.core import counted
from megaspec.nn.attention.module import Attention, CausalCore, SequenceContext, drop_attention
from megaspec.parallelism.collectives import all_gather, all_to_all, reduce_scatter, wait
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.spec import ContextSpec
from megaspec_kernels.attention.documents import BlockDocuments, Documents
from megaspec_kernels.attention.scoring import Scoring
from megaspec_kernels.attention.sinks import sinks_gradient, with_sinks
from megaspec_kernels.registry import AttentionKernel, AttentionMergeKernel


def token_index(
    kind: str,
    length: int,
    cp: int,
    rank: int,
    factors: tuple[int, int] | None = None,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """int64 [length / cp]: the places in the whole sequence of the tokens that a rank holds.

    ring, all_gather: chunks `rank` and 2 cp - 1 - `rank` of 2 cp. all_to_all: part `rank` of cp. hierarchical with
    `factors` (a, b): a neighbours hold chunks g and 2 b - 1 - g of 2 b together, where g is the number of their group,
    and divide them evenly in this order.
    """
    chunks = 1 if cp == 1 or kind == "all_to_all" else 2
    assert length % (chunks * cp) == 0, f"{length} tokens don't divide into {chunks} chunks on each of {cp} ranks"
    tokens_here = length // cp
    if kind == "hierarchical" and cp > 1:
        a, b = factors
        assert a * b == cp, f"factors {factors}, cp {cp}"
        of_neighbours = token_index("ring", length, b, rank // a, device=device)
        first = rank % a * tokens_here
        return of_neighbours[first : first + tokens_here]
    if chunks == 1:
        return torch.arange(rank * tokens_here, (rank + 1) * tokens_here, device=device)
    # see the note on balance: one early, one late
    chunk = tokens_here // 2
    starts = (rank * chunk, (2 * cp - 1 - rank) * chunk)
    return torch.cat([torch.arange(start, start + chunk, device=device) for start in starts])


Places = tuple[Tensor | None, Tensor | None]
"""int64 [T] and [S]: the places in the whole sequence of queries and of keys; None where nothing depends on them."""


@dataclass(frozen=True)
class AttentionBlock:
    """Queries against keys, as slices of what is at hand; `causal`: they are the same tokens."""

    queries: slice
    keys: slice
    causal: bool = False


@dataclass(frozen=True)
class BlockAttention:
    """Attention block by block: its kernels, and beside q, k and v which keys a query may see, and dropout."""

    attention: AttentionKernel
    merging: AttentionMergeKernel
    length: int
    """S"""
    documents: Documents | None
    """Of the whole sequences."""
    window: int | None
    """Keys that a query sees, itself the last; None: all before it."""
    scoring: Scoring
    drop: Callable[..., Tensor] | None
    """(weights [B, N, T, S], queries=int64 [T], keys=int64 [S]) -> weights"""

    @property
    def reach(self) -> int | None:
        """A bound on the keys that a query sees, itself the last; None: all before it."""
        bounds = []
        if self.window is not None:
            bounds.append(self.window)
        if self.documents is not None:
            bounds.append(self.documents.longest)
        return min(bounds, default=None)

    @property
    def needs_places(self) -> bool:
        """Whether blocks depend on where in the sequence their tokens are."""
        return self.documents is not None or self.window is not None or self.drop is not None

    def forward(self, block: AttentionBlock, places: Places, q_BTNH: Tensor, kv_2BSKH: Tensor) -> tuple[Tensor, Tensor]:
        """-> output and log-sum-exp of the block's queries"""
        k, v = kv_2BSKH[:, :, block.keys]
        return self.attention.block_forward(q_BTNH[:, block.queries], k, v, **self._options(block, *places))

    def backward(
        self,
        block: AttentionBlock,
        places: Places,
        grad_BTNH: Tensor,
        q_BTNH: Tensor,
        kv_2BSKH: Tensor,
        out_BTNH: Tensor,
        lse_BNT: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> what the block adds to the gradients of its queries, keys and values"""
        grad = grad_BTNH[:, block.queries]
        q = q_BTNH[:, block.queries]
        k, v = kv_2BSKH[:, :, block.keys]
        out = out_BTNH[:, block.queries]
        lse = lse_BNT[:, :, block.queries]
        return self.attention.block_backward(grad, q, k, v, out, lse, **self._options(block, *places))

    def causal_halves(
        self, grad_BTNH: Tensor, q_BTNH: Tensor, kv_2BTKH: Tensor, out_BTNH: Tensor, lse_BNT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> what either half of the tokens adds to its own gradients, as two sequences of one call.

        Where blocks depend on no places.
        """
        # [B, T, ...] -> [2 B, T / 2, ...]
        halves = [x.unflatten(1, (2, -1)).flatten(0, 1) for x in (grad_BTNH, q_BTNH, *kv_2BTKH, out_BTNH)]
        lse = lse_BNT.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)
        grads = self.attention.block_backward(*halves, lse, causal=True, scoring=self.scoring)
        return tuple(x.unflatten(0, (-1, 2)).flatten(1, 2) for x in grads)

    def _options(self, block: AttentionBlock, queries: Tensor | None, keys: Tensor | None) -> dict[str, Any]:
        """What the kernels take besides. `queries`, `keys`: places of those at hand."""
        options: dict[str, Any] = {"causal": block.causal, "scoring": self.scoring}
        if self.needs_places:
            keys = keys[block.keys]
            queries = queries[block.queries]
        if self.documents is not None:
            of_queries = self.documents.at(queries)
            of_keys = of_queries if block.causal else self.documents.at(keys)
            options["documents"] = BlockDocuments(of_queries, of_keys)
        if self.window is not None:
            # Places, since a block's queries may begin anywhere behind its keys: a mask, which costs what it hides.
            # That keys come before their queries, the block says.
            is_near = queries[:, None] - keys[None, :] < self.window
            options["mask"] = is_near[None, None]
        if self.drop is not None:
            options["drop"] = partial(self.drop, queries=queries, keys=keys)
        return options


class OnlineSoftmax:
    """Output and log-sum-exp of this rank's queries, merged in at least fp32 from the blocks seen so far (Milakov and
    Gimelshein 2018; Liu et al. 2023).

    The causal block of a query comes first: there it sees itself at least, and its log-sum-exp is finite from then on.
    """

    def __init__(self, q_BTNH: Tensor, merging: AttentionMergeKernel):
        B, T, N, _ = q_BTNH.shape
        wide = torch.promote_types(q_BTNH.dtype, torch.float32)
        self.merging = merging
        self.out_BTNH = torch.empty(q_BTNH.shape, dtype=wide, device=q_BTNH.device)
        self.lse_BNT = torch.empty(B, N, T, dtype=wide, device=q_BTNH.device)

    def merge(self, block: AttentionBlock, out_BTNH: Tensor, lse_BNT: Tensor) -> None:
        """Takes in what the block's queries see of its keys."""
        out = self.out_BTNH[:, block.queries]
        lse = self.lse_BNT[:, :, block.queries]
        if block.causal:
            out.copy_(out_BTNH)
            lse.copy_(lse_BNT)
        else:
            self.merging.merge(out, lse, out_BTNH, lse_BNT)

    def rows(self, dtype: torch.dtype, sinks_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output in a format, and the log-sum-exp, of all blocks with the sinks."""
        if sinks_N is None:
            return self.out_BTNH.to(dtype), self.lse_BNT
        out_BTNH, lse_BNT = with_sinks(self.out_BTNH, self.lse_BNT, sinks_N)
        return out_BTNH.to(dtype), lse_BNT


def ring_block(rank: int, source: int, tokens: int, reach: int | None = None) -> AttentionBlock | None:
    """What a rank's queries see of the keys of rank `source`; see the note on balance. None: nothing, for all of them
    are out of reach (BlockAttention.reach)."""
    every = slice(0, tokens)
    early, late = _halves(tokens)
    if source == rank:
        return AttentionBlock(every, every, causal=True)
    # the chunks of both that are nearest to each other: early ones, or late ones, lie as far apart as the ranks
    between = (abs(rank - source) - 1) * early.stop
    if reach is not None and between + 1 >= reach:
        return None
    if source < rank:
        return AttentionBlock(every, early)
    return AttentionBlock(late, every)


def gathered_blocks(rank: int, size: int, tokens: int, reach: int | None = None) -> Iterator[AttentionBlock]:
    """What a rank's queries see of the keys of the whole sequence in order; with a reach (BlockAttention.reach), from
    the first key that one of them may see."""
    chunk = tokens // 2
    numbers = (rank, 2 * size - 1 - rank)
    for queries, number in zip(_halves(tokens), numbers, strict=True):
        start = number * chunk
        yield AttentionBlock(queries, slice(start, start + chunk), causal=True)
        first = 0
        if reach is not None:
            first = max(0, start - reach + 1)
        if first < start:
            yield AttentionBlock(queries, slice(first, start))


@dataclass
class SendRecv:
    """Tensors under way to the next rank of a ring, and those of the previous rank under way to here."""

    outgoing: tuple[Tensor, ...]
    incoming: tuple[Tensor, ...]
    works: list[dist.Work]

    def wait(self) -> tuple[Tensor, ...]:
        """What has come from the previous rank."""
        for work in self.works:
            counted.wait(work)
        return self.incoming


def send_recv(group: dist.ProcessGroup, *outgoing: Tensor) -> SendRecv:
    """Starts to send tensors to the next rank and to receive the previous one's."""
    following = dist.get_global_rank(group, (group.rank() + 1) % group.size())
    previous = dist.get_global_rank(group, (group.rank() - 1) % group.size())
    incoming = tuple(torch.empty_like(x) for x in outgoing)
    ops = [dist.P2POp(dist.isend, x, following, group, tag) for tag, x in enumerate(outgoing)]
    ops += [dist.P2POp(dist.irecv, x, previous, group, tag) for tag, x in enumerate(incoming)]
    works = counted.batch_isend_irecv(ops) if ops else []
    return SendRecv(outgoing, incoming, works)


class _RingAttention(torch.autograd.Function):
    """Forward: k and v go round. Backward: they go round again, their gradients one step behind them."""

    @staticmethod
    def forward(ctx, q_BTNH, k_BTKH, v_BTKH, sinks_N, attention, group):
        softmax = OnlineSoftmax(q_BTNH, attention.merging)
        own_kv = torch.stack((k_BTKH, v_BTKH))
        # of the rank whose turn it is
        kv = own_kv
        for source, places in _ring_sources(q_BTNH, attention, group):
            is_last = _is_last(source, group)
            # before the block is computed, so that it hides behind it
            handle = None if is_last else send_recv(group, kv)
            block = ring_block(group.rank(), source, q_BTNH.shape[1], attention.reach)
            if block is not None:
                softmax.merge(block, *attention.forward(block, places, q_BTNH, kv))
            if not is_last:
                (kv,) = handle.wait()
        out_BTNH, lse_BNT = softmax.rows(q_BTNH.dtype, sinks_N)
        ctx.save_for_backward(q_BTNH, own_kv, sinks_N, out_BTNH, lse_BNT)
        ctx.attention = attention
        ctx.group = group
        return out_BTNH

    @staticmethod
    def backward(ctx, grad_BTNH):
        q_BTNH, own_kv, sinks_N, out_BTNH, lse_BNT = ctx.saved_tensors
        attention = ctx.attention
        group = ctx.group
        wide = lse_BNT.dtype
        early, late = _halves(q_BTNH.shape[1])
        (_, here), *others = _ring_sources(q_BTNH, attention, group)

        def gradients(block: AttentionBlock, places: Places, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return attention.backward(block, places, grad_BTNH, q_BTNH, kv, out_BTNH, lse_BNT)

        # The block on the diagonal comes in two: what is causal, behind which the first transfer hides, and the rest,
        # behind which the last one does.
        handle = send_recv(group, own_kv)
        d_q = torch.empty_like(q_BTNH, dtype=wide)
        d_own_kv = torch.empty_like(own_kv, dtype=wide)
        if attention.needs_places:
            for half in (early, late):
                grads = gradients(AttentionBlock(half, half, causal=True), here, own_kv)
                _put_gradients(grads, d_q[:, half], d_own_kv[:, :, half])
        else:
            grads = attention.causal_halves(grad_BTNH, q_BTNH, own_kv, out_BTNH, lse_BNT)
            _put_gradients(grads, d_q, d_own_kv)
        (kv,) = handle.wait()
        # of the keys and values at hand, one step behind them; there are none before the first block
        d_kv: Tensor | None = None
        for source, places in others:
            is_last = _is_last(source, group)
            outgoing = [] if is_last else [kv]
            if d_kv is not None:
                outgoing.append(d_kv)
            handle = send_recv(group, *outgoing)
            block = ring_block(group.rank(), source, q_BTNH.shape[1], attention.reach)
            grads = None if block is None else gradients(block, places, kv)
            arrived = handle.wait()
            d_kv = torch.zeros_like(d_own_kv) if d_kv is None else arrived[-1]
            if grads is not None:
                _add_gradients(attention.merging, block, grads, d_q, d_kv)
            if not is_last:
                kv = arrived[0]
        # the last hop takes the gradients home
        handle = send_recv(group, d_kv)
        block = AttentionBlock(late, early)
        _add_gradients(attention.merging, block, gradients(block, here, own_kv), d_q, d_own_kv)
        d_own_kv += handle.wait()[0]
        d_sinks = None if sinks_N is None else sinks_gradient(grad_BTNH, out_BTNH, lse_BNT, sinks_N)
        return d_q.to(q_BTNH.dtype), *d_own_kv.to(own_kv.dtype), d_sinks, None, None


def _halves(tokens: int) -> tuple[slice, slice]:
    """The early and the late chunk of a rank's tokens."""
    return slice(0, tokens // 2), slice(tokens // 2, tokens)


def _put_gradients(grads: tuple[Tensor, Tensor, Tensor], d_q: Tensor, d_kv: Tensor) -> None:
    """The first gradients of queries, keys and values."""
    for buffer, grad in zip((d_q, *d_kv), grads, strict=True):
        buffer.copy_(grad)


def _add_gradients(
    merging: AttentionMergeKernel,
    block: AttentionBlock,
    grads: tuple[Tensor, Tensor, Tensor],
    d_q: Tensor,
    d_kv: Tensor,
) -> None:
    """Adds a block's gradients to those of all queries and of the keys and values at hand."""
    for buffer, grad in zip((d_q[:, block.queries], *d_kv[:, :, block.keys]), grads, strict=True):
        merging.add(buffer, grad)


def _ring_sources(q_BTNH: Tensor, attention: BlockAttention, group: dist.ProcessGroup) -> Iterator[tuple[int, Places]]:
    """The ranks whose keys come by, this rank first, with the places of the queries and of those keys."""
    rank = group.rank()
    size = group.size()
    places_of = partial(token_index, "ring", attention.length, size, device=q_BTNH.device)
    queries = places_of(rank) if attention.needs_places else None
    for step in range(size):
        source = (rank - step) % size
        keys = places_of(source) if attention.needs_places else None
        yield source, (queries, keys)


def _is_last(source: int, group: dist.ProcessGroup) -> bool:
    """The keys of the next rank come last: they have gone round."""
    return source == (group.rank() + 1) % group.size()


class _GatheredAttention(torch.autograd.Function):
    """Forward: k and v are gathered. Backward: gathered again, their gradients summed to the ranks they are of."""

    @staticmethod
    def forward(ctx, q_BTNH, k_BTKH, v_BTKH, sinks_N, attention, group):
        softmax = OnlineSoftmax(q_BTNH, attention.merging)
        own_kv = torch.stack((k_BTKH, v_BTKH))
        kv_2BSKH = _gather_chunks(own_kv, group)
        places = _gathered_places(q_BTNH, attention, group)
        for block in gathered_blocks(group.rank(), group.size(), q_BTNH.shape[1], attention.reach):
            softmax.merge(block, *attention.forward(block, places, q_BTNH, kv_2BSKH))
        out_BTNH, lse_BNT = softmax.rows(q_BTNH.dtype, sinks_N)
        # the gathered ones are not kept: they are as large as all ranks' together
        ctx.save_for_backward(q_BTNH, own_kv, sinks_N, out_BTNH, lse_BNT)
        ctx.attention = attention
        ctx.group = group
        return out_BTNH

    @staticmethod
    def backward(ctx, grad_BTNH):
        q_BTNH, own_kv, sinks_N, out_BTNH, lse_BNT = ctx.saved_tensors
        attention = ctx.attention
        group = ctx.group
        kv_2BSKH = _gather_chunks(own_kv, group)
        places = _gathered_places(q_BTNH, attention, group)
        d_q = torch.zeros_like(q_BTNH, dtype=lse_BNT.dtype)
        d_kv = torch.zeros_like(kv_2BSKH, dtype=lse_BNT.dtype)
        for block in gathered_blocks(group.rank(), group.size(), q_BTNH.shape[1], attention.reach):
            grads = attention.backward(block, places, grad_BTNH, q_BTNH, kv_2BSKH, out_BTNH, lse_BNT)
            _add_gradients(attention.merging, block, grads, d_q, d_kv)
        d_own_kv = _reduce_scatter_chunks(d_kv, group)
        d_sinks = None if sinks_N is None else sinks_gradient(grad_BTNH, out_BTNH, lse_BNT, sinks_N)
        return d_q.to(q_BTNH.dtype), *d_own_kv.to(own_kv.dtype), d_sinks, None, None


def _gathered_places(q_BTNH: Tensor, attention: BlockAttention, group: dist.ProcessGroup) -> Places:
    """The places of the queries and of the keys of the whole sequence."""
    if not attention.needs_places:
        return None, None
    device = q_BTNH.device
    queries = token_index("all_gather", attention.length, group.size(), group.rank(), device=device)
    return queries, torch.arange(attention.length, device=device)


def _gather_chunks(kv_2BTKH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[2, B, T, K, H] of each rank -> [2, B, S, K, H] in the order of the sequence."""
    chunk = kv_2BTKH.shape[2] // 2
    # [ranks, 2, B, T, K, H]
    of_ranks = wait(all_gather(kv_2BTKH[None], group))
    early = of_ranks[:, :, :, :chunk]
    late = of_ranks[:, :, :, chunk:]
    # the last rank's late chunk is the first one of the second half
    return torch.cat((*early, *reversed(late.unbind())), dim=2)


def _reduce_scatter_chunks(whole_2BSKH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of [2, B, S, K, H] in the order of the sequence -> each rank's own [2, B, T, K, H]."""
    size = group.size()
    chunks = whole_2BSKH.chunk(2 * size, dim=2)
    of_ranks = []
    for rank in range(size):
        of_ranks.append(torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=2))
    return wait(reduce_scatter(torch.stack(of_ranks), group))[0]


class _Exchange(torch.autograd.Function):
    """Forward: part j of dimension 0 goes to rank j, part j comes from rank j. Backward: the same."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # of dimension 0 each rank gets one
    ones = [1] * group.size()
    return wait(all_to_all(x, ones, ones, group))


def tokens_to_heads(group: dist.ProcessGroup, *xs_BTNH: Tensor) -> tuple[Tensor, ...]:
    """Forward: [B, T, N, H] of each of n ranks -> its N/n heads of all n T tokens. Backward: heads to tokens."""
    size = group.size()
    # each [n, B, T, N/n, H], by the rank that gets the heads; all in one message
    by_heads = [x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4) for x in xs_BTNH]
    # [n, B, T, heads, H], by the rank whose tokens they are
    by_tokens = _Exchange.apply(torch.cat(by_heads, dim=3), group)
    all_tokens = by_tokens.transpose(0, 1).flatten(1, 2)
    return all_tokens.split([x.shape[3] for x in by_heads], dim=2)


def heads_to_tokens(group: dist.ProcessGroup, x_BTNH: Tensor) -> Tensor:
    """Forward: N/n heads of n T tokens of each of n ranks -> its T tokens of N heads. Backward: tokens to heads."""
    # [n, B, T, N/n, H], by the rank that gets the tokens
    by_tokens = x_BTNH.unflatten(1, (group.size(), -1)).transpose(0, 1)
    by_heads = _Exchange.apply(by_tokens, group)
    return by_heads.permute(1, 2, 0, 3, 4).flatten(2, 3)


@dataclass(frozen=True)
class Way:
    """How the ranks of a sequence attend. It comes with a batch (SequenceContext.way), so that another batch may lie on
    other ranks, or on fewer.

    Heads are exchanged for tokens over `heads`, then keys and values go round `ring` or are gathered over `gather`; a
    group is None where there is nothing to do.
    """

    heads: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    gather: dist.ProcessGroup | None = None


class ContextCore(CausalCore):
    """A CausalCore whose queries, keys and values are those of this rank's tokens; see token_index.

    `merging`: how blocks of attention are put together.
    """

    def __init__(self, core: CausalCore, merging: AttentionMergeKernel):
        """`core`: what attends on one rank."""
        super().__init__(core.kernel, core.dropout, core.site, sight=core.sight, scoring=core.scoring)
        self.first_head = core.first_head
        self.merging = merging
        # here, and not around the method: it loads the compiler
        why = "messages between two ranks, and blocks whose order depends on the rank"
        self._attend_in_blocks = torch.compiler.disable(self._attend_in_blocks, reason=why)

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        context: SequenceContext,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """-> [B, T, N, H]"""
        way = context.way
        first_head = self.first_head
        if way is None:
            here = q_BTNH.shape[1]
            assert here == context.length, f"{here} of {context.length} tokens, and no way to the others"
            return super().forward(q_BTNH, k_BTKH, v_BTKH, context, sinks_N)
        if way.heads is not None:
            q_BTNH, k_BTKH, v_BTKH = tokens_to_heads(way.heads, q_BTNH, k_BTKH, v_BTKH)
            heads_here = q_BTNH.shape[2]
            first_here = way.heads.rank() * heads_here
            first_head += first_here
            if sinks_N is not None:
                sinks_N = sinks_N[first_here : first_here + heads_here]
        if way.ring is None and way.gather is None:
            drop = self._drop(context, first_head)
            if drop is not None:
                places = torch.arange(context.length, device=q_BTNH.device)
                drop = partial(drop, queries=places, keys=places)
            out_BTNH = self.attend_whole(
                q_BTNH, k_BTKH, v_BTKH, documents=context.documents, sinks_N=sinks_N, drop=drop
            )
        else:
            out_BTNH = self._attend_in_blocks(q_BTNH, k_BTKH, v_BTKH, context, sinks_N, first_head)
        return out_BTNH if way.heads is None else heads_to_tokens(way.heads, out_BTNH)

    def _attend_in_blocks(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        context: SequenceContext,
        sinks_N: Tensor | None,
        first_head: int,
    ) -> Tensor:
        attention = BlockAttention(
            self.kernel,
            self.merging,
            context.length,
            self.segments(context.documents, context.length, device=q_BTNH.device),
            self.window(context.length),
            self.scoring,
            self._drop(context, first_head),
        )
        if context.way.heads is not None:
            # a ring keeps keys and values of its own: queries shall not keep the tensor that all three came in
            q_BTNH = q_BTNH.contiguous()
        if context.way.ring is not None:
            return _RingAttention.apply(q_BTNH, k_BTKH, v_BTKH, sinks_N, attention, context.way.ring)
        return _GatheredAttention.apply(q_BTNH, k_BTKH, v_BTKH, sinks_N, attention, context.way.gather)

    def _drop(self, context: SequenceContext, first_head: int) -> Callable[..., Tensor] | None:
        noise = context.noise
        if noise is None or self.dropout == 0:
            return None
        key = noise.key(self.site_key)
        ids = noise.ids
        probability = self.dropout

        def drop(weights_BNTS: Tensor, *, queries: Tensor, keys: Tensor) -> Tensor:
            return drop_attention(
                weights_BNTS, probability, key=key, ids=ids, first_head=first_head, queries=queries, keys=keys
            )

        return drop


class ContextParallel:
    """Strategy: every attention of a model sees the whole sequence, of which each rank of axis cp has a part.

    `way` and `index` are what a batch needs that lies on all ranks of the axis; the model knows of neither. `merging`
    puts blocks of attention together.
    """

    def __init__(self, mesh: Mesh, spec: ContextSpec, merging: AttentionMergeKernel):
        self.mesh = mesh
        self.spec = spec
        self.merging = merging
        self.way = self._make_way()
        self._indices: dict[tuple[int, int], Tensor] = {}
        """By length and rank."""

    def _make_way(self) -> Way | None:
        """All ranks must call it together: it makes groups. None: each rank has whole sequences."""
        group = self.mesh.group("cp")
        if group is None:
            return None
        if self.spec.kind == "hierarchical":
            a, b = self.spec.factors
            assert a * b == self.mesh.size("cp"), f"factors {self.spec.factors}, cp {self.mesh.size('cp')}"
            return Way(heads=self.mesh.neighbours("cp", a), ring=self.mesh.strided("cp", a))
        if self.spec.kind == "all_gather":
            return Way(gather=group)
        if self.spec.kind == "all_to_all":
            return Way(heads=group)
        return Way(ring=group)

    def split_model(self, model: nn.Module) -> None:
        """Puts a ContextCore with the same settings in the place of every CausalCore."""
        if self.way is None:
            return
        for module in model.modules():
            if isinstance(module, Attention):
                core = module.core
                assert type(core) is CausalCore, f"{type(core).__name__} has no context parallel twin"
                with core.site_key.device:
                    module.core = ContextCore(core, self.merging)

    def split_batch(self, x_BS: Tensor) -> Tensor:
        """Whole sequences, [B, S] -> this rank's tokens of them, [B, T]."""
        index_T = self.index(x_BS.shape[1])
        if x_BS.shape[1] == index_T.shape[0]:
            return x_BS
        return x_BS[:, index_T]

    def index(self, length: int, rank: int | None = None) -> Tensor:
        """int64 [T]: the places of the tokens of a cp rank, by default this one, in a sequence of `length`, on the
        mesh's device."""
        if rank is None:
            rank = self.mesh.index("cp")
        if (length, rank) not in self._indices:
            self._indices[length, rank] = token_index(
                self.spec.kind,
                length,
                self.mesh.size("cp"),
                rank,
                self.spec.factors,
                device=self.mesh.device,
            )
        return self._indices[length, rank]
