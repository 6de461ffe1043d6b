"""How fast tokens were trained on, and what share of the GPUs' peak that is. Torch-free."""

from dataclasses import dataclass

from megaspec.log.events import RunStarted


@dataclass(frozen=True)
class Speed:
    """Of a step, or of several together. None: not known."""

    tokens_per_second: float | None
    """Of all ranks together; masked tokens count."""
    tokens_per_second_per_gpu: float | None
    """Of one rank."""
    tflops_per_gpu_causal: float | None
    """Operations of the model in 10^12 a second, of one rank. Half of the attention scores are counted, as Megatron-LM
    does and as a causal kernel computes; recomputation is not (Chowdhery et al. 2022, appendix B)."""
    tflops_per_gpu_full: float | None
    """The same with all attention scores counted, as most papers do."""
    mfu_causal: float | None
    """Model FLOPs utilisation: tflops_per_gpu_causal over the peak of one GPU, between 0 and 1."""
    mfu_full: float | None
    """The same of tflops_per_gpu_full."""


def speed_of(tokens: int, seconds: float, run: RunStarted) -> Speed:
    """Of `tokens`, masked ones included, that all ranks of a run have trained on in `seconds`."""
    if seconds <= 0:
        return Speed(None, None, None, None, None, None)
    tokens_per_second = tokens / seconds
    per_gpu = tokens_per_second / run.world_size
    causal = _flops(per_gpu, run.flops_per_token_causal)
    full = _flops(per_gpu, run.flops_per_token_full)
    return Speed(
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=per_gpu,
        tflops_per_gpu_causal=_share(causal, 1e12),
        tflops_per_gpu_full=_share(full, 1e12),
        mfu_causal=_share(causal, run.peak_flops),
        mfu_full=_share(full, run.peak_flops),
    )


def _flops(tokens_per_second: float, flops_per_token: float | None) -> float | None:
    if flops_per_token is None:
        return None
    return tokens_per_second * flops_per_token


def _share(flops: float | None, of: float | None) -> float | None:
    if flops is None or of is None:
        return None
    return flops / of
