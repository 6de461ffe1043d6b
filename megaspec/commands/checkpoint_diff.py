"""`megaspec checkpoint diff A B`: in which numbers two checkpoints differ."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from megaspec.commands.checkpoint_inspect import chosen
from megaspec.commands.paragraphs import Paragraphs
from megaspec.core.errors import printable
from megaspec.core.terminal import escape, terminal

if TYPE_CHECKING:
    from megaspec.checkpoint.contents import Difference
    from megaspec.checkpoint.reader import Reader

_DESCRIPTION = """Compare the tensors of two checkpoints, whatever layouts saved them: names, shapes and numbers.

Weights alone; with patterns such as 'optim/*' or '*' what they name. Differences are an answer, not a failure. What two
runs were told to do differently is for megaspec diff."""
_WEIGHTS = "model/*"


def add_parser(commands: Any) -> None:
    """The parser of `checkpoint diff`."""
    text = "in which numbers two checkpoints differ"
    command = commands.add_parser("diff", help=text, description=_DESCRIPTION, formatter_class=Paragraphs)
    command.add_argument("a", metavar="A", type=Path, help="folder of a run, or of one checkpoint")
    command.add_argument("b", metavar="B", type=Path, help="another one")
    command.add_argument("patterns", nargs="*", metavar="PATTERN", default=[], help=f"tensors (default: {_WEIGHTS})")
    command.add_argument("--step", type=int, metavar="N", help="step of both (of each the newest whole one)")
    command.add_argument("--all", action="store_true", help="list the tensors that are equal, too")
    command.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Compare and print. -> 0. CheckpointError: one is not there or damaged, or a pattern names no tensor of either."""
    from megaspec.checkpoint.contents import difference, open_checkpoint

    with open_checkpoint(args.a, args.step) as a, open_checkpoint(args.b, args.step) as b:
        names = chosen(sorted({*a.names(), *b.names()}), args.patterns or [_WEIGHTS])
        unlike = {name: _unlike(a, b, name) for name in names}
        found = {name: difference(a, b, name) for name in names if not unlike[name]}
        if args.json:
            print(json.dumps(_as_json(a, b, unlike, found), indent=1))
        else:
            _print(a, b, unlike, found, is_whole=args.all)
    return 0


def _unlike(a: "Reader", b: "Reader", name: str) -> str:
    """Why the numbers of two tensors can't be compared; "" where they can."""
    if name not in b:
        return "only in A"
    if name not in a:
        return "only in B"
    if a.shape(name) != b.shape(name):
        return f"{_shape(a, name)} in A, {_shape(b, name)} in B"
    return ""


def _shape(reader: "Reader", name: str) -> str:
    return " x ".join(map(str, reader.shape(name)))


def _print(a: "Reader", b: "Reader", unlike: dict[str, str], found: "dict[str, Difference]", *, is_whole: bool) -> None:
    print(printable(f"A  {a.path}"))
    print(printable(f"B  {b.path}"))
    for key in sorted({*a.state, *b.state}):
        if a.state.get(key) != b.state.get(key):
            print(printable(f"{key}: {json.dumps(a.state.get(key))} in A, {json.dumps(b.state.get(key))} in B"))
    table = Table(Column("tensor", overflow="fold"), box=None, pad_edge=False)
    for heading in ("elements", "differ", "greatest", "relative"):
        table.add_column(heading, justify="right")
    for name, why in unlike.items():
        if why:
            print(printable(f"{name}: {why}"))
        elif found[name].differing or is_whole:
            one = found[name]
            cells = (f"{one.elements:,}", f"{one.differing:,}", f"{one.greatest:.3e}", f"{one.relative:.3e}")
            table.add_row(escape(name), *cells)
    if table.row_count:
        terminal().print(table)
    equal = sum(not one.differing for one in found.values())
    formats = sum(a.dtype(name) != b.dtype(name) for name in found)
    text = f"{equal} of {len(unlike)} tensors are equal"
    if formats:
        text += f"; {formats} are stored in another format"
    print(printable(text))


def _as_json(a: "Reader", b: "Reader", unlike: dict[str, str], found: "dict[str, Difference]") -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name, why in unlike.items():
        if why:
            tensors[name] = {"unlike": why}
            continue
        tensors[name] = asdict(found[name])
        for key in ("greatest", "relative"):
            # JSON has no infinity
            if math.isinf(tensors[name][key]):
                tensors[name][key] = None
    return {"a": str(a.path), "b": str(b.path), "tensors": tensors}
