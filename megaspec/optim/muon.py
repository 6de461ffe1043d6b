"""Muon: momentum that is orthogonalised matrix by matrix. Which rank does that is no business of this file."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from megaspec.optim.master import MasterOptimizer
from megaspec.optim.narrow import build_adamw
from megaspec.optim.newton_schulz import orthogonalised_all, working_dtype
from megaspec.optim.spec import MuonSpec

Slices = tuple[slice, ...]


class Matrices(Protocol):
    """Whole matrices out of shares, and back; see parallelism/whole_matrices.py."""

    @property
    def names(self) -> frozenset[str]:
        """The parameters that are hidden matrices."""
        ...

    def transform(
        self,
        take: Callable[[str, Slices], Tensor],
        change: Callable[[list[Tensor]], list[Tensor]],
        put: Callable[[str, Slices, Tensor], None],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Calls `put(name, where, part of the changed matrix)` for every part of this rank's shares.

        `take(name, where)` is the part of a share that matrices are put together from, in `dtype`; `change` is called
        with whole matrices [O, I]. All ranks must call it.
        """
        ...


def step_scale(spec: MuonSpec, shape: tuple[int, int]) -> float:
    """The factor on an orthogonal step of a matrix [O, I]; see MuonSpec.scale."""
    n_out, n_in = shape
    by_kind = {
        "spectral": sqrt(max(n_out, n_in)),
        "unit_rms_norm": sqrt(n_out / n_in),
        "shape_scaling": sqrt(max(1.0, n_out / n_in)),
    }
    return spec.extra_scale * by_kind[spec.scale]


class Muon(MasterOptimizer):
    """v = momentum · v + (1 − momentum) · g;  w = w − lr · (scale · orthogonalised(u) + weight_decay · w).

    u is v, or with Nesterov momentum · v + (1 − momentum) · g. AdamW, by the implementation `adamw`, for what is no
    hidden matrix.
    """

    def __init__(self, weights: Mapping[str, Tensor], spec: MuonSpec, matrices: Matrices, *, adamw: str):
        hidden = {name: weight for name, weight in weights.items() if name in matrices.names}
        super().__init__(hidden)
        self._spec = spec
        self._matrices = matrices
        self._momentum = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        rest = {name: weight for name, weight in weights.items() if name not in hidden}
        self._rest = build_adamw(rest, spec, kernel=adamw)
        masters = {**self.masters, **self._rest.masters}
        # in the order of the model's weights, whichever of the two updates them
        self.weights = dict(weights)
        self.masters = {name: masters[name] for name in weights}

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        return {"momentum": self._momentum, **self._rest.state()}

    def tensors(self) -> Iterable[Tensor]:
        yield from self.masters.values()
        yield from self._momentum.values()
        yield from self._rest.tensors()

    @MasterOptimizer.updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)
        self._rest.updates = count

    @torch.no_grad()
    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        apply = skip == 0  # on the device: the host does not read it
        momentum = self._spec.momentum
        # v, in place; the gradient stays for Nesterov's u
        for name, velocity in self._momentum.items():
            gradient = gradients[name].div_(divide_by)
            velocity.copy_(torch.where(apply, velocity.lerp(gradient, 1 - momentum), velocity))

        # u of a part of a share, and what is done to the part with the orthogonalised u
        def direction(name: str, where: Slices) -> Tensor:
            velocity = self._momentum[name][where]
            if not self._spec.nesterov:
                return velocity
            return velocity.lerp(gradients[name][where], 1 - momentum)

        def step(name: str, where: Slices, change: Tensor) -> None:
            master = self.masters[name][where]
            stepped = master - lr * (change.to(master.dtype) + weight_decay * master)
            master.copy_(torch.where(apply, stepped, master))

        like = next(iter(self.masters.values()), skip)
        self._matrices.transform(
            direction, partial(_steps, self._spec), step, dtype=working_dtype(like), device=like.device
        )
        self._rest.update(gradients, lr=lr, weight_decay=weight_decay, divide_by=divide_by, skip=skip)
        self.count_update(skip)
        self.write_back(self._momentum)


def _steps(spec: MuonSpec, wholes: list[Tensor]) -> list[Tensor]:
    """Whole directions -> whole steps."""
    results = orthogonalised_all(wholes, steps=spec.ns_steps, coefficients=spec.coefficients)
    return [result * step_scale(spec, tuple(result.shape)) for result in results]
