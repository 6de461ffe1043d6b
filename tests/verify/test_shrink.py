"""The small run of a layout: legal, no axis gone, and what a layout depends on as it was."""

from itertools import product
from typing import Any

import pytest

from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.parallelism.stages import stages_of
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec
from megaspec.verify.shrink import RANKS, alone, on_cpu, shrink
from megaspec.verify.shrink_grid import Grid, grid_of, smaller_grids
from tests.golden_specs import CPU, GPUS, golden_cases, targets
from tests.plan.plans import GPT, LLAMA, MLA, MOE, plan


def shipped(name: str, ending: str) -> Spec:
    recipe = compose(name).recipe
    return resolve(recipe, targets(recipe)[ending], Facts(run_dir="run"))


def spec_of(model: dict[str, Any], **changes: Any) -> Spec:
    """A Spec of as many ranks as its degrees; keys of `changes` are paths with __ for the dot."""
    paths = {key.replace("__", "."): value for key, value in changes.items()}
    own = {"tp": 1, "dp_replicate": 1, "dp_shard": 1} | {
        key.rpartition(".")[2]: value for key, value in paths.items() if key.count(".") == 1 and key.startswith("par")
    }
    world = 1
    for axis in ("tp", "pp", "cp", "dp_replicate", "dp_shard"):
        world *= own.get(axis, 1)
    recipe = plan(model, {"parallelism.dp_shard": 1, "launcher.ranks": world, **paths})
    return resolve(recipe, GPUS["H200"].model_copy(update={"gpus": world}), Facts(run_dir="run"))


def keeps_every_axis(spec: Spec, small: Spec) -> None:
    were, are = grid_of(spec.parallelism), grid_of(small.parallelism)
    for axis, n in were.degrees.items():
        assert (n > 1) == (are.degrees[axis] > 1), axis
        assert are.degrees[axis] <= n, axis
    wide = sum(n > 1 for axis, n in were.degrees.items() if axis not in ("ep", "etp", "edp"))
    assert small.world_size == are.world <= max(RANKS, 2**wide)


@pytest.mark.parametrize(("name", "ending"), golden_cases(), ids=lambda one: one)
def test_every_shipped_recipe(name, ending):
    spec = shipped(name, ending)
    small = shrink(spec, on_cpu(CPU))
    keeps_every_axis(spec, small)
    own, was = small.parallelism, spec.parallelism
    assert (own.pipeline.schedule, own.dp_strategy, own.context.kind) == (
        was.pipeline.schedule,
        was.dp_strategy,
        was.context.kind,
    )
    assert (own.sequence_parallel, own.recompute.kind) == (was.sequence_parallel, was.recompute.kind)
    assert small.model.tied_embeddings == spec.model.tied_embeddings
    assert (small.model.n_heads > small.model.n_kv_heads) == (spec.model.n_heads > spec.model.n_kv_heads)
    assert (small.device, small.precision.kind, small.optim.kind) == ("cpu", "fp64", spec.optim.kind)
    assert small.model.vocab_size % 2 == 1
    # 2 · 4 + 1 micro batches for four stages, of 2 sequences, on 2 data ranks
    assert small.train.global_batch <= 36
    assert small.model.n_layers * small.model.d_model <= 256
    assert alone(small).world_size == 1


ODD = {
    "chunks and groups with a rest": (
        LLAMA | {"n_layers": 24},
        {"pp": 4, "pipeline.virtual_stages": 3, "pipeline.micro_batch_group": 5, "dp_replicate": 2},
        {"global_batch": 18},
    ),
    "uneven ends": (LLAMA | {"n_layers": 17}, {"pp": 4, "pipeline.first_layers": 2, "pipeline.last_layers": 3}, {}),
    "ends that count": (
        LLAMA | {"n_layers": 14},
        {"pp": 4, "pipeline.count_embedding": True, "pipeline.count_loss": True, "recompute.kind": "full"},
        {},
    ),
    "letters": (LLAMA | {"n_layers": 7}, {"pp": 4, "pipeline.layout": "Et|ttt||tttL", "cp": 2}, {}),
    "letters without layers at the ends": (LLAMA | {"n_layers": 6}, {"pp": 4, "pipeline.layout": "E|ttt|ttt|L"}, {}),
    "there and back": (
        LLAMA | {"n_layers": 16},
        {"pp": 4, "pipeline.schedule": "zb_v", "pipeline.virtual_stages": 2, "tp": 2},
        {},
    ),
    "groups of layers": (
        LLAMA | {"n_layers": 16},
        {"pp": 2, "recompute.kind": "full", "recompute.layers": 3, "offload.layers": 3},
        {},
    ),
    "blocks": (
        LLAMA | {"n_layers": 8},
        {"pp": 2, "recompute.kind": "full", "recompute.method": "block", "recompute.layers": 2},
        {},
    ),
    "shards and replicas": (LLAMA, {"dp_strategy": "hsdp", "dp_replicate": 4, "dp_shard": 8}, {"global_batch": 64}),
    "heads that ranks copy": (LLAMA | {"n_heads": 8}, {"tp": 8}, {}),
    "rings of swaps": (
        GPT | {"n_heads": 8},
        {"cp": 8, "context.kind": "hierarchical", "context.factors": [4, 2], "tp": 2},
        {"seq_len": 64},
    ),
    "experts in groups": (
        LLAMA
        | {
            "moe": MOE
            | {
                "n_experts": 16,
                "top_k": 4,
                "first_dense": 1,
                "router": {"score": "sigmoid", "expert_bias": True, "bias_rate": 1e-3, "n_groups": 8, "group_top_k": 4},
            }
        },
        {"tp": 2, "ep": 4, "dp_replicate": 4},
        {},
    ),
    "experts with capacity": (
        LLAMA
        | {
            "n_layers": 8,
            "moe": {"n_experts": 8, "d_expert": 16, "capacity_factor": 1.25, "layers": [0, 1, 1, 1, 0, 1, 1, 1]},
        },
        {"tp": 2, "pp": 2, "ep": 2, "etp": 2, "dp_replicate": 2},
        {},
    ),
    "a latent": (LLAMA | {"n_kv_heads": 4, "attention": MLA}, {"tp": 2, "dp_replicate": 2}, {}),
}


