"""The tables of README.md beside their raw lines: what each column says of a line, and which cells no line says."""

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import StageMemory, fullest, memory_of
from megaspec.estimate.step_time import StepTime, step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.recipe import Recipe
from megaspec.resolve.fill import plainly_filled
from megaspec_kernels.catalog import CATALOG
from tests.benchmarks import bench_train
from tests.benchmarks.bench_fp8_accuracy import apart_from
from tests.estimate.earlier import earlier_code

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
Line = dict[str, Any]
# 1,234.5 or -0.1 or 3e-16; a number inside of a word (1f1b, H200) is none.
_NUMBER = re.compile(r"(?<![\w.])-?\+?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?!\w)")
# The textbook bubble of equal stages, as a share of (stages - 1) / micro batches.
_EQUAL_STAGES = {"1f1b": 1.0, "interleaved": 1.0, "zb_h1": 1 / 3, "zb_v": 1 / 6}
# What says which layout a line measured, whatever it measured of it.
_IDENTITY = (
    "peer", "layout", "switch", "model", "recipe", "micro_batch", "seq", "mbs", "accum", "gpus", "tp", "dp", "pp", "cp",
    "ep", "parallelism", "precision", "fp8", "d_shared", "transport", "NCCL_MAX_P2P_NCHANNELS", "operation",
    "implementation", "name", "what", "folder", "force_balance", "chunks", "stages", "p2p", "cp_messages",
)  # fmt: skip


@dataclass(frozen=True)
class Number:
    """A number as a table shows it."""

    text: str
    value: float
    unit: float
    """Of its last digit."""

    def shows(self, measured: float) -> bool:
        """Whether the measured value is shown so. Half of the last digit, and what binary fractions add to it."""
        return abs(self.value - measured) <= 0.5 * self.unit * (1 + 1e-6) + 1e-12


@dataclass(frozen=True)
class Table:
    """A table of results."""

    section: str
    files: tuple[str, ...]
    """Raw lines that its section names."""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass
class Group:
    """All lines of one layout."""

    file: str
    lines: list[Line] = field(default_factory=list)


def numbers_of(cell: str) -> list[Number]:
    """The numbers of a cell, in order."""
    found = []
    for text in _NUMBER.findall(cell):
        mantissa, _, exponent = text.replace(",", "").partition("e")
        decimals = len(mantissa.partition(".")[2])
        unit = 10.0 ** (int(exponent or 0) - decimals)
        found.append(Number(text, float(text.replace(",", "")), unit))
    return found


