"""Rotary positions in plain PyTorch (Su et al. 2021)."""

# B sequences, T tokens, N query heads, K key and value heads, H head size, R features of a head that turn, C features
# of a token in the product of all three

import torch
from torch import Tensor

from megaspec_kernels.rope.form import Heads, Turned


def rotate(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + R/2) of the first R features of each head, the pairing of Hugging Face's Llama, in at
    least fp32; other features stay. `cos`, `sin`: [T or B T, R / 2]."""
    d_head = x_BTNH.shape[-1]
    d_rotary = 2 * cos.shape[-1]
    turned = x_BTNH
    rest = None
    if d_rotary < d_head:
        turned, rest = x_BTNH.split((d_rotary, d_head - d_rotary), dim=-1)
    wide = torch.promote_types(x_BTNH.dtype, torch.float32)
    a, b = turned.to(wide).chunk(2, dim=-1)
    # the same angles for every head
    cos = cos.unsqueeze(-2)
    sin = sin.unsqueeze(-2)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTNH.dtype)
    if rest is None:
        return turned
    return torch.cat((turned, rest), dim=-1)


def rope(qkv_BTC: Tensor, cos: Tensor, sin: Tensor, *, heads: Heads) -> Turned:
    """The product of queries, keys and values -> its heads, queries and keys turned by the angles of their
    positions."""
    widths = (heads.queries * heads.size, heads.keys * heads.size, heads.keys * heads.size)
    q, k, v = (part.unflatten(-1, (-1, heads.size)) for part in qkv_BTC.split(widths, dim=-1))
    return Turned(rotate(q, cos, sin), rotate(k, cos, sin), v)
