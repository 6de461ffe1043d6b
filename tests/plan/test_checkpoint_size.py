"""What a plan says of a checkpoint's size, against the tensors that a rank would save."""

import io
from math import prod

import pytest
from rich.console import Console

from megaspec.checkpoint.streamed import WEIGHTS
from megaspec.plan.report import print_plan
from megaspec.runtime.state import pieces_of, weight_pieces_of
from megaspec.search.checkpoint_size import checkpoint_size
from tests.runtime.lives import build_here
from tests.runtime.specs import SGD, TARGET, spec

MOE = {"n_experts": 4, "top_k": 2, "d_expert": 16, "router": {"expert_bias": True, "score": "sigmoid"}}
MUON = {"kind": "muon", "lr": 1e-2, "schedule": {"warmup_steps": 4}}
NARROW = {"master": "fp16", "exp_avg": "bf16", "exp_avg_sq": "fp8"}
CASES = {
    "fp64": {},
    "bf16, sgd": {"precision.kind": "bf16", "optim": SGD},
    "fp32, tied": {"precision.kind": "fp32", "optim": SGD | {"momentum": 0.0}, "model.tied_embeddings": True},
    "bf16, muon, experts": {"precision.kind": "bf16", "optim": MUON, "model.moe": MOE},
    "bf16, narrow states": {
        "precision.kind": "bf16",
        "optim.formats": NARROW | {"master": "fp32"},
        "kernels": {"adamw": "reference"},
        "parallelism.dp_strategy": "zero1",
    },
    "bf16, frozen": {"precision.kind": "bf16", "train.trainable": ["layers.*"]},
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_is_saved(name) -> None:
    made = spec(CASES[name])
    built = build_here(made, 0)
    sizes = {True: 0, False: 0}
    for piece in pieces_of(built):
        if not piece.name.startswith("rng/"):
            sizes[piece.name.startswith(WEIGHTS)] += prod(piece.tensor.shape) * piece.tensor.element_size()
    found = checkpoint_size(made)
    assert (found.weights, found.optimizer) == (sizes[True], sizes[False])
    alone = sum(prod(piece.tensor.shape) * piece.tensor.element_size() for piece in weight_pieces_of(built))
    assert alone == found.weights


def test_the_start_says_what_can_not_be_made_up_for() -> None:
    told = []
    for last in ("training", "weights"):
        out = io.StringIO()
        print_plan(spec({"checkpoint.last": last}), TARGET, Console(file=out, width=200))
        told.append(out.getvalue())
    assert "checkpoint" not in told[0]
    assert "weights alone (checkpoint.last=weights): the finished run can't be trained further" in told[1]
