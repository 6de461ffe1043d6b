"""Megatron's legacy checkpoints (`--ckpt-format torch`): a folder and a model_optim_rng.pt for each tp and pp rank.

`mp_rank_{tp}` has no number of the stage where there is one stage, and one more number, of the expert-parallel rank,
where experts are divided. A file holds what its rank computes with: layers by their number in the stage, slices of
matrices, and of a gated layer's first product the rank's rows of the gate above its rows of the other part. Torch-free.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaspec.core.errors import CheckpointError
from megaspec.core.problems import show
from megaspec.megatron.opened import OpenedCheckpoint, args_of, entries_of, plain_name, why_ignored
from megaspec.megatron.rank_files import RankFiles
from megaspec.megatron.stored_tensors import StoredTensor, is_tensor, stored_tensor
from megaspec.megatron.torch_zip import read_torch_file
from megaspec.megatron.whole_tensors import Patch, WholeTensor, equal_everywhere, first_of, patch_of

RANK_FOLDER = re.compile(r"mp_rank_\d{2,4}(_\d{3,4}){0,2}")
_FILE = "model_optim_rng.pt"
_MOST_RANKS = 1 << 16
_MODEL = re.compile(r"model(\d{0,3})")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_BY_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.weight|.*\.(linear_qkv|linear_fc1)\.(weight|bias)"
)
_BY_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
_GATED = re.compile(r".*\.linear_fc1\.(weight|bias)")
# What every rank says of the model and of how it is divided.
_AGREED = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("padded_vocab_size", "swiglu", "normalization", "position_embedding_type", "num_experts", "iteration"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "untie_embeddings_and_output_weights", "add_bias_linear"),
)


@dataclass(frozen=True)
class _Degrees:
    tp: int
    pp: int
    ep: int

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """Of one rank."""
        name = f"mp_rank_{tp:02d}"
        if self.pp > 1:
            name += f"_{pp:03d}"
        if self.ep > 1:
            name += f"_{ep:03d}"
        return name


@dataclass(frozen=True)
class _RankState:
    """What one rank's file says."""

    tp: int
    ep: int
    file: str
    args: Mapping[str, Any]
    chunks: dict[int, dict[str, StoredTensor]]
    """By the number of the virtual stage."""


def open_legacy(files: RankFiles, iteration: int | None) -> OpenedCheckpoint:
    """A folder of mp_rank folders. CheckpointError: all that is wrong with it."""
    folders = sorted(name for name in os.listdir(files.path) if RANK_FOLDER.fullmatch(name))
    if not folders:
        raise CheckpointError(
            f"{files.path} has neither mp_rank folders nor .metadata; name a checkpoint of Megatron-LM's"
        )
    first = f"{folders[0]}/{_FILE}"
    state = _state(files, first)
    args = _args(files, first, state)
    degrees = _degrees(files, args)
    _check_folders(files, folders, degrees)
    found = state.get("iteration")
    if iteration is not None and type(found) is int and found != iteration:
        raise CheckpointError(f"{files.path / first} is of iteration {found}, its folder of iteration {iteration}")
    left_out: Counter[str] = Counter()
    assembling = _Assembling(files, degrees, is_gated=bool(args.get("swiglu")))
    for pp in range(degrees.pp):
        ranks = []
        for ep in range(degrees.ep):
            for tp in range(degrees.tp):
                file = f"{degrees.folder(tp, pp, ep)}/{_FILE}"
                ranks.append(_rank(files, file, (tp, ep), args, found, left_out))
        assembling.add_stage(pp, ranks)
    tensors = assembling.finish()
    return OpenedCheckpoint(found if type(found) is int else 0, args, tensors, left_out, "legacy")


def _state(files: RankFiles, file: str) -> dict[Any, Any]:
    state = entries_of(read_torch_file(files, file).value)
    if state is None:
        raise CheckpointError(f"{files.path / file} holds no dict")
    return state


