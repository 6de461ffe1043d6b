"""Gradients become sums over micro batches and ranks, bucket by bucket."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from megaspec.nn.linear import Linear, TableUser, WeightGradientSum, WeightGradientSums
from megaspec.nn.transfer import Side, wait_for
from megaspec.parallelism.bucket import Bucket


class Reductions:
    """Counts the gradients that arrive and reduces a bucket when each of its parameters has got as many as the others.

    Weight gradients may be deferred, so that some parameters are ahead for a while; `finish` reduces what is left.
    `kept`: whole sums stay over the step and are reduced in its last backward pass, in the order of the list: that in
    which they are full differs where a rank runs a block that others have compiled, and all ranks must send the same.
    Otherwise they have memory from `prepare` to their reduction, which adds to the shard's; a unit's parameters are one
    bucket of each kind then, and units come one after the other.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, nn.Parameter],
        *,
        side: Side,
        form: torch.dtype | None,
        kept: bool,
        overlap: bool,
        on_reduce: Callable[[Bucket], None],
        on_summed: Callable[[Bucket], None],
    ):
        """`form`: of gradients on their way between ranks; None: as they are summed. `on_reduce` is called before ranks
        sum the gradients of a bucket, whose whole sums then hold what this rank has. `on_summed` is called behind the
        reduction that makes a bucket's shard this step's gradient, and may start work on it, beside the computation."""
        self._buckets = buckets
        self._side = side
        self._form = form
        self._kept = kept
        self._overlap = overlap
        self._on_reduce = on_reduce
        self._on_summed = on_summed
        self._passes: dict[int | None, int] = {}
        """Backward passes of this step that have begun, by chunk."""
        self._ending: set[int | None] = set()
        """Chunks whose last backward pass of the step has begun."""
        self._of_chunk: dict[int | None, list[Bucket]] = {}
        for bucket in buckets:
            self._of_chunk.setdefault(bucket.chunk, []).append(bucket)
        self._waiting: dict[int | None, deque[Bucket]] = {}
        """Buckets of these chunks that are not reduced yet, in the order in which all ranks reduce them."""
        self._has_unsummed = False
        self._draining: tuple[Bucket, torch.cuda.Event | None] | None = None
        """The bucket that is being reduced, whose whole sums have memory until the event."""
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        self.main_grads: dict[str, Tensor] = {}
        for bucket in buckets:
            first = parameters[bucket.names[0]]
            wide = torch.promote_types(first.dtype, torch.float32)
            bucket.hold_sums(dtype=wide, device=first.device, kept=kept)
            for name in bucket.names:
                self.main_grads[name] = bucket.division.view(bucket.sums.whole, name)
            bucket.is_collecting = kept
            if not kept:
                bucket.sums.free()
        self._sums: dict[str, WeightGradientSum] = {}
        self._parameters = parameters

    def connect(
        self,
        linears: Mapping[str, Linear],
        tables: Mapping[str, Sequence[tuple[TableUser, bool]]],
        sums: WeightGradientSums,
    ) -> None:
        """Gradients of linear layers' weights are summed in place, and in the passes of a step those of `tables` (see
        WeightGradientSums.connect_table); all others are taken from their parameters."""
        for name, module in linears.items():
            self._sums[name] = sums.connect(module, self.main_grads[name], partial(self._arrived, name))
            if not self._kept:
                self._sums[name].stop()
        for name, users in tables.items():
            assert self._kept, f"{name} is summed in place, and its sum has no memory before the backward pass"
            self._sums[name] = sums.connect_table(users, self.main_grads[name], partial(self._arrived, name))
        for name, parameter in self._parameters.items():
            if name not in linears:
                parameter.register_post_accumulate_grad_hook(self._taker(name))

    def start_step(self) -> None:
        """Forgets what was summed so far; the first gradient of each parameter overwrites it."""
        if self.has_unsummed:
            # of backward passes that nobody has finished
            self._drain()
            wait_for(self._side.done())
            self._start_counts()
        self._start_sums()

    @property
    def has_unsummed(self) -> bool:
        """Gradients have arrived since the last `finish`."""
        return self._has_unsummed

    def start_backward(self, chunk: int, *, last: bool) -> None:
        """One more backward pass through a chunk begins, the step's last one through it where `last` is set."""
        self._passes[chunk] = self._passes.get(chunk, 0) + 1
        buckets = self._of_chunk.get(chunk, [])
        for bucket in buckets:
            bucket.missing = len(bucket.names)
        if last:
            self._ending.add(chunk)
            self._waiting[chunk] = deque(buckets)

    def sums_inside(self, bucket: Bucket) -> bool:
        """Matrix products add to the bucket's sums, which must have memory before they start."""
        return bool(self._sums_in(bucket))

    def prepare(self, bucket: Bucket) -> None:
        """Memory for gradients that are about to arrive."""
        if bucket.is_collecting:
            return
        if self._draining is not None and self._draining[0] is bucket:
            wait_for(self._draining[1])
            self._draining = None
        else:
            bucket.sums.allocate()
        bucket.is_collecting = True
        bucket.fresh = set(bucket.names)
        for one in self._sums_in(bucket):
            one.start()

    def finish(self) -> None:
        """Reduces what is left; what the computation starts after it sees the sums over all micro batches and ranks."""
        for bucket in self._buckets:
            if bucket.is_summed:
                continue
            # gradients came after the last reduction
            is_behind = bucket.is_collecting and len(bucket.fresh) < len(bucket.names)
            if self._kept or bucket.reduced == 0 or is_behind:
                self.prepare(bucket)
                for name in bucket.fresh:
                    self.main_grads[name].zero_()
                self._reduce(bucket, final=True)
            else:
                with self._side.after_now():
                    bucket.sum_replicas(self._form)
                    self._on_summed(bucket)
        self._drain()
        wait_for(self._side.done())
        self._start_counts()
        # what comes next, with or without a start_step before it, is no part of these sums
        self._start_sums()

    def _start_sums(self) -> None:
        """The first gradient of each parameter overwrites its sum, where sums are kept."""
        if not self._kept:
            return
        for bucket in self._buckets:
            bucket.fresh = set(bucket.names)
        for one in self._sums.values():
            one.start()

    def _start_counts(self) -> None:
        """Nothing has arrived; sums that are not kept lose their memory."""
        self._has_unsummed = False
        self._passes = {}
        self._ending = set()
        self._waiting = {}
        for bucket in self._buckets:
            bucket.arrived = dict.fromkeys(bucket.names, 0)
            bucket.missing = len(bucket.names)
            bucket.reduced = 0
            bucket.is_summed = False
            if bucket.is_collecting and not self._kept:
                # closed before its memory goes, so that a late product is told
                self._close(bucket)
                bucket.sums.free()

    def _sums_in(self, bucket: Bucket) -> list[WeightGradientSum]:
        """Those that matrix products add to."""
        return [self._sums[name] for name in bucket.names if name in self._sums]

    def _taker(self, name: str) -> Callable[[nn.Parameter], None]:
        # weakly: torch keeps hooks where the garbage collector does not look, and parameters are held from here
        take = WeakMethod(self._take)
        return lambda parameter: take()(name, parameter)

    def _take(self, name: str, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[name]
        self.prepare(bucket)
        grad = parameter.grad
        parameter.grad = None
        if name in self._sums:
            # Of a table. In a step autograd has none of it, and calls hooks all the same; outside of one it has all,
            # and the sum knows whether it is the first.
            if grad is not None:
                self._sums[name].add_now(partial(_put, grad))
            return
        _put(grad, self.main_grads[name], name in bucket.fresh)
        self._arrived(name)

    def _arrived(self, name: str) -> None:
        """A micro batch's gradient has been added."""
        bucket = self._bucket_of[name]
        bucket.fresh.discard(name)
        bucket.arrived[name] += 1
        self._has_unsummed = True
        # a pass that has begun and not come here may have put its gradients off: they need the memory that is there
        caught_up = bucket.arrived[name] == self._passes.get(bucket.chunk, 0)
        if caught_up:
            bucket.missing -= 1
        final = bucket.chunk in self._ending and caught_up
        if self._kept:
            if final and self._overlap and bucket.missing == 0:
                self._reduce_full(bucket.chunk)
        elif bucket.missing == 0 or (bucket.chunk is None and len(set(bucket.arrived.values())) == 1):
            self._reduce(bucket, final=final)

    def _reduce_full(self, chunk: int) -> None:
        """The buckets of a chunk that are full and have none before them that is not."""
        waiting = self._waiting[chunk]
        while waiting and waiting[0].missing == 0:
            self._reduce(waiting.popleft(), final=True)

    def _reduce(self, bucket: Bucket, *, final: bool) -> None:
        self._on_reduce(bucket)
        with self._side.after_now():
            bucket.scatter(self._form, add=bucket.reduced > 0)
            if final:
                bucket.sum_replicas(self._form)
                self._on_summed(bucket)
        bucket.reduced += 1
        bucket.fresh = set()
        bucket.is_summed = final
        if not self._kept:
            self._drain()
            # one bucket is on its way while the next is filled
            self._draining = (bucket, self._side.done())
            self._close(bucket)
            if not self._overlap:
                self._drain()

    def _close(self, bucket: Bucket) -> None:
        """Nothing is added to the whole sums from here on."""
        bucket.is_collecting = False
        for one in self._sums_in(bucket):
            one.stop()

    def _drain(self) -> None:
        """Waits for the bucket that is being reduced, and frees its whole sums."""
        if self._draining is not None:
            bucket, event = self._draining
            wait_for(event)
            bucket.sums.free()
            self._draining = None


def _put(grad: Tensor, into: Tensor, overwrite: bool) -> None:
    """Adds a gradient to a sum, or overwrites it."""
    if overwrite:
        into.copy_(grad)
    else:
        into.add_(grad)
