"""What a step sends, against numbers counted by hand and groups listed rank by rank."""

from itertools import product
from math import prod

import pytest

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, expert_degrees, rank_groups
from megaspec.estimate.communication import collectives_of
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import memory_of, state_bytes
from megaspec.estimate.parameters import partial_gradients, rank_parameters
from megaspec.estimate.topology import Topology
from tests.plan.plans import GPT, LLAMA, plan
from tests.resolve.planned import filled, shaped

H200 = HARDWARE["H200"]
D, LAYERS, VOCAB, SEQ = 2048, 16, 128256, 8192
PARAMETERS = 1235814400  # Llama-3.2-1B, its embedding tied


def sent(recipe, **of):
    """(bytes, times) of the collectives with these properties."""
    found = collectives_of(recipe, H200)
    return [(c.bytes, c.times) for c in found if all(getattr(c, k) == v for k, v in of.items())]


def tiny(*overrides, gpus):
    return shaped("llama3_2_1b", *overrides, gpus=gpus, global_batch=2 * gpus)


def test_one_rank_sends_nothing():
    assert collectives_of(shaped("llama3_2_1b"), H200) == ()


def test_data_parallel_strategies():
    micro_batches = 2
    wide, narrow = 4 * PARAMETERS, 2 * PARAMETERS
    # a layer has 60,821,504 weights: four shards of whole rows of 8,192
    in_shards = PARAMETERS + LAYERS * (4 * 8192 * 1857 - 60_821_504)
    in_two_shards = PARAMETERS + LAYERS * (2 * 8192 * 3713 - 60_821_504)

    def of(strategy, *more):
        recipe = tiny(f"parallelism.dp_strategy={strategy}", "parallelism.tp=1", *more, gpus=4)
        return {
            (c.what, c.kind, c.phase, c.group): (c.bytes, c.times) for c in collectives_of(recipe, H200) if c.overlapped
        }

    assert of("replicate") == {("gradients", "all_reduce", "backward", "dp_replicate"): (wide, 1)}
    zero1 = of("zero1")
    reduced, times = zero1.pop(("gradients", "reduce_scatter", "backward", "dp_shard"))
    assert times == 1
    # its buckets are of 25 MB and more: each is rounded up
    assert wide < reduced < wide + 4 * 8192 * wide / 25e6 * 4
    assert zero1 == {("weights", "all_gather", "forward", "dp_shard"): (reduced // 2, 1)}
    assert of("zero2")["gradients", "reduce_scatter", "backward", "dp_shard"] == (4 * in_shards, micro_batches)
    assert of("fsdp") == {
        ("gradients", "reduce_scatter", "backward", "dp_shard"): (4 * in_shards, micro_batches),
        ("weights", "all_gather", "forward", "dp_shard"): (2 * in_shards, micro_batches),
        # the last norm is still there; the tied table was gathered for either end
        ("weights", "all_gather", "backward", "dp_shard"): (2 * (in_shards - D), micro_batches),
    }
    hybrid = of("hsdp", "parallelism.dp_shard=2")
    assert hybrid["gradients", "all_reduce", "backward", "dp_replicate"] == (4 * in_two_shards // 2, 1)
    assert of("replicate", "parallelism.grad_reduce=bf16") == {
        ("gradients", "all_reduce", "backward", "dp_replicate"): (narrow, 1)
    }


def test_tensor_parallel_counts_each_layer_and_both_ends():
    recipe = tiny("parallelism.tp=2", gpus=4)
    micro_batches, size = 4, SEQ * D * 2
    layers = LAYERS * micro_batches
    for what in ("attention", "feed-forward"):
        for kind, phase in ((k, p) for k in ("all_gather", "reduce_scatter") for p in ("forward", "backward")):
            assert sent(recipe, what=what, kind=kind, phase=phase) == [(size, layers)]
    assert sent(recipe, what="embedding", kind="reduce_scatter") == [(size, micro_batches)]
    assert sent(recipe, what="loss") == [(4 * SEQ, 3 * micro_batches)]
    assert sent(recipe, what="whole weights' gradients") == [((2 * LAYERS + 1) * D * 4, 1)]
    eager = tiny("parallelism.tp=2", "kernels.compile=none", gpus=4)
    assert sent(eager, what="attention", kind="all_gather", phase="backward") == [(size, 2 * layers)]
    whole = tiny("parallelism.tp=2", "parallelism.sequence_parallel=false", gpus=4)
    assert {c.kind for c in collectives_of(whole, H200)} == {"all_reduce"}
    assert sent(whole, what="attention", phase="forward") == [(size, layers)]


def test_whole_weights_that_see_a_part_of_the_tokens():
    """DeepSeek-V3, tp 8: both latents' down-projections and norms, two norms a layer and the last, 58 routers, of which
    each of 32 ranks holds a share."""
    recipe = filled("deepseek_v3_tp8_ep32", gpus=256, hardware="H100")
    d = 7168
    latents = 61 * (d * (1536 + 512 + 64) + 1536 + 512)
    wanted = latents + 58 * 256 * d + (2 * 61 + 1) * d
    [found] = [c for c in collectives_of(recipe, HARDWARE["H100"]) if c.what == "whole weights' gradients"]
    assert (found.bytes, found.times, found.ranks, found.group) == (4 * wanted / 32, 1, 8, "tp")


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(
    ("model", "tp"), [(GPT, 2), (LLAMA, 2), (LLAMA, 4), (LLAMA | {"n_kv_heads": 1}, 2), (LLAMA | {"n_kv_heads": 1}, 4)]
)
def test_partial_gradients_are_those_that_the_strategy_adds_up(model, tp, splits):
    torch = pytest.importorskip("torch")
    from megaspec.parallelism.tensor import TensorParallel
    from megaspec.runtime.build import build_model
    from megaspec_kernels.registry import kernels_of
    from tests.parallelism.test_tensor import OneRank

    recipe = plan(model, {"parallelism.tp": tp, "parallelism.sequence_parallel": splits})
    built = build_model(recipe.model, kernels_of(recipe.kernels), dtype=torch.float32)
    strategy = TensorParallel(OneRank(tp, 0), splits)
    strategy.split_model(built, built.placement)
    parameters = dict(built.named_parameters())
    sizes = {True: 0, False: 0}
    for one in strategy.sums:
        sizes[one.rows is None] += parameters[one.name][one.rows or ...].numel()
    partial = partial_gradients(recipe, 0)
    assert (partial.over_tp, partial.over_copies) == (sizes[True], sizes[False])


def test_context_parallel_kinds():
    tokens = SEQ // 4
    kv, q = tokens * 2 * 8 * 64 * 2, tokens * 2048 * 2
    calls = LAYERS * 8

    def of(kind, *more):
        recipe = tiny("parallelism.tp=1", "parallelism.cp=4", f"parallelism.context.kind={kind}", *more, gpus=4)
        return {
            (c.kind, c.phase): (c.bytes, c.times, c.ranks) for c in collectives_of(recipe, H200) if c.what == "context"
        }

    assert of("ring") == {("p2p", "forward"): (kv, 3 * calls, 4), ("p2p", "backward"): (3 * kv, 3 * calls, 4)}
    assert of("all_gather")["all_gather", "forward"] == (4 * kv, calls, 4)
    # in fp32
    assert of("all_gather")["reduce_scatter", "backward"] == (8 * kv, calls, 4)
    swapped = of("all_to_all")["all_to_all", "forward"]
    assert swapped[0] * swapped[1] == (2 * q + kv) * calls
    both = of("hierarchical", "parallelism.context.factors=[2,2]")
    assert both["p2p", "forward"] == (kv, calls, 4)
    assert both["all_to_all", "backward"][2] == 2


def test_stages_send_what_lies_between_them():
    recipe = tiny("parallelism.tp=1", "parallelism.pp=4", gpus=4)
    size, micro_batches = SEQ * D * 2, 8
    middle = collectives_of(recipe, H200, 1)
    assert [(c.bytes, c.times) for c in middle if c.what == "stages"] == [(size, micro_batches)] * 2
    ends = [c.what for c in collectives_of(recipe, H200, 0)]
    assert ends.count("stages") == 1
    assert "tied embedding" in ends
    assert "tied embedding" not in [c.what for c in middle]


def test_experts():
    recipe = filled("mixtral_8x7b", gpus=64, hardware="H100")
    own, model = recipe.parallelism, recipe.model
    calls = recipe.train.global_batch // (recipe.train.micro_batch * own.dp_replicate * own.dp_shard)
    tokens = recipe.train.micro_batch * recipe.data.seq_len // own.cp // (own.tp if own.sequence_parallel else 1)
    layers = model.n_layers // own.pp
    found = [c for c in collectives_of(recipe, HARDWARE["H100"], 1) if c.what == "experts' tokens"]
    assert {c.group for c in found} == {"ep"}
    # there and back, forward and backward, the way there and its gradients' with a weight in fp32
    row = 4 * model.d_model * 2 + 2 * 4
    assert sum(c.bytes * c.times for c in found) == layers * calls * tokens * model.moe.top_k * row
    experts = model.moe.n_experts // own.ep * 3 * model.d_model * model.moe.d_expert * layers
    [gradients] = [c for c in collectives_of(recipe, HARDWARE["H100"], 1) if c.what == "experts' gradients"]
    assert gradients.bytes == 4 * experts


def test_full_recompute_sends_the_forward_again():
    plain = tiny("parallelism.tp=2", gpus=2)
    again = tiny("parallelism.tp=2", "parallelism.recompute.kind=full", gpus=2)

    def total(recipe, **of):
        return sum(times for _, times in sent(recipe, what="attention", **of))

    assert total(again, phase="backward") == total(plain, phase="backward") + total(plain, phase="forward")


@pytest.mark.parametrize("node", [4, 8, 6])
def test_which_groups_lie_in_a_node_is_what_listing_their_ranks_says(node):
    for pp, replicate, shard, cp, tp in product((1, 2), (1, 3), (1, 2), (1, 2), (1, 2, 4)):
        dense = dict(zip(DENSE_AXES, (pp, replicate, shard, cp, tp), strict=True))
        inner = prod(dense.values()) // pp
        etp, ep = (2, 2) if inner % 4 == 0 else (1, 1)
        expert = expert_degrees(dense, ep=ep, etp=etp)
        topology = Topology(dense, expert, node)
        spans = [("tp",), ("cp",), ("dp_shard", "cp"), ("dp_replicate",), ("dp_replicate", "dp_shard", "cp"), ("pp",)]
        for spanned, sizes, axes in [(s, dense, DENSE_AXES) for s in spans] + [
            (s, expert, EXPERT_AXES) for s in (("ep",), ("etp",), ("edp",), ("ep", "etp"))
        ]:
            groups = rank_groups(spanned, sizes, axes)
            inside = all(group[0] // node == group[-1] // node for group in groups)
            assert topology.within_node(spanned) == inside, (spanned, sizes)


@pytest.mark.parametrize(
    ("overrides", "shards", "replicas"),
    [
        (("dp_strategy=hsdp", "dp_replicate=2", "dp_shard=8", "ep=2"), 4, 2),
        (("dp_strategy=hsdp", "dp_replicate=2", "dp_shard=8", "ep=8"), 1, 2),
        (("dp_strategy=hsdp", "dp_replicate=4", "dp_shard=4", "ep=2"), 2, 4),
        (("dp_strategy=zero1", "dp_replicate=2", "dp_shard=8", "ep=4"), 2, 2),
        (("dp_strategy=fsdp", "dp_replicate=1", "dp_shard=16", "ep=8"), 2, 1),
    ],
)
def test_experts_are_shared_out_inside_a_replica(overrides, shards, replicas):
    """Ranks listed one by one: those with the same experts (edp) that lie in one block of dp_shard · tp ranks share."""
    settings = [f"parallelism.{word}" for word in (*overrides, "tp=1", "pp=1", "cp=1", "etp=1")]
    recipe = filled("mixtral_8x7b", "launcher.ranks=16", *settings, gpus=16)
    own = recipe.parallelism
    block = own.dp_shard * own.tp
    dense = {axis: getattr(own, axis) for axis in DENSE_AXES}
    same = rank_groups(("edp",), expert_degrees(dense, ep=own.ep, etp=own.etp), EXPERT_AXES)[0]
    assert (sum(rank < block for rank in same), len({rank // block for rank in same})) == (shards, replicas)
    held = rank_parameters(recipe, 0)
    found = {(c.kind, c.what): c for c in collectives_of(recipe, H200)}
    reduced = found.get(("reduce_scatter", "experts' gradients"))
    assert (reduced.ranks if reduced else 1) == shards
    summed = found.get(("all_reduce", "experts' gradients"))
    assert (summed.ranks if summed else 1) == replicas
    if summed:
        # whole rows, the last of a shard filled up
        assert summed.bytes == pytest.approx(4 * held.expert / shards, rel=1e-3)
    states = held.dense / own.dp_shard + held.expert / shards
    assert memory_of(recipe)[0].optimizer == pytest.approx(state_bytes(recipe.optim, width=2) * states, rel=1e-3)
