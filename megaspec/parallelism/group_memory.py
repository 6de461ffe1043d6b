"""What a rank's GPU holds outside of torch's allocator: CUDA, and NCCL's buffers for the groups of its layout."""

from megaspec.core.axes import world_size
from megaspec.parallelism.spec import ParallelismSpec

# Measured on H200 with torch 2.11 and CUDA 13.
_CONTEXT = 0.80e9
"""CUDA, the loaded kernels and the libraries' handles."""
_GROUP = 0.32e9
"""NCCL's buffers of a group itself."""
_PEER = 0.19e9
"""NCCL's buffers of a group for each other rank that it talks to."""
_MOST_PEERS = 3
"""A ring and a tree reach only so many, however large the group is."""


def outside_torch(parallelism: ParallelismSpec) -> int:
    """Bytes beside those of tensors. The plan counts them, and a rank keeps them free of torch's cache."""
    world = world_size(parallelism.degrees)
    data = parallelism.dp_replicate * parallelism.dp_shard * parallelism.cp
    experts = parallelism.ep * parallelism.etp
    sizes = [world]
    for ranks in (data, parallelism.tp, parallelism.cp, parallelism.pp, experts):
        # a group of all ranks is the world's own
        if ranks != world:
            sizes.append(ranks)
    buffers = 0.0
    for ranks in sizes:
        if ranks > 1:
            buffers += _GROUP + _PEER * min(ranks - 1, _MOST_PEERS)
    return int(_CONTEXT + buffers)
