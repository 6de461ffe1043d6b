"""A bucket of parameters: the flat buffers of their weights and gradients, and what ranks do with them together."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megaspec.core import counted
from megaspec.parallelism.flat import Division
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.spec import DpStrategy


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that share parameters of one kind: each holds one of `shards` shards, of which there are `replicas`.

    Each collective has a communicator of its own: those of one communicator wait for each other.
    """

    shards: int
    index: int
    """Of this rank's shard."""
    replicas: int
    replica: int
    """Which of its replicas this rank's is."""
    scatter: dist.ProcessGroup | None
    """Sums gradients to the ranks of the shards. None: every rank holds all."""
    gather: dist.ProcessGroup | None
    """Gathers weights from the ranks of the shards."""
    sum: dist.ProcessGroup | None
    """Sums gradients over the replicas of a shard. None: there is one."""

    @classmethod
    def of(cls, mesh: Mesh, strategy: DpStrategy, *, experts: bool) -> "ShardGroup":
        """All ranks of the mesh must call this in the same order."""
        if strategy == "replicate":
            name = "edp" if experts else "dp-cp"
            group = mesh.group(name, line="reduce")
            return cls(1, 0, mesh.size(name), mesh.index(name), None, None, group)
        shard = "expert-shard" if experts else "shard"
        replicas = "expert-replicas" if experts else "replicas"
        return cls(
            mesh.size(shard),
            mesh.index(shard),
            mesh.size(replicas),
            mesh.index(replicas),
            mesh.group(shard, line="reduce"),
            mesh.group(shard, line="gather"),
            mesh.group(replicas, line="reduce"),
        )

    def whole(self) -> "ShardGroup":
        """The same ranks where each holds everything, and nobody sends anything."""
        return ShardGroup(
            shards=1,
            index=0,
            replicas=self.shards * self.replicas,
            replica=self.index * self.replicas + self.replica,
            scatter=None,
            gather=None,
            sum=None,
        )


class Buffer:
    """A flat buffer [numel] of which this rank owns a shard.

    Where it is not `kept` the shard has memory of its own, and the whole has memory until `free` and from each
    `allocate` to the next `free`. Views of the whole, which are made while it has, see what it holds then.
    """

    def __init__(self, division: Division, index: int, *, dtype: torch.dtype, device: torch.device, kept: bool):
        self.whole = torch.zeros(division.numel, dtype=dtype, device=device)
        self.kept = kept
        self._bytes = self.whole.untyped_storage().nbytes()
        self.own = division.own(self.whole, index)
        if not kept:
            self.own = self.own.clone()

    def allocate(self) -> None:
        """Memory for the whole, with any contents."""
        self.whole.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        """Gives the memory of the whole back."""
        self.whole.untyped_storage().resize_(0)


class Bucket:
    """Parameters whose gradients are reduced together and whose weights are gathered together.

    `weights` is in the model's format, `sums` (of gradients) in at least fp32. `chunk`: the only one that uses the
    parameters; None where other chunks or ranks do, too. `is_trained`: false where all of them are frozen; `sums` is
    never made then.
    """

    def __init__(self, division: Division, shard_group: ShardGroup, *, chunk: int | None, is_trained: bool = True):
        self.division = division
        self.shard_group = shard_group
        self.chunk = chunk
        self.is_trained = is_trained
        self.names = list(division.shapes)
        self.weights: Buffer | None = None
        self.bytes: Buffer | None = None
        """The weights in fp8, where they are gathered so."""
        self.holds_bytes = False
        """What is gathered now are the bytes."""
        self.sums: Buffer | None = None
        self.is_collecting = False
        """The whole sums can be added to."""
        self.fresh: set[str] = set()
        """Parameters whose sum holds nothing of this step yet."""
        self.arrived = dict.fromkeys(self.names, 0)
        """How often a gradient of each parameter was added in this step."""
        self.missing = len(self.names)
        """Parameters of which not every backward pass that has begun has added one."""
        self.reduced = 0
        """How often the whole sums were reduced in this step."""
        self.is_summed = False
        """`sums.own` holds this step's gradient."""
        self.users = 0
        """Passes that need the whole weights now."""
        self.is_gathered = False
        """The whole weights are there, or on their way."""
        self.gathered: torch.cuda.Event | None = None
        """Until this has happened the whole weights are not there."""

    def hold_weights(self, parameters: Mapping[str, nn.Parameter], *, kept: bool) -> None:
        """Moves the parameters into a flat buffer; they stay the same objects. Without memory so far they hold NaN."""
        first = parameters[self.names[0]]
        index = self.shard_group.index
        self.weights = Buffer(self.division, index, dtype=first.dtype, device=first.device, kept=kept)
        for name in self.names:
            place = self.division.view(self.weights.whole, name)
            if parameters[name].untyped_storage().nbytes():
                place.copy_(parameters[name].data)
            else:
                place.fill_(float("nan"))
            parameters[name].data = place
        if not kept:
            self.weights.own.copy_(self.division.own(self.weights.whole, index))
            self.weights.free()

    def hold_sums(self, *, dtype: torch.dtype, device: torch.device, kept: bool) -> None:
        self.sums = Buffer(self.division, self.shard_group.index, dtype=dtype, device=device, kept=kept)

    def hold_bytes(self) -> None:
        """Beside the weights a buffer of as many bytes, to be gathered in their place."""
        own = self.weights.own
        self.bytes = Buffer(self.division, self.shard_group.index, dtype=torch.uint8, device=own.device, kept=False)
        self.bytes.free()

    def allocate(self, *, exact: bool) -> None:
        """Memory for what is gathered; `exact`: the weights themselves, also where bytes serve."""
        self.holds_bytes = self.bytes is not None and not exact
        self._gathered_buffer.allocate()

    def gather(self) -> None:
        """Fills the whole weights, or bytes, from all ranks' shards."""
        buffer = self._gathered_buffer
        if self.shard_group.gather is not None:
            counted.all_gather_single(buffer.whole, buffer.own, group=self.shard_group.gather)
        elif not buffer.kept:
            buffer.whole.copy_(buffer.own)

    def free(self) -> None:
        """Gives the memory of what was gathered back."""
        self._gathered_buffer.free()
        self.holds_bytes = False

    @property
    def _gathered_buffer(self) -> Buffer:
        return self.bytes if self.holds_bytes else self.weights

    def scatter(self, form: torch.dtype | None, *, add: bool) -> None:
        """The sum over ranks of the shard's gradients into `sums.own`; rounded to `form` on their way."""
        whole = self.sums.whole
        index = self.shard_group.index
        if self.shard_group.scatter is not None:
            whole = whole.to(form or whole.dtype)
            # in place: the sum of this rank's shard takes the place of its part
            counted.reduce_scatter_single(self.division.own(whole, index), whole, group=self.shard_group.scatter)
        if whole is self.sums.whole and self.sums.kept:
            # the shard is a view of what was summed
            return
        mine = self.division.own(whole, index)
        if add:
            self.sums.own.add_(mine)
        else:
            self.sums.own.copy_(mine)

    def sum_replicas(self, form: torch.dtype | None) -> None:
        """The sum of `sums.own` over the ranks that hold the same shard; rounded to `form` on its way."""
        if self.shard_group.sum is None:
            return
        own = self.sums.own.to(form or self.sums.own.dtype)
        counted.all_reduce(own, group=self.shard_group.sum)
        if own is not self.sums.own:
            self.sums.own.copy_(own)