def tables_of(text: str) -> Iterator[Table]:
    """Every table below a heading that names raw lines in its section, but for lists of scripts and files."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        if title in ("How to measure", "Index"):
            continue
        files = tuple(dict.fromkeys(re.findall(r"\(results/(\w+)\.jsonl\)", section)))
        for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            header, _, *rows = [_cells(line) for line in block.splitlines()]
            yield Table(title, files, header, tuple(rows))


def _cells(line: str) -> tuple[str, ...]:
    unescaped = line.strip().strip("|").replace("\\|", "\0")
    return tuple(cell.strip().replace("\0", "|") for cell in unescaped.split("|"))


def problems_of(table: Table) -> list[str]:
    """Cells that no raw line says, a sentence each."""
    found = []
    groups = [group for file in table.files for group in _groups(file)]
    for row in table.rows:
        where = f"{table.section}: {row[0]}"
        own = [(name, cell) for name, cell in zip(table.header, row, strict=True) if name in COLUMNS and cell]
        derived = [(name, cell) for name, cell in zip(table.header, row, strict=True) if name in DERIVED and cell]
        unknown = [name for name in table.header[1:] if name not in COLUMNS and name not in DERIVED]
        found += [f"{where}: no raw line is known to say {name!r}; see COLUMNS" for name in unknown]
        misses = {group.file: _missing(group, own) for group in groups}
        if all(_missing(group, own) for group in groups):
            found.append(f"{where}: no raw line of {', '.join(table.files)} says all of it: {misses}")
        for name, cell in derived:
            wrong = DERIVED[name](table, dict(zip(table.header, row, strict=True)), groups)
            found += [f"{where}: {name}={cell}: {wrong}"] if wrong else []
    return found


def _missing(group: Group, cells: list[tuple[str, str]]) -> list[str]:
    """The cells that no line of a group says."""
    missing = []
    for name, cell in cells:
        values = [value for value in COLUMNS[name](group) if value is not None]
        for number in numbers_of(cell):
            if not any(number.shows(value) for value in values):
                missing.append(f"{name}={number.text}")
    return missing


@lru_cache
def _groups(file: str) -> tuple[Group, ...]:
    """The lines of a file, by what was measured."""
    groups: dict[str, Group] = defaultdict(lambda: Group(file))
    for text in (RESULTS / f"{file}.jsonl").read_text().splitlines():
        line = json.loads(text)
        # a line that has no field asked for nothing, as one whose field is empty
        identity = [line.get(name) or None for name in _IDENTITY]
        identity.append(line.get("kernels", line).get("attention"))
        # with and without it stand in one row
        identity.append([word for word in line.get("set", ()) if word != "train.deterministic=true"])
        # elsewhere a run is one of several of the same thing
        identity.append(line.get("run") if "last_loss" in line else None)
        groups[json.dumps(identity)].lines.append(line)
    return tuple(groups.values())


def _each(read: Callable[[Line], float | None]) -> Callable[[Group], list[float | None]]:
    return lambda group: [read(line) for line in group.lines]


def _field(name: str, scale: float = 1.0) -> Callable[[Group], list[float | None]]:
    return _each(lambda line: None if line.get(name) is None else line[name] * scale)


def _peak(line: Line) -> float | None:
    if "max_memory_allocated" in line:
        return line["max_memory_allocated"] / 2**30
    return line.get("peak_mem_gib", line.get("peak_gib"))


def _exposed(line: Line) -> float | None:
    """Of the rank that waits least."""
    ranks = [rank["exposed_ms"] for rank in line.get("ranks", ()) if "exposed_ms" in rank]
    return line.get("exposed_ms", min(ranks, default=None))


def _bubble(line: Line) -> float | None:
    ranks = [rank for rank in line.get("ranks", ()) if "compute_ms" in rank]
    if not ranks:
        return None
    busiest = max(ranks, key=lambda rank: rank["compute_ms"])
    return 100 * (busiest["step_ms"] / busiest["compute_ms"] - 1)


def _step_ms(line: Line) -> float | None:
    return line.get("step_ms")


def _switched(is_on: bool, read: Callable[[Line], float | None]) -> Callable[[Group], list[float | None]]:
    """Of the lines of a pair, those with the switch on or off."""

    def values(group: Group) -> list[float | None]:
        own = [line for line in group.lines if bool(line.get("value", line.get("deterministic"))) == is_on]
        return [read(line) for line in own]

    return values


def _numbers_in(name: str) -> Callable[[Group], list[float | None]]:
    """Those of a field that is text: the sizes of a shape."""
    return lambda group: [number.value for line in group.lines for number in numbers_of(str(line.get(name, "")))]


def _of_saves(name: str) -> Callable[[Group], list[float | None]]:
    """Of the saves beside training that a line tells of."""
    return lambda group: [save[name] for line in group.lines for save in line.get("saves", ())]


def _on_side(side: str, name: str = "step_ms") -> Callable[[Group], list[float | None]]:
    """The median over the runs of one of two revisions."""

    def values(group: Group) -> list[float | None]:
        own = [line[name] for line in group.lines if line.get("side") == side and name in line]
        return [statistics.median(own)] if own else []

    return values


def _runs_each(group: Group) -> list[float | None]:
    return [sum(1 for line in group.lines if line.get("side") == "after")]


def _rate(unit: str, scale: float) -> Callable[[Group], list[float | None]]:
    """What a kernel reaches a second."""
    return _each(lambda line: line["amount"] / line["seconds"] / scale if line.get("unit") == unit else None)


def _steps(group: Group) -> list[Line]:
    """The training steps of a run through the command line."""
    return [line for line in group.lines if line.get("event", "step") == "step" and "seconds" in line]


def _median_ms(group: Group) -> list[float | None]:
    """Of what the command line logged as seconds of each step; other lines are medians themselves."""
    if "step_ms" in group.lines[0]:
        return [line["step_ms"] for line in group.lines]
    seconds = [line["seconds"] for line in _steps(group)]
    return [1e3 * statistics.median(seconds)] if seconds else []


def _logged_rate(group: Group) -> list[float | None]:
    """Tokens a second of the median step behind the first five, to the hundred, as the table of real text has it."""
    steps = [line for line in _steps(group) if "sequence_tokens" in line]
    if not steps:
        return []
    return [round(steps[0]["sequence_tokens"] / statistics.median(line["seconds"] for line in steps[5:]), -2)]


def _loss_of(which: Callable[[list[Line]], int]) -> Callable[[Group], list[float | None]]:
    """Of a step of a run through the command line."""

    def values(group: Group) -> list[float | None]:
        steps = [line for line in _steps(group) if "steps" in line]
        return [line["loss"] for line in steps if line["step"] == which(steps)]

    return values


def _least_decibels(step: int) -> Callable[[Group], list[float | None]]:
    """Signal to noise of the layer that has least, in a step."""

    def read(line: Line) -> float | None:
        layers = line.get("decibels", {}).get(str(step))
        return min(layers.values()) if layers else None

    return _each(read)


def _runs(group: Group) -> list[Line]:
    """Those of one kind from several seeds."""
    return [line for line in group.lines if "seed" in line and "last_loss" in line]


def _mean_loss(group: Group) -> list[float | None]:
    losses = [line["last_loss"] for line in _runs(group)]
    return [statistics.mean(losses)] if losses else []


def _last_validation(group: Group) -> list[float | None]:
    return [line["loss"] for line in group.lines if line.get("event") == "eval"][-1:]


def _prepared(name: str) -> Callable[[Group], list[float | None]]:
    """Medians of `bench_data_prepare.py`, of all three ways."""
    return lambda group: [value for line in group.lines for value in line.get(name, {}).values()]


def _extra_of_ranks(group: Group) -> list[float | None]:
    """Host memory beside a rank's weights, of `bench_hf.py`."""
    return [rank["extra_gib"] for line in group.lines for rank in line.get("ranks", ()) if "extra_gib" in rank]


