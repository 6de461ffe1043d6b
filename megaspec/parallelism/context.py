"""Context parallelism: the tokens of a sequence lie on several ranks, attention still sees all of them.

ring: keys and values go round (Liu et al. 2023), all_gather: every rank gathers them (Llama 3), all_to_all: tokens are
swapped for heads (Jacobs et al. 2023), hierarchical: all-to-all among neighbours, a ring over their groups.

Note on balance: under a causal mask late tokens have more to do than early ones, so the sequence is cut into two chunks
a rank and rank r of n holds chunks r and 2n-1-r (zig-zag). Then in each step of the ring every rank has half a block to
compute: all of its queries see the first chunk of an earlier rank and nothing of the second, and its second chunk of
queries sees both chunks of a later rank while the first sees nothing.
"""

# B sequences, T tokens of this rank, S tokens of the whole sequence, C tokens of a chunk,
# N query heads, K key and value heads, H head size; 2 in front: keys and values

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspec.nn.attention import Attention, CausalCore, SequenceContext, drop_attention
from megaspec.parallelism.collectives import all_gather, all_to_all, reduce_scatter, wait
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.spec import ContextSpec
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
    own = length // cp
    if kind == "hierarchical" and cp > 1:
        a, b = factors
        assert a * b == cp, f"factors {factors}, cp {cp}"
        pair = token_index("ring", length, b, rank // a, device=device)
        return pair[rank % a * own : (rank % a + 1) * own]
    if chunks == 1:
        return torch.arange(rank * own, (rank + 1) * own, device=device)
    chunk = own // 2
    starts = (rank * chunk, (2 * cp - 1 - rank) * chunk)
    return torch.cat([torch.arange(start, start + chunk, device=device) for start in starts])


Places = tuple[Tensor | None, Tensor | None]
"""int64 [T] and [S]: the places in the whole sequence of queries and of keys; None where nothing depends on them."""


@dataclass(frozen=True)
class Part:
    """Queries against keys, as slices of what is at hand; `causal`: they are the same tokens."""

    queries: slice
    keys: slice
    causal: bool = False


@dataclass(frozen=True)
class Sight:
    """What attention needs beside q, k and v: its kernels, which keys a query may see, and dropout."""

    attention: AttentionKernel
    merging: AttentionMergeKernel
    length: int
    documents: Tensor | None
    """int32 [B, S]"""
    drop: Callable[..., Tensor] | None
    """(weights [B, N, T, S], queries=int64 [T], keys=int64 [S]) -> weights"""

    @property
    def needs_places(self) -> bool:
        """Whether blocks depend on where in the sequence their tokens are."""
        return self.documents is not None or self.drop is not None

    def forward(self, part: Part, places: Places, q_BTNH: Tensor, kv_2BSKH: Tensor) -> tuple[Tensor, Tensor]:
        """-> output and log-sum-exp of the queries of `part`"""
        k, v = kv_2BSKH[:, :, part.keys]
        return self.attention.block_forward(q_BTNH[:, part.queries], k, v, **self._options(part, *places))

    def backward(
        self,
        part: Part,
        places: Places,
        grad_BTNH: Tensor,
        q_BTNH: Tensor,
        kv_2BSKH: Tensor,
        out_BTNH: Tensor,
        lse_BNT: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> what `part` adds to the gradients of its queries, keys and values"""
        grad, q, out = (x[:, part.queries] for x in (grad_BTNH, q_BTNH, out_BTNH))
        k, v = kv_2BSKH[:, :, part.keys]
        options = self._options(part, *places)
        return self.attention.block_backward(grad, q, k, v, out, lse_BNT[:, :, part.queries], **options)

    def causal_halves(
        self, grad_BTNH: Tensor, q_BTNH: Tensor, kv_2BTKH: Tensor, out_BTNH: Tensor, lse_BNT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> what either half of the tokens adds to its own gradients, as two sequences of one call.

        Where blocks depend on no places.
        """
        grad, q, k, v, out = (x.unflatten(1, (2, -1)).flatten(0, 1) for x in (grad_BTNH, q_BTNH, *kv_2BTKH, out_BTNH))
        lse = lse_BNT.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)
        grads = self.attention.block_backward(grad, q, k, v, out, lse, causal=True, mask=None, drop=None)
        return tuple(x.unflatten(0, (-1, 2)).flatten(1, 2) for x in grads)

    def _options(self, part: Part, queries: Tensor | None, keys: Tensor | None) -> dict[str, Any]:
        mask = drop = None
        if self.needs_places:
            queries, keys = queries[part.queries], keys[part.keys]
        if self.documents is not None:
            mask = (self.documents[:, queries][:, :, None] == self.documents[:, keys][:, None, :])[:, None]
        if self.drop is not None:
            drop = partial(self.drop, queries=queries, keys=keys)
        return {"causal": part.causal, "mask": mask, "drop": drop}


class Rows:
    """Output and log-sum-exp of this rank's queries, merged in at least fp32 from the parts seen so far.

    The causal part of a query comes first: there it sees itself at least, and its log-sum-exp is finite from then on.
    """

    def __init__(self, q_BTNH: Tensor, merging: AttentionMergeKernel):
        B, T, N, _ = q_BTNH.shape
        wide = torch.promote_types(q_BTNH.dtype, torch.float32)
        self.merging = merging
        self.out_BTNH = torch.empty(q_BTNH.shape, dtype=wide, device=q_BTNH.device)
        self.lse_BNT = torch.empty(B, N, T, dtype=wide, device=q_BTNH.device)

    def merge(self, part: Part, out_BTNH: Tensor, lse_BNT: Tensor) -> None:
        """Takes in what the queries of `part` see of its keys."""
        out, lse = self.out_BTNH[:, part.queries], self.lse_BNT[:, :, part.queries]
        if part.causal:
            out.copy_(out_BTNH)
            lse.copy_(lse_BNT)
        else:
            self.merging.merge(out, lse, out_BTNH, lse_BNT)


def ring_part(rank: int, source: int, tokens: int) -> Part:
    """What a rank's queries see of the keys of rank `source`; see the note on balance."""
    every, (first, second) = slice(0, tokens), _halves(tokens)
    if source == rank:
        return Part(every, every, causal=True)
    return Part(every, first) if source < rank else Part(second, every)


def gathered_parts(rank: int, size: int, tokens: int) -> Iterator[Part]:
    """What a rank's queries see of the keys of the whole sequence in order."""
    chunk = tokens // 2
    for own, number in enumerate((rank, 2 * size - 1 - rank)):
        queries, start = slice(own * chunk, (own + 1) * chunk), number * chunk
        yield Part(queries, slice(start, start + chunk), causal=True)
        if start:
            yield Part(queries, slice(0, start))


@dataclass
class SendRecv:
    """Tensors under way to the next rank of a ring, and those of the previous rank under way to here."""

    outgoing: tuple[Tensor, ...]
    incoming: tuple[Tensor, ...]
    works: list[dist.Work]

    def wait(self) -> tuple[Tensor, ...]:
        """What has come from the previous rank."""
        for work in self.works:
            work.wait()
        return self.incoming


def send_recv(group: dist.ProcessGroup, *outgoing: Tensor) -> SendRecv:
    """Starts to send tensors to the next rank and to receive the previous one's."""
    rank, size = group.rank(), group.size()
    following, previous = (dist.get_global_rank(group, r % size) for r in (rank + 1, rank - 1))
    incoming = tuple(torch.empty_like(x) for x in outgoing)
    ops = [dist.P2POp(dist.isend, x, following, group, tag) for tag, x in enumerate(outgoing)]
    ops += [dist.P2POp(dist.irecv, x, previous, group, tag) for tag, x in enumerate(incoming)]
    return SendRecv(outgoing, incoming, dist.batch_isend_irecv(ops) if ops else [])


class _RingAttention(torch.autograd.Function):
    """Forward: k and v go round. Backward: they go round again, their gradients one step behind them."""

    @staticmethod
    def forward(ctx, q_BTNH, k_BTKH, v_BTKH, sight, group):
        rows, own = Rows(q_BTNH, sight.merging), torch.stack((k_BTKH, v_BTKH))
        kv = own
        for source, places in _round(q_BTNH, sight, group):
            last = source == (group.rank() + 1) % group.size()
            handle = send_recv(group, *(() if last else (kv,)))
            part = ring_part(group.rank(), source, q_BTNH.shape[1])
            rows.merge(part, *sight.forward(part, places, q_BTNH, kv))
            if not last:
                (kv,) = handle.wait()
        out_BTNH = rows.out_BTNH.to(q_BTNH.dtype)
        ctx.save_for_backward(q_BTNH, own, out_BTNH, rows.lse_BNT)
        ctx.sight, ctx.group = sight, group
        return out_BTNH

    @staticmethod
    def backward(ctx, grad_BTNH):
        q_BTNH, own, out_BTNH, lse_BNT = ctx.saved_tensors
        sight, group, T, wide = ctx.sight, ctx.group, q_BTNH.shape[1], lse_BNT.dtype
        kv, d_kv = own, None
        (_, here), *others = _round(q_BTNH, sight, group)

        def gradients(part: Part, places: Places) -> tuple[Tensor, Tensor, Tensor]:
            return sight.backward(part, places, grad_BTNH, q_BTNH, kv, out_BTNH, lse_BNT)

        # the block on the diagonal comes in parts: what is causal, behind which the first transfer hides, and the rest,
        # behind which the last one does
        handle = send_recv(group, kv)
        d_q, d_own = torch.empty_like(q_BTNH, dtype=wide), torch.empty_like(own, dtype=wide)
        if sight.needs_places:
            for half in _halves(T):
                grads = gradients(Part(half, half, causal=True), here)
                _place(grads, d_q[:, half], d_own[:, :, half])
        else:
            grads = sight.causal_halves(grad_BTNH, q_BTNH, own, out_BTNH, lse_BNT)
            _place(grads, d_q, d_own)
        (kv,) = handle.wait()
        for source, places in others:
            last = source == (group.rank() + 1) % group.size()
            handle = send_recv(group, *(() if last else (kv,)), *(() if d_kv is None else (d_kv,)))
            part = ring_part(group.rank(), source, T)
            grads = gradients(part, places)
            arrived = handle.wait()
            d_kv = torch.zeros_like(d_own) if d_kv is None else arrived[-1]
            _collect(sight.merging, part, grads, d_q, d_kv)
            kv = own if last else arrived[0]
        handle = send_recv(group, d_kv)
        early, late = _halves(T)
        part = Part(late, early)
        _collect(sight.merging, part, gradients(part, here), d_q, d_own)
        d_own += handle.wait()[0]
        return d_q.to(q_BTNH.dtype), *d_own.to(own.dtype), None, None


def _halves(tokens: int) -> tuple[slice, slice]:
    return slice(0, tokens // 2), slice(tokens // 2, tokens)


def _place(grads: tuple[Tensor, Tensor, Tensor], d_q: Tensor, d_kv: Tensor) -> None:
    """The first gradients of queries, keys and values."""
    for total, grad in zip((d_q, *d_kv), grads, strict=True):
        total.copy_(grad)


def _collect(
    merging: AttentionMergeKernel, part: Part, grads: tuple[Tensor, Tensor, Tensor], d_q: Tensor, d_kv: Tensor
) -> None:
    """Adds a part's gradients to those of all queries and of the keys and values at hand."""
    for total, grad in zip((d_q[:, part.queries], *d_kv[:, :, part.keys]), grads, strict=True):
        merging.add(total, grad)


def _round(q_BTNH: Tensor, sight: Sight, group: dist.ProcessGroup) -> Iterator[tuple[int, Places]]:
    """The ranks whose keys come by, this rank first, with the places of the queries and of those keys."""
    rank, size = group.rank(), group.size()
    place = partial(token_index, "ring", sight.length, size, device=q_BTNH.device)
    queries = place(rank) if sight.needs_places else None
    for step in range(size):
        source = (rank - step) % size
        yield source, (queries, place(source) if sight.needs_places else None)


class _GatheredAttention(torch.autograd.Function):
    """Forward: k and v are gathered. Backward: gathered again, their gradients summed to the ranks they are of."""

    @staticmethod
    def forward(ctx, q_BTNH, k_BTKH, v_BTKH, sight, group):
        rows, own = Rows(q_BTNH, sight.merging), torch.stack((k_BTKH, v_BTKH))
        kv, places = _gather_chunks(own, group), _gathered_places(q_BTNH, sight, group)
        for part in gathered_parts(group.rank(), group.size(), q_BTNH.shape[1]):
            rows.merge(part, *sight.forward(part, places, q_BTNH, kv))
        out_BTNH = rows.out_BTNH.to(q_BTNH.dtype)
        ctx.save_for_backward(q_BTNH, own, out_BTNH, rows.lse_BNT)
        ctx.sight, ctx.group = sight, group
        return out_BTNH

    @staticmethod
    def backward(ctx, grad_BTNH):
        q_BTNH, own, out_BTNH, lse_BNT = ctx.saved_tensors
        group, sight, wide = ctx.group, ctx.sight, lse_BNT.dtype
        kv, places = _gather_chunks(own, group), _gathered_places(q_BTNH, sight, group)
        d_q, d_kv = torch.zeros_like(q_BTNH, dtype=wide), torch.zeros_like(kv, dtype=wide)
        for part in gathered_parts(group.rank(), group.size(), q_BTNH.shape[1]):
            grads = sight.backward(part, places, grad_BTNH, q_BTNH, kv, out_BTNH, lse_BNT)
            _collect(sight.merging, part, grads, d_q, d_kv)
        d_own = _reduce_scatter_chunks(d_kv, group)
        return d_q.to(q_BTNH.dtype), *d_own.to(own.dtype), None, None


def _gathered_places(q_BTNH: Tensor, sight: Sight, group: dist.ProcessGroup) -> tuple[Tensor | None, Tensor | None]:
    """The places of the queries and of the keys of the whole sequence."""
    if not sight.needs_places:
        return None, None
    device = q_BTNH.device
    queries = token_index("all_gather", sight.length, group.size(), group.rank(), device=device)
    return queries, torch.arange(sight.length, device=device)


def _gather_chunks(kv_2BTKH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[2, B, T, K, H] of each rank -> [2, B, S, K, H] in the order of the sequence."""
    chunk = kv_2BTKH.shape[2] // 2
    parts = wait(all_gather(kv_2BTKH[None], group))
    early, late = parts[:, :, :, :chunk], parts[:, :, :, chunk:]
    return torch.cat((*early, *reversed(late.unbind())), dim=2)


def _reduce_scatter_chunks(whole_2BSKH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of [2, B, S, K, H] in the order of the sequence -> each rank's own [2, B, T, K, H]."""
    size = group.size()
    chunks = whole_2BSKH.chunk(2 * size, dim=2)
    parts = torch.stack([torch.cat((chunks[r], chunks[2 * size - 1 - r]), dim=2) for r in range(size)])
    return wait(reduce_scatter(parts, group))[0]


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
    ones = [1] * group.size()
    return wait(all_to_all(x, ones, ones, group))


def tokens_to_heads(group: dist.ProcessGroup, *xs_BTNH: Tensor) -> tuple[Tensor, ...]:
    """Forward: [B, T, N, H] of each of n ranks -> its N/n heads of all n T tokens. Backward: heads to tokens."""
    size = group.size()
    mine = [x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4) for x in xs_BTNH]
    theirs = _Exchange.apply(torch.cat(mine, dim=3), group)
    whole = theirs.transpose(0, 1).flatten(1, 2)
    return whole.split([x.shape[3] for x in mine], dim=2)


def heads_to_tokens(group: dist.ProcessGroup, x_BTNH: Tensor) -> Tensor:
    """Forward: N/n heads of n T tokens of each of n ranks -> its T tokens of N heads. Backward: tokens to heads."""
    mine = x_BTNH.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return _Exchange.apply(mine, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


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
    """A CausalCore whose queries, keys and values are those of this rank's tokens; see token_index."""

    merging: AttentionMergeKernel
    """How blocks of attention are put together."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, context: SequenceContext) -> Tensor:
        """-> [B, T, N, H]"""
        way, first_head = context.way, self.first_head
        if way is None:
            here = q_BTNH.shape[1]
            assert here == context.length, f"{here} of {context.length} tokens, and no way to the others"
            return super().forward(q_BTNH, k_BTKH, v_BTKH, context)
        if way.heads is not None:
            q_BTNH, k_BTKH, v_BTKH = tokens_to_heads(way.heads, q_BTNH, k_BTKH, v_BTKH)
            first_head += way.heads.rank() * q_BTNH.shape[2]
        if way.ring is None and way.gather is None:
            drop = self._drop(context, first_head)
            if drop is not None:
                places = torch.arange(context.length, device=q_BTNH.device)
                drop = partial(drop, queries=places, keys=places)
            out_BTNH = self.kernel.attend(q_BTNH, k_BTKH, v_BTKH, documents=context.documents, drop=drop)
        else:
            out_BTNH = self._attend_in_blocks(q_BTNH, k_BTKH, v_BTKH, context, first_head)
        return out_BTNH if way.heads is None else heads_to_tokens(way.heads, out_BTNH)

    def _attend_in_blocks(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, context: SequenceContext, first_head: int
    ) -> Tensor:
        drop = self._drop(context, first_head)
        sight = Sight(self.kernel, self.merging, context.length, context.documents, drop)
        if context.way.ring is not None:
            return _RingAttention.apply(q_BTNH, k_BTKH, v_BTKH, sight, context.way.ring)
        return _GatheredAttention.apply(q_BTNH, k_BTKH, v_BTKH, sight, context.way.gather)

    def _drop(self, context: SequenceContext, first_head: int) -> Callable[..., Tensor] | None:
        noise = context.noise
        if noise is None or self.dropout == 0:
            return None
        key, ids, probability = noise.key(self.site_key), noise.ids, self.dropout

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
        self.mesh, self.spec, self.merging = mesh, spec, merging
        self._indices: dict[tuple[int, int], Tensor] = {}
        group = mesh.group("cp")
        if group is None:
            self.way = None
        elif spec.kind == "all_gather":
            self.way = Way(gather=group)
        elif spec.kind == "hierarchical":
            a, b = spec.factors
            assert a * b == mesh.size("cp"), f"factors {spec.factors}, cp {mesh.size('cp')}"
            self.way = Way(heads=mesh.neighbours("cp", a), ring=mesh.strided("cp", a))
        else:
            self.way = Way(heads=group) if spec.kind == "all_to_all" else Way(ring=group)

    def split_model(self, model: nn.Module) -> None:
        """Puts a ContextCore in the place of every CausalCore, its settings and buffers kept."""
        if self.way is None:
            return
        for module in model.modules():
            if isinstance(module, Attention):
                assert type(module.core) is CausalCore, f"{type(module.core).__name__} has no context parallel twin"
                module.core.__class__ = ContextCore
                module.core.merging = self.merging
                # here, and not around the method: it loads the compiler
                why = "messages between two ranks, and blocks whose order depends on the rank"
                module.core._attend_in_blocks = torch.compiler.disable(module.core._attend_in_blocks, reason=why)

    def index(self, length: int, rank: int | None = None) -> Tensor:
        """int64 [T]: the places of the tokens of a cp rank, by default this one, in a sequence of `length`, on the
        mesh's device."""
        rank = self.mesh.index("cp") if rank is None else rank
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
