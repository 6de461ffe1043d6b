"""Every rule: the smallest recipe that breaks it, and that its way out is one."""

from dataclasses import dataclass, field, replace

import pytest

from megaspec.compose import compose
from megaspec.core.errors import DataError, Problem, RecipeError
from megaspec.resolve.facts import Facts
from megaspec.resolve.resolver import resolve
from megaspec.resolve.rules import RULES
from megaspec.resolve.target import Target

CPU = Target(cores=2, versions={"torch": "2.13.0+cpu", "tensorboard": "2.21.0"})
H200 = Target(gpus=8, gpu="NVIDIA H200", sm=90, cores=64, versions={"torch": "2.13.0"})
V100 = Target(gpus=1, gpu="Tesla V100", sm=70, cores=8, versions={"torch": "2.13.0"})
FACTS = Facts(run_dir="runs/hello", vocab_size=257, train_tokens=10**6, valid_tokens=10**5)
# What the cases below count on, whatever the recipe says.
BASE = ("train.steps=120", "train.global_batch=16", "optim.schedule.warmup_steps=10")
RANDOM = ("data=random", "~data.blend", "train.sample=null")


@dataclass(frozen=True)
class Wrong:
    """Overrides of `hello` that break one rule, and more overrides that mend them."""

    overrides: tuple[str, ...]
    mended: tuple[str, ...]
    key: str
    target: Target = CPU
    facts: Facts = field(default=FACTS)


