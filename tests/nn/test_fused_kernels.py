"""Layers with the Triton kernels of norms, gates and rotations, in Triton's interpreter: what they compute and what
they keep.

The interpreter must be chosen when Triton is imported, so that they run in a process of their own:
tests/kernels/test_triton_interpreted.py.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megaspec.nn.linear import COMPILED
from megaspec_kernels.norm import triton
from tests.nn.random_specs import TOKENS, VOCABULARY, decoders
from tests.nn.test_random_specs import OPTIONS, SEQUENCES, check_kept, model_of
from tests.parity.tasks import without_cpp

INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
FUSED = {"kernels.norm": "triton", "kernels.gated": "triton", "kernels.rope": "triton"}
LLAMA: dict[str, Any] = {
    "kind": "decoder",
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 2,
    "n_kv_heads": 1,
    "d_head": 6,
    "d_ffn": 20,
    "vocab_size": VOCABULARY,
    "vocab_pad_to": 1,
    "max_seq_len": TOKENS,
}
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by tests/kernels/test_triton_interpreted.py")


def gradients_of(model: dict[str, Any], changes: dict[str, Any], *, compiled: bool = False) -> dict[str, Tensor]:
    """Of the loss and every weight, in fp32."""
    decoder, _ = model_of(model, torch.float32, changes=changes)
    if compiled:
        for layer in decoder.layers.values():
            layer.compile_parts(options=COMPILED)
    tokens = torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS) % VOCABULARY
    loss = decoder.loss(tokens, tokens.roll(1, 1), torch.ones(SEQUENCES, TOKENS))
    loss.backward()
    return {"loss": loss.detach()} | {name: one.grad for name, one in decoder.named_parameters()}


def check_gradients(model: dict[str, Any], *, compiled: bool = False) -> None:
    """A kernel's sums are those of plain operations in another order."""
    plain = gradients_of(model, {})
    fused = gradients_of(model, FUSED, compiled=compiled)
    largest = max(one.abs().max() for one in plain.values())
    for name, one in plain.items():
        assert (fused[name] - one).abs().max() <= 1e-4 * largest, name


@interpreted
@settings(max_examples=6, **OPTIONS)
@given(model=decoders())
def test_random_decoders(model: dict[str, Any]) -> None:
    check_gradients(model)
    check_kept(model, FUSED)


@interpreted
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"residual_scale": 0.7, "norm": {"kind": "layer", "weight": "one_plus"}},
        {"layer": {"kind": "parallel"}},
        # a layer whose stream goes by what is compiled: a view of its input
        {"layer": {"kind": "flat", "mixers": ["attention", "moe"]}, "moe": {"n_experts": 2, "d_expert": 4, "top_k": 1}},
    ],
    ids=str,
)
def test_compiled_layers(change: dict[str, Any]) -> None:
    torch._dynamo.reset()
    with without_cpp():
        check_gradients(LLAMA | change, compiled=True)
