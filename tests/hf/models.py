"""Transformers' model of a tiny configuration, and ours with the same weights."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaspec.hf.blocks import TheirTensor
from megaspec.hf.folder import open_hf_folder
from megaspec.hf.names import WeightTable, weight_table
from megaspec.hf.table import FAMILIES, read_model
from megaspec.hf.weights import HfWeights, their_tensor
from megaspec.model.builders import MODELS
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.nn.decoder import Decoder
from megaspec_kernels.registry import kernels_of
from megaspec_kernels.spec import KernelsSpec
from tests.hf.tiny import TINY, TOKENS
from tests.hf.true_fp64 import true_fp64

KERNELS = KernelsSpec(
    attention="reference",
    attention_merge="reference",
    cross_entropy="reference",
    linear="torch",
    grouped="reference",
    unpermute="reference",
    norm="reference",
    gated="reference",
    rope="reference",
    fp8_cast="reference",
    scaled_product="reference",
    scaled_grouped="reference",
    adamw="torch",
    compile="none",
)


@dataclass(frozen=True)
class Pair:
    """One model, theirs and ours, in fp64."""

    name: str
    theirs: nn.Module
    ours: Decoder
    spec: DecoderSpec
    table: WeightTable
    config: dict[str, Any]
    folder: Path
    """As transformers saved it."""


def their_model(name: str) -> nn.Module:
    """Transformers' own, in true fp64, with every parameter drawn."""
    # imported here: it takes seconds, and offline before it looks
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, keys = TINY[name]
    config = AutoConfig.for_model(model_type, **keys)
    # grouped products take no fp64
    config._experts_implementation = "eager"
    with true_fp64():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            # with what routers choose experts by, which is no parameter
            for key, value in model.state_dict().items():
                if value.ndim == 1 or key.endswith("_bias"):
                    # norms and biases that start alike would hide a confusion
                    value += 0.5 * torch.randn(value.shape, generator=generator)
    return model.train(False)


def pair_of(name: str, folder: Path) -> Pair:
    """Writes transformers' model as it does, and reads it as we do."""
    theirs = their_model(name)
    theirs.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    spec = read_model(config, name)
    table = weight_table(spec.facts, FAMILIES[config["model_type"]].names(spec))
    with open_hf_folder(folder) as opened:
        weights = HfWeights(opened, table)
        ours = our_model(spec, {key: weights.read(key) for key in weights.names()})
    return Pair(name, theirs, ours, spec, table, config, folder)


def our_model(spec: DecoderSpec, values: Mapping[str, Tensor]) -> Decoder:
    """Ours in fp64 with these weights, by their names in a checkpoint."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        unpadded = spec.model_copy(update={"vocab_pad_to": 1})
        model = MODELS[type(spec)](unpadded, kernels_of(KERNELS))
    finally:
        torch.set_default_dtype(default)
    state = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        state[f"router/{name}"] = buffer
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(value)
    return model


def tokens() -> Tensor:
    """int64 [2, T]"""
    return torch.randint(0, 96, (2, TOKENS), generator=torch.Generator().manual_seed(3))


class InMemory:
    """Our tensors by their names in a checkpoint, as a source of weights."""

    path = Path("memory")

    def __init__(self, values: Mapping[str, Tensor]):
        self.values = values

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def names(self) -> list[str]:
        return list(self.values)

    def dtype(self, name: str) -> torch.dtype:
        return self.values[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        value = self.values[name]
        if start is None or shape is None:
            return value
        slices = tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))
        return value[slices]


def as_theirs(theirs: TheirTensor, values: Mapping[str, Tensor]) -> Tensor:
    """One tensor of theirs out of ours."""
    return their_tensor(theirs, InMemory(values), torch.float64)
