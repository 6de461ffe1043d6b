"""Master weights and optimizer state in the memory of the CPU, and their update there.

On a CPU all is done the same way, with copies in place of transfers.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspec.nn.transfer import Side, on_host
from megaspec.optim.master import MasterOptimizer
from megaspec.optim.optimizer import build_optimizer
from megaspec.optim.spec import OptimSpec, has_narrow_states
from megaspec_kernels.catalog import Use, choose, unmet

# Bytes of gradients that are fetched, and weights that are updated, at once.
GROUP_BYTES = 256e6


@dataclass
class _Group:
    """Weights that are updated on the CPU together."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """In the model's format, where the optimizer writes them."""
    optimizer: MasterOptimizer


class OffloadedOptimizer(MasterOptimizer):
    """An optimizer of which a share lies in the CPU's memory, and is updated there.

    Gradients of a group come over while the group before them is updated, and its new weights go back. Updating on the
    CPU moves 4 bytes of gradient and the model's 2 of weight for each weight; to stream master weights and two moments
    through the GPU would move 12 each way. The host waits for the gradients: there is no other way to update them here.
    """

    def __init__(self, weights: Mapping[str, Tensor], spec: OptimSpec, *, share: float, adamw: str):
        """`share`: of the weights' elements. `adamw`: the implementation of AdamW; on the CPU the best that runs there
        where this one does not."""
        chosen = _chosen({name: weight.numel() for name, weight in weights.items()}, share)
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        self._device = next((w.device for w in self.weights.values()), torch.device("cpu"))
        self._here = build_optimizer({n: w for n, w in weights.items() if n not in chosen}, spec, adamw=adamw)
        away = _on_cpu(adamw, spec)
        self._groups = [self._group(names, spec, away) for names in _grouped(self.weights, chosen)]
        self._parts = [self._here, *(group.optimizer for group in self._groups)]
        self._part_of = {name: part for part in self._parts for name in part.weights}
        self._side = Side(self._device)

    def _group(self, names: list[str], spec: OptimSpec, adamw: str) -> _Group:
        weights, gradients = {}, {}
        for name in names:
            weight = self.weights[name]
            weights[name] = on_host(weight).copy_(weight)
            wide = torch.promote_types(weight.dtype, torch.float32)
            gradients[name] = torch.zeros(weight.shape, dtype=wide, pin_memory=weight.is_cuda)
        return _Group(gradients, weights, build_optimizer(weights, spec, adamw=adamw))

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """In the order of the weights; those of the share in the CPU's memory."""
        return {name: self._part_of[name].masters[name] for name in self.weights}

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        states = {id(part): part.state() for part in self._parts}
        kinds = dict.fromkeys(kind for state in states.values() for kind in state)
        return {kind: {name: states[id(self._part_of[name])][kind][name] for name in self.weights} for kind in kinds}

    def put(self, kind: str, name: str, value: Tensor) -> None:
        self._part_of[name].put(kind, name, value)

    @property
    def updates(self) -> int:
        """Updates that were applied so far. Waits for the device."""
        return self._here.updates

    @updates.setter
    def updates(self, count: int) -> None:
        for part in self._parts:
            part.updates = count

    @torch.no_grad()
    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        arrived = []
        with self._side.after_now():
            scalars = [on_host(x).copy_(x, non_blocking=True) for x in (divide_by, skip)]
            for group in self._groups:
                for name, here in group.gradients.items():
                    here.copy_(gradients[name], non_blocking=True)
                arrived.append(self._side.done())
        # the device's own share runs beside the transfers
        here = {name: gradients[name] for name in self._here.weights}
        self._here.update(here, lr=lr, weight_decay=weight_decay, divide_by=divide_by, skip=skip)
        for group, event in zip(self._groups, arrived, strict=True):
            if event is not None:
                event.synchronize()
            group.optimizer.update(
                group.gradients, lr=lr, weight_decay=weight_decay, divide_by=scalars[0], skip=scalars[1]
            )
            self._send(group)
        self._join()

    @torch.no_grad()
    def write_back(self, names: Iterable[str] | None = None) -> None:
        """Copies the master weights, or those of `names`, into the model's."""
        wanted = set(self.weights if names is None else names)
        self._here.write_back([name for name in self._here.weights if name in wanted])
        for group in self._groups:
            group.optimizer.write_back([name for name in group.weights if name in wanted])
            self._send(group)
        self._join()

    def _send(self, group: _Group) -> None:
        """Starts the way of new weights into the model."""
        with nullcontext() if self._side.stream is None else torch.cuda.stream(self._side.stream):
            for name, weight in group.weights.items():
                self.weights[name].copy_(weight, non_blocking=True)

    def _join(self) -> None:
        if self._side.stream is not None:
            torch.cuda.current_stream().wait_stream(self._side.stream)


def _on_cpu(adamw: str, spec: OptimSpec) -> str:
    """The implementation of AdamW for weights in the CPU's memory."""
    use = Use(narrow_states=has_narrow_states(spec))
    is_able = unmet("adamw", adamw, device="cpu", sm=0, use=use) is None
    return adamw if is_able else choose("adamw", device="cpu", sm=0, use=use)


def _chosen(sizes: Mapping[str, int], share: float) -> set[str]:
    """The largest tensors that fit into a share of all elements."""
    room, chosen = share * sum(sizes.values()), set()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[name] <= room:
            chosen.add(name)
            room -= sizes[name]
    return chosen


def _grouped(weights: Mapping[str, Tensor], chosen: set[str]) -> list[list[str]]:
    """The chosen ones in their order, in groups of about GROUP_BYTES of gradients."""
    groups: list[list[str]] = []
    size = GROUP_BYTES
    for name in (n for n in weights if n in chosen):
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += 4 * weights[name].numel()
    return groups
