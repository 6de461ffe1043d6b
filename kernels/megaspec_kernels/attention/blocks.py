"""Blocks of attention behind each attention kernel, for sequences whose keys and values lie on several ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaspec_kernels.attention import reference, reference_block, sdpa, sdpa_block


@dataclass(frozen=True)
class Blocks:
    """Forward and backward pass of a block, and how blocks are put together; see reference_block.py for each."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    add: Callable[[Tensor, Tensor], None]


BLOCKS: dict[str, Blocks] = {
    "sdpa": Blocks(sdpa_block.block_forward, sdpa_block.block_backward, sdpa_block.merge, sdpa_block.add),
    "reference": Blocks(
        reference_block.block_forward, reference_block.block_backward, reference_block.merge, reference_block.add
    ),
}
_OF_KERNEL: dict[Callable[..., Any], str] = {sdpa.attention: "sdpa", reference.attention: "reference"}


def blocks_of(kernel: Callable[..., Any]) -> Blocks:
    """The blocks of an attention kernel of registry.py."""
    return BLOCKS[_OF_KERNEL[kernel]]
