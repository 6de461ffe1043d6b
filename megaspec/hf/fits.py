"""Whether the tensors of a folder are those of a model, as far as its headers say, and how each lies there.
Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.core.divisors import ceil_div
from megaspec.hf.folder import CONFIG, HfFolder, TheirEntry
from megaspec.hf.names import WeightTable
from megaspec.hf.quantization import (
    FP8_SCALES,
    MXFP4_BLOCKS,
    MXFP4_BYTES,
    MXFP4_NUMBERS,
    MXFP4_SCALES,
    SUFFIXES,
    Quantization,
    quantization_of,
)

_FP8 = "F8_E4M3"
_SCALE_DTYPES = ("F32", "BF16", "F16")
DEQUANTISED = "BF16"
"""What quantised numbers times their scales are rounded to."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a family's, as it lies in a folder: numbers, and scales where it is quantised."""

    shape: tuple[int, ...]
    """Of the tensor itself."""
    numbers: TheirEntry
    form: Literal["plain", "fp8", "mxfp4"] = "plain"
    scales: TheirEntry | None = None
    block: tuple[int, int] = (1, 1)
    """Rows and columns, as stored, that share a scale."""

    @property
    def dtype(self) -> str:
        """Of what is read of it."""
        return self.numbers.dtype if self.form == "plain" else DEQUANTISED

    @property
    def entries(self) -> list[TheirEntry]:
        """All that the folder keeps of it."""
        return [self.numbers] if self.scales is None else [self.numbers, self.scales]


@dataclass
class Fit:
    """A folder's tensors by the family's names, and what is wrong with them."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    """Those that fit, copies too."""
    problems: list[str] = field(default_factory=list)
    """Every tensor that is missing, left over, of another shape or of a format that holds no weights."""


def fit_of(folder: HfFolder, table: WeightTable) -> Fit:
    """CheckpointError: config.json says what can't be read of how they are quantised."""
    quantization = quantization_of(folder.config, f"{folder.path / CONFIG}")
    entries = _entries_of(folder, table)
    found = Fit()
    used = set()
    expected = {name: theirs.shape for name, theirs in table.theirs.items()}
    for copy, name in table.copies.items():
        if copy in entries:
            expected[copy] = expected[name]
    for name, shape in expected.items():
        keeps = _names_of(name, quantization, entries)
        used.update(keeps)
        problem = _problem(name, shape, keeps, quantization, entries)
        if problem is None:
            found.tensors[name] = _stored(shape, keeps, quantization, entries)
        else:
            found.problems.append(problem)
    for name in entries:
        if name not in used and not table.is_ignored(name):
            found.problems.append(f"{name} is left over: the configuration has no such parameter")
    return found


def _entries_of(folder: HfFolder, table: WeightTable) -> dict[str, TheirEntry]:
    """What a folder keeps by the family's names.

    A model that was saved without its head lacks the first word of every name: GPT-2 on the hub has `h.0.ln_1.weight`
    for `transformer.h.0.ln_1.weight`. Either all names have that word, or none has.
    """
    # the embedding, which comes first, is a part of what is saved without its head
    prefix = next(iter(table.theirs)).partition(".")[0] + "."
    if any(name.startswith(prefix) for name in folder.tensors):
        return folder.tensors
    entries = {}
    for name, entry in folder.tensors.items():
        full = prefix + name
        bare = full
        for suffix in SUFFIXES:
            bare = bare.removesuffix(suffix)
        is_known = bare in table.theirs or full in table.copies or table.is_ignored(full)
        entries[full if is_known else name] = entry
    return entries


def _names_of(name: str, quantization: Quantization | None, entries: Mapping[str, TheirEntry]) -> tuple[str, ...]:
    """Under which names a folder keeps a tensor: itself, or numbers and scales."""
    if quantization is None:
        return (name,)
    if quantization.method == "mxfp4":
        packed = (name + MXFP4_BLOCKS, name + MXFP4_SCALES)
        return packed if any(one in entries for one in packed) else (name,)
    scales = name + FP8_SCALES
    is_quantised = scales in entries or (name in entries and entries[name].dtype == _FP8)
    return (name, scales) if is_quantised else (name,)


