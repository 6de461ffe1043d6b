"""Initial weights: a function of (seed, global name, global index), the same in every layout."""

import torch
from torch import Tensor

from megaspec.core.layout import Layout, Piece, whole
from megaspec.nn.decoder import Decoder
from megaspec.nn.embedding.module import Embedding
from megaspec.nn.hashing import fill_normal_, key_of
from megaspec.nn.head.module import OutputHead


def initial_value(layout: Layout, *, seed: int, std: float | None, constant: float | None, like: Tensor) -> Tensor:
    """This rank's part of a parameter's initial value, in at least fp32; padding is zero."""
    wide = torch.promote_types(like.dtype, torch.float32)
    out = torch.zeros(layout.local_shape, dtype=wide, device=like.device)
    for piece in layout.pieces:
        if constant is not None:
            out[piece.local_slices] = constant
        else:
            fill_normal_(
                out[piece.local_slices],
                key=key_of(seed, layout.name),
                start=piece.global_start,
                shape=layout.shape,
                std=std,
            )
    return out


@torch.no_grad()
def start_weights(model: Decoder, *, std: float, seed: int = 0) -> None:
    """Initial values for a whole model on one device: those that every layout starts from. On the meta device:
    nothing."""
    initial = model.facts.initial_values(std=std)
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        module = modules[name.rpartition(".")[0]]
        layout = whole(name, tuple(parameter.shape))
        if isinstance(module, Embedding | OutputHead):
            layout = _unpadded(name, parameter, rows=module.vocab_size)
        value = initial_value(
            layout, seed=seed, std=initial.stds.get(name), constant=initial.constants.get(name), like=parameter
        )
        parameter.copy_(value)


def _unpadded(name: str, parameter: Tensor, *, rows: int) -> Layout:
    """A table whose rows from `rows` on are padding."""
    shape = (rows, *parameter.shape[1:])
    zero = (0,) * len(shape)
    return Layout(name, shape, tuple(parameter.shape), (Piece(zero, zero, shape),))
