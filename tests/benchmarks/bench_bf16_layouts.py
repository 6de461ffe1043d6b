"""Every layout trains the same model in bf16: losses and norms over real-text steps against one GPU and its own noise.

    torchrun --nproc_per_node=4 tests/benchmarks/bench_bf16_layouts.py --data data/hello --out layouts.jsonl
    python tests/benchmarks/bench_bf16_layouts.py --draw layouts.jsonl --plot layouts.png

The floor: one GPU in three orders of summation (three sizes of micro batches), the largest difference between two of
them. A layout may be three floors away from the one-GPU run; the floor itself at most 2e-3 (loss), 1e-2 (norm).
A model with experts replays the choices that one GPU made, since a choice flips on the last bit; its free run is shown
beside it.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.data.loader import Loader, open_source
from megaspec.data.manifest import load_manifest
from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.moe.router import Router
from megaspec.optim.schedule import learning_rate, weight_decay
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.recipe import Recipe
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.runtime.step import train_step
from megaspec.spec import Spec
from megaspec.train.batch_schedule import BatchSchedule
from tests.benchmarks.bench_train import device_here, join, target_of

LOSS_FLOOR, NORM_FLOOR, FACTOR = 2e-3, 1e-2, 3.0
BATCH, SEQ, MICRO_BATCH = 16, 256, 4
MODEL = {
    "kind": "decoder", "n_layers": 8, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "d_head": 32, "d_ffn": 768,
    "max_seq_len": SEQ,
}  # fmt: skip
MOE = {"n_experts": 8, "top_k": 2, "d_expert": 384}
MOE_LAYERS = 4
OTHERS = (2, 8)
"""Micro batches that sum in other orders."""


@dataclass(frozen=True)
class Layout:
    """What is said of `parallelism`, and whether the model has experts."""

    name: str
    parallelism: dict[str, Any]
    moe: bool = False
    micro_batch: int = MICRO_BATCH


def pipeline(schedule: str, virtual: int = 1, **more: Any) -> dict[str, Any]:
    return {"pipeline": {"schedule": schedule, "virtual_stages": virtual}, **more}


def one_axis(n: int, wide: int) -> list[Layout]:
    """Each axis alone over `n` ranks, each schedule and kind; `wide`: the micro batch where ranks share each one."""
    schedules = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2))
    kinds = ("ring", "all_gather", "all_to_all")
    return [
        Layout(f"tp{n}", {"tp": n}, micro_batch=wide),
        *(Layout(f"pp{n} {s}", {"pp": n, **pipeline(s, v)}) for s, v in schedules),
        *(Layout(f"cp{n} {k}", {"cp": n, "context": {"kind": k}}, micro_batch=wide) for k in kinds),
        *(Layout(f"{s} dp{n}", {"dp_strategy": s}) for s in ("fsdp", "zero1", "zero2")),
        *(Layout(f"ep{n} {d}", {"ep": n, "dispatch": d}, moe=True) for d in ("all_to_all", "all_gather")),
    ]


# By the number of ranks; one rank measures the floors alone.
LAYOUTS = {
    1: [],
    2: [
        *one_axis(2, MICRO_BATCH),
        Layout("tp2 etp2", {"tp": 2, "etp": 2}, moe=True),
        Layout("cp2 ep2", {"cp": 2, "ep": 2}, moe=True),
    ],
    4: [
        *one_axis(4, 2 * MICRO_BATCH),
        Layout(
            "cp4 hierarchical",
            {"cp": 4, "context": {"kind": "hierarchical", "factors": [2, 2]}},
            micro_batch=2 * MICRO_BATCH,
        ),
        Layout("tp2 pp2", {"tp": 2, "pp": 2}),
        Layout("tp2 cp2", {"tp": 2, "cp": 2}, micro_batch=2 * MICRO_BATCH),
        Layout("pp2 fsdp2", {"pp": 2, "dp_strategy": "fsdp"}),
        Layout("tp2 ep2 etp2", {"tp": 2, "ep": 2, "etp": 2}, moe=True),
        Layout("cp2 ep4", {"cp": 2, "ep": 4}, moe=True),
    ],
}


@dataclass
class Curve:
    """Losses and gradient norms of the steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def apart(self, other: "Curve") -> tuple[float, float]:
        """Largest relative difference of a step, in loss and norm."""
        pairs = (self.losses, other.losses), (self.norms, other.norms)
        loss, norm = (max(abs(a - b) / abs(b) for a, b in zip(x, y, strict=True)) for x, y in pairs)
        return loss, norm


