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
from megaspec.nn.dropout import Dropout
from megaspec.nn.linear import Linear
from megaspec.nn.mlp.module import FeedForward
from megaspec.nn.norm.module import Norm
from megaspec.optim.master import decays
from megaspec.optim.sgd import Sgd
from tiny_plugin import CountSpec, CsvSpec, LionSpec, SquaredSpec, TanhSpec


class SquaredMlp(FeedForward):
    """down(relu(up(x)) ^ power), [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: SquaredSpec, *, out: Dropout):
        super().__init__()
        self.w_up = Linear(d_model, d_ffn)
        self.w_down = Linear(d_ffn, d_model, residual=True)
        self.power, self.dropout = spec.power, out

    def into(self, x_BTD: Tensor) -> Tensor:
        return self.w_up(x_BTD)

    def activate(self, up: Tensor) -> Tensor:
        return F.relu(up) ** self.power


class Tanh(Norm):
    """tanh(alpha x) · weight + bias, [..., D] -> [..., D]."""

    def __init__(self, d: int, spec: TanhSpec):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(d))
        self.bias = nn.Parameter(torch.empty(d))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (torch.tanh(self.alpha * x.to(wide)) * self.weight + self.bias).to(x.dtype)


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
