"""Micro batches through the stages of a pipeline, of which this rank holds some.

Note "Messages". Each pair of neighbours has a communicator for each direction. Messages go in the order in which the
sender's passes make them; timeline.py says when the other rank begins to receive them. A sender keeps MESSAGES_KEPT
that are on their way and waits for the oldest before the next. On a GPU it is the stream that waits: the host goes on.

Note "Handing over". A chunk's forward pass ends in a scalar, the loss or a zero whose backward pass is given the
gradient that came back. So the graph keeps no activations that were sent, and every backward pass starts alike.
"""

# B sequences of a micro batch, T tokens of this rank, D model

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core import counted
from megaspec.core.layout import Layout, replicated
from megaspec.core.weight_facts import WeightFacts
from megaspec.nn.decoder import Decoder
from megaspec.nn.linear import WeightGradientQueue, WeightGradientSums
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.passes import (
    MESSAGES_KEPT,
    Message,
    Pass,
    Shape,
    made,
    needed,
    order,
    rank_of_stage,
    runs_backward,
    source,
    window,
)
from megaspec.parallelism.spec import PipelineSpec
from megaspec.parallelism.stages import Chunk
from megaspec.parallelism.timeline import receives

Forward = Callable[[int, int, Tensor | None], Tensor]
"""(chunk, micro batch, activations or None on the first stage) -> activations, on the last stage a scalar or what else
the caller asked it for"""


class _HandOver(torch.autograd.Function):
    """Forward: gives activations away, leaves a zero. Backward: the gradient that came back, taken from `returned`."""

    @staticmethod
    def forward(ctx, y, give, returned):
        ctx.returned = returned
        give(y.detach())
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return ctx.returned.pop(), None, None


@dataclass
class _Held:
    """What is kept of a forward pass until its backward pass."""

    x: Tensor | None
    """The activations that came in."""
    end: Tensor
    """The scalar that the backward pass starts from."""
    returned: list[Tensor]
    """The gradient that came back for what was handed over."""


class _Step:
    """The passes of one step, or of one window of evaluation batches, on one rank."""

    def __init__(self, shape: Shape, links: "Links", *, size: torch.Size, backward: bool, overlap: bool):
        self._shape, self._links, self._size = shape, links, size
        self._passes = order(shape, links.index, backward=backward)
        self._receives = receives(shape, links.index, backward=backward, overlap=overlap)
        self._posted: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._here: dict[Message, Tensor] = {}
        self._behind: tuple[Message, ...] = ()

    def passes(self) -> Iterator[Pass]:
        """The passes in order, each once what is to be received has been posted."""
        for one, due in zip(self._passes, self._receives, strict=True):
            self._post(due.before)
            self._behind = due.behind
            yield one

    def _post(self, due: tuple[Message, ...]) -> None:
        for message in due:
            self._posted[message] = self._links.receive(source(self._shape, message), self._size)

    def take(self, one: Pass) -> Tensor | None:
        """What a pass needs; None where it needs nothing."""
        message = needed(self._shape, self._links.index, one)
        if message is None:
            return None
        if message in self._here:
            return self._here.pop(message)
        x, work = self._posted.pop(message)
        counted.wait(work)
        return x

    def give(self, one: Pass, x: Tensor) -> None:
        """Sends what a pass made to whoever needs it."""
        self._post(self._behind)
        message = made(self._shape, self._links.index, one)
        target = rank_of_stage(self._shape, message.stage)
        if target == self._links.index:
            self._here[message] = x
        else:
            assert x.shape == self._size, f"{one} made {tuple(x.shape)}, expected {tuple(self._size)}"
            self._links.send(target, x)

    def returns(self, one: Pass) -> bool:
        """Whether a forward pass's chunk makes a gradient for the stage before."""
        return made(self._shape, self._links.index, one._replace(kind="B")) is not None

    def gives(self, one: Pass) -> bool:
        """Whether a pass makes something for another stage."""
        return made(self._shape, self._links.index, one) is not None


class Links:
    """Transfers between this rank and its neighbours in the pipeline, which are named by their place in it."""

    def __init__(self, mesh: Mesh, *, dtype: torch.dtype):
        self._mesh = mesh
        self._dtype = dtype
        self._ranks = mesh.ranks("pp")
        """Global ranks, by their place in the pipeline."""
        self.index = mesh.index("pp")
        self.count = mesh.size("pp")
        self._on_their_way: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        if self.count > 1:
            mesh.make_pairs()

    def receive(self, sender: int, size: torch.Size) -> tuple[Tensor, dist.Work]:
        """Starts to receive a tensor, which is there once the work was waited for."""
        x = torch.empty(size, dtype=self._dtype, device=self._mesh.device)
        there = self._ranks[sender]
        return x, _start(dist.irecv, x, there, self._mesh.pair(there, self._mesh.rank))

    def send(self, target: int, x: Tensor) -> None:
        """Starts to send a tensor, and keeps it while it is on its way."""
        assert x.dtype == self._dtype, f"{x.dtype}, the pipeline sends {self._dtype}"
        sent = self._on_their_way.setdefault(target, deque())
        while len(sent) >= MESSAGES_KEPT:
            counted.wait(sent.popleft()[0])
        x = x.contiguous()
        there = self._ranks[target]
        work = _start(dist.isend, x, there, self._mesh.pair(self._mesh.rank, there))
        # with x, whose memory must not be another's while it is read
        sent.append((work, x))

    def finish(self) -> None:
        """Waits until everything has been received."""
        for sent in self._on_their_way.values():
            while sent:
                counted.wait(sent.popleft()[0])

    def sum_of_ends(self, gradients: list[Tensor]) -> None:
        """Adds up gradients that the first and the last rank hold in part; called on these two."""
        first = self._ranks[0]
        last = self._ranks[-1]
        for gradient in gradients:
            if gradient.numel():
                counted.all_reduce(gradient, group=self._mesh.pair(last, first))


