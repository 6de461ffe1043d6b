"""Parameters, FLOPs, batches and the formula, against published and golden numbers."""

import json

import pytest

from megaspec.compose.compose import compose
from megaspec.estimate.batch_sizes import batch_plan
from megaspec.estimate.flops import flops_per_sequence
from megaspec.estimate.formula import dense_equation, expert_equation
from megaspec.estimate.parameters import count_parameters
from megaspec.estimate.target import Target
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
    assert [model.facts.padded_vocab(tp=tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]


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


PARTS = {
    "llama": (),
    "gpt": (
        "model.positions={kind: learned}",
        "model.norm={kind: layer}",
        "model.attention={kind: gqa, qkv_bias: true, out_bias: true}",
        "model.mlp={kind: plain, bias: true}",
    ),
    "post-norm": ("model.layer={kind: sequential, norms: post}",),
    "sandwich": ("model.layer={kind: sequential, norms: sandwich}", "model.norm={kind: rms, weight: one_plus}"),
    "parallel": ("model.layer={kind: parallel}", "model.attention={kind: gqa, qkv_bias: true, qk_norm: per_head}"),
    "flat": (
        "model.layer={kind: flat, mixers: [attention, mlp, attention, moe]}",
        "model.moe={n_experts: 4, top_k: 2}",
    ),
    "no weights": ("model.norm={kind: layer, weight: none, bias: false}", "model.positions={kind: none}"),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_module(parts, tied):
    torch = pytest.importorskip("torch")
    build = pytest.importorskip("megaspec.runtime.build")
    registry = pytest.importorskip("megaspec_kernels.registry")
    overrides = [
        *parts,
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
