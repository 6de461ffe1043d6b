"""What a probe found out, as findings, and as a table of measured throughput that a plan reads. Torch-free."""

import json
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from megaspec.core.errors import RecipeError
from megaspec.doctor.finding import Finding, ok, warn
from megaspec.estimate.hardware import HARDWARE, Hardware
from megaspec.estimate.throughput import MeasuredThroughput, ThroughputTable, shipped_table, throughput_of

AREA = "probe"
# How much slower than measured elsewhere, or than the others, a link is told of.
SLOWER = 1.5
_LONG = 2**28


def probe_findings(probe: Mapping[str, Any], hardware: Hardware | None) -> Iterator[Finding]:
    """`probe`: what probe.py writes. `hardware`: the GPUs that it ran on; None: a CPU, or GPUs that are not known."""
    ranks = probe["ranks"]
    if ranks == 1:
        yield ok(AREA, "one rank: its products of matrices are right, there is no link to look at")
        return
    where = f"{ranks} ranks" if probe["nodes"] == 1 else f"{ranks} ranks on {probe['nodes']} nodes"
    what = f"{where} over {probe['backend']}: sums and messages are right; an all-reduce takes "
    what += f"{probe['all_reduce_seconds'] * 1e6:,.0f} µs, or {probe['all_reduce_rate'] / 1e9:,.2f} GB/s a rank"
    expected = None
    if hardware is not None and probe["backend"] == "nccl" and probe["nodes"] == 1:
        seconds = throughput_of(hardware).collective_seconds("all_reduce", _LONG, ranks, within_node=True)
        expected = 2 * (ranks - 1) / ranks * _LONG / seconds
    if expected is not None and probe["all_reduce_rate"] * SLOWER < expected:
        why = f"as many GPUs of this kind were measured to reach {expected / 1e9:,.0f} GB/s: NVLink may not be used"
        do = "nvidia-smi topo -m; NCCL_DEBUG=INFO megaspec doctor says which way NCCL takes; look for NCCL_P2P_DISABLE"
        yield warn(AREA, what, why=why, do=do)
    else:
        yield ok(AREA, what)
    yield from _sends(probe)


def _sends(probe: Mapping[str, Any]) -> Iterator[Finding]:
    """The link to the next rank of each, those within a node compared with each other, and those between nodes."""
    rates = probe["send_rates"]
    between = set(probe["between_nodes"])
    inside = {r: rate for r, rate in enumerate(rates) if r not in between}
    outside = {r: rate for r, rate in enumerate(rates) if r in between}
    for words, group in (("to the next rank", inside), ("to the next node", outside)):
        if not group:
            continue
        slowest = min(group, key=lambda r: group[r])
        following = (slowest + 1) % len(rates)
        usual = median(group.values())
        what = f"a message {words}: {probe['send_seconds'] * 1e6:,.0f} µs, {usual / 1e9:,.2f} GB/s"
        if group[slowest] * SLOWER < usual and probe["backend"] == "nccl":
            what += f", but {group[slowest] / 1e9:,.2f} GB/s from rank {slowest} to rank {following}"
            why = "collectives are as fast as the slowest link"
            do = "look at the links of these two GPUs: nvidia-smi nvlink --status; between nodes at the cards: ibstat"
            yield warn(AREA, what, why=why, do=do)
        else:
            yield ok(AREA, what)


def table_with_links(base: ThroughputTable, probe: Mapping[str, Any], source: str) -> ThroughputTable:
    """A table of measured throughput whose links are those of the probe. `source`: on what they were measured.

    RecipeError: the probe measured none.
    """
    if not probe["collectives"] and probe["network"] is None:
        raise RecipeError("--out: one rank has no link to measure; give two GPUs, or several nodes under torchrun")
    content = base.model_dump(mode="json")
    content["source"] = f"{base.source}; links measured on {source}"
    if probe["collectives"]:
        content["collectives"] = probe["collectives"]
    if probe["network"] is not None:
        content["network"] = probe["network"]
    return ThroughputTable.model_validate_json(json.dumps(content))


def base_table(given: ThroughputTable | None, hardware: Hardware) -> ThroughputTable:
    """The table to put links into: the one that is given, else that which ships for this kind of GPU.

    RecipeError: there is none, or it is of other GPUs.
    """
    table = given or shipped_table(hardware.name)
    if table is None:
        shipped = [name for name in HARDWARE if shipped_table(name) is not None]
        text = f"--out: for {hardware.name} no table of its arithmetic ships (those of {', '.join(shipped)} do); "
        text += "megaspec bench throughput measures one, links included; or give it with --base FILE"
        raise RecipeError(text)
    if table.hardware != hardware.name:
        text = f"--base: a table of {table.hardware}, and these are {hardware.name}; measure one with "
        raise RecipeError(f"{text}megaspec bench throughput")
    return table


def links_in_words(table: ThroughputTable) -> Iterator[str]:
    """What a plan that reads the table will count with."""
    throughput = MeasuredThroughput(table, HARDWARE[table.hardware])
    for one in table.collectives:
        if one.kind in ("all_reduce", "p2p"):
            seconds = throughput.collective_seconds(one.kind, _LONG, one.ranks, within_node=True)
            yield f"{one.kind} over {one.ranks} GPUs, 256 MiB: {_LONG / seconds / 1e9:,.0f} GB/s"
    if table.network is not None:
        rate = table.network.bandwidth / 1e9
        yield f"between nodes: {rate:,.1f} GB/s a GPU, {table.network.latency * 1e6:,.0f} µs"
