"""fp8 beside bf16 over real text: losses of every step, and gradients beside bf16's of the same weights and batch.

  megaspec data prepare python --tokenizer bpe:32000 --out data/there
  python tests/benchmarks/bench_fp8_accuracy.py --text data/there --out accuracy.jsonl --plot accuracy.png
  python tests/benchmarks/bench_fp8_accuracy.py --text data/there --seeds 1,2,3 --at --out accuracy.jsonl
  python tests/benchmarks/bench_fp8_accuracy.py --text data/there --runs 'tensorwise;rowwise' --first-layers-bf16 1 \
    --steps 1 --warmup 0 --at 1 --batch 2 --seq 256

bf16 runs first, and again with micro batches of another size, which sum in another order, and from another seed: so far
runs of one format are apart. Then each recipe of fp8. With several --seeds each run begins from as many initial
weights, and what counts is their mean: single runs of one format lie up to 1 % apart. --table FILE makes the table of
lines that several commands wrote. --first-layers-bf16 is of runs in fp8.

Before some of its steps a twin in bf16 takes its weights and the step's batch: signal to noise is
|g|² / |g - g of fp8|² in dB, of all weights of a layer together. A JSON line each.
"""

import argparse
import importlib.util
import json
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaspec.data.batch import Batch
from megaspec.data.loader import Loader, open_source
from megaspec.data.manifest import load_manifest
from megaspec.optim.schedule import learning_rate, weight_decay
from megaspec.precision.scaler import build_scaler
from megaspec.precision.spec import Fp8Precision
from megaspec.recipe import Recipe
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.runtime.step import train_step
from megaspec.spec import Spec
from megaspec.train.batch_schedule import BatchSchedule
from tests.benchmarks.bench_train import device_here, target_of

# 110 million parameters with a vocabulary of 32,000
MODEL = {
    "kind": "decoder", "n_layers": 12, "d_model": 768, "n_heads": 12, "n_kv_heads": 12, "d_ffn": 2048,
    "tied_embeddings": True, "positions": {"kind": "rotary", "base": 1e4},
}  # fmt: skip
SMALL = MODEL | {"n_layers": 4, "d_model": 64, "n_heads": 2, "n_kv_heads": 2, "d_ffn": 128}
SEQ, BATCH = 1024, 16
# By micro batches of half the size.
ANOTHER_ORDER = "bf16, another order"
# What each run sets beside the rest.
RUNS: dict[str, dict[str, Any]] = {
    "bf16": {},
    ANOTHER_ORDER: {},
    "bf16, another seed": {"train": {"seed": 1002}},
    "tensorwise": {"precision": {"kind": "fp8", "recipe": "tensorwise"}},
    "delayed": {"precision": {"kind": "fp8", "recipe": "delayed"}},
    "rowwise": {"precision": {"kind": "fp8", "recipe": "rowwise"}},
    "blockwise": {"precision": {"kind": "fp8", "recipe": "blockwise"}},
}
# With Transformer Engine's casts, scales and products; where it is installed.
TE_RUNS: dict[str, dict[str, Any]] = {
    "delayed, Transformer Engine": RUNS["delayed"] | {"kernels": {"linear": "te"}},
    "tensorwise, Transformer Engine": RUNS["tensorwise"] | {"kernels": {"linear": "te"}},
    "blockwise, Transformer Engine": RUNS["blockwise"] | {"kernels": {"linear": "te"}},
}
# Losses of so many steps together are the loss of the end: one batch is far from the mean.
AT_THE_END = 20


def micro_batches_of(name: str) -> int:
    """Into how many a run divides a step's sequences."""
    return 4 if name == ANOTHER_ORDER else 2


def spec_of(args: argparse.Namespace, name: str, *, seed: int = 1) -> Spec:
    """The Spec of one run from the initial weights of `seed`. All see the same tokens in the same order."""
    vocab = load_manifest(args.text).tokenizer.vocab_size
    fields: dict[str, Any] = {
        "name": "accuracy",
        "run_dir": "-",
        "model": (SMALL if args.small else MODEL) | {"vocab_size": vocab, "max_seq_len": args.seq},
        "precision": {"kind": "bf16"},
        "data": {"kind": "indexed", "blend": [{"prefix": args.text}], "seq_len": args.seq, "seed": 1},
        "optim": {"kind": "adamw", "lr": args.lr, "schedule": {"warmup_steps": args.warmup}},
        "train": {
            "steps": args.steps,
            "global_batch": args.batch,
            "micro_batch": args.batch // micro_batches_of(name),
            "seed": seed,
            "eval_every": 0,
        },
        "log": {"tensorboard": False},
        "launcher": {"ranks": 1},
    }
    for section, keys in (RUNS | TE_RUNS)[name].items():
        fields[section] = fields.get(section, {}) | keys
    if fields["precision"]["kind"] == "fp8":
        fields["precision"] |= {"first_layers_bf16": args.first_layers_bf16}
    recipe = Recipe.model_validate_json(json.dumps(fields))
    return resolve(recipe, target_of(1), gather_facts(recipe))


