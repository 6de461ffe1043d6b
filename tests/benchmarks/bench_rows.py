"""Ours and the peers in turn on one GPU: the rows of a comparison, in one command.

python tests/benchmarks/bench_rows.py --rows fp8,packed8b --rounds 2 --out rows.jsonl --peer-path /tmp/peer_site
python tests/benchmarks/bench_rows.py --quick

Each run is a process of its own with a time limit, and one JSON line; one that fails is a line with its reason. Rounds
come one after the other, in each all runs of a row, so that what drifts on a machine drifts for both sides. Last comes
a table: tokens a second, every one of them of a document and none of padding, with the SMs' clock and the power over
the measured steps, and the ratio to the best peer of the same work.

--peer-path (or PEER_PATH): a folder with the peers' packages below it, `mcore`, `te` (Transformer Engine), `tt` and
`ao` (torchtitan and torchao). --peer-scripts (or PEER_SCRIPTS): a folder with torchtitan_bench.py, for the row that
has it.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspec_kernels.catalog import CATALOG

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OURS = HERE / "bench_train.py"
MCORE = HERE / "peers" / "mcore_rows.py"
TORCHTITAN = "torchtitan_bench.py"
# Of the GPU's memory, in GiB, from which on a half of Llama-3-8B fits; else a quarter of it.
HALF_FITS = 110
# Attention that computes what documents hide, or is no kernel at all.
_NO_KERNELS = ("reference",)
# All layers of the peer are in fp8, so ours are, too.
_ALL_IN_FP8 = ("--precision", "fp8", "--set", "precision.first_layers_bf16=0", "--set", "precision.last_layers_bf16=0")
MEANS = (256, 1024, 4096)


@dataclass(frozen=True)
class Run:
    """One side of a comparison."""

    label: str
    side: str
    """`ours`, `mcore` or `torchtitan`."""
    words: tuple[str, ...]
    """Behind the script's name."""


@dataclass(frozen=True)
class Work:
    """What both sides are given: ratios are taken within it."""

    row: str
    name: str
    runs: tuple[Run, ...]


def ours(label: str, *words: str) -> Run:
    return Run(f"megaspec {label}", "ours", words)


def mcore(label: str, *words: str) -> Run:
    return Run(f"mcore+TE {label}", "mcore", words)


def all_works(depth: int, *, quick: bool) -> Iterator[Work]:
    """Every row. `depth`: layers of the 8B; quick: one mean length, and of each side the main recipes alone."""
    big = ("--model", f"llama8b{depth}", "--seq", "8192", "--accum", "4")
    small = ("--model", "llama1b", "--seq", "8192", "--mbs", "2")
    name = f"8B, {depth} layers, s8192"
    recipes = ("delayed", "tensorwise") if quick else ("delayed", "tensorwise", "rowwise", "blockwise")
    runs = [ours(recipe, *big, *_ALL_IN_FP8, "--set", f"precision.recipe={recipe}") for recipe in recipes]
    runs += [mcore(recipe, *big, "--fp8", recipe) for recipe in ("delayed", "tensorwise")]
    if not quick:
        # what a peer's own kernel of SwiGLU, and a longer history, give it
        runs.append(mcore("delayed, TE's SwiGLU", *big, "--fp8", "delayed", "--te-activation"))
    yield Work("fp8", f"{name}, fp8", tuple(runs))
    yield Work("bf16", f"{name}, bf16", (ours("bf16", *big), mcore("bf16", *big)))
    yield from packed_works("packed8b", name, big, quick=quick)
    yield Work("1b", "1B, s8192, bf16", (ours("bf16", *small), mcore("bf16", *small)))
    yield from packed_works("packed1b", "1B, s8192", small, quick=quick)
    few = ("--model", "llama1b", "--seq", "2048", "--mbs", "1")
    runs = [ours("bf16", *few), Run("torchtitan, CUDA graphs", "torchtitan", (*few, "--attn", "sdpa"))]
    if not quick:
        runs.append(mcore("bf16", *few))
    yield Work("1b2k", "1B, 2,048 tokens a step", tuple(runs))
    experts = ("--model", "gptoss6", "--seq", "4096", "--mbs", "2")
    yield Work("gptoss", "6 layers like gpt-oss-20b, s4096, bf16", (ours("bf16", *experts), mcore("bf16", *experts)))
    in_fp8 = (
        ours("tensorwise", *experts, *_ALL_IN_FP8, "--set", "precision.recipe=tensorwise"),
        mcore("delayed", *experts, "--fp8", "delayed"),
        mcore("tensorwise", *experts, "--fp8", "tensorwise"),
    )
    yield Work("gptoss", "6 layers like gpt-oss-20b, s4096, fp8", in_fp8)


