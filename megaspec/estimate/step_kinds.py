"""A predicted step by the kinds of time that a profile tells apart, and the work that a rank's rates are taken of."""

from dataclasses import dataclass

from megaspec.core.part_facts import AttentionProducts
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.step_time import StepTime, update_bytes
from megaspec.estimate.trained import facts_of
from megaspec.estimate.work import (
    NO_BYTES,
    PassBytes,
    Product,
    RecomputablePart,
    embedding_part,
    fp8_bytes,
    head_part,
    layer_parts,
    recomputed_layers,
    seen_pairs,
)
from megaspec.nn.layer.facts import LayerFacts
from megaspec.parallelism.stages import stages_of
from megaspec.profiling.kinds import ATTENTION, COMMUNICATION, COPIES, ELEMENT_WISE, IDLE, MATRIX_PRODUCTS, OPTIMIZER
from megaspec.recipe import Recipe

_KINDS = {
    "matrix products": MATRIX_PRODUCTS,
    "attention": ATTENTION,
    "element-wise": ELEMENT_WISE,
    "tensor parallel": COMMUNICATION,
    "context parallel": COMMUNICATION,
    "expert parallel": COMMUNICATION,
    "data parallel": COMMUNICATION,
    "pipeline messages": COMMUNICATION,
    # a rank that waits for another stage has the kernel of a message under way
    "pipeline bubble": COMMUNICATION,
    "optimizer": OPTIMIZER,
    "offload": COPIES,
    "host": IDLE,
}
# `recompute` is told by what is computed again.
_BY_WHAT = "recompute"


@dataclass(frozen=True)
class StepByKind:
    """Seconds of a step as the busiest pipeline rank spends them, in the words of profiling/kinds.py."""

    matrix_products: float = 0.0
    """Those computed again with them, as in the next two."""
    attention: float = 0.0
    element_wise: float = 0.0
    """With the gaps between kernels, of which a profile makes `idle`."""
    optimizer: float = 0.0
    exposed_communication: float = 0.0
    """What is waited for: a pipeline's bubble, too."""
    copies: float = 0.0
    """Offloaded activations that are waited for. Others are a part of what they belong to."""
    idle: float = 0.0
    """What the host takes longer than the GPU."""

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """By the name of the kind. `other` is what nobody has planned."""
        return {kind: getattr(self, _field(kind)) for kind in dict.fromkeys(_KINDS.values())}


def by_kind(time: StepTime) -> StepByKind:
    """A predicted step, every part of it in one kind."""
    found: dict[str, float] = {}
    for part, seconds in (*time.parts.items(), *time.recomputed.items()):
        if part != _BY_WHAT:
            field = _field(_KINDS[part])
            found[field] = found.get(field, 0.0) + seconds
    return StepByKind(**found)


def _field(kind: str) -> str:
    """`exposed communication` -> `exposed_communication`"""
    return kind.replace(" ", "_").replace("-", "_")


@dataclass(frozen=True)
class RankWork:
    """What one rank of a pipeline stage computes and moves, with what it computes again."""

    product_flops: float
    """Of a micro batch: a multiply-add as 2, forward and the gradients that are made."""
    attention_flops: float
    """Of a micro batch: of the pairs that a query sees, causal as half of all; backward as twice the forward pass."""
    element_wise_bytes: float
    """Of a micro batch: what all between products reads and writes."""
    optimizer_bytes: float
    """Of a step: gradient norm, update and the copy of weights, on the GPU."""


def rank_work(recipe: Recipe, rank: int) -> RankWork:
    """Of a pipeline rank of a filled recipe, by what the estimator's times are made of."""
    facts = facts_of(recipe)
    recomputed = layer_run(recipe).execution.recomputed
    total = _Work()
    for chunk in stages_of(recipe.model.n_layers, recipe.parallelism)[rank]:
        share = recomputed_layers(recipe, len(chunk.layers)) / max(1, len(chunk.layers))
        for number in chunk.layers:
            layer = facts.layers[number]
            in_fp8 = recipe.precision.kind == "fp8"
            for part in layer_parts(recipe, layer, in_fp8=in_fp8 and _in_fp8(recipe, number)):
                # as often as the forward pass of the part is computed
                again = max(share, float(part.name in recomputed)) * layer.runs_backward
                cast = fp8_bytes(recipe, part.products)
                total.add(part, cast, _pair_flops(recipe, part, layer), times_forward=1 + again)
        if chunk.embedding:
            total.add(embedding_part(recipe), NO_BYTES, 0.0)
        if chunk.head:
            total.add(head_part(recipe), NO_BYTES, 0.0)
    return RankWork(total.products, total.attention, total.moved, update_bytes(recipe, rank))


@dataclass
class _Work:
    """Work that is being added up."""

    products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0

    def add(self, part: RecomputablePart, cast: PassBytes, pair_flops: float, *, times_forward: float = 1.0) -> None:
        """`cast`: of turning factors into fp8."""
        for product in part.products:
            self.products += _flops(product) * (
                times_forward + product.makes_input_gradient + product.makes_weight_gradient
            )
        self.attention += pair_flops * (times_forward + 2 * part.attends_backward)
        self.moved += times_forward * (part.forward_bytes + cast.forward) + part.backward_bytes + cast.backward
        self.moved += part.summed_bytes


def _in_fp8(recipe: Recipe, layer: int) -> bool:
    """Whether a layer's products take fp8, in a run in fp8."""
    precision = recipe.precision
    return precision.first_layers_bf16 <= layer < recipe.model.n_layers - precision.last_layers_bf16


def _flops(product: Product) -> float:
    """Of one pass."""
    return 2.0 * product.m * product.n * product.k


def _pair_flops(recipe: Recipe, part: RecomputablePart, layer: LayerFacts) -> float:
    """Of q kᵀ and of the weights times v in the forward pass, of the pairs that are seen."""
    work = part.attention
    if work is None:
        return 0.0
    attention: AttentionProducts = layer.attention
    sequences = work.tokens / recipe.data.seq_len
    pairs = sequences * seen_pairs(recipe, attention) / 2
    return 2.0 * pairs * work.heads * (attention.d_key + attention.d_value) * work.share
