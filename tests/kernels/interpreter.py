"""A plugin of pytest for tests under TRITON_INTERPRET=1, `-p tests.kernels.interpreter`: the same in less time.

Triton's interpreter puts its own functions into the modules of the language that a kernel sees, and again at each call
of a function in it, into those that this function sees: a quarter of all its time. Here they are put into both modules
once a launch.

Nearly half of the rest are descriptions of what it computes: each operation makes the type of its result, its shape as
numbers and as constants, and looks up NumPy's type in a table that it writes for that. Here shapes are described once,
and the table is written once.

With `-p tests.kernels.drawn`, too, no sum of integers is asked whether it overflows, which is a third of what is left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton import language
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_BOTH = SimpleNamespace(__globals__={"tl": language, "core": language.core})
_POINTER = np.dtype(np.uint64)
_put_into = interpreter._patch_lang
_broadcast = TritonSemantic.broadcast_impl_value
_scalar_of_numpy = cache(interpreter._get_np_dtype)


def call_in_a_launch(self: interpreter.InterpretedFunction, *arguments: Any, **keywords: Any) -> Any:
    return self.rewrite()(*arguments, **keywords)


def numpy_type(of: core.dtype) -> np.dtype:
    scalar = of.scalar
    if isinstance(scalar, core.pointer_type):
        return _POINTER
    return _scalar_of_numpy(scalar)


@dataclass(frozen=True)
class Shape:
    """What Triton says of a shape: in a type, and in a tensor."""

    of_type: core.tuple
    of_tensor: core.tuple
    numel: int
    constant_numel: core.constexpr


@cache
def shape_of(sizes: tuple[int, ...]) -> Shape:
    """Raises what Triton does of a shape that no block may have."""
    return Shape(
        of_type=core.tuple(sizes),
        of_tensor=core.tuple([core.constexpr(size) for size in sizes]),
        numel=validate_block_shape(sizes),
        constant_numel=core.constexpr(math.prod(sizes)),
    )


def init_block_type(self: core.block_type, element_ty: core.dtype, shape: Sequence[int | core.constexpr]) -> None:
    assert isinstance(shape, (list, core.tuple))
    sizes = []
    for size in shape:
        if isinstance(size, core.constexpr):
            size = size.value
        # 64.0 is no size of a block, though it is equal to one
        assert isinstance(size, int), f"a block of {size} elements"
        sizes.append(size)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.described = shape_of(tuple(sizes))
    self.shape = self.described.of_type
    self.numel = self.described.numel


def init_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    described = type.described if type.is_block() else shape_of(())
    self.handle = handle
    self.numel = described.constant_numel
    self.type = type
    self.dtype = type.scalar
    self.shape = described.of_tensor


def broadcast(self: TritonSemantic, one: core.tensor, other: core.tensor) -> tuple[core.tensor, core.tensor]:
    if one.type.is_block() and other.type.is_block() and one.type.described is other.type.described:
        return one, other
    return _broadcast(self, one, other)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.has_plugin("tests.kernels.drawn"):
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)


interpreter._patch_lang = lambda _kernel: _put_into(_BOTH)
interpreter.InterpretedFunction.__call__ = call_in_a_launch
interpreter._get_np_dtype = numpy_type
core.block_type.__init__ = init_block_type
# a text that is asked for in errors alone
core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
core.tensor.__init__ = init_tensor
TritonSemantic.broadcast_impl_value = broadcast
