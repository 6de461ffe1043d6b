"""How the training step is divided among ranks."""

from typing import Any, Literal

from megaspec.core.axes import DENSE_AXES
from megaspec.core.frozen import Auto, Degree, Depth, Fraction, Frozen, NonNegativeInt, PositiveFloat, PositiveInt

DpStrategy = Literal["replicate", "zero1", "zero2", "fsdp", "hsdp"]
RecomputePart = Literal["core_attention", "activation", "norm", "mlp", "moe", "shared_experts", "mla_up"]


class PipelineSpec(Frozen):
    """How layers are divided into stages, and in which order micro batches pass through them."""

    schedule: Auto[Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]] = "auto"
    """Order of forward and backward passes. auto: 1f1b, interleaved with virtual_stages > 1; what `megaspec tune` finds
    best where something else of the layout is left to it.

    zb_h1, zb_v: zero bubble, weight gradients split from input gradients (Qi et al. 2024)."""
    virtual_stages: Auto[Depth] = 1
    """Model chunks per rank. interleaved takes 2 or more, zb_v exactly 2, the other schedules 1. auto: what `megaspec
    tune` finds best."""
    micro_batch_group: Auto[PositiveInt] = "auto"
    """Micro batches that an interleaved schedule takes through one chunk before the next. auto: pp."""
    first_layers: PositiveInt | None = None
    """Layers of the first stage; the stages in the middle share the rest evenly. None: like the others."""
    last_layers: PositiveInt | None = None
    """Layers of the last stage. None: like the others."""
    count_embedding: bool = False
    """Count the embedding as a layer when layers are divided evenly."""
    count_loss: bool = False
    """Count the output head and loss as a layer when layers are divided evenly."""
    layout: Auto[str] | None = None
    """Every stage in letters, in the order of the model: E embedding, t layer, L head and loss, | ends a stage, (..)*n
    and t*n repeat. Stage number s lies on rank s mod pp; with zb_v the second half comes back, stage pp + s on rank
    pp - 1 - s. None: divided evenly. auto: what `megaspec tune` finds best, evenly or as a step is predicted to
    be shortest, unless the four settings above say how."""


class ContextSpec(Frozen):
    """How a sequence is divided among context-parallel ranks."""

    kind: Literal["ring", "all_gather", "all_to_all", "hierarchical"] = "ring"
    """ring: keys and values go round, in two chunks a rank (zig-zag). all_gather: every rank gathers them. all_to_all:
    sequence and heads are swapped (Jacobs et al. 2023). hierarchical: all_to_all inside a ring."""
    factors: tuple[PositiveInt, PositiveInt] | None = None
    """Ranks of the all-to-all and of the ring of `hierarchical`; their product is cp."""


def attends_to_blocks(kind: str, *, cp: int) -> bool:
    """Whether ranks attend to parts of sequences: after an all-to-all each has whole ones of some heads. `kind`: of
    ContextSpec."""
    return cp > 1 and kind != "all_to_all"


class RecomputeSpec(Frozen):
    """Activations that the backward pass computes again instead of keeping them."""

    kind: Auto[Literal["none", "selective", "full"]] = "none"
    """none: everything is kept. selective: `parts` of each layer. full: whole layers, by `method`."""
    parts: tuple[RecomputePart, ...] | None = None
    """What `selective` recomputes. None: core_attention."""
    method: Literal["uniform", "block"] | None = None
    """uniform: groups of `layers` layers, of which only the input is kept. block: the first `layers` layers of each
    (virtual) stage, one by one. None: uniform with full."""
    layers: PositiveInt | None = None
    """Layers of a group (uniform) or to recompute (block). None: 1 with full."""

    @property
    def alone(self) -> frozenset[str]:
        """Parts of each layer that are computed again by themselves; also while `kind` is open."""
        if self.kind != "selective":
            return frozenset()
        return frozenset(self.parts or ("core_attention",))


