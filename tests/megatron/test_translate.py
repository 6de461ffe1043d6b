"""Recipes from commands: the same model, batch, schedule and layout; what can't be said is told, never dropped."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspec.cli import main
from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.estimate.parameters import count_parameters
from megaspec.estimate.target import Target
from megaspec.megatron import translate as translating
from megaspec.megatron.command import read_command
from megaspec.megatron.draft import RecipeDraft
from megaspec.megatron.flag import Fate
from megaspec.megatron.flags import BY_NAME, FLAGS
from megaspec.megatron.translate import check, translate
from megaspec.megatron.writing import recipe_text
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.rules.unread import unmet_needs
from megaspec.spec import Spec
from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.spec import BatchRamp, TrainSpec
from tests.megatron import commands
from tests.megatron.commands import LLAMA, SMALL

REAL = ("GPT3_175B", "LLAMA3_8B", "MIXTRAL_8X7B", "DEEPSEEK_V3")


def draft_of(line: str, gpus: int | None = None) -> RecipeDraft:
    return translate(read_command(line.split()), gpus=gpus)


def recipe_of(line: str, tmp_path: Path, gpus: int | None = None) -> Recipe:
    """Through the file, as a user has it."""
    draft = draft_of(line, gpus)
    assert (draft.lost, draft.problems) == ([], [])
    (tmp_path / "recipes").mkdir(exist_ok=True)
    (tmp_path / "recipes" / "moved.yaml").write_text(recipe_text(draft))
    return compose("moved", (), [tmp_path]).recipe


def spec_of(line: str, tmp_path: Path, gpus: int | None = None) -> Spec:
    recipe = recipe_of(line, tmp_path, gpus)
    target = Target(gpus=recipe.launcher.ranks, gpu="H100", sm=90, gpu_memory=80 * 10**9)
    return resolve(recipe, target, Facts(run_dir="runs/moved"))


# Sizes as model cards and papers give them; GPT-3 by hand: 96 layers of 12 d^2 + 13 d, embeddings, last norm.
@pytest.mark.parametrize(
    ("name", "parameters", "world", "dp"),
    [
        ("GPT3_175B", 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288, 128, 1),
        ("LLAMA3_8B", 8_030_261_248, 8, 4),
        ("MIXTRAL_8X7B", 46_702_792_704, 32, 8),
        ("DEEPSEEK_V3", 671_026_419_200, 32, 4),
    ],
)
def test_published_commands_become_the_models_that_they_name(name, parameters, world, dp, tmp_path):
    spec = spec_of(getattr(commands, name), tmp_path)
    assert count_parameters(spec.model).total == parameters
    assert spec.world_size == world
    assert spec.parallelism.dp_replicate * spec.parallelism.dp_shard == dp
    assert check(recipe_text(draft_of(getattr(commands, name))), {}) == []


@pytest.mark.parametrize("name", [*REAL, "LLAMA3_8B_FP8"])
def test_every_given_flag_is_in_the_recipe(name):
    draft = draft_of(getattr(commands, name))
    text = recipe_text(draft)
    assert [n for n in draft.command.values if n not in text] == []


def test_what_is_rounded_says_so():
    lengths = "--train-samples 1000000 --lr-warmup-samples 1000 --lr-decay-samples 153600"
    command = SMALL.replace("--train-iters 100", lengths).replace("--global-batch-size 8", "--global-batch-size 512")
    text = recipe_text(draft_of(command))
    for line in (
        "steps: 1953  # --train-samples; 1,000,000 samples: 1,953.12 steps, rounded down",
        "warmup_steps: 1  # --lr-warmup-samples; 1,000 samples: 1.95 steps, rounded down",
        "decay_steps: 300  # --lr-decay-samples; 153,600 samples",
    ):
        assert line in map(str.strip, text.splitlines())
    # with a ramp Megatron begins a step while samples are left: 24 steps of 32 are 768, one of 64 goes past 800
    ramp = SMALL.replace("--global-batch-size 8", f"--step-batch-size-schedule 0:32,{768 * 32}:64")
    text = recipe_text(draft_of(ramp.replace("--train-iters 100", "--train-samples 800")))
    assert "steps: 25  # --train-samples; 800 samples, the last step goes past them" in text
    text = recipe_text(draft_of(ramp.replace("--train-iters 100", "--train-samples 832")))
    assert "steps: 25  # --train-samples; 832 samples\n" in text
    text = recipe_text(draft_of(f"{SMALL} --lr-warmup-fraction 0.015"))
    assert "warmup_steps: 2  # --lr-warmup-fraction; of 100 steps, rounded from 1.50" in text
    text = recipe_text(draft_of(f"{SMALL} --lr-warmup-fraction 0.02"))
    assert "warmup_steps: 2  # --lr-warmup-fraction; of 100 steps\n" in text
    assert "for 1 GPU. " in text
    assert "for 8 GPUs. " in recipe_text(draft_of(SMALL, 8))


def test_lengths_and_schedules_are_those_of_the_command(tmp_path):
    gpt = recipe_of(commands.GPT3_175B, tmp_path)
    assert (gpt.train.steps, gpt.train.global_batch) == (500_000, 1536)
    # 2.4 billion tokens are 1,171,875 samples of 2,048
    ramp = {"start": 16, "increment": 304, "samples": 5 * 1_171_875, "first_step": 0}
    assert gpt.train.batch_ramp.model_dump() == ramp
    schedule = gpt.optim.schedule
    assert (schedule.kind, schedule.decay_steps, schedule.warmup_steps, schedule.min_lr) == (
        "cosine",
        430000,
        430,
        6e-6,
    )
    assert (gpt.model.dropout, gpt.model.attention.dropout, gpt.model.tied_embeddings) == (0.1, 0.1, True)
    assert (gpt.precision.kind, gpt.precision.initial_scale, gpt.optim.beta2) == ("fp16", 2.0**32, 0.95)
    # the batch of its evaluation is that of --global-batch-size, which is not given: micro batch times one rank
    assert (gpt.train.eval_every, gpt.train.eval_samples) == (1000, 10)
    assert (gpt.checkpoint.every, gpt.checkpoint.keep) == (10000, "all")
    llama = recipe_of(commands.LLAMA3_8B, tmp_path)
    assert (llama.train.steps, llama.optim.schedule.decay_steps) == (1953125 // 128, 1949218 // 128)
    assert (llama.parallelism.grad_reduce, llama.parallelism.dp_strategy, llama.parallelism.cp) == ("bf16", "zero1", 2)
    mixtral = recipe_of(commands.MIXTRAL_8X7B, tmp_path)
    assert mixtral.parallelism.pipeline.virtual_stages == 32 // 4 // 2
    assert [(b.prefix, b.weight) for b in mixtral.data.blend] == [("data/a", 30.0), ("data/b", 70.0)]
    assert (mixtral.optim.beta2, mixtral.optim.weight_decay) == (0.999, 0.1)


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        ("--data-path data/a", [("data/a", None)]),
        ("--data-path 1.0 data/a", [("data/a", 1.0)]),
        ("--data-path 7 data/a 3 data/b", [("data/a", 7.0), ("data/b", 3.0)]),
        ("--data-path data/a data/b", [("data/a", None), ("data/b", None)]),
        ("--data-path data/a data/b data/c", [("data/a", None), ("data/b", None), ("data/c", None)]),
        ("--train-data-path 1.0 data/a", [("data/a", None)]),
        ("--train-data-path 1 data/a 2 data/b", [("data/a", 1.0), ("data/b", 2.0)]),
    ],
)
def test_a_blend_has_weights_where_megatron_counts_them(words, blend, tmp_path):
    """What the forms mean there is held by tests/data/test_blends.py."""
    command = SMALL.replace("--data-path data/x", words)
    recipe = recipe_of(command, tmp_path)
    assert [(part.prefix, part.weight) for part in recipe.data.blend] == blend
    assert draft_of(command).lost == draft_of(SMALL).lost


def test_weights_of_some_data_sets_only_are_refused(capsys):
    command = SMALL.replace("--data-path data/x", "--data-path 1 data/a data/b data/c")
    assert main(["from-megatron", "--", *command.split()]) == 64
    assert "must be weights and prefixes in turn, or prefixes only" in capsys.readouterr().err


def test_a_constant_rate_takes_no_decay_along(tmp_path):
    words = "--lr-decay-style constant --lr-decay-iters 50 --min-lr 1e-5 --lr-warmup-fraction 0.1"
    schedule = recipe_of(f"{SMALL} {words}", tmp_path).optim.schedule
    assert (schedule.kind, schedule.decay_steps, schedule.min_lr, schedule.warmup_steps) == ("constant", "auto", 0, 5)
    assert "--min-lr" in recipe_text(draft_of(f"{SMALL} {words}"))


# What Megatron does without a flag, written out: its defaults are those of GPT-2's days.
def test_defaults_are_those_of_megatron(tmp_path):
    spec = spec_of(SMALL, tmp_path, gpus=2)
    assert (spec.model.d_ffn, spec.model.dropout, spec.model.tied_embeddings) == (256, 0.1, True)
    optim = spec.optim
    assert (optim.weight_decay, optim.beta1, optim.beta2, optim.eps, optim.clip) == (0.01, 0.9, 0.999, 1e-8, 1.0)
    assert (optim.schedule.kind, optim.schedule.decay_steps, optim.schedule.warmup_steps) == ("linear", 100, 0)
    assert (spec.precision.kind, spec.data.split, spec.log.every) == ("fp32", (969.0, 30.0, 1.0), 100)
    assert (spec.train.seed, spec.data.seed, spec.train.eval_every) == (1234, 1234, 0)
    assert spec_of(f"{SMALL} --hidden-size 256 {LLAMA}", tmp_path).model.d_ffn == int(256 * 8 / 3 / 64) * 64


def set_by(more: str, tmp_path: Path, key: str) -> object:
    value: object = recipe_of(f"{SMALL} {LLAMA} {more}", tmp_path, gpus=16)
    for part in key.split("."):
        value = getattr(value, part)
    return value.model_dump() if isinstance(value, tuple) and value and hasattr(value[0], "model_dump") else value


EXPERTS = "--num-experts 8"


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ("--rotary-base 7", "model.positions.base", 7.0),
        ("--use-rope-scaling", "model.positions.scaling.factor", 8.0),
        ("--group-query-attention", "model.n_kv_heads", 1),
        ("--qk-layernorm", "model.attention.qk_norm", "per_head"),
        ("--clip-grad 0", "optim.clip", None),
        ("--vocab-size 300 --tokenizer-type NullTokenizer", "model.vocab_size", 300),
        (f"{EXPERTS} --moe-layer-freq 2", "model.moe.every", 2),
        (f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*3)", "model.moe.first_dense", 1),
        (f"{EXPERTS} --moe-layer-freq [0,1,1,0]", "model.moe.layers", (0, 1, 1, 0)),
        (f"{EXPERTS} --tensor-model-parallel-size 4 --sequence-parallel", "parallelism.etp", 4),
        (f"{EXPERTS} --tensor-model-parallel-size 4 --expert-tensor-parallel-size 2 --sequence-parallel",
         "parallelism.etp", 2),
        (f"{EXPERTS} --expert-model-parallel-size 2", "parallelism.dispatch", "all_gather"),
        (f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type flex",
         "parallelism.dispatch", "all_to_all"),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "model.moe.router.balancing", "sinkhorn"),
        (f"{EXPERTS} --moe-router-score-function sqrtsoftplus", "model.moe.router.score", "sqrt_softplus"),
        (f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss", "model.moe.router.losses", ()),
        ("--use-torch-fsdp2", "parallelism.dp_strategy", "fsdp"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallelism.dp_strategy", "zero2"),
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 4", "parallelism.dp_strategy", "hsdp"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 4", "parallelism.dp_replicate", 4),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t,|tL",
         "parallelism.pipeline.layout", "Et|t|t|tL"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t,|tL",
         "parallelism.pipeline.virtual_stages", 2),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
         "parallelism.pipeline.first_layers", 1),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
         "parallelism.context.factors", (2, 2)),
        ("--context-parallel-size 2 --cp-comm-type a2a", "parallelism.context.kind", "all_to_all"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2",
         "parallelism.recompute.method", "block"),
        ("--recompute-granularity full --recompute-activations", "parallelism.recompute.kind", "selective"),
        (f"{EXPERTS} --moe-layer-recompute", "parallelism.recompute.parts", ("core_attention", "moe")),
        ("--ddp-bucket-size 40000000", "parallelism.bucket_mb", 160.0),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "precision.recipe", "blockwise"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --first-last-layers-bf16", "precision.last_layers_bf16", 1),
        ("--bf16 --fp4-format e2m1", "precision.recipe", "nvfp4"),
        ("--bf16 --fp4-format e2m1 --first-last-layers-bf16", "precision.first_layers_bf16", 1),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8 --use-distributed-optimizer",
         "optim.formats.exp_avg", "fp8"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 9", "optim.schedule.wsd_decay", "exponential"),
        ("--lr-decay-style inverse-square-root", "optim.schedule.kind", "inverse_sqrt"),
        ("--start-weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style linear",
         "optim.weight_decay", 0.1),
        ("--optimizer sgd --weight-decay 0 --sgd-momentum 0.5", "optim.momentum", 0.5),
        ("--reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss",
         "data.document_mask", True),
        ("--split 9,1", "data.split", (9.0, 1.0, 0.0)),
        ("--train-data-path data/x", "data.split", (1.0, 0.0, 0.0)),
        ("--global-batch-size 37 --decrease-batch-size-if-needed", "train.global_batch", 32),
    ],
)  # fmt: skip
def test_flags_set_their_keys(more, key, value, tmp_path):
    assert set_by(more, tmp_path, key) == value


def with_schedule(schedule: str, *, more: str = "--train-iters 100") -> str:
    line = SMALL.replace("--global-batch-size 8", f"--step-batch-size-schedule {schedule}")
    return line.replace("--train-iters 100", more)


def test_a_batch_that_steps_up_becomes_a_ramp(tmp_path):
    """Thresholds are tokens, of which SMALL has 32 in a sample, with and without a suffix."""
    recipe = recipe_of(with_schedule("0:8,512:16,1024:24", more="--train-samples 80"), tmp_path)
    assert recipe.train.batch_ramp.model_dump() == {
        "start": 8,
        "increment": 8,
        "samples": 32,
        "first_step": 0,
    }
    assert recipe.train.steps == 2 + 1 + 2  # 8 8 16 24 24 = 80
    for word in ("1.024K", "1.024k", "0.001024M", "1024"):
        assert recipe_of(with_schedule(f"0:8,512:16,{word}:24"), tmp_path).train.batch_ramp.samples == 32
    plain = recipe_of(with_schedule("0:32,1000000:64"), tmp_path)
    assert plain.train.batch_ramp.samples == 1_000_000 // 32
    # the order on the line says nothing
    assert recipe_of(with_schedule("1000000:64,0:32"), tmp_path) == plain
    assert draft_of(with_schedule("0:8")).content["train"]["global_batch"] == 8


def batches_of_megatron(thresholds: list[int], batches: list[int], seq_len: int, steps: int) -> list[int]:
    """As Megatron's StepBatchsizeNumMicroBatchesCalculator counts: the last batch whose threshold lies behind."""
    starts = [int(t) // seq_len for t in thresholds]
    taken, consumed = [], 0
    for _ in range(steps):
        taken.append([batch for start, batch in zip(starts, batches, strict=True) if consumed >= start][-1])
        consumed += taken[-1]
    return taken


@given(
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 9_000),
    st.integers(0, 3),
    st.integers(1, 67),
)
@settings(max_examples=150, deadline=None)
def test_a_ramp_takes_the_batches_of_megatron(start, increment, parts, tokens, uneven, seq_len):
    """Thresholds that are no multiple of the sequence length, too; what is no ramp is told."""
    thresholds = [k * tokens + (uneven if k > 1 else 0) for k in range(parts + 1)]
    batches = [start + k * increment for k in range(parts + 1)]
    words = ",".join(f"{t}:{b}" for t, b in zip(thresholds, batches, strict=True))
    line = with_schedule(words).replace("--seq-length 32", f"--seq-length {seq_len}")
    draft = draft_of(line)
    if len({t // seq_len for t in thresholds}) < len(thresholds):
        assert "both begin at" in str(draft.problems[0])
        return
    ramp = draft.content["train"].get("batch_ramp")
    if ramp is None:
        assert "equal increments" in str(draft.lost[0])
        return
    spec = TrainSpec(steps=1, global_batch=draft.content["train"]["global_batch"], batch_ramp=BatchRamp(**ramp))
    schedule = BatchSchedule(spec)
    steps = 2 + thresholds[-1] // seq_len // start
    made = [schedule.batch(step) for step in range(min(steps, 300))]
    assert made == batches_of_megatron(thresholds, batches, seq_len, len(made))


def test_thresholds_that_are_no_whole_samples_are_rounded_as_there():
    """2.4 billion tokens are 292,968.75 samples of 8,192: five parts, none of which is as long as the next."""
    line = commands.GPT3_175B.replace("--seq-length 2048", "--seq-length 8192").replace(
        "embeddings 2048", "embeddings 8192"
    )
    draft = draft_of(line)
    assert draft.lost == []
    ramp = draft.content["train"]["batch_ramp"]
    assert ramp["samples"] in (1_464_843, 1_464_844)
    schedule = BatchSchedule(TrainSpec(steps=1, global_batch=1536, batch_ramp=BatchRamp(**ramp)))
    step, sample = 0, 0
    for k, batch in enumerate((16, 320, 624, 928, 1232), start=1):
        while sample < int(k * 2.4e9) // 8192:
            assert schedule.batch(step) == batch
            n = max(1, (int(k * 2.4e9) // 8192 - sample) // batch)  # all but the last of them at once
            step, sample = step + n, sample + n * batch
    assert schedule.batch(step) == 1536


def test_what_the_learning_rate_follows_under_a_schedule_of_the_batch_is_told():
    # 100 steps times one micro batch of 1 on one rank: 100 samples, behind 12 steps of 8
    told = dict(draft_of(with_schedule("0:8,512:16,1024:24"), gpus=1).silent)
    assert "a decay over 100 steps ends at step" in told["--lr-decay-iters"]
    assert "ends at step 6 there, at 100 here" in told["--lr-decay-iters"]  # 8 8 16 24 24 = 80, the next goes past
    told = dict(draft_of(with_schedule("0:8,512:16,1024:24", more="--train-samples 800")).silent)
    assert "follows samples, here steps" in told["--lr-decay-style"]
    constant = with_schedule("0:8,512:16,1024:24", more="--train-samples 800 --lr-decay-style constant")
    assert not {"--lr-decay-style", "--lr-decay-iters"} & dict(draft_of(constant).silent).keys()
    same = dict(draft_of(with_schedule("0:4"), gpus=4).silent)
    assert "--lr-decay-iters" not in same


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--position-embedding-type mrope", "--position-embedding-type mrope: no such positions"),
        ("--position-embedding-type yarn --rotary-scaling-factor 4", "--rotary-scaling-factor 4: YaRN stretches"),
        ("--fp32-residual-connection", "--fp32-residual-connection: no such activation or residual stream"),
        ("--rotary-interleaved", "--rotary-interleaved: no such positions"),
        ("--use-rope-scaling --rotary-seq-len-interpolation-factor 4", "frequencies are stretched in one way"),
        ("--multi-latent-attention --rope-type rope --rotary-percent 0.5", "latent attention turns as a whole"),
        ("--optimizer muon", "optim.kind is adamw or sgd"),
        ("--optimizer sgd", "--weight-decay 0.01 (Megatron's default): with --optimizer sgd"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: no such layers"),
        ("--embedding-init-method-std 1", "the embedding starts with model.init_std, too"),
        ("--bf16 --fp8-format hybrid --fp8-recipe custom", "--fp8-recipe custom: what a quantizer factory makes"),
        ("--reset-attention-mask", "without --reset-position-ids, --eod-mask-loss"),
        ("--load other", "weights are made from the seed"),
        ("--save a --load a --finetune", "weights are made from the seed"),
        ("--multi-latent-attention", "without --qk-layernorm; latents are always normed here"),
        ("--multi-latent-attention --qk-layernorm --rotary-scaling-factor 40", "YaRN stretches"),
        ("--num-experts 8 --moe-router-load-balancing-type quantile_balancing", "top_k or sinkhorn"),
    ],
)
def test_what_a_recipe_can_not_say_is_lost_and_told(more, told, capsys):
    line = f"{SMALL} {LLAMA} {more}"
    assert main(["from-megatron", "--gpus", "4", "--", *line.split()]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert "--partial" in err
    assert main(["from-megatron", "--gpus", "4", "--partial", "--", *line.split()]) == 0
    out, err = capsys.readouterr()
    assert "# Lost: this recipe trains something else" in out
    assert told in " ".join(out.replace("\n#    ", "").split())
    assert "lost: " in err


def test_a_part_of_each_head_turns():
    assert draft_of(f"{SMALL} {LLAMA} --rotary-percent 0.25").content["model"]["positions"]["fraction"] == 0.25
    assert "fraction" not in draft_of(f"{SMALL} {LLAMA}").content["model"]["positions"]


@pytest.mark.parametrize("kind", ["cyclic", "external"])
def test_another_order_of_samples_is_never_passed_over(kind, capsys):
    """It depends on the layout there; what to give instead is said."""
    line = f"{SMALL} {LLAMA} --dataloader-type {kind}"
    assert main(["from-megatron", "--gpus", "4", "--", *line.split()]) == 64
    err = capsys.readouterr().err
    assert f"--dataloader-type {kind}" in err
    assert "depends on dp and on the micro batch" in err
    assert "leave the flag out, or give single" in err
    assert main(["from-megatron", "--gpus", "4", "--", *line.replace(kind, "single").split()]) == 0


def test_a_published_command_that_can_not_be_said_lists_all_that_is_lost():
    lost = "\n".join(map(str, draft_of(commands.LLAMA3_8B_FP8).lost))
    for name in ("--decoupled-lr", "--decoupled-min-lr"):
        assert name in lost


@pytest.mark.parametrize("more", ["--rotary-percent 1.0", "--loss-scale-window 5", "--dataloader-type single"])
def test_what_is_done_anyway_is_not_lost(more):
    assert draft_of(f"{SMALL} {LLAMA} {more}").lost == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--tensor-model-parallel-size 3", "(--tensor-model-parallel-size 3)"),
        ("--num-attention-heads 0", "model.n_heads=0 must be greater than 0   (--num-attention-heads 0)"),
        ("--hidden-dropout 1.5", "(--hidden-dropout 1.5)"),
        ("--lr-warmup-iters 200", "(--lr-warmup-iters 200)"),
        ("--global-batch-size 9", "(--global-batch-size 9)"),
    ],
)
def test_broken_rules_name_the_flag(more, told, capsys):
    assert main(["from-megatron", "--gpus", "4", "--", *f"{SMALL} {LLAMA} {more}".split()]) == 64
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--bf16", "--num-layers or --encoder-num-layers is missing"),
        (f"{SMALL} --train-samples 3", "--train-iters 100: with --train-samples; give one"),
        (f"{SMALL} --bf16 --fp16", "--fp16: with --bf16"),
        (SMALL.replace("--data-path data/x", ""), "--data-path: is missing"),
        (f"{SMALL.replace('--vocab-size 256', '')} --mock-data", "give --vocab-size, too"),
        (f"{SMALL} {LLAMA} --num-experts 4 --moe-layer-freq __import__('os')", "a list of 0 and 1"),
        (f"{SMALL} {LLAMA} --num-experts 4 --moe-layer-freq [0]*99999999", "a list of 0 and 1"),
        (f"{SMALL} {LLAMA} --num-experts 4 --moe-aux-loss-coeff 1 2", "2 for 1 kinds of balancing"),
        (f"{SMALL} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "multiple of it"),
        (f"{SMALL} --recompute-granularity selective --recompute-modules gdp_qkv", "gdp_qkv: recomputed are"),
        (
            f"{SMALL} --step-batch-size-schedule 0:8,64:16",
            "--global-batch-size 8: with --step-batch-size-schedule, which",
        ),
        (with_schedule("0:8,x:16"), "x:16: must be THRESHOLD:BATCH, such as 0:768 or 2.4B:1536"),
        (with_schedule("0:8,-5:16"), "must be THRESHOLD:BATCH"),
        (
            f"{with_schedule('0:8')} --decrease-batch-size-if-needed",
            "--step-batch-size-schedule; Megatron refuses both",
        ),
        (with_schedule("0:8,1e400:16"), "must be THRESHOLD:BATCH"),
        (with_schedule("0:8,9:0"), "must be THRESHOLD:BATCH"),
        (with_schedule("64:8,128:16"), "its first threshold must be 0"),
        (with_schedule("0:8,63:16,40:24"), "both begin at sample 1 (of 32 tokens each)"),
        (with_schedule(",".join(f"{32 * n}:{n + 1}" for n in range(1001))), "1,001 batch sizes; 1,000 at most"),
    ],
)
def test_commands_that_say_nothing_clear(line, told, capsys):
    assert main(["from-megatron", "--", *line.split()]) == 64
    assert told in capsys.readouterr().err


def test_flags_without_the_dashes_in_front(capsys):
    assert main(["from-megatron", "--num-layers", "3"]) == 64
    assert "--num-layers: unknown; the flags of pretrain_gpt.py stand after --" in capsys.readouterr().err


def test_the_world_is_torchruns_or_gpus_or_the_fewest(capsys):
    wide = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 64"
    assert draft_of(f"{SMALL} {wide}").gpus == 4
    assert draft_of(f"{SMALL} {wide}", gpus=16).gpus == 16
    # pp * lcm(tp * cp, etp * ep): 2 * lcm(2, 2 * 8)
    assert draft_of(f"{SMALL} {wide} --num-experts 8 --expert-model-parallel-size 8").gpus == 32
    line = f"torchrun --nproc_per_node 8 --nnodes 2 a.py {SMALL} {wide}"
    assert draft_of(line).gpus == 16
    assert main(["from-megatron", "--gpus", "4", "--", *line.split()]) == 64
    assert "torchrun starts 16" in capsys.readouterr().err


def test_a_file_is_written_once_and_plans(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["from-megatron", "--out", "recipes/mine.yaml", "--name", "mine-1", "--", *SMALL.split()]
    assert main(words) == 0
    assert compose("mine").recipe.name == "mine-1"
    assert main(words) == 64
    assert "recipes/mine.yaml exists" in capsys.readouterr().err


@dataclass
class Watched(RecipeDraft):
    """A draft that keeps which flags were asked for."""

    asked: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> object:
        self.asked.add(name)
        return super().__getitem__(name)

    def is_given(self, name: str) -> bool:
        self.asked.add(name)
        return super().is_given(name)


def test_every_translated_flag_is_asked_for(monkeypatch):
    """A flag of the table that no translation reads would be dropped without a word."""
    made: list[Watched] = []
    monkeypatch.setattr(translating, "RecipeDraft", lambda *a: made.append(Watched(*a)) or made[-1])
    more = (
        f"{EXPERTS} --moe-expert-capacity-factor 1 --fp16 --pipeline-model-parallel-size 2 --context-parallel-size 2",
        "--multi-latent-attention --optimizer sgd --lr-decay-style WSD --use-megatron-fsdp --save a --load a",
        "--bf16 --fp4-format e2m1",
        "--bf16 --fp8-format hybrid --expert-model-parallel-size 2 "
        f"--first-last-layers-bf16 --use-rope-scaling {EXPERTS} --moe-layer-recompute "
        "--moe-router-enable-expert-bias --use-precision-aware-optimizer --weight-decay-incr-style linear",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --group-query-attention "
        "--recompute-granularity full --use-distributed-optimizer --context-parallel-size 2",
    )
    for one in more:
        draft_of(f"{SMALL} {LLAMA} {one}")
    draft_of(SMALL.replace("--global-batch-size 8", "--step-batch-size-schedule 0:8"))
    draft_of(f"{SMALL} --mock-data --eval-interval 5")
    draft_of(SMALL.replace("--vocab-size", "--padded-vocab-size"))
    asked = set().union(*(one.asked for one in made))
    assert sorted(f.name for f in FLAGS if f.fate is Fate.TRANSLATED and f.name not in asked) == []


VALUES = ("0", "1", "2", "-1", "7", "0.5", "1e30", "nan", "x", "a,b", "[0]*3", "E|t|L", "0:8 16:9")


def test_any_mix_of_flags_ends_in_a_recipe_or_in_typed_errors():
    draw = random.Random(20)
    n_drafts = 0
    for _ in range(400):
        words = f"{SMALL} {LLAMA if draw.random() < 0.5 else ''}".split()
        for flag in draw.sample(FLAGS, draw.randint(1, 12)):
            words.append(draw.choice(flag.names))
            options = (flag.type or "").split("|")
            if flag.type is not None:
                words.append(draw.choice(options if len(options) > 1 else VALUES))
        try:
            draft = translate(read_command(words), gpus=draw.choice((None, 8)))
        except RecipeError:
            continue
        n_drafts += 1
        text = recipe_text(draft)
        assert [n for n in draft.command.values if n not in text] == []
        if n_drafts % 8 == 0:
            check(text, draft.sources)
    assert n_drafts > 100
    assert "--num-layers" in BY_NAME


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--overlap-grad-reduce", "overlap", {"grad_reduce": True}),
        ("--tp-comm-overlap --moe-shared-expert-overlap", "overlap", {"tp": True, "shared_experts": True}),
        ("--pipeline-model-parallel-size 2 --no-overlap-p2p-communication", "overlap", {"p2p": False}),
        ("--no-overlap-p2p-communication", "overlap", None),
        ("--cpu-offloading-num-layers 2", "offload", {"layers": 2}),
        ("--optimizer-cpu-offload", "offload", {"optimizer": 1.0}),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "offload", {"optimizer": 0.5}),
        ("--optimizer-offload-fraction 0.5", "offload", {"optimizer": 0.0}),
    ],
)
def test_overlap_and_offload(flags, key, value):
    draft = translate(read_command(f"{SMALL} {flags}".split()), gpus=8)
    assert draft.content["parallelism"].get(key) == value


