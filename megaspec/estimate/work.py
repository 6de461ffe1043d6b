"""What one rank computes for one micro batch: matrix products, attention, and the bytes that all else moves.

Counted from the facts of a layer's parts as layers run compiled: everything between matrix products is limited by
memory, so that its time is the bytes that its kernels read and write.
"""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megaspec.core.document_lengths import Lengths, twice_the_pairs_in_a_row
from megaspec.core.part_facts import AttentionProducts, Linear, Moved, PartFacts
from megaspec.estimate.attention_rates import AttentionKind
from megaspec.estimate.layer_run import LayerRun, context_split, layer_run, takes_all_layers
from megaspec.estimate.schedule import shape_of
from megaspec.estimate.tables import tables_in_place
from megaspec.estimate.trained import facts_of
from megaspec.nn.fp8_facts import GRADIENTS_IN_FP8, INPUTS_IN_FP8
from megaspec.nn.layer.facts import LayerFacts
from megaspec.nn.moe.facts import GATHERED
from megaspec.parallelism.spec import ContextSpec
from megaspec.precision.spec import BLACKWELL_SM, fp8_recipe, may_write_fp8, model_format
from megaspec.recipe import Recipe
from megaspec_kernels.catalog import CATALOG

# Times that plain operations read and write what a compiled kernel reads and writes once: each does it alone.
EAGER_PASSES = 3
# Bytes per element of the final norm, forward and backward: outside the compiled blocks it works in fp32, step by step.
LOOSE_NORM_FORWARD = 30
LOOSE_NORM_BACKWARD = 60
# Numbers that a kernel of its own reads and writes of an element: its input and its result; both and the gradient.
KERNEL_NORM_FORWARD = 2
KERNEL_NORM_BACKWARD = 3
# A copy that turns [sequence, token] round takes so much longer than its bytes. Set on tensor parallel runs on 2 and 4
# H200.
TURNING = 2.6
# Attention forward and backward over causal attention of the same size by cuDNN, one H200, bf16, 8,192 tokens, 32 heads
# on 8 of 128: through sdpa with a mask, all of whose pairs are computed, 12.7 ms over 3.9; through flex 5.8 ms, and 4.3
# with three quarters of the pairs. FlashAttention-2, which sdpa takes for documents and windows, against cuDNN on that
# GPU: 320 and 296 TFLOP/s forward and backward against 629 and 530, with 2 products forward and 5 backward.
MASK_COST = 3.25
FLEX_COST = 1.49
FLASH_COST = 1.83
# Implementations of packages, which leave out what documents and windows hide.
OWN_LENGTHS = ("cudnn", "flash_attn", "flash_attn_3", "flash_attn_2", "te")
# Bytes that the cast to fp8 moves of a number in bf16, by recipe, in both layouts. delayed: one kernel reads it once
# and writes it in both. blockwise: so does one that has whole blocks before it. tensorwise and rowwise: it is read
# before, for the largest elements. mxfp8: one kernel as well, with a byte of scale for 32 numbers in each layout; by
# what Transformer Engine's kernel is, not measured. nvfp4: half a byte and a byte of scale for 16 numbers, read for the
# largest elements before.
FP8_CAST = {
    "delayed": 4.0,
    "tensorwise": 6.0,
    "rowwise": 6.0,
    "blockwise": 4.0,
    "mxfp8": 4.0 + 2 / 32,
    "nvfp4": 5.0 + 2 / 16,
}
# The same where each layout is cast by itself, and rows and columns have scales of their own: both are read for their
# largest elements, and once more.
FP8_CAST_APART = FP8_CAST | {"rowwise": 10.0, "blockwise": 10.0}
# The same in one layout alone, as a frozen weight has its input. With scales of blocks it is read for them before: the
# one kernel that reads it once makes both layouts.
FP8_CAST_ALONE = {
    "delayed": 3.0,
    "tensorwise": 5.0,
    "rowwise": 5.0,
    "blockwise": 5.0,
    "mxfp8": 3.0 + 1 / 32,
    "nvfp4": 4.5 + 1 / 16,
}
# Of a weight, whose scale is always that of its numbers; one of a square block is the same in both layouts.
FP8_WEIGHT_CAST = FP8_CAST | {"delayed": 6.0, "blockwise": 6.0}
# Of experts' rows, and of their matrices, once a step: with scales of lines columns are turned round in a pass more.
GROUP_CAST = FP8_CAST_APART
GROUP_WEIGHT_CAST = FP8_WEIGHT_CAST | {"rowwise": 12.0}
# Of weights by Transformer Engine's cast, which finds the largest elements of squares while it makes both layouts.
TE_WEIGHT_CAST = FP8_WEIGHT_CAST | {"blockwise": 4.0}
# Columns that a cast writes beside rows. Of what its rank alone casts before others gather it they are not written, but
# made of the bytes of all ranks, which are read and written for that. With scales of lines both casts are of its
# tokens, and both write rows.
COLUMNS_BY_CAST = 1.0
COLUMNS_OF_BYTES = 2.0
# The same operation by operation: the largest element, the cast with what of it is not finite, and with delayed scales
# what saturates and is remembered. With scales of lines, and of blocks, each layout is cast by itself.
PLAIN_FP8_CAST = {
    "tensorwise": 79.0,
    "delayed": 111.0,
    "rowwise": 157.0,
    "blockwise": 182.0,
    "mxfp8": 100.0,
    "nvfp4": 298.0,
}
# In rows alone; columns are made of them, and turned round.
PLAIN_FP8_CAST_OF_ROWS = {
    "tensorwise": 77.0,
    "delayed": 109.0,
    "rowwise": 77.5,
    "blockwise": 90.0,
    "mxfp8": 50.0,
    "nvfp4": 134.0,
}
# Of a factor in fp8 that is dequantised before it is multiplied: to fp32, and times its scale.
DEQUANTISED = 13.0
# Of what comes out of that product in fp32: rounded to bf16, and added to a sum in fp32.
ROUNDED = 6.0
SUMMED = 12.0


