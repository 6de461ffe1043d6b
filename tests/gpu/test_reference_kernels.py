"""kernels=reference on a GPU: plain torch alone."""

import json
from collections.abc import Mapping

import pytest
import torch

from megaspec.data.batch import Batch
from megaspec.estimate.target import detect_target
from megaspec.optim.optimizer import build_optimizer
from megaspec.optim.spec import AdamWSpec, StateFormats
from megaspec.precision.scaler import build_scaler
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.step import train_step
from megaspec_kernels.catalog import CATALOG

pytestmark = pytest.mark.gpu

TOKENS, VOCAB = 64, 512
MODEL = {
    "kind": "decoder", "n_layers": 2, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_head": 32, "d_ffn": 256,
    "vocab_size": VOCAB, "max_seq_len": TOKENS, "moe": {"n_experts": 4, "top_k": 2, "d_expert": 64},
}  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Triton kernels that were started."""
    jit = pytest.importorskip("triton").runtime.jit
    names: list[str] = []
    run = jit.JITFunction.run

    def watched(self, *args, **how):
        names.append(self.fn.__name__)
        return run(self, *args, **how)

    monkeypatch.setattr(jit.JITFunction, "run", watched)
    return names


def step(kernels: Mapping[str, str]) -> None:
    """One step of a model with experts."""
    fields = {
        "name": "plain",
        "run_dir": "-",
        "model": MODEL,
        "precision": {"kind": "bf16"},
        "data": {"kind": "random", "vocab_size": VOCAB, "seq_len": TOKENS, "seed": 1},
        "optim": {"kind": "adamw", "lr": 1e-3, "schedule": {"kind": "constant"}},
        "kernels": {**kernels, "compile": "none"},
        "train": {"steps": 1, "micro_batch": 2, "global_batch": 2},
        "log": {"tensorboard": False},
        "launcher": {"ranks": 1},
    }
    spec = resolve(Recipe.model_validate_json(json.dumps(fields)), detect_target(), Facts(run_dir="-"))
    device = torch.device("cuda", 0)
    built = build(spec, mesh=mesh_of(spec, rank=0, device=device))
    initialise(built)
    tokens = torch.randint(0, VOCAB, (2, TOKENS + 1), device=device)
    mask, ids = torch.ones(2, TOKENS, dtype=torch.bool, device=device), torch.arange(2, device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, ids)
    scaler = build_scaler(spec.precision, device=device)
    train_step(built, [batch], lr=1e-3, weight_decay=0.0, scaler=scaler)


def update(adamw: str) -> None:
    """One update with narrow states."""
    spec = AdamWSpec(kind="adamw", lr=1e-3, formats=StateFormats(exp_avg="bf16", exp_avg_sq="fp8"))
    optimizer = build_optimizer({"w": torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)}, spec, adamw=adamw)
    scalars = {"divide_by": torch.ones((), device="cuda"), "skip": torch.zeros((), device="cuda")}
    optimizer.update({"w": torch.ones(64, 64, device="cuda")}, lr=1e-3, weight_decay=0.0, **scalars)


def test_reference_starts_no_triton_kernel(started: list[str]) -> None:
    step(dict.fromkeys(CATALOG, "reference"))
    update("reference")
    assert not started


def test_what_is_asked_for_is_started(started: list[str]) -> None:
    """So that the test above sees what it looks for."""
    step({"unpermute": "triton", "cross_entropy": "triton"})
    update("triton")
    assert {"unpermute_kernel", "adamw_kernel", "softmax_stats_kernel", "softmax_gradient_kernel"} <= set(started)
