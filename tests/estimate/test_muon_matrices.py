"""What the plan of Muon counts, against models that are built and against sums by hand."""

from math import prod

import pytest
import torch

from megaspec.core.part_facts import Degrees
from megaspec.estimate.communication import collectives_of
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import memory_of
from megaspec.estimate.muon_matrices import hidden_matrices, hidden_of_layer, hidden_parameters
from megaspec.estimate.parameters import rank_parameters
from megaspec.estimate.step_time import step_time
from megaspec.estimate.throughput import throughput_of
from megaspec.model.builders import MODELS
from megaspec.parallelism.stages import stages_of
from megaspec_kernels.catalog import CATALOG
from megaspec_kernels.registry import kernels_of
from megaspec_kernels.spec import KernelsSpec
from tests.plan.plans import GPT, LLAMA, MLA, MOE, plan

MUON = {"optim": {"kind": "muon", "lr": 1e-3}}


@pytest.mark.parametrize("model", [GPT, LLAMA | {"vocab_pad_to": 1}], ids=["gpt", "llama"])
def test_shapes_and_counts_are_those_of_the_model(model):
    spec = plan(model).model
    kernels = kernels_of(KernelsSpec(**dict.fromkeys(CATALOG, "reference"), compile="none"))
    with torch.device("meta"):
        built = MODELS[type(spec)](spec, kernels)
    found: dict[tuple[int, int], int] = {}
    for name, held in spec.facts.matrices().items():
        rows, columns = built.get_parameter(name).shape
        assert held[-1].last == rows
        for one in held:
            shape = (one.last - one.first, columns)
            found[shape] = found.get(shape, 0) + 1
    counted = hidden_matrices(spec.facts.layers[0])
    assert found == {shape: count * spec.n_layers for shape, count in counted.items()}


@pytest.mark.parametrize("extra", [{}, {"moe": MOE}, {"attention": MLA}], ids=["dense", "experts", "latent"])
def test_weights_are_those_of_the_shapes(extra):
    recipe = plan(LLAMA | extra)
    chunks = stages_of(recipe.model.n_layers, recipe.parallelism)[0]
    held = hidden_parameters(recipe, chunks)
    layer = recipe.model.facts.layers[0]
    shapes = hidden_matrices(layer)
    assert held.total == recipe.model.n_layers * sum(o * i * c for (o, i), c in shapes.items())
    one = hidden_of_layer(layer, Degrees())
    assert (held.dense, held.expert) == (recipe.model.n_layers * one.dense, recipe.model.n_layers * one.expert)


def test_states_by_hand():
    recipe = plan(LLAMA, MUON)
    everything = rank_parameters(recipe, 0).total
    hidden = hidden_parameters(recipe, stages_of(recipe.model.n_layers, recipe.parallelism)[0]).total
    # master and momentum of matrices; master and two moments of the rest
    assert memory_of(recipe)[0].optimizer == 8 * hidden + 12 * (everything - hidden)
    sharded = plan(LLAMA, MUON | {"parallelism": {"dp_strategy": "zero1", "dp_shard": 4, "tp": 1}})
    evenly = 8 * everything / 4 + 4 * (everything - hidden) / 4
    # of the rank that has most: rows of 48, and lines of 64, in its shards of whole rows
    assert evenly <= memory_of(sharded)[0].optimizer <= evenly + 12 * 2 * 192


@pytest.mark.parametrize(
    ("layout", "momentum"),
    [
        ({"dp_replicate": 4}, 0.0),
        ({"dp_shard": 4, "dp_strategy": "zero1"}, 1 / 4),
        ({"tp": 2}, 1 / 2),
        ({"tp": 2, "dp_replicate": 2}, 1 / 4 * 1 / 2 * 4 / 3),
    ],
    ids=["replicate", "zero1", "tp", "tp-dp"],
)
def test_what_travels(layout, momentum):
    recipe = plan(LLAMA, MUON | {"parallelism": {"tp": 1, "dp_replicate": 1, "dp_shard": 1} | layout})
    own = recipe.parallelism
    whole = hidden_parameters(recipe, stages_of(recipe.model.n_layers, own)[0]).total * own.tp
    found = {c.what: c for c in collectives_of(recipe, HARDWARE["H200"])}
    ranks = prod((own.dp_replicate, own.dp_shard, own.tp))
    share = whole / own.tp / (own.dp_shard if own.dp_strategy == "zero1" else 1)
    assert found["matrices' steps"].bytes == round(2 * share)
    assert found["matrices' steps"].ranks == ranks
    assert (found["momentum"].bytes if "momentum" in found else 0) == round(2 * momentum * whole)


def test_the_iterations_take_time():
    seconds = {}
    for steps in (1, 5):
        recipe = plan(LLAMA, {"optim": {"kind": "muon", "lr": 1e-3, "ns_steps": steps}})
        hardware = HARDWARE["H200"]
        seconds[steps] = step_time(recipe, hardware, throughput_of(hardware)).parts["optimizer"]
    assert seconds[5] > 1.5 * seconds[1]
