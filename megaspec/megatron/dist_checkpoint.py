"""Megatron's torch_dist checkpoints: `.metadata`, files of ranks with a torch file for each piece, `common.pt`.

A tensor is said by its shape in the whole model and by pieces of it, each with its place. Layers are stacked along a
first dimension where they are alike (`decoder.layers.mlp.linear_fc2.weight`: [layers, rows, columns]), and experts
along the next one. Torch-free.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.core.errors import CheckpointError
from megaspec.core.problems import show
from megaspec.hf.folder import parse_object
from megaspec.megatron.opened import OpenedCheckpoint, args_of, entries_of, fields_of, plain_name, why_ignored
from megaspec.megatron.pickled import MOST_BYTES, read_pickle
from megaspec.megatron.rank_files import RankFiles
from megaspec.megatron.stored_tensors import StoredTensor, dtype_of, numbers_of, stored_tensor
from megaspec.megatron.torch_zip import read_torch_file
from megaspec.megatron.whole_tensors import WholeTensor, first_of, patch_of

METADATA = ".metadata"
COMMON = "common.pt"
_BACKEND = "metadata.json"
_MOST_BACKEND_BYTES = 1 << 16
# The largest published mixtures have some hundred thousand pieces.
_MOST_PIECES = 4_000_000
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.distcp")
_WEIGHTS = ("embedding.", "decoder.", "output_layer.", "module.", "mtp.")
_OTHERS = re.compile(r"(optimizer|chained_\d+|rng_state|rerun_state_machine|opt_param_scheduler|content_metadata)\b.*")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:experts\.)?(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias))")


@dataclass(frozen=True)
class _Piece:
    """A rectangle of a tensor, and the torch file that it lies in."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


def open_dist(files: RankFiles, iteration: int | None) -> OpenedCheckpoint:
    """A folder with `.metadata`. CheckpointError: all that is wrong with it."""
    _check_backend(files)
    common = entries_of(read_torch_file(files, COMMON).value)
    if common is None:
        raise CheckpointError(f"{files.path / COMMON} holds no dict")
    found = common.get("iteration")
    if iteration is not None and type(found) is int and found != iteration:
        raise CheckpointError(f"{files.path / COMMON} is of iteration {found}, its folder of iteration {iteration}")
    metadata = _metadata(files)
    pieces = _places(files, metadata)
    left_out: Counter[str] = Counter()
    tensors: dict[str, WholeTensor] = {}
    problems: list[str] = []
    for name, value in _entries(files, metadata, "state_dict_metadata").items():
        if type(name) is not str:
            raise CheckpointError(f"{files.path / METADATA}: a tensor without a name")
        because = why_ignored(name)
        if because is None and not name.startswith(_WEIGHTS) and _OTHERS.fullmatch(name):
            because = "state of the optimizer and of the training, which is no weight"
        if because is not None:
            left_out[because] += 1
            continue
        try:
            _add(files, tensors, name, value, pieces)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(first_of(problems))
    return OpenedCheckpoint(
        found if type(found) is int else 0, args_of(common.get("args")), tensors, left_out, "torch_dist"
    )


def _check_backend(files: RankFiles) -> None:
    size = files.size(_BACKEND)
    if size > _MOST_BACKEND_BYTES:
        raise CheckpointError(f"{files.path / _BACKEND} has {size:,} bytes, expected at most {_MOST_BACKEND_BYTES:,}")
    backend = parse_object(bytes(files.read(_BACKEND, 0, size)), f"{files.path / _BACKEND}")
    found = backend.get("sharded_backend")
    if found != "torch_dist":
        raise CheckpointError(
            f"{files.path / _BACKEND}: sharded_backend={show(found)}; torch_dist is read, and Megatron-LM writes it "
            "from others with --ckpt-convert-format torch_dist"
        )


def _metadata(files: RankFiles) -> dict[str, Any]:
    size = files.size(METADATA)
    if size > MOST_BYTES:
        raise CheckpointError(f"{files.path / METADATA} has {size:,} bytes, expected at most {MOST_BYTES:,}")
    where = f"{files.path / METADATA}"
    found = fields_of(read_pickle(bytes(files.read(METADATA, 0, size)), where), "Metadata")
    if found is None:
        raise CheckpointError(f"{where} is no Metadata of torch's distributed checkpoints")
    return found


def _entries(files: RankFiles, metadata: dict[str, Any], name: str) -> dict[Any, Any]:
    found = entries_of(metadata.get(name))
    if found is None:
        raise CheckpointError(f"{files.path / METADATA}: {name} is missing")
    return found


def _places(files: RankFiles, metadata: dict[str, Any]) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """Name and place of a piece -> file, first byte, bytes."""
    where = f"{files.path / METADATA}"
    places = {}
    entries = _entries(files, metadata, "storage_data")
    if len(entries) > _MOST_PIECES:
        raise CheckpointError(f"{where}: {len(entries):,} pieces, expected at most {_MOST_PIECES:,}")
    for key, value in entries.items():
        index = fields_of(key, "MetadataIndex")
        info = fields_of(value, "_StorageInfo")
        if index is None or info is None:
            raise CheckpointError(f"{where}: storage_data holds what is no piece of a tensor")
        name = index.get("fqn")
        start = index.get("offset")
        if start is None or type(name) is not str:
            # what is no tensor has no place
            continue
        start = numbers_of(start)
        file, offset, length = (info.get(one) for one in ("relative_path", "offset", "length"))
        is_plain = type(file) is str and start is not None and numbers_of((offset, length)) is not None
        if not is_plain or not _FILE.fullmatch(file):
            raise CheckpointError(
                f"{where}: a piece of {show(name)} lies in {show(str(file))}, which is no file of ranks"
            )
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{where}: pieces of {show(name)} are stored transformed, such as compressed")
        places[name, start] = (file, offset, length)
    return places