def _of_a_copy(group: Group) -> list[float | None]:
    """What kernels of today reach of a copy's rate, of `bench_producers.py`."""
    own = [line for line in group.lines if line.get("side") == "after" and "copy_GB_s" in line]
    return [line["GB_s"] / line["copy_GB_s"] for line in own]


# Of a column: the values that the lines of a layout have for it.
COLUMNS: dict[str, Callable[[Group], list[float | None]]] = {
    "tok/s a GPU": _field("tokens_per_s_gpu"),
    "loss of the last 20 steps": _field("last_loss"),
    "seeds": lambda group: [len(_runs(group))],
    "mean loss of the last 20 steps": _mean_loss,
    "dB at step 1": _least_decibels(1),
    "at step 100": _least_decibels(100),
    "at step 500": _least_decibels(500),
    "step, ms": _median_ms,
    "quickest, ms": _field("step_ms_min"),
    "peak, GiB": _each(_peak),
    "exposed, ms": _each(_exposed),
    "bubble": _each(_bubble),
    "MFU, full": _field("mfu", 100),
    "MFU, causal": _field("mfu_causal", 100),
    "loss": _field("loss_apart"),
    "gradient norm": _field("norm_apart"),
    "gate, loss": _field("loss_limit"),
    "gate, norm": _field("norm_limit"),
    "step, ms: on": _switched(True, _step_ms),
    "step, ms: off": _switched(False, _step_ms),
    "step, ms: with": _switched(True, _step_ms),
    "step, ms: without": _switched(False, _step_ms),
    "step, ms: before": _on_side("before"),
    "step, ms: after": _on_side("after"),
    "time, us: before": _each(lambda line: line.get("us") if line.get("side") == "before" else None),
    "time, us: after": _each(lambda line: line.get("us") if line.get("side") == "after" else None),
    "of a copy": _of_a_copy,
    "operations: before": _on_side("before", "operations"),
    "operations: after": _on_side("after", "operations"),
    "launches": _field("launches"),
    "Python calls: before": _on_side("before", "calls"),
    "Python calls: after": _on_side("after", "calls"),
    "CPU, ms: before": _on_side("before", "cpu_ms_min"),
    "CPU, ms: after": _on_side("after", "cpu_ms_min"),
    "runs each": _runs_each,
    "implementation": _numbers_in("implementation"),
    "shape": _numbers_in("name"),
    "error, of the gate": _field("error"),
    "time, ms": _field("seconds", 1e3),
    "GB/s": _rate("bytes", 1e9),
    "TFLOP/s": _rate("flops", 1e12),
    "of measured": _field("share", 100),
    "exposed, ms: on": _switched(True, _exposed),
    "exposed, ms: off": _switched(False, _exposed),
    "peak, GiB: on": _switched(True, _peak),
    "peak, GiB: off": _switched(False, _peak),
    "planned, ms": _field("planned_seconds", 1e3),
    "memory, planned over measured": _each(
        lambda line: line["planned_bytes"] / line["memory_bytes"] if "planned_bytes" in line else None
    ),
    "tokens a step": _field("sequence_tokens"),
    "tok/s": _logged_rate,
    "loss, first step": _loss_of(lambda steps: 1),
    # that was meant: a run that was resumed has more
    "loss, last step": _loss_of(lambda steps: steps[0]["steps"]),
    "validation loss": _last_validation,
    "seconds": _prepared("median_seconds"),
    "CPU seconds": _prepared("median_cpu_seconds"),
    "tok/s, kept": _field("cached_tokens_per_s"),
    "tok/s, whole": _field("whole_tokens_per_s"),
    "CPU ms a token, kept": _field("cached_cpu_ms_per_token"),
    "CPU ms a token, whole": _field("whole_cpu_ms_per_token"),
    "CPU, whole to kept": _field("cpu_ratio"),
    "minutes": _field("minutes"),
    "steps done": _field("steps"),
    "attempts": _field("attempts"),
    "goodput": _field("goodput"),
    "supervisor, MiB in 1,000 steps": _field("supervisor_slope"),
    "a rank, MiB in 1,000 steps": _field("rank_slope"),
    "stood still, s": _of_saves("stall_seconds"),
    "written in, s": _of_saves("seconds"),
    "written, MB/s": _of_saves("MBps"),
    "a step meanwhile, ms": _of_saves("step_ms_meanwhile"),
    "longest step, ms": _of_saves("longest_step_ms"),
    "tok/s, trained": _field("tokens_s"),
    "loss of step 1": _field("first_loss"),
    "loss of the last step": _field("last_loss"),
    "time, s": _field("seconds"),
    "rate, MB/s": _field("mb_s"),
    "extra of each rank, GiB": _extra_of_ranks,
    "plain write and fsync": _field("raw_write_MBps"),
    "save": _field("save_MBps"),
    "verify": _field("verify_MBps"),
    "load": _field("load_MBps"),
    "load half the columns": _field("load_half_columns_MBps"),
}


