"""`megaspec doctor`: whether this machine, and the links of several, are fit to train; each finding says what to do."""

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaspec.commands.paragraphs import Paragraphs
from megaspec.core.errors import HangError, HardwareError, MegaspecError, RecipeError, WriteError, printable
from megaspec.core.terminal import escape, terminal
from megaspec.core.units import plural
from megaspec.data.files import write_text
from megaspec.doctor import gpus, links, machine, software
from megaspec.doctor.finding import Finding, error, exit_code
from megaspec.estimate.hardware import Hardware, hardware_of
from megaspec.estimate.target import Target, detect_target
from megaspec.estimate.throughput import read_table
from megaspec_launchers.environment import RankPlace, rank_from_environment
from megaspec_launchers.local import launch

ENTRY = "megaspec.doctor.probe:main"
TIMEOUT_SECONDS = 60.0
_GRACE_SECONDS = 5.0
# Ranks of the probe on a machine without GPUs.
CPU_RANKS = 2
_STYLES = {"ok": "green", "warn": "yellow", "error": "red"}

_DESCRIPTION = """Look at this machine: versions that fit each other, GPUs (errors, clocks, links), /dev/shm, the disk
of the runs, limits, variables and network cards; then start a rank on each GPU (two on a CPU), and time an all-reduce
and a message between them, whose numbers are checked. What is wrong is told with why it matters and what to do.

Between machines: torchrun --nnodes 2 --nproc-per-node 8 ... -m megaspec.cli doctor

--out FILE measures every collective, for `megaspec plan throughput=FILE`. It ends with 0 where nothing is an error, 77
for suspected hardware, 74 where ranks don't reach each other, 73 where nothing can be written, else with 64."""


def add_parser(commands: Any) -> None:
    """The parser of `doctor`."""
    command = commands.add_parser(
        "doctor",
        help="look at this machine, its GPUs and links, and say what to do",
        description=_DESCRIPTION,
        formatter_class=Paragraphs,
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="one JSON object, on one line")
    command.add_argument("--run-dir", metavar="DIR", type=Path, default=Path("runs"), help="where runs are kept (runs)")
    command.add_argument("--out", metavar="FILE", help="measure all links, and write a table that plan reads")
    command.add_argument("--base", metavar="FILE", help="the table to put links into (that of this kind of GPU)")
    command.add_argument("--look-only", action="store_true", help="start no ranks")


def run(args: argparse.Namespace) -> int:
    """Look, probe, print. -> exit code, see `exit_code`."""
    place = rank_from_environment(os.environ)
    target = detect_target()
    hardware = hardware_of(target)
    base = None
    if args.out is not None:
        known = _refuse_out(args, target, hardware)
        base = links.base_table(None if args.base is None else read_table(Path(args.base)), known)
    elif args.base is not None:
        raise RecipeError("--base is a table for --out to put links into; give --out FILE, or drop it")
    if place is not None and place.world_size > 1 and not args.look_only:
        return _in_world(args, place, target, hardware, base)
    findings = look(target, args.run_dir, nodes=1)
    probe = None
    if not args.look_only:
        ranks = target.gpus if target.device == "cuda" else CPU_RANKS
        code, probe = _probed_here(ranks, on_gpu=target.device == "cuda", measures_all=base is not None)
        findings += probe_result(code, probe, hardware, ranks)
    return _tell(args, findings, probe, target, base)


def look(target: Target, run_dir: Path, *, nodes: int) -> list[Finding]:
    """Everything that can be looked at without starting a rank."""
    driver = gpus.read_driver()
    ranks = target.local_ranks or (target.gpus if target.device == "cuda" else CPU_RANKS)
    cards = machine.read_cards()
    has_rdma = any(card.is_rdma and card.is_up for card in cards)
    found = software.installed(
        driver=None if driver is None else driver.version,
        driver_cuda=None if driver is None else driver.cuda,
        gpus=max(target.gpus, 0 if driver is None else len(driver.gpus)),
        sm=target.sm,
    )
    findings = list(software.software_findings(found))
    findings.append(gpus.count_finding(driver, target.gpus))
    if driver is not None:
        findings += gpus.gpu_findings(driver.gpus)
    findings += machine.card_findings(cards, nodes=nodes)
    findings += machine.interface_findings(os.environ, machine.read_interfaces(), cards, nodes=nodes)
    findings.append(machine.look_at_name(os.environ, nodes=nodes))
    findings.append(machine.look_at_shm(ranks=ranks))
    findings += machine.look_at_disk(run_dir)
    findings += machine.look_at_limits(has_network_cards=has_rdma)
    findings += machine.variable_findings(os.environ, gpus=target.gpus)
    host = socket.gethostname()
    return [replace(finding, host=host) for finding in findings]


