"""Mixtures of experts at published sizes: each can be exported, and counts what transformers' class of it counts."""

import os
from typing import Any

import pytest
import torch

from megaspec.compose.compose import compose
from megaspec.estimate.parameters import count_parameters
from megaspec.hf.family import comparable, is_of_training, objections
from megaspec.hf.table import FAMILIES, read_model
from megaspec.resolve.fill import plainly_filled
from megaspec.rules.difference import changed
from megaspec.rules.run_facts import Facts
from tests.golden_specs import GPUS

# Families whose sizes are published and not shipped, as the keys of their config.json.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "rope_theta": 150000,
    "rope_scaling": _YARN,
    "attention_bias": True,
    "rms_norm_eps": 1e-05,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
GLM_4_5_AIR = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
GLM_4_5 = GLM_4_5_AIR | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "use_qk_norm": True,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}
LLAMA_4_SCOUT = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "max_position_embeddings": 10485760,
    "attention_chunk_size": 8192,
    # as its first readers took it
    "attn_temperature_tuning": 4,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "use_qk_norm": True,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-05,
    "router_jitter_noise": 0.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("name", "model_type", "total"),
    [
        ("mixtral_8x7b", "mixtral", 46_702_792_704),
        ("qwen3_30b_a3b", "qwen3_moe", 30_532_122_624),
        ("olmoe_1b_7b", "olmoe", 6_919_161_856),
        ("gpt_oss_20b", "gpt_oss", 20_914_757_184),
    ],
)
def test_a_size_that_ships_is_its_familys(name: str, model_type: str, total: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = plainly_filled(compose(name).recipe, GPUS["H100"].model_copy(update={"gpus": 64}), Facts("x")).model
    family = FAMILIES[model_type]
    assert objections(family, spec) == []
    assert count_parameters(spec).total == total
    config = AutoConfig.for_model(model_type, **family.write(spec))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == total


def test_the_recipe_of_gpt_oss_takes_the_published_weights() -> None:
    """Its layers have other names, and it has losses of its own."""
    published = read_model(GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32}, "config.json")
    recipe = plainly_filled(compose("gpt_oss_20b").recipe, GPUS["H100"].model_copy(update={"gpus": 16}), Facts("x"))
    found = [key for key, _, _ in changed(*comparable(recipe.model, published)) if not is_of_training(key)]
    assert found == []


# That of gpt-oss is the published one; the others are what transformers' class keeps, with the biases that experts are
# chosen by.
@pytest.mark.parametrize(
    ("config", "total"),
    [
        (GPT_OSS_120B, 116_829_156_672),
        (GLM_4_5_AIR, 106_852_251_264),
        (GLM_4_5, 352_797_829_024),
        (LLAMA_4_SCOUT, 107_769_861_120),
    ],
    ids=["gpt-oss-120b", "GLM-4.5-Air", "GLM-4.5", "Llama 4 Scout"],
)
def test_a_published_size_counts_what_theirs_counts(config: dict[str, Any], total: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = read_model(config, "config.json")
    family = FAMILIES[config["model_type"]]
    assert objections(family, spec) == []
    assert count_parameters(spec).total == total
    written = AutoConfig.for_model(config["model_type"], **family.write(spec))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(written)
    assert sum(value.numel() for value in theirs.state_dict().values()) == total
