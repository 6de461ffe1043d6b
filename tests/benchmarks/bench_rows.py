"""Ours and the peers in turn on one GPU or on four: the rows of a comparison, in one command.

python tests/benchmarks/bench_rows.py --rows fp8,packed8b --rounds 2 --out rows.jsonl --peer-path /tmp/peer_site
python tests/benchmarks/bench_rows.py --quick
python tests/benchmarks/bench_rows.py --rows pipelines --peer-rounds 1 --total 540 --out rows.jsonl --log failures.txt

Each run is a process of its own, or one on each GPU, with a time limit, and one JSON line; one that fails is a line
with its reason. Layouts of one work share a launch; where one hangs, ranks say where they stand, and those behind it
get another launch. Rounds come one after the other, in each all runs of a row, so that what drifts on a machine drifts
for both sides. Last comes a table: tokens a second, every one of them of a document and none of padding, with the SMs'
clock and the power over the measured steps, the ratio to the best peer of the same work, and how far the plan is off.

--peer-path (or PEER_PATH): a folder with the peers' packages below it, `mcore`, `te` (Transformer Engine), `tt` and
`ao` (torchtitan and torchao). --peer-scripts (or PEER_SCRIPTS): a folder with torchtitan_bench.py, for the row that
has it.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.target import detect_target
from tests.benchmarks.rank_processes import RankProcesses, started, whole_lines
from tests.benchmarks.rows import FIRST, TUNED, Run, Work, all_works, four_gpu_works, smoke_works, tuned_works

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OURS = HERE / "bench_train.py"
LAYOUTS = HERE / "bench_layouts.py"
MCORE = HERE / "peers" / "mcore_rows.py"
TORCHTITAN = "torchtitan_bench.py"
# Seconds over --limit that ranks get to import, to meet, and to say where they stood.
GRACE = 45.0
# Of the GPU's memory, in GiB, from which on a half of Llama-3-8B fits; else a quarter of it.
HALF_FITS = 110
ROWS = tuple(sorted({work.row for work in all_works(16, quick=False)}))
ROWS_OF_FOUR = (*dict.fromkeys(work.row for work in four_gpu_works()), *(f"tune{sequences}" for sequences in TUNED))


def command_of(runs: tuple[Run, ...], work: Work, args: argparse.Namespace, out: Path) -> tuple[list[str], str]:
    """-> what is started for a run, or for layouts that share a launch, and its PYTHONPATH. `out`: where layouts write
    their lines. Raises LookupError where a peer's script is missing."""
    run = runs[0]
    repository = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "launchers")]
    length = ["--warmup", str(args.warmup or work.warmup or 8), "--steps", str(args.steps or work.steps or 15)]
    # so that a rank that hangs says where
    patience = ["--patience", str(args.limit)] if work.gpus > 1 else []
    if run.side == "ours":
        # what kernels of ours import besides
        repository += [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        path = os.pathsep.join(repository)
        if not run.layout:
            return [sys.executable, "-P", str(OURS), *run.words, *length, *patience], path
        where = ["--where"] if args.where else []
        layouts = [one.layout for one in runs]
        words = [*run.words, *length, *patience, *where, "--out", str(out), *layouts]
        return [sys.executable, "-P", str(LAYOUTS), *words], path
    sites = Path(args.peer_path)
    if run.side == "mcore":
        path = [*repository, str(sites / "mcore"), str(sites / "te")]
        return [sys.executable, "-P", str(MCORE), *run.words, *length, *patience], os.pathsep.join(path)
    script = Path(args.peer_scripts) / TORCHTITAN
    if not script.exists():
        raise LookupError(f"{script} is not there; give --peer-scripts or PEER_SCRIPTS")
    path = [str(sites / "tt"), str(sites / "ao")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1"]
    return [*torchrun, str(script), *run.words, *length], os.pathsep.join(path)


def launches_of(runs: tuple[Run, ...]) -> list[list[Run]]:
    """Layouts of the same words share a launch, which imports and starts once for all of them."""
    found: list[list[Run]] = []
    for run in runs:
        if found and run.layout and found[-1][0].layout and found[-1][0].words == run.words:
            found[-1].append(run)
        else:
            found.append([run])
    return found


def measured(
    runs: list[Run], work: Work, args: argparse.Namespace, *, until: float = math.inf
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """What each run of a launch prints, as it comes, or `error`: why it has not. Where a layout fails or hangs, those
    behind it get a launch of their own. `until`: when everything ends, by time.monotonic()."""
    left = list(runs)
    while left:
        if time.monotonic() >= until:
            yield left.pop(0), {"error": f"not begun: {args.total:g} s were over"}
            continue
        for line in lines_of_launch(tuple(left), work, args, until=until):
            yield left.pop(0), line


def lines_of_launch(
    runs: tuple[Run, ...], work: Work, args: argparse.Namespace, *, until: float
) -> Iterator[dict[str, Any]]:
    """The lines of all runs, or of those before the first that has none, whose line says why."""
    seconds = args.limit
    if work.gpus > 1:
        seconds += GRACE
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        out = Path(folder) / "layouts.jsonl"
        try:
            command, path = command_of(runs, work, args, out)
        except LookupError as error:
            yield {"error": str(error)}
            return
        n_lines = 0
        with started(command, path, work.gpus) as ranks:
            if runs[0].layout:
                for line in lines_as_they_come(ranks, out, len(runs), seconds, until=until):
                    yield line
                    n_lines += 1
                if n_lines == len(runs):
                    # ranks leave their groups together
                    ranks.wait(GRACE)
                    return
            else:
                ranks.wait(min(seconds, until - time.monotonic()))
                lines = [line for line in ranks.said() if line.startswith("{")]
                if ranks.is_done and lines:
                    yield json.loads(lines[-1])
                    return
            if args.log:
                with open(args.log, "a") as file:
                    file.write(f"=== {work.name}: {runs[n_lines].label}\n{ranks.everything()}\n")
            if time.monotonic() >= until:
                yield {"error": f"not done when {args.total:g} s were over"}
            else:
                yield {"error": ranks.why(args.limit)}


def lines_as_they_come(
    ranks: RankProcesses, out: Path, most: int, seconds: float, *, until: float
) -> Iterator[dict[str, Any]]:
    """Until there are `most`, the ranks have ended, or none has come for so long."""
    seen = 0
    late = min(time.monotonic() + seconds, until)
    while seen < most:
        has_ended = ranks.wait(min(1.0, seconds))
        for text in whole_lines(out)[seen:]:
            yield json.loads(text)
            seen += 1
            late = min(time.monotonic() + seconds, until)
        if has_ended or time.monotonic() >= late:
            return


def clock_of(line: dict[str, Any]) -> dict[str, Any]:
    """Clock and power of a line; a peer whose script reads none has none."""
    return line.get("clock") or {}


def table(works: list[Work], lines: list[dict[str, Any]]) -> str:
    """Medians over the rounds, the fastest and slowest round, ratios to the best peer of the same work and to the peer
    with the same schedule, and how far the plan is off."""
    columns = (
        "| work | run | tok/s a GPU | of the best peer | of its peer | rounds | step, ms | step predicted | SM MHz | W "
    )
    columns += "| peak, GiB | peak predicted | loss |"
    rows = [columns, "|" + "---|" * columns.count(" |")]
    for work in works:
        rates = rates_of(work, lines)
        best = max([rates[run.label] for run in work.runs if run.side != "ours"], default=0.0)
        for run in work.runs:
            rows.append(_row(work, run, lines_of(work, run, lines), best, rates.get(run.beside, 0.0)))
    return "\n".join(rows)


def lines_of(work: Work, run: Run, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a run in all rounds."""
    return [line for line in lines if (line["work"], line["run"]) == (work.name, run.label)]


def rates_of(work: Work, lines: list[dict[str, Any]]) -> dict[str, float]:
    """Run -> tokens a second a GPU, the median over the rounds; 0 where it failed."""
    return {run.label: _median(lines_of(work, run, lines), "tokens_per_s_gpu") or 0.0 for run in work.runs}


def _row(work: Work, run: Run, lines: list[dict[str, Any]], best: float, beside: float) -> str:
    """Of one run in all rounds."""
    whole = [line for line in lines if "error" not in line]
    cells = [work.name, run.label]
    if not whole:
        reason = lines[-1]["error"] if lines else "was not run"
        return "| " + " | ".join([*cells, reason.replace("|", "/"), *[""] * 10]) + " |"
    rate = _median(whole, "tokens_per_s_gpu")
    step = _median(whole, "step_ms")
    peak = max(line.get("max_memory_allocated", 0) for line in whole) / 2**30
    rates = [line["tokens_per_s_gpu"] for line in whole]
    clocks = [clock_of(line).get("clock_mhz") for line in whole]
    watts = [clock_of(line).get("power_watts") for line in whole]
    cells += [
        f"{rate:,.0f}",
        f"{rate / best:.3f}" if best else "",
        f"{rate / beside:.3f}" if beside else "",
        f"{len(whole)} of {len(lines)}, {min(rates):,.0f} to {max(rates):,.0f}",
        f"{step:,.1f}",
        _off(whole[-1].get("plan_ms"), step),
        _mean_text(clocks),
        _mean_text(watts),
        f"{peak:.2f}",
        _off(whole[-1].get("plan_gib"), peak),
        f"{whole[-1].get('loss_first')} to {whole[-1].get('loss_last')}",
    ]
    return "| " + " | ".join(cells) + " |"


def _off(planned: float | None, measured: float) -> str:
    """By how much the plan says more or less."""
    if planned is None or not measured:
        return ""
    return f"{100 * (planned / measured - 1):+.1f} %"


def verdict(work: Work, lines: list[dict[str, Any]]) -> str:
    """Whether what a search names first is within 3 % of the best that was measured, in this command or before."""
    steps = {}
    for label in dict.fromkeys(line["run"] for line in lines if line["work"] == work.name):
        found = _median([line for line in lines if (line["work"], line["run"]) == (work.name, label)], "step_ms")
        if found is not None:
            steps[label] = found
    first = next((label for label in steps if label.startswith(FIRST)), None)
    if first is None:
        return f"{work.name}: the first was not measured"
    best = min(steps, key=lambda label: steps[label])
    behind = 100 * (steps[first] / steps[best] - 1)
    is_close = "within" if behind <= 3 else "not within"
    text = f"{work.name}: the first takes {steps[first]:,.1f} ms, {behind:.1f} % more than the best of {len(steps)} "
    return text + f"({best}, {steps[best]:,.1f} ms): {is_close} 3 %"


def _median(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return statistics.median(values) if values else None


def _mean_text(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):,.0f}" if known else ""


def depth_here(given: str) -> int:
    """Layers of the 8B that this GPU holds."""
    if given != "auto":
        return {"half": 16, "quarter": 8}[given]
    return 16 if detect_target().gpu_memory > HALF_FITS << 30 else 8


def kind_here() -> str:
    """What `tune` searches for: GPUs as they are here, H200 where there is none."""
    hardware = hardware_of(detect_target())
    return "H200" if hardware is None else hardware.name


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"of {', '.join(ROWS)}; over four GPUs {', '.join(ROWS_OF_FOUR)}; on a CPU smoke, smoke4"
    parser.add_argument("--rows", default=",".join(ROWS), help=text)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peer-rounds", type=int, help="rounds with peers, the first ones; 1 of 2: ours, peer, ours")
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=float, default=150, help="seconds that a run may take; of layouts each")
    parser.add_argument("--total", type=float, default=0, help="seconds after which everything ends; 0: none")
    parser.add_argument("--depth", default="auto", choices=["auto", "half", "quarter"], help="of the 8B's layers")
    parser.add_argument("--quick", action="store_true", help="one round of few steps, one mean length, main recipes")
    parser.add_argument("--only", choices=["ours", "peers"], help="one side alone")
    parser.add_argument("--match", default="", help="runs alone whose label holds this")
    parser.add_argument("--where", action="store_true", help="of layouts where each rank's time goes, from a profile")
    parser.add_argument("--top", type=int, default=5, help="how many of what tune names are measured")
    parser.add_argument("--skip", type=int, default=0, help="how many of them are not, the first ones")
    parser.add_argument("--peer-path", default=os.environ.get("PEER_PATH", "/tmp/peer_site"))
    parser.add_argument("--peer-scripts", default=os.environ.get("PEER_SCRIPTS", ".bench"))
    parser.add_argument("--out", help="a file that every line is appended to")
    parser.add_argument("--log", help="a file that all words of runs that failed are appended to")
    return parser


def works_of(args: argparse.Namespace) -> list[Work]:
    """The rows that are asked for, with the runs that are."""
    asked = args.rows.split(",")
    known = [*smoke_works(), *four_gpu_works()]
    if set(asked) & set(ROWS):
        known += all_works(depth_here(args.depth), quick=args.quick)
    for sequences in TUNED:
        if f"tune{sequences}" in asked:
            known += tuned_works(sequences, top=args.top, skip=args.skip, hardware=kind_here())
    unknown = set(asked) - {work.row for work in known}
    if unknown:
        every = {*ROWS, *(work.row for work in known), *(f"tune{sequences}" for sequences in TUNED)}
        raise SystemExit(f"--rows {','.join(sorted(unknown))}: no such row; there are {', '.join(sorted(every))}")
    found = []
    for row in dict.fromkeys(asked):
        for work in known:
            runs = []
            for run in work.runs:
                is_asked = args.only is None or (run.side == "ours") == (args.only == "ours")
                if is_asked and args.match in run.label:
                    runs.append(run)
            if work.row == row and runs:
                found.append(replace(work, runs=tuple(runs)))
    return found


def runs_in_round(work: Work, number: int, args: argparse.Namespace) -> tuple[Run, ...]:
    """Those that round `number`, from 1 on, has."""
    runs = []
    for run in work.runs:
        is_in = number == 1 or run.is_repeated
        if run.side != "ours" and args.peer_rounds is not None:
            is_in = is_in and number <= args.peer_rounds
        if is_in:
            runs.append(run)
    return tuple(runs)


def main() -> None:
    args = parser().parse_args()
    args.rounds = args.rounds or (1 if args.quick else 2)
    if args.quick:
        args.warmup = args.warmup or 5
        args.steps = args.steps or 8
    args.peer_path = str(Path(args.peer_path).resolve())
    args.peer_scripts = str(Path(args.peer_scripts).resolve())
    for name in ("out", "log"):
        if getattr(args, name):
            setattr(args, name, str(Path(getattr(args, name)).resolve()))
    works = works_of(args)
    earlier = [json.loads(text) for text in whole_lines(Path(args.out))] if args.out else []
    until = time.monotonic() + args.total if args.total else math.inf
    lines: list[dict[str, Any]] = []

    def keep(work: Work, run: Run, number: int, found: dict[str, Any], seconds: float) -> None:
        line = {"row": work.row, "work": work.name, "run": run.label, "side": run.side, "round": number}
        line |= found | {"seconds_in_all": round(seconds, 1)}
        if run.planned_ms:
            line["tuned_ms"] = run.planned_ms
        lines.append(line)
        text = json.dumps(line)
        print(text, flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(text + "\n")

    for row in dict.fromkeys(work.row for work in works):
        for number in range(1, args.rounds + 1):
            for work in [one for one in works if one.row == row]:
                for runs in launches_of(runs_in_round(work, number, args)):
                    since = time.monotonic()
                    for run, found in measured(runs, work, args, until=until):
                        now = time.monotonic()
                        keep(work, run, number, found, now - since)
                        since = now
    print(table(works, lines))
    for work in works:
        if work.is_tuned:
            print(verdict(work, earlier + lines))


if __name__ == "__main__":
    main()
