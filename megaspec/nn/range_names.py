"""What the ranges of the host's program are called in a profile, see ranges.py. Torch-free."""

ATTENTION = "megaspec.attention"
"""The core of attention, forward. Its backward pass is found by the numbers that autograd gives operations."""
OPTIMIZER = "megaspec.optimizer"
"""Gradient norm, clipping, update."""
WINDOW = "megaspec.profiled"
"""The steps that a profile is of."""
REST = "megaspec.rest"
"""Of these, what is no step: evaluation, saving."""
RANGES = (ATTENTION, OPTIMIZER, WINDOW, REST)
