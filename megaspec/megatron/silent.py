"""What Megatron changes in a user's settings without a word, each with when it does."""

from collections.abc import Callable
from dataclasses import dataclass

from megaspec.megatron.draft import RecipeDraft

_EMERGING = ("muon", "dist_muon", "lion", "soap", "adaptive_muon")
# Tokenizers that take --vocab-size.
_SIZED = ("NullTokenizer", "NullMultimodalTokenizer", "TikTokenizer")
_VIRTUAL = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)


@dataclass(frozen=True)
class Silent:
    """One change."""

    flag: str
    """The flag that is changed, or stands for what is."""
    happens: Callable[[RecipeDraft], bool]
    what: str


def _virtual_one(draft: RecipeDraft) -> bool:
    layers = draft["--num-layers-per-virtual-pipeline-stage"]
    by_layers = layers is not None and draft.pp > 0 and (draft.n_layers or 0) == layers * draft.pp
    return by_layers or draft["--num-virtual-stages-per-pipeline-rank"] == 1


def _sums_in_fp32(draft: RecipeDraft) -> bool:
    return draft["--accumulate-allreduce-grads-in-fp32"] or (draft["--bf16"] and not draft["--grad-reduce-in-bf16"])


def _half_graph(draft: RecipeDraft) -> bool:
    return draft.value("--cuda-graph-impl", "none") == "local" and (
        ("moe_router" in draft.value("--cuda-graph-modules", ""))
        != ("moe_preprocess" in draft.value("--cuda-graph-modules", ""))
    )


