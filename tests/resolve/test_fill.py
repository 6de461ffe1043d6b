"""What the resolver decides: values, reasons, and that its own choices keep every rule."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.estimate.target import Target
from megaspec.precision.spec import may_write_fp8
from megaspec.resolve.resolver import resolve, settle
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec, open_fields
from tests.pace import within
from tests.resolve.planned import RANDOM, filled

CPU = Target(cores=2, versions={"torch": "2.13.0+cpu", "tensorboard": "2.21.0"})
H200 = Target(gpus=8, gpu="NVIDIA H200", sm=90, cores=64, versions={"torch": "2.13.0"})
FACTS = Facts(run_dir="runs/hello", vocab_size=257, train_tokens=10**6, valid_tokens=10**5)

# What the cases below count on, whatever the recipe says.
BASE = ("train.steps=120", "train.global_batch=16", "optim.schedule.warmup_steps=10")


VERSIONS = {"torch": "2.13.0", "transformer-engine": "2.9"}


def spec_of(*overrides, target=CPU, name="hello", facts=FACTS):
    return resolve(compose(name, [*BASE, *overrides]).recipe, target, facts)


def test_hello_on_two_cores_is_tensor_parallel_and_on_gpus_data_parallel():
    cpu, gpu = spec_of(), spec_of(target=H200)
    assert (cpu.world_size, cpu.device, cpu.parallelism.tp, cpu.parallelism.dp_replicate) == (2, "cpu", 2, 1)
    assert cpu.parallelism.sequence_parallel is True
    assert (gpu.world_size, gpu.device, gpu.parallelism.tp, gpu.parallelism.dp_replicate) == (8, "cuda", 1, 8)
    assert gpu.parallelism.sequence_parallel is False
    assert (cpu.kernels.compile, gpu.kernels.compile) == ("none", "block")
    assert (cpu.kernels.cross_entropy, gpu.kernels.cross_entropy) == ("chunked", "triton")
    one = spec_of(target=CPU.model_copy(update={"cores": 1}))
    assert (one.world_size, one.parallelism.tp) == (1, 1)


def test_a_torch_without_cuda_leaves_gpus_alone():
    target = H200.model_copy(update={"versions": {"torch": "2.13.0+cpu"}})
    assert spec_of(target=target).device == "cpu"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("parallelism.tp=4", "model.n_kv_heads=4"), (4, 4, 1)),
        (("parallelism.tp=1",), (2, 1, 2)),
        (("parallelism.dp_replicate=2",), (2, 1, 2)),
        (("parallelism.tp=2", "parallelism.dp_replicate=3", "train.global_batch=12"), (6, 2, 3)),
        (("launcher.ranks=4",), (4, 4, 1)),
        (("launcher.ranks=8",), (8, 4, 2)),
        (("model.n_heads=1", "model.n_kv_heads=1"), (2, 1, 2)),
    ],
)
def test_ranks_and_layout(overrides, expected):
    spec = spec_of(*overrides)
    assert (spec.world_size, spec.parallelism.tp, spec.parallelism.dp_replicate) == expected
    assert spec.launcher.ranks == spec.world_size


@pytest.mark.parametrize(
    ("gpus", "overrides", "ranks"),
    [
        (8, (), 8),
        (3, (), 2),
        (7, (), 4),
        (32, (), 16),
        (6, ("train.global_batch=12",), 6),
        (6, ("parallelism.tp=2",), 4),
        (8, ("train.batch_ramp={start: 2, increment: 2, samples: 24}",), 2),
    ],
)
def test_as_many_gpus_as_divide_the_batch(gpus, overrides, ranks):
    spec = spec_of(*overrides, target=H200.model_copy(update={"gpus": gpus}))
    assert spec.world_size == ranks
    why = next(d.reason for d in spec.decisions if d.key == "launcher.ranks")
    assert ("divide the global batch" in why) == (ranks < gpus)


def test_the_world_of_torchrun_is_taken():
    spec = spec_of(target=CPU.model_copy(update={"world_size": 4, "local_ranks": 4}))
    assert (spec.world_size, spec.parallelism.tp) == (4, 4)
    assert "torchrun" in next(d.reason for d in spec.decisions if d.key == "launcher.ranks")


def test_shapes_follow():
    hello, gpt = spec_of(), spec_of("model=gpt2_124m", "data.seq_len=256", "train.sample=null")
    assert (hello.model.d_head, hello.model.n_kv_heads, hello.model.max_seq_len) == (32, 2, 256)
    assert hello.model.d_ffn == 8 * 128 // 3 // 64 * 64 == 320
    assert (gpt.model.d_ffn, gpt.model.d_head, gpt.model.n_kv_heads, gpt.model.max_seq_len) == (3072, 64, 12, 1024)
    assert spec_of("model.vocab_size=auto", facts=replace(FACTS, vocab_size=300)).model.vocab_size == 300
    assert spec_of("train.seed=7").data.seed == 7
    assert spec_of("train.steps=50").optim.schedule.decay_steps == 50
    assert spec_of("data.blend.0.prefix=/x/y/z").data.cache == "/x/y/index-cache"
    assert spec_of("model.attention.dropout=0.1").kernels.attention == "reference"
    assert spec_of("data.seq_len=255").parallelism.sequence_parallel is False


@pytest.mark.parametrize(
    ("overrides", "micro"),
    [
        ((), 16),
        (("train.global_batch=64",), 32),
        (("train.global_batch=49",), 7),
        (("train.global_batch=53",), 1),
        (("data.seq_len=8192",), 1),
        (("data.seq_len=16384",), 1),
        (("parallelism.tp=1", "train.global_batch=12"), 6),
        (("train.batch_ramp={start: 4, increment: 6, samples: 99}",), 2),
    ],
)
def test_micro_batch_is_the_largest_divisor_with_few_tokens(overrides, micro):
    assert spec_of(*overrides).train.micro_batch == micro


DELAYED = ("precision={kind: fp8, recipe: delayed, first_layers_bf16: 0, last_layers_bf16: 0}", "model.n_layers=4")
# Experts in every layer but the first.
EXPERTS = "model.moe={n_experts: 8, top_k: 2, first_dense: 1, d_shared: 64}"


def selective(parts):
    """Recomputation of these parts."""
    return f"parallelism.recompute={{kind: selective, parts: {parts}}}"


@pytest.mark.parametrize(
    ("overrides", "writers"),
    [
        ((), ("norm", "gated", "rope")),
        ((selective("null"),), ("norm", "gated", "rope")),
        ((selective("[core_attention]"),), ("norm", "gated", "rope")),
        (("parallelism.recompute.kind=full",), ("norm", "gated", "rope")),
        ((selective("[norm]"),), ("gated", "rope")),
        ((selective("[activation]"),), ("norm", "rope")),
        ((selective("[core_attention, mlp]"),), ("norm", "rope")),
        ((selective("[norm, mlp]"),), ("rope",)),
        ((EXPERTS,), ("norm", "gated", "rope")),
        # the only gates are those of experts, which quantise their rows themselves
        ((EXPERTS, "precision.first_layers_bf16=1"), ("norm", "rope")),
        (("model.mlp={kind: plain}",), ("norm", "rope")),
        (("model.mlp={kind: gated, bias: true}",), ("norm", "rope")),
        (("model.layer={kind: parallel}",), ("gated", "rope")),
        (("model.layer={kind: sequential, norms: post}",), ("gated", "rope")),
        (("model.layer={kind: flat, mixers: [attention, attention, mlp, attention]}",), ("norm", "gated", "rope")),
        (("model.layer={kind: flat, mixers: [attention, attention, attention, attention]}",), ("norm", "rope")),
        (("precision.recipe=tensorwise",), ()),
        (("parallelism.tp=2",), ("norm", "gated", "rope")),
        (("parallelism.tp=2", "parallelism.sequence_parallel=false"), ("norm", "gated", "rope")),
        # norms of heads, or a bias, stand between the product and its positions
        (("model.attention={kind: gqa, qk_norm: per_head}",), ("norm", "gated")),
        (("model.attention={kind: gqa, qkv_bias: true}",), ("norm", "gated")),
    ],
    ids=str,
)
def test_kernels_that_write_fp8_are_taken_where_they_do(overrides, writers):
    spec = spec_of(*DELAYED, *overrides, target=H200)
    found = set()
    for decision in spec.decisions:
        if "writes fp8 itself" in decision.reason:
            found.add(decision.key.removeprefix("kernels."))
    assert found == set(writers)
    assert spec.kernels.rope == ("triton" if "rope" in writers else "reference")


def test_what_was_set_is_never_decided():
    keys = {d.key for d in spec_of("parallelism.tp=2", "kernels.compile=none", "data.seed=3").decisions}
    assert not keys & {"parallelism.tp", "kernels.compile", "data.seed", "train.steps", "model.vocab_size"}


def test_every_decision_is_listed_with_a_reason_and_an_open_field():
    recipe = compose("hello").recipe
    spec = resolve(recipe, CPU, FACTS)
    # without a document mask nothing asks how long documents are
    assert {d.key for d in spec.decisions} == set(open_fields(recipe)) - {"data.document_lengths"}
    assert all(d.reason for d in spec.decisions)
    assert open_fields(spec) == []


def test_spec_is_json_both_ways_and_resolving_is_pure_and_fast():
    recipe = compose("llama3_8b_half").recipe
    with within(1.0):
        first = resolve(recipe, H200, FACTS.__class__(run_dir="runs/x"))
    assert resolve(recipe, H200, FACTS.__class__(run_dir="runs/x")) == first
    assert Spec.model_validate_json(first.model_dump_json()) == first
    assert first.segments == (20_000 * 64,)


def test_a_spec_with_an_open_field_is_refused():
    fields = json.loads(spec_of().model_dump_json())
    fields["parallelism"]["tp"] = "auto"
    with pytest.raises(ValueError, match=r"left open: parallelism\.tp"):
        Spec.model_validate_json(json.dumps(fields))


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 24),
    kv_share=st.integers(1, 8),
    ffn=st.integers(1, 700),
    seq_len=st.integers(1, 600),
    batch=st.integers(1, 40),
    ranks=st.integers(1, 12),
)
def test_whatever_the_shape_our_own_choices_keep_the_rules(heads, kv_share, ffn, seq_len, batch, ranks):
    assume(heads % kv_share == 0)
    shape = (f"model.n_heads={heads}", f"model.n_kv_heads={heads // kv_share}", "model.d_head=16")
    spec = spec_of(
        *shape,
        f"model.d_ffn={ffn}",
        f"data.seq_len={seq_len}",
        f"train.global_batch={batch * ranks}",
        f"launcher.ranks={ranks}",
    )
    assert spec.parallelism.tp * spec.parallelism.dp_replicate == ranks
    wider = (t for t in range(spec.parallelism.tp + 1, ranks + 1) if ranks % t == 0)
    kv = heads // kv_share
    assert not any(heads % t == 0 and ffn % t == 0 and (kv % t == 0 or t % kv == 0) for t in wider)


def test_what_a_search_would_start_from_is_told_where_it_is_out_of_bounds():
    """d_ffn follows from d_model, which may be as large as a count may be."""
    composed = compose("hello", ("parallelism=auto", "model.d_model=1000000000000000000"))
    with pytest.raises(RecipeError, match=r"model\.d_ffn=2666666666666666624"):
        settle(composed.recipe, H200.model_copy(update={"gpu_memory": 143771 << 20}), FACTS, composed.origins)


def test_transformer_engine_quantises_itself():
    delayed = compose("hello", DELAYED).recipe.precision
    assert may_write_fp8(delayed, recomputed=frozenset(), linear="te") == set()


@pytest.mark.parametrize(
    ("words", "small"),
    [
        (("model=llama3_2_1b", "data.seq_len=8192", "train.micro_batch=2"), ()),
        (("model=llama3_2_1b", "data.seq_len=2048", "train.micro_batch=1"), ("norm", "gated")),
        # experts' gates are in no compiled layer
        (("model=qwen3_30b_a3b", "data.seq_len=2048", "train.micro_batch=1"), ("norm",)),
        # what writes fp8 saves a cast
        (("model=llama3_2_1b", "data.seq_len=2048", "train.micro_batch=1", *DELAYED[:1]), ()),
    ],
    ids=str,
)
def test_layers_that_would_wait_for_the_host_are_left_to_the_compiler(words, small):
    found = filled("hello", *RANDOM, *words, gpus=4)
    for operation in ("norm", "gated"):
        assert getattr(found.kernels, operation) == ("reference" if operation in small else "triton"), operation
    assert found.kernels.adamw == "triton"
