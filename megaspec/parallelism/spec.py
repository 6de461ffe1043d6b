"""How the training step is divided among ranks."""

from megaspec.core.frozen import Auto, Frozen, PositiveFloat, PositiveInt


class ParallelismSpec(Frozen):
    """Degrees of the axes in core/axes.py. World size = dp_replicate · tp."""

    tp: Auto[PositiveInt] = "auto"
    """Tensor parallel: ranks that split every weight matrix. auto: 1 on GPUs; on CPUs all that divide heads and ffn."""
    dp_replicate: Auto[PositiveInt] = "auto"
    """Data parallel with replicated weights. auto: world / tp."""
    sequence_parallel: Auto[bool] = "auto"
    """Split tokens over tensor-parallel ranks between matrix products. auto: on when tp > 1 divides the sequence."""
    bucket_mb: PositiveFloat = 100.0
    """Size in MB (10^6 bytes) of the gradient buckets that are all-reduced while the backward pass still runs."""
