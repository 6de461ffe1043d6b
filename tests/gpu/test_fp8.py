"""fp8 on a GPU: steps of a small model in fp8, compiled and not, beside bf16, and beside the reference's products."""

import json
from typing import Any

import pytest
import torch

from megaspec.data.batch import Batch
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.step import train_step
from megaspec.spec import Spec
from tests.conftest import Tell
from tests.families import FAMILIES, with_attention
from tests.ranks import RankPool, gpu_of

pytestmark = pytest.mark.gpu

TOKENS, VOCAB, SEQUENCES = 256, 512, 4
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")


# What `auto` takes for products of each recipe.
PRODUCTS = {"tensorwise": "cublaslt", "delayed": "cublaslt", "rowwise": "torch", "blockwise": "torch"}


def losses(
    precision: dict[str, Any],
    *,
    compile: str,
    fast: bool = True,
    product: str | None = None,
    steps: int = 8,
    moe: dict[str, Any] | None = None,
    device: str = "cuda",
    tp: int = 1,
    rank: int = 0,
    others: dict[str, str] | None = None,
    recompute: dict[str, Any] | None = None,
    length: int = TOKENS,
) -> list[float]:
    """Of a model that learns the same few sequences by heart, of `length` tokens.

    `product`: another one than `auto` takes. `others`: implementations of other operations. With `tp` sequences are
    divided, too."""
    model = FAMILIES["llama"] | {
        "n_layers": 4, "d_model": 256, "n_heads": 4, "n_kv_heads": 4, "d_head": 64, "d_ffn": 512, "vocab_size": VOCAB,
        "max_seq_len": length, "init_std": 0.05,
        "moe": moe,
    }  # fmt: skip
    kernels = {"attention": "sdpa", "cross_entropy": "chunked", "grouped": "reference", "compile": compile}
    if fast:
        # mxfp8 asks for none
        best = PRODUCTS.get(precision.get("recipe", "tensorwise"), "cublaslt")
        kernels |= {"fp8_cast": "triton", "scaled_product": product or best}
        kernels |= {"grouped": "torch", "scaled_grouped": "torch"}
    kernels |= others or {}
    content = {
        "name": "fp8",
        "run_dir": "-",
        "model": with_attention(model, qk_norm="none"),
        "parallelism": {
            "tp": tp,
            "dp_shard": 1,
            "dp_replicate": 1,
            "sequence_parallel": tp > 1,
            "pipeline": {"schedule": "1f1b", "micro_batch_group": 1},
            "recompute": recompute or {"kind": "none"},
        },
        "precision": precision,
        "data": {"kind": "synthetic", "vocab_size": VOCAB, "seq_len": length, "seed": 1},
        "optim": {"kind": "adamw", "lr": 3e-3, "schedule": {"decay_steps": 20}, "weight_decay": 0.0},
        "kernels": kernels,
        "train": {"steps": 20, "global_batch": SEQUENCES, "micro_batch": SEQUENCES // 2},
        "log": {"tensorboard": False},
        "launcher": {"ranks": tp},
        "world_size": tp,
        "device": device,
        "segments": [SEQUENCES * 20],
        "forked_from": None,
    }
    spec = Spec.model_validate_json(json.dumps(content))
    on = gpu_of(rank) if device == "cuda" else torch.device(device)
    torch._dynamo.reset()
    built = build(spec, mesh=mesh_of(spec, rank=rank, device=on))
    initialise(built)
    scaler = build_scaler(spec.precision, device=on)
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (SEQUENCES, length + 1), generator=draw).to(on)
    batches = []
    for first in range(0, SEQUENCES, SEQUENCES // 2):
        some = tokens[first : first + SEQUENCES // 2]
        batches.append(
            Batch(
                ids=torch.arange(first, first + len(some), device=on),
                tokens=some[:, :-1],
                labels=some[:, 1:],
                mask=torch.ones(len(some), length, device=on),
                documents=None,
            )
        )
    found = []
    for _ in range(steps):
        result = train_step(built, batches, lr=spec.optim.lr, weight_decay=0.0, scaler=scaler)
        found.append(result.loss.item())
        assert result.skipped.item() == 0
    return found


def fp8(recipe: str) -> dict[str, Any]:
    form = "hybrid" if recipe in ("tensorwise", "delayed") else "e4m3"
    precision = {"kind": "fp8", "recipe": recipe, "format": form, "first_layers_bf16": 1}
    if recipe == "delayed":
        precision["amax_history"] = 16
    return precision


def skip_blocks(recipe: str) -> None:
    if recipe == "blockwise" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("scales of blocks are Hopper's")


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_model_learns_as_in_bf16(recipe: str, compile: str) -> None:
    skip_blocks(recipe)
    plain = losses({"kind": "bf16"}, compile=compile)
    found = losses(fp8(recipe), compile=compile)
    # two layers of four in fp8: the first step differs by rounding alone, the next ones by what follows from it (on a
    # CPU by 1.7 % at most); what learns by heart then goes ways of its own
    assert found[0] == pytest.approx(plain[0], rel=5e-3)
    assert found[0] != plain[0]
    assert found[3] == pytest.approx(plain[3], rel=3e-2)
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_step_is_that_of_the_reference(recipe: str) -> None:
    """The same numbers on the grid: only sums differ, and bf16's rounding of them."""
    skip_blocks(recipe)
    fast = losses(fp8(recipe), compile="none", steps=2)
    plain = losses(fp8(recipe), compile="none", fast=False, steps=2)
    assert fast == pytest.approx(plain, rel=2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_model_computes_what_an_eager_one_does(recipe: str) -> None:
    """The same numbers on the grid but where bf16 is rounded once less: a few of them are neighbours. Steps magnify
    that (0.8 % were seen at the fourth), as they do what bf16 and fp8 differ by."""
    skip_blocks(recipe)
    eager = losses(fp8(recipe), compile="none", steps=4)
    compiled = losses(fp8(recipe), compile="block", steps=4)
    assert compiled[0] == pytest.approx(eager[0], rel=1e-3)
    assert compiled == pytest.approx(eager, rel=3e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_sums_inside_the_product_are_those_behind_it(recipe: str) -> None:
    """Weight gradients of two micro batches: by cuBLASLt, and by torch's product with a sum of its own."""
    inside = losses(fp8(recipe), compile="none", steps=3)
    behind = losses(fp8(recipe), compile="none", product="torch", steps=3)
    assert inside == pytest.approx(behind, rel=1e-3)
    # and both learn
    assert inside[-1] < inside[0]


def divided(rank: int, recipe: str, compile: str) -> list[float]:
    """On two ranks that divide layers and sequences."""
    return losses(fp8(recipe), compile=compile, steps=4, tp=2, rank=rank)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_gpus_are_as_one(recipe: str, compile: str, gpu_pool: RankPool, tell: Tell) -> None:
    """Tensor and sequence parallel, tokens gathered in fp8: the same scales, so that bf16's rounding of sums is all
    that differs."""
    skip_blocks(recipe)
    one = losses(fp8(recipe), compile=compile, steps=4)
    two = gpu_pool.run(divided, recipe, compile, ranks=2)
    tell(f"{recipe}, compile {compile}: one {one}, two {two[0]}")
    assert two[0] == two[1]
    assert two[0][0] == pytest.approx(one[0], rel=2e-3)
    assert two[0][3] == pytest.approx(one[3], rel=3e-2)
