"""A decoder of chosen parts."""

from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Frozen, NamedSections, PositiveFloat
from megaspec.core.kinds import Kinds
from megaspec.model.decoder.facts import decoder_facts
from megaspec.model.spec import TransformerSpec
from megaspec.nn.attention.spec import AttentionSpec, GroupedQuerySpec, MaskSpec
from megaspec.nn.embedding.spec import LearnedPositionsSpec, NoPositionsSpec, PositionsSpec
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


class LayerType(Frozen):
    """What differs in some layers. What isn't said is as in the model."""

    mask: MaskSpec | None = None
    """Which keys a query sees. None: as model.attention.mask says."""
    positions: Annotated[RotarySpec | NoPositionsSpec, Field(discriminator="kind")] | None = None
    """How queries and keys are turned. None: as model.positions says."""


class DecoderSpec(TransformerSpec):
    """A decoder-only transformer. What isn't said is as in Llama (Touvron et al. 2023)."""

    kind: Literal["decoder"]
    embedding_scale: PositiveFloat = 1.0
    """Factor on the embedding of tokens; Gemma has sqrt(d_model)."""
    residual_scale: PositiveFloat = 1.0
    """Factor on what each sub-layer adds to the residual stream, as in Granite."""
    head_bias: bool = False
    """Add a learned number to the logit of each token."""
    logit_scale: PositiveFloat = 1.0
    """Factor on the logits; Granite's logits_scaling divides, this multiplies."""
    logit_cap: PositiveFloat | None = None
    """Bound of the logits: cap · tanh(logit / cap), as in Gemma 2. None: there is none."""
    positions: AnyPositions = RotarySpec()
    """How the model knows where a token is."""
    norm: AnyNorm = RmsNormSpec()
    """Every norm of the model."""
    layer: LayerSpec = SequentialLayer()
    """What a layer is made of."""
    layer_types: NamedSections[LayerType] = Field(default_factory=dict)
    """Layers that differ, by names of your own, such as local and global."""
    layer_pattern: tuple[str, ...] = ()
    """Names of model.layer_types, one for each layer from the first one on; repeated where the model has more layers.
    Empty: all layers are as the model says."""
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
    def types(self) -> tuple[LayerType, ...]:
        """What differs in each layer, in order; of one whose tokens don't look at each other, nothing. Also of a spec
        that breaks rules."""
        if not self.layer_pattern:
            return (LayerType(),) * len(self.mixers)
        found = []
        for number, mixers in enumerate(self.mixers):
            name = self.layer_pattern[number % len(self.layer_pattern)]
            has_attention = "attention" in mixers
            found.append(self.layer_types.get(name, LayerType()) if has_attention else LayerType())
        return tuple(found)

    def attention_of(self, layer_type: LayerType) -> AttentionSpec:
        """Attention of such a layer. Also of a spec that breaks rules."""
        if layer_type.mask is None or not self.has_masks:
            return self.attention
        return self.attention.model_copy(update={"mask": layer_type.mask})

    @property
    def has_masks(self) -> bool:
        """Attention of this kind has more than one mask."""
        return "mask" in type(self.attention).model_fields

    def positions_of(self, layer_type: LayerType) -> PositionsSpec:
        """How queries and keys of such a layer are turned."""
        return self.positions if layer_type.positions is None else layer_type.positions

    @property
    def rotary_tables(self) -> tuple[PositionsSpec, ...]:
        """The ways in which layers turn queries and keys, each once, in the order in which they first come."""
        found = []
        for mixers, layer_type in zip(self.mixers, self.types, strict=True):
            positions = self.positions_of(layer_type)
            if "attention" in mixers and positions.is_rotary:
                found.append(positions)
        return tuple(dict.fromkeys(found))

    @property
    def caps_scores(self) -> bool:
        return self.attention.caps_scores

    @property
    def rotation_writes_gradient(self) -> bool:
        return self.attention.writes_gradient and bool(self.rotary_tables)

    def hides_keys(self, seq_len: int) -> bool:
        for mixers, layer_type in zip(self.mixers, self.types, strict=True):
            if "attention" in mixers and self.attention_of(layer_type).sight.hides_keys(seq_len):
                return True
        return False

    @property
    def facts(self) -> ModelFacts:
        # no cached property: a copy of a spec with other options would keep it
        known = _KNOWN.get(id(self))
        if known is not None and known[0] is self:
            return known[1]
        facts = _facts_of(self)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[id(self)] = (self, facts)
        return facts


# A search asks for the facts of one spec thousands of times, and hashing all that it says takes longer than looking up
# the object that it is. Each is kept with its facts, so that no other object gets its id.
_KNOWN: dict[int, tuple[DecoderSpec, ModelFacts]] = {}
_MOST_KNOWN = 256


@lru_cache(maxsize=256)
def _facts_of(spec: DecoderSpec) -> ModelFacts:
    """One object for all specs that are equal: what is counted from it is found once."""
    return decoder_facts(spec)
