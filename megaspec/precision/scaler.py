"""Dynamic loss scale for fp16, decided on the device: the host reads nothing back during a step."""

from typing import Any

import torch
from torch import Tensor

from megaspec.precision.spec import Fp16Precision, PrecisionSpec


class LossScaler:
    """No scale: bf16 and wider formats have the range of fp32."""

    may_skip = False
    """Whether a step with a non-finite gradient is skipped and the run goes on."""

    def __init__(self, *, device: torch.device):
        self.scale = torch.ones((), dtype=torch.float64, device=device)
        """The factor on the loss, a float64 scalar."""

    def update(self, skipped: Tensor) -> None:
        """Takes note of a step: `skipped` is a scalar, 1 when its gradient was not finite."""

    def may_lower(self, scale: float) -> bool:
        """Whether a smaller scale may cure the non-finite gradient of a step that ran with this one."""
        return False

    def state(self) -> dict[str, Any] | None:
        """As JSON; None without a scale. Waits for the device."""
        return None

    def load_state(self, state: dict[str, Any] | None) -> None:
        """The inverse of `state`."""


class DynamicLossScaler(LossScaler):
    """Halves the scale after `hysteresis` non-finite steps, doubles it after `growth_interval` finite ones in a row."""

    may_skip = True

    def __init__(self, spec: Fp16Precision, *, device: torch.device):
        super().__init__(device=device)
        self._spec = spec
        self.scale.fill_(spec.initial_scale)
        self._finite_in_row = torch.zeros((), dtype=torch.int64, device=device)
        self._forgiven_left = torch.full((), spec.hysteresis, dtype=torch.int64, device=device)

    def update(self, skipped: Tensor) -> None:
        # Selections instead of branches, into tensors that stay where they are: no value goes to the host.
        spec = self._spec
        is_bad = skipped > 0
        self._finite_in_row.copy_(torch.where(is_bad, 0, self._finite_in_row + 1))
        self._forgiven_left.copy_(torch.where(is_bad, self._forgiven_left - 1, self._forgiven_left))
        # never both: a bad step ends the row of finite ones
        halves = is_bad & (self._forgiven_left <= 0)
        doubles = self._finite_in_row >= spec.growth_interval
        self.scale.copy_(torch.where(halves, (self.scale / 2).clamp(min=spec.min_scale), self.scale))
        self.scale.copy_(torch.where(doubles, self.scale * 2, self.scale))
        # only a scale that has grown forgives anew: until then every bad step halves it
        self._forgiven_left.copy_(torch.where(doubles, spec.hysteresis, self._forgiven_left))
        self._finite_in_row.copy_(torch.where(doubles, 0, self._finite_in_row))

    def may_lower(self, scale: float) -> bool:
        return scale > self._spec.min_scale

    def state(self) -> dict[str, Any]:
        return {
            "scale": float(self.scale),
            "finite_in_row": int(self._finite_in_row),
            "forgiven_left": int(self._forgiven_left),
        }

    def load_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.scale.fill_(state["scale"])
            self._finite_in_row.fill_(state["finite_in_row"])
            self._forgiven_left.fill_(state["forgiven_left"])


def build_scaler(spec: PrecisionSpec, *, device: torch.device) -> LossScaler:
    """The scaler that a precision needs."""
    if isinstance(spec, Fp16Precision):
        return DynamicLossScaler(spec, device=device)
    return LossScaler(device=device)
