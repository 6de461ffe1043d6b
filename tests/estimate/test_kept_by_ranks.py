"""What a layer keeps for the backward pass where ranks have a part of each sequence, beside what autograd saves."""

from collections.abc import Iterator

import pytest
import torch

from megaspec.estimate.activations import kept_tensors
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.trained import facts_of
from megaspec.parallelism.context import ContextParallel
from megaspec.parallelism.mesh import Mesh
from megaspec.recipe import Recipe
from megaspec.runtime.build import DTYPES, build_model, materialise
from megaspec_kernels.registry import kernels_of
from tests.estimate.test_kept_by_attention import HEADS, KEYS, QUERIES, TOKENS, VALUES, Saved
from tests.plan.plans import LLAMA, plan
from tests.ranks import RankPool

# By kind: ranks of a sequence, and the factors of a hierarchical exchange.
KINDS = {"ring": (2, None), "all_gather": (2, None), "all_to_all": (2, None), "hierarchical": (4, [2, 2])}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


def recipe_of(kind: str) -> Recipe:
    ranks, factors = KINDS[kind]
    changes = {
        "kernels.compile": "none",
        "kernels.norm": "reference",
        "kernels.gated": "reference",
        "kernels.attention": "sdpa",
        "kernels.attention_merge": "reference",
        "data.seq_len": ranks * TOKENS,
        "train.micro_batch": 2,
        "parallelism.cp": ranks,
        "parallelism.context": {"kind": kind, "factors": factors},
    }
    return plan(LLAMA | HEADS | {"n_layers": 1, "max_seq_len": ranks * TOKENS}, changes)


def saved_on_rank(rank: int, text: str) -> int:
    """Bytes that a rank's layer of a recipe keeps."""
    recipe = Recipe.model_validate_json(text)
    parallelism = recipe.parallelism
    cpu = torch.device("cpu")
    kernels = kernels_of(recipe.kernels)
    dtype = DTYPES[recipe.precision.kind]
    decoder = build_model(recipe.model, kernels, dtype=dtype)
    strategy = ContextParallel(
        Mesh({"cp": parallelism.cp}, rank=rank, device=cpu), parallelism.context, kernels.attention_merge
    )
    strategy.split_model(decoder)
    materialise(decoder, device=cpu, dtype=dtype)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.02)
    length = recipe.data.seq_len
    context = decoder.context(strategy.index(length), length=length, way=strategy.way)
    tables = (a for table in context.angles for a in table)
    saved = Saved([*decoder.parameters(), *tables])
    x = torch.randn(2, TOKENS, 64, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept):
        out = decoder.layers["0"](x, context)
    out.sum().backward()
    assert x.grad.isfinite().all()
    return saved.bytes


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_lies_by_itself(kind: str, pool: RankPool) -> None:
    """The product that queries, keys and values are views of is not kept. What comes back from other heads' ranks is a
    copy, and the output that it is a copy of stays for attention's backward pass."""
    recipe = recipe_of(kind)
    found = {one.what: one.size for one in kept_tensors(layer_run(recipe), facts_of(recipe).layers[0])}
    assert "qkv" not in found
    assert (found["q"], found["k"], found["v"]) == tuple(2 * TOKENS * size for size in (QUERIES, KEYS, VALUES))
    assert ("o.of_heads" in found) == (kind in ("all_to_all", "hierarchical"))
    for of_rank in pool.run(saved_on_rank, recipe.model_dump_json(), ranks=recipe.parallelism.cp):
        assert of_rank == pytest.approx(sum(found.values()), rel=0.01)
