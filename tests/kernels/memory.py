"""A plugin of pytest for tests under TRITON_INTERPRET=1, `-p tests.kernels.memory`: a kernel that reads or writes
beside what it was given raises, as compute-sanitizer tells of one on a GPU. Most of what lies there belongs to somebody
else, so that neither a GPU nor the interpreter would notice.

What a kernel was given are its tensors, each from its first to its last element. What a mask hides is not looked at,
nor is AdamW's kernel, which takes addresses in a table.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_Executor = interpreter.GridExecutor
_take_arguments = _Executor._init_args_hst
_load = _Builder.create_masked_load
_store = _Builder.create_masked_store
_exchange = _Builder.create_atomic_cas
_change = _Builder.create_atomic_rmw

# An argument of addresses of tensors that are no arguments.
_TABLE = "addresses_ptr"
# First and last byte of each tensor of the launch that runs.
_given: list[tuple[int, int]] = []


def take_arguments(self: interpreter.GridExecutor, arguments: Iterable[Any], keywords: dict[str, Any]) -> Any:
    mine, mine_by_name = _take_arguments(self, arguments, keywords)
    _given.clear()
    if _TABLE in self.arg_names:
        _given.append((0, 2**64))
    for one in tensors_of([*mine, *mine_by_name.values()]):
        _given.append(extent(one))
    return mine, mine_by_name


def tensors_of(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for one in arguments:
        if isinstance(one, tuple):
            yield from tensors_of(one)
        elif isinstance(one, Tensor) and one.numel():
            yield one


def extent(one: Tensor) -> tuple[int, int]:
    """Its first and last byte."""
    elements = 1
    for size, stride in zip(one.shape, one.stride(), strict=True):
        elements += (size - 1) * stride
    first = one.data_ptr()
    return first, first + elements * one.element_size() - 1


def must_be_given(pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle | None, what: str) -> None:
    addresses = pointers.data
    if mask is not None:
        addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
    if not addresses.size:
        return
    size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
    lowest = int(addresses.min())
    highest = int(addresses.max()) + size - 1
    for first, last in _given:
        if first <= lowest and highest <= last:
            return
    # of several tensors at once
    for address in addresses.ravel().tolist():
        if not any(first <= address and address + size - 1 <= last for first, last in _given):
            near = min(_given, key=lambda one: min(abs(address - one[0]), abs(address - one[1])), default=(0, 0))
            raise IndexError(f"a kernel {what} {address - near[1] - 1:+d} bytes from the end of a tensor it was given")


def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    must_be_given(pointers, mask, "reads")
    return _load(self, pointers, mask, *rest)


def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    must_be_given(pointers, mask, "writes")
    return _store(self, pointers, value, mask, *rest)


def exchange(self: Any, pointers: Any, *rest: Any) -> Any:
    must_be_given(pointers, None, "changes")
    return _exchange(self, pointers, *rest)


def change(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    must_be_given(pointers, mask, "changes")
    return _change(self, operation, pointers, value, mask, *rest)


_Executor._init_args_hst = take_arguments
_Builder.create_masked_load = load
_Builder.create_masked_store = store
_Builder.create_atomic_cas = exchange
_Builder.create_atomic_rmw = change
