"""Training throughput on random tokens: one JSON line, the same fields and arithmetic as the peers' scripts.

python tests/benchmarks/bench_train.py --model llama1b --mbs 2
torchrun --nproc_per_node=4 tests/benchmarks/bench_train.py --model llama8b --accum 2 --set parallelism.pp=4

`--set` takes any key of a recipe, its value in JSON or as a plain word; the rest is what `megaspec train` would do.
`--where` adds each rank's time in arithmetic, exposed messages and idle, from a profile after the measurement.
"""

import argparse
import copy
import faulthandler
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megaspec.core.document_lengths import begun_at_random
from megaspec.data.batch import Batch
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.step_time import step_time
from megaspec.estimate.target import Target, detect_target
from megaspec.estimate.throughput import throughput_of
from megaspec.nn.moe.module import Moe
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.profiling.exposed import profiled
from megaspec.profiling.power import Meter
from megaspec.profiling.recording import gpu_uuid
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.loop import Mark, StepClock
from megaspec.runtime.rank import leave_room
from megaspec.runtime.step import StepResult, train_step
from megaspec.spec import Spec
from megaspec_kernels.attention.documents import Documents, documents_of
from tests.benchmarks.packed_rows import packed_rows

QWEN3MOE8 = {
    "n_layers": 8, "d_model": 2048, "n_heads": 32, "n_kv_heads": 4, "d_head": 128, "d_ffn": 6144,
    "vocab_size": 151936, "positions": {"kind": "rotary", "base": 1e6},
    "attention": {"kind": "gqa", "qk_norm": "per_head"},
    "moe": {"n_experts": 128, "top_k": 8, "d_expert": 768},
}  # fmt: skip
LLAMA8B = {
    "n_layers": 32, "d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "d_head": 128, "d_ffn": 14336,
    "vocab_size": 128256, "positions": {"kind": "rotary", "base": 5e5},
}  # fmt: skip
# As large as gpt-oss-20b's layers, whose windows and sinks are for --set.
GPTOSS6 = {
    "n_layers": 6, "d_model": 2880, "n_heads": 64, "n_kv_heads": 8, "d_head": 64, "d_ffn": 2880,
    "vocab_size": 201088, "positions": {"kind": "rotary", "base": 1.5e5},
    "moe": {"n_experts": 32, "top_k": 4, "d_expert": 2880},
}  # fmt: skip
# For a CPU: whether a script works.
TINY = {
    "n_layers": 2, "d_model": 256, "n_heads": 4, "n_kv_heads": 2, "d_head": 64, "d_ffn": 512, "vocab_size": 1024,
    "positions": {"kind": "rotary", "base": 1e4},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "tiny16": TINY | {"n_layers": 16},
    "llama1b": {
        "n_layers": 16, "d_model": 2048, "n_heads": 32, "n_kv_heads": 8, "d_head": 64, "d_ffn": 8192,
        "vocab_size": 128256, "tied_embeddings": True, "positions": {"kind": "rotary", "base": 5e5},
    },
    "llama8b": LLAMA8B,
    "llama8b16": LLAMA8B | {"n_layers": 16},
    "llama8b8": LLAMA8B | {"n_layers": 8},
    "qwen3moe8": QWEN3MOE8,
    "gptoss6": GPTOSS6,
    "qwen3moe4": QWEN3MOE8 | {"n_layers": 4},
}  # fmt: skip
PEAK = 989e12
# Micro batches that are trained on in turn.
POOL = 8
SEED = 7


def spec_of(args: argparse.Namespace, world: int) -> Spec:
    """The Spec of one measurement."""
    return resolve(recipe_of(args, world), target_of(world), facts_of(args.documents))


def facts_of(documents: int) -> Facts:
    """`documents`: tokens of one on average; 0: there are none."""
    if not documents:
        return Facts(run_dir="-")
    return Facts(run_dir="-", document_lengths=begun_at_random(1 / documents))


def target_of(world: int) -> Target:
    """This machine. Where ranks share its GPUs (see device_here), as if each had its own."""
    target = detect_target()
    shared = 0 < target.gpus < world and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return target.model_copy(update={"gpus": world}) if shared else target