def recipe_of(line: Line, kind: str) -> Recipe:
    """What a line measured, filled for GPUs of a kind."""
    words = ["--model", line["model"], "--tp", str(line.get("tp", 1))]
    for name in ("seq", "mbs", "accum"):
        words += [f"--{name}", str(line[name])]
    for name, value in line.get("parallelism", {}).items():
        words += ["--set", f"parallelism.{name}={json.dumps(value)}"]
    if line.get("deterministic"):
        words += ["--set", "train.deterministic=true"]
    if "set" in line:
        # lines say since 2026-11-25 all that was asked for
        words += ["--precision", line["precision"], "--documents", str(line["documents"])]
        for name, implementation in line["kernels"].items():
            words += ["--set", f"kernels.{name}={implementation}"]
        for word in line["set"]:
            words += ["--set", word]
        for operation in CATALOG:
            # it had no name yet, and was plain
            if operation not in line["kernels"]:
                words += ["--set", f"kernels.{operation}=reference"]
    recipe = bench_train.recipe_of(bench_train.parser().parse_args(words), line["gpus"])
    gpu = HARDWARE[kind]
    target = Target(gpus=line["gpus"], gpu=gpu.name, sm=90, gpu_memory=gpu.memory, versions={"torch": "2.11.0"})
    return plainly_filled(recipe, target, bench_train.facts_of(line.get("documents", 0)))


