"""What every optimizer is: master weights of at least fp32, whatever the model computes in."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def decays(parameter: Tensor) -> bool:
    """Weight decay is for matrices; norms, biases and other vectors get none."""
    return parameter.dim() >= 2


class MasterOptimizer:
    """Base: master weights beside the model's, written back after each update.

    `weights` are this rank's shares of the model's parameters, each with its parameter's number of dimensions, of any
    number of rows, none included. `masters` are the weights themselves where they are in fp32 or wider already.
    """

    masters: Mapping[str, Tensor]

    def __init__(self, weights: Mapping[str, Tensor]):
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        self.masters = self._start()
        first = next(iter(self.weights.values()), None)
        self._updates = torch.zeros((), dtype=torch.int64, device=None if first is None else first.device)

    def _start(self) -> Mapping[str, Tensor]:
        """The master weights, from the model's."""
        masters = {}
        for name, weight in self.weights.items():
            masters[name] = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return masters

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Kind -> parameter name -> tensor of the share's shape, in the master's dtype."""
        raise NotImplementedError

    def tensors(self) -> Iterable[Tensor]:
        """Master weights and states as they are kept, wherever they lie; where two are one tensor, it twice."""
        yield from self.masters.values()
        for by_name in self.state().values():
            yield from by_name.values()

    @torch.no_grad()
    def put(self, kind: str, name: str, value: Tensor) -> None:
        """Sets a share: of the master weights where `kind` is `master`, else of a kind of `state`.

        The way to change any of them; what `masters` and `state` return may be copies. `write_back` afterwards.
        """
        tensors = self.masters if kind == "master" else self.state()[kind]
        tensors[name].copy_(value)

    @property
    def updates(self) -> int:
        """Updates that were applied so far. Waits for the device."""
        return int(self._updates.item())

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)

    def count_update(self, skip: Tensor) -> None:
        """One update more, none where the scalar `skip` is 1."""
        # without any weights it starts on the CPU
        self._updates = self._updates.to(skip.device) + (skip == 0)

    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        """One step with gradients / `divide_by` (a scalar), nothing at all where the scalar `skip` is 1.

        Neither scalar is read by the host. The gradients may be overwritten.
        """
        raise NotImplementedError

    @torch.no_grad()
    def write_back(self, names: Iterable[str] | None = None) -> None:
        """Copies the master weights, or those of `names`, into the model's."""
        if names is None:
            names = self.masters
        # a master of the weight's own dtype is that weight
        weights: list[Tensor] = []
        masters: list[Tensor] = []
        for name in names:
            if self.masters[name].dtype != self.weights[name].dtype:
                weights.append(self.weights[name])
                masters.append(self.masters[name])
        if weights:
            torch._foreach_copy_(weights, masters)