def recipe_of(args: argparse.Namespace, world: int) -> Recipe:
    """What is measured."""
    fields: dict[str, Any] = {
        "name": "bench",
        "model": copy.deepcopy(MODELS[args.model]) | {"kind": "decoder", "max_seq_len": args.seq},
        "parallelism": {"tp": args.tp},
        "precision": {"kind": args.precision},
        "data": {
            "kind": "random",
            "vocab_size": MODELS[args.model]["vocab_size"],
            "seq_len": args.seq,
            "seed": 1,
            "document_mask": args.documents > 0,
        },
        "optim": {"kind": "adamw", "lr": 1e-4, "schedule": {"kind": "constant"}},
        "kernels": {"attention": args.attention, "cross_entropy": args.cross_entropy, "compile": args.compile},
        "train": {"steps": 1, "micro_batch": args.mbs},
        "log": {"tensorboard": False},
        "launcher": {"ranks": world},
    }
    for word in args.set:
        path, _, text = word.partition("=")
        *above, last = path.split(".")
        here = fields
        for part in above:
            here = here.setdefault(part, {})
        try:
            here[last] = json.loads(text)
        except ValueError:
            here[last] = text
    own = fields["parallelism"]
    dp = world // (own["tp"] * own.get("pp", 1) * own.get("cp", 1))
    fields["train"]["global_batch"] = args.mbs * args.accum * dp
    return Recipe.model_validate_json(json.dumps(fields))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama1b", choices=MODELS)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--mbs", type=int, default=1)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--cross-entropy", default="triton")
    parser.add_argument("--compile", default="block")
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--warmup-accum", type=int, default=0, help="micro batches of a warm-up step; 0: as all steps")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--profile", default="")
    parser.add_argument("--documents", type=int, default=0, help="tokens of a document on average; 0: no documents")
    parser.add_argument("--force-balance", type=int, default=1, help="0: experts are taken as the learned router says")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--where", action="store_true")
    parser.add_argument("--patience", type=float, default=0, help="seconds until a run that hangs says where, and ends")
    return parser


def start() -> tuple[int, int, torch.device]:
    """-> rank, world size, device; with the process group of ranks that torchrun has started."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = device_here()
    if world > 1:
        join(device)
    return rank, world, device


def device_here() -> torch.device:
    """The rank's GPU, which becomes torch's current one, or the CPU. NCCL 2.30 and later takes several ranks to a GPU
    where NCCL_MULTI_RANK_GPU_ENABLE=1."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(device: torch.device, **more: Any) -> None:
    """Makes the process group of ranks that torchrun has started; `more`: for init_process_group."""
    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None, **more)


def join_again(device: torch.device, name: str) -> None:
    """Leaves all groups, whose memory the next layout can have, and makes the world anew. `name`: another each time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    join(device, store=dist.PrefixStore(name, store), rank=rank, world_size=world)


def stepper(args: argparse.Namespace, spec: Spec, mesh: Mesh) -> Callable[[int], StepResult]:
    """Builds the run. -> what trains one step on random tokens."""
    built = build(spec, mesh=mesh)
    initialise(built)
    if args.force_balance:
        # as the peers measure: every expert gets as many tokens as any other
        for moe in (m for chunk in built.chunks for m in chunk.modules() if isinstance(m, Moe)):
            moe.force_balance()
    scaler = build_scaler(spec.precision, device=mesh.device)
    generator = torch.Generator(device=mesh.device).manual_seed(SEED + mesh.index("dp"))
    pool = []
    of_pool: list[Documents | None] = []
    for _ in range(POOL):
        shape = (args.mbs, args.seq + 1)
        pool.append(torch.randint(0, spec.model.vocab_size, shape, device=mesh.device, generator=generator))
        of_pool.append(None)
    if args.documents:
        pool, of_pool = packed_pool(args, spec, mesh)
    mask = torch.ones(args.mbs, args.seq, dtype=torch.bool, device=mesh.device)
    ids = torch.arange(args.mbs, device=mesh.device)
    batches = []
    for tokens, documents in zip(pool, of_pool, strict=True):
        batches.append(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, ids, documents))

    def step(i: int) -> StepResult:
        accum = args.accum
        if i < args.warmup and args.warmup_accum:
            accum = min(accum, args.warmup_accum)
        parts = [batches[(i * args.accum + j) % len(batches)] for j in range(accum)]
        return train_step(built, parts, lr=1e-4, weight_decay=0.1, scaler=scaler)

    return step


def packed_pool(args: argparse.Namespace, spec: Spec, mesh: Mesh) -> tuple[list[torch.Tensor], list[Documents | None]]:
    """Tokens [mbs, seq + 1] of POOL micro batches and their documents, the same as the peers'."""
    rows = packed_rows(
        mean=args.documents,
        rows=POOL * args.mbs,
        seq_len=args.seq,
        vocab_size=spec.model.vocab_size,
        seed=SEED + mesh.index("dp"),
    )
    pool = []
    of_pool: list[Documents | None] = []
    for first in range(0, len(rows), args.mbs):
        these = rows[first : first + args.mbs]
        pool.append(torch.stack([torch.from_numpy(row.tokens) for row in these]).to(mesh.device))
        number = torch.zeros(args.mbs, args.seq, dtype=torch.int32)
        for place, row in enumerate(these):
            number[place] = torch.arange(len(row.lengths), dtype=torch.int32).repeat_interleave(
                torch.tensor(row.lengths)
            )
        of_pool.append(documents_of(number).map(lambda tensor: tensor.to(mesh.device)))
    return pool, of_pool


