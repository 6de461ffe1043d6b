"""Speed of data preparation beside megatron-core's IndexedDatasetBuilder: same JSONL, tokenizer and worker count.

    python tests/benchmarks/bench_data_prepare.py --megatron FOLDER [--megabytes 48] [--workers 2] [--rounds 3]

FOLDER holds megatron-core 0.16.1 (`pip install megatron-core==0.16.1 --no-deps --target FOLDER`). The rounds are
interleaved, each run is a process of its own, imports are not timed, the files must be equal byte for byte. Megatron's
builder is fed in two ways: line by line through a pool with chunks of 32, as its own tool does, and the same pool with
the tokenizer called on whole chunks. Prints a JSON line and appends it to the results.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import tokenizers

from megaspec.data import python_corpus
from megaspec.data.prepare import prepare
from megaspec.data.tokenizer import FileTokenizer, load_tokenizer, train_bpe

RESULTS = Path(__file__).parent / "results" / "data_prepare.jsonl"
WAYS = ("megaspec", "megatron", "megatron_batched")
CHUNK = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, help="folder that holds megatron-core")
    parser.add_argument("--megabytes", type=float, default=48)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        way, jsonl, out, tokenizer = args.run
        print(json.dumps(timed(way, jsonl, out, tokenizer, args)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), args)
    line = json.dumps(result)
    print(line)
    with open(RESULTS, "a") as file:
        file.write(line + "\n")
    return 0 if result["bytes_equal"] and result["megaspec_over_best_megatron"] <= 1 else 1


def compare(folder: Path, args: argparse.Namespace) -> dict:
    load_before = os.getloadavg()[0]
    jsonl, tokenizer = folder / "in.jsonl", folder / "tokenizer.json"
    n_documents = write_corpus(jsonl, int(args.megabytes * 10**6))
    tokenizer.write_bytes(train_bpe(islice(corpus(), 400), 8192).text)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    digests = set()
    for number in range(args.rounds):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            out = folder / f"{way}-{number}"
            flags = ["--megatron", str(args.megatron), "--workers", str(args.workers)]
            command = [sys.executable, __file__, *flags, "--run", way, str(jsonl), str(out), str(tokenizer)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment())
            measured = json.loads(done.stdout.splitlines()[-1])
            seconds[way].append(measured["seconds"])
            cpu_seconds[way].append(measured["cpu_seconds"])
            digests.add(digest(out))
            for ending in (".bin", ".idx"):
                Path(f"{out}{ending}").unlink()
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    cpu_medians = {way: statistics.median(values) for way, values in cpu_seconds.items()}
    return {
        "benchmark": "data_prepare",
        "megatron_core": "0.16.1",
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "workers": args.workers,
        "jsonl_bytes": jsonl.stat().st_size,
        "documents": n_documents,
        "load_average": [load_before, os.getloadavg()[0]],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "median_seconds": medians,
        "median_cpu_seconds": cpu_medians,
        "megaspec_mb_per_s": jsonl.stat().st_size / 1e6 / medians["megaspec"],
        "megaspec_over_best_megatron_cpu": cpu_medians["megaspec"] / min(cpu_medians[way] for way in WAYS[1:]),
        "megaspec_over_megatron": medians["megaspec"] / medians["megatron"],
        "megaspec_over_best_megatron": medians["megaspec"] / min(medians[way] for way in WAYS[1:]),
        "bytes_equal": len(digests) == 1,
    }


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def digest(prefix: Path) -> str:
    data = Path(f"{prefix}.bin").read_bytes() + b"|" + Path(f"{prefix}.idx").read_bytes()
    return hashlib.sha256(data).hexdigest()


def corpus() -> Iterator[str]:
    while True:
        for unit in python_corpus.units():
            yield from (text for text in python_corpus.documents(unit.kind, unit.name) if text.strip())


def write_corpus(path: Path, n_bytes: int) -> int:
    """JSON lines of documents of at most 4,000 characters; returns how many."""
    count = 0
    with open(path, "w") as file:
        for text in corpus():
            for start in range(0, len(text), 4000):
                piece = text[start : start + 4000]
                if piece.strip():
                    file.write(json.dumps({"text": piece}) + "\n")
                    count += 1
            if file.tell() >= n_bytes:
                return count
    return count


def timed(way: str, jsonl: str, out: str, tokenizer: str, args: argparse.Namespace) -> dict[str, float]:
    """Wall time, and the processor time of this process and its workers: what a busy machine disturbs less."""
    job = prepare_with_megaspec if way == "megaspec" else import_megatron(args.megatron, way)
    loaded = load_tokenizer(tokenizer)
    start, cpu_start = time.perf_counter(), cpu_time()
    job(jsonl, out, loaded, tokenizer, args.workers)
    return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_time() - cpu_start}


def cpu_time() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def prepare_with_megaspec(jsonl: str, out: str, loaded: FileTokenizer, path: str, workers: int) -> None:
    prepare([jsonl], out, loaded, workers=workers)


def import_megatron(folder: Path, way: str) -> Callable[..., None]:
    # megatron-core lies outside of every package path, and only the runs that need it may import it.
    sys.path.insert(0, str(folder))
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    def job(jsonl: str, out: str, loaded: FileTokenizer, path: str, workers: int) -> None:
        builder = IndexedDatasetBuilder(f"{out}.bin", dtype=DType.optimal_dtype(loaded.vocab_size))
        context = multiprocessing.get_context("fork")
        with context.Pool(workers, initialize, (path,)) as pool, open(jsonl) as file:
            if way == "megatron":
                documents = pool.imap(encode_line, file, CHUNK)
            else:
                chunks = iter(lambda: list(islice(file, CHUNK)), [])
                documents = (ids for chunk in pool.imap(encode_chunk, chunks) for ids in chunk)
            for ids in documents:
                builder.add_document(ids, [len(ids)])
            pool.close()
            pool.join()
        builder.finalize(f"{out}.idx")

    return job


_worker: dict = {}


def initialize(path: str) -> None:
    _worker["tokenizer"] = tokenizers.Tokenizer.from_file(path)
    _worker["eod"] = _worker["tokenizer"].token_to_id("<|endoftext|>")


def encode_line(line: str) -> list[int]:
    ids = _worker["tokenizer"].encode(json.loads(line)["text"], add_special_tokens=False).ids
    ids.append(_worker["eod"])
    return ids


def encode_chunk(lines: list[str]) -> list[list[int]]:
    texts = [json.loads(line)["text"] for line in lines]
    encoded = _worker["tokenizer"].encode_batch_fast(texts, add_special_tokens=False)
    return [[*encoding.ids, _worker["eod"]] for encoding in encoded]


if __name__ == "__main__":
    sys.exit(main())
