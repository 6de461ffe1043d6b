"""How fast a folder of Hugging Face's comes in and goes out, and what host memory that takes: JSON lines.

  python tests/benchmarks/bench_hf.py make FOLDER --model llama3_8b
  python tests/benchmarks/bench_hf.py commands FOLDER
  python tests/benchmarks/bench_hf.py ranks FOLDER --ranks 2

`make` writes random weights in bf16. `commands` runs hf import, export and verify, each in a process of its own.
`ranks` is what init.from_hf does: tensor-parallel ranks read what they own, on GPUs where there are as many.
MB/s are of 10^6 bytes. `extra`: the most memory that a process had, without what it holds at its end and without what
it had before; the limit is 2 GiB and the largest tensor.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaspec.checkpoint.comm import DistComm, SoloComm
from megaspec.compose.compose import compose_dicts
from megaspec.core.units import GIB
from megaspec.estimate.target import detect_target
from megaspec.hf.folder import CONFIG, open_hf_folder
from megaspec.hf.names import WeightTable, weight_table
from megaspec.hf.short import short_section
from megaspec.hf.table import FAMILIES, family_of, read_model
from megaspec.hf.writing import out_tensors, write_folder
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import build_split_model, mesh_of
from megaspec.runtime.text_source import load_folder
from megaspec.spec import Spec

_POOL = 1 << 26


class RandomWeights:
    """Normal numbers for every tensor, out of one pool: the same bytes come again, which nothing here can tell."""

    path = Path("random")

    def __init__(self, table: WeightTable):
        self._shapes: dict[str, tuple[int, ...]] = {name: ours.shape for name, ours in table.ours.items()}
        draw = torch.Generator().manual_seed(1)
        self._pool = torch.randn(_POOL, generator=draw).mul_(0.02).bfloat16()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        size = torch.Size(shape or self._shapes[name]).numel()
        begin = hash((name, tuple(start or ()))) % _POOL
        found = self._pool[begin : begin + size]
        while len(found) < size:
            found = torch.cat((found, self._pool))[:size]
        return found.reshape(shape or self._shapes[name])


def make(args: argparse.Namespace) -> None:
    """A folder of random weights."""
    model = model_of(args)
    family = FAMILIES[args.family]
    table = weight_table(model.facts, family.names(model))
    weights = RandomWeights(table)
    tensors = out_tensors(table, weights, None)
    begun = time.perf_counter()
    config = family.write(model) | {"model_type": args.family, "torch_dtype": "bfloat16"}
    total = write_folder(args.folder, weights, tensors, config=config, others={}, shard_bytes=5 * 10**9)
    say("make", args, total, time.perf_counter() - begun)


def model_of(args: argparse.Namespace) -> DecoderSpec:
    """A choice of conf/model, or as many layers of it as are asked for."""
    return spec_of(args.model, args.layers, tp=1).model


def spec_of(model: Any, layers: int | None, *, tp: int) -> Spec:
    """One that is never trained. `model`: a choice of conf/model, or a section."""
    words = {"launcher": {"ranks": tp}, "parallelism": {"tp": tp}, "kernels": {"compile": "none"}}
    content = {
        "name": "bench",
        "model": model,
        "precision": {"kind": "bf16"},
        "data": {"kind": "random", "vocab_size": 1, "seq_len": 16},
        "train": {"steps": 1, "global_batch": 1},
    }
    composed = compose_dicts(content | words)
    recipe = composed.recipe
    changes: dict[str, Any] = {"data": recipe.data.model_copy(update={"vocab_size": recipe.model.vocab_size})}
    if layers is not None:
        changes["model"] = recipe.model.model_copy(update={"n_layers": layers})
    return resolve(
        recipe.model_copy(update=changes),
        detect_target().model_copy(update={"gpus": max(tp, detect_target().gpus)}),
        Facts(run_dir="-"),
    )


def commands(args: argparse.Namespace) -> None:
    """In, out, and the comparison, through the command line."""
    total = sum(file.stat().st_size for file in args.folder.glob("*.safetensors"))
    run = args.folder.with_name(args.folder.name + "-run")
    out = args.folder.with_name(args.folder.name + "-out")
    for folder in (run, out):
        shutil.rmtree(folder, ignore_errors=True)
    steps = {
        "import": ["import", str(args.folder), "--out", str(run)],
        "export": ["export", str(run), str(out)],
        "verify": ["verify", str(run), str(out), "--tensors-only"],
    }
    for name, words in steps.items():
        begun = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "megaspec", "hf", *words], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"megaspec hf {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
        say(name, args, total, time.perf_counter() - begun, peak_gib=round(used.ru_maxrss / 2**20, 2))
    for folder in (run, out):
        shutil.rmtree(folder)


def ranks(args: argparse.Namespace) -> None:
    """Starts itself under torchrun."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    words += ["-m", "tests.benchmarks.bench_hf", "rank", str(args.folder), "--device", args.device]
    raise SystemExit(subprocess.run(words).returncode)


def rank(args: argparse.Namespace) -> None:
    """One of the ranks."""
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = args.device == "auto" and torch.cuda.device_count() >= world
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    with open_hf_folder(args.folder) as folder:
        model = read_model(folder.config, str(folder.path / CONFIG))
        family = family_of(folder.config, str(folder.path / CONFIG))
        table = weight_table(model.facts, family.names(model))
        largest = max(entry.bytes for entry in folder.tensors.values())
        total = sum(entry.bytes for entry in folder.tensors.values())
    del table
    spec = spec_of(short_section(model), None, tp=world)
    split = build_split_model(spec, mesh=mesh_of(spec, rank=number, device=device))
    own = sum(weight.nbytes for chunk in split.chunks for weight in chunk.parameters())
    on_host = 0 if cuda else own
    dist.barrier()
    before = resident()
    begun = time.perf_counter()
    load_folder(args.folder, split, DistComm(device=device) if world > 1 else SoloComm())
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - begun
    # a CPU's weights, which are NaN before, lie in memory already
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"own_gib": round(own / GIB, 2), "extra_gib": round(extra / GIB, 3)})
    if number == 0:
        limit = round((2 * GIB + largest) / GIB, 2)
        say("ranks", args, total, seconds, device=device.type, ranks=found, on_host_gib=round(on_host / GIB, 2),
            limit_gib=limit)  # fmt: skip
    dist.destroy_process_group()


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def say(what: str, args: argparse.Namespace, total: int, seconds: float, **more: Any) -> None:
    """A line of JSON."""
    line = {"what": what, "folder": args.folder.name, "gb": round(total / 1e9, 2), "seconds": round(seconds, 1)}
    print(json.dumps(line | {"mb_s": round(total / 1e6 / seconds)} | more), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "commands", "ranks", "rank"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama3_8b", help="choice of conf/model")
    parser.add_argument("--family", default="llama")
    parser.add_argument("--layers", type=int, help="other than the choice's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    args = parser.parse_args()
    {"make": make, "commands": commands, "ranks": ranks, "rank": rank}[args.what](args)


if __name__ == "__main__":
    main()
