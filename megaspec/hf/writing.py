"""A Hugging Face folder out of a run's weights, tensor by tensor: nothing is gathered beyond the tensor at hand."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megaspec.checkpoint.files import free_bytes, published_whole, pwrite_all, write_durably
from megaspec.checkpoint.reader import Weights
from megaspec.checkpoint.shard import DTYPE_NAMES, as_bytes
from megaspec.core.errors import WriteError
from megaspec.hf.blocks import TheirTensor
from megaspec.hf.folder import CONFIG, INDEX, SINGLE, as_json
from megaspec.hf.names import WeightTable
from megaspec.hf.weights import their_dtype, their_tensor


@dataclass(frozen=True)
class OutTensor:
    """A tensor that is to be written, and the number format that it is written in."""

    theirs: TheirTensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.theirs.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutFile:
    """One safetensors file that is to be written."""

    name: str
    header: bytes
    tensors: tuple[tuple[OutTensor, int], ...]
    """Each with its first byte in the file."""


def out_tensors(table: WeightTable, weights: Weights, dtype: torch.dtype | None) -> list[OutTensor]:
    """What is to be written, in the order of the model. `dtype`: of all; None: each as it is stored.

    What experts are chosen by beside the router's scores stays as it is stored: rounded, it would choose others.
    """
    found = []
    for theirs in table.theirs.values():
        own = their_dtype(theirs, weights)
        is_kept = theirs.pieces[0][0].name.startswith("router/")
        found.append(OutTensor(theirs, own if dtype is None or is_kept else dtype))
    return found


def main_dtype(tensors: Sequence[OutTensor]) -> torch.dtype:
    """The format of most of the bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.bytes
    return sizes.most_common(1)[0][0]


def plan_files(tensors: Sequence[OutTensor], *, shard_bytes: int) -> list[OutFile]:
    """Tensors in the order of the model, in files of at most `shard_bytes`, or of one larger tensor."""
    groups: list[list[OutTensor]] = [[]]
    taken = 0
    for tensor in tensors:
        if groups[-1] and taken + tensor.bytes > shard_bytes:
            groups.append([])
            taken = 0
        groups[-1].append(tensor)
        taken += tensor.bytes
    files = []
    for number, group in enumerate(groups, start=1):
        name = SINGLE
        if len(groups) > 1:
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        files.append(_plan_file(name, group))
    return files


def _plan_file(name: str, tensors: list[OutTensor]) -> OutFile:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    offsets = []
    for tensor in tensors:
        begin = end
        end += tensor.bytes
        offsets.append(begin)
        shape = list(tensor.theirs.shape)
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[tensor.theirs.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # filled up to a multiple of 8 bytes, so that the tensors behind it are aligned
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = tuple((tensor, len(header) + offset) for tensor, offset in zip(tensors, offsets, strict=True))
    return OutFile(name, header, placed)


def write_folder(
    out: Path,
    weights: Weights,
    tensors: Sequence[OutTensor],
    *,
    config: Mapping[str, Any],
    others: Mapping[str, bytes],
    shard_bytes: int,
) -> int:
    """Writes a folder whole or not at all, and returns the bytes of its tensors. `others`: files beside them, by name.

    WriteError: `out` is there, or can't be written; nothing is left of it then.
    """
    with published_whole(out) as saving:
        free = free_bytes(saving)
        need = sum(tensor.bytes for tensor in tensors)
        if need > free:
            raise WriteError(f"cannot write {out}: need {need:,} bytes, {free:,} bytes are free; make room there")
        total = 0
        weight_map = {}
        files = plan_files(tensors, shard_bytes=shard_bytes)
        for file in files:
            total += _write_file(saving / file.name, file, weights)
            for tensor, _ in file.tensors:
                weight_map[tensor.theirs.name] = file.name
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_durably(saving / INDEX, as_json(index))
        write_durably(saving / CONFIG, as_json(config))
        for name, content in others.items():
            write_durably(saving / name, content)
    return total


def _write_file(path: Path, file: OutFile, weights: Weights) -> int:
    """-> the bytes of its tensors"""
    total = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        pwrite_all(fd, memoryview(file.header), 0)
        for tensor, offset in file.tensors:
            data = as_bytes(their_tensor(tensor.theirs, weights, tensor.dtype))
            pwrite_all(fd, data, offset)
            total += len(data)
        os.fsync(fd)
    finally:
        os.close(fd)
    return total
