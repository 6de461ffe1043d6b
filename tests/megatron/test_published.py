"""Trainings that others published, as recipes: each field by hand from what Megatron does with the flags."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.estimate.parameters import count_parameters
from megaspec.estimate.target import Target
from megaspec.megatron.command import read_command
from megaspec.megatron.draft import RecipeDraft
from megaspec.megatron.translate import check, translate
from megaspec.megatron.writing import recipe_text
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec
from tests.megatron import published


def draft_of(line: str, gpus: int | None = None) -> RecipeDraft:
    return translate(read_command(line.split()), gpus=gpus)


def recipe_of(draft: RecipeDraft, tmp_path: Path) -> Recipe:
    text = recipe_text(draft)
    assert draft.problems == []
    assert check(text, draft.sources) == []
    assert [name for name in draft.command.values if name not in text] == [], "a flag went without a word"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "moved.yaml").write_text(text)
    return compose("moved", (), [tmp_path]).recipe


def spec_of(recipe: Recipe, vocab_size: int | None = None) -> Spec:
    target = Target(gpus=recipe.launcher.ranks, gpu="H100", sm=90, gpu_memory=80 * 10**9)
    return resolve(recipe, target, Facts(run_dir="runs/moved", vocab_size=vocab_size))


def fields(section: object, **expected: object) -> None:
    """Each field of a section has the value that it should have."""
    assert {name: getattr(section, name) for name in expected} == expected


# Each part in full, so that no default of a recipe hides in it.
PLAIN_ATTENTION = {
    "kind": "gqa",
    "mask": {"kind": "causal"},
    "qkv_bias": False,
    "out_bias": False,
    "qk_norm": "none",
    "clip_qkv": None,
    "score_scale": None,
    "score_cap": None,
    "sinks": False,
    "output_gate": False,
    "temperature": {"kind": "none"},
}
GPT2 = {
    "embedding_scale": 1.0,
    "positions": {"kind": "learned"},
    "norm": {"kind": "layer", "eps": 1e-5, "weight": "scale", "bias": True},
    "layer": {"kind": "sequential", "norms": "pre"},
    "attention": {**PLAIN_ATTENTION, "qkv_bias": True, "out_bias": True, "dropout": 0.1},
    "mlp": {"kind": "plain", "activation": "gelu_tanh", "bias": True},
}
LLAMA = {
    "embedding_scale": 1.0,
    "positions": {"kind": "rotary", "base": 10_000.0, "fraction": 1.0, "scaling": {"kind": "none"}},
    "norm": {"kind": "rms", "eps": 1e-5, "weight": "scale"},
    "layer": {"kind": "sequential", "norms": "pre"},
    "attention": {**PLAIN_ATTENTION, "dropout": 0.1},
    "mlp": {"kind": "gated", "activation": "silu", "bias": False},
}


def parts(recipe: Recipe, expected: Mapping[str, object], **other: Mapping[str, object]) -> None:
    """The model has these parts, with the fields of `other` in their place."""
    wanted = {name: {**part, **other[name]} if name in other else part for name, part in expected.items()}
    assert {name: recipe.model.model_dump()[name] for name in wanted} == wanted


def lost_flags(draft: RecipeDraft) -> list[str]:
    return [problem.message.split()[0].rstrip(":") for problem in draft.lost]


def test_codeparrot_small(tmp_path):
    draft = draft_of(published.CODEPARROT_SMALL)
    assert draft.lost == []
    recipe = recipe_of(draft, tmp_path)
    # LayerNorm, learned positions, GELU, biases, dropout, tied embeddings: what Megatron does without a word
    fields(
        recipe.model,
        n_layers=12,
        d_model=768,
        n_heads=12,
        d_ffn=4 * 768,
        max_seq_len=1024,
        dropout=0.1,
        init_std=0.02,
        tied_embeddings=True,
        vocab_size="auto",
        vocab_pad_to=128,
    )
    parts(recipe, GPT2)
    fields(recipe.parallelism, tp=1, pp=1, dp_strategy="replicate", sequence_parallel=False, grad_reduce="fp32")
    fields(recipe.precision, kind="fp16", initial_scale=2.0**32, min_scale=1.0, growth_interval=1000, hysteresis=2)
    fields(recipe.data, seq_len=1024, split=(969.0, 30.0, 1.0), document_mask=False)
    assert [part.prefix for part in recipe.data.blend] == ["codeparrot_content_document"]
    fields(
        recipe.train,
        steps=150_000,
        global_batch=192,
        micro_batch=12,
        batch_ramp=None,
        seed=1234,
        eval_every=200,
        eval_samples=10 * 192,
    )
    fields(recipe.optim, kind="adamw", lr=5e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, clip=1.0)
    fields(recipe.optim.schedule, kind="cosine", warmup_steps=2000, decay_steps=150_000, min_lr=0.0, init_lr=0.0)
    fields(recipe.checkpoint, every=2000, keep="all")
    fields(recipe.log, every=10)
    spec = spec_of(recipe, vocab_size=32_768)
    assert (spec.world_size, spec.parallelism.dp_replicate) == (8, 8)
    # 12 d^2 + 13 d for each of 12 layers, both embeddings, the last norm: the 110M of the blog
    assert count_parameters(spec.model).total == 12 * (12 * 768**2 + 13 * 768) + (32_768 + 1024) * 768 + 2 * 768
    told = dict(draft.silent)
    assert "added up in fp16" in told["--accumulate-allreduce-grads-in-fp32"]
    assert "becomes 969,30,1" in told["--split"]


def test_aws_gpt3_counts_in_samples(tmp_path):
    draft = draft_of(published.AWS_GPT3)
    assert draft.lost == []
    recipe = recipe_of(draft, tmp_path)
    fields(recipe.model, n_layers=36, d_model=4096, n_heads=32, d_ffn=16_384, init_std=0.006, dropout=0.1)
    parts(recipe, GPT2)
    fields(recipe.parallelism, tp=4, pp=2, sequence_parallel=False, dp_strategy="replicate")
    fields(recipe.parallelism.recompute, kind="selective", parts=None)
    fields(recipe.parallelism.pipeline, virtual_stages=1)
    # Megatron takes whole steps of a constant batch, and its rate reaches the ends within a step of these
    fields(
        recipe.train,
        steps=146_484_375 // 288,
        global_batch=288,
        micro_batch=1,
        eval_every=1000,
        eval_samples=40 * 288,
    )
    fields(
        recipe.optim.schedule,
        kind="cosine",
        decay_steps=126_953_125 // 288,
        warmup_steps=183_105 // 288,
        min_lr=6e-6,
    )
    fields(recipe.optim, lr=6e-5, beta2=0.95, weight_decay=0.1, clip=1.0)
    fields(recipe.data, split=(98.0, 2.0, 0.0))
    fields(recipe.checkpoint, every=0, keep=2)
    assert (recipe.precision.kind, recipe.launcher.ranks) == ("fp16", 16)
    spec = spec_of(recipe, vocab_size=50_257)
    assert spec.parallelism.dp_replicate == 2
    assert count_parameters(spec.model).total == 36 * (12 * 4096**2 + 13 * 4096) + (50_257 + 2048) * 4096 + 2 * 4096
    assert dict(draft.silent)["--recompute-activations"].startswith("becomes --recompute-granularity selective")


def test_aws_llama2_has_biases_which_published_llamas_have_not(tmp_path):
    """The script forgets --disable-bias-linear, so Megatron trains a Llama with biases."""
    draft = draft_of(published.AWS_LLAMA2)
    assert draft.lost == []
    recipe = recipe_of(draft, tmp_path)
    fields(
        recipe.model,
        n_layers=80,
        d_model=8192,
        n_heads=64,
        n_kv_heads=8,
        # --ffn-hidden-size is forgotten, too: two thirds of 4 d in multiples of 64, not Llama's 28,672
        d_ffn=int(8192 * 4 * 2 / 3 / 64) * 64,
        dropout=0.1,
        tied_embeddings=False,
        vocab_size=32_000,
        init_std=0.006,
    )
    parts(recipe, LLAMA, attention={"qkv_bias": True, "out_bias": True}, mlp={"bias": True})
    assert recipe.model.d_ffn == 21_824
    fields(recipe.parallelism, tp=4, pp=4, sequence_parallel=True, dp_strategy="zero1")
    fields(recipe.train, steps=5, global_batch=2048, micro_batch=1, eval_every=0)
    fields(recipe.optim.schedule, kind="cosine", decay_steps="auto", warmup_steps=0, min_lr=6e-6)
    assert (recipe.precision.kind, recipe.data.split, recipe.log.every) == ("fp16", (100.0, 0.0, 0.0), 1)
    spec = spec_of(recipe)
    assert (recipe.launcher.ranks, spec.parallelism.dp_shard) == (16, 1)
    weights = 2 * 8192 * 8192 + 2 * 8192 * 8 * 128 + 3 * 8192 * 21_824
    biases = 8192 + 2 * 8 * 128 + 8192 + 2 * 21_824 + 8192
    assert count_parameters(spec.model).total == 80 * (weights + biases + 2 * 8192) + 2 * 32_000 * 8192 + 8192


def test_llm_jp_32b_is_stable_until_its_last_step(tmp_path):
    draft = draft_of(published.LLM_JP_32B, gpus=256)
    assert draft.lost == []
    recipe = recipe_of(draft, tmp_path)
    fields(
        recipe.model,
        n_layers=64,
        d_model=5120,
        d_ffn=27_648,
        n_heads=40,
        n_kv_heads=8,
        dropout=0.0,
        tied_embeddings=False,
        max_seq_len=4096,
    )
    parts(recipe, LLAMA, positions={"base": 500_000.0}, norm={"eps": 1e-6}, attention={"dropout": 0.0})
    fields(recipe.parallelism, tp=4, pp=1, cp=1, sequence_parallel=True, dp_strategy="zero1", grad_reduce="fp32")
    fields(recipe.train, steps=12_000_000, global_batch=512, micro_batch=2, eval_every=0)
    fields(recipe.optim, lr=2e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    fields(
        recipe.optim.schedule,
        kind="wsd",
        warmup_steps=2000,
        decay_steps=12_000_000,
        wsd_decay="linear",
        wsd_decay_steps=1,
        min_lr=2e-5,
    )
    assert [(part.prefix, part.weight) for part in recipe.data.blend] == [("ja", 0.7), ("en", 0.3)]
    fields(recipe.data, split=(1.0, 0.0, 0.0), cache="cache", seq_len=4096)
    fields(recipe.launcher, ranks=256, timeout_seconds=7200.0)
    assert spec_of(recipe).parallelism.dp_shard == 256 // 4
    text = " ".join(recipe_text(draft).replace("\n#    ", "").split())
    assert "--use-mpi: a flag of LLM-jp's fork of Megatron-LM: the launcher tells each rank its number" in text


def test_mixtral_8x22b_starts_from_weights_that_are_not_read(tmp_path):
    draft = draft_of(published.MIXTRAL_8X22B)
    assert lost_flags(draft) == ["--load"]
    recipe = recipe_of(draft, tmp_path)
    fields(
        recipe.model,
        n_layers=56,
        d_model=6144,
        d_ffn=16_384,
        n_heads=48,
        n_kv_heads=8,
        vocab_size=32_000,
        vocab_pad_to=128,
        init_std=0.008,
        tied_embeddings=False,
    )
    parts(recipe, LLAMA, attention={"dropout": 0.0})
    # experts become as wide as the feed-forward layer
    fields(recipe.model.moe, n_experts=8, top_k=2, d_expert="auto", every=1, first_dense=0, d_shared=None)
    assert [loss.model_dump() for loss in recipe.model.moe.router.losses] == [{"kind": "aux", "coefficient": 0.01}]
    fields(recipe.model.moe.router, score="softmax", norm_top_k=True, z_loss=0.0)
    fields(
        recipe.parallelism,
        tp=2,
        pp=8,
        cp=1,
        ep=8,
        etp=1,
        dispatch="all_to_all",
        sequence_parallel=True,
        dp_strategy="zero1",
    )
    fields(recipe.parallelism.pipeline, virtual_stages=7)
    fields(
        recipe.train,
        steps=268_554_688 // 256,
        global_batch=256,
        micro_batch=1,
        eval_every=500,
        eval_samples=32 * 256,
    )
    fields(recipe.optim.schedule, kind="cosine", decay_steps=255_126_953 // 256, warmup_steps=162_761 // 256)
    fields(recipe.optim, lr=1.2e-5, beta2=0.95)
    fields(recipe.checkpoint, every=500, keep="all")
    fields(recipe.launcher, ranks=128, timeout_seconds=3600.0)
    spec = spec_of(recipe)
    assert (spec.parallelism.dp_shard, spec.model.moe.d_expert) == (128 // (2 * 8), 16_384)
    # Mixtral 8x22B: 140.6 billion parameters
    layer = 2 * 6144 * 6144 + 2 * 6144 * 8 * 128 + 8 * 3 * 6144 * 16_384 + 8 * 6144 + 2 * 6144
    assert count_parameters(spec.model).total == 56 * layer + 2 * 32_000 * 6144 + 6144


def test_bloom_is_refused_for_what_its_fork_alone_has():
    with pytest.raises(RecipeError) as caught:
        draft_of(published.BLOOM_176B)
    assert [str(problem) for problem in caught.value.problems] == [
        "--position-embedding-type alibi: must be learned_absolute, rope, yarn, mrope, relative or none"
    ]
    draft = draft_of(published.BLOOM_176B.replace(" alibi", " learned_absolute"))
    assert [problem.message for problem in draft.problems] == ["--data-path: is missing; give it, or --mock-data"]
    # --load is where the run saves: it goes on with its own; what is left out of this list trains the same
    assert sorted(lost_flags(draft)) == [
        "--checkpoint-activations",
        "--deepspeed_config",
        "--embed-layernorm",
        "--rampup-batch-size",
        "--train-weighted-split-paths-path",
        "--valid-weighted-split-paths-path",
    ]
    lost = "\n".join(problem.message for problem in draft.lost)
    assert "--embed-layernorm: a flag of BigScience's fork Megatron-DeepSpeed: no such norm" in lost
    assert "train.batch_ramp={start: 192, increment: 16, samples: 9765625}" in lost
