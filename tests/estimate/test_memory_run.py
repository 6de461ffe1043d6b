"""The memory that is predicted against a whole training step on a CPU, which the profiler watches."""

import pytest
import torch

from megaspec.data.batch import Batch
from megaspec.estimate.memory import memory_of
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import build, initialise
from megaspec.runtime.step import train_step
from tests.families import FAMILIES
from tests.runtime.specs import spec

T, B = 256, 2


def peak_bytes(step):
    """The most that is allocated at once while `step` runs, what was there before left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("family", "precision", "loss", "n_layers", "vocab", "d_ffn"),
    [
        # the peak at the loss, its kernels in turn
        ("llama", "fp32", "chunked", 2, 512, 192),
        ("llama", "bf16", "chunked", 2, 512, 192),
        ("gpt", "bf16", "reference", 2, 512, 192),
        # most of it kept activations
        ("llama", "bf16", "chunked", 12, 128, 192),
        ("gpt", "fp32", "chunked", 12, 128, 192),
        # the peak in the backward pass of a layer
        ("llama", "bf16", "chunked", 1, 128, 2048),
        ("gpt", "fp32", "reference", 1, 128, 2048),
    ],
)
def test_a_step_takes_what_is_predicted(family, precision, loss, n_layers, vocab, d_ffn):
    model = FAMILIES[family] | {"n_layers": n_layers, "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "d_ffn": d_ffn}
    changes = {"data.vocab_size": vocab, "data.seq_len": T, "precision.kind": precision, "train.micro_batch": B}
    kernels = {"attention": "sdpa", "cross_entropy": loss}
    check({"model": model | {"vocab_size": vocab}, "kernels": kernels, "train.global_batch": B} | changes)


@pytest.mark.parametrize("trainable", [["*norm*"], ["layers.9.*", "layers.11.*"], ["*.w_down.*"], ["*.wqkv.*"]])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_step_that_trains_a_part_takes_what_is_predicted(family, trainable):
    model = FAMILIES[family] | {"n_layers": 12, "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "d_ffn": 192}
    changes = {"data.vocab_size": 128, "data.seq_len": T, "precision.kind": "bf16", "train.micro_batch": B}
    kernels = {"attention": "sdpa", "cross_entropy": "chunked"}
    more = {"kernels": kernels, "train.global_batch": B, "train.trainable": trainable}
    check({"model": model | {"vocab_size": 128}} | more | changes, off=0.05)


def check(changes, *, off=0.02):
    """Holds a step's peak to the plan, which may be `off` by a share."""
    made = spec(changes)
    vocab = made.model.vocab_size
    cpu = torch.device("cpu")
    built = build(made, mesh=Mesh({"tp": 1, "dp_replicate": 1}, rank=0, device=cpu))
    initialise(built)
    scaler = build_scaler(made.precision, device=cpu)
    tokens = torch.randint(0, vocab, (B, T + 1))
    mask = torch.ones(B, T, dtype=torch.bool)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, torch.arange(B))

    def step():
        train_step(built, [batch], lr=1e-3, weight_decay=0.1, scaler=scaler)

    step()
    (stage,) = memory_of(made, device="cpu")
    assert stage.activations + stage.logits == pytest.approx(peak_bytes(step), rel=off)
