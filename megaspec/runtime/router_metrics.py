"""What routers did in a step, of all layers of the model, as numbers that rank 0 can report."""

import torch
from torch import Tensor

from megaspec.core import counted
from megaspec.log.events import RoutersDone
from megaspec.nn.moe.router import LOSSES
from megaspec.parallelism.expert import RouterStatistics
from megaspec.runtime.build import TrainState

# Steps from one report of every expert's load to the next.
LOADS_EVERY = 100


def layers_of(built: TrainState) -> list[str]:
    """The layers with experts of the whole model."""
    layers = built.spec.model.facts.layers
    return [f"layers.{number}" for number, layer in enumerate(layers) if layer.has_experts]


def router_numbers(built: TrainState, statistics: RouterStatistics | None) -> Tensor:
    """float64 [L, 2 + losses + E], the same on all ranks: drops, entropy, losses and loads of each layer with experts.

    [0] for a model without. Starts no transfer to the host.
    """
    layers = layers_of(built)
    moe = built.spec.model.moe
    if moe is None:
        return torch.zeros(0, dtype=torch.float64, device=built.device)
    table = torch.zeros(len(layers), 2 + len(LOSSES) + moe.n_experts, dtype=torch.float64, device=built.device)
    if statistics is not None:
        # L: the layers with experts of this pipeline stage
        columns_L = [statistics.drops_L, statistics.entropy_L]
        columns_L += [statistics.losses[name] for name in LOSSES]
        rows = torch.cat([torch.stack(columns_L, dim=1), statistics.loads_LE], dim=1).to(torch.float64)
        for name, row in zip(statistics.layers, rows, strict=True):
            table[layers.index(name.removesuffix(".moe.router"))] = row
    # each stage has filled in the rows of its own layers, the others are 0
    group = built.mesh.group("pp")
    if group is not None:
        counted.all_reduce(table, group=group)
    return table


def routers_done(built: TrainState, step: int, numbers: list[float], *, steps: int) -> RoutersDone | None:
    """The event of a step from the flat numbers of `router_numbers`; None for a model without experts."""
    if not numbers:
        return None
    layers = layers_of(built)
    width = len(numbers) // len(layers)
    n_losses = len(LOSSES)
    drops: list[float] = []
    entropy: list[float] = []
    losses_of_layers: list[list[float]] = []
    loads: list[list[float]] = []
    max_violation: list[float] = []
    for begin in range(0, len(numbers), width):
        drop, entropy_of_layer, *others = numbers[begin : begin + width]
        # the load of each expert, as a share of what it would have if all had as much
        loads_E = others[n_losses:]
        drops.append(drop)
        entropy.append(entropy_of_layer)
        losses_of_layers.append(others[:n_losses])
        loads.append([round(load, 4) for load in loads_E])
        max_violation.append(max(loads_E) - 1)
    # a loss that is 0 in every layer is one that the recipe doesn't use
    losses = {}
    for name, of_layers in zip(LOSSES, zip(*losses_of_layers, strict=True), strict=True):
        if any(of_layers):
            losses[name] = list(of_layers)
    with_loads = step % LOADS_EVERY == 0 or step in (1, steps)
    return RoutersDone(
        step=step,
        layers=layers,
        max_violation=max_violation,
        drops=drops,
        entropy=entropy,
        losses=losses,
        loads=loads if with_loads else None,
    )
