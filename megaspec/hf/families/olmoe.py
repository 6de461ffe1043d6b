"""OLMoE (Muennighoff et al. 2024): OLMo with experts in every layer, RMSNorms before sub-layers and over all heads."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama, qwen3
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec


def read(config: Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    section = base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-5)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "qk_norm": "whole",
            "clip_qkv": config.number("clip_qkv", None),
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
    }
    if None not in (section["d_model"], section["n_heads"]):
        # its norms of all heads are as wide as the model, whatever the size of heads
        config.fixed("head_dim", section["d_model"] // section["n_heads"], "all query heads are as wide as the model")
    section["moe"] = {
        "n_experts": config.count("num_experts", 64),
        "top_k": config.count("num_experts_per_tok", 8),
        "d_expert": section["d_ffn"],
        "router": {"norm_top_k": config.flag("norm_topk_prob", False)},
    }
    for name in ("output_router_logits", "router_aux_loss_coef"):
        config.ignore(name, "of training")
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    keys = base_keys(spec) | {
        "intermediate_size": spec.moe.d_expert,
        "num_experts": spec.moe.n_experts,
        "num_experts_per_tok": spec.moe.top_k,
        "norm_topk_prob": spec.moe.router.norm_top_k,
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        "clip_qkv": spec.attention.clip_qkv,
        **write_rope(spec.positions),
    }
    # a key that the family doesn't have
    del keys["head_dim"]
    return keys


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    read,
    write,
    lambda spec: qwen3.NAMES,
    llama.KINDS,
    has_experts=True,
)
