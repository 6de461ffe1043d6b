"""What parity is tested on: the factors of a case, the spec and the batches that a case stands for."""

import json
from dataclasses import dataclass, replace
from itertools import product

import torch

from megaspec.data.batch import Batch
from megaspec.spec import Spec

SEQUENCES, TOKENS, VOCAB = 6, 16, 67


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    tp: int = 1
    dp: int = 1
    sequence: bool = False
    accumulate: int = 1
    mask: str = "full"
    """full; uneven: a share of the tokens, another one in each sequence; empty_rank: nothing counts on data-parallel
    rank 1; empty_micro: nothing counts in the first micro batch when there are three."""
    tied: bool = False
    pad: int = 1
    kv_heads: int = 4
    documents: bool = False
    dropout: bool = False
    family: str = "llama"
    optimizer: str = "adamw"
    attention: str = "sdpa"
    cross_entropy: str = "chunked"
    scale: float = 1.0
    """Loss scale at the first step."""
    precision: str = "fp64"
    lr: float | None = None
    """None: 1e-3 for AdamW, 1e-2 for plain descent."""
    compile: str = "none"
    d_head: int = 8

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        flags = [
            f"tp{self.tp} dp{self.dp} acc{self.accumulate}",
            "sp" if self.sequence else "",
            self.family,
            self.mask,
            "tied" if self.tied else "",
            f"pad{self.pad} kv{self.kv_heads}",
            "docs" if self.documents else "",
            "drop" if self.dropout else "",
            self.optimizer,
            self.attention,
            self.cross_entropy,
            "compiled" if self.compile == "block" else "",
            f"scale{self.scale:g}" if self.scale != 1 else "",
            self.precision if self.precision != "fp64" else "",
        ]
        return " ".join(f for f in flags if f)


FACTORS: dict[str, tuple] = {
    "tp": (1, 2, 4),
    "dp": (1, 2),
    "sequence": (False, True),
    "accumulate": (1, 3),
    "mask": ("full", "uneven", "empty_rank", "empty_micro"),
    "tied": (False, True),
    "pad": (1, 8, 64),
    "kv_heads": (4, 2, 1),
    "documents": (False, True),
    "dropout": (False, True),
    "family": ("llama", "gpt"),
    "optimizer": ("sgd", "adamw"),
    "attention": ("reference", "sdpa"),
    "cross_entropy": ("reference", "chunked"),
    "scale": (1.0, 4096.0),
}
# The factors of the full product: the layout and what a batch or a model can do to it.
FULL = ("tp", "dp", "sequence", "accumulate", "mask", "tied", "pad", "family", "optimizer")


def legal(values: dict) -> bool:
    """False when a (possibly partial) choice of values can't be a case."""
    return not (values.get("dropout") and values.get("attention") == "sdpa")


def covering(factors: dict[str, tuple] = FACTORS) -> list[Case]:
    """Few cases in which every legal pair of values of two factors occurs at least once.

    Greedy: each case starts from a pair that is still missing and takes, factor by factor, the value that completes
    most missing pairs.
    """
    names = list(factors)
    missing = {
        frozenset({(a, x), (b, y)})
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x, y in product(factors[a], factors[b])
        if legal({a: x, b: y})
    }
    cases = []
    while missing:
        chosen = dict(min(missing, key=lambda pair: sorted(map(repr, pair))))
        for name in sorted((n for n in names if n not in chosen), key=lambda n: -len(factors[n])):
            turned = (
                factors[name][len(cases) % len(factors[name]) :] + factors[name]
            )  # ties go to another value each time
            possible = [v for v in turned if legal(chosen | {name: v})]
            gains = [sum(frozenset({(name, v), other}) in missing for other in chosen.items()) for v in possible]
            chosen[name] = possible[gains.index(max(gains))]
        missing -= {frozenset({a, b}) for a in chosen.items() for b in chosen.items() if a != b}
        cases.append(Case(**chosen))
    return cases


