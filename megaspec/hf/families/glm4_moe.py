"""GLM-4.5 and 4.6 (GLM Team 2025): rotary positions on half of each head, and DeepSeek-V3's experts behind dense
layers."""

from dataclasses import replace
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama, qwen3
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.names import Names, matrix
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec


def names(spec: DecoderSpec) -> Names:
    """Those of Qwen 3's experts, with shared ones."""
    return replace(
        qwen3.NAMES,
        matrices={
            **qwen3.NAMES.matrices,
            "moe.shared.w_gate_up": matrix("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            "moe.shared.w_down": matrix("mlp.shared_experts.down_proj"),
        },
        vectors={**qwen3.NAMES.vectors, "moe.router.expert_bias": "mlp.gate.e_score_correction_bias"},
        ignored={
            **qwen3.NAMES.ignored,
            rf"model\.layers\.{spec.n_layers}\..*": "of layers that predict further tokens, which are not trained here",
        },
    )


def read(config: Config) -> dict[str, Any]:
    d_expert = config.count("moe_intermediate_size", 1408)
    n_shared = config.count("n_shared_experts", 1)
    section = base_section(config) | {
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": read_rope(config, fraction=0.5),
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-5)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": config.flag("attention_bias", False),
            "qk_norm": "per_head" if config.flag("use_qk_norm", False) else "none",
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
        "moe": {
            "n_experts": config.count("n_routed_experts", 128),
            "top_k": config.count("num_experts_per_tok", 8),
            "d_expert": d_expert,
            "d_shared": n_shared * (d_expert or 1),
            "first_dense": config.count("first_k_dense_replace", 1, least=0),
            "router": _read_router(config),
        },
    }
    config.ignore("num_nextn_predict_layers", "layers that predict further tokens are left out")
    config.ignore("num_mtp_layers", "layers that predict further tokens are left out")
    config.ignore("output_router_logits", "of training")
    return section


def _read_router(config: Config) -> dict[str, Any]:
    router: dict[str, Any] = {
        "score": "sigmoid",
        "expert_bias": True,
        "norm_top_k": config.flag("norm_topk_prob", True),
        "scale": config.number("routed_scaling_factor", 1.0),
    }
    n_groups = config.count("n_group", 1)
    group_top_k = config.count("topk_group", 1)
    if n_groups > 1:
        router |= {"n_groups": n_groups, "group_top_k": group_top_k, "group_score": "best_two"}
    return router


def write(spec: DecoderSpec) -> dict[str, Any]:
    moe = spec.moe
    has_experts = moe.in_layers(spec.n_layers)
    return base_keys(spec) | {
        "moe_intermediate_size": moe.d_expert,
        "n_routed_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        # a width that is no multiple of an expert's is read back as another one
        "n_shared_experts": max(1, (moe.d_shared or 0) // moe.d_expert),
        # where others behind the first with experts have none, it is read back as another model
        "first_k_dense_replace": (*has_experts, True).index(True),
        "norm_topk_prob": moe.router.norm_top_k,
        "routed_scaling_factor": moe.router.scale,
        "n_group": moe.router.n_groups or 1,
        "topk_group": moe.router.group_top_k or 1,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "use_qk_norm": spec.attention.qk_norm == "per_head",
        "attention_dropout": spec.attention.dropout,
        "partial_rotary_factor": spec.positions.fraction,
        **write_rope(spec.positions),
    }


FAMILY = Family("glm4_moe", "Glm4MoeForCausalLM", read, write, names, llama.KINDS, has_experts=True)
