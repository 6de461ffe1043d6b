"""On a GPU the host reads a step's numbers one step late. Stopped and gone on with, a run is the same all the same."""

import pytest
import torch

from megaspec.estimate.target import Target
from tests.runtime import lives
from tests.runtime.specs import spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

H200 = Target(gpus=1, gpu="NVIDIA H200", sm=90, cores=2)
STEPS = 12
BASE = {
    "train.steps": STEPS,
    "train.deterministic": True,
    "train.eval_every": 5,
    "train.eval_samples": 3,
    "model.dropout": 0.1,
    "kernels.compile": "none",
}
CASES = {
    "bf16": {"precision.kind": "bf16"},
    "bf16 reference kernels": {
        "precision.kind": "bf16",
        "kernels.attention": "reference",
        "kernels.cross_entropy": "reference",
    },
    "fp16": {"precision": {"kind": "fp16", "initial_scale": 2.0**24, "growth_interval": 3, "hysteresis": 2}},
}
# One layer at either end in bf16, two in fp8.
FP8 = {"kind": "fp8", "first_layers_bf16": 1}
# What products and casts take: sizes that 16 divides, 128 for blocks.
WIDE = {
    "model": {
        "kind": "decoder", "n_layers": 4, "d_model": 128, "n_heads": 4, "n_kv_heads": 4, "d_head": 32, "d_ffn": 256,
        "vocab_size": 37,
    },
    "data": {"kind": "synthetic", "vocab_size": 37, "seq_len": 128},
}  # fmt: skip
for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"):
    CASES[f"fp8 {recipe}"] = WIDE | {"precision": FP8 | {"recipe": recipe}}
# With scales that forget.
SHORT = FP8 | {"recipe": "delayed", "amax_history": 3}
CASES["fp8 delayed, short"] = WIDE | {"precision": SHORT}
EXPERTS = {"moe": {"n_experts": 4, "d_expert": 128, "top_k": 2}}
CASES["fp8 delayed, experts"] = WIDE | {"precision": SHORT, "model": WIDE["model"] | EXPERTS}


@pytest.mark.parametrize("name", CASES)
def test_stopped_now_and_then(name, tmp_path, gpu_pool):
    """A stop is heard one step late, so each life is two steps long; only evaluations make the host wait."""
    text = spec(BASE | CASES[name], H200).model_dump_json()
    undisturbed = gpu_pool.run(lives.live, text, str(tmp_path / "whole"), ranks=1)[0]
    stopped = gpu_pool.run(lives.lives, text, str(tmp_path / "stopped"), stops=4, ranks=1)[0]
    assert [e["step"] for e in undisturbed if "samples" in e] == list(range(1, STEPS + 1))
    assert stopped == undisturbed
    whole, moved = lives.read_all(tmp_path / "whole"), lives.read_all(tmp_path / "stopped")
    assert len(moved) == 5
    assert moved[STEPS] == whole[STEPS]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_weight_that_is_not_finite(kind, tmp_path, gpu_pool):
    made = spec(BASE | {"precision.kind": kind}, H200)
    fault = {"on": 0, "what": "weight:layers.1.attn.wo.weight", "step": 4}
    ((name, text, _),) = gpu_pool.run(lives.fails, made.model_dump_json(), str(tmp_path), fault, ranks=1)
    assert name == "NonFiniteError"
    assert text.startswith("step 4: loss=nan is not finite, first seen in the weight layers.1.attn.wo.weight on rank 0")