def _args(files: RankFiles, file: str, state: Mapping[Any, Any]) -> dict[str, Any]:
    args = args_of(state.get("args"))
    if args is None:
        raise CheckpointError(f"{files.path / file} keeps no args, so how its ranks divide the model is not known")
    return args


def _degrees(files: RankFiles, args: Mapping[str, Any]) -> _Degrees:
    found = []
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        value = args.get(name, 1)
        if name.startswith("expert") and not args.get("num_experts"):
            value = 1
        if type(value) is not int or not 1 <= value <= _MOST_RANKS:
            raise CheckpointError(f"{files.path}: args.{name}={show(str(value))} must be a whole number of at least 1")
        found.append(value)
    degrees = _Degrees(*found)
    expert_tp = args.get("expert_tensor_parallel_size")
    if args.get("num_experts") and expert_tp not in (None, degrees.tp):
        raise CheckpointError(
            f"{files.path}: args.expert_tensor_parallel_size={show(str(expert_tp))} differs from "
            f"tensor_model_parallel_size={degrees.tp}; save it with --ckpt-format torch_dist, which says where they lie"
        )
    if degrees.tp * degrees.pp * degrees.ep > _MOST_RANKS:
        raise CheckpointError(f"{files.path}: its args say more than {_MOST_RANKS:,} ranks")
    return degrees


def _check_folders(files: RankFiles, folders: list[str], degrees: _Degrees) -> None:
    """CheckpointError: ranks that are missing, or that the args don't say."""
    expected = []
    for ep in range(degrees.ep):
        for pp in range(degrees.pp):
            expected += [degrees.folder(tp, pp, ep) for tp in range(degrees.tp)]
    said = f"args say tp={degrees.tp}, pp={degrees.pp}, ep={degrees.ep}"
    problems = [f"{files.path / name} is missing, where {said}" for name in expected if name not in folders]
    problems += [f"{files.path / name} is of no rank, where {said}" for name in folders if name not in expected]
    if problems:
        raise CheckpointError(first_of(problems))


def _rank(
    files: RankFiles,
    file: str,
    place: tuple[int, int],
    args: Mapping[str, Any],
    iteration: Any,
    left_out: Counter[str],
) -> _RankState:
    """One rank's file. CheckpointError: it is of another training or iteration than the first."""
    where = f"{files.path / file}"
    source = read_torch_file(files, file)
    state = entries_of(source.value)
    if state is None:
        raise CheckpointError(f"{where} holds no dict")
    mine = _args(files, file, state)
    for name in _AGREED:
        one, other = (_plain(found.get(name)) for found in (mine, args))
        if one != other:
            raise CheckpointError(
                f"{where}: args.{name}={show(one)}, the first rank has {show(other)}: ranks of two trainings"
            )
    if _plain(state.get("iteration")) != _plain(iteration):
        raise CheckpointError(
            f"{where} is of iteration {_plain(state.get('iteration'))}, the first rank of {iteration}"
        )
    chunks: dict[int, dict[str, StoredTensor]] = {}
    for key, value in state.items():
        match = _MODEL.fullmatch(key) if type(key) is str else None
        if match is None:
            continue
        weights = entries_of(value)
        if weights is None:
            raise CheckpointError(f"{where}: {key} is no dict of tensors")
        if "language_model" in weights:
            raise CheckpointError(
                f"{where} is of Megatron's old models, without Megatron Core; convert it with Megatron-LM's "
                "tools/checkpoint/convert.py --saver core"
            )
        chunks[int(match[1] or 0)] = _weights(source, weights, where, left_out)
    if sorted(chunks) != list(range(len(chunks))) or not chunks:
        raise CheckpointError(
            f"{where}: its model stands under {sorted(chunks)}, expected model, or model0, model1, ..."
        )
    return _RankState(*place, file, mine, chunks)


def _plain(value: Any) -> str:
    """A value of args that can be compared and shown."""
    return f"{value}" if isinstance(value, str | int | float | bool | None) else type(value).__name__