class OffloadSpec(Frozen):
    """What waits in the memory of the CPU until it is needed."""

    layers: NonNegativeInt = 0
    """Layers, the first ones of each (virtual) stage, whose activations go to the CPU after their forward pass and come
    back before their backward pass. 0: none."""
    optimizer: Fraction = 0.0
    """Share of the weights whose master weights and optimizer state lie in the CPU's memory and are updated there."""


class OverlapSpec(Frozen):
    """Communication that runs beside computation. What is switched off waits its turn; the results are the same."""

    grad_reduce: bool = True
    """Reduce gradients among data-parallel ranks, bucket by bucket, while the backward pass still runs."""
    param_gather: bool = True
    """Gather weights that data-parallel ranks share out while the layers before them run."""
    tp: bool = True
    """Reduce a tensor-parallel layer's input gradient, and gather its input again, beside its other gradient."""
    p2p: bool = True
    """Send activations and their gradients between pipeline stages while other micro batches are computed: a stage
    begins to receive a pass ahead. Off: behind the pass during which they are made."""
    shared_experts: bool = True
    """Compute shared experts while tokens are on their way to the others."""


class ParallelismSpec(Frozen):
    """Degrees of the axes in core/axes.py: world = pp · dp_replicate · dp_shard · cp · tp = pp · edp · ep · etp."""

    tp: Auto[Degree] = "auto"
    """Tensor parallel: ranks that split every weight matrix. auto: 1 on GPUs; on CPUs all that divide heads and ffn."""
    pp: Auto[Degree] = 1
    """Pipeline parallel: stages that hold different layers. auto: what `megaspec tune` finds best."""
    cp: Auto[Degree] = 1
    """Context parallel: ranks that split each sequence. auto: what `megaspec tune` finds best."""
    ep: Auto[Degree] = 1
    """Expert parallel: ranks that hold different experts. It multiplies no ranks: it lies over tp, cp and data parallel
    ranks. auto: what `megaspec tune` finds best."""
    etp: Degree = 1
    """Tensor parallel inside an expert: ranks that split its matrices."""
    dp_strategy: Auto[DpStrategy] = "replicate"
    """What data-parallel ranks share out (Rajbhandari et al. 2020). replicate: nothing. zero1: optimizer state. zero2:
    gradients too. fsdp: weights too. hsdp: fsdp over dp_shard ranks, replicated over dp_replicate. auto: what
    `megaspec tune` finds best."""
    dp_replicate: Auto[Degree] = "auto"
    """Data-parallel ranks that hold the same. auto: all of them with replicate, 1 with zero1, zero2 and fsdp."""
    dp_shard: Auto[Degree] = "auto"
    """Data-parallel ranks that share out what dp_strategy says. auto: 1 with replicate, all of them with zero1, zero2
    and fsdp, with hsdp those of one node."""
    sequence_parallel: Auto[bool] = "auto"
    """Split tokens over tensor-parallel ranks between matrix products. auto: on when tp > 1 divides the sequence."""
    pipeline: PipelineSpec = PipelineSpec()
    """How pp divides layers and orders micro batches."""
    context: ContextSpec = ContextSpec()
    """How cp divides a sequence."""
    dispatch: Literal["all_to_all", "all_gather"] = "all_to_all"
    """How tokens reach the ranks that hold their experts."""
    recompute: RecomputeSpec = RecomputeSpec()
    """What the backward pass computes again."""
    offload: OffloadSpec = OffloadSpec()
    """What waits in the memory of the CPU."""
    overlap: OverlapSpec = OverlapSpec()
    """What runs beside computation."""
    grad_reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed over data-parallel ranks; fp32 means at least fp32."""
    bucket_mb: PositiveFloat = 100.0
    """Size in MB (10^6 bytes) of the gradient buckets of replicate and zero1, which are reduced while the backward pass
    still runs. The other strategies reduce layer by layer."""

    @property
    def degrees(self) -> dict[str, Any]:
        """The degree of every dense axis, outermost first; `auto` where a recipe still says so."""
        return {axis: getattr(self, axis) for axis in DENSE_AXES}