def timed(step: Callable[[int], StepResult], steps: range) -> tuple[list[float], list[float]]:
    """-> seconds, by the device's clock, and loss of each step.

    As in training the host is a step ahead: it waits for a step when the device has been given the next one. Losses are
    read behind the last step, since whoever reads a number waits for all that the device has been given, so that each
    step would begin with nothing under way.
    """
    times: list[float] = []
    losses: list[torch.Tensor] = []
    clock = StepClock(device_here())
    pending: list[Mark] = []
    for i in steps:
        losses.append(step(i).loss)
        pending.append(clock.mark())
        if len(pending) > 1:
            times.append(clock.lap(pending.pop(0)))
    while pending:
        times.append(clock.lap(pending.pop(0)))
    return times, [loss.item() for loss in losses]


def measure(args: argparse.Namespace, *, rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """Builds and trains. -> the line of rank 0; what other ranks get is of no use."""
    cuda = device.type == "cuda"
    spec = spec_of(args, world)
    if cuda:
        leave_room(spec, device)
    step = stepper(args, spec, mesh_of(spec, rank=rank, device=device))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    _, losses = timed(step, range(args.warmup))
    with Meter(gpu_uuid(device)) as meter:
        times, last_losses = timed(step, range(args.warmup, args.warmup + args.steps))
    losses += last_losses
    if args.profile:
        # on all ranks, which wait for each other
        with torch.profiler.profile() as prof:
            step(args.warmup)
            torch.cuda.synchronize()
    if args.profile and rank == 0:
        with open(args.profile, "w") as file:
            file.write(
                prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90)
            )
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    mine: dict[str, Any] = {
        "clock": vars(meter.found()),
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved() if cuda else 0,
    }
    if args.where and cuda:
        # whole steps, whatever those of the warm-up were
        mine |= profiled(lambda i: step(args.warmup + i))
    ranks: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(ranks, mine)
    return report(args, spec, world, times, losses, ranks) | predicted(spec)


def predicted(spec: Spec) -> dict[str, float]:
    """Milliseconds of a step and GiB of the fullest rank, as the plan has them for a GPU that it knows."""
    hardware = hardware_of(detect_target())
    if hardware is None:
        return {}
    return {
        "plan_ms": round(step_time(spec, hardware, throughput_of(hardware)).seconds * 1e3, 2),
        "plan_gib": round(fullest(memory_of(spec)).allocated / 2**30, 2),
    }


def main() -> None:
    args = parser().parse_args()
    if args.patience:
        faulthandler.dump_traceback_later(args.patience, exit=True)
    rank, world, device = start()
    found = measure(args, rank=rank, world=world, device=device)
    if rank == 0:
        print(json.dumps(found), flush=True)
    if world > 1:
        dist.destroy_process_group()


def report(
    args: argparse.Namespace,
    spec: Spec,
    world: int,
    times: list[float],
    losses: list[float],
    ranks: list[dict[str, Any]],
) -> dict[str, Any]:
    """The line that is printed."""
    m, moe = spec.model, spec.model.moe
    q, kv = m.n_heads * m.d_head, m.n_kv_heads * m.d_head
    attention = m.d_model * (q + 2 * kv) + q * m.d_model
    matmul = m.vocab_size * m.d_model
    for layer in m.facts.layers:
        width = m.d_ffn
        if layer.has_experts:
            width = moe.top_k * moe.d_expert + (moe.d_shared or 0)
            matmul += m.d_model * moe.n_experts
        matmul += attention + 3 * m.d_model * width
    full = 6 * matmul + 12 * m.n_layers * q * args.seq
    causal = 6 * matmul + 6 * m.n_layers * q * args.seq
    median = statistics.median(times)
    per_gpu = args.seq * spec.train.global_batch / median / world
    peak = max(r["peak"] for r in ranks)
    own = spec.parallelism.model_dump(mode="json")
    return {
        "peer": "megaspec", "model": args.model, "seq": args.seq, "mbs": args.mbs, "accum": args.accum,
        "gpus": world, "precision": args.precision, "set": args.set, "parallelism": own,
        "kernels": spec.kernels.model_dump(mode="json"),
        "documents": args.documents, "force_balance": args.force_balance, "clock": ranks[0]["clock"],
        "deterministic": spec.train.deterministic, "torch": torch.__version__, "step_ms": round(median * 1e3, 2),
        "step_ms_min": round(min(times) * 1e3, 2), "step_ms_mean": round(statistics.mean(times) * 1e3, 2),
        "tokens_per_s": round(per_gpu * world, 1), "tokens_per_s_gpu": round(per_gpu, 1),
        "mfu": round(full * per_gpu / PEAK, 4), "mfu_causal": round(causal * per_gpu / PEAK, 4),
        "peak_mem_gib": round(peak / 2**30, 2), "max_memory_allocated": peak, "tables_in_place": True,
        "max_memory_reserved": max(r["reserved"] for r in ranks),
        "loss_first": round(losses[0], 4), "loss_last": round(losses[-1], 4), "ranks": ranks,
    }  # fmt: skip


if __name__ == "__main__":
    main()