def flat(text: str) -> str:
    """The comments of a recipe without their line breaks."""
    return " ".join(text.replace("\n#    ", "").split())


def test_every_checkpoint_stays(tmp_path):
    """Megatron deletes none; a recipe's own default keeps two."""
    saves = recipe_of(f"{SMALL} --save ckpt --save-interval 10", tmp_path)
    assert (saves.checkpoint.every, saves.checkpoint.keep) == (10, "all")
    text = recipe_text(draft_of(f"{SMALL} --save ckpt --save-interval 10"))
    assert "keep: all  # --save-interval, --save; Megatron deletes none" in text
    alone = draft_of(f"{SMALL} --persistent-save-interval 10")
    assert alone.content["checkpoint"] == {"every": 10, "keep": "all"}
    assert "writes nothing without --save" in dict(alone.silent)["--save-interval"]
    retained = draft_of(f"{SMALL} --save ckpt --save-interval 10 --save-retain-interval 50")
    assert (retained.lost, retained.content["checkpoint"]["keep"]) == ([], "all")
    assert "--save-retain-interval: there the newest checkpoint and every multiple" in flat(recipe_text(retained))
    assert "Megatron deletes none" not in recipe_text(retained)
    assert "checkpoint" not in draft_of(SMALL).content


def test_evaluation_takes_its_own_batch():
    more = "--eval-interval 5 --eval-iters 3"
    assert draft_of(f"{SMALL} {more}").content["train"]["eval_samples"] == 3 * 8
    assert draft_of(f"{SMALL} {more} --eval-global-batch-size 16").content["train"]["eval_samples"] == 3 * 16
    # under a schedule the batch is not given, and becomes micro batch times ranks
    line = with_schedule("0:8,512:16", more=f"--train-iters 100 {more}")
    assert draft_of(line, gpus=4).content["train"]["eval_samples"] == 3 * 4