FOUR = ("launcher.ranks=4",)
EIGHT_HEADS = ("model.n_heads=8", "model.n_kv_heads=8")
CASES: dict[str, Wrong] = {
    "ranks-torchrun": Wrong(
        ("launcher.ranks=4",), ("launcher.ranks=2",), "launcher.ranks", target=CPU.model_copy(update={"world_size": 2})
    ),
    "ranks-degrees": Wrong((*FOUR, "parallelism.tp=3", "model=gpt2_124m"), ("parallelism.tp=2",), "parallelism.tp"),
    "ranks-gpus": Wrong(("launcher.ranks=16",), ("launcher.ranks=8",), "launcher.ranks", target=H200),
    "tp-heads": Wrong(
        ("launcher.ranks=8", "parallelism.tp=8", "model.n_kv_heads=1", "model.d_ffn=512"),
        (*EIGHT_HEADS,),
        "parallelism.tp",
    ),
    "tp-kv-heads": Wrong(
        ("launcher.ranks=4", "parallelism.tp=4", "model.n_heads=12", "model.n_kv_heads=6", "model.d_head=8"),
        ("model.n_kv_heads=4",),
        "parallelism.tp",
    ),
    "tp-ffn": Wrong(("parallelism.tp=2", "model.d_ffn=321"), ("model.d_ffn=322",), "parallelism.tp"),
    "sp-tp": Wrong(
        ("parallelism.tp=1", "parallelism.sequence_parallel=true"),
        ("parallelism.sequence_parallel=false",),
        "parallelism.sequence_parallel",
    ),
    "sp-seq": Wrong(
        ("parallelism.sequence_parallel=true", "data.seq_len=255", "model.max_seq_len=256"),
        ("data.seq_len=254",),
        "data.seq_len",
    ),
    "sp-max-seq": Wrong(
        ("parallelism.sequence_parallel=true", "model.max_seq_len=257"), ("model.max_seq_len=258",), "model.max_seq_len"
    ),
    "kv-heads": Wrong(("parallelism.tp=1", "model.n_kv_heads=3"), ("model.n_kv_heads=4",), "model.n_kv_heads"),
    "heads-width": Wrong(
        ("parallelism.tp=1", "model.n_heads=3", "model.n_kv_heads=3", "model.d_model=128"),
        ("model.d_head=42",),
        "model.n_heads",
    ),
    "rope-even": Wrong(("model.d_head=33",), ("model.d_head=32",), "model.d_head"),
    "rope-scaling": Wrong(
        ("model.rope_scaling.kind=llama3", "model.rope_scaling.low_freq_factor=4"),
        ("model.rope_scaling.low_freq_factor=1",),
        "model.rope_scaling.low_freq_factor",
    ),
    "seq-model": Wrong(("model.max_seq_len=128",), ("data.seq_len=128",), "data.seq_len"),
    "vocab-data": Wrong(("model.vocab_size=256",), ("model.vocab_size=auto",), "model.vocab_size"),
    "kernel-attention": Wrong(
        ("kernels.attention=sdpa", "model.attention_dropout=0.1"),
        ("kernels.attention=reference",),
        "kernels.attention",
    ),
    "kernel-cross-entropy": Wrong(
        ("kernels.cross_entropy=triton",), ("kernels.cross_entropy=chunked",), "kernels.cross_entropy"
    ),
    "precision-gpu": Wrong(("precision=bf16",), ("precision=fp16",), "precision.kind", target=V100),
    "batch-divides": Wrong(
        ("train.global_batch=30", "train.micro_batch=4"), ("train.global_batch=32",), "train.global_batch"
    ),
    "ramp-start": Wrong(
        ("train.batch_ramp={start: 16, increment: 4, samples: 64}",),
        ("train.batch_ramp.start=8",),
        "train.batch_ramp.start",
    ),
    "ramp-increment": Wrong(
        ("train.batch_ramp={start: 4, increment: 5, samples: 64}", "train.micro_batch=1"),
        ("train.batch_ramp.increment=6",),
        "train.batch_ramp.increment",
    ),
    "ramp-stages": Wrong(
        ("train.batch_ramp={start: 6, increment: 10, samples: 64}", "train.micro_batch=4"),
        ("train.batch_ramp={start: 8, increment: 8, samples: 64}",),
        "train.batch_ramp.start",
    ),
    "split-train": Wrong(("data.split=[0,1,1]",), ("data.split=[1,1,1]",), "data.split"),
    "eval-split": Wrong(("data.split=[1,0,0]",), ("train.eval_every=0",), "train.eval_every"),
    "data-train": Wrong((), ("data.seq_len=64",), "data.seq_len", facts=replace(FACTS, train_tokens=256)),
    "data-valid": Wrong((), ("train.eval_every=0",), "data.seq_len", facts=replace(FACTS, valid_tokens=0)),
    "sample-tokenizer": Wrong(RANDOM[:2], ("train.sample=null",), "train.sample"),
    "lr-warmup": Wrong(("optim.schedule.warmup_steps=120",), ("train.steps=121",), "optim.schedule.warmup_steps"),
    "wsd-steps": Wrong(("optim.schedule.kind=wsd",), ("optim.schedule.wsd_decay_steps=12",), "optim.schedule.kind"),
    "wsd-fits": Wrong(
        ("optim.schedule.kind=wsd", "optim.schedule.wsd_decay_steps=111"),
        ("optim.schedule.wsd_decay_steps=110",),
        "optim.schedule.wsd_decay_steps",
    ),
    "wsd-only": Wrong(
        ("optim.schedule.wsd_decay_steps=10",), ("optim.schedule.kind=wsd",), "optim.schedule.wsd_decay_steps"
    ),
    "lr-min": Wrong(("optim.schedule.min_lr=0.1",), ("optim.lr=0.1",), "optim.schedule.min_lr"),
    "lr-init": Wrong(("optim.schedule.init_lr=0.1",), ("optim.schedule.init_lr=0",), "optim.schedule.init_lr"),
    "wd-ramp": Wrong(
        ("optim.weight_decay_ramp={kind: linear, end: 0.2}",),
        ("optim.weight_decay_ramp.steps=10",),
        "optim.weight_decay_ramp.kind",
    ),
    "fp16-scale": Wrong(
        ("precision=fp16", "precision.initial_scale=2", "precision.min_scale=4"),
        ("precision.min_scale=1",),
        "precision.min_scale",
    ),
    "log-tensorboard": Wrong(
        ("log.tensorboard=true",),
        ("log.tensorboard=false",),
        "log.tensorboard",
        target=CPU.model_copy(update={"versions": {}}),
    ),
}


