"""A decoder of chosen parts."""

from functools import lru_cache
from typing import Annotated, Literal

from megaspec.core.frozen import PositiveFloat
from megaspec.core.kinds import Kinds
from megaspec.model.decoder.facts import decoder_facts
from megaspec.model.spec import TransformerSpec
from megaspec.nn.attention.spec import GroupedQuerySpec
from megaspec.nn.embedding.spec import LearnedPositionsSpec, NoPositionsSpec
from megaspec.nn.layer.spec import FlatLayers, LayerSpec, Mixer, SequentialLayer
from megaspec.nn.mla.spec import LatentSpec
from megaspec.nn.mlp.spec import AnyMlp, GatedMlpSpec
from megaspec.nn.model_facts import ModelFacts
from megaspec.nn.moe.spec import MoeSpec
from megaspec.nn.norm.spec import AnyNorm, RmsNormSpec
from megaspec.nn.rope.spec import RotarySpec

POSITIONS_KINDS = Kinds()
ATTENTION_KINDS = Kinds()
AnyPositions = Annotated[RotarySpec | LearnedPositionsSpec | NoPositionsSpec, POSITIONS_KINDS]
AnyAttention = Annotated[GroupedQuerySpec | LatentSpec, ATTENTION_KINDS]


class DecoderSpec(TransformerSpec):
    """A decoder-only transformer. What isn't said is as in Llama (Touvron et al. 2023)."""

    kind: Literal["decoder"]
    embedding_scale: PositiveFloat = 1.0
    """Factor on the embedding of tokens; Gemma has sqrt(d_model)."""
    positions: AnyPositions = RotarySpec()
    """How the model knows where a token is."""
    norm: AnyNorm = RmsNormSpec()
    """Every norm of the model."""
    layer: LayerSpec = SequentialLayer()
    """What a layer is made of."""
    attention: AnyAttention = GroupedQuerySpec()
    """How tokens look at each other."""
    mlp: AnyMlp = GatedMlpSpec()
    """The feed-forward layer."""
    moe: MoeSpec | None = None
    """Experts in place of the feed-forward layer. None: none."""

    @property
    def mixers(self) -> tuple[tuple[Mixer, ...], ...]:
        if isinstance(self.layer, FlatLayers):
            return tuple((mixer,) for mixer in self.layer.mixers)
        has_experts = (False,) * self.n_layers if self.moe is None else self.moe.in_layers(self.n_layers)
        return tuple(("attention", "moe") if experts else ("attention", "mlp") for experts in has_experts)

    @property
    def caps_scores(self) -> bool:
        return self.attention.caps_scores

    @property
    def facts(self) -> ModelFacts:
        # no cached property: a copy of a spec with other options would keep it
        return _facts_of(self)


@lru_cache(maxsize=256)
def _facts_of(spec: DecoderSpec) -> ModelFacts:
    """One object for all specs that are equal: what is counted from it is found once."""
    return decoder_facts(spec)
