"""How fast products and attention are in a step, where a GPU's power is limited. Torch-free.

A limit on power is a limit on energy: a step takes no less than its energy over the limit. Work on tensor cores takes
more energy a second at the full clock than the limit allows, and the same energy for each operation at any clock; so
the clock falls until the sum fits. While memory is busy instead, less is drawn than the limit allows, and what is left
lets products of the same step run faster. A step that is half products runs them at nearly the full clock, one that is
all products at three quarters of it.

Waiting for other ranks leaves nothing to products: pipelines and tensor parallel runs on 2 and 4 H200 compute as slowly
as one GPU that never waits. The limit holds over a shorter time than a stage waits, and messages draw power, too.
"""

from typing import NamedTuple

# Seconds of products at the full clock over those of the measured table, which is measured on a GPU that products keep
# busy. One H200: products of profiled steps took 0.79 of the table's seconds at 1,924 MHz (1B, 2,048 tokens), 0.90 at
# 1,636 (1B, 16,384 tokens) and 0.96 at 1,525 (8B in fp8): the table's is 1,490 of 1,980 MHz.
FULL_CLOCK = 0.75
# Power at the full clock over the limit; of what memory limits, at any clock. Set on the step times of one H200 (700 W)
# and on its clocks: 1,500 MHz for 8B, 1,483 for 8B with short documents, 1,630 for 1B with heads of 64, 1,680 for
# experts a third of whose time is the update.
PRODUCTS_DRAW = 1.38
ATTENTION_DRAW = 1.15
MOVING_DRAW = 0.7


class Load(NamedTuple):
    """Seconds of a step on one GPU."""

    products: float
    """At the clock of the measured table; attention, too."""
    attention: float
    moving: float
    """Element-wise work and the update."""


def sustained(load: Load) -> float:
    """Seconds of products and attention in such a step over those at the table's clock, for a GPU whose power is
    limited."""
    at_full_clock = FULL_CLOCK * (load.products + load.attention)
    if not at_full_clock:
        return 1.0
    energy = FULL_CLOCK * (PRODUCTS_DRAW * load.products + ATTENTION_DRAW * load.attention)
    left = (1 - MOVING_DRAW) * load.moving
    return FULL_CLOCK * max(1.0, (energy - left) / at_full_clock)
