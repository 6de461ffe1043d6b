"""Which kinds of layers a model has."""

from functools import lru_cache

from megaspec.model.spec import TransformerSpec
from megaspec.nn.spec import MlaSpec, MoeSpec


def moe_of(model: TransformerSpec) -> MoeSpec | None:
    """The experts of a model; None where it has none."""
    return getattr(model, "moe", None)


def mla_of(model: TransformerSpec) -> MlaSpec | None:
    """The latent attention of a model; None where it has none."""
    return getattr(model, "mla", None)


@lru_cache(maxsize=256)
def has_experts(model: TransformerSpec) -> tuple[bool, ...]:
    """One entry a layer: whether it has experts in place of the feed-forward layer."""
    moe = moe_of(model)
    return (False,) * model.n_layers if moe is None else moe.in_layers(model.n_layers)
