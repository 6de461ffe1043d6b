"""What routers did in a step, of all layers of the model, as numbers that rank 0 can report."""

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.log.events import RoutersDone
from megaspec.model.kinds import has_experts, moe_of
from megaspec.nn.router import LOSSES
from megaspec.parallelism.expert import RouterStatistics
from megaspec.runtime.build import TrainState

# Steps from one report of every expert's load to the next.
LOADS_EVERY = 100


def layers_of(built: TrainState) -> list[str]:
    """The layers with experts of the whole model."""
    return [f"layers.{i}" for i, one in enumerate(has_experts(built.spec.model)) if one]


def router_numbers(built: TrainState, statistics: RouterStatistics | None) -> Tensor:
    """float64 [L, 2 + losses + E], the same on all ranks: drops, entropy, losses and loads of each layer with experts.

    [0] for a model without. Starts no transfer to the host.
    """
    layers, moe = layers_of(built), moe_of(built.spec.model)
    if moe is None:
        return torch.zeros(0, dtype=torch.float64, device=built.device)
    table = torch.zeros(len(layers), 2 + len(LOSSES) + moe.n_experts, dtype=torch.float64, device=built.device)
    if statistics is not None:
        columns = [statistics.drops_L, statistics.entropy_L, *(statistics.losses[name] for name in LOSSES)]
        rows = torch.cat([torch.stack(columns, dim=1), statistics.loads_LE], dim=1).to(torch.float64)
        for name, row in zip(statistics.layers, rows, strict=True):
            table[layers.index(name.removesuffix(".moe.router"))] = row
    group = built.mesh.group("pp")
    if group is not None:
        dist.all_reduce(table, group=group)
    return table


def routers_done(built: TrainState, step: int, numbers: list[float], *, steps: int) -> RoutersDone | None:
    """The event of a step from the flat numbers of `router_numbers`; None for a model without experts."""
    if not numbers:
        return None
    layers = layers_of(built)
    width = len(numbers) // len(layers)
    rows = [numbers[i * width : (i + 1) * width] for i in range(len(layers))]
    first = 2 + len(LOSSES)
    with_loads = step % LOADS_EVERY == 0 or step in (1, steps)
    return RoutersDone(
        step=step,
        layers=layers,
        max_violation=[max(row[first:]) - 1 for row in rows],
        drops=[row[0] for row in rows],
        entropy=[row[1] for row in rows],
        losses={name: [row[2 + i] for row in rows] for i, name in enumerate(LOSSES) if any(row[2 + i] for row in rows)},
        loads=[[round(x, 4) for x in row[first:]] for row in rows] if with_loads else None,
    )
