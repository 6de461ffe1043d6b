"""Flags of the layout -> the sections `parallelism` and `launcher`."""

from megaspec.megatron.draft import GpusFrom, RecipeDraft
from megaspec.parallelism.stages import parse_layout
from megaspec.rules.unread import LAYER_BY_LAYER, has_buckets

_RANKS_FROM = {
    GpusFrom.COMMAND: "GPUs of the command",
    GpusFrom.OPTION: "GPUs, from --gpus",
    GpusFrom.FEWEST: "GPUs: the fewest that its degrees need, since the command does not say how many; --gpus N",
}
# --cp-comm-type -> parallelism.context.kind
_CONTEXT = {"p2p": "ring", "all_gather": "all_gather", "a2a": "all_to_all", "a2a+p2p": "hierarchical"}
# --data-parallel-sharding-strategy -> parallelism.dp_strategy
_SHARDED = {"no_shard": "replicate", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp"}
# --recompute-modules -> parallelism.recompute.parts
_RECOMPUTED_PARTS = {
    "core_attn": "core_attention",
    "moe_act": "activation",
    "layernorm": "norm",
    "mla_up_proj": "mla_up",
    "mlp": "mlp",
    "moe": "moe",
    "shared_experts": "shared_experts",
}
# Of an element, by the format in which gradients are reduced.
_GRADIENT_BYTES = {"fp32": 4, "bf16": 2}


def translate_layout(draft: RecipeDraft) -> None:
    """Degrees, data parallel, pipeline, context, recompute, number of ranks."""
    for name, axis, ours in (
        ("--tensor-model-parallel-size", "tp", ...),
        ("--pipeline-model-parallel-size", "pp", 1),
        ("--context-parallel-size", "cp", 1),
        ("--expert-model-parallel-size", "ep", 1),
    ):
        draft.put(f"parallelism.{axis}", draft[name], name, ours=ours)
    if draft.n_experts:
        name = "--expert-tensor-parallel-size"
        remark = "" if draft.is_given(name) else "what Megatron takes from tp"
        draft.put("parallelism.etp", draft.etp, name, ours=1, remark=remark)
    if draft["--expert-model-parallel-size"] > 1:
        dispatch = "all_to_all"
        if draft["--moe-token-dispatcher-type"] == "allgather":
            dispatch = "all_gather"
        draft.put("parallelism.dispatch", dispatch, "--moe-token-dispatcher-type", ours="all_to_all")
    # Megatron switches it off where there is no tp
    is_split = draft["--sequence-parallel"] and draft.tp > 1
    draft.put("parallelism.sequence_parallel", is_split, "--sequence-parallel")
    strategy = _data_parallel(draft)
    _rank_order(draft)
    if draft.pp > 1:
        _pipeline(draft)
    if draft["--context-parallel-size"] > 1:
        _context(draft)
    _recompute(draft)
    _offload(draft)
    _overlap(draft)
    reduce = "bf16" if draft["--grad-reduce-in-bf16"] else "fp32"
    draft.put("parallelism.grad_reduce", reduce, "--grad-reduce-in-bf16", ours="fp32")
    draft.used.add("--accumulate-allreduce-grads-in-fp32")
    if not has_buckets(strategy):
        draft.note("--ddp-bucket-size", LAYER_BY_LAYER.format(value=strategy))
    elif draft.is_given("--ddp-bucket-size"):
        megabytes = draft["--ddp-bucket-size"] * _GRADIENT_BYTES[reduce] / 1e6
        draft.put("parallelism.bucket_mb", megabytes, "--ddp-bucket-size", remark="parameters there, MB here")
    draft.put("launcher.ranks", draft.gpus, remark=_RANKS_FROM[draft.gpus_from])
    seconds = draft["--distributed-timeout-minutes"] * 60.0
    draft.put("launcher.timeout_seconds", seconds, "--distributed-timeout-minutes", ours=600.0)


def _data_parallel(draft: RecipeDraft) -> str:
    """How the optimizer's states, gradients and weights are sharded. -> parallelism.dp_strategy."""
    names = ["--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp"]
    strategy = "replicate"
    if draft["--use-distributed-optimizer"]:
        strategy = "zero1"
    if draft["--use-torch-fsdp2"]:
        strategy = "fsdp"
    if draft["--use-megatron-fsdp"]:
        strategy = _SHARDED[draft["--data-parallel-sharding-strategy"]]
        names.append("--data-parallel-sharding-strategy")
    # several instances: states are sharded inside each, and replicated over them
    instances = draft["--num-distributed-optimizer-instances"]
    if instances > 1 and strategy != "replicate":
        if strategy == "fsdp":
            strategy = "hsdp"
        draft.put("parallelism.dp_replicate", instances, "--num-distributed-optimizer-instances")
    draft.put("parallelism.dp_strategy", strategy, *names, ours="replicate")
    return strategy


def _rank_order(draft: RecipeDraft) -> None:
    """Megatron's tp-cp-dp-pp, from the fastest axis on, is ours; with the flag it is tp-cp-pp-dp."""
    name = "--use-tp-pp-dp-mapping"
    if not draft[name]:
        return
    if draft.pp > 1 and draft.dp > 1:
        draft.lose(name, "stages of a pipeline are neighbours there; here ranks lie in the order pp, dp, cp, tp")
    else:
        draft.note(name, "the order of ranks is the same without data-parallel ranks, or without stages")


def _pipeline(draft: RecipeDraft) -> None:
    key = "parallelism.pipeline."
    virtual, name = _virtual_stages(draft)
    draft.put(f"{key}virtual_stages", virtual, name, ours=1)
    if virtual > 1 and draft.is_given("--microbatch-group-size-per-virtual-pipeline-stage"):
        group = "--microbatch-group-size-per-virtual-pipeline-stage"
        draft.put(f"{key}micro_batch_group", draft[group], group)
    for name, field in (
        ("--decoder-first-pipeline-num-layers", "first_layers"),
        ("--decoder-last-pipeline-num-layers", "last_layers"),
    ):
        if draft.is_given(name):
            draft.put(f"{key}{field}", draft[name], name)
    for name, field in (
        ("--account-for-embedding-in-pipeline-split", "count_embedding"),
        ("--account-for-loss-in-pipeline-split", "count_loss"),
    ):
        if draft[name]:
            draft.put(f"{key}{field}", True, name)


def _virtual_stages(draft: RecipeDraft) -> tuple[int, str]:
    """Chunks of a rank, and the flag that says so."""
    by_layers = "--num-layers-per-virtual-pipeline-stage"
    by_count = "--num-virtual-stages-per-pipeline-rank"
    by_layout = "--pipeline-model-parallel-layout"
    given = [name for name in (by_layers, by_count, by_layout) if draft.is_given(name)]
    if len(given) > 1:
        draft.refuse(given[0], f"with {' and '.join(given[1:])}; one of them says how layers are divided")
    if not given:
        return 1, by_count
    if given[0] == by_count:
        return draft[by_count], by_count
    if given[0] == by_layout:
        return _from_layout(draft), by_layout
    n_layers = draft.n_layers or 0
    layers_of_a_chunk = draft[by_layers]
    if layers_of_a_chunk < 1 or n_layers % (draft.pp * layers_of_a_chunk):
        draft.refuse(by_layers, f"--num-layers {n_layers} must be a multiple of it times pp={draft.pp}")
        return 1, by_layers
    return n_layers // draft.pp // layers_of_a_chunk, by_layers


def _from_layout(draft: RecipeDraft) -> int:
    """Chunks of a rank, of a text such as `Et*3|(tt|)*29,m|L`: `|` between stages, commas without a meaning, and m for
    an MTP layer, which is left out."""
    name = "--pipeline-model-parallel-layout"
    text = draft[name].replace(",", "").replace("m", "")
    try:
        n_stages = len(parse_layout(text))
    except ValueError as error:
        draft.refuse(name, str(error))
        return 1
    draft.put("parallelism.pipeline.layout", text, name)
    if n_stages % draft.pp:
        draft.refuse(name, f"its {n_stages} stages must be a multiple of pp={draft.pp}")
    return max(1, n_stages // draft.pp)


def _context(draft: RecipeDraft) -> None:
    """How the ranks of a context group exchange keys and values."""
    kinds = draft["--cp-comm-type"]
    remark = ""
    if len(set(kinds)) > 1:
        remark = "the first of those that were given for each layer"
    kind = _CONTEXT[kinds[0]]
    draft.put("parallelism.context.kind", kind, "--cp-comm-type", ours="ring", remark=remark)
    sizes = draft["--hierarchical-context-parallel-sizes"]
    if kind == "hierarchical" and sizes:
        draft.put("parallelism.context.factors", sizes, "--hierarchical-context-parallel-sizes")


def _offload(draft: RecipeDraft) -> None:
    """What lies in the host's memory: activations of some layers, a share of the optimizer's states."""
    name = "--cpu-offloading-num-layers"
    draft.put("parallelism.offload.layers", draft[name], name, ours=0)
    switch = "--optimizer-cpu-offload"
    fraction = "--optimizer-offload-fraction"
    share = draft[fraction] if draft[switch] else 0.0
    draft.put("parallelism.offload.optimizer", share, switch, fraction, ours=0.0)


def _overlap(draft: RecipeDraft) -> None:
    """What there has to be switched on is on here: without a flag it stays so, since it computes the same."""
    for name, field in (
        ("--overlap-grad-reduce", "grad_reduce"),
        ("--overlap-param-gather", "param_gather"),
        ("--tp-comm-overlap", "tp"),
        ("--moe-shared-expert-overlap", "shared_experts"),
    ):
        draft.put(f"parallelism.overlap.{field}", True, name, ours=True)
    name = "--no-overlap-p2p-communication"
    if draft.pp > 1:
        draft.put("parallelism.overlap.p2p", not draft[name], name, ours=True)
    else:
        draft.note(name, "nothing is sent between stages with --pipeline-model-parallel-size 1")


def _recompute(draft: RecipeDraft) -> None:
    """Which activations are computed again in the backward pass. Two flags are short for a kind and its modules."""
    kind = draft["--recompute-granularity"]
    names = ["--recompute-granularity"]
    if draft["--recompute-activations"]:
        kind = "selective"
        names.append("--recompute-activations")
    modules = list(draft["--recompute-modules"] or [])
    if draft["--moe-layer-recompute"]:
        kind = kind or "selective"
        names.append("--moe-layer-recompute")
        if kind == "selective":
            # beside core attention, which Megatron recomputes where no modules are given
            modules = [*(modules or ["core_attn"]), "moe"]
    draft.put("parallelism.recompute.kind", kind or "none", *names, ours="none")
    if kind == "full":
        for name, field in (("--recompute-method", "method"), ("--recompute-num-layers", "layers")):
            if draft.is_given(name):
                draft.put(f"parallelism.recompute.{field}", draft[name], name)
    elif kind == "selective" and modules:
        _recomputed_parts(draft, modules)


def _recomputed_parts(draft: RecipeDraft, modules: list[str]) -> None:
    """Megatron's modules -> parallelism.recompute.parts, each once."""
    unknown = [module for module in modules if module not in _RECOMPUTED_PARTS]
    if unknown:
        what = f"{', '.join(unknown)}: recomputed are {', '.join(_RECOMPUTED_PARTS)}"
        draft.refuse("--recompute-modules", what)
    parts = [_RECOMPUTED_PARTS[module] for module in modules if module in _RECOMPUTED_PARTS]
    draft.put("parallelism.recompute.parts", list(dict.fromkeys(parts)), "--recompute-modules", "--moe-layer-recompute")