def _weights(source: Any, weights: Mapping[Any, Any], where: str, left_out: Counter[str]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    problems = []
    for name, value in weights.items():
        if type(name) is not str:
            raise CheckpointError(f"{where}: a tensor without a name")
        because = why_ignored(name)
        if because is not None:
            left_out[because] += 1
            continue
        if not is_tensor(value):
            problems.append(f"{where}: {show(name)} is no tensor")
            continue
        plain = plain_name(name)
        if plain in found:
            problems.append(f"{where}: {show(plain)} is there twice, once fused with the product behind it")
        found[plain] = stored_tensor(source, value, name)
    if problems:
        raise CheckpointError(first_of(problems))
    return found


class _Assembling:
    """Tensors of the whole model while stages are added to it."""

    def __init__(self, files: RankFiles, degrees: _Degrees, *, is_gated: bool):
        self._files = files
        self._degrees = degrees
        self._is_gated = is_gated
        # stage and virtual stage -> tensors with the layers' numbers in it
        self._chunks: dict[tuple[int, int], dict[str, WholeTensor]] = {}
        self._copies: list[tuple[str, WholeTensor, WholeTensor]] = []

    def add_stage(self, pp: int, ranks: list[_RankState]) -> None:
        """The files of one stage, of each tp and ep rank."""
        numbers = {tuple(rank.chunks) for rank in ranks}
        if len(numbers) != 1:
            raise CheckpointError(
                f"{self._files.path}: ranks of stage {pp} have {len(numbers)} kinds of virtual stages"
            )
        for chunk in ranks[0].chunks:
            self._chunks[chunk, pp] = self._stage_tensors(ranks, chunk)

    def _stage_tensors(self, ranks: list[_RankState], chunk: int) -> dict[str, WholeTensor]:
        by_ep: list[dict[str, WholeTensor]] = []
        for ep in range(self._degrees.ep):
            group = [rank for rank in ranks if rank.ep == ep]
            names = list(group[0].chunks[chunk])
            for rank in group[1:]:
                other = rank.chunks[chunk]
                if other.keys() != set(names):
                    [*differing] = sorted(other.keys() ^ set(names))
                    raise CheckpointError(
                        f"{self._files.path / rank.file}: {show(differing[0])} is not in every tp rank's file"
                    )
            by_ep.append({name: self._joined(name, [rank.chunks[chunk][name] for rank in group]) for name in names})
        return self._with_experts(by_ep)

    def _joined(self, name: str, parts: list[StoredTensor]) -> WholeTensor:
        """The parts of tp ranks as one tensor."""
        one = parts[0]
        where = f"{self._files.path / one.file}: {show(name)}"
        if len({(part.shape, part.dtype) for part in parts}) != 1 or len(one.shape) not in (1, 2):
            raise CheckpointError(f"{where} has shape {list(one.shape)}, and another one or format in other tp ranks")
        rows = one.shape[0]
        if _BY_COLUMNS.fullmatch(name) and len(one.shape) == 2:
            whole = WholeTensor((rows, one.shape[1] * len(parts)), one.dtype)
            for number, part in enumerate(parts):
                whole.patches.append(_whole_patch(part, row=0, column=number * one.shape[1]))
            return whole
        if _BY_ROWS.fullmatch(name):
            whole = WholeTensor((rows * len(parts), *one.shape[1:]), one.dtype)
            gated = self._is_gated and _GATED.fullmatch(name) is not None
            for number, part in enumerate(parts):
                whole.patches += _row_patches(part, number, len(parts), is_gated=gated)
            return whole
        whole = WholeTensor(one.shape, one.dtype, [_whole_patch(one, row=0, column=0)])
        for part in parts[1:]:
            self._copies.append(
                (where, whole, WholeTensor(part.shape, part.dtype, [_whole_patch(part, row=0, column=0)]))
            )
        return whole

    def _with_experts(self, by_ep: list[dict[str, WholeTensor]]) -> dict[str, WholeTensor]:
        """Of all expert-parallel ranks: each has experts of its own, and the rest as the others have it."""
        found: dict[str, WholeTensor] = {}
        counts = [_n_experts(tensors) for tensors in by_ep]
        if len(set(counts)) != 1:
            raise CheckpointError(f"{self._files.path}: expert-parallel ranks have {counts} experts")
        for ep, tensors in enumerate(by_ep):
            for name, tensor in tensors.items():
                expert = _expert_of(name)
                if expert is not None:
                    layer, number, rest = expert
                    found[f"{layer}mlp.experts.{ep * counts[0] + number}.{rest}"] = tensor
                elif ep == 0:
                    found[name] = tensor
                else:
                    self._compare(name, found.get(name), tensor)
        return found

    def _compare(self, name: str, one: WholeTensor | None, other: WholeTensor) -> None:
        where = f"{self._files.path}: {show(name)}"
        if one is None or one.shape != other.shape or one.dtype != other.dtype:
            raise CheckpointError(
                f"{where} has another shape or format in another expert-parallel rank, or is not there"
            )
        self._copies.append((where, one, other))

    def finish(self) -> dict[str, WholeTensor]:
        """Layers with their numbers in the model: virtual stages one after the other, each through all stages."""
        for where, one, other in self._copies:
            if not equal_everywhere(self._files, one, other):
                raise CheckpointError(f"{where} holds other numbers in another rank, where all have the same")
        found: dict[str, WholeTensor] = {}
        first = 0
        for key in sorted(self._chunks):
            numbers = set()
            for name, tensor in self._chunks[key].items():
                layer = _LAYER.fullmatch(name)
                whole_name = name
                if layer is not None:
                    number = int(layer[1][:9])
                    numbers.add(number)
                    whole_name = f"decoder.layers.{first + number}.{layer[2]}"
                self._put(found, whole_name, tensor)
            if numbers != set(range(len(numbers))):
                raise CheckpointError(f"{self._files.path}: a stage's layers are numbered {sorted(numbers)[:20]}")
            first += len(numbers)
        return found

    def _put(self, found: dict[str, WholeTensor], name: str, tensor: WholeTensor) -> None:
        if name in found:
            raise CheckpointError(f"{self._files.path}: {show(name)} is in two stages")
        found[name] = tensor


def _whole_patch(stored: StoredTensor, *, row: int, column: int) -> Patch:
    return patch_of(stored, (0,) * len(stored.shape), stored.shape, row=row, column=column)


def _row_patches(stored: StoredTensor, number: int, count: int, *, is_gated: bool) -> list[Patch]:
    """Of rank `number` of `count`: its rows, or those of the gate and those of the other part apart."""
    rows, *columns = stored.shape
    if not is_gated or rows % 2:
        return [_whole_patch(stored, row=number * rows, column=0)]
    half = rows // 2
    patches = []
    for part in range(2):
        at = (part * half, *(0 for _ in columns))
        row = (part * count + number) * half
        patches.append(patch_of(stored, at, (half, *columns), row=row, column=0))
    return patches


def _expert_of(name: str) -> tuple[str, int, str] | None:
    """The layer's prefix, the expert's number in its rank, and what of it; None: it is of no routed expert."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    prefix = f"decoder.layers.{layer[1]}."
    one = _LOCAL_EXPERT.fullmatch(layer[2])
    if one is not None:
        return prefix, int(one[1][:9]), one[2]
    grouped = _GROUPED_EXPERT.fullmatch(layer[2])
    if grouped is not None:
        return prefix, int(grouped[3][:9]), f"{grouped[1]}.{grouped[2]}"
    return None


def _n_experts(tensors: Mapping[str, WholeTensor]) -> int:
    """Experts of a layer in one rank."""
    numbers = set()
    for name in tensors:
        expert = _expert_of(name)
        if expert is not None:
            numbers.add(expert[1])
    return max(numbers, default=-1) + 1
