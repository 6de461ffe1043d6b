"""What a rank's GPU holds outside of torch's allocator: CUDA, and NCCL's buffers for the groups of its layout."""

from megaspec.core.axes import world_size
from megaspec.parallelism.spec import ParallelismSpec

# Measured on H200 with torch 2.11 and CUDA 13.
_CONTEXT = 0.80e9
"""CUDA, the loaded kernels and the libraries' handles."""
_GROUP, _PEER, _MOST_PEERS = 0.32e9, 0.19e9, 3
"""NCCL's buffers of a group: of itself and for each other rank, of which a ring and a tree reach only a few."""


def outside_torch(parallelism: ParallelismSpec) -> int:
    """Bytes beside those of tensors. The plan counts them, and a rank keeps them free of torch's cache."""
    own = parallelism
    world = world_size(own.degrees)
    groups = (own.dp_replicate * own.dp_shard * own.cp, own.tp, own.cp, own.pp, own.ep * own.etp)
    # a group of all ranks is the world's own
    sizes = [world, *(ranks for ranks in groups if ranks != world)]
    return int(_CONTEXT + sum(_GROUP + _PEER * min(ranks - 1, _MOST_PEERS) for ranks in sizes if ranks > 1))
