"""Traced steps beside the formulas of `plan`: parameters and collectives are the same, memory within 5 %."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaspec.commands.planned import plan_words
from megaspec.core.errors import RecipeError
from megaspec.estimate import communication, layer_run
from megaspec.estimate.communication import collectives_of
from megaspec.estimate.memory import StageMemory
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.runtime import step
from megaspec.spec import Spec
from megaspec.verify.trace import Trace, fake_world, ranks_to_trace, trace_rank
from megaspec.verify.trace_compare import MEMORY_TOLERANCE, Row, compared
from megaspec.verify.trace_memory import ACTIVATIONS, KINDS, WEIGHTS, Memory
from megaspec.verify.trace_recorder import Recorder
from tests.halved import halved

SMALL = "recipe=llama3_8b hardware=H200 parallelism=default model.n_layers=4"
# One layer at either end in bf16, two in fp8.
FP8 = "precision=fp8 precision.first_layers_bf16=1"
EXPERTS = "recipe=qwen3_30b_a3b hardware=H200 model.n_layers=4 parallelism=default parallelism.dp_strategy=zero1"
RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))

# What an axis does, in layouts that it takes; layers compiled, so that tables stand for what they keep.
LAYOUTS = [
    "gpus=1 train.global_batch=2",
    "gpus=4 parallelism.tp=2 train.global_batch=8",
    "gpus=4 parallelism.tp=2 parallelism.sequence_parallel=false train.global_batch=8",
    "gpus=16 parallelism.tp=16 train.global_batch=2",
    "gpus=4 parallelism.tp=2 parallelism.dp_strategy=zero1 train.global_batch=8",
    "gpus=4 parallelism.dp_strategy=zero2 train.global_batch=8",
    "gpus=4 parallelism.tp=2 parallelism.dp_strategy=fsdp train.global_batch=8",
    "gpus=4 parallelism.dp_strategy=hsdp parallelism.dp_shard=2 parallelism.dp_replicate=2 train.global_batch=8",
    "gpus=4 parallelism.dp_strategy=zero1 parallelism.grad_reduce=bf16 train.global_batch=8",
    "gpus=4 parallelism.pp=4 parallelism.pipeline.schedule=gpipe train.global_batch=8",
    "gpus=4 parallelism.pp=4 train.global_batch=32",
    "gpus=4 parallelism.pp=4 parallelism.pipeline.schedule=zb_h1 train.global_batch=16",
    "gpus=2 parallelism.pp=2 parallelism.pipeline.schedule=interleaved parallelism.pipeline.virtual_stages=2"
    " train.global_batch=16",
    "gpus=2 parallelism.pp=2 parallelism.pipeline.schedule=zb_v parallelism.pipeline.virtual_stages=2"
    " train.global_batch=16",
    "gpus=4 parallelism.pp=2 parallelism.dp_strategy=fsdp train.global_batch=16",
    "gpus=4 parallelism.cp=4 train.global_batch=2",
    "gpus=4 parallelism.cp=4 parallelism.context.kind=all_gather train.global_batch=2",
    "gpus=4 parallelism.cp=4 parallelism.context.kind=all_to_all train.global_batch=2",
    "gpus=4 parallelism.cp=4 data.document_mask=true train.global_batch=2",
    "gpus=4 parallelism.cp=4 parallelism.context.kind=all_gather data.document_mask=true train.global_batch=2",
    "gpus=4 parallelism.cp=4 parallelism.context={kind:hierarchical,factors:[2,2]} train.global_batch=2",
    "gpus=2 parallelism.tp=2 parallelism.recompute.kind=selective train.global_batch=4",
    "gpus=2 parallelism.tp=2 parallelism.recompute.kind=full train.global_batch=4",
    "gpus=2 parallelism.tp=2 parallelism.recompute={kind:full,method:block,layers:2} train.global_batch=4",
]
# What is on its way, deferred, or gathered once, beside what is sent anew for a tied table and for attention that runs
# again.
BETWEEN_MICRO_BATCHES = [
    "gpus=4 parallelism.dp_strategy=fsdp train.global_batch=4 train.micro_batch=1",
    "gpus=4 parallelism.dp_strategy=zero2 train.global_batch=8 train.micro_batch=1"
    " parallelism.overlap.grad_reduce=false",
    "gpus=4 parallelism.pp=2 parallelism.dp_strategy=zero2 parallelism.pipeline.schedule=zb_h1 train.micro_batch=1"
    " train.global_batch=6 model.tied_embeddings=true",
    "gpus=4 parallelism.pp=2 parallelism.dp_strategy=fsdp parallelism.pipeline.schedule=zb_v train.micro_batch=1"
    " parallelism.pipeline.virtual_stages=2 train.global_batch=10 model.tied_embeddings=true",
    "gpus=4 parallelism.pp=2 parallelism.dp_strategy=fsdp parallelism.pipeline.schedule=gpipe train.micro_batch=1"
    " train.global_batch=6",
    "gpus=8 parallelism.tp=2 parallelism.pp=2 parallelism.dp_strategy=zero1 parallelism.grad_reduce=bf16"
    " train.global_batch=8 train.micro_batch=1 model.tied_embeddings=true",
    "gpus=4 parallelism.pp=2 parallelism.dp_strategy=zero2 parallelism.pipeline.schedule=interleaved"
    " parallelism.pipeline.virtual_stages=2 train.micro_batch=1 train.global_batch=4",
    "gpus=8 parallelism.pp=4 parallelism.dp_strategy=fsdp parallelism.overlap.param_gather=false"
    " train.micro_batch=1 train.global_batch=12",
    "gpus=4 parallelism.pp=2 parallelism.dp_strategy=fsdp parallelism.pipeline.schedule=zb_v train.micro_batch=1"
    " parallelism.pipeline.virtual_stages=2 train.global_batch=16",
    "gpus=4 parallelism.cp=4 parallelism.recompute.kind=selective train.global_batch=2 train.micro_batch=1",
    "gpus=4 parallelism.cp=4 parallelism.context.kind=all_to_all parallelism.recompute.kind=selective"
    " train.global_batch=2 train.micro_batch=1",
    # weight gradients of layers that run again, and one micro batch alone
    "gpus=2 parallelism.pp=2 parallelism.pipeline.schedule=zb_v parallelism.pipeline.virtual_stages=2"
    " parallelism.recompute.kind=full kernels.compile=none train.global_batch=8 train.micro_batch=1",
    "gpus=4 parallelism.pp=2 parallelism.pipeline.schedule=zb_h1 parallelism.dp_strategy=zero2"
    " parallelism.recompute.kind=full train.global_batch=6 train.micro_batch=1",
    "gpus=4 parallelism.pp=2 parallelism.pipeline.schedule=zb_h1 parallelism.dp_strategy=fsdp"
    " parallelism.recompute.kind=selective kernels.compile=none train.global_batch=2 train.micro_batch=1",
    # what the last norm keeps of micro batches that wait
    "gpus=2 parallelism.pp=2 parallelism.pipeline.schedule=gpipe parallelism.recompute.kind=full"
    " train.global_batch=8 train.micro_batch=1",
]
# What is trained of four layers, beside what is divided, gathered and sent by whether it is.
TRAINED = ["'*norm*'", "'*.w_down.*'", "'layers.2.*','layers.3.*','norm.*','head.*'"]
BESIDE_FROZEN = [
    "gpus=4 parallelism.tp=2 train.global_batch=8 kernels.compile=none",
    "gpus=4 parallelism.tp=2 parallelism.sequence_parallel=false train.global_batch=8",
    "gpus=4 parallelism.tp=2 parallelism.dp_strategy=zero1 train.global_batch=8",
    "gpus=4 parallelism.dp_strategy=zero2 train.global_batch=8 kernels.compile=none",
    "gpus=4 parallelism.tp=2 parallelism.dp_strategy=fsdp train.global_batch=8",
    "gpus=4 parallelism.pp=4 train.global_batch=32 kernels.compile=none",
    "gpus=4 parallelism.cp=4 train.global_batch=2",
    "gpus=2 parallelism.tp=2 parallelism.recompute.kind=full train.global_batch=4",
]
# Plain layers, of which every tensor is counted.
PLAIN = [
    "gpus=2 parallelism.tp=2 train.global_batch=4",
    "gpus=2 parallelism.tp=2 parallelism.sequence_parallel=false train.global_batch=4",
    "gpus=4 parallelism.cp=4 train.global_batch=2",
    "gpus=4 parallelism.cp=4 parallelism.context.kind=all_to_all train.global_batch=2",
    "gpus=2 parallelism.tp=2 parallelism.recompute={kind:selective,parts:[norm,activation,core_attention]}"
    " train.global_batch=4",
    "gpus=2 parallelism.tp=2 parallelism.recompute={kind:selective,parts:[mlp]} train.global_batch=4",
    "gpus=2 parallelism.tp=2 parallelism.recompute.kind=full train.global_batch=4",
]
# What a layer is made of, beside what gathers, repeats and shares out.
LAYERS = [
    "model.layer={kind:sequential,norms:post}",
    "model.layer={kind:sequential,norms:sandwich} model.norm={kind:rms,weight:one_plus}",
    "model.layer={kind:parallel} model.norm={kind:layer,bias:false} model.mlp={kind:plain,activation:relu,bias:true}",
    "model.layer={kind:flat,mixers:[attention,mlp,attention,mlp]} ~model.positions.base model.positions={kind:none}",
]
BESIDE_LAYERS = [
    "gpus=2 parallelism.tp=2 train.global_batch=4",
    "gpus=2 parallelism.tp=2 parallelism.sequence_parallel=false parallelism.recompute.kind=full train.global_batch=4",
    "gpus=4 parallelism.pp=2 parallelism.dp_strategy=fsdp train.global_batch=16",
]
LAYERS_WITH_EXPERTS = [
    "model.layer={kind:sequential,norms:post}",
    "model.layer={kind:parallel}",
    "model.layer={kind:flat,mixers:[attention,moe,attention,moe]}",
]
WITH_EXPERTS = [
    "gpus=1 train.global_batch=2",
    "gpus=4 parallelism.ep=4 train.global_batch=8",
    "gpus=4 parallelism.tp=2 parallelism.ep=2 train.global_batch=4",
    "gpus=4 parallelism.tp=2 parallelism.ep=2 parallelism.etp=2 train.global_batch=4",
    "gpus=4 parallelism.tp=2 parallelism.ep=2 parallelism.dispatch=all_gather train.global_batch=4",
    "gpus=4 parallelism.tp=2 parallelism.ep=2 parallelism.etp=2 parallelism.dispatch=all_gather train.global_batch=4",
]
# What a layer with experts computes again, and where it ends: with the way back of its tokens, or with shared experts
# that are not computed beside their way.
WITH_EXPERTS_AGAIN = [
    "parallelism.recompute.kind=full",
    "parallelism.recompute.kind=full parallelism.dispatch=all_gather",
    "parallelism.recompute={kind:selective,parts:[moe]}",
    "parallelism.recompute={kind:selective,parts:[moe]} parallelism.dispatch=all_gather",
    "parallelism.recompute={kind:full,layers:3} model.moe.every=2 kernels.compile=none",
    "parallelism.recompute.kind=full model.moe.d_shared=768",
    "parallelism.recompute={kind:selective,parts:[moe]} model.moe.d_shared=768",
    "parallelism.recompute.kind=full model.moe.d_shared=768 parallelism.overlap.shared_experts=false",
    "parallelism.recompute={kind:selective,parts:[moe]} model.moe.d_shared=768 model.moe.shared_gate=true"
    " parallelism.overlap.shared_experts=false",
]
# What routers tell each other where sequences are split, and experts whose rows are padded.
ROUTING = [
    "parallelism.tp=2 parallelism.ep=2 train.global_batch=8 model.moe.router={balancing:sinkhorn,losses:[]}",
    "parallelism.cp=2 parallelism.tp=2 parallelism.ep=4 train.global_batch=8 model.moe.capacity_factor=1.25"
    " model.moe.pad_to_capacity=true",
    "parallelism.tp=2 parallelism.ep=2 train.global_batch=4 model.moe.capacity_factor=1.25 model.moe.drop=position"
    " model.moe.pad_to_capacity=true parallelism.dispatch=all_gather"
    " parallelism.recompute={kind:selective,parts:[moe]}",
]


# What is gathered as bytes, once more by other scales or with those of tokens, again, and not at all.
IN_FP8 = [
    "tensorwise gpus=4 parallelism.tp=2 train.global_batch=8 kernels.compile=none",
    "delayed gpus=4 parallelism.tp=2 train.global_batch=8",
    "delayed gpus=4 parallelism.tp=2 parallelism.pp=2 parallelism.pipeline.schedule=zb_h1 train.global_batch=8",
    "rowwise gpus=4 parallelism.tp=2 train.global_batch=8 kernels.compile=none",
    "rowwise gpus=2 parallelism.tp=2 parallelism.recompute={kind:selective,parts:[mlp]} train.global_batch=4",
    "blockwise gpus=2 parallelism.tp=2 train.global_batch=4",
    "tensorwise gpus=2 parallelism.dp_strategy=fsdp train.global_batch=4",
    "tensorwise gpus=2 parallelism.tp=2 parallelism.recompute.kind=full train.global_batch=4",
    "tensorwise gpus=2 parallelism.tp=2 parallelism.sequence_parallel=false train.global_batch=4",
    "tensorwise gpus=2 parallelism.tp=2 train.global_batch=4 train.trainable=['layers.2.*','layers.3.*','head.*']",
]


# Matrices of experts that are quantised once an update, and gathered so; beside ep and tp.
EXPERTS_IN_FP8 = [
    "tensorwise gpus=1 train.global_batch=2",
    "delayed gpus=4 parallelism.dp_strategy=zero1 parallelism.tp=2 parallelism.ep=2 train.global_batch=4",
    "rowwise gpus=4 parallelism.dp_strategy=zero1 parallelism.ep=4 train.global_batch=8",
    "tensorwise gpus=2 parallelism.dp_strategy=fsdp train.global_batch=4 precision.gather_fp8=true",
]


def spec_of(words: str) -> Spec:
    """As `plan` resolves it."""
    planned = plan_words(words.split())
    facts = replace(gather_facts(planned.composed.recipe), problems=())
    return resolve(planned.composed.recipe, planned.target, facts, planned.composed.origins)


def differences(spec: Spec, trace: Trace) -> list[str]:
    return [
        f"{row.what}: plan {row.planned:,}, trace {row.traced:,}" for row in compared(spec, trace) if not row.agrees
    ]


def check(words: str) -> None:
    spec = spec_of(words)
    for rank in ranks_to_trace(spec):
        assert differences(spec, trace_rank(spec, rank)) == [], f"rank {rank}"
    assert not dist.is_initialized()


@pytest.mark.parametrize("layout", halved(LAYOUTS))
def test_every_axis(layout):
    check(f"{SMALL} {layout}")


@pytest.mark.parametrize("layout", BETWEEN_MICRO_BATCHES)
def test_what_micro_batches_leave_behind(layout):
    check(f"{SMALL} {layout}")


@pytest.mark.parametrize("layout", PLAIN)
def test_plain_layers(layout):
    check(f"{SMALL} kernels.compile=none {layout}")


# Layers that flex computes itself in one order of sums, among them some that hide keys, and beside sinks. Where the
# others' tensors are small its own weigh more than a trace may differ by.
NARROW = (
    "model.d_ffn=1024 model.vocab_size=2048 gpus=1 train.global_batch=8 train.micro_batch=4 kernels.compile=none"
    " kernels.attention=flex train.deterministic=true"
)
IN_ONE_ORDER = [
    "gpus=1 train.global_batch=2",
    "gpus=2 parallelism.tp=2 train.global_batch=4 kernels.compile=none model.attention.sinks=true",
    "gpus=2 parallelism.tp=2 train.global_batch=4 kernels.compile=none model.attention.mask={kind:window,size:1024}",
    "gpus=2 parallelism.tp=2 parallelism.recompute.kind=selective train.global_batch=4",
]


@pytest.fixture
def in_any_order_again() -> Iterator[None]:
    """Whoever builds a run sets the mode."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", IN_ONE_ORDER)
