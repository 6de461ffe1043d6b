"""Granite 3 (IBM 2024): Llama's blocks with four multipliers."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import Family
from megaspec.model.decoder.spec import DecoderSpec


def read(config: Config) -> dict[str, Any]:
    section = llama.read(config)
    section["embedding_scale"] = config.number("embedding_multiplier", 1.0)
    section["residual_scale"] = config.number("residual_multiplier", 1.0)
    # a factor, where Gemma has a power
    section["attention"]["score_scale"] = config.number("attention_multiplier", 1.0)
    # it divides
    section["logit_scale"] = 1.0 / (config.number("logits_scaling", 1.0) or 1.0)
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    scale = spec.attention.score_scale
    return llama.write(spec) | {
        "embedding_multiplier": spec.embedding_scale,
        "residual_multiplier": spec.residual_scale,
        "attention_multiplier": spec.d_head**-0.5 if scale is None else scale,
        "logits_scaling": 1.0 / spec.logit_scale,
    }


FAMILY = Family("granite", "GraniteForCausalLM", read, write, lambda spec: llama.NAMES, llama.KINDS)
