"""What runs beside the computation: streams, and memory of the CPU that transfers can use."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class Side:
    """A stream beside the computation's, whose work goes in its own order; on a CPU there is none.

    `priority`: -1 puts it first in line for what the GPU starts next.
    """

    def __init__(self, device: torch.device, *, priority: int = 0):
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=priority)

    def after_now(self) -> Any:
        """A context in which work starts once what the computation has been given so far is done."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def done(self) -> "torch.cuda.Event | None":
        """When what it was given so far is done."""
        if self.stream is None:
            return None
        return self.stream.record_event()


class Deferred:
    """Pieces of work beside the computation, in the order in which that will need them.

    On a CPU, where nothing runs beside, a piece is done when somebody first waits for it: who forgets to wait finds
    what was there before, as on a GPU that is slow.
    """

    def __init__(self, device: torch.device, *, priority: int = 0):
        """`priority`: as of Side."""
        self.side = Side(device, priority=priority)
        self._pieces: list[Callable[[], None]] = []
        """Kept until the next ones start, which is behind these: what they read keeps its memory until then."""
        self._left: dict[int, Callable[[], None]] = {}
        self._done: list[torch.cuda.Event] = []

    def start(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Behind what the computation has been given so far, and behind the pieces before these."""
        self.join()
        self._pieces = list(pieces)
        self._done = []
        if self.side.stream is None:
            self._left = dict(enumerate(pieces))
            return
        with self.side.after_now():
            for piece in pieces:
                piece()
                self._done.append(self.side.done())

    def wait(self, number: int) -> None:
        """What the current stream starts from here on finds a piece done, counted from 0."""
        piece = self._left.pop(number, None)
        if piece is not None:
            piece()
        # none was started yet, or there are no streams
        if number < len(self._done):
            wait_for(self._done[number])

    def join(self) -> None:
        """What the current stream starts from here on finds all pieces done."""
        for number in list(self._left):
            self.wait(number)
        if self.side.stream is not None:
            torch.cuda.current_stream().wait_stream(self.side.stream)


def wait_for(event: "torch.cuda.Event | None") -> None:
    """What the computation starts from here on runs after the event; the host goes on."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def on_host(like: Tensor) -> Tensor:
    """Memory of the CPU that a GPU can copy from and to beside other work."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