class PassBytes(NamedTuple):
    """What is read and written in each pass."""

    forward: float
    backward: float


NO_BYTES = PassBytes(0.0, 0.0)


class Reached(NamedTuple):
    """Shares of a copy's bandwidth in each pass."""

    forward: float
    backward: float


# What kernels of a step reach of a copy's bandwidth where power is limited, by profiles of one H200: a gate's, a norm's
# and the loss's own kernels 0.68 to 0.78 (8B and experts in fp8), those that the compiler makes of norms and rotations
# 0.70 to 0.91 (1B), but of a gate 0.95 to 1.0 forward and 0.45 to 0.47 backward (1B and 8B).
ALL_OF_IT = Reached(1.0, 1.0)
BY_KERNEL = Reached(0.72, 0.72)
BY_COMPILER = Reached(0.8, 0.8)
GATE_BY_COMPILER = Reached(0.95, 0.46)
# The same of casts to fp8 (3.65 TB/s in a profile of 8B) and of what is added to sums in fp32 (4.0, experts).
CAST_REACHES = 0.85
ADDING_REACHES = 0.9
# Bytes of a number in fp32 that is multiplied by the scales of its row and of its column, in a pass each: 16, which
# take as long as 27 of what is added (2.4 TB/s in a profile of 8B on one H200, where sums reach 4.0).
SCALED_AFTERWARDS = 27.0


@dataclass(frozen=True)
class Product:
    """[m, k] x [k, n], forward and both gradients. With `groups`, m rows are shared out to as many matrices."""

    m: int
    n: int
    k: int
    precision: str
    groups: int = 0
    makes_input_gradient: bool = True
    makes_weight_gradient: bool = True
    input_is_written: bool = False
    """What makes its input writes it in fp8."""
    gradient_is_written: bool = False
    """So does what makes its output's gradient."""
    input_ranks: int = 1
    """Ranks that each cast their own tokens of its input before they gather it; 1: none gather it so."""
    gradient_ranks: int = 1
    """The same of its output's gradient."""
    casts_input_apart: bool = False
    """Each layout of its input is cast by itself: all tokens in rows, and this rank's own as they are kept."""


@dataclass(frozen=True)
class AttentionWork:
    """Causal attention of `tokens` tokens in sequences of `seq_len`; `share` of it is this rank's."""

    tokens: int
    seq_len: int
    heads: int
    kv_heads: int
    head_size: int
    share: float = 1.0
    pairs: float = 1.0
    """What a fused kernel computes takes so many times as long as causal attention."""
    document_length: float | None = None
    """Sequences of this length have as many pairs for each token as packed documents, which kernels are as slow at;
    None: rows are one document, or nobody knows."""
    window: int | None = None
    """A query sees so many keys; None: all of the past, or what no window says."""
    is_plain: bool = True
    """Whole sequences, of which a window hides keys at most: what implementations are measured at."""
    hides_keys: bool = False
    """Documents, a window or a chunk hide keys, or scores are capped."""
    hides_by_documents: bool = False
    """Documents alone, of whole sequences, and nothing is capped."""

    @property
    def kind(self) -> AttentionKind | None:
        """What implementations were measured at that this is; None: nothing of what they were."""
        if self.hides_by_documents:
            return "documents"
        if not self.hides_keys:
            return "causal"
        return "window" if self.is_plain else None

    @property
    def seen(self) -> float:
        """Keys of a window, or tokens of a document, as rates are measured by; else of the sequence."""
        return self.window or self.document_length or self.seq_len


