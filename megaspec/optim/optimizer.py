"""Optimizers over master weights: at least fp32, whatever the model computes in."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megaspec.optim.spec import AdamWSpec, OptimSpec, SgdSpec


def decays(parameter: Tensor) -> bool:
    """Weight decay is for matrices; norms, biases and other vectors get none."""
    return parameter.dim() >= 2


class MasterOptimizer:
    """Base: master weights beside the model's, written back after each update.

    `masters` are the parameters themselves where the model already computes in fp32 or wider.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            self.masters[name] = parameter.detach() if wide == parameter.dtype else parameter.detach().to(wide)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Kind -> parameter name -> tensor of the parameter's local shape, in the master's dtype."""
        raise NotImplementedError

    @property
    def updates(self) -> int:
        """Updates that were applied so far."""
        raise NotImplementedError

    @updates.setter
    def updates(self, count: int) -> None:
        raise NotImplementedError

    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        """One step with gradients / `divide_by` (a scalar), nothing at all where the scalar `skip` is 1.

        Neither scalar is read by the host.
        """
        raise NotImplementedError

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies the master weights into the model's."""
        pairs = [(self.parameters[n], m) for n, m in self.masters.items() if m.dtype != self.parameters[n].dtype]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])


class AdamW(MasterOptimizer):
    """AdamW through torch's fused kernel."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: AdamWSpec):
        super().__init__(parameters)
        groups = [
            {"params": [m for m in self.masters.values() if decays(m)], "decay": True},
            {"params": [m for m in self.masters.values() if not decays(m)], "decay": False, "weight_decay": 0.0},
        ]
        self._torch = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
        )
        for master in self.masters.values():
            self._torch.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            kind: {name: self._torch.state[master][kind] for name, master in self.masters.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }

    @property
    def updates(self) -> int:
        return int(self._torch.state[next(iter(self.masters.values()))]["step"].item())

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._torch.state.values():
            state["step"].fill_(count)

    @torch.no_grad()
    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        for group in self._torch.param_groups:
            group["lr"], group["weight_decay"] = lr, weight_decay if group["decay"] else 0.0
        for name, master in self.masters.items():
            master.grad = gradients[name]
        if divide_by.device.type == "cuda" and divide_by.dtype == torch.float32:
            self._torch.grad_scale, self._torch.found_inf = divide_by, skip
        else:  # the CPU kernel reads the scale in fp32 only
            torch._foreach_div_(list(gradients.values()), divide_by)
            self._torch.grad_scale, self._torch.found_inf = None, skip.to(torch.float32)
        self._torch.step()
        self.write_back()


class Sgd(MasterOptimizer):
    """v = momentum · v + g;  w = w − lr · (v + weight_decay · w)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: SgdSpec):
        super().__init__(parameters)
        self._momentum = spec.momentum
        self._velocity = {n: torch.zeros_like(m) for n, m in self.masters.items()} if spec.momentum else {}
        device = next(iter(self.masters.values())).device
        self._updates = torch.zeros((), dtype=torch.int64, device=device)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"velocity": self._velocity} if self._momentum else {}

    @property
    def updates(self) -> int:
        return int(self._updates.item())

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)

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
        self._updates += apply
        self.write_back()


OPTIMIZERS = {AdamWSpec: AdamW, SgdSpec: Sgd}


def build_optimizer(parameters: Mapping[str, nn.Parameter], spec: OptimSpec) -> MasterOptimizer:
    """The optimizer that a spec names, over the model's current weights."""
    return OPTIMIZERS[type(spec)](parameters, spec)
