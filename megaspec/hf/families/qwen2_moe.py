"""Qwen 1.5 and 2 with experts: Qwen 2's attention, and shared experts behind a gate (Yang et al. 2024)."""

from dataclasses import replace
from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama, qwen2, qwen3
from megaspec.hf.family import Family
from megaspec.hf.layer_kinds import with_window, write_kinds
from megaspec.hf.names import matrix
from megaspec.model.decoder.spec import DecoderSpec

NAMES = replace(
    qwen3.NAMES,
    matrices={
        **qwen3.NAMES.matrices,
        "moe.shared.w_gate_up": matrix("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "moe.shared.w_down": matrix("mlp.shared_expert.down_proj"),
        "moe.shared_gate": matrix("mlp.shared_expert_gate"),
    },
)


def read(config: Config) -> dict[str, Any]:
    section = qwen2.read_common(config)
    # every other layer, up to one
    qwen2.read_windows(config, section, has_window=lambda i, limit: i % 2 == 0 and i < limit)
    section["attention"]["qkv_bias"] = config.flag("qkv_bias", True)
    section["moe"] = {
        "n_experts": config.count("num_experts", 60),
        "top_k": config.count("num_experts_per_tok", 4),
        "d_expert": config.count("moe_intermediate_size", 1408),
        "d_shared": config.count("shared_expert_intermediate_size", 5632),
        "shared_gate": True,
        "router": {"norm_top_k": config.flag("norm_topk_prob", False)},
        **qwen3.read_layers(config),
    }
    for name in ("output_router_logits", "router_aux_loss_coef"):
        config.ignore(name, "of training")
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    return qwen2.write_common(spec) | {
        "qkv_bias": spec.attention.qkv_bias,
        "num_experts": spec.moe.n_experts,
        "num_experts_per_tok": spec.moe.top_k,
        "moe_intermediate_size": spec.moe.d_expert,
        "shared_expert_intermediate_size": spec.moe.d_shared,
        "norm_topk_prob": spec.moe.router.norm_top_k,
        **_write_windows(spec),
        **qwen3.write_layers(spec),
    }


def _write_windows(spec: DecoderSpec) -> dict[str, Any]:
    """Layer by layer: max_window_layers is not what it is in qwen2."""
    if not any(with_window(spec)):
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, **write_kinds(spec)}


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    read,
    write,
    lambda spec: NAMES,
    llama.KINDS,
    has_experts=True,
)
