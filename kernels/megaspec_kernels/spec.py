"""Which implementation each operation uses."""

from typing import Literal

from megaspec.core.frozen import Auto, Frozen


class KernelsSpec(Frozen):
    """One implementation per operation; `auto` is decided from the target before the run starts."""

    attention: Auto[Literal["sdpa", "reference"]] = "auto"
    """Core attention. sdpa: torch's fused attention, cuDNN first on CUDA. reference: plain matrix products, the only one that has attention dropout."""
    cross_entropy: Auto[Literal["chunked", "reference"]] = "auto"
    """Output head and loss. chunked: a few big pieces, gradient computed with the loss, logits never held whole."""
    compile: Auto[Literal["block", "none"]] = "auto"
    """torch.compile of each transformer block. auto: block on CUDA."""
