"""What quantization_config of a config.json says. Torch-free.

Two methods are read, both of which keep a scale for each block of numbers:

    fp8     `NAME` in float8 (e4m3) and `NAME_scale_inv`, one number for each block of rows and columns, by which the
            block is multiplied: DeepSeek-V3, Qwen3's FP8 files (DeepSeek-AI 2024, section 3.3)
    mxfp4   `NAME_blocks`, two four-bit numbers (e2m1) a byte, the first in the lower half, and `NAME_scales`, for each
            32 of them the exponent of a power of two (e8m0): experts of gpt-oss (OCP Microscaling Formats 1.0, 2023)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megaspec.core.errors import CheckpointError
from megaspec.hf.config import Config

KEY = "quantization_config"
FP8_SCALES = "_scale_inv"
MXFP4_BLOCKS = "_blocks"
MXFP4_SCALES = "_scales"
SUFFIXES = (FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES)
"""Behind the name of a tensor, for what is kept of it."""
MXFP4_NUMBERS = 32
"""Of a scale."""
MXFP4_BYTES = MXFP4_NUMBERS // 2


@dataclass(frozen=True)
class Quantization:
    """How the quantised tensors of a folder are kept."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (1, MXFP4_NUMBERS)
    """Rows and columns, as stored, that share a scale."""


def read_quantization(config: Config) -> Quantization | None:
    """None: nothing is quantised. What is wrong is gathered in `config`."""
    said = config.section(KEY, None)
    if said is None:
        return None
    inner = Config(said, "")
    method = inner.text("quant_method")
    found = None
    if method == "fp8":
        found = _fp8(inner)
    elif method == "mxfp4":
        found = Quantization("mxfp4")
    elif method is not None:
        way_out = "dequantise the folder with what made it, or take one in bfloat16"
        inner.refuse(f'quant_method="{method}" is not read, only fp8 and mxfp4 are; {way_out}')
    inner.ignore("modules_to_not_convert", "tensors say themselves whether they are quantised")
    inner.ignore("ignored_layers", "tensors say themselves whether they are quantised")
    inner.ignore("dequantize", "numbers are always dequantised here")
    for name in said:
        # keys of a method that is not read are nobody's business
        if found is not None and name not in inner.asked:
            inner.refuse(f"{name} is mapped to nothing where quant_method={method}")
    for problem in inner.problems:
        config.refuse(f"{KEY}.{problem}")
    return found


def _fp8(inner: Config) -> Quantization:
    inner.fixed("fmt", "e4m3", "weights have three bits behind the point")
    inner.fixed("activation_scheme", "dynamic", "what scales activations is no weight")
    inner.ignore("scale_fmt", "scales say their own format")
    block = inner.entries("weight_block_size", [128, 128], of=int)
    if len(block) != 2 or min(block) < 1:
        inner.refuse(f"weight_block_size={block} must be two whole numbers of at least 1, as in [128, 128]")
        block = [128, 128]
    return Quantization("fp8", (block[0], block[1]))


def quantization_of(values: Mapping[str, Any], where: str) -> Quantization | None:
    """Of a config.json. CheckpointError: it can't be read."""
    config = Config(values, where)
    found = read_quantization(config)
    if config.problems:
        raise CheckpointError([f"{where}: {problem}" for problem in config.problems])
    return found
