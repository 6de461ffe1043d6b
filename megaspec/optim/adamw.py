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
        self._moments = {
            kind: {name: torch.zeros_like(m) for name, m in self.masters.items()} for kind in ("exp_avg", "exp_avg_sq")
        }
        held = {name: master for name, master in self.masters.items() if master.numel()}
        groups = [
            {"params": [m for m in held.values() if decays(m)], "decay": True},
            {"params": [m for m in held.values() if not decays(m)], "decay": False},
        ]
        groups = [g for g in groups if g["params"]]
        self._torch = None
        if groups:
            self._torch = torch.optim.AdamW(
                groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
            )
        self._steps = {}
        for name, master in held.items():
            self._steps[name] = torch.zeros((), dtype=torch.float32, device=master.device)
            self._torch.state[master] = {
                "step": self._steps[name],
                **{kind: moments[name] for kind, moments in self._moments.items()},
            }

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
            group["lr"], group["weight_decay"] = lr, weight_decay if group["decay"] else 0.0
        for name in self._steps:
            self.masters[name].grad = gradients[name]
        if divide_by.device.type == "cuda" and divide_by.dtype == torch.float32:
            self._torch.grad_scale, self._torch.found_inf = divide_by, skip
        else:  # the CPU kernel reads the scale in fp32 only
            torch._foreach_div_([gradients[name] for name in self._steps], divide_by)
            self._torch.grad_scale, self._torch.found_inf = None, skip.to(torch.float32)
        self._torch.step()
        self.write_back()
