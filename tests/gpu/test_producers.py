"""Norms and gates by Triton on a GPU: layers compiled with them beside plain ones, and fp8 that they write."""

import json
from typing import Any

import pytest
import torch

from megaspec.data.batch import Batch
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.step import train_step
from megaspec.spec import Spec
from tests.families import FAMILIES, with_attention

pytestmark = pytest.mark.gpu

TOKENS, VOCAB, SEQUENCES = 256, 512, 4


def losses(precision: dict[str, Any], kernel: str, *, compile: str, steps: int = 6, **more: Any) -> list[float]:
    """Of a model that learns the same few sequences by heart."""
    model = FAMILIES["llama"] | {
        "n_layers": 4, "d_model": 256, "n_heads": 4, "n_kv_heads": 4, "d_head": 64, "d_ffn": 512, "vocab_size": VOCAB,
        "max_seq_len": TOKENS, "init_std": 0.05,
    }  # fmt: skip
    kernels = {"attention": "sdpa", "cross_entropy": "chunked", "grouped": "reference", "compile": compile}
    kernels |= {"fp8_cast": "triton", "scaled_product": "torch", "norm": kernel, "gated": kernel}
    content = {
        "name": "producers",
        "run_dir": "-",
        "model": with_attention(model, qk_norm="none"),
        "parallelism": {"pipeline": {"micro_batch_group": 1}, "dp_shard": 1, "dp_replicate": 1} | more,
        "precision": precision,
        "data": {"kind": "synthetic", "vocab_size": VOCAB, "seq_len": TOKENS},
        "optim": {"kind": "adamw", "lr": 3e-3, "schedule": {"decay_steps": 20}, "weight_decay": 0.0},
        "kernels": kernels,
        "train": {"steps": 20, "global_batch": SEQUENCES, "micro_batch": SEQUENCES // 2},
        "log": {"tensorboard": False},
        "launcher": {"ranks": 1},
        "world_size": 1,
        "device": "cuda",
        "segments": [SEQUENCES * 20],
        "forked_from": None,
    }
    spec = Spec.model_validate_json(json.dumps(content))
    device = torch.device("cuda")
    torch._dynamo.reset()
    built = build(spec, mesh=mesh_of(spec, rank=0, device=device))
    initialise(built)
    scaler = build_scaler(spec.precision, device=device)
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (SEQUENCES, TOKENS + 1), generator=draw).to(device)
    batches = []
    for first in range(0, SEQUENCES, SEQUENCES // 2):
        some = tokens[first : first + SEQUENCES // 2]
        batches.append(
            Batch(
                ids=torch.arange(first, first + len(some), device=device),
                tokens=some[:, :-1],
                labels=some[:, 1:],
                mask=torch.ones(len(some), TOKENS, device=device),
                documents=None,
            )
        )
    found = []
    for _ in range(steps):
        result = train_step(built, batches, lr=spec.optim.lr, weight_decay=0.0, scaler=scaler)
        found.append(result.loss.item())
        assert result.skipped.item() == 0
    return found


FP8 = {
    "kind": "fp8",
    "recipe": "delayed",
    "format": "hybrid",
    "amax_history": 4,
    "first_layers_bf16": 1,
    "last_layers_bf16": 0,
}


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("precision", [{"kind": "bf16"}, FP8], ids=["bf16", "fp8 delayed"])
def test_a_small_model_learns_as_with_plain_operations(precision: dict[str, Any], compile: str) -> None:
    """The first step differs by rounding alone; later ones, whose fp8 the kernels write, by what follows from it."""
    plain = losses(precision, "reference", compile=compile)
    fused = losses(precision, "triton", compile=compile)
    assert fused[0] == pytest.approx(plain[0], rel=2e-3)
    assert fused == pytest.approx(plain, rel=3e-2)
    assert fused[-1] < 0.95 * fused[0]


@pytest.mark.parametrize(
    "recompute", [{"kind": "full"}, {"kind": "selective", "parts": ["norm", "activation"]}], ids=str
)
def test_computed_again_is_the_same(recompute: dict[str, Any]) -> None:
    kept = losses({"kind": "bf16"}, "triton", compile="block", steps=3)
    again = losses({"kind": "bf16"}, "triton", compile="block", steps=3, recompute=recompute)
    assert again == pytest.approx(kept, rel=1e-3)
