"""What parity is tested on: the factors of a case, the spec and the batches that a case stands for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megaspec.data.batch import Batch
from megaspec.parallelism.context import token_index
from megaspec.spec import Spec
from megaspec_kernels.attention.documents import documents_of
from tests.families import FAMILIES, with_attention

SEQUENCES, TOKENS, VOCAB = 12, 16, 67

# Every score, choice, loss and balance of a router, in few combinations.
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 2, "router": {"losses": [{"kind": "aux", "coefficient": 0.05}], "z_loss": 0.01}},
    "first": {
        "top_k": 1,
        "router": {
            "norm_top_k": False,
            "scale": 1.5,
            "losses": [{"kind": "seq_aux", "coefficient": 0.05}, {"kind": "global_aux", "coefficient": 0.03}],
        },
    },
    "sigmoid": {
        "top_k": 2,
        "router": {
            "score": "sigmoid",
            "n_groups": 4,
            "group_top_k": 2,
            "scale": 2.5,
            "expert_bias": True,
            "bias_rate": 0.02,
            "losses": [{"kind": "seq_aux", "coefficient": 0.05}],
        },
    },
    "root": {
        "top_k": 3,
        "router": {
            "score": "sqrt_softplus",
            "expert_bias": True,
            "bias_rate": 0.02,
            "jitter": 0.05,
            "z_loss": 0.01,
            "losses": [{"kind": "aux", "coefficient": 0.05}, {"kind": "global_aux", "coefficient": 0.05}],
        },
    },
    "sinkhorn": {"top_k": 1, "router": {"balancing": "sinkhorn", "z_loss": 0.01}},
    # as published models choose: DeepSeek-V2, DeepSeek-V3, Llama 4, gpt-oss
    "best of group": {
        "top_k": 3,
        "router": {"norm_top_k": False, "n_groups": 4, "group_top_k": 2, "group_score": "best", "scale": 2.0},
    },
    "best two of group": {
        "top_k": 2,
        "router": {
            "score": "sigmoid",
            "n_groups": 2,
            "group_top_k": 1,
            "group_score": "best_two",
            "expert_bias": True,
            "scale": 2.5,
        },
    },
    "scores": {"top_k": 1, "router": {"score": "sigmoid", "norm_top_k": False}},
    "logit bias": {"top_k": 2, "router": {"logit_bias": True}},
}
DROPS: dict[str, dict[str, Any]] = {
    "none": {},
    "probs": {"capacity_factor": 0.75, "drop": "probs"},
    "position": {"capacity_factor": 0.75, "drop": "position"},
    "padded": {"capacity_factor": 1.25, "drop": "probs", "pad_to_capacity": True},
}
SHARED: dict[str, dict[str, Any]] = {
    "none": {},
    "plain": {"d_shared": 32},
    "gate": {"d_shared": 32, "shared_gate": True},
}

# What experts are made of, and where their weight enters.
EXPERTS: dict[str, dict[str, Any]] = {
    "": {},
    "bias": {"mlp": {"kind": "gated", "bias": True}},
    "gelu": {"mlp": {"kind": "gated", "activation": "gelu_tanh", "bias": True}},
    "plain": {"mlp": {"kind": "plain", "activation": "relu_squared", "bias": True}},
    # as in gpt-oss, with bounds that gates reach
    "clamped": {"mlp": {"kind": "clamped", "limit": 0.4, "bias": True}},
    "inputs": {"weights_on": "inputs"},
    "inputs, bias": {"weights_on": "inputs", "mlp": {"kind": "plain", "activation": "gelu", "bias": True}},
}

# Options of attention, a few at a time. Sequences have 16 tokens, context-parallel chunks 4 and 2.
ATTENTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {"mask": {"kind": "window", "size": 5}},
    "edge": {"mask": {"kind": "window", "size": 4}},
    "chunk": {"mask": {"kind": "chunk", "size": 5}, "qk_norm": "whole"},
    "sinks": {"sinks": True, "mask": {"kind": "window", "size": 6}, "score_scale": 0.7},
    "whole": {"qk_norm": "whole", "qkv_bias": True, "clip_qkv": 0.8},
    "gate": {"qk_norm": "l2", "output_gate": True, "clip_qkv": 0.8},
    "cap": {"score_cap": 0.5, "sinks": True, "mask": {"kind": "chunk", "size": 6}, "out_bias": True},
    "all": {
        "mask": {"kind": "window", "size": 3},
        "sinks": True,
        "score_cap": 1.5,
        "score_scale": 0.7,
        "qk_norm": "whole",
        "clip_qkv": 0.8,
        "output_gate": True,
        "qkv_bias": True,
    },
    "temperature": {"temperature": {"kind": "log", "scale": 0.5, "floor_scale": 3.0}, "sinks": True},
}

# What is trained, the rest being frozen. Of four layers on a pipeline's stages some train nothing, and some have
# nothing to train before them.
TRAINABLES: dict[str, tuple[str, ...]] = {
    "": (),
    "norms": ("*norm*",),
    "norms and biases": ("*norm*", "*.bias"),
    "norms and routers' biases": ("*norm*", "*.expert_bias"),
    "head": ("head.*", "norm.*"),
    "upper": ("layers.1.*", "layers.3.*"),
    "lower": ("layers.0.*",),
    "down": ("*.w_down.*",),
    "router": ("*.router.*",),
    "embedding": ("embed.*",),
    "into": ("*.wqkv.*", "*.w_gate_up.*"),
}

Settings = tuple[tuple[str, Any], ...]
"""Dotted paths and their values."""


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    tp: int = 1
    dp: int = 1
    """Data-parallel ranks in all; see `replicas`."""
    sequence: bool = False
    accumulate: int = 1
    """Micro batches of a rank."""
    mask: str = "full"
    """full; uneven: a share of the tokens, another one in each sequence; empty_rank: nothing counts on data-parallel
    rank 1; empty_micro: nothing counts in the first micro batch of any rank; empty_part: nothing counts on
    context-parallel rank 1."""
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
    """`fp8 RECIPE`: products of all layers in fp8 of that recipe, everything else in fp64; `fp8 RECIPE in bf16`: as it
    is trained."""
    wide: bool = False
    """Widths that blocks of 128 divide on each of two ranks."""
    d_model: int = 32
    lr: float | None = None
    """None: 1e-3 for AdamW, 1e-2 for the others."""
    compile: str = "none"
    d_head: int = 8
    pp: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    group: int | None = None
    """Micro batches that an interleaved schedule takes through a chunk at once. None: pp, or all."""
    cp: int = 1
    context: str = "ring"
    """`hierarchical` has all-to-alls of 2 ranks."""
    ep: int = 1
    etp: int = 1
    dispatch: str = "all_to_all"
    strategy: str = "replicate"
    replicas: int = 1
    """Of `dp`, the ranks that hold the same, with a strategy that shards; all with replicate."""
    also: Settings = ()
    """Other settings that change nothing but how it is computed."""
    n_layers: int = 2
    router: str = ""
    """A key of ROUTERS. "": no experts."""
    drop: str = "none"
    shared: str = "none"
    every: int = 1
    """Every n-th layer has experts."""
    qk_norm: bool = False
    options: str = ""
    """A key of ATTENTIONS."""
    experts: str = ""
    """A key of EXPERTS."""
    trainable: str = ""
    """A key of TRAINABLES. "": everything is trained."""

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def micro_batch(self) -> int:
        return SEQUENCES // (self.dp * self.accumulate)

    def __str__(self) -> str:
        degrees = ("tp", "pp", "cp", "ep", "etp")
        layout = [f"{n}{getattr(self, n)}" for n in degrees if getattr(self, n) > 1]
        sharing = "" if self.strategy == "replicate" else f" {self.strategy}"
        sharing += f"x{self.replicas}" if self.replicas > 1 else ""
        layout += [f"dp{self.dp}{sharing}"] if self.dp > 1 or not layout else []
        chunks = f"x{self.virtual}" if self.virtual > 1 else ""
        chunks += f"/{self.group}" if self.group else ""
        flags = [
            " ".join(layout),
            "sp" if self.sequence else "",
            self.schedule + chunks if self.pp > 1 else "",
            self.context if self.cp > 1 else "",
            self.dispatch if self.ep * self.etp > 1 else "",
            f"acc{self.accumulate}" if self.accumulate > 1 else "",
            self.family,
            f"{self.n_layers}t" if self.n_layers != 2 else "",
            f"{self.router} experts" if self.router else "",
            f"of {self.experts}" if self.experts else "",
            f"every{self.every}" if self.every > 1 else "",
            f"drop {self.drop}" if self.drop != "none" else "",
            f"shared {self.shared}" if self.shared != "none" else "",
            "qk" if self.qk_norm else "",
            "wide" if self.wide else "",
            f"d_model={self.d_model}" if self.d_model != 32 else "",
            f"attention {self.options}" if self.options else "",
            self.mask,
            "tied" if self.tied else "",
            f"pad{self.pad} kv{self.kv_heads}",
            "docs" if self.documents else "",
            "dropout" if self.dropout else "",
            self.optimizer,
            self.attention,
            self.cross_entropy,
            "compiled" if self.compile == "block" else "",
            f"trains {self.trainable}" if self.trainable else "",
            f"scale{self.scale:g}" if self.scale != 1 else "",
            self.precision if self.precision != "fp64" else "",
            *(f"{path.rpartition('.')[2]}={value}" for path, value in self.also),
        ]
        return " ".join(f for f in flags if f)


def alone(case: Case) -> Case:
    """The one-rank case that a case is compared with: plain kernels, nothing padded, one micro batch; or the micro
    batches of all ranks one after the other, where something is taken over a micro batch."""
    return replace(
        case,
        tp=1,
        dp=1,
        pp=1,
        cp=1,
        ep=1,
        etp=1,
        sequence=False,
        schedule="1f1b",
        virtual=1,
        group=None,
        context="ring",
        dispatch="all_to_all",
        strategy="replicate",
        replicas=1,
        also=(),
        accumulate=case.dp * case.accumulate if looks_at_micro_batches(case) else 1,
        pad=1,
        attention="reference",
        cross_entropy="reference",
        compile="none",
        scale=1.0,
    )


def looks_at_micro_batches(case: Case) -> bool:
    """Whether which sequences make a micro batch is part of the experiment; see RouterSpec."""
    if case.precision.startswith("fp8"):
        return True
    if not case.router:
        return False
    router = ROUTERS[case.router]["router"]
    kinds = [loss["kind"] for loss in router.get("losses", ())]
    return case.drop != "none" or "aux" in kinds or router.get("balancing") == "sinkhorn"


def content_of(case: Case) -> dict[str, Any]:
    """The recipe of a case, with everything said: a model small enough for many cases and odd enough to be cut in
    uneven ways."""
    model = FAMILIES[case.family] | {
        "n_layers": case.n_layers,
        "d_model": case.d_model,
        "n_heads": 4,
        "n_kv_heads": case.kv_heads,
        "d_head": case.d_head,
        "d_ffn": 48,
        "vocab_size": VOCAB,
        "vocab_pad_to": case.pad,
        "max_seq_len": TOKENS,
        "tied_embeddings": case.tied,
        # of sums over more features, terms as much smaller: steps of such a model magnify rounding no more
        "init_std": 0.2 * (32 / case.d_model) ** 0.5,
        "dropout": 0.1 if case.dropout else 0.0,
    }
    if case.wide:
        model |= {"d_model": 256, "d_head": 64, "d_ffn": 256}
    model = with_attention(model, dropout=0.1 if case.dropout else 0.0)
    if case.family != "gpt":
        model = with_attention(model, qk_norm="per_head" if case.qk_norm else "none") | {"moe": _experts(case)}
    model = with_attention(model, **ATTENTIONS[case.options])
    if case.router and "mlp" in EXPERTS[case.experts]:
        model |= {"mlp": EXPERTS[case.experts]["mlp"]}
    if case.family == "flat":
        # every n-th pair of sub-layers has experts
        pairs = [("attention", "moe" if case.router and i % case.every == 0 else "mlp") for i in range(case.n_layers)]
        mixers = [mixer for pair in pairs for mixer in pair][: case.n_layers]
        model |= {"layer": {"kind": "flat", "mixers": mixers}}
        if case.router:
            model["moe"] |= {"every": 1}
    optim = {"kind": case.optimizer, "lr": 1e-2, "schedule": {"decay_steps": 20}, "clip": None}
    # clipping hides a wrong scale, so plain gradient descent goes without
    optim |= {"clip": 1.0, "lr": 1e-3} if case.optimizer == "adamw" else {}
    if case.lr is not None:
        optim["lr"] = case.lr
    content = {
        "name": "parity",
        "run_dir": "parity",
        "model": model,
        "parallelism": {
            "tp": case.tp,
            "pp": case.pp,
            "cp": case.cp,
            "ep": case.ep,
            "etp": case.etp,
            "dp_strategy": case.strategy,
            "dp_replicate": case.dp if case.strategy == "replicate" else case.replicas,
            "dp_shard": 1 if case.strategy == "replicate" else case.dp // case.replicas,
            "pipeline": {
                "schedule": case.schedule,
                "virtual_stages": case.virtual,
                "micro_batch_group": _group(case),
            },
            "context": {
                "kind": case.context,
                "factors": [2, case.cp // 2] if case.context == "hierarchical" else None,
            },
            "dispatch": case.dispatch,
            "sequence_parallel": case.sequence,
            "bucket_mb": 0.02,  # several buckets
        },
        "precision": _precision(case),
        "data": {
            "kind": "synthetic",
            "vocab_size": VOCAB,
            "seq_len": TOKENS,
            "seed": 1,
            "document_mask": case.documents,
        },
        "optim": optim,
        "kernels": {
            "attention": case.attention,
            "cross_entropy": case.cross_entropy,
            "grouped": "reference",
            "compile": case.compile,
        },
        "train": {"steps": 20, "global_batch": SEQUENCES, "micro_batch": case.micro_batch},
        "log": {"tensorboard": False},
        "launcher": {"ranks": case.ranks},
    }
    if case.trainable:
        content["train"]["trainable"] = list(TRAINABLES[case.trainable])
    for path, value in case.also:
        section, _, name = path.rpartition(".")
        here = content
        for key in section.split("."):
            here = here.setdefault(key, {})
        here[name] = value
    return content


def _precision(case: Case) -> dict[str, Any]:
    if not case.precision.startswith("fp8"):
        return {"kind": case.precision}
    recipe, _, outside = case.precision.removeprefix("fp8 ").partition(" in ")
    precision = {
        "kind": "fp8",
        "recipe": recipe,
        "format": "hybrid" if recipe in ("tensorwise", "delayed") else "e4m3",
        "outside": outside or "fp64",
        "first_layers_bf16": 0,
        "last_layers_bf16": 0,
    }
    if recipe == "delayed":
        precision["amax_history"] = 2
    return precision


def _experts(case: Case) -> dict[str, Any] | None:
    if not case.router:
        return None
    sizes = {"n_experts": 8, "d_expert": 16, "every": case.every}
    weighted = {"weights_on": EXPERTS[case.experts].get("weights_on", "outputs")}
    return sizes | weighted | ROUTERS[case.router] | DROPS[case.drop] | SHARED[case.shared]


def _group(case: Case) -> int:
    if case.pp == 1:
        return 1
    if case.group is not None or case.schedule != "interleaved":
        return case.group or case.pp
    return case.pp if case.accumulate % case.pp == 0 else case.accumulate


def spec_of(case: Case, *, device: str = "cpu") -> Spec:
    """What is built and trained."""
    more = {"world_size": case.ranks, "device": device, "segments": [SEQUENCES * 20], "forked_from": None}
    return Spec.model_validate_json(json.dumps(content_of(case) | more))


class Empty(NamedTuple):
    """Where no token of a global batch counts."""

    sequences: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    """In every sequence."""


def empty_of(case: Case) -> Empty:
    """What a case's mask leaves out in whole."""
    if case.mask == "empty_micro":
        return Empty(tuple(range(SEQUENCES // 3 if case.accumulate == 1 else case.dp * case.micro_batch)))
    if case.mask == "empty_rank" and case.dp == 1:
        return Empty(tuple(range(SEQUENCES // 2, SEQUENCES)))
    if case.mask == "empty_rank":
        return Empty(tuple(s for s in range(SEQUENCES) if s // case.micro_batch % case.dp == 1))
    if case.mask == "empty_part" and case.cp == 1:
        return Empty(places=tuple(range(TOKENS // 2, TOKENS)))
    if case.mask == "empty_part":
        factors = (2, case.cp // 2) if case.context == "hierarchical" else None
        return Empty(places=tuple(token_index(case.context, TOKENS, case.cp, 1, factors).tolist()))
    return Empty()


def batches_of(case: Case, empty: Sequence[int], steps: int, *, places: Sequence[int] = ()) -> list[Batch]:
    """The global batches of the first steps. The tokens are the same in every case; nothing counts in the sequences
    `empty` and at `places` of all sequences."""
    draw = torch.Generator().manual_seed(7)
    batches = []
    for step in range(steps):
        stream = torch.randint(0, VOCAB, (SEQUENCES, TOKENS + 1), generator=draw)
        share = torch.linspace(0.15, 0.95, SEQUENCES)[:, None]
        drawn = torch.rand(SEQUENCES, TOKENS, generator=draw) < share
        starts = torch.rand(SEQUENCES, TOKENS, generator=draw) < 0.25
        mask = torch.ones_like(drawn) if case.mask == "full" else drawn
        mask[list(empty)] = False
        mask[:, list(places)] = False
        batches.append(
            Batch(
                stream[:, :-1].contiguous(),
                stream[:, 1:].contiguous(),
                mask,
                torch.arange(SEQUENCES) + step * SEQUENCES,
                documents_of(starts.cumsum(1, dtype=torch.int32)) if case.documents else None,
            )
        )
    return batches