def test_why_nothing_is_evaluated():
    per_split = SMALL.replace("--data-path", "--train-data-path") + "--eval-interval 5 --valid-data-path data/y"
    draft = draft_of(per_split)
    assert not draft.lost
    assert draft.content["data"]["valid"] == {"valid": {"blend": [{"prefix": "data/y"}]}}
    assert draft.content["train"]["eval_every"] == 5
    assert "leaves nothing" not in recipe_text(draft)
    for line in (f"{SMALL} --eval-interval 5 --split 1,0,0", per_split.replace("--valid-data-path data/y", "")):
        assert "eval_every: 0  # --eval-interval; there is nothing to evaluate" in recipe_text(draft_of(line))


def test_the_file_of_each_splits_data_sets(tmp_path):
    path = tmp_path / "data.json"
    line = f"{SMALL.replace('--data-path data/x', '')} --eval-interval 5 --per-split-data-args-path {path}"
    assert "can't be read as JSON" in draft_of(line).problems[0].message
    path.write_text('{"train": ["3", "data/a", "1", "data/b"], "valid": ["data/c"], "test": ["data/d"]}')
    draft = draft_of(line)
    assert not draft.problems
    data = draft.content["data"]
    assert data["blend"] == [{"prefix": "data/a", "weight": 3.0}, {"prefix": "data/b", "weight": 1.0}]
    assert (data["split"], data["valid"]) == ([1.0, 0.0, 0.0], {"valid": {"blend": [{"prefix": "data/c"}]}})
    assert "under test" in draft.notes["--per-split-data-args-path"]
    path.write_text('{"train": "data/a"}')
    assert "must hold a list" in draft_of(line).problems[0].message