def test_flex_in_one_order(layout, in_any_order_again):
    check(f"{SMALL} kernels.attention=flex train.deterministic=true {layout}")


@pytest.mark.parametrize("more", ["", "model.attention.sinks=true"])
def test_what_flex_keeps_in_one_order(more, in_any_order_again, monkeypatch):
    """As traced, and not as if it went through sdpa."""
    spec = spec_of(f"{SMALL} {NARROW} {more}")
    trace = trace_rank(spec, 0)
    assert differences(spec, trace) == []
    monkeypatch.setattr(layer_run, "takes_all_layers", lambda recipe: False)
    assert [line.partition(":")[0] for line in differences(spec, trace)] == ["all memory"]


@pytest.mark.parametrize("layout", IN_FP8)
def test_products_in_fp8(layout):
    check(f"{SMALL} {FP8} precision.recipe={layout}")


@pytest.mark.parametrize("layout", ["", "kernels.compile=none", "parallelism.sequence_parallel=false"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_products_in_blackwells_formats(recipe, layout):
    """By Transformer Engine, which is asked for nothing: matrices without numbers are the reference's."""
    words = f"precision.recipe={recipe} gpus=2 parallelism.tp=2 train.global_batch=4 {layout}"
    check(f"{SMALL} {FP8} {words}".replace("H200", "B200"))


@pytest.mark.parametrize("table", ["INPUTS_IN_FP8", "GRADIENTS_IN_FP8"])
def test_bytes_that_are_priced_as_two_show(table, monkeypatch):
    monkeypatch.setattr(communication, table, ())
    spec = spec_of(f"{SMALL} {FP8} gpus=2 parallelism.tp=2 train.global_batch=2 kernels.compile=none")
    wrong = differences(spec, trace_rank(spec, 0))
    assert [line.partition(":")[0] for line in wrong] == ["all gather over tp"]


def test_weights_gathered_in_fp8_are_traced():
    words = "gpus=2 parallelism.dp_strategy=fsdp train.global_batch=2 precision.gather_fp8=true"
    spec = spec_of(f"{SMALL} {FP8} {words}")
    trace = trace_rank(spec, 0)
    sent = sum(call.bytes * times for call, times in trace.calls.items() if call.kind == "all_gather")
    planned = sum(one.bytes * one.times for one in collectives_of(spec, None) if one.kind == "all_gather")
    assert sent == planned


@pytest.mark.parametrize("words", EXPERTS_IN_FP8)
def test_experts_in_fp8(words):
    experts = EXPERTS.removesuffix(" parallelism.dp_strategy=zero1")
    check(f"{experts} {FP8} precision.recipe={words}")


# by default each layout with one or two of what is trained
FROZEN = [f"{layout} train.trainable=[{trained}]" for layout in BESIDE_FROZEN for trained in TRAINED]


@pytest.mark.parametrize("words", halved(FROZEN))
def test_what_is_frozen(words):
    check(f"{SMALL} {words}")


@pytest.mark.parametrize("trained", [*TRAINED, "'*.router.*'"])
def test_frozen_experts(trained):
    words = f"{EXPERTS} gpus=4 parallelism.tp=2 parallelism.ep=2 train.global_batch=4"
    check(f"{words} kernels.compile=none train.trainable=[{trained}]")


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("layout", BESIDE_LAYERS)
def test_kinds_of_layers(layout, layers):
    check(f"{SMALL} kernels.compile=none {layers} {layout}")


@pytest.mark.parametrize("layers", LAYERS_WITH_EXPERTS)
def test_kinds_of_layers_with_experts(layers):
    words = f"{EXPERTS} {layers} gpus=4 parallelism.tp=2 parallelism.ep=2 train.global_batch=4"
    check(f"{words} kernels.compile=none parallelism.recompute.kind=full")


@pytest.mark.parametrize("compiled", ["block", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", WITH_EXPERTS)
def test_experts(layout, compiled):
    check(f"{EXPERTS} kernels.compile={compiled} {layout}")


def test_experts_that_are_shared_out_inside_replicas():
    words = EXPERTS.removesuffix("zero1") + "hsdp parallelism.dp_shard=4 parallelism.dp_replicate=2 parallelism.ep=2"
    check(f"{words} gpus=8 train.global_batch=8")


@pytest.mark.parametrize("again", WITH_EXPERTS_AGAIN)
def test_experts_that_run_again(again):
    spec = spec_of(f"{EXPERTS} gpus=4 parallelism.tp=2 parallelism.ep=2 train.global_batch=4 {again}")
    assert differences(spec, trace_rank(spec, 0)) == []


@pytest.mark.parametrize("routing", ROUTING)
def test_routing(routing):
    spec = spec_of(f"{EXPERTS} gpus=4 {routing}")
    assert differences(spec, trace_rank(spec, 0)) == []


def test_a_thousand_ranks():
    """The layout of 405B with a quarter of its layers: operations are what takes time, ranks and sizes are free."""
    spec = spec_of("recipe=llama3_1_405b model.n_layers=30 train.global_batch=128")
    trace = trace_rank(spec, 0)
    assert spec.world_size == 1024
    assert differences(spec, trace) == []
    assert trace.parameters["layers.0.attn.wqkv.weight"] == ((16384 + 2 * 1024) // 8, 16384)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe(name):
    spec = spec_of(f"recipe={name}")
    problems = unbuilt_problems(spec)
    if problems:
        pytest.skip(str(problems[0]))
    check(f"recipe={name}")


def test_further_micro_batches_are_counted_and_not_run():
    """Of 24 micro batches eight are traced."""
    layout = f"{SMALL} gpus=8 parallelism.pp=4 parallelism.dp_strategy=zero2"
    short, long = (spec_of(f"{layout} train.global_batch={n}") for n in (16, 48))
    one, more = trace_rank(short, 2), trace_rank(long, 2)
    assert (one.micro_batches, more.micro_batches) == (8, 8)
    of_kind = {kind: [0, 0] for kind in ("p2p", "reduce_scatter", "all_gather")}
    for number, trace in enumerate((one, more)):
        for call, times in trace.calls.items():
            if call.kind in of_kind:
                of_kind[call.kind][number] += call.bytes * times
    assert of_kind["p2p"][1] == 3 * of_kind["p2p"][0]
    assert of_kind["reduce_scatter"][1] == 3 * of_kind["reduce_scatter"][0]
    assert of_kind["all_gather"][1] == of_kind["all_gather"][0]


def test_narrow_states_are_updated_in_one_kernel():
    formats = "optim.formats={master:fp16,exp_avg:fp8,exp_avg_sq:bf16}"
    check(f"{SMALL} gpus=2 parallelism.dp_strategy=zero1 train.global_batch=4 {formats}")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("gpus=2 optim=muon", "optim.kind=muon"),
        ("gpus=1 parallelism.offload.layers=2", "parallelism.offload.layers=2"),
        ("gpus=1 parallelism.offload.optimizer=0.5", "parallelism.offload.optimizer=0.5"),
        (f"gpus=1 {FP8} kernels.linear=te", "kernels.linear=te"),
    ],
)
def test_what_needs_numbers_is_refused_with_its_reason(words, key):
    with pytest.raises(RecipeError, match=f"{key} can't be traced: .*; leave --trace out"):
        trace_rank(spec_of(f"{SMALL} {words} train.global_batch=4"), 0)


def test_first_last_and_fullest():
    spec = spec_of("recipe=llama3_1_405b_256gpu")
    assert ranks_to_trace(spec) == (0, 32, 255)


@pytest.mark.parametrize("read", ["loss.item()", "bool(loss > 0)", "loss.tolist()", "loss.cpu()"])
def test_a_step_that_reads_a_number_fails(read, monkeypatch):
    def reads(built, x):
        eval(read, {"loss": x})  # a word of this file
        return x

    monkeypatch.setattr(step, "_summed", reads)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        trace_rank(spec_of(f"{SMALL} gpus=2 train.global_batch=2"), 0)


def test_a_collective_that_is_left_out_shows(monkeypatch):
    monkeypatch.setattr(step, "_summed", lambda built, x: x)
    spec = spec_of(f"{SMALL} gpus=2 train.global_batch=2")
    wrong = differences(spec, trace_rank(spec, 0))
    assert [line.partition(":")[0] for line in wrong] == ["all reduce over dp_replicate"]


@pytest.mark.parametrize(("traced", "agrees"), [(100, True), (105, True), (106, False), (94, False)])
def test_five_percent(traced, agrees):
    assert Row("all memory", "bytes", 100, traced, MEMORY_TOLERANCE).agrees is agrees
    assert Row("parameters", "parameters", 100, traced, 0.0).agrees is (traced == 100)
    assert Row("logits", "bytes", 100, traced, None).agrees


def test_kinds_are_those_of_the_plan():
    assert set(KINDS) | {"reserve"} == set(StageMemory.__dataclass_fields__)


def test_memory_counts_each_storage_while_it_lives():
    recorder = Recorder()
    memory: Memory = recorder.memory
    with recorder.watching():
        x = torch.empty(8, 4, device="meta")
        views = x[2:], x.t()
        memory.name(x, WEIGHTS)
        y = x * 2
        z = torch.empty(3, device="meta")
        assert memory.now[WEIGHTS] == 128
        addresses = {x.data_ptr(), y.data_ptr(), z.data_ptr(), x[2:].data_ptr()}
        assert len(addresses) == 4
        assert x[2:].data_ptr() == x.data_ptr() + 32
        total = sum(memory.now.values())
        assert total == 128 + 128 + 12
        del y, z
        assert sum(memory.now.values()) == 128
        x.untyped_storage().resize_(0)
        assert sum(memory.now.values()) == 0
        x.untyped_storage().resize_(128)
        memory.name(views[0], ACTIVATIONS)
        assert (memory.now[WEIGHTS], memory.now[ACTIVATIONS]) == (0, 128)
    assert sum(memory.peak.values()) == 268


def test_a_fake_world_leaves_nothing_behind():
    with fake_world(3, 8):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
    assert not dist.is_initialized()
    assert torch.empty(2).data_ptr() != 0
