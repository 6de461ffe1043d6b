"""Blocks of attention behind each attention kernel, for sequences whose keys and values lie on several ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaspec_kernels.attention import reference, reference_block, sdpa, sdpa_block


@dataclass(frozen=True)
class Blocks:
    """Forward and backward pass of a block; see reference_block.py for what they take and give."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


BLOCKS: dict[str, Blocks] = {
    "sdpa": Blocks(sdpa_block.block_forward, sdpa_block.block_backward),
    "reference": Blocks(reference_block.block_forward, reference_block.block_backward),
}
_OF_KERNEL: dict[Callable[..., Any], str] = {sdpa.attention: "sdpa", reference.attention: "reference"}


def blocks_of(kernel: Callable[..., Any]) -> Blocks:
    """The blocks of an attention kernel of registry.py."""
    return BLOCKS[_OF_KERNEL[kernel]]