def broken(overrides, target=CPU, facts=FACTS) -> list[Problem]:
    composed = compose("hello", [*BASE, *overrides])
    try:
        resolve(composed.recipe, target, facts, composed.origins)
    except RecipeError as error:
        return error.problems
    return []


def test_every_rule_has_a_case():
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("code", CASES)
def test_rule(code):
    case = CASES[code]
    problems = broken(case.overrides, case.target, case.facts)
    assert [p.code for p in problems] == [code]
    assert problems[0].key == case.key
    assert case.key.rpartition(".")[2] in problems[0].message
    assert problems[0].origin
    assert broken((*case.overrides, *case.mended), case.target, case.facts) == []


def test_each_rule_says_its_sentence():
    for code, rule in RULES.items():
        assert rule.__doc__, code
        assert rule.__doc__.endswith("."), code
        assert "\n" not in rule.__doc__, code


def test_messages_hold_both_values_and_the_nearest_legal_ones():
    wrong = ("launcher.ranks=24", "parallelism.tp=12", "model.n_heads=32", "model.d_head=4", "model.n_kv_heads=8")
    texts = {p.code: str(p) for p in broken(wrong)}
    assert texts["tp-heads"] == (
        "parallelism.tp=12 must divide model.n_heads=32; try 1, 2, 4, 8, 16 or 32   (command line)"
    )
    (text,) = map(str, broken(("train.global_batch=30", "train.micro_batch=4", "parallelism.dp_replicate=2")))
    assert text == (
        "train.global_batch=30 must be a multiple of train.micro_batch=4 · dp=2 = 8; try 24 or 32, or "
        "train.micro_batch=1, 3 or 5   (command line)"
    )
    (text,) = map(str, broken(("kernels.attention=sdpa", "model.attention_dropout=0.1")))
    assert text == (
        "kernels.attention=sdpa has no attention dropout, model.attention_dropout=0.1; "
        "set kernels.attention=reference   (command line)"
    )


def test_a_file_is_named_where_the_value_is_from():
    (problem,) = broken(("model.max_seq_len=128",))
    assert problem.origin == "recipes/hello.yaml:8"


def test_everything_is_told_at_once():
    codes = {
        p.code
        for p in broken(
            (
                "parallelism.tp=3",
                "launcher.ranks=4",
                "model.n_kv_heads=3",
                "data.seq_len=512",
                "model.max_seq_len=256",
                "optim.schedule.min_lr=1",
                "optim.schedule.kind=wsd",
                "kernels.cross_entropy=triton",
                "train.global_batch=7",
                "train.micro_batch=2",
                "model.vocab_size=5",
            )
        )
    }
    assert codes >= {
        "ranks-degrees",
        "tp-heads",
        "kv-heads",
        "seq-model",
        "lr-min",
        "wsd-steps",
        "kernel-cross-entropy",
        "batch-divides",
        "vocab-data",
    }


def test_data_alone_is_a_data_error_and_with_rules_it_is_told_with_them():
    facts = replace(FACTS, problems=(Problem("data.blend.0.prefix", "data.blend.0.prefix=data/hello: not there"),))
    composed = compose("hello")
    with pytest.raises(DataError, match=r"not there   \(recipes/hello.yaml:7\)") as caught:
        resolve(composed.recipe, CPU, facts, composed.origins)
    assert caught.value.exit_code == 65
    texts = [str(p) for p in broken(("optim.schedule.min_lr=1",), facts=facts)]
    assert len(texts) == 2
    assert "not there" in texts[1]
    unknown = replace(FACTS, vocab_size=None)
    with pytest.raises(DataError, match=r"model\.vocab_size=auto takes the data's vocabulary"):
        resolve(compose("hello", ["model.vocab_size=auto"]).recipe, CPU, unknown)
