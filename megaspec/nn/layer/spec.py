"""What a layer is made of: residual sub-layers, their order, and where norms stand."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Frozen

NormPlacement = Literal["pre", "post", "sandwich"]
Mixer = Literal["attention", "mlp", "moe"]


class SequentialLayer(Frozen):
    """Attention, then the feed-forward layer or experts, each added to the residual stream."""

    kind: Literal["sequential"] = "sequential"
    norms: NormPlacement = "pre"
    """pre: x + f(norm(x)), as in Llama and GPT-2. post: x + norm(f(x)), as in OLMo 2. sandwich: x + norm(f(norm(x))),
    as in Gemma 2."""


class ParallelLayer(Frozen):
    """x + attention(norm(x)) + feed_forward(norm(x)), with one norm for both, as in Phi and Cohere's models."""

    kind: Literal["parallel"]


class FlatLayers(Frozen):
    """One sub-layer a layer, with one norm before it: a flat hybrid, as in Nemotron-H."""

    kind: Literal["flat"]
    mixers: tuple[Mixer, ...]
    """What each layer is, one entry for each of model.n_layers."""


LayerSpec = Annotated[SequentialLayer | ParallelLayer | FlatLayers, Field(discriminator="kind")]


def norms_before_mixers(layer: LayerSpec) -> bool:
    """Each sub-layer has a norm before it, whose result nothing else takes."""
    if isinstance(layer, SequentialLayer):
        return layer.norms != "post"
    return isinstance(layer, FlatLayers)
