"""A decoder's facts: which part stands where."""

from dataclasses import replace
from typing import TYPE_CHECKING

from megaspec.core.part_facts import PartFacts
from megaspec.nn.attention.facts import AttentionPlace
from megaspec.nn.embedding.facts import embedding_facts
from megaspec.nn.embedding.spec import PositionsSpec
from megaspec.nn.head.facts import head_facts
from megaspec.nn.layer.facts import LayerFacts, SubLayer, stream_name
from megaspec.nn.layer.spec import FlatLayers, Mixer, ParallelLayer
from megaspec.nn.mlp.facts import FeedForwardPlace
from megaspec.nn.model_facts import ModelFacts
from megaspec.nn.moe.facts import ExpertsPlace, moe_facts, shared_facts

if TYPE_CHECKING:
    from megaspec.model.decoder.spec import DecoderSpec, LayerType

_FEED_FORWARD = "mlp"


def decoder_facts(spec: "DecoderSpec") -> ModelFacts:
    """Of a spec without open fields."""
    kinds: dict[tuple[tuple[Mixer, ...], LayerType], LayerFacts] = {}
    layers = []
    for kind in zip(spec.mixers, spec.types, strict=True):
        if kind not in kinds:
            kinds[kind] = layer_facts(spec, *kind)
        layers.append(kinds[kind])
    learned = spec.positions.learned_rows(spec.max_seq_len)
    return ModelFacts(
        d_model=spec.d_model,
        embedding=embedding_facts(vocab_size=spec.vocab_size, d_model=spec.d_model, learned_positions=learned),
        layers=tuple(layers),
        norm=spec.norm.facts(spec.d_model, name="norm", feeds_product=False),
        head=head_facts(vocab_size=spec.vocab_size, d_model=spec.d_model, bias=spec.head_bias),
        is_tied=spec.tied_embeddings,
        vocab_pad_to=spec.vocab_pad_to,
        angles=sum(d_rotary(spec, positions) for positions in spec.rotary_tables),
    )


def d_rotary(spec: "DecoderSpec", positions: PositionsSpec) -> int:
    """Features of a head that positions turn."""
    return positions.turned(spec.attention.rotated(spec.d_head))


def layer_facts(spec: "DecoderSpec", mixers: tuple[Mixer, ...], layer_type: "LayerType") -> LayerFacts:
    """A layer of these sub-layers. Norms are called norm1, norm2, ... where they stand before a sub-layer, post_norm1,
    ... where they stand behind it."""
    is_parallel = isinstance(spec.layer, ParallelLayer)
    placement = "pre" if isinstance(spec.layer, ParallelLayer | FlatLayers) else spec.layer.norms
    sublayers = []
    for number, mixer in enumerate(mixers):
        # side by side, all take what the first one's norm has made
        norm_number = 1 if is_parallel else number + 1
        takes_stream = placement == "post"
        input_kept = stream_name(number) if takes_stream else f"norm{norm_number}.out"
        pre: PartFacts | None = None
        post: PartFacts | None = None
        if not takes_stream and not (is_parallel and number > 0):
            pre = spec.norm.facts(spec.d_model, name=f"norm{norm_number}")
        if placement != "pre":
            post = spec.norm.facts(spec.d_model, name=f"post_norm{number + 1}", feeds_product=False)
        sublayers.append(_sublayer(spec, mixer, layer_type, input_kept, pre, post, takes_stream=takes_stream))
    return LayerFacts(spec.d_model, tuple(sublayers), is_parallel=is_parallel)


def _sublayer(
    spec: "DecoderSpec",
    mixer: Mixer,
    layer_type: "LayerType",
    input_kept: str,
    pre: PartFacts | None,
    post: PartFacts | None,
    *,
    takes_stream: bool,
) -> SubLayer:
    drops = spec.dropout > 0
    if mixer == "attention":
        mix = _attention(spec, layer_type, input_kept)
        return SubLayer("attention", _behind(pre, mix, spec), pre, post, takes_stream=takes_stream)
    if mixer == "mlp":
        place = FeedForwardPlace(_FEED_FORWARD, input_kept, dropout=drops)
        mix = spec.mlp.facts(d_model=spec.d_model, d_ffn=spec.d_ffn, place=place)
        return SubLayer("feed-forward", _behind(pre, mix, spec), pre, post, takes_stream=takes_stream)
    place = ExpertsPlace(spec.d_model, input_kept, _FEED_FORWARD, dropout=drops)
    shared = shared_facts(spec.moe, spec.mlp, place)
    return SubLayer("experts", moe_facts(spec.moe, spec.mlp, place), pre, post, shared, takes_stream)


def _behind(norm: PartFacts | None, mix: PartFacts, spec: "DecoderSpec") -> PartFacts:
    """A mixer whose first linear is the only one that takes what the norm makes, if it is."""
    first, *others = mix.linears
    is_shared = isinstance(spec.layer, ParallelLayer) or first.input_kept in [one.input_kept for one in others]
    if norm is None or is_shared:
        return mix
    return replace(mix, linears=(replace(first, input_by="norm"), *others))


def _attention(spec: "DecoderSpec", layer_type: "LayerType", input_kept: str) -> PartFacts:
    positions = spec.positions_of(layer_type)
    turned = d_rotary(spec, positions)
    place = AttentionPlace(
        d_model=spec.d_model,
        norm=spec.norm,
        input_kept=input_kept,
        d_rotary=turned,
        rotation=positions.rotation_facts(
            turned, n_heads=spec.n_heads, n_kv_heads=spec.n_kv_heads, name="attn.rotation"
        ),
        dropout=spec.dropout > 0,
    )
    attention = spec.attention_of(layer_type)
    return attention.facts(n_heads=spec.n_heads, n_kv_heads=spec.n_kv_heads, d_head=spec.d_head, place=place)
