"""Activations that the backward pass computes again (Chen et al. 2016; Korthikanti et al. 2022).

Dropout masks depend on the token alone, so that what is computed again is the same to the bit.

Note "Parts of a layer". Every module that stands in a layer, a norm or a mixer, says in `recompute_parts` which of
parallelism.recompute.parts it has; none of them: an empty set. What is computed again is then found by the part's name:

norm            the module, from its input                      mlp, moe         the module, from its input
core_attention  its `core`, from queries, keys and values       shared_experts   its `shared`, from its input
activation      its `activate`, from the product before it; with experts theirs and that of `shared`
"""

# B sequences, T tokens, D model, N query heads, K key and value heads, H head size

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.decoder import Decoder, Unit
from megaspec.parallelism.saved import SavedTensors
from megaspec.parallelism.spec import RecomputePart, RecomputeSpec

Run = Callable[..., Tensor]
KNOWN_PARTS = frozenset(get_args(RecomputePart))


class Recompute:
    """The strategy. `apply` after every module has become what it stays, and before units are sharded."""

    def __init__(self, spec: RecomputeSpec, saved: SavedTensors, *, compiled: bool):
        """`compiled`: whether each layer is traced as a whole."""
        self.spec = spec
        self.saved = saved
        self.compiled = compiled

    def apply(self, chunk: Decoder) -> None:
        """Wraps, and where several layers are computed again together, joins the units of a chunk's layers."""
        if self.spec.kind == "full":
            chunk.units = _with_layers(chunk, self._whole_layers)
        elif self.spec.kind == "selective":
            chunk.units = _with_layers(chunk, self._parts_of_layers)

    def _whole_layers(self, layers: Sequence[Unit]) -> list[Unit]:
        count = self.spec.layers or 1
        if self.spec.method == "block":
            return _block(layers, count)
        return _uniform(layers, count)

    def _parts_of_layers(self, layers: Sequence[Unit]) -> list[Unit]:
        units = []
        for unit in layers:
            # one layer each: only whole layers are joined
            (layer,) = unit.modules
            remade = _RemadeParts(layer, self.spec.alone, self.saved, compiled=self.compiled)
            units.append(replace(unit, run=remade.around(unit.run)))
        return units


def _with_layers(chunk: Decoder, change: Callable[[list[Unit]], list[Unit]]) -> list[Unit]:
    """The units of a chunk with those of its layers changed."""
    before = [unit for unit in chunk.units if unit.role == "embedding"]
    layers = [unit for unit in chunk.units if unit.role == "layer"]
    after = [unit for unit in chunk.units if unit.role == "head"]
    return [*before, *change(layers), *after]


def _uniform(layers: Sequence[Unit], count: int) -> list[Unit]:
    """Groups of `count` layers, the last perhaps smaller, of which only the input is kept."""
    groups = [layers[i : i + count] for i in range(0, len(layers), count)]
    return [_joined(group) for group in groups]


def _block(layers: Sequence[Unit], count: int) -> list[Unit]:
    """The first `count` layers, one by one."""
    again = [replace(unit, run=partial(_checkpointed, unit.run)) for unit in layers[:count]]
    return [*again, *layers[count:]]


def _joined(group: Sequence[Unit]) -> Unit:
    """One unit of several layers, of which only the first one's input is kept."""
    if len(group) == 1:
        return replace(group[0], run=partial(_checkpointed, group[0].run))
    runs = [unit.run for unit in group]

    def run(x_BTD: Tensor, context: SequenceContext) -> Tensor:
        for one in runs:
            x_BTD = one(x_BTD, context)
        return x_BTD

    # layers.0-2
    last_number = group[-1].name.rpartition(".")[2]
    modules = tuple(module for unit in group for module in unit.modules)
    return Unit(f"{group[0].name}-{last_number}", "layer", modules, partial(_checkpointed, run))


def _checkpointed(run: Run, *inputs: Any) -> Tensor:
    """run(*inputs), of which the inputs alone are kept.

    The second run ends with the last tensor that is missing: a sum over ranks after the last matrix product is sent
    once.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


def _attended(
    core: Run, context: SequenceContext, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, sinks_N: Tensor | None = None
) -> Tensor:
    """An attention core's result, with what is no tensor in front."""
    return core(q_BTNH, k_BTKH, v_BTKH, context, sinks_N)


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
        made = _Remade.make(self.maker).result.detach()
        return made.as_strided(self.shape, self.stride, made.storage_offset() + self.offset)


def _said_parts(name: str, module: nn.Module) -> frozenset[str]:
    """What a module in a layer says that it has of parallelism.recompute.parts: see the note "Parts of a layer"."""
    what = f"{name} ({type(module).__name__})"
    said = getattr(module, "recompute_parts", None)
    assert said is not None, f"{what} doesn't say what of parallelism.recompute.parts it has: set its recompute_parts"
    assert said <= KNOWN_PARTS, f"{what}.recompute_parts={sorted(said)}, known are {sorted(KNOWN_PARTS)}"
    return said


