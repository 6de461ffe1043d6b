"""A decoder from its parts, for one device."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from megaspec.model.decoder.spec import DecoderSpec, LayerType
from megaspec.model.part_builders import PARTS, PartBuilders
from megaspec.nn.attention.module import AttentionSetting
from megaspec.nn.decoder import Decoder
from megaspec.nn.dropout import Dropout
from megaspec.nn.embedding.module import Embedding
from megaspec.nn.embedding.spec import PositionsSpec
from megaspec.nn.head.module import OutputHead
from megaspec.nn.init import start_weights
from megaspec.nn.layer.module import Layer, SubLayer
from megaspec.nn.layer.spec import Mixer, ParallelLayer, SequentialLayer
from megaspec.nn.linear import Linear
from megaspec.nn.mlp.module import ClampedMlp, FeedForward, GatedMlp
from megaspec.nn.moe.activation import WeightedActivation, weighted, weighted_by
from megaspec.nn.moe.module import Experts, Moe
from megaspec.nn.moe.router import Router
from megaspec.nn.norm.module import Norm
from megaspec.nn.rope.module import PositionModules, Rotation
from megaspec_kernels.cross_entropy.reference import LogitForm
from megaspec_kernels.registry import GatedKernel, Kernels


def decoder(spec: DecoderSpec, kernels: Kernels, builders: PartBuilders = PARTS) -> Decoder:
    """The whole model, on the device that torch makes tensors on. `builders`: of its parts."""
    tables = {table: positions_of(spec, table, builders) for table in spec.rotary_tables}
    # what is added to the embedding, the model alone says
    whole = tables.get(spec.positions) or positions_of(spec, spec.positions, builders)
    parts = _Parts(spec, kernels, builders, tables)
    layers = {}
    for number, (mixers, layer_type) in enumerate(zip(spec.mixers, spec.types, strict=True)):
        layers[str(number)] = layer(parts, mixers, layer_type, f"layers.{number}")
    model = Decoder(
        facts=spec.facts,
        embed=Embedding(spec.vocab_size, spec.d_model, pad_to=spec.vocab_pad_to, scale=spec.embedding_scale),
        positions=whole.added,
        embed_dropout=Dropout(spec.dropout, "embed"),
        ropes=[table.rope for table in tables.values()],
        layers=nn.ModuleDict(layers),
        norm=parts.stream_norm(),
        head=OutputHead(
            spec.vocab_size,
            spec.d_model,
            kernels.cross_entropy,
            pad_to=spec.vocab_pad_to,
            bias=spec.head_bias,
            form=LogitForm(spec.logit_scale, spec.logit_cap),
        ),
    )
    start_weights(model, std=spec.init_std)
    return model


def positions_of(spec: DecoderSpec, positions: PositionsSpec, builders: PartBuilders) -> PositionModules:
    """One way in which positions enter."""
    build = builders.positions[type(positions)]
    return build(positions, d_model=spec.d_model, d_head=spec.d_head, max_seq_len=spec.max_seq_len)


@dataclass(frozen=True)
class _Parts:
    """Makes the parts of one model."""

    spec: DecoderSpec
    kernels: Kernels
    builders: PartBuilders
    tables: Mapping[PositionsSpec, PositionModules]
    """Of DecoderSpec.rotary_tables, in their order."""

    def norm(self, width: int) -> Norm:
        """Of heads: plain operations, which are compiled into one kernel with what turns heads."""
        return self.builders.norms[type(self.spec.norm)](width, self.spec.norm)

    def stream_norm(self) -> Norm:
        """Of the residual stream, or of what is added to it."""
        norm = self.norm(self.spec.d_model)
        norm.kernel = self.kernels.norm
        return norm

    def mixer(self, mixer: Mixer, layer_type: LayerType, name: str) -> tuple[str, nn.Module]:
        """What a sub-layer of the layer `name` computes, behind the name that it has there."""
        if mixer == "attention":
            return "attn", self.attention(layer_type, f"{name}.attn")
        if mixer == "mlp":
            return "mlp", self.mlp(f"{name}.mlp")
        return "moe", self.experts(f"{name}.moe")

    def rotation(self, layer_type: LayerType) -> Rotation | None:
        """Turns the heads of such a layer; None: nothing does."""
        positions = self.spec.positions_of(layer_type)
        if not positions.is_rotary:
            return None
        number = list(self.tables).index(positions)
        rotation = self.tables[positions].rotation(number)
        rotation.kernel = self.kernels.rope
        return rotation

    def attention(self, layer_type: LayerType, name: str) -> nn.Module:
        spec = self.spec
        setting = AttentionSetting(
            d_model=spec.d_model,
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            d_head=spec.d_head,
            kernel=self.kernels.attention,
            name=name,
            dropout=spec.dropout,
            norm=self.norm,
            norm_eps=spec.norm.head_eps,
            rotation=self.rotation(layer_type),
        )
        return self.builders.attentions[type(spec.attention)](spec.attention_of(layer_type), setting)

    def mlp(self, name: str) -> FeedForward:
        return self.feed_forward(self.spec.d_ffn, Dropout(self.spec.dropout, name), kernel=self.kernels.gated)

    def feed_forward(self, width: int, out: Dropout, *, kernel: GatedKernel | None = None) -> FeedForward:
        """A feed-forward layer of `width` between its products. `kernel`: of a gate; None: plain operations."""
        build = self.builders.mlps[type(self.spec.mlp)]
        made = build(self.spec.d_model, width, self.spec.mlp, out=out)
        if kernel is not None:
            made.kernel = kernel
        return made

    @cached_property
    def expert(self) -> FeedForward:
        """What each expert is, without memory for its weights."""
        with torch.device("meta"):
            return self.feed_forward(self.spec.moe.d_expert, Dropout(0.0, "expert"))

    @cached_property
    def expert_activation(self) -> WeightedActivation:
        """One for all layers, so that it is compiled once."""
        kernel = self.kernels.gated.weighted
        # a plug-in's layer may compute something else
        if kernel is not None and type(self.expert) in (GatedMlp, ClampedMlp):
            return weighted_by(kernel, self.expert.form)
        return weighted(self.spec.mlp, self.expert.activate)

    def experts(self, name: str) -> Moe:
        moe, d_model, kernels = self.spec.moe, self.spec.d_model, self.kernels
        shared = None
        if moe.d_shared:
            # dropped out together with the routed experts
            shared = self.feed_forward(moe.d_shared, Dropout(0.0, f"{name}.shared"), kernel=kernels.gated)
        return Moe(
            Router(d_model, moe, site=f"{name}.router"),
            Experts(
                moe.n_experts,
                self.expert,
                activation=self.expert_activation,
                weights_on=moe.weights_on,
                kernel=kernels.grouped,
                unpermute=kernels.unpermute,
            ),
            shared=shared,
            shared_gate=Linear(d_model, 1) if moe.shared_gate else None,
            pad=moe.pad_to_capacity,
            out=Dropout(self.spec.dropout, name),
        )


def layer(parts: _Parts, mixers: tuple[Mixer, ...], layer_type: LayerType, name: str) -> Layer:
    """One layer; `name` tells its sites of dropout and noise apart."""
    spec = parts.spec
    placement = spec.layer.norms if isinstance(spec.layer, SequentialLayer) else "pre"
    is_parallel = isinstance(spec.layer, ParallelLayer)
    modules: dict[str, nn.Module] = {}
    sublayers = []
    for number, mixer in enumerate(mixers, start=1):
        pre = "" if placement == "post" or is_parallel else f"norm{number}"
        post = "" if placement == "pre" else f"post_norm{number}"
        if pre or (is_parallel and number == 1):
            modules[f"norm{number}"] = parts.stream_norm()
        short, module = parts.mixer(mixer, layer_type, name)
        modules[short] = module
        if post:
            modules[post] = parts.stream_norm()
        sublayers.append(SubLayer(short, pre, post))
    norm = "norm1" if is_parallel else ""
    return Layer(modules, sublayers, norm=norm, residual_scale=spec.residual_scale)
