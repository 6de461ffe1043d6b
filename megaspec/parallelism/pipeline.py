"""Micro batches through the stages that a rank holds."""

from collections.abc import Callable

from torch import Tensor

Forward = Callable[[int, int, Tensor | None], Tensor]
"""(chunk, micro batch, input or None on the first stage) -> activations, on the last stage the scalar loss"""


class Pipeline:
    """One stage: a backward pass follows each forward pass."""

    def forward_backward(
        self, micro_batches: int, *, forward: Forward, start_backward: Callable[[int, bool], None]
    ) -> None:
        """Runs a step's passes. `start_backward(chunk, last)` is called before each backward pass of a chunk."""
        for micro in range(micro_batches):
            loss = forward(0, micro, None)
            start_backward(0, micro == micro_batches - 1)
            loss.backward()

    def forward_only(self, micro_batches: int, *, forward: Forward) -> None:
        """Runs the forward passes alone."""
        for micro in range(micro_batches):
            forward(0, micro, None)
