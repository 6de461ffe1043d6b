"""Every family that can be read and written: ours, and those of the plug-ins of this process."""

from collections.abc import Mapping
from typing import Any

from megaspec.core.errors import CheckpointError
from megaspec.core.problems import did_you_mean
from megaspec.hf.config import Config
from megaspec.hf.families import (
    cohere2,
    gemma,
    glm4,
    glm4_moe,
    gpt2,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    mixtral,
    nemotron,
    olmo,
    olmoe,
    phi,
    qwen2,
    qwen2_moe,
    qwen3,
    smollm3,
    starcoder2,
)
from megaspec.hf.family import Family, typed
from megaspec.hf.quantization import read_quantization
from megaspec.model.decoder.spec import DecoderSpec

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        gpt2.FAMILY,
        gpt_oss.FAMILY,
        llama.FAMILY,
        llama4.FAMILY,
        mistral.FAMILY,
        mixtral.FAMILY,
        olmoe.FAMILY,
        qwen2.FAMILY,
        qwen2_moe.FAMILY,
        qwen3.FAMILY,
        qwen3.EXPERTS,
        gemma.FAMILY,
        gemma.GEMMA_2,
        gemma.GEMMA_3,
        olmo.FAMILY,
        olmo.OLMO_2,
        olmo.OLMO_3,
        phi.FAMILY,
        phi.PHI_3,
        smollm3.FAMILY,
        glm4.FAMILY,
        glm4_moe.FAMILY,
        granite.FAMILY,
        nemotron.FAMILY,
        cohere2.FAMILY,
        starcoder2.FAMILY,
    )
}

# Families whose numbers no options give, by the reason.
REFUSED: Mapping[str, str] = {
    "llama4": "it looks at images, too; its text alone is a llama4_text",
    "phimoe": "its router draws one expert after the other, and has a gradient of its own (SparseMixer)",
    "deepseek_v32": "its attention chooses keys by an indexer",
    "glm_moe_dsa": "its attention chooses keys by an indexer",
    "deepseek_v4": "it has hyper-connections, and experts that tokens are hashed to",
}


def add_family(family: Family) -> None:
    """Another family, for the rest of the process. Whether its model_type is free is for the caller to see."""
    FAMILIES[family.model_type] = family


def family_of(config: Mapping[str, Any], where: str, families: Mapping[str, Family] = FAMILIES) -> Family:
    """The family of a config.json. CheckpointError: it names none, or one that can't be said."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise CheckpointError(f"{where}: model_type is missing; it must be one of {', '.join(families)}")
    if name not in families and name in REFUSED:
        raise CheckpointError(f"{where}: model_type={name} can't be said in the options of a decoder: {REFUSED[name]}")
    if name not in families:
        near = did_you_mean(name, families)
        way_out = near or "megaspec hf families lists what can"
        raise CheckpointError(f"{where}: model_type={name} can't be said in the options of a decoder; {way_out}")
    return families[name]


def read_model(config: Mapping[str, Any], where: str, families: Mapping[str, Family] = FAMILIES) -> DecoderSpec:
    """What a config.json says, typed. CheckpointError: every key that is wrong or mapped to nothing."""
    family = family_of(config, where, families)
    asked = Config(config, where)
    section = family.read(asked)
    read_quantization(asked)
    asked.finish()
    return typed(section)