@dataclass
class Choices:
    """The experts that the one-GPU run chose: layer -> [sequences of the run, tokens, choices], on the CPU."""

    shape: tuple[int, int, int]
    replay: bool = False
    by_layer: dict[str, Tensor] = field(default_factory=dict)

    def attach(self, built: TrainState) -> None:
        """Makes every router of a run record its choices, or repeat the recorded ones."""
        for chunk in built.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    module.choose = self._replayed(name, module) if self.replay else self._recorded(name, module)

    def _recorded(self, name: str, router: Router) -> Any:
        self.by_layer[name] = torch.zeros(self.shape, dtype=torch.uint8)

        def choose(ranking_BTE: Tensor, context: SequenceContext) -> Tensor:
            chosen = Router.choose(router, ranking_BTE, context)
            if context.noise is not None:
                self.by_layer[name][context.noise.ids.cpu()] = chosen.to("cpu", torch.uint8)
            return chosen

        return choose

    def _replayed(self, name: str, router: Router) -> Any:
        here = self.by_layer[name].to(next(router.parameters()).device)

        def choose(ranking_BTE: Tensor, context: SequenceContext) -> Tensor:
            if context.noise is None:
                return Router.choose(router, ranking_BTE, context)
            T = ranking_BTE.shape[1]
            index = router.places_here(context.index, T)
            return here[context.noise.ids][:, index].to(torch.int64)

        return choose


def spec_of(args: argparse.Namespace, layout: Layout, world: int) -> Spec:
    vocab = load_manifest(args.data).tokenizer.vocab_size
    fields = {
        "name": "layouts",
        "run_dir": "-",
        "model": MODEL | {"vocab_size": vocab} | ({"moe": MOE, "n_layers": MOE_LAYERS} if layout.moe else {}),
        "parallelism": {"tp": 1, **layout.parallelism},
        "precision": {"kind": "bf16"},
        "data": {"kind": "indexed", "blend": [{"prefix": args.data}], "seq_len": SEQ, "seed": 1},
        "optim": {
            "kind": "adamw",
            "lr": args.lr,
            "schedule": {"warmup_steps": args.warmup, "min_lr": args.lr / 10},
        },
        "kernels": {"compile": args.compile},
        "train": {"steps": args.steps, "global_batch": BATCH, "micro_batch": layout.micro_batch, "eval_every": 0},
        "log": {"tensorboard": False},
        "launcher": {"ranks": world},
    }
    recipe = Recipe.model_validate_json(json.dumps(fields))
    target = target_of(world).model_copy(update={"world_size": world, "local_ranks": world})
    return resolve(recipe, target, gather_facts(recipe))


def run(spec: Spec, mesh: Mesh, choices: Choices | None) -> Curve:
    """Trains; every rank gets the curve."""
    torch._dynamo.reset()
    built = build(spec, mesh=mesh)
    initialise(built)
    if choices is not None:
        choices.attach(built)
    scaler, curve = build_scaler(spec.precision, device=mesh.device), Curve()
    schedule = BatchSchedule(spec.train, moved=0)
    source = open_source(
        spec.data, split="train", seed=spec.data.seed, segments=spec.segments, vocab_size=spec.model.vocab_size
    )
    results = []
    with Loader(
        source,
        schedule,
        start_step=0,
        steps=spec.train.steps,
        micro_batch=spec.train.micro_batch,
        dp_rank=mesh.index("dp"),
        dp_size=mesh.size("dp"),
        device=mesh.device,
    ) as loader:
        for step, batch in enumerate(loader, start=1):
            lr = learning_rate(spec.optim.schedule, spec.optim.lr, step)
            decay = weight_decay(spec.optim, step)
            result = train_step(built, batch.micro_batches, lr=lr, weight_decay=decay, scaler=scaler)
            results.append(torch.stack([result.loss.double(), result.grad_norm.double()]))
    for loss, norm in torch.stack(results).tolist():
        curve.losses.append(loss)
        curve.norms.append(norm)
    return curve


def alone(args: argparse.Namespace, micro_batch: int, *, moe: bool, choices: Choices | None, device: Any) -> Curve:
    spec = spec_of(args, Layout("alone", {}, moe, micro_batch), 1)
    return run(spec, Mesh({}, rank=0, device=device), choices)


@dataclass(frozen=True)
class Floor:
    """One GPU in several orders of summation."""

    curve: Curve
    others: dict[int, Curve]
    """By their micro batches."""
    choices: Choices

    def apart(self) -> tuple[float, float]:
        """The largest differences between two orders, in loss and norm."""
        pairs = [a.apart(b) for a, b in combinations((self.curve, *self.others.values()), 2)]
        return max(loss for loss, _ in pairs), max(norm for _, norm in pairs)


