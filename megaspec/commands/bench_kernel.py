"""`megaspec bench kernel`: every implementation of an operation, held to fp64 and then timed."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megaspec.commands.paragraphs import Paragraphs
from megaspec.core.errors import MegaspecError, Problem, RecipeError, printable
from megaspec.core.problems import did_you_mean
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.target import Target, detect_target
from megaspec.estimate.throughput import MeasuredThroughput, throughput_of
from megaspec_kernels.catalog import CATALOG

if TYPE_CHECKING:
    from megaspec_kernels.bench import Row

_DESCRIPTION = """Hold every implementation of an operation to the gate: its error from an fp64 truth against that of
plain PyTorch, for the output and every gradient. Then time it on shapes of a large model and compare
it with what the machine was measured to reach (megaspec bench throughput). What does not pass the gate
gets no figure, and the command exits with 70. What can't run on this machine says what it needs; was it asked for by
its name, the command exits with 64. On a CPU shapes are small."""

# A large product in the middle of the measured table, which others are compared with.
_PRODUCT = (8192, 8192, 4096)
_NAME_WIDTH = 1 + max(len(name) for one in CATALOG.values() for name in one.implementations)


def add_parser(commands: Any) -> None:
    """Register `bench kernel`."""
    kernel = commands.add_parser(
        "kernel",
        help="correctness and speed of the kernels",
        description=_DESCRIPTION,
        formatter_class=Paragraphs,
    )
    kernel.add_argument(
        "operations",
        nargs="*",
        metavar="OP[=NAME]",
        help=f"of {', '.join(CATALOG)}, all implementations or one (default: all)",
    )
    kernel.add_argument("--json", action="store_true", help="a JSON line for each row in place of the table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 70 where an implementation does not pass the gate, 64 where one that is named can't run here.
    RecipeError: there is no such operation."""
    asked = _asked(args.operations)
    target = detect_target()
    throughput = _throughput(target)

    import torch  # only where it is needed

    from megaspec_kernels.bench import measure
    from megaspec_kernels.benches import BENCHES

    device = torch.device(target.device)
    not_passed = []
    cannot_run = []
    if not args.json:
        print(printable(_where(target, throughput)))
    for name, only in asked.items():
        rows = measure(name, BENCHES[name], device=device, sm=target.sm, packages=target.versions, only=only)
        for row in rows:
            line = as_json(row, target, throughput) if args.json else as_text(row, throughput)
            # each as it comes: the next one takes a while
            print(printable(line), flush=True)
            word = f"{row.operation}={row.implementation}"
            if row.is_red:
                not_passed.append(f"{word} ({row.name})")
            if row.cannot_run and word in args.operations:
                cannot_run.append(f"{word} {row.why}")
    if cannot_run:
        print(printable(f"megaspec: can't run here: {'; '.join(cannot_run)}"), file=sys.stderr)
    if not_passed:
        print(printable(f"megaspec: the gate does not pass: {'; '.join(not_passed)}"), file=sys.stderr)
        return MegaspecError.exit_code
    if cannot_run:
        return RecipeError.exit_code
    return 0


def _asked(words: list[str]) -> dict[str, tuple[str, ...]]:
    """Implementations to measure by operation; RecipeError: there is none of such a name."""
    if not words:
        return {name: tuple(one.implementations) for name, one in CATALOG.items()}
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        operation, equals, name = word.partition("=")
        if operation not in CATALOG:
            way_out = did_you_mean(operation, CATALOG) or f"there are {', '.join(CATALOG)}"
            raise RecipeError([Problem("", f"bench kernel {operation}: no such operation; {way_out}")])
        offered = CATALOG[operation].implementations
        if equals and name not in offered:
            way_out = did_you_mean(name, offered) or f"there are {', '.join(offered)}"
            raise RecipeError([Problem("", f"bench kernel {word}: no such implementation; {way_out}")])
        found[operation] = found.get(operation, ()) + ((name,) if equals else tuple(offered))
    return found


def _throughput(target: Target) -> MeasuredThroughput | None:
    """What this machine was measured to reach; None: it has no GPU, or one that the table does not know."""
    if target.device != "cuda":
        return None
    hardware = hardware_of(target)
    if hardware is None:
        return None
    return throughput_of(hardware)


def _where(target: Target, throughput: MeasuredThroughput | None) -> str:
    """The line above the table."""
    machine = f"a CPU with {target.cores} cores"
    if target.device == "cuda":
        machine = target.gpu
    text = f"on {machine}, torch {target.versions.get('torch')}"
    if throughput is not None:
        text += f"; shares are of {throughput.source}"
    return text


def as_text(row: "Row", throughput: MeasuredThroughput | None) -> str:
    """A row for people: `unpermute triton  16384 x 8 x 2048  0.12 of the gate  0.31 ms  1,912 GB/s, 55 %`."""
    head = f"{row.operation:16}{row.implementation:{_NAME_WIDTH}}"
    if row.cannot_run:
        return f"{head}can't run here: {row.why}"
    if row.seconds is None:
        return f"{head}{row.error:.2f} of the gate in {row.name}: {row.why}"
    reached = f"{rate(row):>15}"
    share = share_of(row, throughput)
    if share is not None:
        reached += f" {100 * share:4.0f} %"
    if row.copy_seconds is not None:
        reached += f" {100 * row.copy_seconds / row.seconds:4.0f} % of a copy"
    return f"{head}{row.name:52}{row.error:5.2f} of the gate {_time(row.seconds):>10}{reached}"


def as_json(row: "Row", target: Target, throughput: MeasuredThroughput | None) -> str:
    """A row as one line of JSON, with where it was measured."""
    machine = {"gpu": target.gpu, "torch": target.versions.get("torch")}
    return json.dumps(asdict(row) | {"share": share_of(row, throughput)} | machine)


def rate(row: "Row") -> str:
    """What was reached, with its unit: `9.1 GB/s`, `1,912 GB/s`, `9.31 TFLOP/s`, `412 TFLOP/s`."""
    per_second = row.amount / row.seconds
    if row.unit == "bytes":
        digits = 1 if per_second < 1e10 else 0
        return f"{per_second / 1e9:,.{digits}f} GB/s"
    digits = 2 if per_second < 1e13 else 0
    return f"{per_second / 1e12:,.{digits}f} TFLOP/s"


def share_of(row: "Row", throughput: MeasuredThroughput | None) -> float | None:
    """What was reached as a share of the measured throughput: of element-wise work on as many bytes, or of a large
    product in bf16. None: the machine was not measured, or nothing was timed."""
    if throughput is None or row.seconds is None:
        return None
    if row.unit == "bytes":
        return throughput.memory_seconds(row.amount) / row.seconds
    m, n, k = _PRODUCT
    fastest = 2 * m * n * k / throughput.matmul_seconds(m, n, k, precision="bf16", kind="forward")
    return row.amount / row.seconds / fastest


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3f} ms"
    return f"{seconds:.2f} s"