SILENT: tuple[Silent, ...] = (
    Silent(
        "--sequence-parallel",
        lambda d: d["--sequence-parallel"] and d.tp == 1,
        "off, because --tensor-model-parallel-size is 1; so it is here",
    ),
    Silent(
        "--pipeline-model-parallel-size",
        lambda d: d.pp > 1 and not any(d.is_given(n) for n in _VIRTUAL),
        "without virtual stages, overlapped p2p and aligned parameter gathers are off",
    ),
    Silent(
        "--fp8-param-gather",
        lambda d: d["--fp8-param-gather"] and d["--use-torch-fsdp2"],
        "off with --use-torch-fsdp2; so it is here",
    ),
    Silent(
        "--use-megatron-fsdp",
        lambda d: (
            d["--use-megatron-fsdp"]
            and d.value("--megatron-fsdp-version", "1") == "1"
            and not d["--use-distributed-optimizer"]
        ),
        "turns --use-distributed-optimizer on",
    ),
    Silent(
        "--use-distributed-optimizer",
        lambda d: d["--use-distributed-optimizer"] and d["--optimizer"] in _EMERGING,
        "off with this --optimizer, which shares out whole matrices instead",
    ),
    Silent(
        "--use-distributed-optimizer",
        lambda d: d["--use-distributed-optimizer"] and d.is_given("--freeze-all-layers"),
        "off with --freeze-all-layers",
    ),
    Silent(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        lambda d: d.is_given("--reuse-grad-buf-for-mxfp8-param-ag") and d["--use-megatron-fsdp"],
        "off with --use-megatron-fsdp",
    ),
    Silent(
        "--accumulate-allreduce-grads-in-fp32",
        lambda d: (
            d["--bf16"]
            and not d["--grad-reduce-in-bf16"]
            and not d["--accumulate-allreduce-grads-in-fp32"]
            and d.value("--main-grads-dtype", "fp32") == "fp32"
            and not d["--use-megatron-fsdp"]
        ),
        "on with --bf16; so it is here",
    ),
    Silent(
        "--accumulate-allreduce-grads-in-fp32",
        lambda d: d["--fp16"] and not d["--accumulate-allreduce-grads-in-fp32"] and not d["--use-megatron-fsdp"],
        "not given: gradients are added up in fp16, over micro batches and over ranks; here in at least fp32",
    ),
    Silent(
        "--grad-reduce-in-bf16",
        lambda d: d["--grad-reduce-in-bf16"] and d["--bf16"] and not d["--use-megatron-fsdp"],
        "gradients of micro batches are added up in bf16, too; here in at least fp32, and bf16 between ranks alone",
    ),
    Silent(
        "--megatron-fsdp-main-grads-dtype",
        lambda d: (
            d["--use-megatron-fsdp"]
            and (d["--bf16"] or d["--fp16"])
            and d.value("--megatron-fsdp-main-grads-dtype", "auto") != "fp32"
        ),
        "other than fp32: gradients are added up in 16 bits; here in at least fp32",
    ),
    Silent(
        "--moe-router-dtype",
        lambda d: d.n_experts > 0 and not d.is_given("--moe-router-dtype") and (d["--bf16"] or d["--fp16"]),
        "not given: the router's product is computed in 16 bits; here in at least fp32",
    ),
    Silent(
        "--moe-router-dtype",
        lambda d: d.n_experts > 0 and d.value("--moe-router-dtype", "") == "fp64",
        "the router's product is computed in fp64; here in fp32",
    ),
    Silent(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        lambda d: d.is_given("--ddp-reduce-scatter-with-fp32-accumulation") and _sums_in_fp32(d),
        "off, because gradients are summed in fp32 anyway",
    ),
    Silent(
        "--no-check-for-nan-in-loss-and-grad",
        lambda d: d["--fp16"] and not d.is_given("--loss-scale"),
        "losses and gradients are not checked for NaN with a dynamic loss scale; here they are",
    ),
    Silent(
        "--fake-process-group",
        lambda d: d.is_given("--fake-process-group"),
        "losses and gradients are not checked for NaN; `megaspec plan` tells memory without GPUs",
    ),
    Silent(
        "--async-save",
        lambda d: d["--async-save"] and not d.is_given("--use-persistent-ckpt-worker"),
        "off without --use-persistent-ckpt-worker",
    ),
    Silent(
        "--dataloader-inter-document-masking",
        lambda d: d.is_given("--dataloader-inter-document-masking"),
        "the loader makes no attention mask",
    ),
    Silent(
        "--split",
        lambda d: not d.is_given("--split") and d.is_given("--data-path"),
        "not given: becomes 969,30,1; so it is here",
    ),
    Silent(
        "--moe-ffn-hidden-size",
        lambda d: d.n_experts > 0 and not d.is_given("--moe-ffn-hidden-size"),
        "not given: experts become as wide as --ffn-hidden-size; so they are here",
    ),
    Silent(
        "--expert-tensor-parallel-size",
        lambda d: d.n_experts > 0 and d.tp > 1 and not d.is_given("--expert-tensor-parallel-size"),
        "not given: becomes --tensor-model-parallel-size, not 1; written out here",
    ),
    Silent(
        "--recompute-activations",
        lambda d: d["--recompute-activations"] and d["--recompute-granularity"] == "full",
        "selective, over --recompute-granularity full",
    ),
    Silent(
        "--recompute-activations",
        lambda d: d["--recompute-activations"] and d["--recompute-granularity"] is None,
        "becomes --recompute-granularity selective; so it is here",
    ),
    Silent(
        "--fp32-residual-connection",
        lambda d: d.is_given("--fp32-residual-connection"),
        "pipeline stages exchange fp32",
    ),
    Silent(
        "--num-virtual-stages-per-pipeline-rank",
        lambda d: d.pp > 1 and _virtual_one(d),
        "one virtual stage a rank becomes none; so it is here",
    ),
    Silent(
        "--no-load-optim",
        lambda d: d.is_given("--moe-use-upcycling") or d.is_given("--skip-train"),
        "on, with --no-load-rng, because of --moe-use-upcycling or --skip-train",
    ),
    Silent(
        "--te-rng-tracker",
        lambda d: (
            (d.is_given("--enable-cuda-graph") or d.value("--cuda-graph-impl", "none") != "none")
            and not d.is_given("--te-rng-tracker")
        ),
        "on with CUDA graphs",
    ),
    Silent(
        "--cuda-graph-modules",
        _half_graph,
        "moe_router and moe_preprocess come together in local CUDA graphs",
    ),
    Silent(
        "--hybrid-layer-pattern",
        lambda d: d.is_given("--hybrid-layer-pattern"),
        "--num-layers and --mtp-num-layers are taken from it",
    ),
    Silent(
        "--make-vocab-size-divisible-by",
        lambda d: True,
        "the vocabulary is padded to a multiple of this times tp, in the softmax and in checkpoints, too; here padding "
        "takes no part in the softmax and is never saved",
    ),
    Silent(
        "--vocab-size",
        lambda d: d.is_given("--vocab-size") and d["--tokenizer-type"] not in (None, *_SIZED),
        "ignored with this --tokenizer-type, whose own size counts; here it counts, and has to hold the data's tokens",
    ),
    Silent(
        "--rope-scaling-factor",
        lambda d: d["--use-rope-scaling"] and not d["--multi-latent-attention"] and d["--rope-scaling-factor"] != 8.0,
        "ignored: pretrain_gpt.py hands --use-rope-scaling alone to its model, whose factor is 8; so it is here",
    ),
    Silent(
        "--use-rope-scaling",
        lambda d: d["--use-rope-scaling"] and d["--multi-latent-attention"],
        "ignored with --multi-latent-attention; so it is here",
    ),
    Silent(
        "--position-embedding-type",
        lambda d: (
            d["--position-embedding-type"] == "relative"
            and not d["--use-rotary-position-embeddings"]
            and not d["--multi-latent-attention"]
        ),
        "relative: the model of pretrain_gpt.py has no relative positions, and none in their place; so it is here",
    ),
    Silent(
        "--num-query-groups",
        lambda d: d.is_given("--num-query-groups") and not d["--group-query-attention"],
        "ignored without --group-query-attention; so it is here",
    ),
    Silent(
        "--num-experts",
        lambda d: d.is_given("--num-experts") and d.n_experts == 0,
        "0 experts become none",
    ),
)


def tell_silent_changes(draft: RecipeDraft) -> None:
    """Adds every change that happens to this command."""
    for one in SILENT:
        if one.happens(draft):
            draft.change(one.flag, one.what)
