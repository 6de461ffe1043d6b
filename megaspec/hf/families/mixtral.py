"""Mixtral (Jiang et al. 2024): Mistral's attention, and experts in every layer."""

from dataclasses import replace
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama, mistral
from megaspec.hf.family import Family
from megaspec.hf.names import matrix
from megaspec.model.decoder.spec import DecoderSpec

NAMES = replace(
    llama.NAMES,
    matrices={
        **llama.NAMES.matrices,
        "moe.router": matrix("block_sparse_moe.gate"),
        # w1 is the gate, w3 the other factor
        "moe.experts.w_gate_up": matrix("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        "moe.experts.w_down": matrix("block_sparse_moe.experts.{e}.w2"),
    },
)


def read(config: Config) -> dict[str, Any]:
    section = mistral.read(config)
    section["moe"] = {
        "n_experts": config.count("num_local_experts"),
        "top_k": config.count("num_experts_per_tok", 2),
        "d_expert": section["d_ffn"],
        "router": {"norm_top_k": True},
    }
    for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        config.ignore(name, "of training")
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    return mistral.write(spec) | {
        "intermediate_size": spec.moe.d_expert,
        "num_local_experts": spec.moe.n_experts,
        "num_experts_per_tok": spec.moe.top_k,
    }


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    read,
    write,
    lambda spec: NAMES,
    llama.KINDS,
    has_experts=True,
)
