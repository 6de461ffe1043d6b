"""Tokens a second of a stream of text, beside the token files that `data prepare` makes of the same text.

    python tests/benchmarks/bench_stream.py [--megabytes 24] [--sequences 1024] [--rounds 3]

No training: sequences of 2,048 tokens are read one after the other, 32 of them first, which are not timed. The rounds
are interleaved. CPU time, of the workers too and of their start, says what a loaded machine hides. The indexed source
reads what the prepared files hold; what preparing them took is said beside it.
Prints a JSON line and appends it to the results.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from datetime import date
from itertools import islice
from pathlib import Path

import tokenizers
from bench_data_prepare import corpus, write_corpus

from megaspec.data.loader import open_source
from megaspec.data.prepare import prepare
from megaspec.data.spec import BlendPart, DataSpec, IndexedSpec, StreamFiles, StreamSpec
from megaspec.data.tokenizer import load_tokenizer, train_bpe

RESULTS = Path(__file__).parent / "results" / "stream.jsonl"
SEQ_LEN = 2048
LANES = 32
SEED = 1
VOCAB_SIZE = 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=24)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), args)
    line = json.dumps(result)
    print(line)
    with open(RESULTS, "a") as file:
        file.write(line + "\n")
    return 0


def compare(folder: Path, args: argparse.Namespace) -> dict:
    load_before = os.getloadavg()[0]
    text = folder / "in.jsonl"
    tokenizer = folder / "tokenizer.json"
    write_corpus(text, int(args.megabytes * 10**6))
    tokenizer.write_bytes(train_bpe(islice(corpus(), 400), VOCAB_SIZE).text)
    began = time.perf_counter()
    prepare([str(text)], str(folder / "data"), load_tokenizer(tokenizer), workers=2)
    prepare_seconds = time.perf_counter() - began
    ways: dict[str, DataSpec] = {"indexed": indexed(folder / "data")}
    for workers in (0, 1, 2):
        ways[f"stream, {workers} workers"] = stream(text, tokenizer, workers=workers)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, spec in ways.items():
            cpu_before = cpu_seconds()
            rates[way].append(tokens_per_second(spec, args.sequences))
            million_tokens = (LANES + args.sequences) * SEQ_LEN / 10**6
            cpu[way].append((cpu_seconds() - cpu_before) / million_tokens)
    return {
        "benchmark": "stream",
        "date": str(date.today()),
        "command": f"bench_stream.py --megabytes {args.megabytes:g} --sequences {args.sequences} "
        f"--rounds {args.rounds}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "load_before": load_before,
        "jsonl_bytes": text.stat().st_size,
        "prepare_seconds": prepare_seconds,
        "tokens_per_second": rates,
        "cpu_seconds_per_million_tokens": cpu,
        "median_cpu_seconds_per_million_tokens": {way: statistics.median(values) for way, values in cpu.items()},
        "median_tokens_per_second": {way: statistics.median(values) for way, values in rates.items()},
    }


def indexed(prefix: Path) -> IndexedSpec:
    return IndexedSpec(
        kind="indexed",
        blend=(BlendPart(prefix=str(prefix)),),
        split=(1.0, 0.0, 0.0),
        cache=str(prefix.parent / "cache"),
        seq_len=SEQ_LEN,
        seed=SEED,
    )


def stream(text: Path, tokenizer: Path, *, workers: int) -> StreamSpec:
    return StreamSpec(
        kind="stream",
        files=(StreamFiles(path=str(text)),),
        tokenizer=str(tokenizer),
        lanes=LANES,
        workers=workers,
        seq_len=SEQ_LEN,
        seed=SEED,
    )


def cpu_seconds() -> float:
    """Of this process and of its workers that have ended. Other work on the machine changes it little."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def tokens_per_second(spec: DataSpec, n_sequences: int) -> float:
    source = open_source(spec, split="train", seed=SEED, segments=(LANES + n_sequences,), vocab_size=VOCAB_SIZE)
    for position in range(LANES):
        source.read(position)
    began = time.perf_counter()
    for position in range(LANES, LANES + n_sequences):
        source.read(position)
    seconds = time.perf_counter() - began
    if isinstance(spec, StreamSpec):
        source.close()
    return n_sequences * spec.seq_len / seconds


if __name__ == "__main__":
    raise SystemExit(main())
