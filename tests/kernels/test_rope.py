"""Rotary positions against their equations in fp64: heads of every size, of which all or a part turns, wherever the
gradients of attention lie."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from megaspec_kernels.gate import check, filled_with_nan, results
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.rope import triton as triton
from megaspec_kernels.rope.bench import angles
from megaspec_kernels.rope.form import Heads
from tests.kernels.fp8_producers import check_written, known_of

INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
# B, T, heads, R.
SHAPES = [
    (1, 1, Heads(1, 1, 2), 2),
    (2, 7, Heads(4, 2, 16), 16),
    (1, 33, Heads(3, 1, 24), 10),
    (3, 5, Heads(2, 2, 7), 4),
]


def by_equation(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> Tensor:
    """Complex numbers (a + i b) e^(i angle), head by head; outputs side by side."""
    B, T, _ = qkv.shape
    half = cos.shape[-1]
    turn = torch.complex(cos.double(), sin.double()).expand(B, T, half)
    parts = []
    for head in range(heads.turned):
        x = qkv[..., head * heads.size : (head + 1) * heads.size]
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        parts += [turned.real, turned.imag, x[..., 2 * half :]]
    return torch.cat((*parts, qkv[..., heads.turned * heads.size :]), dim=-1)


def side_by_side(implementation: str, qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> Tensor:
    wide = torch.promote_types(qkv.dtype, torch.float32)
    turned = REGISTRY["rope"][implementation].rope(qkv, cos.to(wide), sin.to(wide), heads=heads)
    assert [tuple(part.shape[2:]) for part in turned] == [
        (heads.queries, heads.size),
        (heads.keys, heads.size),
        (heads.keys, heads.size),
    ]
    return torch.cat([part.flatten(-2) for part in turned], dim=-1)


def numbers(B: int, T: int, heads: Heads, device: torch.device) -> tuple[Tensor, Tensor]:
    """A product and a gradient in fp64, whose numbers bf16 holds."""
    draw = torch.Generator().manual_seed(B + T)
    shape = (B, T, heads.width)
    return tuple((3 * torch.randn(*shape, generator=draw)).bfloat16().double().to(device) for _ in range(2))


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("reference", torch.float64),
        *product(REGISTRY["rope"], (torch.float32, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [True, False], ids=["one position for all", "of each sequence"])
@pytest.mark.parametrize(("B", "T", "heads", "R"), SHAPES)
def test_equations_and_their_gradients(
    implementation: str, dtype: torch.dtype, shared: bool, B: int, T: int, heads: Heads, R: int, device: torch.device
) -> None:
    if implementation == "triton" and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    qkv, grad = numbers(B, T, heads, device)
    cos, sin = angles(*((T,) if shared else (B, T)), half=R // 2, device=device)

    def plain(qkv: Tensor) -> Tensor:
        return side_by_side("reference", qkv, cos, sin, heads)

    def fast(qkv: Tensor) -> Tensor:
        # every second column of a wider tensor: not contiguous
        apart = qkv.repeat_interleave(2, dim=-1)[..., ::2]
        return side_by_side(implementation, apart, cos, sin, heads)

    mine = {"qkv": qkv.to(dtype)}
    truth = results(partial(by_equation, cos=cos, sin=sin, heads=heads), {"qkv": qkv}, grad)
    check(results(fast, mine, grad), results(plain, mine, grad), truth)


def as_attention_lays(grad_BTC: Tensor, heads: Heads, lying: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values as backward passes of attention give them."""
    widths = (heads.queries * heads.size, heads.keys * heads.size, heads.keys * heads.size)
    q, k, v = (part.unflatten(-1, (-1, heads.size)) for part in grad_BTC.split(widths, dim=-1))
    if lying == "tokens first":
        return q.contiguous(), k.contiguous(), v.contiguous()
    if lying == "heads first":
        return tuple(one.transpose(1, 2).contiguous().transpose(1, 2) for one in (q, k, v))
    if lying == "parts of one":
        return q, k, v
    # the features of a head not in one piece; keys and values in one tensor
    both = torch.stack((k, v), dim=-2)
    return q.transpose(2, 3).contiguous().transpose(2, 3), both[..., 0, :], both[..., 1, :]