def _kind(file: str) -> str:
    return "H100" if file.endswith("h100") else "H200"


def _as_measured(line: Line) -> AbstractContextManager[None]:
    """The plan for the code that a line was measured of: lines say since 2026-11-25 that tables are summed in place."""
    return nullcontext() if line.get("tables_in_place") else earlier_code()


def predicted_time(line: Line, kind: str) -> StepTime:
    with _as_measured(line):
        return step_time(recipe_of(line, kind), HARDWARE[kind], throughput_of(HARDWARE[kind]))


def predicted_memory(line: Line, kind: str) -> tuple[StageMemory, ...]:
    with _as_measured(line):
        return memory_of(recipe_of(line, kind))


def _predicted_ms(line: Line, kind: str) -> float:
    return 1e3 * predicted_time(line, kind).seconds


def _predicted_step(line: Line, kind: str) -> float:
    return 100 * (_predicted_ms(line, kind) / line["step_ms"] - 1)


def _predicted_peak(line: Line, kind: str) -> float | None:
    if "max_memory_allocated" not in line:  # the first scripts kept it in GiB only, with two digits
        return None
    return 100 * (fullest(predicted_memory(line, kind)).allocated / line["max_memory_allocated"] - 1)


def _predicted_bubble(line: Line, kind: str) -> float:
    return 100 * predicted_time(line, kind).bubble


def _equal_stages(line: Line, kind: str) -> float:
    own = line["parallelism"]["pipeline"]
    # the two waves of zb_v are no chunks of an interleaved schedule
    chunks = own["virtual_stages"] if own["schedule"] == "interleaved" else 1
    share = _EQUAL_STAGES[own["schedule"]] / chunks
    return 100 * share * (line["parallelism"]["pp"] - 1) / line["accum"]


def _is_shown(line: Line, row: dict[str, str]) -> bool:
    """Whether the step that a row tells is the line's: a layout that ran twice has a row and a prediction for each."""
    for column, key in (("step, ms", "step_ms"), ("tok/s a GPU", "tokens_per_s_gpu")):
        numbers = numbers_of(row.get(column, ""))
        if numbers and key in line and not any(number.shows(line[key]) for number in numbers):
            return False
    return True


def _of_the_line(compute: Callable[[Line, str], float | None]) -> Callable[[Table, dict[str, str], list[Group]], str]:
    """What is computed of the line that a row shows."""

    def check(table: Table, row: dict[str, str], groups: list[Group]) -> str:
        name = next(name for name, one in DERIVED.items() if one is check)
        (number,) = numbers_of(row[name])
        tried = []
        for group in groups:
            own = [(column, cell) for column, cell in row.items() if column in COLUMNS and cell]
            if _missing(group, own):
                continue
            for line in group.lines:
                if not _is_shown(line, row):
                    continue
                value = compute(line, _kind(group.file))
                if value is not None and number.shows(value):
                    return ""
                tried += [] if value is None else [value]
        return f"today's code computes {', '.join(f'{value:,.2f}' for value in tried) or 'nothing'}"

    return check


