"""Activations that the backward pass computes again (Chen et al. 2016; Korthikanti et al. 2022).

Dropout masks depend on the token alone, so that what is computed again is the same to the bit.
"""

# B sequences, T tokens, D model

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaspec.nn.attention import Attention, SequenceContext
from megaspec.nn.decoder import Decoder, Unit
from megaspec.nn.mlp import GeluMlp, SwiGlu
from megaspec.nn.moe import Experts, Moe
from megaspec.nn.norm import LayerNorm, RmsNorm
from megaspec.parallelism.saved import SavedTensors
from megaspec.parallelism.spec import RecomputeSpec

Run = Callable[..., Tensor]


class Recompute:
    """The strategy. `apply` after every module has become what it stays, and before units are sharded."""

    def __init__(self, spec: RecomputeSpec, saved: SavedTensors, *, compiled: bool):
        """`compiled`: whether each layer is traced as a whole."""
        self.spec, self.saved, self.compiled = spec, saved, compiled

    def apply(self, chunk: Decoder) -> None:
        """Wraps, and where several layers are computed again together, joins the units of a chunk's layers."""
        own = self.spec
        if own.kind == "full":
            count = own.layers or 1
            regroup = _block if own.method == "block" else _uniform
            chunk.units = _with_layers(chunk, lambda layers: regroup(layers, count))
        elif own.kind == "selective":
            parts = frozenset(own.parts or ("core_attention",))
            kept = {layer: _Parts(layer, parts, self.saved, compiled=self.compiled) for layer in chunk.layers.values()}
            chunk.units = _with_layers(
                chunk, lambda layers: [_replaced(u, kept[u.modules[0]].around(u.run)) for u in layers]
            )


def _with_layers(chunk: Decoder, change: Callable[[list[Unit]], list[Unit]]) -> list[Unit]:
    """The units of a chunk with those of its layers changed."""
    ends = ("embed", "head")
    return [
        *(u for u in chunk.units if u.name == "embed"),
        *change([u for u in chunk.units if u.name not in ends]),
        *(u for u in chunk.units if u.name == "head"),
    ]


def _replaced(unit: Unit, run: Run) -> Unit:
    return Unit(unit.name, unit.modules, run)


def _uniform(layers: Sequence[Unit], count: int) -> list[Unit]:
    """Groups of `count` layers, the last perhaps smaller, of which only the input is kept."""
    groups = [layers[i : i + count] for i in range(0, len(layers), count)]
    return [_joined(group) for group in groups]


def _block(layers: Sequence[Unit], count: int) -> list[Unit]:
    """The first `count` layers, one by one."""
    return [_replaced(u, partial(_checkpointed, u.run)) if i < count else u for i, u in enumerate(layers)]


def _joined(group: Sequence[Unit]) -> Unit:
    if len(group) == 1:
        return _replaced(group[0], partial(_checkpointed, group[0].run))
    runs = [unit.run for unit in group]

    def run(x_BTD: Tensor, context: SequenceContext) -> Tensor:
        for one in runs:
            x_BTD = one(x_BTD, context)
        return x_BTD

    name = f"{group[0].name}-{group[-1].name.rpartition('.')[2]}"
    return Unit(name, tuple(m for unit in group for m in unit.modules), partial(_checkpointed, run))


def _checkpointed(run: Run, *inputs: Any) -> Tensor:
    """run(*inputs), of which the inputs alone are kept.

    The second run ends with the last tensor that is missing: a sum over ranks after the last matrix product is sent
    once.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True)
class _View:
    """Stands for a tensor that shows what a _Remade made, or a part of it."""

    maker: Any
    """Its node in the graph."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Has it made again."""
        made = _Remade.make(self.maker)[1].detach()
        return made.as_strided(self.shape, self.stride, made.storage_offset() + self.offset)


