"""gpt-oss (OpenAI 2025): attention with sinks, every other layer with a window, and experts with biases whose
activation is clamped."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import Family, base_keys, base_section
from megaspec.hf.layer_kinds import FULL, SLIDING, put_kinds, read_kinds, read_window, write_kinds
from megaspec.hf.names import Matrix, Names, matrix
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec

NAMES = Names(
    layer=llama.NAMES.layer,
    matrices={
        "attn.wqkv": llama.NAMES.matrices["attn.wqkv"],
        "attn.wo": llama.NAMES.matrices["attn.wo"],
        "moe.router": matrix("mlp.router"),
        # all experts in one tensor of [experts, inputs, outputs], in which columns of gate and up take turns
        "moe.experts.w_gate_up": Matrix(
            ("mlp.experts.gate_up_proj",), transposed=True, alternate=1, weight="", bias="_bias"
        ),
        "moe.experts.w_down": Matrix(("mlp.experts.down_proj",), transposed=True, weight="", bias="_bias"),
    },
    vectors={**llama.NAMES.vectors, "attn.sinks": "self_attn.sinks"},
    ends=llama.NAMES.ends,
)
# What transformers takes where a file says nothing of it, and what both published sizes have.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(config: Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", True)
    top_k = config.count("num_experts_per_tok", 4)
    section = base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config, base=150_000.0, scaling=_YARN),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-5)},
        "attention": {
            "kind": "gqa",
            "sinks": True,
            "qkv_bias": bias,
            "out_bias": bias,
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {
            "kind": "clamped",
            "bias": True,
            "limit": config.number("swiglu_limit", 7.0),
            "alpha": config.number("swiglu_alpha", 1.702),
        },
    }
    section["moe"] = {
        "n_experts": config.count("num_local_experts"),
        "top_k": top_k,
        "d_expert": section["d_ffn"],
        "router": {"logit_bias": True},
    }
    kinds = read_kinds(config, pattern=2)
    put_kinds(section, kinds, {FULL: {}, SLIDING: {"mask": read_window(config, kinds)}})
    config.ignore("hidden_act", "experts have the clamped activation, whatever it says")
    config.ignore("initial_context_length", "rope_scaling says it")
    config.fixed("experts_per_token", top_k, "it is num_experts_per_tok by an older name")
    for name in ("output_router_logits", "router_aux_loss_coef"):
        config.ignore(name, "of training")
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    keys = base_keys(spec) | {
        "intermediate_size": spec.moe.d_expert,
        "num_local_experts": spec.moe.n_experts,
        "num_experts_per_tok": spec.moe.top_k,
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": "silu",
        "swiglu_limit": spec.mlp.limit,
        "swiglu_alpha": spec.mlp.alpha,
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        **write_kinds(spec),
        **write_rope(spec.positions),
    }
    # without it transformers takes its own, which is yarn
    keys.setdefault("rope_scaling", {"rope_type": "default"})
    return keys


KINDS = {**llama.KINDS, "mlp": "clamped"}
FAMILY = Family("gpt_oss", "GptOssForCausalLM", read, write, lambda spec: NAMES, KINDS, has_experts=True)
