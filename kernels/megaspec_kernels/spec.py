"""Which implementation each operation uses."""

from typing import Literal

from megaspec.core.frozen import Auto, Frozen


class KernelsSpec(Frozen):
    """One implementation per operation; `auto` is decided from the target before the run starts (see catalog.py)."""

    attention: Auto[Literal["sdpa", "reference"]] = "auto"
    """Core attention.

    sdpa: torch's fused attention, cuDNN first on CUDA. reference: plain matrix products, the only one with attention
    dropout."""
    cross_entropy: Auto[Literal["triton", "chunked", "reference"]] = "auto"
    """Output head and loss.

    chunked: in a few big pieces, the gradient computed with the loss, logits never held whole. triton: the same with
    fused softmax kernels. reference: plain."""
    grouped: Auto[Literal["torch", "reference"]] = "auto"
    """Products of tokens with the matrices of their experts.

    torch: torch's grouped matrix product, one kernel for all experts. reference: one product an expert, for which the
    host waits for the number of its tokens."""
    compile: Auto[Literal["block", "none"]] = "auto"
    """torch.compile of each transformer block. auto: block on CUDA."""