def test_behind_a_key_stands_where_its_value_is_from():
    text = recipe_text(draft_of(SMALL.replace("--data-path", "--train-data-path")))
    assert "split: [1.0, 0.0, 0.0]  # --train-data-path data/x".replace(" data/x", "") in text
    text = recipe_text(draft_of(f"{SMALL} {LLAMA} --bf16 --fp8-format hybrid --fp8-recipe custom"))
    assert "in place of custom, which is lost" in text.split("recipe: tensorwise")[1].splitlines()[0]
    both = with_schedule("0:8,512:16", more="--train-iters 100 --global-batch-size 16")
    assert "global_batch: 16  # --global-batch-size, --step-batch-size-schedule; Megatron refuses" in recipe_text(
        draft_of(both)
    )


FP8 = f"{SMALL} {LLAMA} --bf16 --fp8-format hybrid"


@pytest.mark.parametrize(
    ("flags", "history", "margin", "remark"),
    [
        ("", 1, 0, "Megatron's default"),
        ("--fp8-recipe delayed --fp8-margin 2", 1, 2, "Megatron's default"),
        ("--fp8-amax-history-len 16", 1, 0, "--fp8-amax-history-len; the newest of 16 alone"),
        (
            "--fp8-amax-history-len 16 --fp8-amax-compute-algo max", 16, 0,
            "--fp8-amax-history-len, --fp8-amax-compute-algo; of steps; Megatron's are of micro batches",
        ),
        ("--fp8-amax-compute-algo max --fp8-interval 3", 1, 0, "--fp8-amax-compute-algo"),
    ],
)  # fmt: skip
def test_delayed_scales_look_back_as_far(flags, history, margin, remark, tmp_path):
    draft = draft_of(f"{FP8} {flags}")
    assert draft.lost == []
    assert draft.remarks["precision.amax_history"] == remark
    precision = recipe_of(f"{FP8} {flags}", tmp_path).precision
    assert (precision.recipe, precision.amax_history, precision.margin) == ("delayed", history, margin)


