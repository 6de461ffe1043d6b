"""The same step again is the same to the bit: no transfer is read before it is there, nor written over while it goes.

Weights don't move (a rate of zero), so losses and gradients of each step are those of the first. Attention is the plain
one: what is fused sums its gradients in any order.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspec.data.batch import Batch
from megaspec.estimate.target import detect_target
from megaspec.precision.scaler import build_scaler
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.step import train_step
from tests.ranks import RankPool, gpu_of

pytestmark = pytest.mark.gpu

STEPS, BATCH, TOKENS, VOCAB = 60, 8, 512, 512
FEW = 12
"""Steps with offload, whose transfers take longest."""
SETTLED = 8
"""Steps after which delayed scales are those of the step before. They come from the largest elements of all steps so
far, and what a step with other scales computes can be larger: seen until the second step."""
MODEL = {
    "kind": "decoder", "n_layers": 8, "d_model": 512, "n_heads": 8, "n_kv_heads": 4, "d_head": 64, "d_ffn": 1536,
    "vocab_size": VOCAB, "max_seq_len": TOKENS,
}  # fmt: skip
EXPERTS = {"n_experts": 8, "top_k": 2, "d_expert": 512, "d_shared": 512}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    **{f"pp2 {s}": {"pp": 2, "pipeline": {"schedule": s}} for s in ("gpipe", "1f1b", "zb_h1")},
    **{f"pp2 {s}": {"pp": 2, "pipeline": {"schedule": s, "virtual_stages": 2}} for s in ("interleaved", "zb_v")},
    **{f"cp2 {kind}": {"cp": 2, "context": {"kind": kind}} for kind in ("ring", "all_gather", "all_to_all")},
    **{s: {"dp_strategy": s} for s in ("replicate", "zero1", "zero2", "fsdp")},
    **{f"ep2 {way}": {"ep": 2, "dispatch": way, "dp_strategy": "zero1"} for way in ("all_to_all", "all_gather")},
    "tp2 etp2": {"tp": 2, "etp": 2},
    "offload": {"dp_strategy": "zero1", "offload": {"layers": 4}},
    "pp2 zb_v offload": {
        "pp": 2, "pipeline": {"schedule": "zb_v", "virtual_stages": 2}, "offload": {"layers": 1},
    },
}  # fmt: skip
# Products in fp8 of that recipe.
IN_FP8 = {
    "tp2": "delayed",
    "pp2 zb_h1": "tensorwise",
    "fsdp": "tensorwise",
    "zero1": "blockwise",
    "ep2 all_to_all": "rowwise",
    "ep2 all_gather": "delayed",
}


def differences(
    rank: int, parallelism: dict[str, Any], *, moe: bool, recipe: str | None = None
) -> list[tuple[int, str, int, float]]:
    """The task: (step, gradient or "loss", elements that differ from the first step's, by how much at most)."""
    dp = 2 // (parallelism.get("tp", 1) * parallelism.get("pp", 1) * parallelism.get("cp", 1))
    fields = {
        "name": "again",
        "run_dir": "-",
        "model": MODEL | ({"moe": EXPERTS} if moe else {}),
        "parallelism": {"tp": 1, **parallelism},
        "precision": {"kind": "fp8", "recipe": recipe} if recipe else {"kind": "bf16"},
        "data": {"kind": "random", "vocab_size": VOCAB, "seq_len": TOKENS, "seed": 1},
        "optim": {"kind": "adamw", "lr": 1e-4, "schedule": {"kind": "constant"}},
        "kernels": {"attention": "reference", "compile": "none"},
        "train": {"steps": 1, "micro_batch": 1, "global_batch": BATCH},
        "log": {"tensorboard": False},
        "launcher": {"ranks": 2},
    }
    target = detect_target().model_copy(update={"world_size": 2, "local_ranks": 2})
    spec = resolve(Recipe.model_validate_json(json.dumps(fields)), target, Facts(run_dir="-"))
    device = gpu_of(rank)
    built = build(spec, mesh=mesh_of(spec, rank=rank, device=device))
    initialise(built)
    scaler = build_scaler(spec.precision, device=device)
    draw = torch.Generator(device).manual_seed(5 + built.mesh.index("dp"))
    mine = []
    for micro in range(BATCH // dp):
        tokens = torch.randint(0, VOCAB, (1, TOKENS + 1), device=device, generator=draw)
        mask = torch.ones(1, TOKENS, dtype=torch.bool, device=device)
        ids = torch.full((1,), micro, device=device)
        mine.append(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, ids))
    first: dict[str, Tensor] = {}
    found: list[tuple[int, str, Tensor, Tensor]] = []

    def look(step: int, tensors: dict[str, Tensor]) -> None:
        if step < SETTLED and recipe == "delayed":
            return
        for name, tensor in tensors.items():
            if name in first:
                apart = (tensor - first[name]).abs()
                found.append((step, name, (apart != 0).sum(), apart.max()))
            elif tensor.numel():
                first[name] = tensor.clone()

    for step in range(FEW if "offload" in parallelism else STEPS):
        result = train_step(
            built,
            mine,
            lr=0.0,
            weight_decay=0.0,
            scaler=scaler,
            on_gradients=lambda step=step: look(step, dict(built.data_parallel.gradients)),
        )
        look(step, {"loss": result.loss, "norm": result.grad_norm})
    return [(step, name, int(n), float(most)) for step, name, n, most in found if int(n)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_repeats(gpu_pool: RankPool, name: str) -> None:
    for found in gpu_pool.run(differences, LAYOUTS[name], moe="ep2" in name or "etp2" in name, ranks=2):
        assert not found, f"{len(found)} differences: {found[:8]}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("name", IN_FP8)
def test_a_step_in_fp8_repeats(gpu_pool: RankPool, name: str) -> None:
    for found in gpu_pool.run(differences, LAYOUTS[name], moe="ep2" in name, recipe=IN_FP8[name], ranks=2):
        assert not found, f"{len(found)} differences: {found[:8]}"
