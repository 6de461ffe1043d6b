"""Floating-point operations of training, as Megatron-LM counts them.

Counted: the matrix products of forward, input gradient and weight gradient, a multiply-add as 2. Not counted: norms,
softmax, dropout, recomputation. `causal` counts half of the attention scores, which is what a causal kernel computes
and what Megatron reports; `full` counts all of them, which is what most MFU figures in papers do.
"""

from typing import Literal

from megaspec.model.gpt.spec import GptSpec
from megaspec.recipe import ModelSpec

Convention = Literal["causal", "full"]


def padded_vocab(model: ModelSpec, *, tp: int) -> int:
    """Rows of the output head over all tensor-parallel ranks, padding included."""
    multiple = model.vocab_pad_to * tp
    return -(-model.vocab_size // multiple) * multiple


def flops_per_sequence(model: ModelSpec, *, seq_len: int, convention: Convention = "causal", tp: int = 1) -> int:
    """FLOPs of one training step for one sequence of `seq_len` tokens, over all ranks."""
    d, q, kv = model.d_model, model.n_heads * model.d_head, model.n_kv_heads * model.d_head
    mlp_matrices = 2 if isinstance(model, GptSpec) else 3
    per_token = 6 * model.n_layers * d * (q + 2 * kv + q + mlp_matrices * model.d_ffn)
    per_token += 6 * d * padded_vocab(model, tp=tp)
    scores = {"causal": 6, "full": 12}[convention] * model.n_layers * q
    return seq_len * per_token + seq_len**2 * scores


def flops_per_token(model: ModelSpec, *, seq_len: int, convention: Convention = "causal", tp: int = 1) -> float:
    """The mean over the tokens of a sequence."""
    return flops_per_sequence(model, seq_len=seq_len, convention=convention, tp=tp) / seq_len