def test_other_scales_do_not_look_back():
    draft = draft_of(f"{FP8} --fp8-recipe tensorwise --fp8-amax-history-len 16 --fp8-margin 2")
    assert "amax_history" not in draft.content["precision"]
    assert draft.notes["--fp8-margin"] == draft.notes["--fp8-amax-history-len"] == "only delayed scales look back"


@pytest.mark.parametrize(
    ("flags", "gathers", "note"),
    [
        ("--use-distributed-optimizer", False, "with parallelism.dp_strategy=zero1 no weights are sent in fp8 here"),
        ("", False, "with parallelism.dp_strategy=replicate no weights are sent in fp8 here"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", True, ""),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --fp8-recipe blockwise",
            False,
            "weights of precision.recipe=blockwise are sent in bf16",
        ),
    ],
)
def test_weights_are_sent_in_fp8_where_they_can_be(flags, gathers, note, tmp_path):
    """The published command has the flag with the distributed optimizer."""
    line = f"{FP8} --fp8-param-gather {flags}"
    if "blockwise" in flags:
        line = line.replace("hybrid", "e4m3")
    draft = draft_of(line)
    assert draft.lost == []
    assert note in draft.notes.get("--fp8-param-gather", "")
    assert recipe_of(line, tmp_path).precision.gather_fp8 is gathers


