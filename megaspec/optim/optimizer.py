"""From a spec to the optimizer that it names."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megaspec.optim.master import MasterOptimizer
from megaspec.optim.muon import Matrices, Muon
from megaspec.optim.narrow import build_adamw
from megaspec.optim.sgd import Sgd
from megaspec.optim.spec import AdamWSpec, MuonSpec, OptimizerSpec, OptimSpec, SgdSpec

OptimizerBuilder = Callable[[Mapping[str, Tensor], Any], MasterOptimizer]
"""(weights, spec) -> an optimizer that needs no kernel and no matrices"""

OPTIMIZERS: Mapping[type[OptimizerSpec], OptimizerBuilder] = {SgdSpec: Sgd}

OptimizerMaker = Callable[..., MasterOptimizer]
"""(weights, adamw=the implementation of AdamW) -> the optimizer over this rank's shares of the weights"""


def build_optimizer(
    weights: Mapping[str, Tensor],
    spec: OptimSpec,
    *,
    adamw: str,
    matrices: Matrices | None = None,
    optimizers: Mapping[type[OptimizerSpec], OptimizerBuilder] = OPTIMIZERS,
) -> MasterOptimizer:
    """The optimizer that a spec names, over this rank's shares of the model's current weights.

    `adamw`: the implementation of AdamW. `matrices`, for Muon: which parameters are hidden matrices, and the way to
    whole ones. `optimizers`: ours, and those of plug-ins where there are any.
    """
    if type(spec) in optimizers:
        return optimizers[type(spec)](weights, spec)
    if type(spec) is MuonSpec:
        assert matrices is not None, "optim.kind=muon needs whole matrices"
        return Muon(weights, spec, matrices, adamw=adamw)
    # not isinstance: a kind that inherits AdamW's settings would train as AdamW without a word
    assert type(spec) is AdamWSpec, (
        f"optim.kind={spec.kind} has no builder: add {type(spec).__name__} to OPTIMIZERS in {__name__}"
    )
    return build_adamw(weights, spec, kernel=adamw)
