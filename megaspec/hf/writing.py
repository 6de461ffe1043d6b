"""A Hugging Face folder out of a run's weights, tensor by tensor: nothing is gathered beyond the tensor at hand."""

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megaspec.checkpoint.files import pwrite_all, remove_tree, rename_durably, sync_folder, write_durably, write_failure
from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.checkpoint.shard import DTYPE_NAMES, as_bytes
from megaspec.core.errors import WriteError
from megaspec.hf.blocks import TheirTensor
from megaspec.hf.folder import CONFIG, INDEX, SINGLE
from megaspec.hf.names import WeightTable
from megaspec.hf.weights import Weights, their_tensor


@dataclass(frozen=True)
class OutFile:
    """One safetensors file that is to be written."""

    name: str
    header: bytes
    tensors: tuple[tuple[TheirTensor, int], ...]
    """Each with its first byte in the file."""


def plan_files(theirs: Mapping[str, TheirTensor], *, dtype: torch.dtype, shard_bytes: int) -> list[OutFile]:
    """Tensors in the order of the model, in files of at most `shard_bytes`, or of one larger tensor."""
    groups: list[list[TheirTensor]] = [[]]
    taken = 0
    for tensor in theirs.values():
        size = _bytes(tensor, dtype)
        if groups[-1] and taken + size > shard_bytes:
            groups.append([])
            taken = 0
        groups[-1].append(tensor)
        taken += size
    files = []
    for number, group in enumerate(groups, start=1):
        name = SINGLE
        if len(groups) > 1:
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        files.append(_plan_file(name, group, dtype))
    return files


def _bytes(tensor: TheirTensor, dtype: torch.dtype) -> int:
    return prod(tensor.shape) * DTYPE_BYTES[DTYPE_NAMES[dtype]]


def _plan_file(name: str, tensors: list[TheirTensor], dtype: torch.dtype) -> OutFile:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    offsets = []
    for tensor in tensors:
        begin = end
        end += _bytes(tensor, dtype)
        offsets.append(begin)
        shape = list(tensor.shape)
        entries[tensor.name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # filled up to a multiple of 8 bytes, so that the tensors behind it are aligned
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = tuple((tensor, len(header) + offset) for tensor, offset in zip(tensors, offsets, strict=True))
    return OutFile(name, header, placed)


def write_folder(
    out: Path,
    weights: Weights,
    table: WeightTable,
    *,
    config: Mapping[str, Any],
    others: Mapping[str, bytes],
    dtype: torch.dtype,
    shard_bytes: int,
) -> int:
    """Writes a folder whole or not at all, and returns the bytes of its tensors. `others`: files beside them, by name.

    WriteError: `out` is there, or can't be written; nothing is left of it then.
    """
    if os.path.lexists(out):
        raise WriteError(f"{out} exists; name a folder that does not, or remove it")
    # published by a rename: who sees the folder sees all of it
    saving = out.parent / f".{out.name}.writing-{secrets.token_hex(4)}"
    try:
        saving.mkdir(parents=True)
        total = 0
        weight_map = {}
        files = plan_files(table.theirs, dtype=dtype, shard_bytes=shard_bytes)
        for file in files:
            total += _write_file(saving / file.name, file, weights, dtype)
            for tensor, _ in file.tensors:
                weight_map[tensor.name] = file.name
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_durably(saving / INDEX, _json(index))
        write_durably(saving / CONFIG, _json(config))
        for name, content in others.items():
            write_durably(saving / name, content)
        sync_folder(saving)
        rename_durably(saving, out)
    except OSError as error:
        raise write_failure(out, error) from None
    finally:
        if os.path.lexists(saving):
            with suppress(OSError):
                remove_tree(saving)
    return total


def _write_file(path: Path, file: OutFile, weights: Weights, dtype: torch.dtype) -> int:
    """-> the bytes of its tensors"""
    total = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        pwrite_all(fd, memoryview(file.header), 0)
        for tensor, offset in file.tensors:
            data = as_bytes(their_tensor(tensor, weights, dtype))
            pwrite_all(fd, data, offset)
            total += len(data)
        os.fsync(fd)
    finally:
        os.close(fd)
    return total


def _json(value: Mapping[str, Any]) -> bytes:
    """Indented and in the order of the keys, as transformers writes it."""
    return (json.dumps(value, indent=2, sort_keys=False) + "\n").encode()
