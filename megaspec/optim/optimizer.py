"""From a spec to the optimizer that it names."""

from collections.abc import Mapping

from torch import Tensor

from megaspec.optim.adamw import AdamW
from megaspec.optim.master import MasterOptimizer
from megaspec.optim.muon import Matrices, Muon
from megaspec.optim.narrow import NarrowAdamW
from megaspec.optim.sgd import Sgd
from megaspec.optim.spec import AdamWSpec, MuonSpec, OptimSpec, SgdSpec, StateFormats


def adamw(weights: Mapping[str, Tensor], spec: AdamWSpec) -> AdamW | NarrowAdamW:
    """AdamW with the states that the spec names."""
    return (AdamW if spec.formats == StateFormats() else NarrowAdamW)(weights, spec)


OPTIMIZERS = {AdamWSpec: adamw, SgdSpec: Sgd}


def build_optimizer(
    weights: Mapping[str, Tensor], spec: OptimSpec, *, matrices: Matrices | None = None
) -> MasterOptimizer:
    """The optimizer that a spec names, over this rank's shares of the model's current weights.

    `matrices`, for Muon: which parameters are hidden matrices, and the way to whole ones.
    """
    if isinstance(spec, MuonSpec):
        assert matrices is not None, "optim.kind=muon needs whole matrices"
        return Muon(weights, spec, matrices)
    return OPTIMIZERS[type(spec)](weights, spec)
