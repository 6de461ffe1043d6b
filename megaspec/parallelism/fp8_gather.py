"""Sharded weights that are gathered in fp8, for products in fp8.

A scale is that of a whole tensor (recipes tensorwise and delayed), so ranks that agree on the largest element of each
weight make the same numbers of their rows that one rank makes of the whole: nothing is lost, and half of bf16's bytes
are sent. After each update one all-reduce finds the largest elements of all weights, and each rank quantises its rows.
What is gathered for a pass are bytes, which products take as they are. A whole weight in the model's format comes to be
only where it is asked for: to be exported, or put into a checkpoint.
"""

# W weights of a rank, E experts of the whole model

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core import counted
from megaspec.nn.fp8 import Fp8Linear, Fp8Tensor
from megaspec.nn.moe.fp8 import Fp8Experts
from megaspec.parallelism.bucket import Bucket
from megaspec.parallelism.mesh import Mesh
from megaspec_kernels.fp8_cast.formats import scale_of

_ALL = (None, None)


class Fp8Gather:
    """What buckets of weights in fp8 ask for. `linears`: by global name of the weight."""

    def __init__(self, mesh: Mesh, linears: Mapping[str, Fp8Linear]):
        self._mesh = mesh
        self._linears = linears
        self._scales: dict[str, Tensor] = {}
        """[1, 1]; of experts, those that lie here: [experts, 1]."""

    @property
    def names(self) -> frozenset[str]:
        """The weights that are gathered as bytes."""
        return frozenset(self._linears)

    @torch.no_grad()
    def renew(self, buckets: Sequence[Bucket]) -> None:
        """Quantises this rank's rows of weights that have changed. All ranks call it together."""
        largest: dict[str, Tensor] = {}
        for bucket in buckets:
            for name in bucket.names:
                largest[name] = self._largest(name, bucket)
        if not largest:
            return
        together = torch.cat(list(largest.values()))
        # of all parts of a weight, of all shards of a part, and of all experts; what ranks hold alike stays as it is
        group = self._mesh.group("tp-dp-cp")
        if group is not None:
            counted.all_reduce(together, dist.ReduceOp.MAX, group=group)
        found = together.split([one.shape[0] for one in largest.values()])
        for name, amax in zip(largest, found, strict=True):
            linear = self._linears[name]
            if isinstance(linear, Fp8Experts):
                amax = amax[self._experts(linear)]
            self._scales[name] = scale_of(amax[:, None], linear.form.dtype("weight"))
        for bucket in buckets:
            for name in bucket.names:
                self._quantise(name, bucket)

    def hold(self, bucket: Bucket) -> None:
        """From now on products take the bytes that the bucket gathers, until its weights are freed."""
        for name in bucket.names:
            linear = self._linears[name]
            values = bucket.division.view(bucket.bytes.whole, name).view(linear.form.dtype("weight"))
            linear.gathered = Fp8Tensor(values, self._scales[name])

    def _experts(self, linear: Fp8Experts) -> slice:
        """Those that lie here, among all."""
        first = self._mesh.index("ep") * linear.n_experts
        return slice(first, first + linear.n_experts)

    def _own(self, name: str, bucket: Bucket) -> Tensor:
        """This rank's rows of a weight."""
        return bucket.division.part(bucket.weights.own, name, bucket.shard_group.index)

    def _ends(self, name: str, bucket: Bucket) -> Tensor:
        """Where each expert's rows end among this rank's, int32."""
        linear = self._linears[name]
        rows = bucket.division.rows(name, bucket.shard_group.index)
        n_out = bucket.division.shapes[name][0] // linear.n_experts
        ends = torch.arange(1, linear.n_experts + 1, device=bucket.weights.own.device, dtype=torch.int32) * n_out
        return (ends - rows.start).clamp(0, rows.stop - rows.start)

    def _largest(self, name: str, bucket: Bucket) -> Tensor:
        """Of this rank's rows: [1], or of each expert [E], zero of those that lie elsewhere."""
        linear = self._linears[name]
        own = self._own(name, bucket)
        wide = torch.promote_types(own.dtype, torch.float32)
        if not isinstance(linear, Fp8Experts):
            if own.shape[0] == 0:
                return own.new_zeros(1, dtype=wide)
            return linear.form.cast.amax(own, block=_ALL).view(1)
        of_experts = own.new_zeros(linear.n_experts * self._mesh.size("ep"), dtype=wide)
        if own.shape[0]:
            amax = linear.form.cast.group_amax(own, self._ends(name, bucket))
            of_experts[self._experts(linear)] = amax.view(-1)
        return of_experts

    def _quantise(self, name: str, bucket: Bucket) -> None:
        linear = self._linears[name]
        own = self._own(name, bucket)
        if own.shape[0] == 0:
            return
        dtype = linear.form.dtype("weight")
        scale = self._scales[name]
        if isinstance(linear, Fp8Experts):
            groups = linear.groups(self._ends(name, bucket), own.shape[0])
            values, _ = linear.form.cast.group_cast(own, scale, groups, dtype=dtype)
        else:
            values, _ = linear.form.cast.cast(own, scale, block=_ALL, dtype=dtype)
        place = bucket.division.part(bucket.bytes.own, name, bucket.shard_group.index)
        place.copy_(values.view(torch.uint8))
