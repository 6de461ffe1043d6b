"""For every rule the smallest recipe that breaks it, and what mends it: for `megaspec explain`, and held by a test."""

from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from megaspec.estimate.target import Target
from megaspec.recipe import ModelSpec
from megaspec.rules.initial_weights import weight_shapes
from megaspec.rules.run_facts import Facts, RunStart, SetFacts, SourceFacts

CPU = Target(cores=2, versions={"torch": "2.13.0+cpu", "tensorboard": "2.21.0"})
SERVICES = {"wandb": "0.31.0", "mlflow-skinny": "3.17.2", "trackio": "0.43.0"}
WITH_SERVICES = CPU.model_copy(update={"versions": CPU.versions | SERVICES})
H200 = Target(gpus=8, gpu="NVIDIA H200", sm=90, cores=64, versions={"torch": "2.13.0"})
H200_OF_CUDA_12_6 = H200.model_copy(update={"versions": {"torch": "2.13.0+cu126"}})
H200_WITH_TE = H200.model_copy(update={"versions": H200.versions | {"transformer-engine": "2.20.2"}})
B200_WITH_TE = Target(
    gpus=8, gpu="NVIDIA B200", sm=100, cores=64, versions={"torch": "2.13.0", "transformer-engine": "2.20.2"}
)
A100 = Target(gpus=1, gpu="NVIDIA A100-SXM4-80GB", sm=80, cores=8, versions={"torch": "2.13.0"})
V100 = Target(gpus=1, gpu="Tesla V100", sm=70, cores=8, versions={"torch": "2.13.0"})
FACTS = Facts(run_dir="runs/hello", vocab_size=257, train_tokens=10**6, valid_tokens=10**5)


def _with_web(of_set: SetFacts) -> Facts:
    """FACTS with an evaluation set called web."""
    return replace(FACTS, valid_sets={"web": of_set})


@dataclass(frozen=True)
class Example:
    """Overrides of a shipped recipe that break one rule, and more overrides that mend them."""

    overrides: tuple[str, ...]
    mended: tuple[str, ...]
    key: str
    """The key that the rule names."""
    recipe: str = "hello"
    target: Target = CPU
    facts: Facts = FACTS


def _moe(*settings: str, base: str = "n_experts: 8") -> str:
    return f"model.moe={{{', '.join((base, *settings))}}}"


def _router(*settings: str, base: str = "n_experts: 8") -> str:
    return _moe(f"router: {{{', '.join(settings)}}}", base=base)


def _longrope(*settings: str) -> str:
    factors = "short_factor: [1.0, 1.5], long_factor: [2.0, 3.0], original_max_seq_len: 64"
    return f"model.positions.scaling={{kind: longrope, {', '.join((factors, *settings))}}}"


def _mla(d_rope: int = 16) -> str:
    return f"model.attention={{kind: mla, kv_rank: 32, d_nope: 16, d_rope: {d_rope}, d_value: 32}}"


_FP8 = "precision.kind=fp8"
_ALL_IN_FP8 = ("precision.first_layers_bf16=0", "precision.last_layers_bf16=0")
# of hello: parts of products that blocks of 128 divide
_WIDE = ("model.n_kv_heads=4", "model.d_ffn=512")
_PP2, _CP4, _TP1, _TP2 = "parallelism.pp=2", "parallelism.cp=4", "parallelism.tp=1", "parallelism.tp=2"
_PIPELINE, _CONTEXT = "parallelism.pipeline", "parallelism.context"
_CHUNKS = f"{_PIPELINE}.virtual_stages=2"
_SP = "parallelism.sequence_parallel"
_PIECES_KEY = "optim.schedule.pieces"
_PIECEWISE = "optim.schedule={kind: piecewise, min_lr: 0}"
_PIECES = f"{_PIECES_KEY}=[{{shape: constant, until: 120}}, {{shape: linear, until: 240, factor: 0.1}}]"

