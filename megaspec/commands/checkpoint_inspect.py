"""`megaspec checkpoint inspect RUN [PATTERN ...]`: what a checkpoint holds."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.table import Column, Table

from megaspec.commands.paragraphs import Paragraphs
from megaspec.core.axes import DENSE_AXES
from megaspec.core.errors import CheckpointError
from megaspec.core.terminal import escape, terminal
from megaspec.core.units import bytes_in_words
from megaspec.spec import TakenWeights

if TYPE_CHECKING:
    from megaspec.checkpoint.contents import Statistics
    from megaspec.checkpoint.format import Manifest
    from megaspec.checkpoint.reader import Reader

_DESCRIPTION = """Show what a checkpoint holds: where it stands, by which layout it was saved, and its parts.

With patterns such as 'model/layers.0.*' also each tensor that one of them names, with --statistics its numbers."""

# Of a SHA-256, to tell checkpoints apart.
_DIGITS = 12


def add_parser(commands: Any) -> None:
    """The parser of `checkpoint inspect`."""
    command = commands.add_parser(
        "inspect", help="show what a checkpoint holds", description=_DESCRIPTION, formatter_class=Paragraphs
    )
    command.add_argument("place", metavar="RUN", type=Path, help="folder of a run, or of one checkpoint")
    command.add_argument("patterns", nargs="*", metavar="PATTERN", default=[], help="names of tensors; * is any text")
    command.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (the newest whole one)")
    command.add_argument("--statistics", action="store_true", help="read the tensors: min, max, rms, zeros, NaN or inf")
    command.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print it. -> 0. CheckpointError: there is none, it is damaged, or a pattern names no tensor."""
    from megaspec.checkpoint.contents import open_checkpoint, statistics

    patterns = args.patterns
    if args.statistics and not patterns:
        patterns = ["*"]
    with open_checkpoint(args.place, args.step) as reader:
        names = chosen(reader.names(), patterns)
        found = {}
        if args.statistics:
            found = {name: statistics(reader, name) for name in names}
        if args.json:
            print(json.dumps(_as_json(reader, names, found), indent=1))
            return 0
        _print_parts(reader)
        if names:
            _print_tensors(reader, names, found)
    return 0


def chosen(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that a pattern matches. CheckpointError: one matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CheckpointError(f"{pattern}: names no tensor; they are named as {', '.join(names[:3])} are")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def layout_in_words(manifest: "Manifest") -> str:
    """`tp 2, dp_shard 4`, of the Spec that was saved with it; "" where that has none."""
    parallelism = manifest.spec.get("parallelism")
    if not isinstance(parallelism, dict):
        return ""
    degrees = [f"{axis} {parallelism[axis]}" for axis in DENSE_AXES if parallelism.get(axis, 1) != 1]
    return ", ".join(degrees) or "one rank"


def _taken_in_words(manifest: "Manifest") -> list[str]:
    """The checkpoints whose weights, or whose mean, a run of weights alone holds, each with the beginning of its
    manifest's SHA-256."""
    taken = manifest.spec.get("taken_from") or []
    try:
        checkpoints = [TakenWeights.model_validate(one) for one in taken]
    except (ValidationError, TypeError):
        return ["what its Spec does not say in words of this version"]
    found = []
    for one in checkpoints:
        text = f"step {one.step} of {one.path} ({one.digest[:_DIGITS]})"
        if len(checkpoints) > 1:
            text = f"{one.weight:g} of {text}"
        found.append(text)
    return found


def _print_parts(reader: "Reader") -> None:
    from megaspec.checkpoint.contents import sections

    manifest = reader.manifest
    out = terminal()
    head = Table.grid(padding=(0, 2))
    head.add_row("checkpoint", escape(str(reader.path)))
    layout = layout_in_words(manifest)
    for taken in _taken_in_words(manifest):
        head.add_row("weights of", escape(taken))
        # the layout in its Spec is not what saved it
        layout = ""
    if layout:
        head.add_row("saved by", escape(layout))
    for name, value in manifest.state.items():
        head.add_row(escape(name), escape(_in_words(value)))
    head.add_row("files", f"{len(manifest.files)}, {bytes_in_words(manifest.bytes)}")
    out.print(head)
    parts = Table("part", box=None, pad_edge=False)
    for heading in ("tensors", "elements", "size"):
        parts.add_column(heading, justify="right")
    parts.add_column("formats")
    for one in sections(manifest):
        formats = ", ".join(one.dtypes)
        parts.add_row(escape(one.name), str(one.tensors), f"{one.elements:,}", bytes_in_words(one.bytes), formats)
    out.print()
    out.print(parts)


def _print_tensors(reader: "Reader", names: Sequence[str], found: "dict[str, Statistics]") -> None:
    table = Table(Column("tensor", overflow="fold"), "shape", "format", box=None, pad_edge=False)
    if found:
        for heading in ("min", "max", "rms", "zeros", "NaN"):
            table.add_column(heading, justify="right")
    for name in names:
        stored = reader.manifest.tensors[name]
        cells = [escape(name), " x ".join(map(str, stored.shape)), stored.dtype]
        if name in found:
            one = found[name]
            cells += [f"{one.min:.4g}", f"{one.max:.4g}", f"{one.rms:.4g}"]
            cells += [f"{one.zeros:,}", f"{one.non_finite:,}"]
        table.add_row(*cells)
    out = terminal()
    out.print()
    out.print(table)


def _in_words(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value)


def _as_json(reader: "Reader", names: Sequence[str], found: "dict[str, Statistics]") -> dict[str, Any]:
    from megaspec.checkpoint.contents import sections

    manifest = reader.manifest
    tensors = {}
    for name in names:
        stored = manifest.tensors[name]
        tensors[name] = {"shape": list(stored.shape), "dtype": stored.dtype}
        if name in found:
            # JSON has no NaN: a tensor without finite numbers has none of these
            numbers = asdict(found[name]).items()
            tensors[name] |= {key: number for key, number in numbers if number == number}
    return {
        "path": str(reader.path),
        "step": manifest.step,
        "layout": layout_in_words(manifest),
        "state": manifest.state,
        "bytes": manifest.bytes,
        "parts": [asdict(one) for one in sections(manifest)],
        "tensors": tensors,
    }
