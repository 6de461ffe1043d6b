"""The sum over each token's experts."""

# M tokens, k choices of a token, D features

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, random, training_dtype
from megaspec_kernels.registry import REGISTRY


def _place(M: int, k: int, device: torch.device) -> Tensor:
    """[M, k]: a row of its own for each choice, in any order."""
    draw = torch.Generator().manual_seed(M + k)
    return torch.randperm(M * k, generator=draw).view(M, k).to(device)


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Odd widths, and choices that were dropped: all of one token."""
    kernel = REGISTRY["unpermute"][name]
    plain = REGISTRY["unpermute"]["reference"]
    dtype = training_dtype(device)
    for M, k, D in ((1, 1, 1), (9, 8, 64), (7, 3, 1000), (2, 2, 4097)):
        y_RD = random(M * k, D, seed=1, device=device)
        place_Mk = _place(M, k, device)
        # a third is dropped: all of one token, nothing of another
        some_Mk = torch.arange(M * k, device=device).view(M, k) % 3 != 1
        some_Mk[M // 2] = False
        some_Mk[0] = True
        for kept_Mk in (None, some_Mk):
            mine = y_RD.to(dtype)
            yield Held(
                f"{M} x {k} x {D}",
                {"out": kernel(mine, place_Mk, kept_Mk)},
                {"out": plain(mine, place_Mk, kept_Mk)},
                {"out": plain(y_RD, place_Mk, kept_Mk)},
            )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """Each row read once, each token written once."""
    M, k, D = (16384, 8, 2048) if device.type == "cuda" else (512, 2, 128)
    y_RD = torch.randn(M * k, D, device=device).to(training_dtype(device))
    call = partial(REGISTRY["unpermute"][name], y_RD, _place(M, k, device), None)
    yield Work(f"{M} x {k} x {D}", call, (k + 1) * M * D * y_RD.itemsize + 8 * M * k, "bytes")


BENCH = Bench(held, works)