def floor_of(args: argparse.Namespace, *, moe: bool, rank: int, device: torch.device) -> Floor:
    """Rank 0 makes the run that layouts are held to, with experts the one whose choices are replayed."""
    box: list[Any] = [None]
    if rank == 0:
        choices = Choices((args.steps * BATCH, SEQ, MOE["top_k"]))
        curve = alone(args, MICRO_BATCH, moe=moe, choices=choices if moe else None, device=device)
        choices.replay = True
        box = [(curve, choices)]
    dist.broadcast_object_list(box, src=0)
    curve, choices = box[0]
    # ranks share out the other orders
    mine = {
        micro: alone(args, micro, moe=moe, choices=choices if moe else None, device=device)
        for micro in OTHERS[rank :: dist.get_world_size()]
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return Floor(curve, {micro: one for of_rank in of_ranks for micro, one in of_rank.items()}, choices)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/hello")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--models", default="dense,experts", help="dense, experts or both")
    parser.add_argument("--only", default="", help="names that contain one of these words, comma-separated")
    parser.add_argument("--out", default="bf16_layouts.jsonl")
    parser.add_argument("--draw", nargs="+", default=[], metavar="JSONL", help="draw what earlier runs wrote, no more")
    parser.add_argument("--plot", default="bf16_layouts.png", help="the picture that --draw makes")
    parser.add_argument("--compile", default="block")
    args = parser.parse_args()
    if args.draw:
        draw([json.loads(x) for path in args.draw for x in Path(path).read_text().splitlines()], Path(args.plot))
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_here()
    join(device)
    words = [w for w in args.only.split(",") if w]
    layouts = [one for one in LAYOUTS[world] if not words or any(w in one.name for w in words)]
    for moe in (False, True):
        chosen = [one for one in layouts if one.moe == moe]
        if ("experts" if moe else "dense") not in args.models.split(",") or (layouts and not chosen):
            continue
        floor = floor_of(args, moe=moe, rank=rank, device=device)
        first, limit = floor.curve, tuple(FACTOR * x for x in floor.apart())
        name = "one GPU" + " with experts" * moe
        tell(args, rank, line(name, first, floor.apart(), (LOSS_FLOOR, NORM_FLOOR)))
        for micro, curve in floor.others.items():
            tell(args, rank, line(f"micro batches of {micro}", curve, curve.apart(first), limit, gated=False))
        for layout in chosen:
            for replay in (True, False) if moe else (False,):
                started = time.perf_counter()
                spec = spec_of(args, layout, world)
                curve = run(spec, mesh_of(spec, rank=rank, device=device), floor.choices if replay else None)
                name = layout.name + (", free choices" if moe and not replay else "")
                seconds = time.perf_counter() - started
                found = line(name, curve, curve.apart(first), limit, gated=not moe or replay, seconds=seconds)
                tell(args, rank, found)
    dist.destroy_process_group()


def line(
    name: str,
    curve: Curve,
    apart: tuple[float, float],
    limit: tuple[float, ...],
    *,
    gated: bool = True,
    seconds: float = 0.0,
) -> dict[str, Any]:
    passed = apart[0] <= limit[0] and apart[1] <= limit[1]
    return {
        "layout": name, "loss_apart": apart[0], "norm_apart": apart[1], "loss_limit": limit[0], "norm_limit": limit[1],
        "passed": passed if gated else None, "seconds": round(seconds, 1), "torch": torch.__version__,
        "losses": curve.losses, "norms": curve.norms,
    }  # fmt: skip


def tell(args: argparse.Namespace, rank: int, found: dict[str, Any]) -> None:
    """Appends a result to --out, prints it in one line."""
    if rank == 0:
        with Path(args.out).open("a") as out:
            out.write(json.dumps(found) + "\n")
        verdict = {True: "equal", False: "NOT EQUAL", None: "not gated"}[found["passed"]]
        numbers = " ".join(f"{k} {found[k]:.2e}" for k in ("loss_apart", "loss_limit", "norm_apart", "norm_limit"))
        last = found["losses"][-1]
        print(f"{found['layout']:32} {numbers} last loss {last:.4f} {found['seconds']:.0f} s {verdict}", flush=True)


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Relative differences to the one-GPU run of their file, loss and norm, the largest of every five steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), sharex=True)
    first, column = lines[0], 0
    limits = [[0.0, 0.0], [0.0, 0.0]]
    for one in lines:
        if one["layout"].startswith("one GPU"):
            first, column = one, int("experts" in one["layout"])
            for row, key in enumerate(("loss_apart", "norm_apart")):
                limits[column][row] = FACTOR * max(limits[column][row] / FACTOR, one[key])
            continue
        for row, key in enumerate(("losses", "norms")):
            gap = [abs(a - b) / abs(b) for a, b in zip(one[key], first[key], strict=True)]
            steps = range(0, len(gap), 5)
            style = {"linestyle": "-" if one["passed"] is not None else ":"}
            if one["layout"].startswith("micro batches"):
                style["color"] = "grey"
            most = [max(gap[i : i + 5]) for i in steps]
            axes[row][column].semilogy(steps, most, label=one["layout"], linewidth=0.8, **style)
    for column, title in enumerate(("dense", "experts")):
        for row, key in enumerate(("loss", "norm")):
            axes[row][column].axhline(limits[column][row], color="black", linestyle="--", label="3 x floor")
            # what is equal to the bit lies below
            axes[row][column].set_ylim(bottom=1e-6)
            axes[row][column].set_ylabel(f"{key}, relative difference to one GPU")
        axes[0][column].set_title(title)
        axes[0][column].legend(fontsize=6, ncols=2, loc="lower right")
        axes[1][column].set_xlabel("step")
    figure.savefig(path, dpi=75, bbox_inches="tight")


if __name__ == "__main__":
    main()