PER_SPLIT = SMALL.replace("--data-path", "--train-data-path")


@pytest.mark.parametrize("line", [SMALL, FP8, PER_SPLIT, *(getattr(commands, name) for name in REAL)])
def test_what_is_called_megatrons_default_is_its_default(line):
    """A key of its default alone; what follows from other flags says from which."""
    draft = draft_of(line)
    # from several flags, or from one that says the opposite
    follows = {"model.d_ffn", "model.tied_embeddings", "model.mlp.bias"}
    follows |= {"model.attention.qkv_bias", "model.attention.out_bias"}
    here = {"adamw": "adam", "all_gather": "allgather", "ring": ["p2p"], "replicate": False, "fp32": False}
    here |= {"learned": "learned_absolute", "layer": "LayerNorm", "plain": False}
    for key, remark in draft.remarks.items():
        if remark != "Megatron's default" or key in follows:
            continue
        value: object = draft.content
        for part in key.split("."):
            value = value[part]
        name = draft.sources[key].removesuffix(", which is not given")
        default = BY_NAME[name].default_value
        if key == "data.split":
            default = [float(share) for share in default.split(",")]
        same = here.get(value) if isinstance(value, str) else value
        assert default in (value, same) or (value == "none" and default is None), key


def test_the_recipe_names_the_commit_of_its_flags(tmp_path):
    text = recipe_text(draft_of(SMALL))
    assert "NVIDIA/Megatron-LM at commit d98e8a64 (2026-08-22)" in text.splitlines()[1]
    assert "d98e8a64" in recipe_of(SMALL, tmp_path).about.source


