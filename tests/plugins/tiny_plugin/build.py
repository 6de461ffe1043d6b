"""What ranks build for the example."""

# B sequences, T tokens, D model

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspec.data.source import EVALUATION_SAMPLES, Sample
from megaspec.log.events import Event, StepDone
from megaspec.model.gpt.model import Gpt
from megaspec.nn.mlp import GeluMlp
from megaspec.optim.master import decays
from megaspec.optim.sgd import Sgd
from megaspec_kernels.registry import Kernels
from tiny_plugin import CountSpec, CsvSpec, LionSpec, SquaredSpec


class SquaredMlp(GeluMlp):
    """down(relu(up(x)) ^ power)."""

    power: int

    def forward(self, x_BTD: Tensor, noise: object) -> Tensor:
        return self.dropout(self.w_down(F.relu(self.w_up(x_BTD)) ** self.power), noise)


def squared(spec: SquaredSpec, kernels: Kernels) -> Gpt:
    """GPT-2 with another activation."""
    model = Gpt(spec, kernels)
    for layer in model.layers.values():
        layer.mlp.__class__, layer.mlp.power = SquaredMlp, spec.power
    return model


class Lion(Sgd):
    """w = w - lr (sign(beta v + (1 - beta) g) + weight_decay w);  v = momentum v + (1 - momentum) g."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: LionSpec):
        super().__init__(parameters, spec)
        self._beta = spec.beta

    @torch.no_grad()
    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        apply = skip == 0
        for name, master in self.masters.items():
            gradient, velocity = gradients[name] / divide_by, self._velocity[name]
            step = torch.sign(velocity.lerp(gradient, 1 - self._beta))
            velocity.copy_(torch.where(apply, velocity.lerp(gradient, 1 - self._momentum), velocity))
            step = step + weight_decay * master if decays(master) else step
            master.copy_(torch.where(apply, master - lr * step, master))
        self.count_update(skip)
        self.write_back()


class Csv:
    """Writes `step,loss`."""

    def __init__(self, spec: CsvSpec, run_dir: Path, step: int):
        self._file = (run_dir / spec.file).open("a")

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._file.write(f"{event.step},{event.loss}\n")

    def close(self) -> None:
        self._file.close()


class Count:
    """Sequences that count."""

    def __init__(self, spec: CountSpec, *, split: str, seed: int, segments: tuple[int, ...], vocab_size: int):
        self._spec, self._n = spec, sum(segments) if split == "train" else EVALUATION_SAMPLES

    def __len__(self) -> int:
        return self._n

    def read(self, position: int) -> Sample:
        length = self._spec.seq_len
        tokens = (np.arange(length + 1, dtype=np.int64) + position) % self._spec.vocab_size
        return Sample(tokens, np.ones(length, dtype=bool), np.zeros(length, dtype=np.int32))
