"""A folder of Hugging Face's becomes a run, is trained on real text, and becomes a folder again: a JSON line each.

  megaspec data prepare python --tokenizer bpe:32000 --out data/there
  python tests/benchmarks/bench_there_and_back.py folder out/dense --shape dense --tokenizer data/there.tokenizer.json
  python tests/benchmarks/bench_there_and_back.py run out/dense --text data/there [parallelism.tp=2]
  python tests/benchmarks/bench_there_and_back.py peer out/dense --text data/there
  torchrun --nproc-per-node 2 tests/benchmarks/bench_there_and_back.py peer out/dense --text data/there

`folder` writes random weights in bf16. `run` trains with init.from_hf, exports, verifies and writes a few words, each
through the command line. `peer` trains the same weights with transformers, on the first tokens of the same file: fp32
weights and Adam states, bf16 computation.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from megaspec.compose.compose import compose_dicts
from megaspec.core.units import GIB
from megaspec.hf.names import WeightTable, weight_table
from megaspec.hf.table import FAMILIES
from megaspec.hf.writing import out_tensors, write_folder
from megaspec.model.decoder.spec import DecoderSpec

VOCAB = 32_000
SEQ, BATCH, MICRO_BATCH, STEPS = 2048, 16, 4, 50
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen3 of 1.07 billion parameters
    "dense": (
        "qwen3",
        {
            "kind": "decoder", "n_layers": 16, "d_model": 2048, "n_heads": 16, "n_kv_heads": 8, "d_head": 128,
            "d_ffn": 8192, "vocab_size": VOCAB, "max_seq_len": 4096, "tied_embeddings": True,
            "layer": {"kind": "sequential"}, "positions": {"kind": "rotary", "base": 1_000_000.0},
            "norm": {"kind": "rms", "eps": 1e-6}, "attention": {"kind": "gqa", "qk_norm": "per_head"},
            "mlp": {"kind": "gated"},
        },
    ),
    # Experts like those of gpt-oss, half as wide, in 6 layers: 1.33 billion parameters
    "experts": (
        "gpt_oss",
        {
            "kind": "decoder", "n_layers": 6, "d_model": 1440, "n_heads": 32, "n_kv_heads": 8, "d_head": 64,
            "d_ffn": 1440, "vocab_size": VOCAB, "max_seq_len": 131_072, "layer": {"kind": "sequential"},
            "positions": {
                "kind": "rotary", "base": 150_000.0,
                "scaling": {"kind": "yarn", "factor": 32, "original_max_seq_len": 4096, "truncate": False},
            },
            "norm": {"kind": "rms", "eps": 1e-5},
            "attention": {"kind": "gqa", "sinks": True, "qkv_bias": True, "out_bias": True},
            "mlp": {"kind": "clamped", "limit": 7, "bias": True},
            "layer_types": {"local": {"mask": {"kind": "window", "size": 128}}, "global": {}},
            "layer_pattern": ["local", "global"],
            "moe": {"n_experts": 32, "top_k": 4, "d_expert": 1440, "router": {"logit_bias": True}},
        },
    ),
}  # fmt: skip


class RandomWeights:
    """Normal numbers of deviation 0.02 for every tensor, norms around 1. The same pool serves again and again."""

    path = Path("random")

    def __init__(self, table: WeightTable):
        self._shapes: dict[str, tuple[int, ...]] = {name: ours.shape for name, ours in table.ours.items()}
        draw = torch.Generator().manual_seed(1)
        self._pool = torch.randn(1 << 26, generator=draw).mul_(0.02).bfloat16()
        self._numbers = {name: number for number, name in enumerate(self._shapes)}
        self._last = ("", self._pool)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        found = self._whole(name)
        for dim, (first, count) in enumerate(zip(start or (), shape or (), strict=True)):
            found = found.narrow(dim, first, count)
        return found

    def _whole(self, name: str) -> torch.Tensor:
        # a tensor is read in many parts, one behind the other
        if name == self._last[0]:
            return self._last[1]
        shape = self._shapes[name]
        size = torch.Size(shape).numel()
        # of each tensor another part of the pool
        begin = self._numbers[name] * 7_654_321 % len(self._pool)
        found = self._pool[begin:]
        while len(found) < size:
            found = torch.cat((found, self._pool))
        found = found[:size].reshape(shape)
        if "norm" in name:
            found = 1 + found
        self._last = (name, found)
        return found


def folder(args: argparse.Namespace) -> None:
    """Random weights, a configuration and the tokenizer."""
    family_name, section = SHAPES[args.shape]
    model = _model_of(section)
    family = FAMILIES[family_name]
    table = weight_table(model.facts, family.names(model))
    weights = RandomWeights(table)
    config = family.write(model) | {"model_type": family_name, "torch_dtype": "bfloat16"}
    tokenizer = args.tokenizer.read_bytes()
    total = write_folder(
        args.folder,
        weights,
        out_tensors(table, weights, None),
        config=config,
        others={"tokenizer.json": tokenizer},
        shard_bytes=5 * 10**9,
    )
    _say(args, what="folder", shape=args.shape, gb=round(total / 1e9, 3))


def _model_of(section: dict[str, Any]) -> DecoderSpec:
    content = {
        "name": "there",
        "model": section,
        "precision": {"kind": "bf16"},
        "data": {"kind": "random", "vocab_size": VOCAB, "seq_len": 16},
        "train": {"steps": 1, "global_batch": 1},
        "launcher": {"ranks": 1},
    }
    model = compose_dicts(content).recipe.model
    assert isinstance(model, DecoderSpec)
    return model


def run(args: argparse.Namespace) -> None:
    """In, 50 steps, out and the comparison, each a process of its own."""
    place = args.folder.with_name(args.folder.name + "-work")
    shutil.rmtree(place, ignore_errors=True)
    # recipes are looked for in the folder that a command is started in
    (place / "recipes").mkdir(parents=True)
    there = args.folder.resolve()
    _megaspec(args, place, "recipe", ["hf", "recipe", there, "--out", "recipes/there.yaml"])
    words = ["recipe=there", "data=indexed", f"data.blend=[{{prefix: {args.text.resolve()}}}]"]
    words += [f"data.seq_len={SEQ}", f"train.steps={args.steps}", f"train.global_batch={BATCH}"]
    words += [
        f"train.micro_batch={MICRO_BATCH}",
        "train.sample=null",
        "optim.lr=3e-4",
        f"optim.schedule.warmup_steps={args.steps // 10}",
    ]
    words += ["precision=bf16", f"init.from_hf={there}", "name=there", *args.words]
    _megaspec(args, place, "train", ["train", *words])
    steps = [json.loads(text) for text in (place / "runs" / "there" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if line.get("tokens_per_second")]
    # what the first steps compile and tune is left out
    measured = steps[len(steps) // 5 :]
    _say(
        args,
        what="trained",
        words=" ".join(args.words),
        steps=args.steps,
        tokens_s=round(statistics.median(line["tokens_per_second"] for line in measured)),
        mfu_causal=round(statistics.median(line["mfu_causal"] for line in measured), 4),
        first_loss=round(steps[0]["loss"], 4),
        last_loss=round(steps[-1]["loss"], 4),
        gpu=_gpu(),
    )
    _megaspec(args, place, "export", ["hf", "export", "runs/there", "out", "--dtype", "bf16"])
    _megaspec(args, place, "verify", ["hf", "verify", "runs/there", "out"])
    _megaspec(args, place, "generate", ["generate", "hf:out", "import ", "--tokens", "12"])


def _megaspec(args: argparse.Namespace, place: Path, what: str, words: Sequence[object]) -> None:
    """A command, started in a folder; what it ends with, where it fails, is what this ends with."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "megaspec", *map(str, words)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=place)
    print(ended.stdout, file=sys.stderr, end="", flush=True)
    seconds = round(time.perf_counter() - begun, 1)
    _say(args, what=what, seconds=seconds, code=ended.returncode, said=ended.stdout.splitlines()[-8:])
    if ended.returncode:
        raise SystemExit(ended.returncode)