class _Parts:
    """Parts of one layer that are made again.

    A checkpoint drops what is made inside of a part, but the operation that takes its result keeps that. Here it is
    told how to have the result made again, by the hooks on the tensors that a layer saves.
    """

    def __init__(self, layer: nn.Module, parts: frozenset[str], saved: SavedTensors, *, compiled: bool):
        self._saved = saved
        self._made: dict[int, Tensor] = {}
        for child in layer.children():
            if isinstance(child, RmsNorm | LayerNorm) and "norm" in parts:
                child.forward = partial(self._remade, child.forward, tuple(child.parameters()))
            elif isinstance(child, Attention) and "core_attention" in parts:
                core = self._core(child.core.forward)
                # Attention draws random numbers as far as the compiler knows, and it counts the state that it keeps for
                # them among the tensors that may change (torch 2.13). So a compiled layer leaves attention out.
                child.core.forward = torch.compiler.disable(core) if compiled else core
            elif isinstance(child, SwiGlu | GeluMlp):
                self._feed_forward(child, whole="mlp" in parts, activation="activation" in parts)
            elif isinstance(child, Moe):
                self._experts(child, parts)

    def _feed_forward(self, layer: SwiGlu | GeluMlp | Experts, *, whole: bool, activation: bool) -> None:
        if whole:
            layer.forward = partial(_checkpointed, layer.forward)
        elif activation:
            layer.activate = partial(self._remade, layer.activate, ())

    def _experts(self, moe: Moe, parts: frozenset[str]) -> None:
        if "moe" in parts:
            # shared experts run while tokens travel: inside
            moe.forward = partial(_checkpointed, moe.forward)
            return
        self._feed_forward(moe.experts, whole=False, activation="activation" in parts)
        if moe.shared is not None:
            self._feed_forward(moe.shared, whole="shared_experts" in parts, activation="activation" in parts)

    def _core(self, core: Run) -> Run:
        def forward(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, context: SequenceContext) -> Tensor:
            return self._remade(lambda q, k, v: core(q, k, v, context), (), q_BTNH, k_BTKH, v_BTKH)

        return forward

    def _remade(self, run: Run, parameters: tuple[nn.Parameter, ...], *inputs: Tensor) -> Tensor:
        """run(*inputs), of which only the inputs are kept."""
        if not torch.is_grad_enabled():
            return run(*inputs)
        if torch.compiler.is_compiling():
            # a tracing compiler makes the result again, too
            return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
        y = _Remade.apply(run, parameters, len(inputs), *inputs, *parameters)
        self._made[y.untyped_storage().data_ptr()] = y
        return y

    def around(self, run: Run) -> Run:
        """The layer's run, in which nobody keeps what is made again."""

        def watched(x_BTD: Tensor, context: SequenceContext) -> Tensor:
            if not torch.is_grad_enabled():
                return run(x_BTD, context)
            with self._saved.under(self):
                y_BTD = run(x_BTD, context)
            # until here it was held, so that no other tensor came to lie at the same address
            self._made.clear()
            return y_BTD

        return watched

    def keep(self, x: Tensor) -> _View | None:
        """See Keeper."""
        made = self._made.get(x.untyped_storage().data_ptr())
        if made is None:
            return None
        return _View(made.grad_fn, x.shape, x.stride(), x.storage_offset() - made.storage_offset())


class _Remade(torch.autograd.Function):
    """y = run(*inputs). Backward: runs it again, once for its own gradient and for all that have kept y."""

    @staticmethod
    def forward(ctx, run, parameters, count, *tensors):
        ctx.run, ctx.parameters, ctx.made = run, parameters, None
        ctx.save_for_backward(*tensors[:count])
        return run(*tensors[:count])

    @staticmethod
    def make(ctx) -> tuple[list[Tensor], Tensor]:
        """The inputs, cut off from what made them, and the result."""
        if ctx.made is None:
            with torch.enable_grad():
                kept = zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=False)
                inputs = [x.detach().requires_grad_(wanted) for x, wanted in kept]
                ctx.made = inputs, ctx.run(*inputs)
        return ctx.made

    @staticmethod
    def backward(ctx, grad):
        inputs, y = _Remade.make(ctx)
        ctx.made = None
        needed = ctx.needs_input_grad[3:]
        sources = [s for s, wanted in zip((*inputs, *ctx.parameters), needed, strict=True) if wanted]
        found = iter(torch.autograd.grad(y, sources, grad))
        return None, None, None, *(next(found) if wanted else None for wanted in needed)
