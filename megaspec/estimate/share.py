"""What one rank has of a micro batch and of a layer: its activations, products and messages are counted from it."""

from dataclasses import dataclass
from math import ceil

from megaspec.estimate.parameters import padded_vocab
from megaspec.model.kinds import mla_of
from megaspec.parallelism.heads import local_kv_heads
from megaspec.parallelism.spec import RecomputeSpec
from megaspec.recipe import ModelSpec, Recipe

WIDTH = {"fp64": 8, "fp32": 4}
"""Bytes of a number in a precision; every other computes in 2."""
# Without compile each operation reads and writes on its own.
EAGER_PASSES = 3
_FEED_FORWARD = {"mlp", "moe", "shared_experts"}


@dataclass(frozen=True)
class Share:
    """One rank's part of a layer and of a micro batch."""

    model: ModelSpec
    micro_batch: int
    seq_len: int
    tp: int
    cp: int
    ep: int
    etp: int
    is_sequence_split: bool
    dispatch: str
    width: int
    """Bytes of an activation."""
    is_fp8: bool
    is_compiled: bool
    attention: str
    recompute: RecomputeSpec
    offloaded_layers: int
    """The first ones of each chunk."""

    @property
    def wide(self) -> int:
        """Bytes of what is computed in at least fp32."""
        return max(4, self.width)

    @property
    def tokens(self) -> int:
        """Of a micro batch, in a matrix product."""
        return max(1, self.micro_batch * self.seq_len // self.cp)

    @property
    def split_tokens(self) -> int:
        """Of a micro batch, between matrix products."""
        if not self.is_sequence_split:
            return self.tokens
        return max(1, self.tokens // self.tp)

    @property
    def expert_tokens(self) -> int:
        """Rows that the experts of this rank take, spread evenly."""
        rows = self.model.moe.rows(self.split_tokens, micro_batch=self.micro_batch * self.seq_len)
        return rows * self.etp

    @property
    def heads(self) -> int:
        return ceil(self.model.n_heads / self.tp)

    @property
    def kv_heads(self) -> int:
        return local_kv_heads(self.model.n_kv_heads, tp=self.tp)

    @property
    def q_size(self) -> int:
        """Width of the queries of a token."""
        return self.heads * self.model.d_head

    @property
    def v_size(self) -> int:
        """Width of what attention puts out for a token."""
        mla = mla_of(self.model)
        return self.heads * mla.d_value if mla else self.q_size

    @property
    def kv_size(self) -> int:
        """Width of the keys and values of a token together."""
        if mla_of(self.model):
            return self.q_size + self.v_size
        return 2 * self.kv_heads * self.model.d_head

    @property
    def vocab(self) -> int:
        """Rows of the output head."""
        return padded_vocab(self.model, tp=self.tp) // self.tp

    @property
    def passes(self) -> int:
        """How often what is between matrix products is read and written, against a compiled block."""
        return 1 if self.is_compiled else EAGER_PASSES

    @property
    def recomputed_parts(self) -> frozenset[str]:
        """Parts that the backward pass of every layer computes again: those that `selective` names. The activation
        stands inside each feed-forward."""
        if self.recompute.kind != "selective":
            return frozenset()
        parts = frozenset(self.recompute.parts or ("core_attention",))
        return parts | {"activation"} if parts & _FEED_FORWARD else parts


def share_of(recipe: Recipe) -> Share:
    """The share of a rank of a filled recipe."""
    own, kind = recipe.parallelism, recipe.precision.kind
    return Share(
        model=recipe.model,
        micro_batch=recipe.train.micro_batch,
        seq_len=recipe.data.seq_len,
        tp=own.tp,
        cp=own.cp,
        ep=own.ep,
        etp=own.etp,
        is_sequence_split=own.sequence_parallel and own.tp > 1,
        dispatch=own.dispatch,
        width=WIDTH.get(kind, 2),
        is_fp8=kind == "fp8",
        is_compiled=recipe.kernels.compile == "block",
        attention=recipe.kernels.attention,
        recompute=own.recompute,
        offloaded_layers=own.offload.layers,
    )
