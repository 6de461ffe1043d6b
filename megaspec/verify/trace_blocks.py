"""What compiled layers keep and need, from tables in place of the trace's own tensors.

Note "What exact means". Parameters, collectives and memory are counted from what the step does, tensor by tensor,
with one exception: torch.compile decides what a compiled layer keeps, and does not run on tensors without numbers. So
layers run as plain operations whose tensors are not counted, and in their place stands what estimate/activations.py
says, which was measured. A plain layer's collectives are a compiled one's, but for the gather of a tensor-parallel
layer's input: a compiled one keeps what the forward pass gathered. They are compared with the formulas of plain
layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaspec.estimate.activations import LayerBytes, layer_bytes
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.schedule import shape_of
from megaspec.estimate.trained import facts_of
from megaspec.spec import Spec
from megaspec.verify.trace_memory import ACTIVATIONS, EXPERTS, Memory


@dataclass(frozen=True)
class UnitBytes:
    """Of one micro batch in a unit of a chunk, beside its input and output."""

    kept: int
    """From its forward to its backward pass."""
    routed: int
    """The same for tokens of experts."""
    work: int
    """During its backward pass."""
    deferred: int = 0
    """From its backward pass to that of its weights."""
    forward: int = 0
    """During its forward pass, where no backward pass comes; else less than what it keeps."""


def unit_bytes(spec: Spec, name: str, *, place: int) -> UnitBytes | None:
    """Of a unit by its name, `layers.3` or `layers.3-5`; None where it is no layer. `place`: of its first layer among
    those of the chunk."""
    kind, _, numbers = name.partition(".")
    if kind != "layers":
        return None
    first, _, last = numbers.partition("-")
    run = layer_run(spec)
    recompute = spec.parallelism.recompute
    facts = facts_of(spec)
    numbers_of_layers = range(int(first), int(last or first) + 1)
    layers = [layer_bytes(run, facts.layers[number]) for number in numbers_of_layers]
    if not any(facts.layers[number].runs_backward for number in numbers_of_layers):
        return UnitBytes(0, 0, 0, forward=max(layer.backward for layer in layers))
    backward = max(layer.backward + layer.sent for layer in layers)
    deferred = 0
    if shape_of(spec).splits_backward:
        deferred = sum(layer.deferred for layer in layers)
    # `block` recomputes the first layers of a chunk, other methods all
    is_recomputed = recompute.kind == "full" and (recompute.method != "block" or place < (recompute.layers or 1))
    if is_recomputed:
        # all that the layers keep comes back at once, with the inputs of all but the first
        again = sum(map(_made_again, layers)) + (len(layers) - 1) * layers[0].input
        return UnitBytes(0, 0, again + backward, deferred)
    (layer,) = layers
    return UnitBytes(max(0, layer.kept - layer.input), layer.routed, layer.again + backward, deferred)


def _made_again(one: LayerBytes) -> int:
    return one.kept + one.routed + one.again - one.input


class KeptByUnit:
    """Stands for what a unit keeps; gone with its last reference."""

    def __init__(self, memory: Memory, size: UnitBytes, x: Tensor):
        self._memory = memory
        self._size = size
        self.x = x.detach()
        self._held = [_block(memory, ACTIVATIONS, size.kept), _block(memory, EXPERTS, size.routed)]
        self._in_forward: Tensor | None = _block(memory, ACTIVATIONS, size.forward)

    def ran(self) -> None:
        """Its forward pass is over."""
        self._in_forward = None

    def work(self) -> None:
        """Its backward pass begins."""
        self._held.append(_block(self._memory, ACTIVATIONS, self._size.work))

    def done(self) -> None:
        """Its backward pass is over; what weight gradients need may still be there."""
        self.x = None
        self._held.clear()
        self._held.append(_block(self._memory, ACTIVATIONS, self._size.deferred))


def _block(memory: Memory, kind: str, size: int) -> Tensor:
    block = torch.empty(size, dtype=torch.uint8, device="meta")
    memory.name(block, kind)
    return block