class Twin:
    """The same model in bf16, for gradients beside those of a run in fp8."""

    def __init__(self, spec: Spec, device: torch.device):
        self.built = build(spec, mesh=mesh_of(spec, rank=0, device=device))
        initialise(self.built)
        self._scaler = build_scaler(spec.precision, device=device)

    def gradients(self, of: TrainState, batches: list[Batch]) -> dict[str, Tensor]:
        """Of the weights of a run and a step's batch."""
        with torch.no_grad():
            for here, there in zip(self.built.chunks, of.chunks, strict=True):
                weights = dict(there.named_parameters())
                for name, parameter in here.named_parameters():
                    parameter.copy_(weights[name])
        return gradients_of(self.built, batches, scaler=self._scaler, lr=0.0, weight_decay=0.0)[1]


def gradients_of(built: TrainState, batches: list[Batch], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """Trains one step -> its result, and the gradients that it was made with."""
    kept: dict[str, Tensor] = {}

    def keep() -> None:
        # the update may divide them in place
        kept.update({name: grad.clone() for name, grad in built.data_parallel.gradients.items()})

    return train_step(built, batches, on_gradients=keep, **options), kept


def decibels(truth: dict[str, Tensor], noisy: dict[str, Tensor]) -> dict[str, float]:
    """Signal to noise of each layer, and of what lies outside of layers."""
    signal: dict[str, float] = defaultdict(float)
    noise: dict[str, float] = defaultdict(float)
    assert truth.keys() == noisy.keys(), truth.keys() ^ noisy.keys()
    for name, grad in truth.items():
        begin, _, rest = name.partition(".")
        layer = f"layers.{rest.partition('.')[0]}" if begin == "layers" else begin
        wide = grad.double()
        signal[layer] += wide.square().sum().item()
        noise[layer] += (noisy[name].double() - wide).square().sum().item()
    # gradients that are equal have no noise
    return {layer: 10 * math.log10(signal[layer] / max(noise[layer], 1e-300)) for layer in signal}


def run(args: argparse.Namespace, name: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Trains one run. -> its line."""
    begun = time.monotonic()
    spec = spec_of(args, name, seed=seed)
    torch._dynamo.reset()
    built = build(spec, mesh=mesh_of(spec, rank=0, device=device))
    initialise(built)
    twin = Twin(spec_of(args, "bf16"), device) if spec.precision.kind == "fp8" else None
    scaler = build_scaler(spec.precision, device=device)
    source = open_source(
        spec.data, split="train", seed=spec.data.seed, segments=spec.segments, vocab_size=spec.model.vocab_size
    )
    losses = []
    snr: dict[int, dict[str, float]] = {}
    with Loader(
        source,
        BatchSchedule(spec.train, moved=0),
        start_step=0,
        steps=spec.train.steps,
        micro_batch=spec.train.micro_batch,
        dp_rank=0,
        dp_size=1,
        device=device,
    ) as loader:
        for step, batch in enumerate(loader, start=1):
            options = {
                "lr": learning_rate(spec.optim.schedule, spec.optim.lr, step),
                "weight_decay": weight_decay(spec.optim, step),
                "scaler": scaler,
            }
            if twin is not None and step in args.at:
                truth = twin.gradients(built, batch.micro_batches)
                result, noisy = gradients_of(built, batch.micro_batches, **options)
                snr[step] = decibels(truth, noisy)
            else:
                result = train_step(built, batch.micro_batches, **options)
            losses.append(result.loss.double())
    of_steps = torch.stack(losses).tolist()
    last = of_steps[-AT_THE_END:]
    return {
        "run": name,
        "seed": spec.train.seed,
        "precision": spec.precision.model_dump(mode="json"),
        "parameters": sum(parameter.numel() for parameter in built.chunks[0].parameters()),
        "tokens_a_step": args.batch * args.seq,
        "steps": args.steps,
        "warmup": args.warmup,
        "lr": args.lr,
        "last_loss": sum(last) / len(last),
        "decibels": snr,
        "seconds": round(time.monotonic() - begun, 1),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "losses": of_steps,
    }


def apart_from(lines: list[dict[str, Any]], bf16: list[dict[str, Any]]) -> list[float]:
    """By how much, of bf16's, a run's losses at the end are above those of bf16 from the same seeds."""
    theirs = {line["seed"]: line["last_loss"] for line in bf16}
    return [line["last_loss"] / theirs[line["seed"]] - 1 for line in lines if line["seed"] in theirs]


def summary(lines: list[dict[str, Any]]) -> str:
    """Mean losses at the end of each run over those of bf16 from the same seeds, with the standard error of their
    difference, and the layer with most noise at each step."""
    of_run: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        of_run[line["run"]].append(line)
    bf16 = [line for line in lines if line["run"] == "bf16"]
    rows = [
        "| run | seeds | loss at the end | from bf16's | standard error | least signal to noise, dB |",
        "|---|---|---|---|---|---|",
    ]
    for name, its in of_run.items():
        losses = [line["last_loss"] for line in its]
        apart = apart_from(its, bf16)
        cells = [name, str(len(its)), f"{statistics.mean(losses):.4f}"]
        cells.append(f"{statistics.mean(apart):+.2%}" if apart else "")
        cells.append(f"{statistics.stdev(apart) / len(apart) ** 0.5:.2%}" if len(apart) > 1 else "")
        least: dict[str, tuple[float, str]] = {}
        for line in its:
            for step, layers in line["decibels"].items():
                layer = min(layers, key=layers.__getitem__)
                least[str(step)] = min(least.get(str(step), (math.inf, "")), (layers[layer], layer))
        cells.append(", ".join(f"step {step}: {noise:.1f} ({layer})" for step, (noise, layer) in least.items()))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Each run's losses over bf16's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = next(line for line in lines if line["run"] == "bf16")
    # the first seed of each: more curves can't be told apart
    first_of_run: dict[str, dict[str, Any]] = {}
    for line in lines:
        first_of_run.setdefault(line["run"], line)
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(9, 8))
    for line in first_of_run.values():
        steps = range(1, len(line["losses"]) + 1)
        above.plot(steps, line["losses"], label=line["run"], linewidth=0.8)
        ratios = [100 * (a / b - 1) for a, b in zip(line["losses"], first["losses"], strict=True)]
        below.plot(steps, ratios, linewidth=0.8)
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel("from bf16's, %")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def show(lines: list[dict[str, Any]], plot: Path | None) -> None:
    """Prints the table, and draws the picture where one is asked for."""
    print(summary(lines))
    if plot is not None:
        draw(lines, plot)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="prefix of token files")
    parser.add_argument("--runs", default=";".join(RUNS), help=f"of them and of {'; '.join(TE_RUNS)}, with ; between")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seq", type=int, default=SEQ)
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences of a step, in two micro batches or in four")
    of_recipes = Fp8Precision.model_fields["first_layers_bf16"].default
    parser.add_argument(
        "--first-layers-bf16", type=int, default=of_recipes, help="of runs in fp8: layers in bf16 at the start"
    )
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=50, help="steps in which the learning rate rises")
    parser.add_argument("--seeds", default="1", help="of initial weights, with commas between")
    parser.add_argument(
        "--table", type=Path, help="trains nothing: the table, and with --plot the picture, of this file"
    )
    parser.add_argument("--at", type=int, nargs="*", default=[1, 100, 500], help="steps whose gradients are compared")
    parser.add_argument("--small", action="store_true", help="a model that a CPU trains")
    parser.add_argument("--out", help="a file that every line is appended to")
    parser.add_argument("--plot", type=Path, help="a picture of the losses; needs matplotlib")
    return parser


def main() -> None:
    args = parser().parse_args()
    for name in args.runs.split(";"):
        if name not in RUNS | TE_RUNS:
            raise SystemExit(f"--runs: {name} is none of {'; '.join(RUNS | TE_RUNS)}")
    most = max(map(micro_batches_of, args.runs.split(";")))
    if args.batch < most or args.batch % most:
        raise SystemExit(f"--batch {args.batch} can't be divided into {most} micro batches; a multiple of {most} can")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        # known before minutes of training
        raise SystemExit("--plot needs matplotlib, which is not installed; leave it out: --out keeps all losses")
    if args.table:
        show([json.loads(text) for text in args.table.read_text().splitlines()], args.plot)
        return
    if args.text is None:
        raise SystemExit("--text PREFIX says which token files; --table FILE trains nothing")
    device = device_here()
    lines = []
    for seed in map(int, args.seeds.split(",")):
        for name in args.runs.split(";"):
            line = run(args, name, seed, device)
            lines.append(line)
            print(json.dumps({key: value for key, value in line.items() if key != "losses"}), flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(line) + "\n")
    show(lines, args.plot)


if __name__ == "__main__":
    main()
