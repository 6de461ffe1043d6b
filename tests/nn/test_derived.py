"""Norms that a plug-in derives from ours: what they compute is taken, whoever adds up before them. Who writes fp8:
test_fp8_written.py."""

import pytest
import torch
from torch import Tensor, nn

from megaspec.nn.norm.module import LayerNorm, RmsNorm
from megaspec.nn.norm.spec import LayerNormSpec, RmsNormSpec

WIDTH = 16


class TwiceRms(RmsNorm):
    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, mean_square)


class TwiceLayer(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Named(TwiceLayer):
    """Nothing of its own: what it derives from is no norm of ours either."""


NORMS = {
    "rms": TwiceRms(WIDTH, RmsNormSpec()),
    "layer": TwiceLayer(WIDTH, LayerNormSpec(kind="layer", bias=False)),
    "derived": Named(WIDTH, LayerNormSpec(kind="layer", bias=False)),
}


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_taken_behind_a_sum_and_beside_the_stream(name: str, scale: float) -> None:
    norm = NORMS[name].double()
    nn.init.normal_(norm.weight)
    norm.set_term_scale(scale)
    x, term = torch.randn(2, 3, 5, WIDTH, dtype=torch.float64)
    stream, normed = norm.of_stream(x)
    torch.testing.assert_close(stream, x)
    torch.testing.assert_close(normed, norm(x))
    total, normed = norm.of_sum(x, term)
    torch.testing.assert_close(total, x + scale * term)
    torch.testing.assert_close(normed, norm(x + scale * term))