LAYOUTS = ("tokens first", "heads first", "parts of one", "mixed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lying", LAYOUTS)
# all but the first two are read in pairs where they are bf16; those of 128 tokens fill their tiles, the others in part.
# Where two divides the heads of queries and of keys a program takes two. The last case has more tiles than lie below
# each other in a grid, and heads of which a part turns
@pytest.mark.parametrize(
    ("B", "T", "heads", "R"),
    [
        (1, 3, Heads(2, 1, 7), 4),
        (2, 24, Heads(2, 1, 24), 24),
        (2, 24, Heads(3, 1, 32), 32),
        (4, 12, Heads(1, 1, 48), 16),
        (1, 144, Heads(2, 2, 16), 16),
        (1, 128, Heads(2, 1, 64), 64),
        (1, 16, Heads(1, 1, 128), 128),
        (1, 128, Heads(4, 2, 32), 32),
        (2, 264, Heads(2, 2, 48), 16),
    ],
)
def test_triton_writes_fp8(
    dtype: torch.dtype, lying: str, B: int, T: int, heads: Heads, R: int, device: torch.device
) -> None:
    """Gradients, by scales that a few elements are too large for; values and what does not turn to the bit."""
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    qkv, grad = numbers(B, T, heads, device)
    # what is no number does so to its pair alone
    if lying == LAYOUTS[0]:
        grad[0, T - 1, heads.size] = math.nan
        grad[B - 1, 0, heads.width - 1] = math.inf
    for rows, format in (((T,), torch.float8_e5m2), ((B, T), torch.float8_e4m3fn)):
        cos, sin = angles(*rows, half=R // 2, device=device)
        equation = partial(by_equation, cos=cos, sin=sin, heads=heads)
        truth = results(equation, {"qkv": qkv}, grad)["qkv"].flatten(0, 1)
        grads = as_attention_lays(grad.to(dtype), heads, lying)
        known = known_of(2.0**-7 if format == torch.float8_e4m3fn else 2.0**-14, format, device)
        with filled_with_nan():
            written = triton.rope_backward_in_fp8(*grads, cos, sin, known=known)
        check_written(written, truth, known)
        assert int(known.saturated) > 0
        # what the layer makes of a gradient in fp32: quantised, not rounded before
        by_value = grad.flatten(0, 1)[:, heads.turned * heads.size :]
        scale = known.scale.double()
        most = torch.finfo(format).max
        nearest = (by_value / scale).float().clamp(-most, most).to(format)
        finite = torch.isfinite(by_value)
        got = written.rows[:, heads.turned * heads.size :].view(torch.uint8)
        assert torch.equal(got[finite], nearest.view(torch.uint8)[finite])


def test_triton_writes_the_same_wherever_heads_lie(device: torch.device) -> None:
    """Several heads to a program, of strides of their own."""
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    heads = Heads(4, 2, 16)
    assert triton.tile_of(8, heads).heads == 2
    _, grad = numbers(2, 16, heads, device)
    cos, sin = angles(16, half=8, device=device)
    written = []
    for lying in LAYOUTS:
        known = known_of(2.0**-7, torch.float8_e4m3fn, device)
        grads = as_attention_lays(grad.bfloat16(), heads, lying)
        written.append(triton.rope_backward_in_fp8(*grads, cos, sin, known=known))
    for one in written[1:]:
        assert torch.equal(one.rows.view(torch.uint8), written[0].rows.view(torch.uint8))
        assert torch.equal(one.columns.view(torch.uint8), written[0].columns.view(torch.uint8))


def test_triton_records_nothing_outside_of_steps(device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    heads = Heads(2, 1, 16)
    _, grad = numbers(1, 16, heads, device)
    cos, sin = angles(16, half=8, device=device)
    grads = as_attention_lays(grad.bfloat16(), heads, "tokens first")
    known = known_of(1.0, torch.float8_e5m2, device, seen=None)
    triton.rope_backward_in_fp8(*grads, cos, sin, known=known)
    assert known.scale.item() == 1.0


def test_triton_refuses_angles_of_other_tokens(device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1")
    heads = Heads(2, 1, 16)
    qkv, _ = numbers(1, 6, heads, device)
    cos, sin = angles(5, half=8, device=device)
    with pytest.raises(AssertionError, match="angles of 5 tokens"):
        triton.rope(qkv.float(), cos, sin, heads=heads)
