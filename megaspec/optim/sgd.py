"""Stochastic gradient descent."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megaspec.optim.master import MasterOptimizer, decays
from megaspec.optim.spec import SgdSpec


class Sgd(MasterOptimizer):
    """v = momentum · v + g;  w = w − lr · (v + weight_decay · w)."""

    def __init__(self, weights: Mapping[str, Tensor], spec: SgdSpec):
        super().__init__(weights)
        self._momentum = spec.momentum
        self._velocity: dict[str, Tensor] = {}
        if spec.momentum:
            self._velocity = {name: torch.zeros_like(master) for name, master in self.masters.items()}

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        if not self._momentum:
            return {}
        return {"velocity": self._velocity}

    @torch.no_grad()
    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        apply = skip == 0
        for name, master in self.masters.items():
            step = gradients[name] / divide_by
            if self._momentum:
                velocity = self._velocity[name]
                step = velocity * self._momentum + step
                velocity.copy_(torch.where(apply, step, velocity))
            if decays(master):
                step = step + weight_decay * master
            master.copy_(torch.where(apply, master - lr * step, master))
        self.count_update(skip)
        self.write_back()
