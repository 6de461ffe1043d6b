"""A small run with the layout of a large one: for `verify`, on the machine at hand.

Every axis that is above 1 stays so, and what a layout depends on stays as it is: schedule, chunks, stages that differ,
heads that share keys, experts beside dense layers, what is recomputed. Sizes become the smallest that the rules let
pass. The numbers are fp64, in which rounding hides nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from megaspec.core.divisors import divisors
from megaspec.core.errors import Problem, RecipeError
from megaspec.estimate.schedule import shape_of
from megaspec.estimate.target import Target
from megaspec.model.kinds import has_experts, mla_of, moe_of
from megaspec.model.spec import TransformerSpec
from megaspec.nn.spec import MoeSpec
from megaspec.parallelism.spec import RecomputeSpec
from megaspec.parallelism.stages import parse_layout, stages_of
from megaspec.recipe import Recipe
from megaspec.resolve.fill import plainly_drafted
from megaspec.resolve.resolver import settle
from megaspec.rules.case import Case
from megaspec.rules.run_facts import Facts
from megaspec.rules.table import is_legal
from megaspec.spec import Spec
from megaspec.verify.shrink_grid import Grid, grid_of, smaller_grids
from megaspec_kernels.catalog import CATALOG, Use, choose, unmet

# Of CPU ranks, unless the axes need more.
RANKS = 8
_MOST_RANKS = 64
_VOCABULARY, _SEQUENCE, _CHUNKS = 67, 13, 4
_FACTS = Facts(run_dir="verify")


def on_cpu(target: Target) -> Target:
    """The same machine without its GPUs, and without ranks that somebody has started."""
    return target.model_copy(
        update={"gpus": 0, "gpu": None, "sm": 0, "gpu_memory": 0, "world_size": None, "local_ranks": None}
    )


def shrink(spec: Spec, target: Target, *, ranks: int | None = None) -> Spec:
    """A legal small run on `target`, of at most `ranks` ranks; None: of RANKS, or the fewest that keep all axes.

    On a target with GPUs at most one rank a GPU. RecipeError: all axes need more ranks.
    """
    limit = target.gpus if target.device == "cuda" else _MOST_RANKS
    most = min(ranks or RANKS, limit)
    found = _smallest(spec, target, least=1, most=most)
    if found is not None:
        return found
    for more in range(most + 1, limit + 1):
        found = _smallest(spec, target, least=more, most=more)
        if found is not None and ranks is None:
            return found
        if found is not None:
            text = f"--ranks {ranks}: the layout keeps each of its axes above 1 on {more} ranks at least"
            raise RecipeError([Problem("", text, code="verify-ranks")])
    axes = " ".join(f"{axis}={n}" for axis, n in grid_of(spec.parallelism).degrees.items() if n > 1)
    text = f"no layout of at most {limit} ranks keeps each axis above 1 and all rules: {axes}"
    raise RecipeError([Problem("", text, code="verify-ranks")])


def _smallest(spec: Spec, target: Target, *, least: int, most: int) -> Spec | None:
    kept = frozenset(one.key for one in spec.decisions)
    for grid in smaller_grids(grid_of(spec.parallelism), least=least, most=most):
        small = _small(spec, grid, target)
        draft = plainly_drafted(small, target, _FACTS)
        filled = Recipe.model_validate_json(json.dumps(draft.content))
        if is_legal(Case(filled, target, _FACTS, kept | {one.key for one in draft.decisions})):
            settled = settle(small, target, _FACTS, kept=kept)
            return settled.spec((settled.samples(),))
    return None


def alone(spec: Spec) -> Spec:
    """The one-rank run that a run is compared with: the same steps in the same micro batches, with plain kernels,
    nothing padded, nothing computed twice and nothing moved away."""
    content = spec.model_dump(mode="json")
    ones = dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "dp_replicate", "dp_shard"), 1)
    pipeline = {"schedule": "1f1b", "micro_batch_group": 1}
    content["parallelism"] = ones | {"sequence_parallel": False, "pipeline": pipeline}
    content["kernels"] |= {name: "reference" for name, one in CATALOG.items() if "reference" in one.implementations}
    content["kernels"]["compile"] = "none"
    if "vocab_pad_to" in content["model"]:
        content["model"]["vocab_pad_to"] = 1
    content["launcher"]["ranks"] = content["world_size"] = 1
    return Spec.model_validate_json(json.dumps(content))


def _small(spec: Spec, grid: Grid, target: Target) -> Recipe:
    """The recipe, with everything said that was decided before."""
    content = {name: value for name, value in spec.model_dump(mode="json").items() if name in Recipe.model_fields}
    own = content["parallelism"]
    own |= {axis: n for axis, n in grid.degrees.items() if axis != "edp"}
    own["context"]["factors"] = grid.factors
    # several buckets, and sums that rounding does not hide in
    own |= {"bucket_mb": 0.02, "grad_reduce": "fp32"}
    stages = _stages(spec, grid)
    own["pipeline"] |= stages.pipeline
    own["recompute"]["layers"] = stages.recomputed
    own["offload"]["layers"] = stages.offloaded
    length = _length(spec, grid)
    if isinstance(spec.model, TransformerSpec):
        content["model"] |= _model(spec, grid, stages.n_layers, length)
    vocabulary = content["model"]["vocab_size"]
    content["data"] = {
        "kind": "synthetic",
        "vocab_size": vocabulary,
        "seq_len": length,
        "seed": 1,
        "document_mask": spec.data.document_mask,
    }
    content["precision"] = {"kind": "fp64"}
    content["optim"] |= {"schedule": {"kind": "constant"}, "weight_decay_ramp": {}}
    if "formats" in content["optim"]:
        content["optim"]["formats"] = {}
    if "eps" in content["optim"]:
        # gradients that are zero in exact arithmetic, and rounding here, stay small steps
        content["optim"]["eps"] = max(content["optim"]["eps"], 1e-8)
    content["kernels"] |= _kernels(spec, target)
    _batch(spec, grid, content)
    content |= {"run_dir": _FACTS.run_dir, "about": {}, "checkpoint": {}, "log": {"tensorboard": False}}
    content["launcher"] = {"ranks": grid.world}
    return Recipe.model_validate_json(json.dumps(content))


def _kernels(spec: Spec, target: Target) -> dict[str, Any]:
    """The implementations of the recipe where they compute in fp64 here, else the best that do, nothing compiled."""
    use = Use(attention_dropout=getattr(spec.model, "attention_dropout", 0) > 0, precision="fp64")
    chosen: dict[str, Any] = {"compile": "none"}
    for name, operation in CATALOG.items():
        own = getattr(spec.kernels, name)
        # what runs on CPUs is plain enough for fp64 everywhere
        runs = own in operation.implementations and unmet(name, own, device="cpu", sm=0, use=use) is None
        runs = runs and unmet(name, own, device=target.device, sm=target.sm, use=use) is None
        chosen[name] = own if runs else choose(name, device="cpu", sm=0, use=use)
    return chosen


@dataclass(frozen=True)
class _Stages:
    """How few layers lie where."""

    n_layers: int
    pipeline: Mapping[str, Any]
    recomputed: int | None
    offloaded: int


def _stages(spec: Spec, grid: Grid) -> _Stages:
    own = spec.parallelism
    largest = max(len(chunk.layers) for rank in stages_of(spec.model.n_layers, own) for chunk in rank)
    recomputed, need = _recomputed(own.recompute, largest)
    offloaded = own.offload.layers
    is_whole = offloaded >= largest
    if offloaded and not is_whole:
        is_grouped = own.recompute.kind == "full" and own.recompute.method != "block"
        offloaded = (recomputed or 1) if is_grouped else 1
        need = max(need, offloaded + 1)
    virtual = min(own.pipeline.virtual_stages, _CHUNKS)
    more: dict[str, Any] = {"virtual_stages": virtual, "micro_batch_group": _group(spec, grid)}
    if grid.pp == 1:
        chunks = [min(spec.model.n_layers, max(need, 2))]
    elif own.pipeline.layout is not None:
        chunks = _by_layout(own.pipeline.layout, grid.pp * virtual, need)
        more["layout"] = f"E{'|'.join('t' * size for size in chunks)}L"
    elif own.pipeline.first_layers or own.pipeline.last_layers:
        chunks, ends = _uneven(spec, grid, need)
        more |= {name: n and n * virtual for name, n in ends.items()}
        chunks *= virtual
    else:
        chunks = _even(spec, grid.pp * virtual, need)
    return _Stages(sum(chunks), more, recomputed, max(chunks) if is_whole else offloaded)


def _recomputed(own: RecomputeSpec, largest: int) -> tuple[int | None, int]:
    """Layers to recompute, and how many a chunk needs for that: one more where it has some that are not recomputed, or
    a last group that is smaller. `largest`: layers of a chunk."""
    if own.kind != "full" or own.layers is None:
        return own.layers, 1
    layers = 1 if own.method == "block" else min(own.layers, 2)
    has_rest = largest > own.layers and (own.method == "block" or layers > 1)
    return layers, layers + has_rest


def _even(spec: Spec, stages: int, need: int) -> list[int]:
    own, n_layers = spec.parallelism.pipeline, spec.model.n_layers
    extra = own.count_embedding + own.count_loss
    were = (n_layers + extra) // (spec.parallelism.pp * own.virtual_stages)
    # an end that is counted leaves a layer to its stage where it did before
    each = max(need, 2 if extra and (were > 1 or stages - extra < 2) else 1)
    sizes = [each] * stages
    sizes[0] -= own.count_embedding
    sizes[-1] -= own.count_loss
    return sizes


def _uneven(spec: Spec, grid: Grid, unit: int) -> tuple[list[int], dict[str, int | None]]:
    """Layers of a chunk by rank: as many sizes as there were, in the same order. `unit`: the fewest."""
    own, pp = spec.parallelism.pipeline, spec.parallelism.pp
    ends = [n for n in (own.first_layers, own.last_layers) if n is not None]
    middle = pp - len(ends)
    between = (spec.model.n_layers - sum(ends)) // middle if middle else ends[0]
    few = {size: unit * place for place, size in enumerate(sorted({*ends, between}), start=1)}
    first, last = (None if n is None else few[n] for n in (own.first_layers, own.last_layers))
    sizes = [few[between]] * grid.pp
    sizes[0] = first or sizes[0]
    sizes[-1] = last or sizes[-1]
    return sizes, {"first_layers": first, "last_layers": last}


def _by_layout(layout: str, stages: int, need: int) -> list[int]:
    """Layers of some of the stages of a layout, the first and the last among them."""
    whole = parse_layout(layout)
    places = [round(stage * (len(whole) - 1) / (stages - 1)) for stage in range(stages)]
    counts = [whole[place].count("t") for place in places]
    few = {count: need * place for place, count in enumerate(sorted({*counts} - {0}), start=1)} | {0: 0}
    sizes = [few[count] for count in counts]
    if sum(sizes) < 2:
        # all layers lay between those stages: a model has some, dense ones and experts
        sizes[stages // 2] += max(need, 2)
    return sizes


def _model(spec: Spec, grid: Grid, n_layers: int, length: int) -> dict[str, Any]:
    own, moe, mla = spec.model, moe_of(spec.model), mla_of(spec.model)
    heads, kv_heads = _heads(spec, grid)
    d_head = 8 if heads <= 16 else 4
    if mla is not None:
        d_nope, d_rope = 6, 4
        d_head = d_nope + d_rope
        small = {"q_rank": mla.q_rank and 12, "kv_rank": 8, "d_nope": d_nope, "d_rope": d_rope, "d_value": 5}
    width, was = heads * d_head, own.n_heads * own.d_head
    if mla is None and own.d_model != was:
        width = width // 2 if own.d_model < was else width * 2
    changes = {
        "n_layers": n_layers,
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "d_head": d_head,
        "d_ffn": grid.tp * max(1, 3 * width // 2 // grid.tp),
        "vocab_size": min(own.vocab_size, _VOCABULARY),
        "vocab_pad_to": min(own.vocab_pad_to, 4),
        "max_seq_len": length if own.max_seq_len == spec.data.seq_len else 2 * length,
        # gradients of all parts of a size: those of narrow layers would be tiny
        "init_std": max(own.init_std, 0.2),
    }
    if mla is not None:
        changes["mla"] = small
    if moe is not None:
        changes["moe"] = _experts(spec, moe, grid, n_layers)
    return changes


def _heads(spec: Spec, grid: Grid) -> tuple[int, int]:
    """Heads, and heads of keys: as many to a rank, one or several, and shared as before."""
    own, tp = spec.model, spec.parallelism.tp
    swapped, swap = _swapped(spec, grid)
    if own.n_kv_heads % tp == 0:
        kv_heads = grid.tp * swap * min(2, own.n_kv_heads // (tp * swapped))
    else:
        # ranks that hold copies of a head
        kv_heads = max(d for d in divisors(grid.tp) if d == 1 or (d < grid.tp and d <= own.n_kv_heads))
    group = min(2, own.n_heads // own.n_kv_heads)
    while group * kv_heads % grid.tp:
        group += 1
    return group * kv_heads, kv_heads


def _swapped(spec: Spec, grid: Grid) -> tuple[int, int]:
    """Ranks of the all-to-all that swaps sequence and heads, before and after; 1 without one."""
    own = spec.parallelism
    if own.cp == 1 or own.context.kind not in ("all_to_all", "hierarchical"):
        return 1, 1
    if own.context.factors is not None and grid.factors is not None:
        return own.context.factors[0], grid.factors[0]
    return own.cp, grid.cp


def _experts(spec: Spec, moe: MoeSpec, grid: Grid, n_layers: int) -> dict[str, Any]:
    """Experts that every rank has one or several of, of which a token takes some or all, as before."""
    router = moe.router.model_dump(mode="json")
    groups, open_groups, top_k = moe.router.n_groups, moe.router.group_top_k, min(moe.top_k, 2)
    least = 2 * top_k
    if groups is not None and open_groups is not None:
        few = min(groups, 4)
        few_open = few if open_groups == groups else min(open_groups, max(1, few // 2))
        of_a_group = min(2, max(1, moe.top_k // open_groups))
        top_k = min(moe.top_k, few_open * of_a_group)
        has_choice = moe.n_experts // groups * open_groups > moe.top_k
        least = few * of_a_group * (2 if has_choice else 1)
        router |= {"n_groups": few, "group_top_k": few_open}
    unit = lcm(grid.ep, router["n_groups"] or 1)
    least = max(least, 2 * grid.ep if moe.n_experts > spec.parallelism.ep else grid.ep)
    n_experts = min(-(-least // unit) * unit, moe.n_experts)
    return moe.model_dump(mode="json") | {
        "n_experts": n_experts,
        "top_k": n_experts if moe.top_k == moe.n_experts else top_k,
        "d_expert": 8 * grid.etp,
        "d_shared": moe.d_shared and 6 * grid.tp,
        "router": router,
        **_expert_layers(spec, moe, n_layers),
    }


def _expert_layers(spec: Spec, moe: MoeSpec, n_layers: int) -> dict[str, Any]:
    if moe.layers is None:
        return {"every": min(moe.every, 2), "first_dense": min(moe.first_dense, 1)}
    layers = [moe.layers[i * len(moe.layers) // n_layers] for i in range(n_layers)]
    for kind in {*moe.layers} - {*layers}:
        layers[0 if kind == moe.layers[0] else -1] = kind
    assert has_experts(spec.model), "a list of layers without layers"
    return {"layers": layers}


def _length(spec: Spec, grid: Grid) -> int:
    """Tokens of a sequence: an odd number where nothing divides it."""
    own = spec.parallelism
    chunks = 1 if grid.cp == 1 or own.context.kind == "all_to_all" else 2
    unit = lcm(chunks * grid.cp, grid.cp * grid.tp if own.sequence_parallel else 1)
    return -(-_SEQUENCE // unit) * unit


def _group(spec: Spec, grid: Grid) -> int:
    own = spec.parallelism.pipeline
    is_plain = own.schedule != "interleaved" or own.micro_batch_group == spec.parallelism.pp
    return grid.pp if is_plain else grid.pp + 1


def _batch(spec: Spec, grid: Grid, content: dict[str, Any]) -> None:
    """Few micro batches of few sequences."""
    micro_batch, dp = min(spec.train.micro_batch, 2), grid.dp_replicate * grid.dp_shard
    content["train"] |= {
        "micro_batch": micro_batch,
        "global_batch": _micro_batches(spec, grid) * micro_batch * dp,
        "steps": 3,
        "batch_ramp": None,
        "eval_every": 0,
        "sample": None,
    }


def _micro_batches(spec: Spec, grid: Grid) -> int:
    """Of a rank: a rest where groups left one, more than the pipeline is long where there were more."""
    shape, pp = shape_of(spec), grid.pp
    if pp == 1:
        return min(shape.micro_batches, 2)
    if shape.schedule == "interleaved":
        group = _group(spec, grid)
        rounds, rest = divmod(shape.micro_batches, shape.group)
        return group + pp if rest else group * min(rounds, 2)
    if shape.micro_batches >= 2 * shape.pp - 1:
        return min(shape.micro_batches, 2 * pp + 1)
    return pp if shape.micro_batches >= shape.pp else max(1, pp - 1)