def full_product() -> list[Case]:
    """Every choice of FULL; the other factors go through their values from case to case."""
    rest = covering({n: v for n, v in FACTORS.items() if n not in FULL})
    cases = []
    for i, values in enumerate(product(*(FACTORS[n] for n in FULL))):
        cases.append(replace(rest[i % len(rest)], **dict(zip(FULL, values, strict=True))))
    return cases


def alone(case: Case) -> Case:
    """The one-rank case that a case is compared with: one micro batch, plain kernels, nothing padded."""
    return replace(
        case,
        tp=1,
        dp=1,
        sequence=False,
        accumulate=1,
        pad=1,
        attention="reference",
        cross_entropy="reference",
        compile="none",
        scale=1.0,
    )


def spec_of(case: Case, *, device: str = "cpu") -> Spec:
    """A model of two blocks, small enough for many cases and odd enough to be cut in uneven ways."""
    model = {
        "kind": case.family,
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": case.kv_heads,
        "d_head": case.d_head,
        "d_ffn": 48,
        "vocab_size": VOCAB,
        "vocab_pad_to": case.pad,
        "max_seq_len": TOKENS,
        "tied_embeddings": case.tied,
        "init_std": 0.2,
        "dropout": 0.1 if case.dropout else 0.0,
        "attention_dropout": 0.1 if case.dropout else 0.0,
    }
    optim = {"kind": case.optimizer, "lr": 1e-3, "schedule": {"decay_steps": 20}}
    # clipping hides a wrong scale, so plain gradient descent goes without
    optim |= {"clip": 1.0} if case.optimizer == "adamw" else {"clip": None, "lr": 1e-2}
    if case.lr is not None:
        optim["lr"] = case.lr
    whole = {
        "name": "parity",
        "run_dir": "parity",
        "model": model,
        "parallelism": {
            "tp": case.tp,
            "dp_replicate": case.dp,
            "dp_shard": 1,
            "pipeline": {"schedule": "1f1b", "micro_batch_group": 1},
            "sequence_parallel": case.sequence,
            "bucket_mb": 0.02,  # several buckets
        },
        "precision": {"kind": case.precision},
        "data": {"kind": "synthetic", "seq_len": TOKENS, "seed": 1, "document_mask": case.documents},
        "optim": optim,
        "kernels": {"attention": case.attention, "cross_entropy": case.cross_entropy, "compile": case.compile},
        "train": {
            "steps": 20,
            "global_batch": SEQUENCES,
            "micro_batch": SEQUENCES // (case.dp * case.accumulate),
        },
        "log": {"tensorboard": False},
        "launcher": {"ranks": case.ranks},
        "world_size": case.ranks,
        "device": device,
        "segments": [SEQUENCES * 20],
    }
    return Spec.model_validate_json(json.dumps(whole))


def empty_sequences(case: Case) -> list[int]:
    """The sequences of a global batch in which no token counts."""
    if case.mask == "empty_micro":
        return [0, 1]
    if case.mask == "empty_rank":
        return [1, 3, 5] if case.accumulate == 3 else [3, 4, 5]
    return []


def batches_of(case: Case, empty: list[int], steps: int) -> list[Batch]:
    """The global batches of the first steps. The tokens are the same in every case."""
    draw = torch.Generator().manual_seed(7)
    batches = []
    for step in range(steps):
        stream = torch.randint(0, VOCAB, (SEQUENCES, TOKENS + 1), generator=draw)
        share = torch.linspace(0.15, 0.95, SEQUENCES)[:, None]
        drawn = torch.rand(SEQUENCES, TOKENS, generator=draw) < share
        starts = torch.rand(SEQUENCES, TOKENS, generator=draw) < 0.25
        mask = torch.ones_like(drawn) if case.mask == "full" else drawn
        mask[empty] = False
        batches.append(
            Batch(
                stream[:, :-1].contiguous(),
                stream[:, 1:].contiguous(),
                mask,
                torch.arange(SEQUENCES) + step * SEQUENCES,
                starts.cumsum(1, dtype=torch.int32) if case.documents else None,
            )
        )
    return batches
