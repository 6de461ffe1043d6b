"""The plan's flat buffers against those of ranks that are built: each number of them, padding included."""

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaspec.core.part_facts import Degrees
from megaspec.estimate.buckets import stage_buckets
from megaspec.estimate.memory import memory_of
from megaspec.parallelism.bucketing import Bucketing
from megaspec.parallelism.places import Places
from megaspec.parallelism.stages import stages_of
from megaspec.precision.spec import Fp8Precision
from megaspec.runtime.build import TrainState, build, build_model, mesh_of
from megaspec.spec import Spec
from megaspec.verify.trace import fake_world
from megaspec_kernels.registry import kernels_of
from tests.nn.random_specs import decoders
from tests.nn.test_random_specs import recipe_of
from tests.parity.cases import Case, spec_of

OPTIONS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
# widths with few factors in common, and those that models have
WIDTHS = (8, 16, 24, 31, 64, 509)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A model of any parts and widths in any layout that shares it out."""
    model = draw(decoders()) | {"d_model": draw(st.sampled_from(WIDTHS)), "d_ffn": 2 * draw(st.sampled_from(WIDTHS))}
    model["n_kv_heads"] = min(model["n_heads"], max(2, model["n_kv_heads"]))
    tp = draw(st.sampled_from([1, 1, 2]))
    pp = draw(st.sampled_from([1, 2])) if model["n_layers"] == 2 else 1
    strategy = draw(st.sampled_from(["replicate", "zero1", "zero2", "fsdp", "hsdp"]))
    shards = draw(st.sampled_from([2, 3, 8]))
    replicas = 2 if strategy == "hsdp" else 1
    if strategy == "replicate":
        replicas, shards = shards, 1
    ep = 1
    if model["moe"] is not None:
        ep = draw(st.sampled_from([1, 2])) if tp * shards % 2 == 0 else 1
        if strategy == "replicate":
            ep = 1
    recompute = draw(st.sampled_from([{"kind": "none"}, {"kind": "full", "layers": 2}]))
    trainable = draw(st.sampled_from([None, None, ["*norm*", "*.wqkv.*", "layers.0.*"]]))
    world = tp * pp * shards * replicas
    changes = {
        "parallelism.tp": tp,
        "parallelism.sequence_parallel": tp > 1,
        "parallelism.pp": pp,
        "parallelism.ep": ep,
        "parallelism.dp_strategy": strategy,
        "parallelism.dp_shard": shards,
        "parallelism.dp_replicate": replicas,
        "parallelism.bucket_mb": draw(st.sampled_from([0.001, 0.01, 100.0])),
        "parallelism.recompute": recompute,
        "precision": {"kind": "bf16"},
        "train.trainable": trainable,
        "train.global_batch": 2 * shards * replicas * pp,
        "launcher.ranks": world,
    }
    content = recipe_of(model, **changes).model_dump(mode="json")
    more = {"world_size": world, "device": "cpu", "segments": [8], "forked_from": None}
    return Spec.model_validate_json(json.dumps(content | more))


def built_on(spec: Spec, rank: int) -> TrainState:
    """A rank without numbers."""
    with fake_world(rank, spec.world_size):
        return build(spec, mesh=mesh_of(spec, rank=rank, device=torch.device("meta")))


def said(places: Places, *, is_trained: bool) -> tuple[Any, ...]:
    """All of a buffer but names."""
    return tuple(places.shapes.values()), tuple(places.starts.values()), places.shard, places.shards, is_trained


def check(spec: Spec) -> None:
    """The first rank and the last: buffers one by one, and what memory_of makes of them in bytes."""
    for rank in {0, spec.world_size - 1}:
        built = built_on(spec, rank)
        data = built.data_parallel
        stage = built.mesh.index("pp")
        planned = stage_buckets(spec, stages_of(spec.model.n_layers, spec.parallelism)[stage]).all
        counted: Counter[tuple[Any, ...]] = Counter()
        for bucket, times in planned.counts.items():
            counted[said(bucket.places, is_trained=bucket.kind.is_trained)] += times
        assert counted == Counter(said(one.division, is_trained=one.is_trained) for one in data.buckets)
        memory = memory_of(spec, device="meta")[stage]
        angles = sum(
            buffer.nbytes for chunk in built.chunks for name, buffer in chunk.named_buffers() if "rope" in name
        )
        weights = sum(parameter.nbytes for parameter in data.parameters.values())
        if spec.parallelism.dp_strategy != "replicate":
            weights = sum(bucket.weights.own.nbytes for bucket in data.buckets if not bucket.weights.kept)
            weights += sum(bucket.weights.whole.nbytes for bucket in data.buckets if bucket.weights.kept)
        assert memory.weights == weights + angles
        sums = [bucket.sums for bucket in data.buckets if bucket.is_trained]
        assert memory.gradients == sum(one.whole.nbytes if one.kept else one.own.nbytes for one in sums)
        held = sum(gradient.numel() for gradient in data.gradients.values())
        assert held <= planned.trained.most_held.total


@settings(max_examples=60, **OPTIONS)
@given(spec=specs())
def test_what_is_planned_is_built(spec: Spec) -> None:
    check(spec)


@pytest.mark.slow
@settings(max_examples=400, **OPTIONS)
@given(spec=specs())
def test_what_is_planned_is_built_of_many(spec: Spec) -> None:
    check(spec)


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, tp=2, sequence=True, strategy="fsdp", router="softmax", ep=2, shared="gate"),
        Case(pp=2, schedule="interleaved", virtual=2, n_layers=4, dp=2, strategy="zero1"),
        Case(pp=2, schedule="zb_v", n_layers=4, dp=2, strategy="zero2", family="gpt"),
        Case(dp=2, strategy="fsdp", trainable="upper", n_layers=4),
        Case(dp=4, strategy="fsdp", precision="fp8 tensorwise", n_layers=4, also=(("precision.gather_fp8", True),)),
    ],
    ids=str,
)
def test_of_each_schedule_and_format(case: Case) -> None:
    spec = spec_of(case)
    for rank in range(spec.world_size):
        built = built_on(spec, rank)
        chunks = stages_of(spec.model.n_layers, spec.parallelism)[built.mesh.index("pp")]
        planned = stage_buckets(spec, chunks).all
        buckets = built.data_parallel.buckets
        assert planned.whole.total == sum(bucket.division.numel for bucket in buckets)
        assert planned.shards.total == sum(bucket.division.shard for bucket in buckets)
        assert planned.in_fp8.shards.total == sum(one.bytes.own.nbytes for one in buckets if one.bytes is not None)
        assert (planned.in_fp8.shards.total > 0) is isinstance(spec.precision, Fp8Precision)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_the_optimizer_of_the_rank_that_has_most(strategy: str) -> None:
    spec = spec_of(Case(dp=4, strategy=strategy, n_layers=3))
    held = []
    for rank in range(4):
        held.append(sum(one.numel() for one in built_on(spec, rank).data_parallel.gradients.values()))
    planned = stage_buckets(spec, stages_of(spec.model.n_layers, spec.parallelism)[0]).all.trained
    assert planned.most_held.total == max(held)
    assert planned.elements.total == sum(held)
    assert len(set(held)) > 1, "all ranks have as much: nothing was shown"


@settings(max_examples=60, **OPTIONS)
@given(model=decoders())
def test_facts_have_the_order_of_modules(model: dict[str, Any]) -> None:
    """By which parameters lie side by side."""
    recipe = recipe_of(model)
    held = build_model(recipe.model, kernels_of(recipe.kernels), dtype=torch.bfloat16).global_parameters()
    for number, layer in enumerate(recipe.model.facts.layers):
        prefix = f"layers.{number}."
        shapes = {f"{prefix}{one.name}": one.shape_on(Degrees()) for one in layer.weights}
        assert list(shapes.items()) == [(n, tuple(p.shape)) for n, p in held.items() if n.startswith(prefix)]


def test_what_is_frozen_is_whole_but_where_weights_are_shared_out() -> None:
    frozen = next(one.kind for one in frozen_buckets("fsdp"))
    for strategy, shards in (("zero1", 1), ("zero2", 1), ("fsdp", 4)):
        by = Bucketing(strategy, 1e6, wide=4, dense_shards=4)
        assert by.shards_of(frozen) == shards
        assert {one.places.shards for one in frozen_buckets(strategy)} == {shards}


def frozen_buckets(strategy: str) -> list[Any]:
    spec = spec_of(Case(dp=4, strategy=strategy, n_layers=4, trainable="upper"))
    found = stage_buckets(spec, stages_of(spec.model.n_layers, spec.parallelism)[0]).all
    return [bucket for bucket in found.counts if not bucket.kind.is_trained]