def _ours(row: dict[str, str]) -> list[Number]:
    return numbers_of(row["tok/s a GPU"])


def _peers(groups: list[Group]) -> list[float]:
    # a run that failed has neither
    lines = [line for group in groups for line in group.lines if "tokens_per_s_gpu" in line]
    return [line["tokens_per_s_gpu"] for line in lines if line["peer"] != "megaspec"]


def _is_a_peers(table: Table, row: dict[str, str], groups: list[Group]) -> str:
    (number,) = numbers_of(row["peer, tok/s a GPU"])
    return "" if any(number.shows(value) for value in _peers(groups)) else "no peer's line says it"


def _is_the_ratio(table: Table, row: dict[str, str], groups: list[Group]) -> str:
    (peer,) = numbers_of(row["peer, tok/s a GPU"])
    return _wrong_ratio(row["ratio"], _ours(row), peer.value)


def _is_the_ratio_to_the_only(table: Table, row: dict[str, str], groups: list[Group]) -> str:
    rows = [dict(zip(table.header, one, strict=True)) for one in table.rows]
    (peer,) = [one for one in rows if one["to the peer's 1F1B"] == "1"]
    return _wrong_ratio(row["to the peer's 1F1B"], _ours(row), _ours(peer)[0].value)


def _over_seeds(compute: Callable[[list[float]], float]) -> Callable[[Table, dict[str, str], list[Group]], str]:
    """Of how far a row's runs are from bf16's, seed by seed, in per cent."""

    def check(table: Table, row: dict[str, str], groups: list[Group]) -> str:
        name = next(name for name, one in DERIVED.items() if one is check)
        (number,) = numbers_of(row[name])
        bf16 = [line for group in groups for line in _runs(group) if line["run"] == "bf16"]
        own = [(column, cell) for column, cell in row.items() if column in COLUMNS and cell]
        tried = []
        for group in groups:
            apart = apart_from(_runs(group), bf16)
            if apart and not _missing(group, own):
                tried.append(100 * compute(apart))
        if any(number.shows(value) for value in tried):
            return ""
        return f"the lines say {', '.join(f'{value:.3f}' for value in tried) or 'nothing'}"

    return check


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def _is_the_change(table: Table, row: dict[str, str], groups: list[Group]) -> str:
    (before,), (after,), (change,) = (
        numbers_of(row[name]) for name in ("step, ms: before", "step, ms: after", "change")
    )
    # of figures that are rounded themselves
    limit = 0.5 * change.unit + 100 * (before.unit + after.unit) / before.value
    measured = 100 * (after.value / before.value - 1)
    return "" if abs(change.value - measured) <= limit else f"it is {measured:.2f} %"


def _wrong_ratio(cell: str, ours: list[Number], peer: float) -> str:
    for number in numbers_of(cell):
        if not any(number.shows(one.value / peer) for one in ours):
            return f"{', '.join(one.text for one in ours)} over {peer:,.0f} is {ours[0].value / peer:.3f}"
    return ""


# Of a column: what is wrong with a cell that is computed from others, or by the plan; "" where nothing is.
DERIVED: dict[str, Callable[[Table, dict[str, str], list[Group]], str]] = {
    "predicted, ms": _of_the_line(_predicted_ms),
    "step predicted": _of_the_line(_predicted_step),
    "peak predicted": _of_the_line(_predicted_peak),
    "bubble predicted": _of_the_line(_predicted_bubble),
    "equal stages": _of_the_line(_equal_stages),
    "peer, tok/s a GPU": _is_a_peers,
    "ratio": _is_the_ratio,
    "change": _is_the_change,
    "from bf16's": _over_seeds(statistics.mean),
    "standard error": _over_seeds(_standard_error),
    "to the peer's 1F1B": _is_the_ratio_to_the_only,
}
