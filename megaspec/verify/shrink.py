"""A small run with the layout of a large one: for `verify`, on the machine at hand.

Every axis that is above 1 stays so, and what a layout depends on stays as it is: schedule, chunks, stages that differ,
heads that share keys, experts beside dense layers, what is recomputed. Sizes become the smallest that the rules let
pass. The numbers are fp64, in which rounding hides nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, TypeVar

from megaspec.core.divisors import divisors
from megaspec.core.errors import Problem, RecipeError
from megaspec.estimate.schedule import shape_of
from megaspec.estimate.target import Target
from megaspec.model.spec import TransformerSpec
from megaspec.nn.attention.spec import CausalMask, GroupedQuerySpec, LogTemperature, MaskSpec
from megaspec.nn.embedding.spec import PositionsSpec
from megaspec.nn.layer.spec import FlatLayers
from megaspec.nn.mla.spec import LatentSpec
from megaspec.nn.moe.spec import MoeSpec
from megaspec.nn.rope.spec import DynamicRopeScaling, LongRopeScaling, RotarySpec
from megaspec.parallelism.spec import RecomputeSpec
from megaspec.parallelism.stages import parse_layout, stages_of
from megaspec.recipe import Recipe
from megaspec.resolve.fill import plainly_drafted
from megaspec.resolve.resolver import settle
from megaspec.rules.case import Case
from megaspec.rules.run_facts import Facts
from megaspec.rules.table import is_legal
from megaspec.spec import Decision, Spec
from megaspec.verify.shrink_grid import Grid, grid_of, smaller_grids
from megaspec_kernels.catalog import CATALOG, Use, choose, unmet

T = TypeVar("T")

# Of CPU ranks, unless the axes need more.
RANKS = 8
_MOST_RANKS = 64
# Odd, so that nothing divides them that need not.
_VOCABULARY = 67
_SEQUENCE = 13
# Of a rank, at most.
_CHUNKS = 4
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
    degrees = grid_of(spec.parallelism).degrees
    axes = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
    text = f"no layout of at most {limit} ranks keeps each axis above 1 and all rules: {axes}"
    raise RecipeError([Problem("", text, code="verify-ranks")])


def _smallest(spec: Spec, target: Target, *, least: int, most: int) -> Spec | None:
    kept = _decided(spec.decisions)
    for grid in smaller_grids(grid_of(spec.parallelism), least=least, most=most):
        small = _small(spec, grid, target)
        draft = plainly_drafted(small, target, _FACTS)
        filled = Recipe.model_validate_json(json.dumps(draft.content))
        if is_legal(Case(filled, target, _FACTS, kept | _decided(draft.decisions))):
            settled = settle(small, target, _FACTS, kept=kept)
            return settled.spec((settled.samples(),))
    return None


def _decided(decisions: Sequence[Decision]) -> frozenset[str]:
    return frozenset(decision.key for decision in decisions)


def alone(spec: Spec) -> Spec:
    """The one-rank run that a run is compared with: the same steps in the same micro batches, with plain kernels,
    nothing padded, nothing computed twice and nothing moved away."""
    content = spec.model_dump(mode="json")
    ones = dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "dp_replicate", "dp_shard"), 1)
    pipeline = {"schedule": "1f1b", "micro_batch_group": 1}
    content["parallelism"] = ones | {"sequence_parallel": False, "pipeline": pipeline}
    for name, operation in CATALOG.items():
        if "reference" in operation.implementations:
            content["kernels"][name] = "reference"
    content["kernels"]["compile"] = "none"
    if "vocab_pad_to" in content["model"]:
        content["model"]["vocab_pad_to"] = 1
    content["launcher"]["ranks"] = content["world_size"] = 1
    return Spec.model_validate_json(json.dumps(content))


def _small(spec: Spec, grid: Grid, target: Target) -> Recipe:
    """The recipe, with everything said that was decided before."""
    content = spec.model_dump(mode="json", include=set(Recipe.model_fields))
    parallelism = content["parallelism"]
    parallelism |= grid.degrees
    del parallelism["edp"]  # it follows from the others
    parallelism["context"]["factors"] = grid.factors
    # several buckets, and sums that rounding does not hide in
    parallelism |= {"bucket_mb": 0.02, "grad_reduce": "fp32"}
    stages = _stages(spec, grid)
    parallelism["pipeline"] |= stages.pipeline
    parallelism["recompute"]["layers"] = stages.recomputed
    parallelism["offload"]["layers"] = stages.offloaded
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
    content |= {"run_dir": _FACTS.run_dir, "about": {}, "init": {}, "checkpoint": {}, "log": {"tensorboard": False}}
    content["launcher"] = {"ranks": grid.world}
    return Recipe.model_validate_json(json.dumps(content))


def _kernels(spec: Spec, target: Target) -> dict[str, Any]:
    """The implementations of the recipe where they compute in fp64 here, else the best that do, nothing compiled."""
    use = Use(attention_dropout=spec.model.attention.dropout > 0, score_cap=spec.model.caps_scores, precision="fp64")
    chosen: dict[str, Any] = {"compile": "none"}
    for name, operation in CATALOG.items():
        kernel = getattr(spec.kernels, name)
        # what runs on CPUs is plain enough for fp64 everywhere
        runs_anywhere = kernel in operation.implementations and unmet(name, kernel, device="cpu", sm=0, use=use) is None
        if runs_anywhere and unmet(name, kernel, device=target.device, sm=target.sm, use=use) is None:
            chosen[name] = kernel
        else:
            chosen[name] = choose(name, device="cpu", sm=0, use=use)
    return chosen


@dataclass(frozen=True)
class _Stages:
    """How few layers lie where."""

    n_layers: int
    pipeline: Mapping[str, Any]
    recomputed: int | None
    offloaded: int


def _stages(spec: Spec, grid: Grid) -> _Stages:
    """`need`: layers that a chunk has at least, so that as much of it is recomputed and offloaded as was."""
    parallelism = spec.parallelism
    recompute = parallelism.recompute
    pipeline = parallelism.pipeline
    largest = 0
    for chunks_of_rank in stages_of(spec.model.n_layers, parallelism):
        largest = max(largest, *(len(chunk.layers) for chunk in chunks_of_rank))
    recomputed, need = _recomputed(recompute, largest)
    offloaded = parallelism.offload.layers
    is_whole = offloaded >= largest
    if offloaded and not is_whole:
        # layers that are recomputed together are offloaded together
        is_grouped = recompute.kind == "full" and recompute.method != "block"
        offloaded = (recomputed or 1) if is_grouped else 1
        need = max(need, offloaded + 1)
    virtual = min(pipeline.virtual_stages, _CHUNKS)
    more: dict[str, Any] = {"virtual_stages": virtual, "micro_batch_group": _group(spec, grid)}
    if grid.pp == 1:
        chunks = [min(spec.model.n_layers, max(need, 2))]
    elif pipeline.layout is not None:
        chunks = _by_layout(pipeline.layout, grid.pp * virtual, need)
        layers = "|".join("t" * size for size in chunks)
        more["layout"] = f"E{layers}L"
    elif pipeline.first_layers or pipeline.last_layers:
        chunks, ends = _uneven(spec, grid, need)
        # an end that was not said stays so
        more |= {name: size and size * virtual for name, size in ends.items()}
        chunks *= virtual
    else:
        chunks = _even(spec, grid.pp * virtual, need)
    if is_whole:
        offloaded = max(chunks)
    return _Stages(sum(chunks), more, recomputed, offloaded)


def _recomputed(recompute: RecomputeSpec, largest: int) -> tuple[int | None, int]:
    """Layers to recompute, and how many a chunk needs for that: one more where it has some that are not recomputed, or
    a last group that is smaller. `largest`: layers of a chunk."""
    if recompute.kind != "full" or recompute.layers is None:
        return recompute.layers, 1
    layers = 1 if recompute.method == "block" else min(recompute.layers, 2)
    has_rest = largest > recompute.layers and (recompute.method == "block" or layers > 1)
    return layers, layers + has_rest


def _even(spec: Spec, stages: int, need: int) -> list[int]:
    """As many layers in each stage; the embedding and the loss may count as one each."""
    pipeline = spec.parallelism.pipeline
    extra = pipeline.count_embedding + pipeline.count_loss
    were = (spec.model.n_layers + extra) // (spec.parallelism.pp * pipeline.virtual_stages)
    # an end that is counted leaves a layer to its stage where it did before
    least = 1
    if extra and (were > 1 or stages - extra < 2):
        least = 2
    sizes = [max(need, least)] * stages
    sizes[0] -= pipeline.count_embedding
    sizes[-1] -= pipeline.count_loss
    return sizes


def _uneven(spec: Spec, grid: Grid, unit: int) -> tuple[list[int], dict[str, int | None]]:
    """Layers of a chunk by rank: as many sizes as there were, in the same order. `unit`: the fewest."""
    pipeline = spec.parallelism.pipeline
    ends = [size for size in (pipeline.first_layers, pipeline.last_layers) if size is not None]
    middle = spec.parallelism.pp - len(ends)
    between = (spec.model.n_layers - sum(ends)) // middle if middle else ends[0]
    # size before -> size now; a size that is not said stays so
    small = {None: None}
    for place, size in enumerate(sorted({*ends, between}), start=1):
        small[size] = unit * place
    first = small[pipeline.first_layers]
    last = small[pipeline.last_layers]
    sizes = [small[between]] * grid.pp
    sizes[0] = first or sizes[0]
    sizes[-1] = last or sizes[-1]
    return sizes, {"first_layers": first, "last_layers": last}


def _by_layout(layout: str, stages: int, need: int) -> list[int]:
    """Layers of some of the stages of a layout, the first and the last among them."""
    whole = parse_layout(layout)
    places = [round(stage * (len(whole) - 1) / (stages - 1)) for stage in range(stages)]
    counts = [whole[place].count("t") for place in places]
    # size before -> size now; an empty stage stays so
    small = {0: 0}
    for place, count in enumerate(sorted({*counts} - {0}), start=1):
        small[count] = need * place
    sizes = [small[count] for count in counts]
    if sum(sizes) < 2:
        # all layers lay between those stages: a model has some, dense ones and experts
        sizes[stages // 2] += max(need, 2)
    return sizes


def _model(spec: Spec, grid: Grid, n_layers: int, length: int) -> dict[str, Any]:
    model = spec.model
    moe = model.moe
    mla = model.attention if isinstance(model.attention, LatentSpec) else None
    heads, kv_heads = _heads(spec, grid)
    d_head = 8 if heads <= 16 else 4
    small_mla: dict[str, Any] = {}
    if mla is not None:
        small_mla = mla.model_dump(mode="json")
        small_mla |= {"q_rank": mla.q_rank and 12, "kv_rank": 8, "d_nope": 6, "d_rope": 4, "d_value": 5}
        d_head = small_mla["d_nope"] + small_mla["d_rope"]
    # the model stays narrower or wider than its heads together
    width = heads * d_head
    heads_width = model.n_heads * model.d_head
    if mla is None and model.d_model < heads_width:
        width //= 2
    elif mla is None and model.d_model > heads_width:
        width *= 2
    changes = {
        "n_layers": n_layers,
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "d_head": d_head,
        "d_ffn": grid.tp * max(1, 3 * width // 2 // grid.tp),
        "vocab_size": min(model.vocab_size, _VOCABULARY),
        "vocab_pad_to": min(model.vocab_pad_to, 4),
        "max_seq_len": length if model.max_seq_len == spec.data.seq_len else 2 * length,
        # gradients of all parts of a size: those of narrow layers would be tiny
        "init_std": max(model.init_std, 0.2),
    }
    if mla is not None:
        changes["attention"] = small_mla
    elif isinstance(model.attention, GroupedQuerySpec):
        changes["attention"] = _attention(spec, model.attention, length)
    if moe is not None:
        changes["moe"] = _experts(spec, moe, grid, n_layers)
    d_turned = d_head if mla is None else small_mla["d_rope"]
    changes["positions"] = _positions(spec, model.positions, d_turned, length)
    changes |= _layers(spec, n_layers, d_turned, length)
    return changes


def _layers(spec: Spec, n_layers: int, d_turned: int, length: int) -> dict[str, Any]:
    """What so few layers are, and in what they differ."""
    model = spec.model
    pattern = model.layer_pattern
    names = [pattern[number % len(pattern)] if pattern else "" for number in range(model.n_layers)]
    changes: dict[str, Any] = {}
    if isinstance(model.layer, FlatLayers):
        kinds = _few(list(zip(model.layer.mixers, names, strict=True)), n_layers)
        changes["layer"] = model.layer.model_dump(mode="json") | {"mixers": [mixer for mixer, _ in kinds]}
        # only layers with attention have a type, so that the others may have any
        names = [name for mixer, name in kinds if mixer == "attention"]
        if pattern and names:
            names = [name if mixer == "attention" else names[0] for mixer, name in kinds]
    else:
        names = _few(names, n_layers)
    if pattern:
        changes["layer_pattern"] = names
        changes["layer_types"] = {}
        for name in names:
            layer_type = model.layer_types[name].model_dump(mode="json")
            if layer_type["positions"] is not None:
                layer_type["positions"] = _positions(spec, model.layer_types[name].positions, d_turned, length)
            if layer_type["mask"] is not None:
                layer_type["mask"] = _mask(spec, model.layer_types[name].mask, length)
            changes["layer_types"][name] = layer_type
    return changes


def _attention(spec: Spec, attention: GroupedQuerySpec, length: int) -> dict[str, Any]:
    """With masks that hide as much of a sequence as before, and queries that grow in it where they did."""
    small = attention.model_dump(mode="json")
    small["mask"] = _mask(spec, attention.mask, length)
    temperature = attention.temperature
    if isinstance(temperature, LogTemperature) and temperature.floor_scale < spec.data.seq_len:
        small["temperature"]["floor_scale"] = length / 4
    return small


def _mask(spec: Spec, mask: MaskSpec, length: int) -> dict[str, Any]:
    """A window or chunk that is shorter than the sequence where it was, so that some pairs are hidden by it."""
    small = mask.model_dump(mode="json")
    if not isinstance(mask, CausalMask):
        is_shorter = mask.size < spec.data.seq_len
        small["size"] = max(1, length // 3) if is_shorter else length
    return small


def _few(many: Sequence[T], n: int) -> list[T]:
    """`n` of them in their order, each kind among them where there is room."""
    few = [many[number * len(many) // n] for number in range(n)]
    absent = [kind for kind in dict.fromkeys(many) if kind not in few]
    for place, kind in enumerate(absent[: max(0, n - 1)]):
        few[-1 - place] = kind
    return few


def _positions(spec: Spec, positions: PositionsSpec, d_turned: int, length: int) -> dict[str, Any]:
    """Of heads of which `d_turned` features may turn: as large a part of them, stretched as before."""
    small = positions.model_dump(mode="json")
    if not isinstance(positions, RotarySpec):
        return small
    scaling = positions.scaling
    if positions.fraction < 1:
        least = 4 if isinstance(scaling, DynamicRopeScaling) else 2
        small["fraction"] = max(least, positions.turned(d_turned) // 2 * 2) / d_turned
        d_turned = max(least, positions.turned(d_turned) // 2 * 2)
    if isinstance(scaling, DynamicRopeScaling | LongRopeScaling):
        # a sequence is longer than the original one, or not, as before
        is_longer = spec.data.seq_len > scaling.original_max_seq_len
        small["scaling"]["original_max_seq_len"] = length // 2 if is_longer else length
    if isinstance(scaling, LongRopeScaling):
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            small["scaling"][name] = [factors[i * len(factors) // (d_turned // 2)] for i in range(d_turned // 2)]
    return small


def _heads(spec: Spec, grid: Grid) -> tuple[int, int]:
    """Heads, and heads of keys: as many to a rank, one or several, and shared as before."""
    model = spec.model
    tp = spec.parallelism.tp
    swapped, swap = _swapped(spec, grid)
    if model.n_kv_heads % tp == 0:
        kv_heads = grid.tp * swap * min(2, model.n_kv_heads // (tp * swapped))
    else:
        # ranks that hold copies of a head
        kv_heads = max(d for d in divisors(grid.tp) if d == 1 or (d < grid.tp and d <= model.n_kv_heads))
    group = min(2, model.n_heads // model.n_kv_heads)
    while group * kv_heads % grid.tp:
        group += 1
    return group * kv_heads, kv_heads


def _swapped(spec: Spec, grid: Grid) -> tuple[int, int]:
    """Ranks of the all-to-all that swaps sequence and heads, before and after; 1 without one."""
    parallelism = spec.parallelism
    context = parallelism.context
    if parallelism.cp == 1 or context.kind not in ("all_to_all", "hierarchical"):
        return 1, 1
    if context.factors is not None and grid.factors is not None:
        return context.factors[0], grid.factors[0]
    return parallelism.cp, grid.cp


def _experts(spec: Spec, moe: MoeSpec, grid: Grid, n_layers: int) -> dict[str, Any]:
    """Experts that every rank has one or several of, of which a token takes some or all, as before."""
    router = moe.router.model_dump(mode="json")
    # a token takes experts of `open_groups` of the `groups`
    groups = moe.router.n_groups
    open_groups = moe.router.group_top_k
    top_k = min(moe.top_k, 2)
    least = 2 * top_k
    if groups is not None and open_groups is not None:
        few = min(groups, 4)
        few_open = few if open_groups == groups else min(open_groups, max(1, few // 2))
        of_a_group = min(2, max(1, moe.top_k // open_groups))
        top_k = min(moe.top_k, few_open * of_a_group)
        # a group's score may be the sum of two
        of_a_group = max(of_a_group, min(2, moe.experts_of_group))
        has_choice = moe.n_experts // groups * open_groups > moe.top_k
        least = few * of_a_group
        if has_choice:
            least *= 2
        router |= {"n_groups": few, "group_top_k": few_open}
    unit = lcm(grid.ep, router["n_groups"] or 1)
    # two to a rank where a rank had several
    of_a_rank = 2 if moe.n_experts > spec.parallelism.ep else 1
    least = max(least, of_a_rank * grid.ep)
    n_experts = min(-(-least // unit) * unit, moe.n_experts)
    if moe.top_k == moe.n_experts:
        top_k = n_experts
    return moe.model_dump(mode="json") | {
        "n_experts": n_experts,
        "top_k": top_k,
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
    return {"layers": layers}


def _length(spec: Spec, grid: Grid) -> int:
    """Tokens of a sequence: an odd number where nothing divides it."""
    parallelism = spec.parallelism
    # a rank of a ring holds an early and a late chunk
    chunks = 1 if grid.cp == 1 or parallelism.context.kind == "all_to_all" else 2
    unit = chunks * grid.cp
    if parallelism.sequence_parallel:
        unit = lcm(unit, grid.cp * grid.tp)
    return -(-_SEQUENCE // unit) * unit


def _group(spec: Spec, grid: Grid) -> int:
    """Micro batches of an interleaved schedule's group: pp, or more where there were."""
    pipeline = spec.parallelism.pipeline
    if pipeline.schedule != "interleaved" or pipeline.micro_batch_group == spec.parallelism.pp:
        return grid.pp
    return grid.pp + 1


def _batch(spec: Spec, grid: Grid, content: dict[str, Any]) -> None:
    """Few micro batches of few sequences."""
    micro_batch = min(spec.train.micro_batch, 2)
    dp = grid.dp_replicate * grid.dp_shard
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
    shape = shape_of(spec)
    pp = grid.pp
    if pp == 1:
        return min(shape.micro_batches, 2)
    if shape.schedule == "interleaved":
        group = _group(spec, grid)
        rounds, rest = divmod(shape.micro_batches, shape.group)
        if rest:
            return group + pp
        return group * min(rounds, 2)
    if shape.micro_batches >= 2 * shape.pp - 1:
        return min(shape.micro_batches, 2 * pp + 1)
    if shape.micro_batches >= shape.pp:
        return pp
    return max(1, pp - 1)