def peer(args: argparse.Namespace) -> None:
    """transformers' model of the same folder, sharded by FSDP2 over torchrun's ranks, or over one GPU.

    Weights are kept in fp32 beside bf16.
    """
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if "RANK" not in os.environ:
        # port 0: the system chooses a free one
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    rank = torch.distributed.get_rank()
    world = torch.distributed.get_world_size()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, attn_implementation=args.attention, use_cache=False
    )
    model.train().to(device)
    mesh = init_device_mesh("cuda", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses, seconds = [], []
    for ids in _batches(args.text, args.steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        total = 0.0
        mine = ids.chunk(world)[rank].to(device)
        parts = mine.split(MICRO_BATCH)
        for part in parts:
            loss = model(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
            total += loss.detach()
        # FSDP2 averages gradients over the ranks; what is told is averaged likewise
        torch.distributed.all_reduce(total, torch.distributed.ReduceOp.AVG)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        seconds.append(time.perf_counter() - begun)
    step = statistics.median(seconds[len(seconds) // 5 :])
    if rank == 0:
        _tell_peer(args, transformers.__version__, world, step, losses)
    torch.distributed.destroy_process_group()


def _tell_peer(args: argparse.Namespace, version: str, world: int, step: float, losses: list[float]) -> None:
    _say(
        args,
        what="peer",
        peer=f"transformers {version}",
        attention=args.attention,
        compile=args.compile,
        steps=args.steps,
        step_ms=round(1e3 * step, 1),
        tokens_s=round(BATCH * SEQ / step),
        first_loss=round(losses[0], 4),
        last_loss=round(losses[-1], 4),
        peak_gib=round(torch.cuda.max_memory_allocated() / GIB, 2),
        gpus=world,
        gpu=_gpu(),
    )


def _batches(text: Path, count: int) -> Iterator[torch.Tensor]:
    """[BATCH, SEQ] tokens, one behind the other in the file."""
    tokens = numpy.memmap(text.with_suffix(".bin"), dtype=numpy.uint16, mode="r")
    for step in range(count):
        begin = step * BATCH * SEQ
        batch = tokens[begin : begin + BATCH * SEQ].astype(numpy.int64)
        yield torch.from_numpy(batch).view(BATCH, SEQ)


def _gpu() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def _say(args: argparse.Namespace, *, what: str, **more: Any) -> None:
    print(json.dumps({"what": what, "folder": args.folder.name} | more), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("folder", "run", "peer"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*", help="of the recipe, for run: parallelism.tp=2")
    parser.add_argument("--shape", choices=SHAPES, default="dense")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json that the folder gets")
    parser.add_argument("--text", type=Path, help="prefix of what data prepare wrote")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--attention", default="sdpa", help="of the peer: transformers' attn_implementation")
    parser.add_argument("--compile", action="store_true", help="the peer's layers")
    args = parser.parse_intermixed_args()
    {"folder": folder, "run": run, "peer": peer}[args.what](args)


if __name__ == "__main__":
    main()