@dataclass
class RecomputablePart:
    """What of a layer can be recomputed on its own, or an end of the model."""

    name: str
    products: list[Product] = field(default_factory=list)
    attention: AttentionWork | None = None
    attends_backward: bool = True
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    summed_bytes: float = 0.0
    """Of gradients of weights that their products do not add to the sum themselves: in the mean over micro batches."""
    reached: Reached = BY_KERNEL


@dataclass(frozen=True)
class HeadSizes:
    """Features of a token in attention on one rank."""

    queries: int
    keys_and_values: int
    outputs: int


def head_sizes(run: LayerRun, attention: AttentionProducts) -> HeadSizes:
    """Of one rank, before context parallelism swaps heads."""
    keys_and_values = run.on_rank((attention.keys, attention.values))
    return HeadSizes(attention.queries.on(run.degrees), keys_and_values, attention.outputs.on(run.degrees))


def layer_parts(recipe: Recipe, layer: LayerFacts, *, in_fp8: bool) -> tuple[RecomputablePart, ...]:
    """The parts of one layer. `in_fp8`: its matrix products take fp8, where they can."""
    run = layer_run(recipe)
    products: dict[str, RecomputablePart] = {}
    by_layers = writing_operations(recipe)
    by_experts = operations_writing_for_experts(recipe)
    input_ranks = _ranks_that_cast(recipe, INPUTS_IN_FP8)
    gradient_ranks = _ranks_that_cast(recipe, GRADIENTS_IN_FP8)
    # tokens that ranks gather in the model's format
    gathers_wide = recipe.parallelism.sequence_parallel and input_ranks == 1
    by_norms: list[Product] = []
    for linear in layer.linears:
        writing = by_experts if linear.tokens == "routed" else by_layers
        if linear.in_time:
            precision = "fp8" if in_fp8 and linear.takes_fp8 else precision_outside_fp8(recipe)
            part = products.setdefault(linear.recomputed_with, RecomputablePart(linear.recomputed_with))
            product = _product(linear, run, layer, precision)
            written = replace(
                product,
                input_is_written=linear.input_by in writing,
                gradient_is_written=linear.gradient_by in writing,
                input_ranks=input_ranks if linear.split == "columns" else 1,
                gradient_ranks=gradient_ranks if linear.split == "rows" else 1,
                casts_input_apart=gathers_wide and linear.split == "columns",
            )
            part.products.append(written)
            part.summed_bytes += _summed_bytes(recipe, written)
            if linear.input_by == "norm":
                by_norms.append(written)
    between = [_between_products(recipe, run, layer, moved) for moved in layer.moved]
    for part in between:
        if part.name == "norm":
            part.forward_bytes -= sum(_without_columns(run, product) for product in by_norms)
    if not layer.runs_backward:
        for part in between:
            part.backward_bytes = 0.0
    return (*products.values(), *between)


def _ranks_that_cast(recipe: Recipe, recipes: Container[str]) -> int:
    """Ranks that share sequences out and cast their tokens before they gather them; 1: none do. `recipes`: those of fp8
    that do so."""
    if not recipe.parallelism.sequence_parallel or fp8_recipe(recipe.precision) not in recipes:
        return 1
    return recipe.parallelism.tp


def _without_columns(run: LayerRun, product: Product) -> int:
    """Bytes that a norm does not write which writes rows alone in fp8, of this rank's tokens or for a frozen weight:
    one in place of a number in the model's format, where one that writes both layouts writes two."""
    if product.precision != "fp8" or not product.input_is_written:
        return 0
    if product.input_ranks == 1 and product.makes_weight_gradient:
        return 0
    return product.m // product.input_ranks * product.k * (run.width - 1)


def writing_operations(recipe: Recipe) -> frozenset[str]:
    """Operations whose kernels write fp8 themselves in a filled recipe."""
    may = may_write_fp8(recipe.precision, recomputed=recipe.parallelism.recompute.alone, linear=recipe.kernels.linear)
    found = set()
    for operation in may:
        chosen = CATALOG[operation].implementations[getattr(recipe.kernels, operation)]
        if chosen.writes_fp8:
            found.add(operation)
    return frozenset(found)


