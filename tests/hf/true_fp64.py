"""Transformers in true fp64. Its models cast to fp32 by name in norms, routers, rotary angles and softmax, whatever
format they are in; while this lasts, those names stand for fp64."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def true_fp64() -> Iterator[None]:
    """Build and run a model inside of it: rotary frequencies are computed when a model is built."""
    names = ("float32", "float")
    kept = {name: getattr(torch, name) for name in names}
    cast = torch.Tensor.float
    default = torch.get_default_dtype()
    for name in names:
        setattr(torch, name, torch.float64)
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        for name, dtype in kept.items():
            setattr(torch, name, dtype)
        torch.Tensor.float = cast
        torch.set_default_dtype(default)
