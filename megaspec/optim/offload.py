"""Master weights and optimizer state in the memory of the CPU, and their update there.

On a CPU all is done the same way, with copies in place of transfers.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megaspec.nn.transfer import Side, on_host
from megaspec.optim.master import MasterOptimizer
from megaspec.optim.optimizer import OptimizerMaker
from megaspec.optim.spec import OptimSpec, has_narrow_states
from megaspec_kernels.catalog import Use, choose, unmet

# Bytes of gradients that are fetched, and weights that are updated, at once.
GROUP_BYTES = 256e6


@dataclass
class _HostGroup:
    """Weights that are updated on the CPU together."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """In the model's format, where the optimizer writes them."""
    optimizer: MasterOptimizer


@dataclass(frozen=True)
class OptimizerOffload:
    """The strategy for master weights and optimizer state: those of a share of the weights lie in the CPU's memory."""

    spec: OptimSpec
    share: float
    """Of the weights' elements; 0: all stay."""

    def wrap_optimizer(self, make: OptimizerMaker) -> OptimizerMaker:
        """The maker of an optimizer of which a share lies on the CPU; `make` makes both of its parts."""
        if self.share == 0:
            return make
        return partial(OffloadedOptimizer, make=make, spec=self.spec, share=self.share)


class OffloadedOptimizer(MasterOptimizer):
    """An optimizer of which a share lies in the CPU's memory, and is updated there.

    Gradients of a group come over while the group before them is updated, and its new weights go back. Updating on the
    CPU moves 4 bytes of gradient and the model's 2 of weight for each weight; to stream master weights and two moments
    through the GPU would move 12 each way. The host waits for the gradients: there is no other way to update them here.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], *, make: OptimizerMaker, spec: OptimSpec, share: float, adamw: str
    ):
        """`make`: makes the optimizer that `spec` names. `share`: of the weights' elements. `adamw`: the implementation
        of AdamW; on the CPU the best that runs there where this one does not."""
        chosen = _chosen(weights, share)
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        self._device = next((weight.device for weight in self.weights.values()), torch.device("cpu"))
        on_device = {name: weight for name, weight in weights.items() if name not in chosen}
        self._here = make(on_device, adamw=adamw)
        make_on_host = partial(make, adamw=_on_cpu(adamw, spec))
        self._groups = [self._group(names, make_on_host) for names in _grouped(self.weights, chosen)]
        self._parts = [self._here, *(group.optimizer for group in self._groups)]
        self._part_of: dict[str, MasterOptimizer] = {}
        for part in self._parts:
            self._part_of |= dict.fromkeys(part.weights, part)
        self._side = Side(self._device)

    def _group(self, names: list[str], make: OptimizerMaker) -> _HostGroup:
        """Page-locked copies of weights, and room for their gradients."""
        weights: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        for name in names:
            weight = self.weights[name]
            weights[name] = on_host(weight).copy_(weight)
            wide = torch.promote_types(weight.dtype, torch.float32)
            gradients[name] = torch.zeros(weight.shape, dtype=wide, pin_memory=weight.is_cuda)
        return _HostGroup(gradients, weights, make(weights))

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """In the order of the weights; those of the share in the CPU's memory."""
        return {name: self._part_of[name].masters[name] for name in self.weights}

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        by_kind: dict[str, dict[str, Tensor]] = {}
        for part in self._parts:
            for kind, tensors in part.state().items():
                by_kind.setdefault(kind, {}).update(tensors)
        # in the order of the weights
        ordered: dict[str, Mapping[str, Tensor]] = {}
        for kind, tensors in by_kind.items():
            ordered[kind] = {name: tensors[name] for name in self.weights}
        return ordered

    def tensors(self) -> Iterable[Tensor]:
        for part in self._parts:
            yield from part.tensors()

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
            divide_by_here = on_host(divide_by).copy_(divide_by, non_blocking=True)
            skip_here = on_host(skip).copy_(skip, non_blocking=True)
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
                group.gradients, lr=lr, weight_decay=weight_decay, divide_by=divide_by_here, skip=skip_here
            )
            self._send(group)
        self._join()

    @torch.no_grad()
    def write_back(self, names: Iterable[str] | None = None) -> None:
        """Copies the master weights, or those of `names`, into the model's."""
        wanted = self.weights.keys() if names is None else set(names)
        for part in self._parts:
            part.write_back([name for name in part.weights if name in wanted])
        for group in self._groups:
            self._send(group)
        self._join()

    def _send(self, group: _HostGroup) -> None:
        """Starts the way of new weights into the model."""
        beside = nullcontext() if self._side.stream is None else torch.cuda.stream(self._side.stream)
        with beside:
            for name, weight in group.weights.items():
                self.weights[name].copy_(weight, non_blocking=True)

    def _join(self) -> None:
        if self._side.stream is not None:
            torch.cuda.current_stream().wait_stream(self._side.stream)


def _on_cpu(adamw: str, spec: OptimSpec) -> str:
    """The implementation of AdamW for weights in the CPU's memory."""
    use = Use(narrow_states=has_narrow_states(spec))
    if unmet("adamw", adamw, device="cpu", sm=0, use=use) is None:
        return adamw
    return choose("adamw", device="cpu", sm=0, use=use)


def _chosen(weights: Mapping[str, Tensor], share: float) -> set[str]:
    """The largest tensors that fit into a share of all elements."""
    sizes = {name: weight.numel() for name, weight in weights.items()}
    room = share * sum(sizes.values())
    chosen: set[str] = set()
    for name in sorted(sizes, key=sizes.get, reverse=True):
        if sizes[name] <= room:
            chosen.add(name)
            room -= sizes[name]
    return chosen


def _grouped(weights: Mapping[str, Tensor], chosen: set[str]) -> list[list[str]]:
    """The chosen ones in their order, in groups of about GROUP_BYTES of gradients."""
    groups: list[list[str]] = []
    bytes_in_group = GROUP_BYTES  # full: the first one begins a group
    for name, weight in weights.items():
        if name not in chosen:
            continue
        if bytes_in_group >= GROUP_BYTES:
            groups.append([])
            bytes_in_group = 0
        groups[-1].append(name)
        bytes_in_group += 4 * weight.numel()
    return groups
