"""AdamW through a kernel of ours: its master weights and moments may be kept in 16 or 8 bits."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from zlib import crc32

import torch
from torch import Tensor

from megaspec.optim.adamw import AdamW
from megaspec.optim.master import MasterOptimizer, decays
from megaspec.optim.spec import AdamWSpec, MuonSpec, StateFormats
from megaspec_kernels.adamw.formats import (
    FORMATS,
    Format,
    decoded,
    decoded_square,
    encoded,
    encoded_square,
    hashed,
    joined,
    scale_for,
    split,
)
from megaspec_kernels.adamw.reference import Moments, Step
from megaspec_kernels.registry import REGISTRY, AdamWKernel


class Decoded(Mapping[str, Tensor]):
    """Tensors that are decoded when they are asked for: what is written into one is lost, see MasterOptimizer.put."""

    def __init__(self, names: Mapping[str, Tensor], read: Callable[[str], Tensor]):
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def build_adamw(weights: Mapping[str, Tensor], spec: AdamWSpec | MuonSpec, *, kernel: str) -> MasterOptimizer:
    """AdamW with the states that the spec names, updated by the implementation of adamw of that name."""
    formats = spec.formats if isinstance(spec, AdamWSpec) else StateFormats()
    if kernel == "torch":
        assert formats == StateFormats(), f"kernels.adamw=torch keeps states in 32 bits, optim.formats={formats}"
        return AdamW(weights, spec)
    return NarrowAdamW(weights, spec, formats=formats, kernel=REGISTRY["adamw"][kernel])


class NarrowAdamW(MasterOptimizer):
    """AdamW with the formats of StateFormats, updated by `kernel`.

    A master weight of fp16 is a bf16 weight and its 16 remaining bits: fp32, bit for bit. Moments are rounded at random
    with the right expected value (see the kernel's formats.py). Copies of a share on several ranks stay equal.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], spec: AdamWSpec | MuonSpec, *, formats: StateFormats, kernel: AdamWKernel
    ):
        self._splits = formats.master == "fp16"
        super().__init__(weights)
        self._spec, self._kernel = spec, kernel
        self._held = {name: i for i, name in enumerate(n for n, w in self.weights.items() if w.numel())}
        self._moments = {
            "exp_avg": self._moment(FORMATS.get(formats.exp_avg)),
            "exp_avg_sq": self._moment(FORMATS.get(formats.exp_avg_sq)),
        }
        device = self._updates.device
        self._keys = torch.tensor([crc32(n.encode()) for n in self._held], dtype=torch.int64, device=device)

    def _start(self) -> Mapping[str, Tensor]:
        if not self._splits:
            self._kept = dict(super()._start())
            return self._kept
        others = sorted({str(w.dtype) for w in self.weights.values()} - {"torch.bfloat16"})
        assert not others, f"optim.formats.master=fp16 is the rest of bf16 weights, these are {others}"
        self._kept = {name: torch.zeros_like(w, dtype=torch.int16) for name, w in self.weights.items()}
        return Decoded(self.weights, lambda name: joined(self.weights[name], self._kept[name]))

    def _wide(self, name: str) -> torch.dtype:
        return torch.promote_types(self.weights[name].dtype, torch.float32)

    def _moment(self, form: Format | None) -> Moments:
        wides = {name: self._wide(name) for name in self._held}
        values = [torch.zeros_like(self.weights[n], dtype=form.dtype if form else wide) for n, wide in wides.items()]
        wide = next(iter(wides.values()), torch.float32)
        zeros = torch.zeros(len(values), dtype=wide, device=self._updates.device)
        return Moments(values, form, torch.ones_like(zeros), zeros)

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Decoded: any other formats and shares can take it."""
        return {kind: Decoded(self.weights, lambda name, kind=kind: self._read(kind, name)) for kind in self._moments}

    def _read(self, kind: str, name: str) -> Tensor:
        moment, i, wide = self._moments[kind], self._held.get(name), self._wide(name)
        if i is None:
            return torch.zeros_like(self.weights[name], dtype=wide)
        if kind == "exp_avg":
            return decoded(moment.values[i], moment.scale[i], wide)
        return decoded_square(moment.values[i], moment.form, moment.scale[i], wide)

    @torch.no_grad()
    def put(self, kind: str, name: str, value: Tensor) -> None:
        if kind != "master":
            self._put_moment(kind, name, value)
        elif self._splits:
            high, low = split(value.to(torch.float32))
            self.weights[name].copy_(high)
            self._kept[name].copy_(low)
        else:
            super().put(kind, name, value)

    def _put_moment(self, kind: str, name: str, value: Tensor) -> None:
        moment, i = self._moments[kind], self._held.get(name)
        if i is None:
            return
        value = value.to(self._wide(name))
        is_root = kind == "exp_avg_sq" and moment.form is not None and moment.form.has_scale
        scale = scale_for((value.sqrt() if is_root else value.abs()).max(), moment.form)
        encode = encoded if kind == "exp_avg" else encoded_square
        moment.values[i].copy_(encode(value, moment.form, scale, None))
        moment.scale[i] = scale
        moment.largest[i] = decoded(moment.values[i], scale, value.dtype).abs().max()

    @torch.no_grad()
    def write_back(self, names: Iterable[str] | None = None) -> None:
        """Copies the master weights into the model's, which hold them already where they are half of them."""
        if not self._splits:
            super().write_back(names)

    @torch.no_grad()
    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        if self._held:
            weights = [self.weights[name] for name in self._held]
            spec = self._spec
            self._kernel(
                weights,
                [self._kept[name] for name in self._held],
                self._moments["exp_avg"],
                self._moments["exp_avg_sq"],
                [gradients[name] for name in self._held],
                [decays(weight) for weight in weights],
                hashed((self._keys + self._updates * 0x9E3779B9) & 0xFFFFFFFF),
                Step(lr, weight_decay, spec.beta1, spec.beta2, spec.eps, divide_by, skip, self._updates),
            )
        self.count_update(skip)
