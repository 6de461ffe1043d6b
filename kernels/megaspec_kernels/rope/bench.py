"""Rotary positions."""

# B sequences, T tokens, N query heads, K key and value heads, H head size, R features of a head that turn, C features
# of a token in the product of all three

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import (
    Bench,
    Held,
    Work,
    compiled_on_gpu,
    copy_of,
    on_device,
    random,
    replayed,
    training_dtype,
)
from megaspec_kernels.fp8_cast.bench import known_one
from megaspec_kernels.gate import results
from megaspec_kernels.registry import REGISTRY, RopeProducer
from megaspec_kernels.rope.form import Heads

# B, T, heads, R: all of a head turns, a part of it, one head of each, documents of their own positions.
SHAPES = (
    (2, 7, Heads(4, 2, 16), 16),
    (1, 33, Heads(3, 1, 24), 10),
    (2, 16, Heads(1, 1, 6), 2),
    (3, 5, Heads(2, 2, 64), 32),
)


def angles(*rows: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., R / 2] in fp32 of any angles, the same numbers in every format."""
    draw = torch.Generator().manual_seed(half)
    turned = 6.0 * torch.rand(*rows, half, generator=draw)
    return turned.cos().to(device), turned.sin().to(device)


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Outputs side by side, so that one gradient is that of all."""
    dtype = training_dtype(device)
    for B, T, heads, R in SHAPES:
        qkv = random(B, T, heads.width, seed=1, device=device)
        grad = random(B, T, heads.width, seed=2, device=device)
        # of each sequence its own, and the same for all
        for rows in ((B, T), (T,)):
            cos, sin = angles(*rows, half=R // 2, device=device)

            def joined(kernel: str, qkv: Tensor, cos: Tensor = cos, sin: Tensor = sin, heads: Heads = heads) -> Tensor:
                wide = torch.promote_types(qkv.dtype, torch.float32)
                turned = REGISTRY["rope"][kernel].rope(qkv, cos.to(wide), sin.to(wide), heads=heads)
                return torch.cat([part.flatten(-2) for part in turned], dim=-1)

            yield Held(
                f"{B} x {T}, {heads}, {R} turn, angles {rows}",
                results(partial(joined, name), {"qkv": qkv.to(dtype)}, grad),
                results(partial(joined, "reference"), {"qkv": qkv.to(dtype)}, grad),
                results(partial(joined, "reference"), {"qkv": qkv}, grad),
            )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """A micro batch of 8B and one of 1B: queries and keys are read and written, backward values too. Plain operations
    are timed as they are compiled."""
    sizes = ((1, 8192, Heads(32, 8, 128)), (2, 8192, Heads(32, 8, 64)))
    if device.type == "cpu":
        sizes = ((1, 64, Heads(4, 2, 16)),)
    dtype = training_dtype(device)
    for B, T, heads in sizes:
        cos, sin = angles(T, half=heads.size // 2, device=device)

        def turned(
            qkv: Tensor, cos: Tensor = cos, sin: Tensor = sin, heads: Heads = heads
        ) -> tuple[Tensor, Tensor, Tensor]:
            return tuple(REGISTRY["rope"][name].rope(qkv, cos, sin, heads=heads))

        kernel = turned
        if name == "reference":
            kernel = compiled_on_gpu(turned, device)
        qkv = torch.randn(B, T, heads.width, device=device).to(dtype).requires_grad_()
        grads = tuple(
            torch.randn(B, T, count, heads.size, device=device).to(dtype)
            for count in (heads.queries, heads.keys, heads.keys)
        )
        forward, backward = replayed(kernel, (qkv,), grads)
        tokens = f"{B} x {T}, heads {heads.queries} and {heads.keys} of {heads.size}"
        moved = 2 * B * T * qkv.itemsize
        yield Work(f"forward, {tokens}", forward, moved * heads.turned * heads.size, "bytes")
        yield Work(f"backward, {tokens}", backward, moved * heads.width, "bytes")
        producer = REGISTRY["rope"][name].producer
        if producer is not None and device.type == "cuda":
            yield _in_fp8(producer, grads, cos, sin, tokens, qkv.numel() * (qkv.itemsize + 2))


def _in_fp8(
    producer: RopeProducer, grads: tuple[Tensor, ...], cos: Tensor, sin: Tensor, tokens: str, moved: int
) -> Work:
    """What is written is a byte in each layout."""
    known = known_one(torch.float8_e5m2, cos.device)
    call = partial(producer.backward_in_fp8, *grads, cos, sin, known=known)
    return Work(f"backward in fp8, {tokens}", on_device(call), moved, "bytes", copy_of(moved, cos.device))


BENCH = Bench(held, works)
