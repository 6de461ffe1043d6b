"""What makes the modules of chosen parts, by the class of their options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from megaspec.nn.attention.module import AttentionSetting, grouped_query
from megaspec.nn.attention.spec import AttentionSpec, GroupedQuerySpec
from megaspec.nn.dropout import Dropout
from megaspec.nn.embedding.module import learned_positions, no_positions
from megaspec.nn.embedding.spec import LearnedPositionsSpec, NoPositionsSpec, PositionsSpec
from megaspec.nn.mlp.module import MLPS, FeedForward
from megaspec.nn.mlp.spec import MlpSpec
from megaspec.nn.norm.module import NORMS, Norm
from megaspec.nn.norm.spec import NormSpec
from megaspec.nn.rope.module import PositionModules, rotary
from megaspec.nn.rope.spec import RotarySpec


class MlpBuilder(Protocol):
    """(width of the model, width between the products, options, dropout of the output) -> a feed-forward layer"""

    def __call__(self, d_model: int, d_ffn: int, spec: Any, *, out: Dropout) -> FeedForward: ...


class PositionsBuilder(Protocol):
    """How positions enter a model of these sizes."""

    def __call__(self, spec: Any, *, d_model: int, d_head: int, max_seq_len: int) -> PositionModules: ...


@dataclass(frozen=True)
class PartBuilders:
    """One mapping for each kind of part. Ours: PARTS; a plug-in's are merged into another object, never into ours."""

    norms: Mapping[type[NormSpec], Callable[[int, Any], Norm]]
    """(width, options) -> a norm over the last dimension"""
    mlps: Mapping[type[MlpSpec], MlpBuilder]
    attentions: Mapping[type[AttentionSpec], Callable[[Any, AttentionSetting], nn.Module]]
    positions: Mapping[type[PositionsSpec], PositionsBuilder]


PARTS = PartBuilders(
    norms=NORMS,
    mlps=MLPS,
    # latent attention can be planned, not built
    attentions={GroupedQuerySpec: grouped_query},
    positions={RotarySpec: rotary, LearnedPositionsSpec: learned_positions, NoPositionsSpec: no_positions},
)
