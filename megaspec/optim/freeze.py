"""Weights that a run does not train: they lie in the model and nowhere else."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from megaspec.core.weight_facts import WeightFacts
from megaspec.nn.decoder import Decoder
from megaspec.nn.moe.router import Router
from megaspec.optim.master import MasterOptimizer
from megaspec.optim.optimizer import OptimizerMaker


class Freeze:
    """The strategy for `train.trainable`: autograd makes no gradient of a frozen parameter, no optimizer sees it."""

    def __init__(self, names: frozenset[str], facts: Mapping[str, WeightFacts]):
        """`names`: of what is trained, routers' biases included. `facts`: of the model's parameters."""
        self._names = names
        self._has_frozen = not all(one.is_trained for one in facts.values())

    def apply(self, chunk: Decoder) -> None:
        """Marks the parameters and routers of a chunk. Before anything is hung on them."""
        for name, parameter in chunk.global_parameters().items():
            parameter.requires_grad_(name in self._names)
        for name, module in chunk.named_modules():
            if isinstance(module, Router):
                module.moves_bias = f"{name}.expert_bias" in self._names

    def wrap_optimizer(self, make: OptimizerMaker) -> OptimizerMaker:
        """The maker of an optimizer of the trained weights, beside which the frozen ones stay as they are."""
        if not self._has_frozen:
            return make
        return partial(PartOptimizer, make=make, trained=self._names)


class PartOptimizer(MasterOptimizer):
    """An optimizer over some of the weights. The others, in the model's own format, are their own master weights."""

    def __init__(self, weights: Mapping[str, Tensor], *, make: OptimizerMaker, trained: frozenset[str], adamw: str):
        """`make`: makes the optimizer of those whose names are `trained`. `adamw`: the implementation of AdamW."""
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        self._frozen = {name: weight for name, weight in self.weights.items() if name not in trained}
        self._trained = make({name: one for name, one in weights.items() if name in trained}, adamw=adamw)

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """In the order of the weights."""
        found = {**self._trained.masters, **self._frozen}
        return {name: found[name] for name in self.weights}

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        return self._trained.state()

    def tensors(self) -> Iterable[Tensor]:
        yield from self._trained.tensors()
        yield from self._frozen.values()

    @torch.no_grad()
    def put(self, kind: str, name: str, value: Tensor) -> None:
        if name in self._frozen:
            assert kind == "master", f"{name} is frozen and has no {kind}"
            self._frozen[name].copy_(value)
        else:
            self._trained.put(kind, name, value)

    @property
    def updates(self) -> int:
        """Updates that were applied so far. Waits for the device."""
        return self._trained.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._trained.updates = count

    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        self._trained.update(gradients, lr=lr, weight_decay=weight_decay, divide_by=divide_by, skip=skip)

    def write_back(self, names: Iterable[str] | None = None) -> None:
        """Copies the master weights, or those of `names`, into the model's. A frozen weight is there already."""
        if names is not None:
            names = [name for name in names if name not in self._frozen]
        self._trained.write_back(names)
