"""Parameters of a model, exactly, by what they are for."""

from dataclasses import dataclass, fields

from megaspec.model.gpt.spec import GptSpec
from megaspec.recipe import ModelSpec


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of weights. The vocabulary counts unpadded, a tied output head 0."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def count_parameters(model: ModelSpec) -> ParameterCount:
    """From a model without open fields."""
    d, q, kv = model.d_model, model.n_heads * model.d_head, model.n_kv_heads * model.d_head
    has_biases = isinstance(model, GptSpec)
    matrices_up = 1 if has_biases else 2
    attention = d * (q + 2 * kv) + q * d + (q + 2 * kv + d if has_biases else 0)
    mlp = (matrices_up + 1) * d * model.d_ffn + (model.d_ffn + d if has_biases else 0)
    norm = 2 * d if has_biases else d
    return ParameterCount(
        embedding=model.vocab_size * d,
        positions=model.max_seq_len * d if has_biases else 0,
        attention=model.n_layers * attention,
        mlp=model.n_layers * mlp,
        norms=(2 * model.n_layers + 1) * norm,
        head=0 if model.tied_embeddings else model.vocab_size * d,
    )