def odd(name: str) -> Spec:
    model, layout, rest = ODD[name]
    sections = {"seq_len": "data__seq_len", "global_batch": "train__global_batch"}
    changes = {f"parallelism__{key.replace('.', '__')}": value for key, value in layout.items()}
    return spec_of(model, **changes, **{sections[key]: value for key, value in rest.items()})


@pytest.mark.parametrize("name", ODD)
def test_odd_layouts(name):
    spec = odd(name)
    small = shrink(spec, on_cpu(CPU))
    keeps_every_axis(spec, small)
    were, are = (
        sorted({len(c.layers) for rank in stages_of(s.model.n_layers, s.parallelism) for c in rank})
        for s in (spec, small)
    )
    assert len(are) == len(were) or small.parallelism.pp < spec.parallelism.pp
    assert small.parallelism.pipeline.virtual_stages == spec.parallelism.pipeline.virtual_stages


def test_what_a_layout_depends_on_stays():
    chunks = shrink(odd("chunks and groups with a rest"), on_cpu(CPU))
    pipeline, train = chunks.parallelism.pipeline, chunks.train
    per_rank = train.global_batch // train.micro_batch // chunks.parallelism.dp_replicate
    assert pipeline.micro_batch_group > chunks.parallelism.pp
    assert per_rank % pipeline.micro_batch_group >= chunks.parallelism.pp

    uneven = shrink(odd("uneven ends"), on_cpu(CPU)).parallelism
    assert (uneven.pp, uneven.pipeline.first_layers, uneven.pipeline.last_layers) == (4, 1, 2)

    whole = shrink(odd("groups of layers"), on_cpu(CPU))
    assert (whole.parallelism.recompute.layers, whole.parallelism.offload.layers, whole.model.n_layers) == (2, 2, 6)

    copied = shrink(odd("heads that ranks copy"), on_cpu(CPU))
    assert copied.parallelism.tp == 8 > copied.model.n_kv_heads == 2

    swapped = shrink(odd("rings of swaps"), on_cpu(CPU)).parallelism
    assert swapped.context.factors in ((2, 2), (4, 2))

    groups = shrink(odd("experts in groups"), on_cpu(CPU)).model.moe
    assert (groups.router.n_groups, groups.router.group_top_k, groups.top_k) == (4, 2, 2)
    assert groups.n_experts > groups.router.group_top_k * groups.n_experts // groups.router.n_groups >= groups.top_k

    listed = shrink(odd("experts with capacity"), on_cpu(CPU)).model.moe
    assert {*listed.layers} == {0, 1}
    assert listed.capacity_factor == 1.25


def test_masks_hide_what_they_hid_and_no_more():
    """The sequence has 48 tokens: one kind of layer has a window in it, the other one a window that is longer."""
    types = {
        "near": {"mask": {"kind": "window", "size": 16}},
        "far": {"mask": {"kind": "window", "size": 64}, "positions": {"kind": "none"}},
    }
    attention = {
        "kind": "gqa",
        "mask": {"kind": "chunk", "size": 8},
        "score_cap": 3.0,
        "temperature": {"kind": "log", "floor_scale": 16},
    }
    model = LLAMA | {"attention": attention, "layer_types": types, "layer_pattern": ["near", "near", "far"]}
    spec = spec_of(model | {"n_layers": 6}, parallelism__cp=2, data__seq_len=48, kernels__attention="reference")
    small = shrink(spec, on_cpu(CPU))
    length = small.data.seq_len
    found = small.model.layer_types
    assert found["near"].mask.size < length <= found["far"].mask.size
    assert found["far"].positions.kind == "none"
    assert small.model.attention.mask.size < length
    assert small.model.attention.temperature.floor_scale < length
    assert {"near", "far"} == {*small.model.layer_pattern}


def test_more_ranks_keep_more():
    spec = shipped("llama3_70b_32gpu", "")
    assert [shrink(spec, on_cpu(CPU), ranks=n).world_size for n in (8, 9, 16, 64)] == [8, 8, 16, 32]


def test_too_few_ranks_are_told_with_the_fewest():
    with pytest.raises(RecipeError, match=r"--ranks 8: .* on 16 ranks at least"):
        shrink(shipped("llama3_70b", ""), on_cpu(CPU), ranks=8)


def test_gpus_are_used_where_they_are_enough():
    small = shrink(shipped("llama3_8b", ""), GPUS["H200"].model_copy(update={"gpus": 4}))
    assert (small.device, small.world_size, small.kernels.compile) == ("cuda", 4, "none")
    with pytest.raises(RecipeError, match="no layout of at most 2 ranks"):
        shrink(shipped("llama3_8b", ""), GPUS["H200"].model_copy(update={"gpus": 2}))


@pytest.mark.parametrize("degrees", [*product((1, 3), (1, 4), (1, 8), (2, 6))])
def test_grids_are_in_order(degrees):
    pp, replicas, shards, tp = degrees
    whole = Grid(pp, replicas, shards, 1, tp, min(2, shards), 1)
    grids = smaller_grids(whole, most=16)
    assert grids
    assert len({*grids}) == len(grids)
    assert all(grid.world <= 16 and grid.inner == grid.ep * grid.etp * grid.edp for grid in grids)
    if whole.world <= 16:
        assert grids[0] == whole
