"""Folders whose weights are quantised, as DeepSeek's and gpt-oss' are on the hub."""

import json
from math import ceil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megaspec.hf.table import read_model
from tests.hf.folders import config_of, random_folder, tensors_of
from tests.hf.tiny import TINY

BLOCK = (16, 8)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["lm_head"],
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def rewrite(folder: Path, tensors: dict[str, Tensor], **keys: object) -> None:
    """A folder's weights, and keys of its config.json."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(folder) | keys))


def quantised_fp8(value: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix as e4m3 and a scale for each block; blocks at the edges are smaller."""
    rows, columns = value.shape
    scales = torch.empty(ceil(rows / block[0]), ceil(columns / block[1]))
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = value[here].abs().max() / 448
            numbers[here] = (value[here] / scales[i, j]).to(torch.float8_e4m3fn)
    return numbers, scales


def by_hand_fp8(numbers: Tensor, scales: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """Block by block."""
    out = torch.empty(numbers.shape, dtype=torch.bfloat16)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            out[here] = numbers[here].to(torch.float32) * scales[i, j].to(torch.float32)
    return out


def fp8_folder(folder: Path) -> dict[str, Tensor]:
    """A Qwen 3 of which all layers' matrices are in blocks, the last ones cut. -> what they stand for, by name"""
    model_type, keys = TINY["qwen3"]
    random_folder(folder, read_model({"model_type": model_type, **keys}, "tiny"), model_type)
    kept = {}
    meant = {}
    for name, value in tensors_of(folder).items():
        if value.ndim < 2 or ".layers." not in name:
            meant[name] = kept[name] = value.to(torch.bfloat16)
            continue
        numbers, scales = quantised_fp8(value)
        # Qwen's files have scales in bfloat16, DeepSeek's in fp32
        kept[name + "_scale_inv"] = scales.to(torch.bfloat16) if "mlp" in name else scales
        kept[name] = numbers
        meant[name] = by_hand_fp8(numbers, kept[name + "_scale_inv"])
    rewrite(folder, kept, quantization_config=FP8)
    return meant


def mxfp4_folder(folder: Path) -> dict[str, Tensor]:
    """A gpt-oss whose experts are in four bits. -> what all tensors stand for, by transformers, by name"""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model_type, keys = TINY["gpt_oss"]
    # as wide as whole groups, and as nothing else
    config = {"model_type": model_type, **keys, "intermediate_size": 96, "hidden_size": 64}
    random_folder(folder, read_model(config, "tiny"), model_type)
    generator = torch.Generator().manual_seed(6)
    kept = {}
    meant = {}
    for name, value in tensors_of(folder).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            meant[name] = kept[name] = value.to(torch.bfloat16)
            continue
        experts, inputs, outputs = value.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        kept[name + "_blocks"] = blocks
        kept[name + "_scales"] = scales
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert meant[name].shape == value.shape
    rewrite(folder, kept, quantization_config=MXFP4)
    return meant