class _RemadeParts:
    """The parts of one layer that are made again.

    A checkpoint drops what is made inside of a part, but the operation that takes its result keeps that. Here it is
    told how to have the result made again, by the hooks on the tensors that a layer saves.
    """

    def __init__(self, layer: nn.Module, named: frozenset[str], saved: SavedTensors, *, compiled: bool):
        """`named`: the parts that the recipe names. AssertionError: a module of the layer doesn't say what it has."""
        self._saved = saved
        self._compiled = compiled
        self._made: dict[int, Tensor] = {}
        """Results that are made again, by the address of their memory."""
        for name, module in layer.named_children():
            self._remake(name, module, named & _said_parts(name, module))

    def _remake(self, name: str, module: nn.Module, wanted: frozenset[str]) -> None:
        """Has the `wanted` parts of a module made again."""
        if wanted & {"mlp", "moe"}:
            # everything inside of it too: an activation, and shared experts, which run while tokens travel
            module.forward = partial(_checkpointed, module.forward)
            return
        for part in sorted(wanted):
            if part == "norm":
                # what is around it is kept
                module.is_alone = True
                module.forward = partial(self._remade, module.forward, tuple(module.parameters()))
            elif part == "core_attention":
                self._remake_core(module.core)
            elif part == "shared_experts":
                self._remake_shared_experts(module)
            elif part == "activation":
                self._remake_activations(module, with_shared="shared_experts" not in wanted)
            else:
                raise AssertionError(f"{name} ({type(module).__name__}): nothing recomputes the part {part}")

    def _remake_core(self, core: nn.Module) -> None:
        forward = self._attention(core.forward)
        # Attention draws random numbers as far as the compiler knows, and it counts the state that it keeps for them
        # among the tensors that may change (torch 2.13). So a compiled layer leaves attention out.
        core.forward = torch.compiler.disable(forward) if self._compiled else forward

    def _remake_shared_experts(self, moe: nn.Module) -> None:
        if moe.shared is not None:
            moe.shared.forward = partial(_checkpointed, moe.shared.forward)

    def _remake_activations(self, module: nn.Module, *, with_shared: bool) -> None:
        """`with_shared`: those of shared experts too, which are not recomputed whole."""
        users = [module]
        if "moe" in module.recompute_parts:
            users = [module.experts]
            if with_shared and module.shared is not None:
                users.append(module.shared)
        for user in users:
            user.activate = partial(self._remade, user.activate, ())

    def _attention(self, core: Run) -> Run:
        """An attention core of which queries, keys, values and sinks are kept. The context is no tensor: autograd
        passes it by."""

        def forward(
            q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, context: SequenceContext, sinks_N: Tensor | None
        ) -> Tensor:
            sinks = () if sinks_N is None else (sinks_N,)
            return self._remade(lambda *tensors: _attended(core, context, *tensors), (), q_BTNH, k_BTKH, v_BTKH, *sinks)

        return forward

    def _remade(self, run: Run, parameters: tuple[nn.Parameter, ...], *inputs: Tensor) -> Tensor:
        """run(*inputs), of which only the inputs are kept."""
        if not torch.is_grad_enabled():
            return run(*inputs)
        if torch.compiler.is_compiling():
            # a tracing compiler makes the result again, too
            return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
        y = _Remade.apply(run, parameters, len(inputs), *inputs, *parameters)
        # nothing before it is trained: no backward pass comes here to make it again
        if y.requires_grad:
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


@dataclass(frozen=True)
class _Made:
    """What a second run has made."""

    inputs: list[Tensor]
    """Cut off from what made them."""
    result: Tensor


class _Remade(torch.autograd.Function):
    """y = run(*inputs). Backward: runs it again, once for its own gradient and for all that have kept y."""

    @staticmethod
    def forward(ctx, run, parameters, count, *tensors):
        """`tensors`: `count` inputs, and behind them the parameters, which the gradients have to reach."""
        ctx.run = run
        ctx.parameters = parameters
        ctx.made = None
        inputs = tensors[:count]
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def make(ctx) -> _Made:
        """Runs again, unless it was done before."""
        if ctx.made is None:
            inputs = []
            # of inputs and parameters, behind run, parameters and count
            needs_grad = ctx.needs_input_grad[3:]
            for x, needs in zip(ctx.saved_tensors, needs_grad, strict=False):
                inputs.append(x.detach().requires_grad_(needs))
            with torch.enable_grad():
                ctx.made = _Made(inputs, ctx.run(*inputs))
        return ctx.made

    @staticmethod
    def backward(ctx, grad):
        made = _Remade.make(ctx)
        # the memory of the second run ends with its graph
        ctx.made = None
        needs_grad = ctx.needs_input_grad[3:]
        tensors = (*made.inputs, *ctx.parameters)
        sources = [x for x, needs in zip(tensors, needs_grad, strict=True) if needs]
        gradients = iter(torch.autograd.grad(made.result, sources, grad))
        of_tensors = [next(gradients) if needs else None for needs in needs_grad]
        return None, None, None, *of_tensors
