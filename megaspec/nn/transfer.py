"""What runs beside the computation: streams, and memory of the CPU that transfers can use."""

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


def wait_for(event: "torch.cuda.Event | None") -> None:
    """What the computation starts from here on runs after the event; the host goes on."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def on_host(like: Tensor) -> Tensor:
    """Memory of the CPU that a GPU can copy from and to beside other work."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
