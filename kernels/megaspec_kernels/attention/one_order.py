"""Whether gradients have to be added in one order, so that a step repeats to the bit."""

import torch


def is_asked_for() -> bool:
    """Whether torch.use_deterministic_algorithms asks for it. A mode that only warns does not: tests of kernels use it
    to have memory filled, and mean nothing else by it."""
    return torch.are_deterministic_algorithms_enabled() and not _only_warns()


# torch's compiler can't trace the question (torch 2.11). It compiles anew where the answer has changed: both are among
# the global states that it guards.
@torch.compiler.assume_constant_result
def _only_warns() -> bool:
    return torch.is_deterministic_algorithms_warn_only_enabled()