WIDE = "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"


def test_another_order_of_ranks_is_refused(capsys):
    assert main(["from-megatron", "--gpus", "4", "--", *f"{SMALL} {WIDE}".split()]) == 64
    assert "ranks lie in the order pp, dp, cp, tp" in capsys.readouterr().err
    assert main(["from-megatron", "--gpus", "4", "--partial", "--", *f"{SMALL} {WIDE}".split()]) == 0
    capsys.readouterr()
    # without data-parallel ranks, or without stages, both orders are one
    for gpus, more in (("2", WIDE), ("4", "--use-tp-pp-dp-mapping")):
        assert main(["from-megatron", "--gpus", gpus, "--", *f"{SMALL} {more}".split()]) == 0
        assert "--use-tp-pp-dp-mapping: the order of ranks is the same" in flat(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--layernorm-epsilon 1e-6",
         "1e-6: a flag of older releases, gone since core_v0.4.0 (December 2023): give --norm-epsilon"),
        ("--fp8-hybrid", "gone since core_v0.4.0 (December 2023): give --fp8-format hybrid"),
        ("--rampup-batch-size 2 2 100", "read nowhere since core_v0.18.0 (21 April 2026)"),
        ("--rampup-batch-size 2 2 100", "train.batch_ramp={start: 2, increment: 2, samples: 100}"),
        ("--checkpoint-activations", "which Megatron refuses; give --recompute-activations"),
        ("--deepspeed_config ds.json", "a flag of the fork Megatron-DeepSpeed: its file is not read"),
        ("--train-weighted-split-paths TRAIN: 1 0:0.9 x", "a flag of BigScience's fork Megatron-DeepSpeed"),
        ("--attention-head-type multiquery", "a flag of BigCode's fork of Megatron-LM: give --group-query-attention"),
        ("--export-kd-teacher-load x", "where one of its add-ons (ModelOpt, Kitchen) is installed"),
        ("--allow-ambiguous-pad-tokens", "labels that are the tokenizer's padding"),
        ("--mid-level-dataset-surplus 0.1", "no such data, or order of it"),
        ("--loss-scale 128", "the loss scale of fp16 is dynamic here"),
        ("--post-layer-norm", "in the recipe, model.layer={kind: sequential, norms: post} says it"),
        ("--geglu", "model.mlp={kind: gated, activation: gelu_tanh} says it, activation gelu --geglu"),
        ("--add-rmsnorm-offset", "--add-rmsnorm-offset: a flag of the fork MindSpeed-LLM: give --apply-layernorm-1p"),
        ("--yaml-cfg x.yaml", "the file is not read"),
    ],
)  # fmt: skip
def test_what_older_releases_and_forks_train_otherwise_is_lost(more, told, capsys):
    line = f"{SMALL} {more}".split()
    assert main(["from-megatron", "--gpus", "4", "--", *line]) == 64
    out, err = capsys.readouterr()
    assert (out, told in err) == ("", True)
    assert main(["from-megatron", "--gpus", "4", "--partial", "--", *line]) == 0
    out, err = capsys.readouterr()
    assert told in flat(out)
    assert "lost: " in err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--data-impl mmap", "--data-impl: a flag of older releases, gone since core_v0.4.0 (December 2023)"),
        ("--no-query-key-layer-scaling", "takes the scale back in the softmax; what is computed stays the same"),
        ("--DDP-impl local", "gone since core_v0.4.0"),
        ("--activations-checkpoint-method uniform", "gone since May 2022"),
        ("--no-async-tensor-model-parallel-allreduce", "gone since core_v0.16.0 (February 2026)"),
        ("--deepspeed --zero-stage 1", "parallelism.dp_strategy is zero1, zero2 or fsdp for ZeRO's stages 1, 2 and 3"),
        ("--deepspeed", "--deepspeed: a flag of the fork Megatron-DeepSpeed: one runtime trains every recipe"),
        ("--zero-stage=3", "a flag of the fork Megatron-DeepSpeed"),
        ("--use-fused-rmsnorm", "a flag of the fork MindSpeed-LLM: kernels and fusions"),
        ("--enable-zero-bubble", "parallelism.pipeline.schedule is zb_h1 or zb_v for it"),
        ("--openai-gelu", "--openai-gelu: only models of before Megatron-core read it"),
        ("--cuda-graph-impl local --te-rng-tracker", "--te-rng-tracker: no CUDA graphs are captured"),
        ("--log-straggler", "--log-straggler: not measured or written here; what is trained stays the same"),
        ("--log-params-norm --log-num-zeros-in-grad", "--log-num-zeros-in-grad: not measured or written"),
        ("--wandb-project x", "--wandb-project: not measured or written here"),
        ("--log-throughput", "--log-throughput: loss, rate, gradient norm, tokens, time and memory of every step"),
        ("--check-for-spiky-loss", "no such check of results"),
        ("--check-for-large-grads", "no such check of results"),
        ("--exit-interval 5", "a run goes on to train.steps, or until SIGTERM"),
        ("--overlap-moe-expert-parallel-comm", "nothing overlaps in this way here"),
        ("--moe-enable-deepep", "tokens reach experts through the collectives of torch.distributed"),
        ("--use-pytorch-profiler", "a recipe starts no profiler"),
        ("--no-pad-vocab-size", "padding of the vocabulary takes no part in the loss"),
        ("--reuse-grad-buf-for-mxfp8-param-ag", "memory, the garbage collector"),
        ("--rotary-seq-len-interpolation-factor 1 --swiglu --normalization RMSNorm --position-embedding-type rope "
         "--disable-bias-linear", "--rotary-seq-len-interpolation-factor: what is done here anyway"),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_told_with_its_reason(more, told, capsys):
    assert main(["from-megatron", "--gpus", "4", "--", *f"{SMALL} {more}".split()]) == 0
    assert told in flat(capsys.readouterr().out)


