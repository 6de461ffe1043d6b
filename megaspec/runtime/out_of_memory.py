"""What to say when a GPU's memory runs out: who, where, what was predicted, and what saves most."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megaspec.core.errors import MemoryRunOut
from megaspec.core.units import GIB
from megaspec.log.prediction import Prediction

_WORDS = ("out of memory", "Failed to CUDA calloc")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU's memory ran out, in torch's allocator, in NCCL or in CUDA."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | dist.DistError) and _tells(str(error))


def _tells(text: str) -> bool:
    return any(words in text for words in _WORDS)


def out_of_memory(prediction: Prediction, *, rank: str, stage: int, where: str, cause: str) -> MemoryRunOut:
    """The error that a rank ends with. `rank`: `3 of 8`; `stage`: its pipeline rank; `where`: what it was at; `cause`:
    what failed."""
    predicted = prediction.memory[stage]
    reason = next(line for line in cause.splitlines() if _tells(line))
    lines = [
        f"rank {rank} ran out of memory in {where}: {reason}",
        f"predicted for this rank: {sum(predicted.values()) / GIB:,.1f} GiB ({_by_kind(predicted)})",
    ]
    ways = [f"{saving.words} ({saving.total / GIB:,.1f} GiB)" for saving in prediction.savings]
    if ways:
        lines.append(f"what saves most, as predicted for the fullest rank: {'; '.join(ways)}")
    return MemoryRunOut(lines)


def _by_kind(sizes: Mapping[str, int]) -> str:
    """`weights 1.5, main grads 3.0`: GiB of each kind that takes memory at all."""
    texts = []
    for name, size in sizes.items():
        if size:
            texts.append(f"{name.replace('_', ' ')} {size / GIB:,.1f}")
    return ", ".join(texts)
