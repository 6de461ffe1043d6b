"""Initial weights: a function of (seed, global name, global index), the same in every layout."""

import math

import torch
from torch import Tensor, nn

from megaspec.core.layout import Layout, Piece, whole
from megaspec.nn.embedding import Embedding, LearnedPositions
from megaspec.nn.hashing import fill_normal_, key_of
from megaspec.nn.linear import Linear
from megaspec.nn.loss import OutputHead
from megaspec.nn.norm import LayerNorm, RmsNorm


def standard_deviations(model: nn.Module, *, std: float, n_layers: int) -> dict[str, float]:
    """The standard deviation of each weight that starts at random (GPT-2: residual outputs by 1/√(2 n_layers) less)."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            found[f"{name}.weight"] = std / math.sqrt(2 * n_layers) if module.residual else std
        elif isinstance(module, Embedding | LearnedPositions | OutputHead):
            found[f"{name}.weight"] = std
    return found


def constants(model: nn.Module) -> dict[str, float]:
    """The value of each parameter that starts constant: norms at 1, biases at 0."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, RmsNorm | LayerNorm):
            found[f"{name}.weight"] = 1.0
        if getattr(module, "bias", None) is not None:
            found[f"{name}.bias"] = 0.0
    return found


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
def start_weights(model: nn.Module, *, std: float, n_layers: int, seed: int = 0) -> None:
    """Initial values for a whole model on one device: those that every layout starts from. On the meta device:
    nothing."""
    stds = standard_deviations(model, std=std, n_layers=n_layers)
    fixed = constants(model)
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        module = modules[name.rpartition(".")[0]]
        layout = whole(name, tuple(parameter.shape))
        if isinstance(module, Embedding | OutputHead):
            layout = _unpadded(name, parameter, rows=module.vocab_size)
        value = initial_value(layout, seed=seed, std=stds.get(name), constant=fixed.get(name), like=parameter)
        parameter.copy_(value)


def _unpadded(name: str, parameter: Tensor, *, rows: int) -> Layout:
    """A table whose rows from `rows` on are padding."""
    shape = (rows, *parameter.shape[1:])
    zero = (0,) * len(shape)
    return Layout(name, shape, tuple(parameter.shape), (Piece(zero, zero, shape),))
