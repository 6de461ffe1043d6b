"""AdamW with states of at least fp32."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megaspec.optim.master import MasterOptimizer, decays
from megaspec.optim.spec import AdamWSpec, MuonSpec


class AdamW(MasterOptimizer):
    """AdamW through torch's fused kernel."""

    def __init__(self, weights: Mapping[str, Tensor], spec: AdamWSpec | MuonSpec):
        super().__init__(weights)
        self._moments = {"exp_avg": self._zeros(), "exp_avg_sq": self._zeros()}
        # a share may have no elements, which torch's kernel refuses
        held = {name: master for name, master in self.masters.items() if master.numel()}
        matrices = [master for master in held.values() if decays(master)]
        vectors = [master for master in held.values() if not decays(master)]
        groups = []
        if matrices:
            groups.append({"params": matrices, "decay": True})
        if vectors:
            groups.append({"params": vectors, "decay": False})
        self._torch = None
        if groups:
            self._torch = torch.optim.AdamW(
                groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
            )
        # torch's state is made here, from our moments, so that both are the same tensors
        self._steps = {}
        for name, master in held.items():
            self._steps[name] = torch.zeros((), dtype=torch.float32, device=master.device)
            self._torch.state[master] = {
                "step": self._steps[name],
                "exp_avg": self._moments["exp_avg"][name],
                "exp_avg_sq": self._moments["exp_avg_sq"][name],
            }

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(master) for name, master in self.masters.items()}

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        return dict(self._moments)

    @MasterOptimizer.updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)
        for step in self._steps.values():
            step.fill_(count)

    @torch.no_grad()
    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        self.count_update(skip)
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        for name in self._steps:
            self.masters[name].grad = gradients[name]
        if divide_by.device.type == "cuda" and divide_by.dtype == torch.float32:
            self._torch.grad_scale = divide_by
            self._torch.found_inf = skip
        else:  # the CPU kernel reads the scale in fp32 only
            torch._foreach_div_([gradients[name] for name in self._steps], divide_by)
            self._torch.grad_scale = None
            self._torch.found_inf = skip.to(torch.float32)
        self._torch.step()
        self.write_back()