def test_an_unknown_flag_stays_an_error_with_partial_too(capsys):
    assert main(["from-megatron", "--partial", "--", *f"{SMALL} --zero-stages 1 --clip-grads 1".split()]) == 64
    err = capsys.readouterr().err
    assert "--zero-stages: no flag of pretrain_gpt.py" in err
    assert "--clip-grads: no flag of pretrain_gpt.py; did you mean --clip-grad" in err


def test_checkpoint_flags_of_a_load_belong_to_it():
    """Arguments of a checkpoint would change the model; without --load there is none."""
    for name in ("--use-checkpoint-args", "--use-mp-args-from-checkpoint-args", "--exit-on-missing-checkpoint"):
        assert BY_NAME[name].fate is Fate.DETAIL
        assert f"{name}: belongs to --load" in flat(recipe_text(draft_of(f"{SMALL} {name}")))


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        ("", "replicate"),
        ("--use-distributed-optimizer", "zero1"),
        ("--use-torch-fsdp2", "fsdp"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", "replicate"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "zero1"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero2"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "fsdp"),
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 4", "hsdp"),
    ],
)
def test_a_bucket_size_is_written_where_it_is_read(flags, strategy, tmp_path):
    draft = draft_of(f"{SMALL} --ddp-bucket-size 40000000 {flags}")
    recipe = recipe_of(f"{SMALL} --ddp-bucket-size 40000000 {flags}", tmp_path)
    assert recipe.parallelism.dp_strategy == strategy
    is_written = "bucket_mb" in draft.content["parallelism"]
    assert is_written == (unmet_needs("parallelism.bucket_mb", recipe) == ())
    assert recipe.parallelism.bucket_mb == (160.0 if is_written else 100.0)
    told = {} if is_written else {"--ddp-bucket-size": f"parallelism.dp_strategy={strategy} reduces layer by layer"}
    assert draft.notes == told
    # and nothing is told of a flag that was not given
    assert draft_of(f"{SMALL} {flags}").notes == {}
