"""Every change that Megatron makes without a word is told, in the commands in which it happens and in no other."""

import pytest

from megaspec.megatron.command import read_command
from megaspec.megatron.silent import SILENT
from megaspec.megatron.translate import translate
from megaspec.megatron.writing import recipe_text
from tests.megatron.commands import LLAMA, SMALL

PADDING = "the vocabulary is padded"
# more flags -> the flag that is told, and a part of what is told.
HAPPENS = [
    ("--sequence-parallel", "--sequence-parallel", "off, because --tensor-model-parallel-size is 1"),
    ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size", "overlapped p2p"),
    ("--fp8-param-gather --use-torch-fsdp2", "--fp8-param-gather", "off with --use-torch-fsdp2"),
    ("--use-megatron-fsdp", "--use-megatron-fsdp", "turns --use-distributed-optimizer on"),
    ("--use-distributed-optimizer --optimizer muon", "--use-distributed-optimizer", "off with this --optimizer"),
    ("--use-distributed-optimizer --freeze-all-layers", "--use-distributed-optimizer", "off with --freeze-all-layers"),
    ("--reuse-grad-buf-for-mxfp8-param-ag --use-megatron-fsdp --use-distributed-optimizer",
     "--reuse-grad-buf-for-mxfp8-param-ag", "off with --use-megatron-fsdp"),
    ("--bf16", "--accumulate-allreduce-grads-in-fp32", "on with --bf16"),
    ("--bf16 --accumulate-allreduce-grads-in-fp32 --ddp-reduce-scatter-with-fp32-accumulation",
     "--ddp-reduce-scatter-with-fp32-accumulation", "summed in fp32 anyway"),
    ("--fp16", "--no-check-for-nan-in-loss-and-grad", "not checked for NaN with a dynamic loss scale"),
    ("--fake-process-group", "--fake-process-group", "not checked for NaN"),
    ("--async-save", "--async-save", "off without --use-persistent-ckpt-worker"),
    ("--dataloader-inter-document-masking", "--dataloader-inter-document-masking", "no attention mask"),
    ("--recompute-activations --recompute-granularity full", "--recompute-activations", "selective, over"),
    ("--recompute-activations", "--recompute-activations", "becomes --recompute-granularity selective"),
    ("--fp32-residual-connection", "--fp32-residual-connection", "exchange fp32"),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1",
     "--num-virtual-stages-per-pipeline-rank", "becomes none"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
     "--num-virtual-stages-per-pipeline-rank", "becomes none"),
    ("--skip-train", "--no-load-optim", "on, with --no-load-rng"),
    ("--moe-use-upcycling", "--no-load-optim", "on, with --no-load-rng"),
    ("--cuda-graph-impl transformer_engine", "--te-rng-tracker", "on with CUDA graphs"),
    ("--cuda-graph-impl local --te-rng-tracker --cuda-graph-modules attn moe_router", "--cuda-graph-modules",
     "come together"),
    ("--hybrid-layer-pattern M*", "--hybrid-layer-pattern", "are taken from it"),
    ("--num-experts 8 --moe-ffn-hidden-size 64 --tensor-model-parallel-size 2 --sequence-parallel",
     "--expert-tensor-parallel-size", "becomes --tensor-model-parallel-size"),
    ("--num-experts 8", "--moe-ffn-hidden-size", "as wide as --ffn-hidden-size"),
    ("--num-experts 0", "--num-experts", "become none"),
    ("--fp16", "--accumulate-allreduce-grads-in-fp32", "added up in fp16"),
    ("--bf16 --grad-reduce-in-bf16", "--grad-reduce-in-bf16", "of micro batches are added up in bf16"),
    ("--bf16 --use-megatron-fsdp", "--megatron-fsdp-main-grads-dtype", "added up in 16 bits"),
    ("--bf16 --num-experts 8", "--moe-router-dtype", "computed in 16 bits"),
    ("--bf16 --num-experts 8 --moe-router-dtype fp64", "--moe-router-dtype", "computed in fp64"),
    ("--save-interval 10", "--save-interval", "writes nothing without --save"),
    ("--eval-interval 5 --train-data-path data/y", "--eval-interval", "--train-data-path without --valid-data-path"),
    ("--tokenizer-type HuggingFaceTokenizer", "--vocab-size", "whose own size counts"),
    ("--use-rope-scaling --rope-scaling-factor 32", "--rope-scaling-factor", "whose factor is 8"),
    ("--use-rope-scaling --multi-latent-attention", "--use-rope-scaling", "ignored with --multi-latent-attention"),
    ("--position-embedding-type relative", "--position-embedding-type", "has no relative positions"),
    ("--num-query-groups 2", "--num-query-groups", "ignored without --group-query-attention"),
    ("--global-batch-size 10 --decrease-batch-size-if-needed", "--decrease-batch-size-if-needed", "10 becomes 8"),
    ("--eval-interval 5 --split 1,0,0", "--eval-interval", "no evaluation"),
    ("--lr 1 --lr 2", "--lr", "the last one counts"),
]  # fmt: skip


def told(line: str) -> list[tuple[str, str]]:
    return translate(read_command(line.split()), gpus=4).silent


@pytest.mark.parametrize(("more", "flag", "what"), HAPPENS)
def test_a_silent_change_is_told(more, flag, what):
    line = f"{SMALL} {LLAMA} --split 9,1,0 {more}"
    silent = [one for one in told(line) if (PADDING not in one[1] and "more than once" not in one[1]) or "--lr" in more]
    assert [flag for name, text in silent if name == flag and what in text] == [flag]
    assert flag in recipe_text(translate(read_command(line.split()), gpus=4))


def test_nothing_else_is_told():
    assert [flag for flag, _ in told(f"{SMALL} {LLAMA} --split 9,1,0")] == ["--make-vocab-size-divisible-by"]


def test_a_batch_and_a_split_that_are_not_given():
    line = SMALL.replace("--global-batch-size 8", "--tensor-model-parallel-size 2")
    silent = dict(told(line))
    assert "becomes --micro-batch-size times data-parallel ranks, 2" in silent["--global-batch-size"]
    assert "becomes 969,30,1" in silent["--split"]


def test_every_silent_change_has_a_command_above():
    shown = {(flag, one.what) for _, flag, part in HAPPENS for one in SILENT if one.flag == flag and part in one.what}
    elsewhere = {"--split", "--make-vocab-size-divisible-by"}
    assert [one for one in SILENT if (one.flag, one.what) not in shown and one.flag not in elsewhere] == []