def packed_works(row: str, name: str, words: tuple[str, ...], *, quick: bool) -> Iterator[Work]:
    """Packed documents, for each kernel of attention; beside them rows of one document, which need no mask."""
    means = MEANS[1:2] if quick else MEANS
    kernels = [one for one in CATALOG["attention"].implementations if one not in _NO_KERNELS]
    for mean in means:
        packed = (*words, "--documents", str(mean))
        runs = [ours(kernel, *packed, "--attention", kernel) for kernel in kernels]
        runs.append(mcore("thd", *packed))
        yield Work(row, f"{name}, documents of {mean:,}", tuple(runs))
    yield Work(row, f"{name}, one document a row", (ours("sdpa", *words, "--attention", "sdpa"),))


def smoke_works() -> Iterator[Work]:
    """A small model that a CPU trains: whether the script itself works."""
    words = ("--model", "tiny", "--seq", "128", "--cross-entropy", "reference", "--compile", "none")
    packed = ours("packed", *words, "--documents", "32", "--set", "kernels.adamw=reference")
    failing = ours("fails", *words, "--set", "train.nothing=1")
    yield Work("smoke", "tiny", (packed, failing, mcore("thd", "--model", "llama1b", "--documents", "32")))


def command_of(run: Run, args: argparse.Namespace) -> tuple[list[str], str]:
    """-> what is started, and its PYTHONPATH. Raises LookupError where a peer's script is missing."""
    repository = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "launchers")]
    length = ["--warmup", str(args.warmup), "--steps", str(args.steps)]
    if run.side == "ours":
        # what kernels of ours import besides
        repository += [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        return [sys.executable, "-P", str(OURS), *run.words, *length], os.pathsep.join(repository)
    sites = Path(args.peer_path)
    if run.side == "mcore":
        path = [*repository, str(sites / "mcore"), str(sites / "te")]
        return [sys.executable, "-P", str(MCORE), *run.words, *length], os.pathsep.join(path)
    script = Path(args.peer_scripts) / TORCHTITAN
    if not script.exists():
        raise LookupError(f"{script} is not there; give --peer-scripts or PEER_SCRIPTS")
    path = [str(sites / "tt"), str(sites / "ao")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1"]
    return [*torchrun, str(script), *run.words, *length], os.pathsep.join(path)


def measured(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """What a run prints, or `error`: why it has not."""
    try:
        command, path = command_of(run, args)
    except LookupError as error:
        return {"error": str(error)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            # what it writes goes nowhere near the sources
            cwd=tempfile.gettempdir(),
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        is_late = False
        try:
            code = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            # with what it has started: the next run needs the GPU
            _end(process)
        out.seek(0)
        err.seek(0)
        if is_late:
            return {"error": f"took longer than {args.limit:g} s; last it said: {_last_words(err.read())}"}
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        if code == 0 and lines:
            return json.loads(lines[-1])
        return {"error": f"ended with {code}: {_last_words(err.read())}"}


def _end(process: subprocess.Popen) -> None:
    """Ends a process and its group, which may have outlived it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(text: str) -> str:
    """From the last line that names an error on, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "nothing"
    begin = len(lines) - 1
    for number, line in enumerate(lines):
        if "Error" in line or "error:" in line:
            begin = number
    return "; ".join(lines[begin:])[:400]


def clock_of(line: dict[str, Any]) -> dict[str, Any]:
    """Clock and power of a line; a peer whose script reads none has none."""
    return line.get("clock") or {}


def table(works: list[Work], lines: list[dict[str, Any]]) -> str:
    """Medians over the rounds, the fastest and slowest round, and ratios to the best peer of the same work."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault((line["work"], line["run"]), []).append(line)
    columns = "| work | run | tok/s a GPU | of the best peer | rounds | step, ms | SM MHz | W | peak, GiB | loss |"
    rows = [columns, "|" + "---|" * columns.count(" |")]
    for work in works:
        best = 0.0
        for run in work.runs:
            if run.side != "ours":
                best = max(best, _median(found.get((work.name, run.label), []), "tokens_per_s_gpu") or 0.0)
        for run in work.runs:
            rows.append(_row(work, run, found.get((work.name, run.label), []), best))
    return "\n".join(rows)


def _row(work: Work, run: Run, lines: list[dict[str, Any]], best: float) -> str:
    """Of one run in all rounds."""
    whole = [line for line in lines if "error" not in line]
    cells = [work.name, run.label]
    if not whole:
        reason = lines[-1]["error"] if lines else "was not run"
        return "| " + " | ".join([*cells, reason.replace("|", "/"), *[""] * 7]) + " |"
    rate = _median(whole, "tokens_per_s_gpu")
    rates = [line["tokens_per_s_gpu"] for line in whole]
    clocks = [clock_of(line).get("clock_mhz") for line in whole]
    watts = [clock_of(line).get("power_watts") for line in whole]
    cells += [
        f"{rate:,.0f}",
        f"{rate / best:.3f}" if best else "",
        f"{len(whole)} of {len(lines)}, {min(rates):,.0f} to {max(rates):,.0f}",
        f"{_median(whole, 'step_ms'):,.1f}",
        _mean_text(clocks),
        _mean_text(watts),
        f"{max(line.get('max_memory_allocated', 0) for line in whole) / 2**30:.1f}",
        f"{whole[-1].get('loss_first')} to {whole[-1].get('loss_last')}",
    ]
    return "| " + " | ".join(cells) + " |"


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
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return 16 if int(found.stdout.splitlines()[0]) > HALF_FITS * 1024 else 8


def parser() -> argparse.ArgumentParser:
    names = sorted({work.row for work in all_works(16, quick=False)})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(names), help=f"of {', '.join(names)}, or smoke")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=float, default=150, help="seconds that a run may take")
    parser.add_argument("--total", type=float, default=0, help="seconds after which no other run begins; 0: none")
    parser.add_argument("--depth", default="auto", choices=["auto", "half", "quarter"], help="of the 8B's layers")
    parser.add_argument("--quick", action="store_true", help="one round of few steps, one mean length, main recipes")
    parser.add_argument("--only", choices=["ours", "peers"], help="one side alone")
    parser.add_argument("--match", default="", help="runs alone whose label holds this")
    parser.add_argument("--peer-path", default=os.environ.get("PEER_PATH", "/tmp/peer_site"))
    parser.add_argument("--peer-scripts", default=os.environ.get("PEER_SCRIPTS", ".bench"))
    parser.add_argument("--out", help="a file that every line is appended to")
    return parser


def works_of(args: argparse.Namespace) -> list[Work]:
    """The rows that are asked for, with the runs that are."""
    asked = args.rows.split(",")
    known = [*smoke_works()]
    if asked != ["smoke"]:
        known = [*all_works(depth_here(args.depth), quick=args.quick), *known]
    unknown = set(asked) - {work.row for work in known}
    if unknown:
        raise SystemExit(f"--rows {','.join(sorted(unknown))}: no such row")
    found = []
    for work in known:
        runs = []
        for run in work.runs:
            is_asked = args.only is None or (run.side == "ours") == (args.only == "ours")
            if is_asked and args.match in run.label:
                runs.append(run)
        if work.row in asked and runs:
            found.append(Work(work.row, work.name, tuple(runs)))
    return found


def main() -> None:
    args = parser().parse_args()
    args.rounds = args.rounds or (1 if args.quick else 2)
    args.warmup = args.warmup or (5 if args.quick else 8)
    args.steps = args.steps or (8 if args.quick else 15)
    args.peer_path = str(Path(args.peer_path).resolve())
    args.peer_scripts = str(Path(args.peer_scripts).resolve())
    works = works_of(args)
    begun = time.monotonic()
    lines = []
    for row in dict.fromkeys(work.row for work in works):
        for number in range(args.rounds):
            for work in [one for one in works if one.row == row]:
                for run in work.runs:
                    line = {"row": row, "work": work.name, "run": run.label, "side": run.side, "round": number + 1}
                    started = time.monotonic()
                    if args.total and started - begun > args.total:
                        line["error"] = f"not begun: {args.total:g} s were over"
                    else:
                        line |= measured(run, args)
                    line["seconds_in_all"] = round(time.monotonic() - started, 1)
                    lines.append(line)
                    text = json.dumps(line)
                    print(text, flush=True)
                    if args.out:
                        with open(args.out, "a") as file:
                            file.write(text + "\n")
    print(table(works, lines))


if __name__ == "__main__":
    main()
