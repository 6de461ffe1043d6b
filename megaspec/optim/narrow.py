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
    """Tensors that are decoded when they are asked for: what is written into one may be lost, see
    MasterOptimizer.put."""

    def __init__(self, names: Mapping[str, Tensor], read: Callable[[str], Tensor]):
        self._names = names
        self._read = read

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
        # before the base class makes the masters
        self._is_split = formats.master == "fp16"
        super().__init__(weights)
        self._spec = spec
        self._kernel = kernel
        # Parameters of which this rank holds anything, by their number: the kernel takes lists.
        held = [name for name, weight in self.weights.items() if weight.numel()]
        self._number = {name: number for number, name in enumerate(held)}
        self._moments = {
            "exp_avg": self._moment(FORMATS.get(formats.exp_avg)),
            "exp_avg_sq": self._moment(FORMATS.get(formats.exp_avg_sq)),
        }
        # Random numbers depend on the parameter's name, so that copies of a share are rounded alike.
        keys = [crc32(name.encode()) for name in held]
        self._keys = torch.tensor(keys, dtype=torch.int64, device=self._updates.device)

    def _start(self) -> Mapping[str, Tensor]:
        """Fills `_kept`: the masters, or the 16 bits of each that the model's weights lack of them."""
        if not self._is_split:
            self._kept = dict(super()._start())
            return self._kept
        others = sorted({str(weight.dtype) for weight in self.weights.values()} - {"torch.bfloat16"})
        assert not others, f"optim.formats.master=fp16 is the rest of bf16 weights, these are {others}"
        self._kept = {name: torch.zeros_like(weight, dtype=torch.int16) for name, weight in self.weights.items()}
        return Decoded(self.weights, lambda name: joined(self.weights[name], self._kept[name]))

    def _wide(self, name: str) -> torch.dtype:
        """What a weight is computed in: at least fp32."""
        return torch.promote_types(self.weights[name].dtype, torch.float32)

    def _moment(self, form: Format | None) -> Moments:
        """Zeros in a format; None: in what the weight is computed in."""
        values: list[Tensor] = []
        for name in self._number:
            dtype = self._wide(name) if form is None else form.dtype
            values.append(torch.zeros_like(self.weights[name], dtype=dtype))
        # one scale and one largest value for each parameter
        wide = next((self._wide(name) for name in self._number), torch.float32)
        largest = torch.zeros(len(values), dtype=wide, device=self._updates.device)
        return Moments(values, form, torch.ones_like(largest), largest)

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Decoded, so that any other formats and shares can take it; what is kept in at least fp32 is itself."""
        return {kind: Decoded(self.weights, lambda name, kind=kind: self._read(kind, name)) for kind in self._moments}

    def tensors(self) -> Iterable[Tensor]:
        yield from self._kept.values()
        for moment in self._moments.values():
            yield from moment.values

    def _read(self, kind: str, name: str) -> Tensor:
        moment = self._moments[kind]
        number = self._number.get(name)
        wide = self._wide(name)
        if number is None:
            return torch.zeros_like(self.weights[name], dtype=wide)
        if moment.form is None:
            # as it is kept: neither a save nor a check of memory makes a copy
            return moment.values[number]
        if kind == "exp_avg":
            return decoded(moment.values[number], moment.scale[number], wide)
        return decoded_square(moment.values[number], moment.form, moment.scale[number], wide)

    @torch.no_grad()
    def put(self, kind: str, name: str, value: Tensor) -> None:
        if kind != "master":
            self._put_moment(kind, name, value)
        elif self._is_split:
            high, low = split(value.to(torch.float32))
            self.weights[name].copy_(high)
            self._kept[name].copy_(low)
        else:
            super().put(kind, name, value)

    def _put_moment(self, kind: str, name: str, value: Tensor) -> None:
        moment = self._moments[kind]
        number = self._number.get(name)
        if number is None:
            return
        value = value.to(self._wide(name))
        # Formats with a scale keep the square root of the second moment: half the range of exponents.
        if kind == "exp_avg":
            encode = encoded
            magnitude = value.abs()
        else:
            encode = encoded_square
            is_root = moment.form is not None and moment.form.has_scale
            magnitude = value.sqrt() if is_root else value.abs()
        scale = scale_for(magnitude.max(), moment.form)
        moment.values[number].copy_(encode(value, moment.form, scale, None))
        moment.scale[number] = scale
        # the next update chooses its scale by it
        moment.largest[number] = decoded(moment.values[number], scale, value.dtype).abs().max()

    @torch.no_grad()
    def write_back(self, names: Iterable[str] | None = None) -> None:
        """Copies the master weights into the model's, which hold them already where they are half of them."""
        if not self._is_split:
            super().write_back(names)

    @torch.no_grad()
    def update(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        if self._number:
            spec = self._spec
            weights = self._listed(self.weights)
            keys = self._keys
            # Another key for each parameter and update, 32 bits, for moments that are rounded at random; the golden
            # ratio keeps keys of neighbours apart.
            if any(moment.form is not None for moment in self._moments.values()):
                keys = hashed((self._keys + self._updates * 0x9E3779B9) & 0xFFFFFFFF)
            self._kernel(
                weights,
                self._listed(self._kept),
                self._moments["exp_avg"],
                self._moments["exp_avg_sq"],
                self._listed(gradients),
                list(map(decays, weights)),
                keys,
                Step(lr, weight_decay, spec.beta1, spec.beta2, spec.eps, divide_by, skip, self._updates),
            )
        self.count_update(skip)

    def _listed(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Of the parameters that this rank holds, in the order of their numbers."""
        return [tensors[name] for name in self._number]
