"""`megaspec bench ...`: what this machine measures."""

import argparse
from types import ModuleType
from typing import Any

from megaspec.commands import bench_kernel, bench_step, bench_throughput

COMMANDS: dict[str, ModuleType] = {
    "throughput": bench_throughput,
    "kernel": bench_kernel,
    "step": bench_step,
}


def add_parser(commands: Any) -> None:
    """Register `bench` with its sub-commands."""
    bench = commands.add_parser("bench", help="measure what this machine and the kernels reach")
    below = bench.add_subparsers(dest="bench_command", required=True, metavar=" | ".join(COMMANDS))
    for module in COMMANDS.values():
        module.add_parser(below)


def run(args: argparse.Namespace) -> int:
    """The sub-command."""
    return COMMANDS[args.bench_command].run(args)
