"""Data parallelism with replicated weights: gradients are summed in buckets while the backward pass still runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspec.core.layout import Layout, replicated
from megaspec.nn.decoder import Decoder
from megaspec.nn.linear import Linear, WeightGradientSum
from megaspec.parallelism.mesh import Mesh


@dataclass
class Bucket:
    """Gradients that lie one after the other in `buffer` and are reduced together."""

    buffer: Tensor
    names: list[str]
    waiting: set[str] = field(default_factory=set)
    work: dist.Work | None = None


class DataParallel:
    """The sums of gradients over micro batches and ranks, in at least fp32, and what this rank updates of the weights.

    `parameters`: the model's on this rank, by global name. `gradients`, `weights`, `shards`: what the optimizer works
    on: this rank's rows of each parameter's gradient, of the parameter itself, and where they lie in the whole.

    Buckets are filled from the last parameter to the first, the order in which the backward pass makes gradients.
    Linear layers add to them inside the matrix product; other parameters through a hook on their `.grad`.
    """

    def __init__(self, chunks: Sequence[Decoder], *, layouts: Mapping[str, Layout], mesh: Mesh, bucket_bytes: float):
        self._group = mesh.group("dp-cp")
        self.parameters = {n: p for chunk in chunks for n, p in chunk.global_parameters().items()}
        self._parameters = self.parameters
        self.weights: dict[str, Tensor] = dict(self.parameters)
        index, count = mesh.index("dp-cp"), mesh.size("dp-cp")
        self.shards = {n: replicated(layouts[n], index=index, count=count) for n in self.parameters}
        self._reduce_now = False
        self._fresh: set[str] = set()
        self.gradients: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[str, Bucket] = {}
        self._fill_buckets(bucket_bytes)
        self._sums: dict[str, WeightGradientSum] = {}
        for name, module in ((n, m) for chunk in chunks for n, m in chunk.named_modules()):
            if isinstance(module, Linear):
                key = f"{name}.weight"
                self._sums[key] = WeightGradientSum(self.gradients[key], lambda key=key: self._arrived(key))
                module.total = self.gradients[key]
        for name, parameter in self._parameters.items():
            if name not in self._sums:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._take(name, p))

    def _fill_buckets(self, bucket_bytes: float) -> None:
        pending: list[str] = []
        size = 0
        names = list(reversed(self._parameters))
        for name in names:
            parameter = self._parameters[name]
            wide = torch.promote_types(parameter.dtype, torch.float32)
            pending.append(name)
            size += parameter.numel() * wide.itemsize
            if size >= bucket_bytes or name == names[-1]:
                # 16 elements keep every gradient on a 64-byte line or better
                spans = [-(-self._parameters[n].numel() // 16) * 16 for n in pending]
                bucket = Bucket(torch.zeros(sum(spans), dtype=wide, device=parameter.device), pending)
                for n, part in zip(pending, bucket.buffer.split(spans), strict=True):
                    shape = self._parameters[n].shape
                    self.gradients[n] = part[: prod(shape)].view(shape)
                    self._bucket_of[n] = bucket
                self.buckets.append(bucket)
                pending, size = [], 0

    def start_step(self) -> None:
        """Forgets the last step's sums; the first gradient of each parameter overwrites them."""
        self._fresh = set(self._parameters)
        for one in self._sums.values():
            one.start()

    def rows(self, name: str) -> slice:
        """The rows of a parameter that this rank updates."""
        return slice(0, self.parameters[name].shape[0])

    def gather_weights(self) -> None:
        """Gives every rank the weights that others have updated: nothing to do, all ranks update all of them."""

    def start_backward(self, chunk: int, *, last: bool) -> None:
        """Call before each backward pass of a micro batch through a chunk; in the chunk's `last` one of a step, full
        buckets are reduced."""
        self._reduce_now = last
        if last:
            for bucket in self.buckets:
                bucket.waiting = set(bucket.names)

    def finish(self) -> None:
        """Waits until every gradient is the sum over all micro batches and ranks."""
        for name in self._fresh:
            self.gradients[name].zero_()
        self._fresh = set()
        for bucket in self.buckets:
            if bucket.work is None:
                self._reduce(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def _take(self, name: str, parameter: nn.Parameter) -> None:
        if name in self._fresh:
            self.gradients[name].copy_(parameter.grad)
        else:
            self.gradients[name].add_(parameter.grad)
        parameter.grad = None
        self._arrived(name)

    def _arrived(self, name: str) -> None:
        """A micro batch's gradient has been added."""
        self._fresh.discard(name)
        if self._reduce_now:
            bucket = self._bucket_of[name]
            bucket.waiting.discard(name)
            if not bucket.waiting:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        if self._group is not None:
            bucket.work = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)