def _add(
    files: RankFiles,
    tensors: dict[str, WholeTensor],
    name: str,
    value: Any,
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]],
) -> None:
    """Everything that one entry of the metadata holds: a matrix, those of all layers, those of all experts."""
    where = f"{files.path / METADATA}: {show(name)}"
    found = fields_of(value, "TensorStorageMetadata")
    if found is None:
        raise CheckpointError(f"{where} is no tensor, and nothing that is known to be no weight")
    shape = numbers_of(found.get("size"))
    properties = fields_of(found.get("properties"), "TensorProperties")
    dtype = dtype_of(_first_state(found.get("properties"), properties))
    chunks = found.get("chunks")
    if shape is None or dtype is None or not isinstance(chunks, list) or not 1 <= len(shape) <= 4:
        raise CheckpointError(f"{where} has a shape or a number format that is none of a weight")
    plan = _Stacked(name, shape, where)
    for chunk in chunks:
        fields = fields_of(chunk, "ChunkStorageMetadata") or {}
        start = numbers_of(fields.get("offsets"))
        sizes = numbers_of(fields.get("sizes"))
        place = places.get((name, start)) if start is not None else None
        if sizes is None or place is None or len(start) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{where}: a piece at {start} is in no file")
        stored = _stored(files, name, _Piece(start, sizes, *place), dtype)
        for target, whole_shape, patch in plan.patches(start, sizes, stored):
            whole = tensors.setdefault(target, WholeTensor(whole_shape, dtype))
            if whole.shape != whole_shape or whole.dtype != dtype:
                raise CheckpointError(f"{where}: {target} has two shapes")
            whole.patches.append(patch)


def _first_state(value: Any, fields: dict[str, Any] | None) -> Any:
    """The number format of TensorProperties, which torch keeps as the first of a tuple, or by its name."""
    if fields is not None:
        return fields.get("dtype")
    state = getattr(value, "state", None)
    if isinstance(state, tuple) and state:
        return state[0]
    return None


def _stored(files: RankFiles, name: str, piece: _Piece, dtype: str) -> StoredTensor:
    """The tensor of a piece, whose torch file is read."""
    source = read_torch_file(files, piece.file, begin=piece.offset, length=piece.length)
    stored = stored_tensor(source, source.value, name)
    if stored.dtype != dtype or stored.shape != piece.shape:
        raise CheckpointError(
            f"{files.path / piece.file}: a piece of {show(name)} is {stored.dtype} {list(stored.shape)}, "
            f"{METADATA} says {dtype} {list(piece.shape)}"
        )
    return stored


class _Stacked:
    """Which tensors of the whole model a stored one holds."""

    def __init__(self, name: str, shape: tuple[int, ...], where: str):
        self._shape = shape
        layer = _LAYER.fullmatch(name)
        expert = _EXPERT.fullmatch(layer[2]) if layer else None
        # the leading dimensions that are numbers of layers and of experts
        self._has_layers = layer is not None and layer[1] is None
        self._has_experts = expert is not None and expert[1] is None
        lead = int(self._has_layers) + int(self._has_experts)
        if not 1 <= len(shape) - lead <= 2:
            raise CheckpointError(
                f"{where} has shape {list(shape)}, which is neither a matrix nor a vector of each layer"
            )
        self._lead = lead
        self._name = name
        self._layer = layer
        self._expert = expert

    def target(self, lead: tuple[int, ...]) -> str:
        """The name of the tensor at an index of the leading dimensions."""
        if self._layer is None:
            return plain_name(self._name)
        numbers = list(lead)
        number = numbers.pop(0) if self._has_layers else self._layer[1]
        local = plain_name(self._layer[2])
        if self._expert is not None:
            expert = numbers.pop(0) if self._has_experts else self._expert[1]
            local = f"mlp.experts.{expert}.{self._expert[2]}"
        return f"decoder.layers.{number}.{local}"

    def patches(
        self, start: tuple[int, ...], shape: tuple[int, ...], stored: StoredTensor
    ) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        """Of one piece: the tensor of the whole model, its shape, and the rectangle of it."""
        lead = self._lead
        inner = shape[lead:]
        row, *column = start[lead:]
        # no more of them than numbers in the file
        if prod(shape) * DTYPE_BYTES[stored.dtype] > stored.member.bytes:
            raise CheckpointError(f"{stored.file}: a piece of {show(self._name)} has fewer bytes than its shape takes")
        for numbers in product(*(range(extent) for extent in shape[:lead])):
            whole = tuple(first + number for first, number in zip(start[:lead], numbers, strict=True))
            at = (*numbers, *(0 for _ in inner))
            patch = patch_of(stored, at, inner, row=row, column=column[0] if column else 0)
            yield self.target(whole), self._shape[lead:], patch