def operations_writing_for_experts(recipe: Recipe) -> frozenset[str]:
    """The same of what experts take; see nn/moe/fp8_producers.py and `_have_experts_write` in parallelism/fp8.py."""
    parallelism = recipe.parallelism
    recomputed = parallelism.recompute.alone
    if fp8_recipe(recipe.precision) != "delayed" or "moe" in recomputed:
        return frozenset()
    found = set()
    if CATALOG["gated"].implementations[recipe.kernels.gated].writes_fp8 and "activation" not in recomputed:
        found.add("gated")
    # rows that other ranks send arrive in the model's format
    arrive_gathered = parallelism.ep * parallelism.etp == 1 or parallelism.dispatch == "all_gather"
    if arrive_gathered and recipe.kernels.fp8_cast != "reference":
        found.add(GATHERED)
    return frozenset(found)


def precision_outside_fp8(recipe: Recipe) -> str:
    """Of products that fp8 leaves alone: attention, the output head, shared experts, layers that stay in bf16."""
    return model_format(recipe.precision)


def _between_products(recipe: Recipe, run: LayerRun, layer: LayerFacts, moved: Moved) -> RecomputablePart:
    """What one kernel or a few behind each other read and write; attention with what is around it."""
    reached = BY_COMPILER
    if moved.part == "activation":
        reached = GATE_BY_COMPILER
    if moved.of_kernel is not None and moved.operation in run.execution.fused:
        moved = moved.of_kernel
    if moved.is_fused:
        reached = BY_KERNEL
    alone = _moved_bytes(moved, run, layer)
    part = RecomputablePart(moved.part, forward_bytes=alone.forward, backward_bytes=alone.backward, reached=reached)
    if moved.part == "norm":
        turned = _turned_bytes(run, layer)
        part.forward_bytes += turned
        part.backward_bytes += turned
    if moved.part == "core_attention":
        part.attention = _attention_work(recipe, run, layer.attention)
        part.attends_backward = layer.attends_backward
        merged = _merged_bytes(run, layer.attention, recipe.parallelism.context)
        part.forward_bytes += merged.forward
        part.backward_bytes += merged.backward
    return part


