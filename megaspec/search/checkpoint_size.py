"""How many bytes of tensors a checkpoint of a run holds, with the optimizer's state and without. Generators, the place
in a stream of data, headers and the manifest come to some kilobytes for each rank beside them."""

from dataclasses import dataclass
from math import prod

from megaspec.estimate.layer_run import BYTES
from megaspec.optim.spec import MuonSpec
from megaspec.precision.spec import model_format
from megaspec.rules.initial_weights import weight_shapes
from megaspec.spec import Spec
from megaspec.train.trainable import trained_names

_ROUTER_BYTES = 4
"""Of a number that a router keeps."""


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes."""

    weights: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer


def checkpoint_size(spec: Spec) -> CheckpointSize:
    """Trained weights and moments are stored in at least fp32, narrow states too; frozen weights as the model has
    them."""
    facts = spec.model.facts
    names = trained_names(facts, spec.train.trainable)
    one_moment = set()
    if isinstance(spec.optim, MuonSpec):
        # AdamW keeps two of all that is no hidden matrix
        one_moment = {f"{name}.weight" for name, linear in facts.linears() if linear.is_hidden}
    width = BYTES.get(model_format(spec.precision), 2)
    wide = max(4, width)
    weights = 0
    optimizer = 0
    for stored, shape in weight_shapes(facts).items():
        room, _, name = stored.partition("/")
        size = prod(shape)
        if room == "router":
            weights += size * _ROUTER_BYTES
        elif name not in names:
            weights += size * width
        else:
            weights += size * wide
            n_moments = spec.optim.n_moments
            if isinstance(spec.optim, MuonSpec) and name not in one_moment:
                n_moments = 2
            optimizer += size * wide * n_moments
    return CheckpointSize(weights, optimizer)