def _problem(
    name: str,
    shape: tuple[int, ...],
    keeps: tuple[str, ...],
    quantization: Quantization | None,
    entries: Mapping[str, TheirEntry],
) -> str | None:
    """What is wrong with a tensor of this shape, of which the folder should keep these; None: nothing."""
    if len(keeps) == 1:
        return _plain_problem(name, shape, entries.get(name), quantization)
    for one in keeps:
        if one not in entries:
            other = keeps[1 - keeps.index(one)]
            return f"{one} is missing: {other} is quantised, by {quantization.method}"
    numbers, scales = (entries[one] for one in keeps)
    if quantization.method == "fp8":
        return _fp8_problem(name, shape, numbers, scales, quantization)
    return _mxfp4_problem(name, shape, numbers, scales)


def _plain_problem(
    name: str, shape: tuple[int, ...], entry: TheirEntry | None, quantization: Quantization | None
) -> str | None:
    if entry is None:
        return f"{name} is missing: this model's configuration needs it, of shape {list(shape)}"
    if entry.shape != shape:
        return f"{name} has shape {list(entry.shape)}, the configuration makes it {list(shape)}"
    if not entry.dtype.startswith(("F", "BF")):
        return f"{name} has dtype {entry.dtype}, weights are floating-point numbers"
    if DTYPE_BYTES[entry.dtype] == 1:
        why = "quantised weights are not read where config.json has no quantization_config that says how"
        if quantization is not None:
            why = f"quant_method={quantization.method} has no such numbers"
        return f"{name} has dtype {entry.dtype}: {why}; save them in bfloat16"
    return None


def _fp8_problem(
    name: str, shape: tuple[int, ...], numbers: TheirEntry, scales: TheirEntry, quantization: Quantization
) -> str | None:
    if numbers.dtype != _FP8:
        return f"{name} has dtype {numbers.dtype} and scales, where quant_method=fp8 has {_FP8}"
    if numbers.shape != shape:
        return f"{name} has shape {list(numbers.shape)}, the configuration makes it {list(shape)}"
    if len(shape) != 2:
        return f"{name} has dtype {_FP8} and shape {list(shape)}: only matrices have blocks of rows and columns"
    if scales.dtype not in _SCALE_DTYPES:
        return f"{name}{FP8_SCALES} has dtype {scales.dtype}, expected {', '.join(_SCALE_DTYPES)}"
    blocks = tuple(ceil_div(size, of) for size, of in zip(shape, quantization.block, strict=True))
    if scales.shape != blocks:
        rows, columns = quantization.block
        of = f"one for each block of {rows} x {columns} of {list(shape)}"
        return f"{name}{FP8_SCALES} has shape {list(scales.shape)}, expected {list(blocks)}, {of}"
    return None


def _mxfp4_problem(name: str, shape: tuple[int, ...], numbers: TheirEntry, scales: TheirEntry) -> str | None:
    for suffix, entry in ((MXFP4_BLOCKS, numbers), (MXFP4_SCALES, scales)):
        if entry.dtype != "U8":
            return f"{name}{suffix} has dtype {entry.dtype}, where quant_method=mxfp4 has U8"
    if len(shape) != 3 or shape[1] % MXFP4_NUMBERS:
        of = f"experts with a multiple of {MXFP4_NUMBERS} inputs"
        return f"{name}{MXFP4_BLOCKS}: the configuration makes it {list(shape)}, quant_method=mxfp4 holds {of}"
    # experts and outputs, and the inputs in groups
    experts, inputs, outputs = shape
    groups = (experts, outputs, inputs // MXFP4_NUMBERS)
    expected = {MXFP4_BLOCKS: (*groups, MXFP4_BYTES), MXFP4_SCALES: groups}
    for suffix, entry in ((MXFP4_BLOCKS, numbers), (MXFP4_SCALES, scales)):
        if entry.shape != expected[suffix]:
            of = f"the configuration makes it {list(expected[suffix])}"
            return f"{name}{suffix} has shape {list(entry.shape)}, {of}"
    return None


def _stored(
    shape: tuple[int, ...],
    keeps: tuple[str, ...],
    quantization: Quantization | None,
    entries: Mapping[str, TheirEntry],
) -> Stored:
    if len(keeps) == 1:
        return Stored(shape, entries[keeps[0]])
    numbers, scales = (entries[one] for one in keeps)
    return Stored(shape, numbers, quantization.method, scales, quantization.block)