def _product(linear: Linear, run: LayerRun, layer: LayerFacts, precision: str) -> Product:
    groups = 0
    if linear.tokens == "routed":
        # experts of a rank
        groups = max(1, linear.n_experts // run.degrees.ep)
    if linear.in_fp32:
        precision = "fp32"
    return Product(
        m=run.count(linear.tokens, layer.routing),
        n=run.on_rank(linear.outputs),
        k=linear.inputs.on(run.degrees),
        precision=precision,
        groups=groups,
        makes_input_gradient=linear.makes_input_gradient,
        makes_weight_gradient=not linear.is_frozen,
    )


def _summed_bytes(recipe: Recipe, product: Product) -> float:
    """Of adding up a weight's gradient over micro batches. The product of a dense matrix does it, but for torch's of
    matrices in fp8, which leaves its result in the sum's format; a grouped one leaves it in the model's."""
    is_apart = product.groups > 0 or is_summed_apart(recipe, product)
    if not is_apart or not product.makes_weight_gradient:
        return 0.0
    run = layer_run(recipe)
    # the first micro batch writes the sum, others read it, too
    into = run.wide * (2 - 1 / shape_of(recipe).micro_batches)
    if product.groups:
        return product.groups * product.n * product.k * (run.width + into)
    weights = product.n * product.k
    found = weights * (run.wide + into)
    if fp8_recipe(recipe.precision) == "rowwise":
        # torch writes no such format with scales of lines: they are multiplied by afterwards, one behind the other
        found += SCALED_AFTERWARDS * weights
    return found


def is_summed_apart(recipe: Recipe, product: Product) -> bool:
    """Whether a dense product in fp8 adds its weight gradient to nothing, so that it takes a pass of its own."""
    if product.precision != "fp8" or product.groups or recipe.kernels.linear == "te":
        return False
    return recipe.kernels.scaled_product == "torch"


def _moved_bytes(moved: Moved, run: LayerRun, layer: LayerFacts) -> PassBytes:
    """tokens · e · features, as often as they are read or written."""
    passes = EAGER_PASSES
    if moved.is_fused or run.execution.is_compiled:
        passes = 1
    per_feature = run.count(moved.tokens, layer.routing) * run.width * passes
    forward = sum(times * width.on(run.degrees) for times, width in moved.forward)
    backward = sum(times * width.on(run.degrees) for times, width in moved.backward)
    return PassBytes(forward * per_feature, backward * per_feature)


def _turned_bytes(run: LayerRun, layer: LayerFacts) -> float:
    """Under tensor parallel a gather or scatter of several sequences turns them round, which is a copy each: two
    gathers and two scatters around each pair of products."""
    if run.tokens.stream_ranks == 1 or run.tokens.sequences == 1:
        return 0.0
    copied = 4 * run.tokens.all + 2 * run.tokens.stream
    return TURNING * run.width * layer.d_model * len(layer.sublayers) * copied


def _attention_work(recipe: Recipe, run: LayerRun, attention: AttentionProducts) -> AttentionWork:
    """With whole sequences of fewer heads where context parallelism swaps them, else with a part of each sequence."""
    cp = recipe.parallelism.cp
    heads_split = context_split(recipe.parallelism.context, cp).heads
    heads = attention.queries.on(run.degrees) // attention.d_key
    kv_heads = attention.keys.on(run.degrees) // attention.d_key
    window = None
    if attention.sight.hides_keys(run.tokens.seq_len):
        window = attention.sight.window
    caps_or_chunks = attention.caps_scores or attention.sight.chunk is not None
    hides_otherwise = recipe.data.document_mask or caps_or_chunks
    if not attention.makes_latents:
        kv_heads = max(1, kv_heads // heads_split)
    document_length = None
    lengths = document_lengths(recipe)
    if lengths and heads_split == cp:
        document_length = twice_the_pairs_in_a_row(lengths, run.tokens.seq_len) / run.tokens.seq_len
    return AttentionWork(
        tokens=run.tokens.all * cp,
        seq_len=run.tokens.seq_len,
        heads=max(1, heads // heads_split),
        kv_heads=max(1, kv_heads),
        head_size=(attention.d_key + attention.d_value) // 2,
        share=heads_split / cp,
        pairs=_computed_pairs(recipe, attention, whole_sequences=heads_split == cp),
        document_length=document_length,
        window=window,
        is_plain=heads_split == cp and not hides_otherwise,
        hides_keys=hides_otherwise or window is not None,
        hides_by_documents=recipe.data.document_mask and heads_split == cp and not caps_or_chunks and window is None,
    )


def seen_pairs(recipe: Recipe, attention: AttentionProducts) -> float:
    """Twice the pairs of a query and a key that are seen in a row, see Sight.twice_the_pairs: with packed documents the
    mean over rows. Documents of which nothing is known count as one, which is the most that they can cost."""
    return twice_the_pairs_in_a_row(document_lengths(recipe), recipe.data.seq_len, attention.sight)


def document_lengths(recipe: Recipe) -> Lengths:
    """Of the documents that attention stays inside of; (): rows are one document, or nobody knows."""
    lengths = recipe.data.document_lengths
    if not recipe.data.document_mask or lengths is None:
        return ()
    return lengths


def _computed_pairs(recipe: Recipe, attention: AttentionProducts, *, whole_sequences: bool) -> float:
    """Pairs of causal attention that take as long as what is computed.

    In fp32 sdpa takes a mask, and computes what it hides, too. The share of attention that all kernels leave out with
    documents is a mean over rows: that one rank's rows have more pairs than another's, for which all wait, is not
    counted.
    """
    seq_len = recipe.data.seq_len
    hides_keys = attention.sight.hides_keys(seq_len)
    if not whole_sequences:
        return _pairs_in_blocks(recipe, attention)
    if recipe.kernels.attention in OWN_LENGTHS:
        # at the rate of cuDNN's causal attention
        return seen_pairs(recipe, attention) / seq_len**2
    by_own_kernel = hides_keys or attention.caps_scores or recipe.data.document_mask or takes_all_layers(recipe)
    if recipe.kernels.attention == "flex" and by_own_kernel:
        return FLEX_COST * seen_pairs(recipe, attention) / seq_len**2
    if recipe.kernels.attention == "sdpa" and (hides_keys or recipe.data.document_mask):
        if recipe.precision.kind == "fp32":
            return MASK_COST
        return FLASH_COST * seen_pairs(recipe, attention) / seq_len**2
    return 1.0


def _pairs_in_blocks(recipe: Recipe, attention: AttentionProducts) -> float:
    """The same where ranks have a part of each sequence, of the rank that the others wait for.

    Blocks go document by document, or chunk by chunk of them, each pair of a query and a key on one rank. Rank r of n
    has two pieces of 2 n, r and 2 n - 1 - r: what all of a row up to a piece's end sees, less what it sees up to its
    beginning. In a row of one document all ranks have as many. In a packed one the first piece sees less than the
    others, which see the same once documents are shorter than they are.
    A window is a mask beside blocks, which is computed with what it hides; those that it hides as a whole are skipped,
    which is not counted.
    """
    seq_len = recipe.data.seq_len
    sight = attention.sight
    has_window = sight.window is not None and sight.window < seq_len
    is_by_document = recipe.data.document_mask or (sight.chunk is not None and sight.chunk < seq_len)
    if has_window or not is_by_document or recipe.precision.kind == "fp32":
        return 1.0
    context = recipe.parallelism.context
    ranks = context_split(context, recipe.parallelism.cp).ring
    if context.kind == "all_gather":
        ranks = recipe.parallelism.cp
    lengths = document_lengths(recipe)
    piece = seq_len / (2 * ranks)
    most = 0.0
    for rank in range(ranks):
        pairs = 0.0
        for number in (rank, 2 * ranks - 1 - rank):
            pairs += twice_the_pairs_in_a_row(lengths, (number + 1) * piece, sight)
            if number:
                pairs -= twice_the_pairs_in_a_row(lengths, number * piece, sight)
        most = max(most, pairs)
    return FLASH_COST * ranks * most / seq_len**2


def _merged_bytes(run: LayerRun, attention: AttentionProducts, context: ContextSpec) -> PassBytes:
    """Of putting blocks of attention together, in at least fp32, on the rank that has most of it: the last one, all of
    whose queries see a part of every other rank's keys."""
    cp = run.tokens.cp
    ring = context_split(context, cp).ring
    narrow = run.width
    wide = run.wide
    # bytes of a number that changes its format, and of one that is added to another in at least fp32
    cast = narrow + wide
    add = narrow + 2 * wide
    # numbers of this rank's queries, and of its keys and values
    sizes = head_sizes(run, attention)
    q = run.tokens.all * sizes.queries
    kv = run.tokens.all * sizes.keys_and_values
    if ring > 1:
        # the sum of outputs begins and ends with a cast, each block that comes is added, and keys and values are copied
        forward = q * (2 * cast + (ring - 1) * add) + 2 * narrow * kv
        # the causal part, that of every other rank, the rest of its own; the sum that comes home
        backward = (q + kv) * (2 * cast + add / 2) + (ring - 1) * add * (q + kv / 2) + 4 * wide * kv
        return PassBytes(forward, backward)
    if cp > 1 and context.kind == "all_gather":
        # keys are put in the order of the sequence and their gradients back
        whole = cp * kv
        seen = whole - kv / 2
        forward = q * (2 * cast + add) + 2 * narrow * (kv + whole)
        backward = q * (wide + 2 * add + cast) + kv * (add + cast) + seen * add + whole * (5 * wide + 2 * narrow)
        return PassBytes(forward, backward)
    return NO_BYTES


def weights_bytes(recipe: Recipe, work: AttentionWork) -> float:
    """Bytes that the softmax of attention written out reads and writes, in either direction: a number of the model's
    format in and one out, and one in fp32 that the forward pass keeps and the backward pass reads."""
    run = layer_run(recipe)
    passes = EAGER_PASSES
    if run.execution.is_compiled:
        passes = 1
    return work.tokens * work.heads * work.seq_len * (2.0 * run.width + 4) * passes


def fp8_bytes(recipe: Recipe, products: list[Product]) -> PassBytes:
    """Of turning the factors of products into fp8: of the input [m, k] in the forward pass and of the output's gradient
    [m, n] in the backward pass. And of turning factors back, where products are computed in fp32."""
    forward = 0.0
    backward = 0.0
    casts = _casts(recipe)
    for product in products:
        if product.precision != "fp8":
            continue
        inputs = product.m * product.k
        gradients = product.m * product.n
        forward += _of_input(product, casts) * inputs
        backward += _of_gradient(product, casts) * gradients
        # of what ranks gather in fp8 each makes the columns itself, for the weight gradient
        if product.makes_weight_gradient and product.input_ranks > 1:
            backward += COLUMNS_OF_BYTES * inputs
        if product.makes_weight_gradient and product.gradient_ranks > 1:
            backward += COLUMNS_OF_BYTES * gradients
        # once a step: in the mean over micro batches
        weights = product.n * product.k / shape_of(recipe).micro_batches
        if product.groups:
            forward += casts.of_group_weight * product.groups * weights
        else:
            forward += casts.of_weight * weights
        if is_dequantised(recipe, product):
            turned = _dequantised_bytes(product)
            forward += turned.forward
            backward += turned.backward
    return PassBytes(forward, backward)


@dataclass(frozen=True, kw_only=True)
class _Casts:
    """Bytes that a number takes to be turned into fp8."""

    of_both: float
    """Of an input or an output's gradient, in both layouts at once."""
    apart: float
    """The same, each layout by itself."""
    of_rows: float
    """In rows alone."""
    of_columns: float
    of_tokens: float
    """Of an input that a rank casts before others gather it, for both layouts."""
    of_weight: float
    of_group: float
    """Of experts' rows."""
    of_group_weight: float
    """Of experts' matrices."""


def _of_input(product: Product, casts: _Casts) -> float:
    """Bytes of a number of the input: in rows for the product, in columns for the weight gradient, where there is one.
    What makes the input and writes it in fp8 itself writes a byte in each layout in place of two."""
    if product.input_is_written:
        return 0.0
    if not product.makes_weight_gradient:
        return casts.of_rows / product.input_ranks
    if product.input_ranks > 1:
        return casts.of_tokens / product.input_ranks
    if product.casts_input_apart:
        return casts.apart
    if product.groups:
        return casts.of_group
    return casts.of_both


def _of_gradient(product: Product, casts: _Casts) -> float:
    """Bytes of a number of the output's gradient: in rows for the input gradient, in columns for the weight gradient,
    where there are such."""
    if product.gradient_is_written or not (product.makes_input_gradient or product.makes_weight_gradient):
        return 0.0
    if product.gradient_ranks > 1:
        # rows are gathered in any case
        return casts.of_rows / product.gradient_ranks
    if not product.makes_weight_gradient:
        return casts.of_rows
    if not product.makes_input_gradient:
        return casts.of_columns
    if product.groups:
        return casts.of_group
    return casts.of_both


_NO_CASTS = _Casts(
    of_both=0.0,
    apart=0.0,
    of_rows=0.0,
    of_columns=0.0,
    of_tokens=0.0,
    of_weight=0.0,
    of_group=0.0,
    of_group_weight=0.0,
)


def _casts(recipe: Recipe) -> _Casts:
    """Of a run in fp8, or none."""
    name = fp8_recipe(recipe.precision)
    if name is None:
        return _NO_CASTS
    if recipe.kernels.linear == "te":
        both = FP8_CAST[name]
        rows = both - COLUMNS_BY_CAST
        # made with rows in any case
        columns = both
        if name in BLACKWELL_SM:
            rows = FP8_CAST_ALONE[name]
        if name == "mxfp8":
            columns = rows
        return _Casts(
            of_both=both,
            apart=both,
            of_rows=rows,
            of_columns=columns,
            of_tokens=_of_tokens(name, rows=rows, apart=both),
            of_weight=TE_WEIGHT_CAST[name],
            # it computes no experts
            of_group=0.0,
            of_group_weight=0.0,
        )
    if recipe.kernels.fp8_cast == "reference" or name in BLACKWELL_SM:
        plain = PLAIN_FP8_CAST[name]
        rows = PLAIN_FP8_CAST_OF_ROWS[name]
        return _Casts(
            of_both=plain,
            apart=plain,
            of_rows=rows,
            # turned round behind the cast
            of_columns=rows + COLUMNS_OF_BYTES,
            of_tokens=_of_tokens(name, rows=rows, apart=plain),
            of_weight=plain,
            of_group=plain,
            of_group_weight=plain,
        )
    alone = FP8_CAST_ALONE[name]
    apart = FP8_CAST_APART[name]
    return _Casts(
        of_both=FP8_CAST[name],
        apart=apart,
        of_rows=alone,
        of_columns=alone,
        of_tokens=_of_tokens(name, rows=alone, apart=apart),
        of_weight=FP8_WEIGHT_CAST[name],
        of_group=GROUP_CAST[name],
        of_group_weight=GROUP_WEIGHT_CAST[name],
    )


def _of_tokens(name: str, *, rows: float, apart: float) -> float:
    """See _Casts, of an fp8 recipe by its name: what has one scale is cast in rows, of which columns are made."""
    if name in GRADIENTS_IN_FP8:
        return rows
    return apart


def is_dequantised(recipe: Recipe, product: Product) -> bool:
    """Whether factors in fp8 are turned back into numbers of at least fp32, and multiplied as such."""
    if product.precision != "fp8" or recipe.kernels.linear == "te":
        return False
    if product.groups:
        return recipe.kernels.scaled_grouped == "reference"
    if fp8_recipe(recipe.precision) in BLACKWELL_SM:
        return True
    return recipe.kernels.scaled_product == "reference"


def dequantised_precision(recipe: Recipe) -> str:
    """What such factors are multiplied in."""
    outside = precision_outside_fp8(recipe)
    return "fp64" if outside == "fp64" else "fp32"


def _dequantised_bytes(product: Product) -> PassBytes:
    """Two factors of each product, and what comes out of it."""
    inputs = product.m * product.k
    outputs = product.m * product.n
    weights = max(1, product.groups) * product.n * product.k
    forward = DEQUANTISED * (inputs + weights) + ROUNDED * outputs
    backward = 0.0
    if product.makes_input_gradient:
        backward += DEQUANTISED * (outputs + weights) + ROUNDED * inputs
    if product.makes_weight_gradient:
        backward += DEQUANTISED * (outputs + inputs) + SUMMED * weights
    return PassBytes(forward, backward)


def embedding_part(recipe: Recipe) -> RecomputablePart:
    """Rows are read and written. Their gradients are added to the sum in place, in its format; else the gradient is as
    large as the whole table."""
    run = layer_run(recipe)
    facts = facts_of(recipe)
    table = facts.table_on(tp=run.degrees.tp)
    rows = 2 * run.width * facts.d_model * run.tokens.all
    gradient = rows + (2 * run.width + 8) * table
    if tables_in_place(recipe).embedding:
        # to the sum's format, and read again with the rows that they are added to
        gradient = rows + 4 * run.wide * facts.d_model * run.tokens.all
        if not facts.is_tied:
            # a step's first micro batch makes a sum of zeros
            gradient += run.wide * table / shape_of(recipe).micro_batches
    if facts.embedding_table.is_frozen:
        gradient = 0
    return RecomputablePart("embedding", forward_bytes=rows, backward_bytes=gradient)


def head_part(recipe: Recipe) -> RecomputablePart:
    """The last norm, the output head and the loss, whose backward pass runs with its forward, piece by piece."""
    run = layer_run(recipe)
    facts = facts_of(recipe)
    tokens = run.tokens.all
    d_model = facts.d_model
    # e: bytes of a number in the model's format
    e = run.width
    table = facts.table_on(tp=run.degrees.tp)
    # classes of this rank
    vocab = table // d_model
    # how often the loss reads or writes a number as large as a logit: in one kernel, or operation by operation
    passes_over_logits = 8
    if recipe.kernels.cross_entropy == "triton":
        passes_over_logits = 3
    logits = passes_over_logits * e * vocab * tokens
    norm_forward = LOOSE_NORM_FORWARD * d_model * run.tokens.stream
    norm_backward = LOOSE_NORM_BACKWARD * d_model * run.tokens.stream
    if "norm" in run.execution.fused:
        norm_forward = KERNEL_NORM_FORWARD * e * d_model * run.tokens.stream
        norm_backward = KERNEL_NORM_BACKWARD * e * d_model * run.tokens.stream
    # the gradient of the table: to the model's format, scaled, added to its sum; and that of the norm's output, scaled
    table_gradient = (4 + e + 2 * e + e + 8) * table
    scaled = 2 * e * d_model * tokens
    is_in_place = tables_in_place(recipe).head
    if is_in_place:
        # nothing is scaled
        scaled = 0
    if facts.head_table.is_frozen or is_in_place:
        table_gradient = 0
    product = Product(
        tokens,
        vocab,
        d_model,
        precision_outside_fp8(recipe),
        makes_input_gradient=facts.head_makes_input_gradient,
        makes_weight_gradient=not facts.head_table.is_frozen,
    )
    return RecomputablePart(
        "head",
        [product],
        forward_bytes=norm_forward + logits,
        backward_bytes=norm_backward + table_gradient + scaled,
    )


def shared_products(recipe: Recipe, facts: PartFacts, layer: LayerFacts) -> list[Product]:
    """Products of experts that every token takes."""
    run = layer_run(recipe)
    precision = precision_outside_fp8(recipe)
    return [_product(linear, run, layer, precision) for linear in facts.linears]


def recomputed_layers(recipe: Recipe, layers: int) -> int:
    """Of a chunk of so many layers, those that the backward pass computes again as a whole."""
    recompute = recipe.parallelism.recompute
    if recompute.kind != "full":
        return 0
    if recompute.method == "block":
        return min(layers, recompute.layers or 1)
    return layers
