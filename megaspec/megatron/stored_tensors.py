"""Tensors of torch files as places in files: where the numbers lie, never the numbers. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.core.errors import CheckpointError
from megaspec.megatron.pickled import Global, Made, Persistent
from megaspec.megatron.torch_zip import Member, TorchFile

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_REBUILD = "torch._utils._rebuild_tensor_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_MOST_DIMS = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: str
    member: Member
    """The storage that it lies in, other tensors beside it perhaps."""
    dtype: str
    """As in DTYPE_BYTES."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    offset: int
    """Of its first element in the file, in bytes."""


def dtype_of(value: Any) -> str | None:
    """`torch.bfloat16` -> BF16; None: no number format that weights have."""
    if isinstance(value, Global) and value.module == "torch":
        return _DTYPES.get(value.name)
    return None


def is_tensor(value: Any) -> bool:
    """Whether what was read of a pickle is a tensor."""
    return isinstance(value, Made) and str(value.function) in (_REBUILD, _PARAMETER)


def stored_tensor(source: TorchFile, value: Any, what: str) -> StoredTensor:
    """Where a tensor of a torch file lies. `what`: its name, for errors.

    CheckpointError: it lies behind its storage, or is no plain tensor.
    """
    if isinstance(value, Made) and str(value.function) == _PARAMETER and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Made) or str(value.function) != _REBUILD or len(value.arguments) < 4:
        raise CheckpointError(f"{source.file}: {what} is no plain tensor")
    storage, offset, shape, strides = value.arguments[:4]
    dtype, key = _storage(storage, f"{source.file}: {what}")
    shape = numbers_of(shape)
    strides = numbers_of(strides)
    is_plain = type(offset) is int and offset >= 0 and shape is not None and strides is not None
    if not is_plain or len(shape) != len(strides) or len(shape) > _MOST_DIMS:
        raise CheckpointError(f"{source.file}: {what} has a shape that is none")
    member = source.storages.get(key)
    if member is None:
        raise CheckpointError(f"{source.file}: {what} lies in storage {key}, which the file has not")
    last = offset
    for extent, stride in zip(shape, strides, strict=True):
        last += max(0, extent - 1) * stride
    size = DTYPE_BYTES[dtype]
    if prod(shape) and (last + 1) * size > member.bytes:
        raise CheckpointError(f"{source.file}: {what} of shape {list(shape)} reaches behind its storage: it is damaged")
    return StoredTensor(source.file, member, dtype, shape, strides, member.offset + offset * size)


def _storage(value: Any, where: str) -> tuple[str, str]:
    """-> number format and key"""
    parts = value.id if isinstance(value, Persistent) else None
    is_storage = isinstance(parts, tuple) and len(parts) == 5 and parts[0] == "storage"
    kind = parts[1] if is_storage else None
    dtype = None
    if isinstance(kind, Global):
        dtype = _STORAGES.get(kind.name)
    if dtype is None or type(parts[2]) is not str:
        raise CheckpointError(f"{where} is in a number format that weights have not: {kind or 'unknown'}")
    return dtype, parts[2]


def numbers_of(value: Any) -> tuple[int, ...] | None:
    """A tuple, list or torch.Size of whole numbers of at least 0; None: it is something else."""
    if isinstance(value, Made) and str(value.function) == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    if not all(type(number) is int and 0 <= number < 1 << 50 for number in value):
        return None
    return tuple(value)
