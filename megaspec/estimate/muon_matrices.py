"""The matrices of hidden layers, which Muon orthogonalises: how many weights, what travels, how long it takes."""

from collections import Counter
from functools import lru_cache

from megaspec.core.part_facts import Degrees
from megaspec.estimate.layer_run import degrees_of
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.estimate.trained import facts_of
from megaspec.nn.layer.facts import LayerFacts, WeightCount
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.stages import Chunk
from megaspec.precision.spec import model_format
from megaspec.recipe import Recipe

MatrixShape = tuple[int, int]
"""Outputs and inputs."""


@lru_cache(maxsize=256)
def hidden_matrices(layer: LayerFacts) -> dict[MatrixShape, int]:
    """How many matrices of each shape a layer holds on all its ranks together."""
    found: Counter[MatrixShape] = Counter()
    for linear in layer.linears:
        if linear.is_hidden and not linear.is_frozen:
            for width in linear.outputs:
                found[width.whole, linear.inputs.whole] += linear.n_experts
    return dict(found)


@lru_cache(maxsize=8192)
def hidden_of_layer(layer: LayerFacts, degrees: Degrees) -> WeightCount:
    """Weights of hidden matrices that one rank holds of a layer."""
    dense = 0
    expert = 0
    for linear in layer.linears:
        if not linear.is_hidden or linear.is_frozen:
            continue
        if linear.tokens == "routed":
            expert += linear.weights_on(degrees)
        else:
            dense += linear.weights_on(degrees)
    return WeightCount(dense, expert)


def hidden_parameters(recipe: Recipe, chunks: tuple[Chunk, ...]) -> WeightCount:
    """Weights of hidden matrices that one rank with these chunks holds."""
    facts = facts_of(recipe)
    degrees = degrees_of(recipe)
    dense = 0
    expert = 0
    for chunk in chunks:
        for number in chunk.layers:
            weights = hidden_of_layer(facts.layers[number], degrees)
            dense += weights.dense
            expert += weights.expert
    return WeightCount(dense, expert)


def working_width(recipe: Recipe) -> int:
    """Bytes of an element of what is orthogonalised: bf16 on a GPU, but fp64 of an fp64 model."""
    if model_format(recipe.precision) == "fp64":
        return 8
    return 2


def orthogonalising_seconds(
    recipe: Recipe, optim: MuonSpec, chunks: tuple[Chunk, ...], throughput: MeasuredThroughput
) -> float:
    """Newton-Schulz on the stage's matrices, shared out evenly over its ranks."""
    facts = facts_of(recipe)
    parallelism = recipe.parallelism
    precision = "bf16"
    if model_format(recipe.precision) == "fp64":
        precision = "fp64"
    kinds = facts.kinds_of(number for chunk in chunks for number in chunk.layers)
    seconds = 0.0
    for layer, layers in kinds.items():
        for shape, count in hidden_matrices(layer).items():
            seconds += layers * count * optim.ns_steps * _iteration_seconds(shape, throughput, precision)
    ranks = parallelism.dp_replicate * parallelism.dp_shard * parallelism.cp * parallelism.tp
    return seconds / ranks


def _iteration_seconds(shape: MatrixShape, throughput: MeasuredThroughput, precision: str) -> float:
    """One iteration of Newton-Schulz: A = X Xᵀ, then A², then (b A + c A²) X, with X turned so that it has fewer rows
    than columns (the quintic of Jordan et al. 2024)."""
    rows, columns = sorted(shape)
    seconds = 0.0
    for m, n, k in (
        (rows, rows, columns),
        (rows, rows, rows),
        (rows, columns, rows),
    ):
        seconds += throughput.matmul_seconds(m, n, k, precision=precision, kind="forward")
    return seconds
