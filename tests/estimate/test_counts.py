"""Parameters, FLOPs, batches and the formula, against published and golden numbers."""

import json
from typing import get_args

import pytest

from megaspec.compose.compose import compose
from megaspec.estimate.batch_sizes import batch_plan
from megaspec.estimate.flops import flops_per_sequence
from megaspec.estimate.formula import dense_equation, expert_equation
from megaspec.estimate.parameters import count_parameters, padded_vocab
from megaspec.estimate.target import Target
from megaspec.recipe import ModelSpec
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from tests.estimate.megatron_adapter import cases, recipe_of

H200 = Target(gpus=8, gpu="NVIDIA H200", sm=90, cores=64, versions={"torch": "2.13.0"})


def test_full_counts_the_other_half_of_the_scores():
    model = recipe_of(cases()["llama3-8b"]["args"]).model
    causal, full = (flops_per_sequence(model, seq_len=8192, convention=c) for c in ("causal", "full"))
    assert full - causal == 6 * 32 * 4096 * 8192**2
    # 6 · matmul parameters + 12 · L · q · s per token
    count = count_parameters(model)
    assert full == 8192 * (6 * (count.attention + count.mlp + count.head) + 12 * 32 * 4096 * 8192)


def test_megatron_pads_the_vocabulary():
    model = resolve(compose("gpt2_124m").recipe, H200, Facts("x")).model
    assert [padded_vocab(model, tp=tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]


@pytest.mark.parametrize(
    ("recipe", "total"),
    [("gpt2_124m", 124_439_808), ("llama3_2_1b", 1_235_814_400), ("llama3_8b_half", 4_540_469_248)],
)
def test_parameters(recipe, total):
    count = count_parameters(resolve(compose(recipe).recipe, H200, Facts("x")).model)
    assert count.total == total


def test_parameters_of_llama3_8b():
    recipe = compose("llama3_8b_half", ["model=llama3_8b"]).recipe
    assert count_parameters(resolve(recipe, H200, Facts("x")).model).total == 8_030_261_248


KINDS = [get_args(one.model_fields["kind"].annotation)[0] for one in get_args(get_args(ModelSpec)[0])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_module(kind, tied):
    torch = pytest.importorskip("torch")
    build = pytest.importorskip("megaspec.runtime.build")
    registry = pytest.importorskip("megaspec_kernels.registry")
    overrides = [
        f"model.kind={kind}",
        f"model.tied_embeddings={json.dumps(tied)}",
        "model.vocab_size=256",
        "data=random",
        "~data.blend",
        "train.sample=null",
    ]
    spec = resolve(compose("hello", overrides).recipe, Target(cores=2), Facts("x"))
    model = build.build_model(spec.model, registry.kernels_of(spec.kernels), dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(spec.model).total


def test_batch_arithmetic():
    overrides = [
        "train.batch_ramp={start: 16, increment: 16, samples: 96}",
        "train.steps=20",
        "optim.schedule.warmup_steps=2",
    ]
    spec = resolve(compose("llama3_2_1b", overrides).recipe, H200, Facts("x"))
    plan = batch_plan(spec.train, spec.parallelism, seq_len=spec.data.seq_len)
    assert (plan.dp, plan.micro_batch, plan.accumulation, plan.global_batch) == (8, 1, 8, 64)
    assert plan.stages == (16, 32, 48, 64)
    assert plan.tokens_per_step == 64 * 8192
    assert plan.tokens == plan.sequences * 8192 == spec.segments[0] * 8192
    assert plan.sequences < 20 * 64


def test_both_equations_show_the_same_world():
    sizes = {"pp": 2, "dp_replicate": 4, "cp": 2, "tp": 4}
    assert dense_equation(sizes) == "world 64 = pp 2 · dp_replicate 4 · dp_shard 1 · cp 2 · tp 4"
    assert expert_equation(sizes, ep=8, etp=1) == "world 64 = pp 2 · edp 4 · ep 8 · etp 1"