_MESH = {
    "ranks-torchrun": Example(
        ("launcher.ranks=4",), ("launcher.ranks=2",), "launcher.ranks", target=CPU.model_copy(update={"world_size": 2})
    ),
    "ranks-degrees": Example(("launcher.ranks=4", "parallelism.tp=3", "model=gpt2_124m"), (_TP2,), "parallelism.tp"),
    "ranks-places": Example(
        ("launcher.ranks=2",), ("launcher.ranks=1",), "launcher.ranks", target=CPU.model_copy(update={"places": 1})
    ),
    "restarts-wait": Example(
        ("launcher.restarts.first_wait_seconds=400",),
        ("launcher.restarts.first_wait_seconds=4",),
        "launcher.restarts.first_wait_seconds",
    ),
    "layouts-work": Example(
        ("launcher.layouts=[['optim.lr=1e-3']]",), ("launcher.layouts=[['parallelism.tp=1']]",), "launcher.layouts"
    ),
    "layouts-twice": Example(
        ("launcher.layouts=[['parallelism.tp=1'],['parallelism.tp=1']]",),
        ("launcher.layouts=[['parallelism.tp=1']]",),
        "launcher.layouts",
    ),
    "ranks-gpus": Example(
        ("launcher.ranks=16", "train.global_batch=16"), ("launcher.ranks=8",), "launcher.ranks", target=H200
    ),
    "about-hardware": Example(("about.hardware=H300",), ("about.hardware=H200",), "about.hardware"),
    "tp-heads": Example(
        ("launcher.ranks=8", "parallelism.tp=8", "model.n_kv_heads=1", "model.d_ffn=512"),
        ("model.n_heads=8",),
        "parallelism.tp",
    ),
    "tp-kv-heads": Example(
        ("parallelism.tp=4", "model.n_heads=12", "model.n_kv_heads=6", "model.d_head=8"),
        ("model.n_kv_heads=4",),
        "parallelism.tp",
    ),
    "tp-ffn": Example((_TP2, "model.d_ffn=321"), ("model.d_ffn=322",), "parallelism.tp"),
    "sp-tp": Example((_TP1, f"{_SP}=true"), (f"{_SP}=false",), _SP),
    "sp-seq": Example(
        (f"{_SP}=true", "data.seq_len=255", "model.max_seq_len=256"), ("data.seq_len=254",), "data.seq_len"
    ),
    "sp-max-seq": Example((f"{_SP}=true", "model.max_seq_len=257"), ("model.max_seq_len=258",), "model.max_seq_len"),
    "dp-replicate": Example(
        (_TP1, "parallelism.dp_shard=2"), ("parallelism.dp_strategy=zero1",), "parallelism.dp_shard"
    ),
    "dp-sharded": Example(
        (_TP1, "parallelism.dp_strategy=zero1", "parallelism.dp_shard=1", "parallelism.dp_replicate=2"),
        ("parallelism.dp_shard=2", "parallelism.dp_replicate=1"),
        "parallelism.dp_shard",
    ),
    "dp-fsdp": Example(
        (_TP1, "parallelism.dp_strategy=fsdp", "parallelism.dp_shard=2", "parallelism.dp_replicate=2"),
        ("parallelism.dp_strategy=hsdp",),
        "parallelism.dp_replicate",
    ),
    "dp-hsdp": Example(
        (_TP1, "parallelism.dp_strategy=hsdp"), ("parallelism.dp_strategy=fsdp",), "parallelism.dp_replicate"
    ),
    "grad-reduce": Example((_TP2, "parallelism.grad_reduce=bf16"), (_TP1,), "parallelism.grad_reduce"),
}
_STAGES = {
    "pp-layers": Example(("parallelism.pp=3",), (_PP2,), "parallelism.pp"),
    "pp-uneven": Example(
        (_PP2, f"{_PIPELINE}.first_layers=4"), (f"{_PIPELINE}.first_layers=3",), f"{_PIPELINE}.first_layers"
    ),
    "pp-layout": Example(
        (_PP2, f"{_PIPELINE}.layout='Ett|tL'"), (f"{_PIPELINE}.layout='Ett|ttL'",), f"{_PIPELINE}.layout"
    ),
    "pp-twice": Example(
        (_PP2, f"{_PIPELINE}.layout='Et|tttL'", f"{_PIPELINE}.first_layers=1"),
        (f"{_PIPELINE}.first_layers=null",),
        f"{_PIPELINE}.first_layers",
    ),
    "pp-schedule": Example((_PP2, f"{_PIPELINE}.schedule=interleaved"), (_CHUNKS,), f"{_PIPELINE}.virtual_stages"),
    "pp-off": Example((_CHUNKS,), (_PP2,), f"{_PIPELINE}.virtual_stages"),
    "pp-micro-batches": Example((_PP2, _CHUNKS, "train.micro_batch=8"), ("train.micro_batch=4",), "train.global_batch"),
    "pp-group": Example(
        (_PP2, _CHUNKS, "train.micro_batch=2", f"{_PIPELINE}.micro_batch_group=3"),
        (f"{_PIPELINE}.micro_batch_group=2",),
        f"{_PIPELINE}.micro_batch_group",
    ),
    "pp-group-off": Example(
        (_PP2, f"{_PIPELINE}.micro_batch_group=4"),
        (f"{_PIPELINE}.micro_batch_group=2",),
        f"{_PIPELINE}.micro_batch_group",
    ),
    "cp-seq": Example(("parallelism.cp=2", "data.seq_len=254"), ("data.seq_len=252",), "data.seq_len"),
    "cp-heads": Example((_CP4, f"{_CONTEXT}.kind=all_to_all"), (f"{_CONTEXT}.kind=ring",), "parallelism.cp"),
    "cp-factors": Example(
        (_CP4, f"{_CONTEXT}.kind=hierarchical", f"{_CONTEXT}.factors=[2,3]"),
        (f"{_CONTEXT}.factors=[2,2]",),
        f"{_CONTEXT}.factors",
    ),
    "cp-off": Example((f"{_CONTEXT}.kind=all_to_all",), ("parallelism.cp=2",), f"{_CONTEXT}.kind"),
}
_EXPERTS = {
    "ep-moe": Example(("parallelism.ep=2",), (_moe(),), "parallelism.ep"),
    "ep-experts": Example(
        (_moe(base="n_experts: 6"), "parallelism.ep=4", "launcher.ranks=4"), ("parallelism.ep=2",), "parallelism.ep"
    ),
    "ep-grid": Example((_moe(), "parallelism.ep=4", "launcher.ranks=2"), ("launcher.ranks=4",), "parallelism.ep"),
    "ep-replicas": Example(
        (
            _moe(),
            "launcher.ranks=4",
            "parallelism={tp: 1, ep: 4, dp_strategy: hsdp, dp_replicate: 2, dp_shard: 2}",
        ),
        ("parallelism.ep=2",),
        "parallelism.dp_replicate",
    ),
    "ep-dispatch": Example((_moe(), "parallelism.dispatch=all_gather"), ("parallelism.ep=2",), "parallelism.dispatch"),
    "etp-width": Example((_moe("d_expert: 97"), "parallelism.etp=2"), ("model.moe.d_expert=96",), "parallelism.etp"),
    "tp-shared": Example((_moe("d_shared: 97"), _TP2), ("model.moe.d_shared=96",), "parallelism.tp"),
    "moe-sp": Example((_moe(), _TP2, f"{_SP}=false"), (f"{_SP}=true",), _SP),
    "moe-none": Example((_moe("first_dense: 4"),), ("model.moe.first_dense=3",), "model.moe.first_dense"),
    "moe-layers": Example((_moe("layers: [0,1,1]"),), ("model.moe.layers=[0,1,1,1]",), "model.moe.layers"),
    "moe-layers-twice": Example(
        (_moe("layers: [0,1,1,1]", "first_dense: 1"),), ("model.moe.first_dense=0",), "model.moe.layers"
    ),
    "moe-top-k": Example((_moe("top_k: 9"),), ("model.moe.top_k=8",), "model.moe.top_k"),
    "moe-groups": Example((_router("n_groups: 4"),), ("model.moe.router.group_top_k=2",), "model.moe.router.n_groups"),
    "moe-groups-even": Example(
        (_router("n_groups: 3", "group_top_k: 2"),), ("model.moe.router.n_groups=4",), "model.moe.router.n_groups"
    ),
    "moe-group-top-k": Example(
        (_router("n_groups: 2", "group_top_k: 3"),),
        ("model.moe.router.group_top_k=2",),
        "model.moe.router.group_top_k",
    ),
    "moe-group-reach": Example(
        (_router("n_groups: 4", "group_top_k: 1", base="n_experts: 8, top_k: 4"),),
        ("model.moe.router.group_top_k=2",),
        "model.moe.router.group_top_k",
    ),
    "moe-bias": Example(
        (_router("expert_bias: true"),), ("model.moe.router.score=sigmoid",), "model.moe.router.expert_bias"
    ),
    "moe-bias-rate": Example(
        (_router("score: sigmoid", "bias_rate: 1e-3"),),
        ("model.moe.router.expert_bias=true",),
        "model.moe.router.bias_rate",
    ),
    "moe-group-score": Example(
        (_router("group_score: best"),), ("model.moe.router.group_score=share",), "model.moe.router.group_score"
    ),
    "moe-group-two": Example(
        (_router("n_groups: 8", "group_top_k: 4", "group_score: best_two"),),
        ("model.moe.router.n_groups=4",),
        "model.moe.router.group_score",
    ),
    "moe-top-1": Example((_moe("top_k: 1"),), ("model.moe.router.norm_top_k=false",), "model.moe.top_k"),
    "moe-sinkhorn": Example(
        (_router("balancing: sinkhorn", "losses: [{kind: aux, coefficient: 0.01}]"),),
        ("model.moe.router.losses=[]",),
        "model.moe.router.losses",
    ),
    "moe-capacity": Example(
        (_router("balancing: sinkhorn"), "model.moe.capacity_factor=1.25"),
        ("model.moe.router.balancing=top_k",),
        "model.moe.capacity_factor",
    ),
    "moe-capacity-off": Example(
        (_moe("pad_to_capacity: true"),), ("model.moe.capacity_factor=1.25",), "model.moe.pad_to_capacity"
    ),
    "moe-losses": Example(
        (_router("losses: [{kind: aux, coefficient: 0.01}, {kind: aux, coefficient: 0.02}]"),),
        ("model.moe.router.losses=[{kind: aux, coefficient: 0.03}]",),
        "model.moe.router.losses",
    ),
    "moe-gate": Example((_moe("shared_gate: true"),), ("model.moe.d_shared=64",), "model.moe.shared_gate"),
}
_RECOMPUTE = {
    "recompute-off": Example(
        ("parallelism.recompute.parts=[norm]",),
        ("parallelism.recompute.kind=selective",),
        "parallelism.recompute.parts",
    ),
    "recompute-parts": Example(
        ("parallelism.recompute={kind: selective, parts: [norm, norm]}",),
        ("parallelism.recompute.parts=[norm]",),
        "parallelism.recompute.parts",
    ),
    "recompute-absent": Example(
        ("parallelism.recompute={kind: selective, parts: [moe]}",),
        ("parallelism.recompute.parts=[mlp]",),
        "parallelism.recompute.parts",
    ),
    "recompute-layers": Example(
        ("parallelism.recompute={kind: full, layers: 5}",),
        ("parallelism.recompute.layers=4",),
        "parallelism.recompute.layers",
    ),
}
_OVERLAP = {
    "overlap-off": Example(
        ("parallelism.overlap.p2p=false",), ("parallelism.overlap.p2p=true",), "parallelism.overlap.p2p"
    ),
    "offload-layers": Example(
        ("parallelism.offload.layers=5",), ("parallelism.offload.layers=4",), "parallelism.offload.layers"
    ),
    "offload-optimizer": Example(
        ("optim=muon", "parallelism.offload.optimizer=0.5"),
        ("parallelism.offload.optimizer=0",),
        "parallelism.offload.optimizer",
    ),
}
_MODEL = {
    "kv-heads": Example((_TP1, "model.n_kv_heads=3"), ("model.n_kv_heads=4",), "model.n_kv_heads"),
    "heads-width": Example((_TP1, "model.n_heads=3", "model.n_kv_heads=3"), ("model.d_head=42",), "model.n_heads"),
    "rope-even": Example(("model.d_head=33",), ("model.d_head=32",), "model.d_head"),
    "rope-scaling": Example(
        ("model.positions.scaling.kind=llama3", "model.positions.scaling.low_freq_factor=5"),
        ("model.positions.scaling.low_freq_factor=1",),
        "model.positions.scaling.low_freq_factor",
    ),
    "rope-yarn": Example(
        ("model.positions.scaling={kind: yarn, factor: 4, original_max_seq_len: 64}", "model.positions.base=1"),
        ("model.positions.base=10000",),
        "model.positions.base",
    ),
    "rope-longrope": Example(
        (_longrope("factor: 2"), "model.positions.fraction=0.5", "model.d_head=16"),
        ("model.d_head=8",),
        "model.positions.scaling.short_factor",
    ),
    "rope-attention": Example(
        (_longrope("factor: 2", "attention_factor: 1.1"), "model.d_head=4"),
        ("model.positions.scaling.factor=null",),
        "model.positions.scaling.factor",
    ),
    "layer-pattern": Example(
        ("model.layer_types={local: {}, full: {positions: {kind: none}}}", "model.layer_pattern=[local, ful, full]"),
        ("model.layer_pattern=[local, full]",),
        "model.layer_pattern",
    ),
    "layer-types": Example(
        ("model.layer_types.full.positions.kind=none",),
        ("model.layer_pattern=[full]",),
        "model.layer_types",
    ),
    "layer-positions": Example(
        (
            "model.positions={kind: learned}",
            "model.layer_types.full.positions.kind=none",
            "model.layer_pattern=[full]",
        ),
        ("model.positions={kind: none}",),
        "model.layer_types.full.positions",
    ),
    "layer-masks": Example(
        (
            _mla(),
            "model.n_kv_heads=4",
            "model.layer_types.local.mask={kind: window, size: 8}",
            "model.layer_pattern=[local]",
        ),
        ("model.layer_types.local.mask=null",),
        "model.layer_types.local.mask",
    ),
    "seq-model": Example(("model.max_seq_len=128",), ("data.seq_len=128",), "data.seq_len"),
    "vocab-data": Example(("model.vocab_size=256",), ("model.vocab_size=auto",), "model.vocab_size"),
    "mla-kv-heads": Example((_mla(), "model.n_kv_heads=2"), ("model.n_kv_heads=4",), "model.n_kv_heads"),
    "mla-head": Example((_mla(), "model.n_kv_heads=4", "model.d_head=64"), ("model.d_head=32",), "model.d_head"),
    "mla-rope": Example(
        (_mla(d_rope=15), "model.n_kv_heads=4", _TP1), ("model.attention.d_rope=16",), "model.attention.d_rope"
    ),
    "mla-positions": Example(
        (_mla(), "model.n_kv_heads=4", "model.positions={kind: learned}"),
        ("model.positions={kind: rotary}",),
        "model.positions.kind",
    ),
    "flat-length": Example(
        ("model.layer={kind: flat, mixers: [attention, mlp]}",), ("model.n_layers=2",), "model.layer.mixers"
    ),
    "qk-norm-whole": Example(
        ("model.attention.qk_norm=whole", "model.norm={kind: layer}"),
        ("model.attention.qk_norm=per_head",),
        "model.attention.qk_norm",
    ),
    "qk-norm-l2": Example(
        ("model.attention.qk_norm=l2", "model.positions={kind: none}"),
        ("model.attention.qk_norm=none",),
        "model.attention.qk_norm",
    ),
    "temperature-positions": Example(
        ("model.attention.temperature={kind: log}",),
        ("model.positions={kind: none}",),
        "model.attention.temperature",
    ),
    "flat-experts": Example(
        ("model.layer={kind: flat, mixers: [attention, moe]}", "model.n_layers=2"),
        ("model.layer={kind: flat, mixers: [attention, mlp]}",),
        "model.layer.mixers",
    ),
    "flat-which": Example(
        (
            "model.layer={kind: flat, mixers: [attention, moe]}",
            "model.n_layers=2",
            "model.moe={n_experts: 4, every: 2}",
        ),
        ("model.moe.every=1",),
        "model.moe.every",
    ),
    "kernel-attention": Example(
        ("kernels.attention=sdpa", "model.attention.dropout=0.1"),
        ("kernels.attention=reference",),
        "kernels.attention",
    ),
    "kernel-attention-parts": Example(
        ("parallelism.cp=2", _TP1, "precision.kind=bf16", "kernels.attention=flex"),
        ("parallelism.context.kind=all_to_all",),
        "kernels.attention",
        target=H200,
    ),
    "kernel-cross-entropy": Example(
        ("kernels.cross_entropy=triton",), ("kernels.cross_entropy=chunked",), "kernels.cross_entropy"
    ),
    "kernel-attention-merge": Example(
        ("parallelism.cp=2", _TP1, "kernels.attention_merge=triton"),
        ("kernels.attention_merge=reference",),
        "kernels.attention_merge",
    ),
    "kernel-unpermute": Example(
        (_moe(), "kernels.unpermute=triton"), ("kernels.unpermute=reference",), "kernels.unpermute"
    ),
    "kernel-norm": Example(("kernels.norm=triton",), ("kernels.norm=reference",), "kernels.norm"),
    "kernel-gated": Example(("kernels.gated=triton",), ("kernels.gated=reference",), "kernels.gated"),
    "kernel-rope": Example(("kernels.rope=triton",), ("kernels.rope=reference",), "kernels.rope"),
    "kernel-fp8-cast": Example((_FP8, "kernels.fp8_cast=triton"), ("kernels.fp8_cast=reference",), "kernels.fp8_cast"),
    "kernel-scaled-product": Example(
        (_FP8, "kernels.scaled_product=torch"), ("kernels.scaled_product=reference",), "kernels.scaled_product"
    ),
    "kernel-scaled-grouped": Example(
        (_FP8, _moe(), "kernels.scaled_grouped=torch"), ("kernels.scaled_grouped=reference",), "kernels.scaled_grouped"
    ),
    "kernel-adamw": Example(("kernels.adamw=triton",), ("kernels.adamw=torch",), "kernels.adamw"),
    "kernel-linear": Example(("kernels.linear=te",), ("kernels.linear=torch",), "kernels.linear"),
    "te-experts": Example(
        (_FP8, _moe(), "kernels.linear=te"),
        ("kernels.linear=torch",),
        "kernels.linear",
        target=H200_WITH_TE,
    ),
    "te-blackwell": Example(
        (_FP8, "precision.recipe=mxfp8", "kernels.linear=torch"),
        ("kernels.linear=te",),
        "kernels.linear",
        target=B200_WITH_TE,
    ),
    "te-fp8-gpu": Example(
        (_FP8, "precision.recipe=delayed", "kernels.linear=te"),
        ("kernels.linear=torch",),
        "kernels.linear",
        target=B200_WITH_TE,
    ),
    "kernel-grouped": Example((_moe(), "kernels.grouped=torch"), ("kernels.grouped=reference",), "kernels.grouped"),
}
_UNREAD = {
    "unread-attention-merge": Example(
        ("kernels.attention_merge=reference",), ("kernels.attention_merge=auto",), "kernels.attention_merge"
    ),
    "unread-linear": Example(
        (_FP8, *_ALL_IN_FP8, "kernels.linear=reference"), ("precision.first_layers_bf16=1",), "kernels.linear"
    ),
    "unread-grouped": Example(("kernels.grouped=reference",), (_moe(),), "kernels.grouped"),
    "unread-unpermute": Example(("kernels.unpermute=reference",), (_moe(),), "kernels.unpermute"),
    "unread-gated": Example(
        ("model.mlp={kind: plain}", "kernels.gated=reference"), ("kernels.gated=auto",), "kernels.gated"
    ),
    "unread-rope": Example(
        ("model.positions={kind: none}", "kernels.rope=reference"), ("kernels.rope=auto",), "kernels.rope"
    ),
    "unread-fp8-cast": Example(("kernels.fp8_cast=reference",), ("kernels.fp8_cast=auto",), "kernels.fp8_cast"),
    "unread-scaled-product": Example(("kernels.scaled_product=reference",), (_FP8,), "kernels.scaled_product"),
    "unread-scaled-grouped": Example((_moe(), "kernels.scaled_grouped=reference"), (_FP8,), "kernels.scaled_grouped"),
    "unread-adamw": Example(("optim=sgd", "kernels.adamw=reference"), ("kernels.adamw=auto",), "kernels.adamw"),
    "unread-history": Example(
        (_FP8, "precision.amax_history=16"), ("precision.recipe=delayed",), "precision.amax_history", target=H200
    ),
    "unread-rounding": Example(
        (_FP8, "precision.gradient_rounding=nearest"),
        ("precision.recipe=nvfp4", "model.d_ffn=512"),
        "precision.gradient_rounding",
    ),
    "unread-margin": Example(
        (_FP8, "precision.margin=1"), ("precision.recipe=delayed",), "precision.margin", target=H200
    ),
    "unread-bucket": Example(
        (_TP1, "parallelism.dp_strategy=fsdp", "parallelism.bucket_mb=50"),
        ("parallelism.dp_strategy=zero1",),
        "parallelism.bucket_mb",
    ),
    "unread-downloads": Example(
        ("data.download_dir=/scratch",), ("data.blend=[{prefix: 's3://bucket/data/web'}]",), "data.download_dir"
    ),
    "unread-downloads-of-set": Example(
        ("data.valid.web.blend=[{prefix: data/web}]", "data.valid.web.download_dir=/scratch"),
        ("data.valid.web.blend=[{prefix: 's3://bucket/data/web'}]",),
        "data.valid.web.download_dir",
    ),
}
_PRECISION = {
    "precision-gpu": Example(("precision.kind=bf16",), ("precision.kind=fp16",), "precision.kind", target=V100),
    "fp4-bytes": Example(
        (
            _FP8,
            "precision.recipe=nvfp4",
            "model.d_ffn=512",
            "model.n_kv_heads=4",
            _TP2,
            "data.seq_len=34",
            "train.micro_batch=16",
            "train.global_batch=16",
            "parallelism.sequence_parallel=true",
        ),
        ("data.seq_len=36", "parallelism.sequence_parallel=false", "train.micro_batch=8"),
        "data.seq_len",
    ),
    "fp8-gpu": Example((_FP8,), ("precision.kind=bf16",), "precision.kind", target=A100),
    "fp8-experts": Example(
        (_FP8, _moe(), "precision.recipe=blockwise", *_WIDE),
        ("precision.recipe=rowwise",),
        "precision.recipe",
        target=H200,
    ),
    "fp8-dequantised": Example(
        (_FP8, _moe()), ("kernels.scaled_grouped=reference",), "kernels.scaled_grouped", target=B200_WITH_TE
    ),
    "fp8-products-dequantised": Example(
        (_FP8, "precision.recipe=blockwise", *_WIDE),
        ("kernels.scaled_product=reference",),
        "kernels.scaled_product",
        target=H200_OF_CUDA_12_6,
    ),
    "fp8-layers": Example(
        (_FP8, "precision.first_layers_bf16=4"),
        ("precision.first_layers_bf16=1",),
        "precision.first_layers_bf16",
        target=H200,
    ),
    "fp8-format": Example(
        (_FP8, "precision.recipe=blockwise", "precision.format=hybrid", *_WIDE),
        ("precision.format=e4m3",),
        "precision.format",
        target=H200,
    ),
    "fp8-heads": Example((_FP8, "model.n_kv_heads=1", _TP2), (_TP1,), "parallelism.tp", target=H200),
    "fp8-gather": Example(
        (_FP8, "precision.gather_fp8=true"), ("parallelism.dp_strategy=fsdp",), "precision.gather_fp8", target=H200
    ),
    "fp8-tiles": Example((_FP8, "model.d_ffn=328"), ("model.d_ffn=336",), "model.d_ffn", target=H200),
    "formats-sharded": Example(
        ("precision.kind=bf16", "optim.formats.exp_avg=bf16"),
        ("parallelism.dp_strategy=zero1",),
        "optim.formats.exp_avg",
    ),
    "formats-weights": Example(
        ("optim.formats.exp_avg=bf16", "parallelism.dp_strategy=zero1"),
        ("precision.kind=bf16",),
        "optim.formats.exp_avg",
    ),
    "formats-heads": Example(
        (
            "precision.kind=bf16",
            "optim.formats.exp_avg=fp8",
            "parallelism.dp_strategy=zero1",
            "model.n_kv_heads=1",
            _TP2,
        ),
        ("optim.formats.exp_avg=bf16",),
        "optim.formats.exp_avg",
    ),
}
_BATCH = {
    "batch-divides": Example(
        ("train.global_batch=30", "train.micro_batch=4"), ("train.global_batch=32",), "train.global_batch"
    ),
    "ramp-start": Example(
        ("train.global_batch=16", "train.batch_ramp={start: 16, increment: 4, samples: 64}"),
        ("train.batch_ramp.start=8",),
        "train.batch_ramp.start",
    ),
    "ramp-increment": Example(
        ("train.global_batch=16", "train.batch_ramp={start: 4, increment: 5, samples: 64}", "train.micro_batch=1"),
        ("train.batch_ramp.increment=6",),
        "train.batch_ramp.increment",
    ),
    "ramp-stages": Example(
        ("train.global_batch=16", "train.batch_ramp={start: 6, increment: 10, samples: 64}", "train.micro_batch=4"),
        ("train.batch_ramp={start: 8, increment: 8, samples: 64}",),
        "train.batch_ramp.start",
    ),
    "blend-weights": Example(
        ("data.blend=[{prefix: data/a, weight: 1}, {prefix: data/b}]",),
        ("data.blend.1.weight=1",),
        "data.blend",
    ),
    "blend-pass": Example(
        ("data.blend=[{prefix: data/a}, {prefix: data/b}]", "train.steps=64", "train.global_batch=16"),
        ("train.steps=62",),
        "train.steps",
        facts=Facts(run_dir="runs/hello", vocab_size=257, train_tokens=10**6, train_samples=1000, valid_tokens=10**5),
    ),
    "split-train": Example(("data.split=[0,1,1]",), ("data.split=[1,1,1]",), "data.split"),
    "eval-split": Example(("data.split=[1,0,0]",), ("train.eval_every=0",), "train.eval_every"),
    "data-train": Example(
        ("data.seq_len=2048",),
        ("data.seq_len=1024",),
        "data.seq_len",
        facts=Facts(run_dir="runs/hello", vocab_size=257, train_tokens=2000, valid_tokens=10**5),
    ),
    "data-valid": Example(
        ("data.seq_len=2048",),
        ("train.eval_every=0",),
        "data.seq_len",
        facts=Facts(run_dir="runs/hello", vocab_size=257, train_tokens=10**6, valid_tokens=2000),
    ),
    "valid-samples": Example(
        ("data.valid.web=data/web",), ("~data.valid",), "data.valid.web", facts=_with_web(SetFacts(257, samples=0))
    ),
    "valid-vocab": Example(
        ("data.valid.web=data/web",), ("~data.valid",), "data.valid.web", facts=_with_web(SetFacts(512, samples=9))
    ),
    "valid-seq": Example(
        ("data.valid.web={blend: [{prefix: data/web}], seq_len: 512}",),
        ("data.valid.web.seq_len=128",),
        "data.valid.web.seq_len",
    ),
    "valid-mask": Example(
        ("data.valid.web={blend: [{prefix: data/web}], document_mask: true}",),
        ("~data.valid.web.document_mask",),
        "data.valid.web.document_mask",
    ),
    "documents-off": Example(
        ("data.document_lengths=[{documents: 10, tokens: 1000, squares: 1e5}]",),
        ("data.document_mask=true",),
        "data.document_lengths",
    ),
    "data-url": Example(
        ("data.blend=[{prefix: 's3://me:secret@bucket/data/web'}]",),
        ("data.blend=[{prefix: 's3://bucket/data/web'}]",),
        "data.blend.0.prefix",
    ),
    "valid-trained": Example(
        ("data.valid.web={blend: [{prefix: data/hello}]}",),
        ("data.valid.web.split=[969,30,1]",),
        "data.valid.web.blend.0.prefix",
    ),
    "sample-tokenizer": Example(("data=random", "~data.blend"), ("train.sample=null",), "train.sample"),
    "sample-draws": Example(
        ("train.sample.temperature=0", "train.sample.top_k=5"), ("train.sample.top_k=null",), "train.sample.top_k"
    ),
    "trainable-names": Example(
        ("train.trainable=['layers.*.atn.*']",), ("train.trainable=['layers.*.attn.*']",), "train.trainable"
    ),
    "trainable-none": Example(
        (_router("score: sigmoid", "expert_bias: true"), "train.trainable=['*.expert_bias']"),
        ("train.trainable=null",),
        "train.trainable",
    ),
}
_OPTIM = {
    "lr-warmup": Example(
        ("optim.schedule.warmup_steps=240", "train.steps=240"),
        ("optim.schedule.warmup_steps=24",),
        "optim.schedule.warmup_steps",
    ),
    "lr-constant": Example(
        ("optim.schedule={kind: constant, min_lr: 1e-5}",), ("optim.schedule.min_lr=0",), "optim.schedule.min_lr"
    ),
    "wsd-steps": Example(("optim.schedule.kind=wsd",), ("optim.schedule.wsd_decay_steps=12",), "optim.schedule.kind"),
    "wsd-fits": Example(
        ("optim.schedule={kind: wsd, wsd_decay_steps: 221, warmup_steps: 20}", "train.steps=240"),
        ("optim.schedule.wsd_decay_steps=220",),
        "optim.schedule.wsd_decay_steps",
    ),
    "wsd-only": Example(
        ("optim.schedule.wsd_decay_steps=10",), ("optim.schedule.kind=wsd",), "optim.schedule.wsd_decay_steps"
    ),
    "lr-min": Example(("optim.schedule.min_lr=0.1",), ("optim.lr=0.1",), "optim.schedule.min_lr"),
    "lr-init": Example(("optim.schedule.init_lr=0.1",), ("optim.schedule.init_lr=0",), "optim.schedule.init_lr"),
    "lr-init-warmup": Example(
        ("optim.schedule={warmup_steps: 0, init_lr: 1e-5}",),
        ("optim.schedule.warmup_steps=10",),
        "optim.schedule.init_lr",
    ),
    "first-step": Example(
        ("optim.schedule.first_step=100",), ("optim.schedule.first_step=auto",), "optim.schedule.first_step"
    ),
    "lr-steps": Example(
        ("optim.schedule.first_step=auto", "train.steps=240"),
        ("train.steps=480",),
        "optim.schedule.first_step",
        facts=replace(FACTS, start=RunStart(240, 1e-4)),
    ),
    "pieces-kind": Example(("optim.schedule={kind: piecewise, min_lr: 0}",), (_PIECES,), "optim.schedule.kind"),
    "pieces-length": Example(
        (_PIECEWISE, f"{_PIECES_KEY}=[{{shape: linear, factor: 0.1}}]"), (_PIECES,), f"{_PIECES_KEY}.0.steps"
    ),
    "pieces-ascend": Example(
        (_PIECEWISE, f"{_PIECES_KEY}=[{{shape: constant, until: 120}}, {{shape: linear, until: 120, factor: 0.1}}]"),
        (_PIECES,),
        f"{_PIECES_KEY}.1.until",
    ),
    "pieces-rate": Example(
        (_PIECEWISE, f"{_PIECES_KEY}=[{{shape: constant, until: 240, factor: 0.1}}]"),
        (_PIECES,),
        f"{_PIECES_KEY}.0.factor",
    ),
    "pieces-highest": Example(
        (_PIECEWISE, f"{_PIECES_KEY}=[{{shape: linear, until: 240, lr: 1.0}}]"),
        ("optim.lr=1.0",),
        f"{_PIECES_KEY}.0.lr",
    ),
    "pieces-end": Example(
        (_PIECEWISE, f"{_PIECES_KEY}=[{{shape: linear, until: 200, factor: 0.1}}]"),
        ("optim.schedule.after_pieces=stay",),
        f"{_PIECES_KEY}.0.until",
    ),
    "wd-ramp": Example(
        ("optim.weight_decay_ramp={kind: linear, end: 0.2}",),
        ("optim.weight_decay_ramp.steps=10",),
        "optim.weight_decay_ramp.kind",
    ),
    "fp16-scale": Example(
        ("precision={kind: fp16, initial_scale: 2, min_scale: 4}",),
        ("precision.min_scale=1",),
        "precision.min_scale",
    ),
    "log-tensorboard": Example(
        ("log.tensorboard=true",),
        ("log.tensorboard=false",),
        "log.tensorboard",
        target=CPU.model_copy(update={"versions": {}}),
    ),
    "log-installed": Example(("log.sinks=[{kind: wandb}]",), ("log.sinks=[]",), "log.sinks.0.kind"),
    "log-address": Example(
        ("log.sinks=[{kind: mlflow, tracking_uri: https://me:secret@tracking.example}]",),
        ("log.sinks=[{kind: mlflow, tracking_uri: https://tracking.example}]",),
        "log.sinks.0.tracking_uri",
        target=WITH_SERVICES,
    ),
    "log-once": Example(
        ("log.sinks=[{kind: wandb}, {kind: wandb, project: other}]",),
        ("log.sinks=[{kind: wandb}]",),
        "log.sinks.1.kind",
        target=WITH_SERVICES,
    ),
    "alert-metric": Example(
        ("log.alerts=[{metric: los, comparison: above, value: 8}]",),
        ("log.alerts=[{metric: loss, comparison: above, value: 8}]",),
        "log.alerts.0.metric",
    ),
    "alert-known": Example(
        ("train.eval_every=0", "log.alerts=[{metric: eval/loss, comparison: above, value: 8}]"),
        ("train.eval_every=100",),
        "log.alerts.0.metric",
    ),
    "alert-raised": Example(
        (
            "train.steps=240",
            "train.eval_every=100",
            "log.alerts=[{metric: eval/loss, comparison: above, value: 8, for_steps: 4}]",
        ),
        ("train.eval_every=60",),
        "log.alerts.0.for_steps",
    ),
    "alert-told": Example(
        ("log.alerts=[{metric: loss, comparison: above, value: 8, action: webhook}]",),
        ("log.webhook={}",),
        "log.alerts.0.action",
    ),
}
# A run of the recipe hello whose weights are there.
_SIZES = {"n_layers": 4, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_head": 32, "d_ffn": 320}
_ENDS = {"vocab_size": 257, "max_seq_len": 256, "tied_embeddings": True}
_HELLO = TypeAdapter(ModelSpec).validate_python({"kind": "decoder", **_SIZES, **_ENDS})
_RUN = SourceFacts("init.load", "runs/other", model=_HELLO, shapes=weight_shapes(_HELLO.facts), digest="0" * 64, step=9)
_WITHOUT_NORM = {name: shape for name, shape in _RUN.shapes.items() if name != "model/norm.weight"}
_LOADED = "init.load=runs/other"
_INIT = {
    "init-twice": Example((_LOADED, "init.from_hf=models/other"), ("init.load=null",), "init.load"),
    "init-off": Example(("init.include=['layers.*']",), (_LOADED,), "init.include"),
    "init-rows": Example((_LOADED, "init.new_rows=mean"), ("init.vocab=resize",), "init.new_rows"),
    "init-read": Example(
        (_LOADED,),
        ("init.load=null",),
        "init.load",
        facts=replace(FACTS, weights=SourceFacts("init.load", "runs/other", problem="it holds no checkpoint")),
    ),
    "init-upcycle": Example(
        (_LOADED, "init.upcycle=copies", _router("norm_top_k: false")),
        ("model.moe.router.norm_top_k=true",),
        "init.upcycle",
        facts=replace(FACTS, weights=_RUN),
    ),
    "init-model": Example(
        (_LOADED, "model.d_ffn=512"), ("model.d_ffn=320",), "init.load", facts=replace(FACTS, weights=_RUN)
    ),
    "init-weights": Example(
        (_LOADED,),
        ("init.missing=initialise",),
        "init.load",
        facts=replace(FACTS, weights=replace(_RUN, shapes=_WITHOUT_NORM)),
    ),
}
_PROFILE = {
    "profile-order": Example(("profile.steps=[12, 10]",), ("profile.steps=[10, 12]",), "profile.steps"),
    "profile-steps": Example(
        ("train.steps=300", "profile.steps=[299, 301]"), ("profile.steps=[299, 300]",), "profile.steps"
    ),
    "profile-many": Example(("profile.steps=[10, 109]",), ("profile.steps=[10, 12]",), "profile.steps"),
    "profile-ranks": Example(
        ("profile.steps=[10, 12]", "profile.ranks=[0, 2]"), ("profile.ranks=[0, 1]",), "profile.ranks"
    ),
    "profile-off": Example(("profile.ranks=[1]",), ("profile.steps=[10, 12]",), "profile.ranks"),
}
_NUMBERS = {
    "numbers-checkpoints": Example(
        ("train.numbers.rollbacks=2", "checkpoint.every=0"), ("checkpoint.every=100",), "train.numbers.rollbacks"
    ),
    "numbers-before": Example(
        ("train.numbers.before=2", "checkpoint.every=10"), ("train.numbers.rollbacks=1",), "train.numbers.before"
    ),
    "numbers-skips": Example(
        ("train.numbers={skips: 3, within: 3}",), ("train.numbers.within=100",), "train.numbers.skips"
    ),
    "skip-steps-all": Example(
        ("train.steps=40", "train.skip_steps=[{first: 1, last: 40}]"), ("train.steps=60",), "train.skip_steps"
    ),
    "skip-steps": Example(
        ("train.skip_steps=[{first: 9, last: 8}]",), ("train.skip_steps=[{first: 8, last: 9}]",), "train.skip_steps.0"
    ),
    "checks-deterministic": Example(
        ("train.checks.recompute=0.1",), ("train.deterministic=true",), "train.checks.recompute"
    ),
    "checks-sums": Example(
        ("launcher.ranks=2", "train.checks.replicas_every=10", "train.checks.sum_every=4"),
        ("train.checks.sum_every=5",),
        "train.checks.sum_every",
    ),
    "checks-copies": Example(
        ("launcher.ranks=1", "train.checks.replicas_every=10"),
        ("train.checks.replicas_every=0",),
        "train.checks.replicas_every",
    ),
}
_EVALUATED = ("checkpoint.every=100", "train.eval_every=50")
_CHECKPOINT = {
    "keep-all": Example(
        ("checkpoint.every=100", "checkpoint.keep=all", "checkpoint.keep_every=200"),
        ("checkpoint.keep_every=0",),
        "checkpoint.keep_every",
    ),
    "keep-every": Example(
        ("checkpoint.every=100", "checkpoint.keep_every=250"), ("checkpoint.keep_every=200",), "checkpoint.keep_every"
    ),
    "keep-best": Example(
        ("checkpoint.every=100", "train.eval_every=30", "checkpoint.keep_best=2"),
        ("train.eval_every=100",),
        "checkpoint.keep_best",
    ),
    "keep-best-by": Example(
        (*_EVALUATED, "checkpoint.keep_best=2", "checkpoint.best_by=web"),
        ("checkpoint.best_by=mean",),
        "checkpoint.best_by",
    ),
    "copy-url": Example(
        ("checkpoint.copy_to='s3://me:secret@bucket/run'",),
        ("checkpoint.copy_to='s3://bucket/run'",),
        "checkpoint.copy_to",
    ),
    "copy-scheme": Example(
        ("checkpoint.copy_to='foo://bucket/run'",), ("checkpoint.copy_to='s3://bucket/run'",), "checkpoint.copy_to"
    ),
    "fallback-retries": Example(
        ("checkpoint.fallback_dir=/scratch", "checkpoint.retries=0"), ("checkpoint.retries=1",), "checkpoint.retries"
    ),
    "folder-apart": Example(
        ("run_dir=/runs/mine", "checkpoint.copy_to='file:///runs/mine/copies'"),
        ("checkpoint.copy_to='file:///copies/mine'",),
        "checkpoint.copy_to",
    ),
}
_CLUSTER = ("launcher.hardware=cpu", "launcher.ranks_per_node=2")
_SLURM = ("launcher=slurm", *_CLUSTER)
_PODS = ("launcher=kubernetes", "launcher.image=megaspec", *_CLUSTER)
_VOLUME = "launcher.volumes=[{claim: runs, path: /workspace}]"
_LAUNCH = {
    "launch-ranks": Example(
        (*_SLURM, "launcher.ranks=4"), ("launcher.nodes=2",), "launcher.ranks", facts=replace(FACTS, train_tokens=10**7)
    ),
    "launch-supervised": Example(
        (*_SLURM, "launcher.nodes=2", "launcher.layouts=[['parallelism.tp=1']]"),
        ("launcher.layouts=[]",),
        "launcher.layouts",
    ),
    "launch-min-nodes": Example((*_SLURM, "launcher.min_nodes=3"), ("launcher.min_nodes=1",), "launcher.min_nodes"),
    "launch-gpus": Example(
        ("launcher=slurm", "launcher.hardware=H200", "launcher.ranks_per_node=16", "train.global_batch=16"),
        ("launcher.ranks_per_node=8", "launcher.nodes=2"),
        "launcher.ranks_per_node",
        target=H200.model_copy(update={"gpus": 16}),
    ),
    "launch-secret": Example(
        (*_SLURM, "launcher.env={WANDB_API_KEY: x}"), ("~launcher.env",), "launcher.env.WANDB_API_KEY"
    ),
    "launch-code": Example(
        (*_SLURM, "launcher.env={LD_PRELOAD: lib.so}"), ("~launcher.env",), "launcher.env.LD_PRELOAD"
    ),
    "launch-ours": Example((*_SLURM, "launcher.env={RANK: '0'}"), ("~launcher.env",), "launcher.env.RANK"),
    "launch-time": Example((*_SLURM, "launcher.time=0:03:00"), ("launcher.time=1:00:00",), "launcher.time"),
    "launch-gres": Example((*_SLURM, "launcher.gres=gpu:8"), ("launcher.gres=gpu",), "launcher.gres"),
    "launch-name": Example((*_PODS, _VOLUME, "name=My_Run"), ("launcher.job=my-run",), "name"),
    "launch-volume": Example(
        (*_PODS, "launcher.volumes=[{claim: runs, path: /data}]"), ("launcher.work_dir=/data",), "launcher.work_dir"
    ),
    "launch-downloads": Example(
        (*_PODS, _VOLUME, "data.blend=[{prefix: 's3://bucket/data/web'}]", "data.download_dir=/scratch"),
        ("data.download_dir=runs/downloads",),
        "data.download_dir",
    ),
    "launch-places": Example(
        (*_PODS, "launcher.volumes=[{claim: runs, path: /workspace}, {claim: more, path: /tmp}]"),
        ("launcher.volumes.1.path=/data",),
        "launcher.volumes.1.path",
    ),
    "launch-shm": Example((*_PODS, _VOLUME, "launcher.memory=32Gi"), ("launcher.memory=128Gi",), "launcher.shm"),
    "launch-priority": Example(
        (*_PODS, _VOLUME, "launcher.priority=high"), ("launcher.queue=team",), "launcher.priority"
    ),
}
EXAMPLES: dict[str, Example] = {
    **_NUMBERS,
    **_MESH,
    **_STAGES,
    **_EXPERTS,
    **_RECOMPUTE,
    **_OVERLAP,
    **_MODEL,
    **_UNREAD,
    **_PRECISION,
    **_BATCH,
    **_OPTIM,
    **_INIT,
    **_PROFILE,
    **_CHECKPOINT,
    **_LAUNCH,
}
