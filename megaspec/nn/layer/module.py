"""A layer: residual sub-layers, one behind the other or side by side."""

# B sequences, T tokens, D model

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.norm.module import Norm
from megaspec_kernels.norm.reference import add

Options = dict[str, str | int | bool]
"""Of torch.compile."""


class SubLayer(NamedTuple):
    """x + post(mix(pre(x))), by the names that norms and mixer have in their layer. Names alone: to the compiler they
    are constants, so that one compiled layer serves all that are alike."""

    mix: str
    """`attn`, `mlp` or `moe`."""
    pre: str = ""
    """The norm of what the mixer takes; empty: it takes the stream as it is."""
    post: str = ""
    """The norm of what the mixer puts out; empty: that is added as it is."""


class Layer(nn.Module):
    """h = h + post(mix(pre(h))) for one sub-layer after the other, [B, T, D] -> [B, T, D].

    `norm` names one norm for all sub-layers, which then stand side by side: x + Σ post(mix(norm(x))). Each sub-layer's
    output is multiplied by `residual_scale` before it is added.

    Experts can't be traced as a whole, since their rows differ from step to step: where the last mixer is one, `lead`
    is what comes before it.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        sublayers: Sequence[SubLayer],
        *,
        norm: str = "",
        residual_scale: float = 1.0,
    ):
        """`modules`: norms and mixers by name. Only the last sub-layer may be one of experts."""
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
            if isinstance(module, Norm):
                module.set_term_scale(residual_scale)
        self.norm = norm
        self.residual_scale = residual_scale
        self.traced = tuple(sublayers)
        self.last: SubLayer | None = None
        has_experts = hasattr(modules[sublayers[-1].mix], "compile_parts")
        if has_experts:
            self.traced = tuple(sublayers[:-1])
            self.last = sublayers[-1]

    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        h_BTD, mixer_input_BTD = self.lead(x_BTD, context)
        if self.last is None:
            return h_BTD
        return self._added(h_BTD, self._mixed(self.last, mixer_input_BTD, context))

    def lead(self, x_BTD: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """-> the stream behind all sub-layers but experts, and what the experts take, which is the stream without
        them"""
        h_BTD, common_BTD = self._taken(self.norm, x_BTD)
        # what the sub-layer before has put out: it is added together with the norm behind the sum
        y_BTD = None
        for sublayer in self.traced:
            h_BTD, mixer_input_BTD = self._taken(sublayer.pre, h_BTD, y_BTD)
            if self.norm:
                mixer_input_BTD = common_BTD
            y_BTD = self._mixed(sublayer, mixer_input_BTD, context)
        if self.last is None:
            h_BTD = self._added(h_BTD, y_BTD)
            return h_BTD, h_BTD
        h_BTD, mixer_input_BTD = self._taken(self.last.pre, h_BTD, y_BTD)
        if self.norm:
            mixer_input_BTD = common_BTD
        return h_BTD, mixer_input_BTD

    def pairs(self) -> Iterator[tuple[Norm, nn.Module]]:
        """Norms whose result one mixer takes and nobody else, with it."""
        sublayers = list(self.traced)
        if self.last is not None:
            sublayers.append(self.last)
        for sublayer in sublayers:
            if sublayer.pre:
                yield getattr(self, sublayer.pre), getattr(self, sublayer.mix)

    def mixers(self) -> Iterator[nn.Module]:
        """What its sub-layers compute."""
        for sublayer in self.traced:
            yield getattr(self, sublayer.mix)
        if self.last is not None:
            yield getattr(self, self.last.mix)

    def compile_parts(self, *, options: Options | None = None) -> None:
        """Compiles what can be traced: all of it, or with experts `lead` and what Moe.compile_parts says."""
        if self.last is None:
            self.compile(options=options)
            return
        self.lead = torch.compile(self.lead, options=options)
        getattr(self, self.last.mix).compile_parts(options=options)

    def _taken(self, norm: str, h_BTD: Tensor, y_BTD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream and a term, if there is one, added up; and that behind the norm of that name, without one as it
        is."""
        if norm and y_BTD is None:
            return getattr(self, norm).of_stream(h_BTD)
        if norm:
            return getattr(self, norm).of_sum(h_BTD, y_BTD)
        if y_BTD is not None:
            h_BTD = self._added(h_BTD, y_BTD)
        return h_BTD, h_BTD

    def _normed(self, norm: str, x_BTD: Tensor) -> Tensor:
        """Behind the norm of that name; without one, as it is."""
        if not norm:
            return x_BTD
        return getattr(self, norm)(x_BTD)

    def _added(self, h_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        """The stream and what a sub-layer puts out."""
        return add(h_BTD, y_BTD, scale=self.residual_scale)

    def _mixed(self, sublayer: SubLayer, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        mixer = getattr(self, sublayer.mix)
        if sublayer.mix == "mlp":
            # a feed-forward layer looks at each token alone
            y_BTD = mixer(x_BTD, context.noise)
        else:
            y_BTD = mixer(x_BTD, context)
        return self._normed(sublayer.post, y_BTD)
