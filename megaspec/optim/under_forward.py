"""An update that runs beside the next step's forward pass, in its order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megaspec.core.update_group import UpdateGroup
from megaspec.nn.transfer import Deferred
from megaspec.optim.master import MasterOptimizer
from megaspec.optim.optimizer import OptimizerMaker


@dataclass(frozen=True)
class UpdateUnderForward:
    """The strategy for `parallelism.update`."""

    sms: int
    """SMs of a GPU that the update of what is not exposed may hold."""

    def wrap_optimizer(
        self, make: OptimizerMaker, *, groups: Sequence[UpdateGroup], deferred: Deferred | None
    ) -> OptimizerMaker:
        """The maker of an optimizer that updates one group after the other, as pieces of `deferred` of their numbers;
        None: updates are made at once, all together."""
        if deferred is None:
            return make
        return partial(OptimizerInGroups, make=make, groups=groups, deferred=deferred, sms=self.sms)


class OptimizerInGroups(MasterOptimizer):
    """An optimizer for each group. `update` returns before weights have changed: who reads a model's weights waits for
    their groups, and all that is asked of this class waits for all of them."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        make: OptimizerMaker,
        groups: Sequence[UpdateGroup],
        deferred: Deferred,
        sms: int,
        adamw: str,
    ):
        """`make`: makes the optimizer of a group. `groups`: together all of the weights."""
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        self._deferred = deferred
        self.parts: list[MasterOptimizer] = []
        self._part_of: dict[str, MasterOptimizer] = {}
        for group in groups:
            mine = {name: weights[name] for name in group.names}
            part = make(mine, adamw=adamw, sms=None if group.is_exposed else sms)
            self.parts.append(part)
            self._part_of |= dict.fromkeys(group.names, part)
        assert self._part_of.keys() == self.weights.keys(), "groups do not hold each weight once"
        if not self.parts:
            # a rank that trains nothing counts updates all the same
            self.parts.append(make({}, adamw=adamw))

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """In the order of the weights."""
        self._deferred.join()
        by_part = {id(part): part.masters for part in self.parts}
        return {name: by_part[id(self._part_of[name])][name] for name in self.weights}

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        self._deferred.join()
        by_kind: dict[str, dict[str, Tensor]] = {}
        for part in self.parts:
            for kind, tensors in part.state().items():
                by_kind.setdefault(kind, {}).update(tensors)
        # in the order of the weights
        ordered: dict[str, Mapping[str, Tensor]] = {}
        for kind, tensors in by_kind.items():
            ordered[kind] = {name: tensors[name] for name in self.weights}
        return ordered

    def put(self, kind: str, name: str, value: Tensor) -> None:
        self._deferred.join()
        self._part_of[name].put(kind, name, value)

    @property
    def updates(self) -> int:
        """Updates that were applied so far. Waits for the device."""
        self._deferred.join()
        return self.parts[0].updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._deferred.join()
        for part in self.parts:
            part.updates = count

    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        pieces = []
        for part in self.parts:
            mine = {name: gradients[name] for name in part.weights}
            pieces.append(partial(part.update, mine, lr=lr, weight_decay=weight_decay, divide_by=divide_by, skip=skip))
        self._deferred.start(pieces)

    @torch.no_grad()
    def write_back(self, names: Iterable[str] | None = None) -> None:
        """Copies the master weights, or those of `names`, into the model's."""
        self._deferred.join()
        wanted = self.weights.keys() if names is None else set(names)
        for part in self.parts:
            part.write_back([name for name in part.weights if name in wanted])
