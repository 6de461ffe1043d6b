"""A plugin of pytest for tests under TRITON_INTERPRET=1, `-p tests.kernels.interpreter`: the same in less time.

Triton's interpreter puts its own functions into the modules of the language that a kernel sees, and again at each call
of a function in it, into those that this function sees: a quarter of all its time. Here they are put into both modules
at the first launch, and stay.

Nearly half of the rest are descriptions of what it computes: each operation makes the type of its result, its shape as
numbers and as constants, and looks up NumPy's type in a table that it writes for that. Here shapes are described once,
and the table is written once.

Half of what is then left is a question that is asked at each operation: which type two operands have in common. It has
the same answer for the same two types, and for a type and the same number, and is asked once (`Agreement`). A number
that meets a block is left a single one, which NumPy repeats.

With `-p tests.kernels.drawn`, too, no sum of integers is asked whether it overflows, which is a third of what is left.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
_agree = TritonSemantic.binary_op_type_checking_impl
_equal = core.dtype.__eq__
_unwrap = core._unwrap_if_constexpr
_scalar_of_numpy = cache(interpreter._get_np_dtype)
# What a builtin of the language is: a function that asks for the semantics and hands everything on.
_ASKS_FOR_SEMANTICS = core.builtin(len).__code__
_NEVER_CONSTANTS = frozenset({core.tensor, core.dtype, bool, int, float, str, type(None)})


@cache
def put_into_both() -> None:
    _put_into(_BOTH)


def patch_lang(_kernel: Any) -> interpreter._LangPatchScope:
    """With nothing to be taken back after the launch."""
    put_into_both()
    return interpreter._LangPatchScope()


def patch_attr(
    obj: Any, name: str, member: Callable[..., Any], _builder: Any, scope: interpreter._LangPatchScope
) -> None:
    """Puts a builtin there that has its semantics."""
    function = member
    if member.__code__ is _ASKS_FOR_SEMANTICS:
        function = member.__wrapped__

    def interpreted(*arguments: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **keywords)

    scope.set_attr(obj, name, interpreted)


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
    blocks: dict[int, core.block_type] = field(default_factory=dict)
    """Types of this shape by the identity of their elements' type, which they keep alive."""


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


def with_element_type(self: core.block_type, element_ty: core.dtype) -> core.block_type:
    blocks = self.described.blocks
    found = blocks.get(id(element_ty))
    if found is None:
        found = blocks[id(element_ty)] = core.block_type(element_ty, self.shape)
    return found


def equal_types(self: core.dtype, other: Any) -> bool:
    return self is other or _equal(self, other)


def unwrapped(of: Any) -> Any:
    if type(of) in _NEVER_CONSTANTS:
        return of
    return _unwrap(of)


def fits(data: np.ndarray, dtype: core.dtype) -> bool:
    if isinstance(dtype, core.pointer_type):
        return True
    # an int1 takes a byte
    return data.itemsize == 1 or 8 * data.itemsize <= dtype.primitive_bitwidth


def broadcast(self: TritonSemantic, one: core.tensor, other: core.tensor) -> tuple[core.tensor, core.tensor]:
    if one.type.is_block() and other.type.is_block() and one.type.described is other.type.described:
        return one, other
    return _broadcast(self, one, other)


@dataclass(frozen=True)
class Agreement:
    """What Triton makes of two operands: of numbers constants, of tensors those of these types."""

    lhs: core.tensor
    rhs: core.tensor


_agreements: dict[tuple, Agreement] = {}


def agreed(
    self: TritonSemantic,
    lhs: core.tensor | float,
    rhs: core.tensor | float,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[core.tensor, core.tensor]:
    rule = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    key = (*_asked_of(lhs), *_asked_of(rhs), rule)
    found = _agreements.get(key)
    if found is None:
        # raises what Triton does where they have nothing in common
        found = _agreements[key] = Agreement(*_agree(self, _without_shape(lhs), _without_shape(rhs), *rule))
    return _joined(self, _as(self, lhs, found.lhs), _as(self, rhs, found.rhs))


def _asked_of(operand: core.tensor | float) -> tuple:
    """All that Triton asks of it; 1, 1.0 and True are equal and no same constant."""
    if isinstance(operand, core.tensor):
        return core.tensor, operand.dtype.name
    return type(operand), operand


def _without_shape(operand: core.tensor | float) -> core.tensor | float:
    if not isinstance(operand, core.tensor):
        return operand
    return core.tensor(interpreter.TensorHandle(np.zeros(1, numpy_type(operand.dtype)), operand.dtype), operand.dtype)


def _as(self: TritonSemantic, operand: core.tensor | float, like: core.tensor) -> core.tensor:
    if not isinstance(operand, core.tensor):
        return like
    if operand.dtype is like.dtype or operand.dtype == like.dtype:
        return operand
    return self.cast(operand, like.dtype)


def _joined(self: TritonSemantic, one: core.tensor, other: core.tensor) -> tuple[core.tensor, core.tensor]:
    """As blocks of one shape, but for a number's memory."""
    if one.type.is_block() and not other.type.is_block():
        return one, core.tensor(other.handle, one.type.with_element_ty(other.dtype))
    if other.type.is_block() and not one.type.is_block():
        return core.tensor(one.handle, other.type.with_element_ty(one.dtype)), other
    return broadcast(self, one, other)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.has_plugin("tests.kernels.drawn"):
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)


interpreter._patch_lang = patch_lang
interpreter._patch_attr = patch_attr
interpreter._validate_np_data_size = fits
interpreter.InterpretedFunction.__call__ = call_in_a_launch
interpreter._get_np_dtype = numpy_type
core.block_type.__init__ = init_block_type
# a text that is asked for in errors alone
core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
core.tensor.__init__ = init_tensor
core.block_type.with_element_ty = with_element_type
core.dtype.__eq__ = equal_types
core._unwrap_if_constexpr = unwrapped
TritonSemantic.broadcast_impl_value = broadcast
TritonSemantic.binary_op_type_checking_impl = agreed
