"""A predicted step in the words of a profile: nothing is lost, and rates are of the FLOPs that MFU counts."""

import pytest

from megaspec.compose.compose import compose
from megaspec.estimate.flops import flops_per_sequence
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.step_kinds import StepByKind, by_kind, rank_work
from megaspec.estimate.step_time import step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.plan.predict import predict
from megaspec.profiling.kinds import KINDS, OTHER
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts

H200 = HARDWARE["H200"]
LLAMA = "model=llama3_8b"
MOE = "model=qwen3_30b_a3b"
LAYOUTS = {
    "one": (LLAMA, 1, ("model.n_layers=8",)),
    "tensor": (LLAMA, 4, ("parallelism.tp=4",)),
    "pipeline": (LLAMA, 4, ("parallelism.pp=4", "parallelism.tp=1")),
    "context": (LLAMA, 4, ("parallelism.cp=4", "parallelism.tp=1")),
    "sharded": (LLAMA, 4, ("parallelism.dp_strategy=fsdp", "parallelism.tp=1")),
    "again": (LLAMA, 4, ("parallelism.recompute.kind=full", "parallelism.tp=4")),
    "parts again": (LLAMA, 4, ("parallelism.recompute.kind=selective", "parallelism.tp=4")),
    "offload": (LLAMA, 4, ("parallelism.tp=4", "parallelism.offload={layers: 8, optimizer: 0.5}")),
    "experts": (MOE, 8, ("parallelism.ep=8", "parallelism.tp=1")),
    "muon": (LLAMA, 4, ("optim=muon", "parallelism.tp=1")),
}


def spec_of(name):
    model, gpus, words = LAYOUTS[name]
    sizes = ("data.seq_len=4096", "train.global_batch=16", "train.micro_batch=1", f"launcher.ranks={gpus}")
    composed = compose("hello", [model, *sizes, *words])
    target = Target(gpus=gpus, gpu="NVIDIA H200", sm=90, gpu_memory=H200.memory, cores=64, versions={"torch": "2.13.0"})
    return resolve(composed.recipe, target, Facts(run_dir="-"), composed.origins), target


@pytest.mark.parametrize("name", LAYOUTS)
def test_kinds_add_up_to_the_step(name):
    spec, target = spec_of(name)
    time = step_time(spec, H200, throughput_of(H200))
    found = by_kind(time)
    assert found.seconds == pytest.approx(time.seconds, rel=1e-12)
    assert sum(found.by_kind().values()) == pytest.approx(time.seconds, rel=1e-12)
    assert set(found.by_kind()) == set(KINDS) - {OTHER}
    assert sum(time.recomputed.values()) == pytest.approx(time.parts["recompute"])
    # what a rank is told is the same
    predicted = predict(spec, target)
    assert predicted.step_seconds == pytest.approx(found.by_kind())
    assert len(predicted.works) == spec.parallelism.pp


@pytest.mark.parametrize("name", ["one", "tensor", "pipeline", "context", "sharded"])
def test_ranks_compute_together_what_a_step_has(name):
    spec, _ = spec_of(name)
    parallelism = spec.parallelism
    ranks = spec.world_size // parallelism.pp
    micro_batches = spec.train.global_batch // spec.train.micro_batch
    replicas = ranks // (parallelism.tp * parallelism.cp)
    works = [rank_work(spec, rank) for rank in range(parallelism.pp)]
    flops = sum(work.product_flops + work.attention_flops for work in works) * micro_batches * ranks / replicas
    whole = flops_per_sequence(spec.model, seq_len=spec.data.seq_len, tp=parallelism.tp) * spec.train.global_batch
    assert flops == pytest.approx(whole, rel=1e-9)


def test_what_is_computed_again_is_work_too():
    plain, _ = spec_of("tensor")
    again, _ = spec_of("again")
    first, second = rank_work(plain, 0), rank_work(again, 0)
    # forward, and two gradients: layers once more forward
    head = plain.model.facts.padded_vocab(tp=4) * plain.model.d_model // 4
    of_head = 6 * head * plain.data.seq_len
    assert second.product_flops - of_head == pytest.approx((first.product_flops - of_head) * 4 / 3)
    assert second.attention_flops == pytest.approx(first.attention_flops * 4 / 3)
    assert second.element_wise_bytes > first.element_wise_bytes
    assert second.optimizer_bytes == first.optimizer_bytes


def test_a_step_of_nothing():
    assert StepByKind().seconds == 0