def probe_result(code: int, probe: dict[str, Any] | None, hardware: Hardware | None, ranks: int) -> list[Finding]:
    """What ended probe came to. `code`: of its ranks."""
    if code == 0 and probe is not None:
        return list(links.probe_findings(probe, hardware))
    what = f"the probe of {ranks} ranks ended with exit code {code}; what they said is above"
    if code == HardwareError.exit_code:
        why = "a GPU, its memory or a link gave a wrong number for a right one"
        do = "drain this node; start the probe with CUDA_VISIBLE_DEVICES=0,1 and so on to find out which GPU it is"
    elif code == HangError.exit_code:
        why = "ranks don't reach each other: a run would end so too"
        do = "NCCL_DEBUG=INFO megaspec doctor; look for firewalls, NCCL_SOCKET_IFNAME, /dev/shm and cables"
    else:
        why = "a rank could not be started, or failed before it reached the others"
        do = "mend what it says; python -c 'import torch' shows whether torch itself can be imported"
        code = RecipeError.exit_code if code == RecipeError.exit_code else MegaspecError.exit_code
    return [error(links.AREA, what, why=why, do=do, code=code)]


def _probed_here(ranks: int, *, on_gpu: bool, measures_all: bool) -> tuple[int, dict[str, Any] | None]:
    """Starts ranks of this machine. -> their exit code, and what rank 0 found out; None where it did not."""
    with tempfile.TemporaryDirectory(prefix="megaspec-doctor-") as folder:
        code = launch(
            folder,
            ranks=ranks,
            entry=ENTRY,
            grace_seconds=_GRACE_SECONDS,
            timeout_seconds=TIMEOUT_SECONDS,
            arguments={"local_ranks": ranks, "on_gpu": on_gpu, "measures_all": measures_all},
        )
        file = Path(folder, "probe.json")
        if code or not file.is_file():
            return code or MegaspecError.exit_code, None
        return code, json.loads(file.read_text())


def _in_world(args: argparse.Namespace, place: RankPlace, target: Target, hardware: Hardware | None, base: Any) -> int:
    """One rank of several hosts: the first of each host looks at it, rank 0 tells what all have found."""
    local_ranks = target.local_ranks or 1
    nodes = max(1, place.world_size // local_ranks)
    mine: list[Finding] = []
    if place.local_rank == 0:
        mine = look(target, args.run_dir, nodes=nodes)
    from megaspec.doctor.world import probed_in_world  # torch, only where it is needed

    code, probe, said = probed_in_world(
        place,
        local_ranks=local_ranks,
        on_gpu=target.device == "cuda",
        measures_all=base is not None,
        timeout_seconds=TIMEOUT_SECONDS,
        mine=[finding.as_json() for finding in mine],
    )
    if place.rank != 0:
        return code or exit_code(mine)
    findings = [Finding(**one) for one in said] if said else mine
    findings += probe_result(code, probe, hardware, place.world_size)
    return _tell(args, findings, probe, target, base)


def _tell(
    args: argparse.Namespace, findings: Sequence[Finding], probe: dict[str, Any] | None, target: Target, base: Any
) -> int:
    code = exit_code(findings)
    if args.out is not None and probe is not None:
        names = f"{probe['ranks']} x {target.gpu}, torch {target.versions.get('torch')}"
        table = links.table_with_links(base, probe, names)
        write_text(Path(args.out), table.model_dump_json(indent=None) + "\n")
    if args.json:
        content = {"findings": [finding.as_json() for finding in findings], "probe": probe, "exit_code": code}
        print(json.dumps(content))
        return code
    show(findings)
    if args.out is not None and probe is not None:
        for line in links.links_in_words(table):
            print(printable(line))
        print(printable(f"written: {args.out}; megaspec plan recipe=NAME throughput={args.out} reads it"))
    return code


def show(findings: Sequence[Finding]) -> None:
    """A line for each, what is wrong with its reason and the way out below it; hosts apart where there are several."""
    out = terminal()
    hosts = list(dict.fromkeys(finding.host for finding in findings))
    for host in hosts:
        if len(hosts) > 2:
            out.print(f"[bold]{escape(host or 'all together')}[/bold]")
        for finding in findings:
            if finding.host != host:
                continue
            style = _STYLES[finding.level]
            out.print(
                f"[{style}]{finding.level:5}[/{style}] {escape(f'{finding.area:12} {finding.what}')}", soft_wrap=True
            )
            if finding.level != "ok":
                out.print(f"{'':19}{escape(finding.why)}", soft_wrap=True)
                out.print(f"{'':19}do: {escape(finding.do)}", soft_wrap=True)
    n_errors = sum(finding.level == "error" for finding in findings)
    n_warnings = sum(finding.level == "warn" for finding in findings)
    out.print(f"{n_errors} {plural('error', n_errors)}, {n_warnings} {plural('warning', n_warnings)}")


def _refuse_out(args: argparse.Namespace, target: Target, hardware: Hardware | None) -> Hardware:
    """RecipeError: there are no links that a plan could read. WriteError: the file can't be written."""
    if args.look_only:
        raise RecipeError("--out is what the probe measures; drop --look-only")
    if target.device != "cuda":
        raise RecipeError(
            "--out: plans count links of GPUs, and there is none here; megaspec doctor alone probes a CPU"
        )
    if hardware is None:
        raise RecipeError(f"--out: {target.gpu} is not in the hardware table, so that no plan is made for it")
    out = Path(args.out)
    written = out if out.exists() else out.parent
    if out.is_dir() or not out.parent.is_dir() or not os.access(written, os.W_OK):
        raise WriteError(f"{out} can't be written; name another file with --out")
    in_world = rank_from_environment(os.environ) is not None
    if target.gpus < 2 and not in_world:
        raise RecipeError("--out: one GPU has no link to measure; start it where there are two, or under torchrun")
    return hardware