def _start(op: Callable[..., dist.Work], x: Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work:
    """One message on the group's own communicator: alone, NCCL's sends and receives make another for each pair."""
    (work,) = counted.batch_isend_irecv([dist.P2POp(op, x, peer, group)])
    return work


@dataclass
class Pipeline:
    """The strategy. `dtype`: of activations between stages. `overlap`: messages are begun before they are made."""

    mesh: Mesh
    spec: PipelineSpec
    dtype: torch.dtype
    stages: Sequence[Chunk]
    """That lie on this rank, in the order of its chunks."""
    facts: Mapping[str, WeightFacts]
    """Of the whole model's parameters, by global name."""
    first_trained: int = 0
    """The first stage that holds something to train."""
    sums: WeightGradientSums = field(default_factory=WeightGradientSums)
    """Of this model's weight gradients, which a split backward pass defers."""
    overlap: bool = True
    _links: Links = field(init=False)

    def __post_init__(self) -> None:
        self._links = Links(self.mesh, dtype=self.dtype)

    def split_model(self, model: Decoder) -> list[Decoder]:
        """The chunks of the model that lie on this rank, which share its modules; without a pipeline the model."""
        if self._links.count == 1:
            return [model]
        return [model.part(stage.layers, embedding=stage.embedding, head=stage.head) for stage in self.stages]

    @property
    def splits_backward(self) -> bool:
        """Weight gradients are deferred."""
        return self._shape(1).splits_backward

    @property
    def shared(self) -> frozenset[str]:
        """Parameters that two pipeline ranks hold; on this rank, if it is one of them."""
        # a V has the first and the last stage on the same rank
        ends_differ = self._links.count > 1 and self.spec.schedule != "zb_v"
        is_end = self._links.index in (0, self._links.count - 1)
        if not (ends_differ and is_end):
            return frozenset()
        return frozenset(name for name, facts in self.facts.items() if facts.is_tied)

    def share(self, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        """The layouts, with the copies of shared parameters counted."""
        index = 0 if self._links.index == 0 else 1
        found = dict(layouts)
        for name in self.shared & layouts.keys():
            found[name] = replicated(layouts[name], index=index, count=2)
        return found

    def forward_backward(
        self, micro_batches: int, *, size: torch.Size, forward: Forward, start_backward: Callable[[int, bool], None]
    ) -> None:
        """Runs a step's passes. `size`: of the activations between stages, [B, T, D]. `start_backward(chunk, last)` is
        called before each backward pass of a chunk."""
        shape = self._shape(micro_batches)
        step = _Step(shape, self._links, size=size, backward=True, overlap=self.overlap)
        held: dict[tuple[int, int], _Held] = {}
        queues: dict[tuple[int, int], WeightGradientQueue] = {}
        for one in step.passes():
            key = (one.chunk, one.micro)
            if one.kind == "F":
                kept = self._forward(step, one, forward)
                if runs_backward(shape, self._links.index, one.chunk):
                    held[key] = kept
            elif one.kind == "B":
                start_backward(one.chunk, one.micro == micro_batches - 1)
                queue = self._backward(step, one, held.pop(key))
                if queue is not None:
                    queues[key] = queue
            else:
                queues.pop(key).run()
        self._links.finish()

    def forward_only(self, micro_batches: int, *, size: torch.Size, forward: Forward) -> None:
        """Runs the forward passes alone. Call `finish` behind the last of several calls."""
        shape = self._shape(micro_batches)
        step = _Step(shape, self._links, size=size, backward=False, overlap=self.overlap)
        for one in step.passes():
            y = forward(one.chunk, one.micro, step.take(one))
            if step.gives(one):
                step.give(one, y)

    def finish(self) -> None:
        """Waits until everything that was sent has been received."""
        self._links.finish()

    @property
    def window(self) -> int:
        """Micro batches of one call of `forward_only` that keep stages busy."""
        return window(self.spec.schedule, self._links.count)

    def finish_grads(self, gradients: Mapping[str, Tensor]) -> None:
        """Adds up the gradients of shared parameters; after all other reductions."""
        # of what is frozen there are none
        shared = sorted(self.shared & gradients.keys())
        self._links.sum_of_ends([gradients[name] for name in shared])

    def _shape(self, micro_batches: int) -> Shape:
        spec = self.spec
        return Shape(
            spec.schedule,
            self._links.count,
            micro_batches,
            spec.virtual_stages,
            spec.micro_batch_group,
            self.first_trained,
        )

    def _forward(self, step: _Step, one: Pass, forward: Forward) -> _Held:
        x = step.take(one)
        returned: list[Tensor] = []
        if x is not None:
            # the stage before waits for its gradient, unless nothing is trained there and before
            x.requires_grad_(step.returns(one))
        y = forward(one.chunk, one.micro, x)
        if step.gives(one):
            y = _HandOver.apply(y, lambda sent: step.give(one, sent), returned)
        return _Held(x, y, returned)

    def _backward(self, step: _Step, one: Pass, held: _Held) -> WeightGradientQueue | None:
        grad = step.take(one)
        if grad is not None:
            held.returned.append(grad)
        queue = WeightGradientQueue() if self.splits_backward else None
        with self.sums.defer(queue):
            held.end.backward()
        if held.x is not None and held.x.requires_grad:
            step.give(one, held.x.grad)
        return queue
