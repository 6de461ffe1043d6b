"""A small configuration of each family, as keys of transformers' configuration class.

Sizes are such that what is confused shows: heads times their size is not the width, an expert is as wide as nothing
else, a sequence is longer than what the frequencies were trained for, and biases are never 0 (models.py fills them).
"""

from typing import Any

TOKENS = 24
_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "initializer_range": 0.1,
    "rms_norm_eps": 0.02,
    # with one, transformers does not train its row of the embedding
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

_WITH_LAYER_NORM = {name: value for name, value in _SIZES.items() if name != "rms_norm_eps"}
_LAYERS = {"num_hidden_layers": 4, "sliding_window": 7}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    # ends of the ramp that lie between the first and the last frequency
    "beta_fast": 1.2,
    "beta_slow": 0.2,
    # rounding would hide what the ends of the ramp follow from
    "truncate": False,
}
_GLM_EXPERTS = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    # in four groups, or in five
    "n_routed_experts": 20,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    # shorter than the sequence
    "attention_chunk_size": 7,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0],
    "partial_rotary_factor": 0.75,
}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        {
            "vocab_size": 96,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 40,
            "n_positions": 64,
            # large enough that both forms of GELU differ
            "initializer_range": 0.6,
            "layer_norm_epsilon": 0.02,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama 2": ("llama", _SIZES | {"num_key_value_heads": 4}),
    "llama 3.1": ("llama", _SIZES | {"head_dim": 12, "rope_parameters": _LLAMA3}),
    "llama with biases": ("llama", _SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral 0.1": ("mistral", _SIZES | {"head_dim": 12, "sliding_window": 7}),
    "mistral": ("mistral", _SIZES | {"head_dim": 12, "sliding_window": None}),
    "mixtral": ("mixtral", _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmoe": (
        "olmoe",
        _SIZES | {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.9, "norm_topk_prob": False},
    ),
    "olmoe, weights sum to 1": (
        "olmoe",
        _SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen2": ("qwen2", _SIZES),
    "qwen2, windows": ("qwen2", _SIZES | _LAYERS | {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen2 with experts": (
        "qwen2_moe",
        _SIZES | _EXPERTS | {"shared_expert_intermediate_size": 20, "norm_topk_prob": False},
    ),
    "qwen2, every other layer with experts": (
        "qwen2_moe",
        _SIZES
        | _EXPERTS
        | {
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
        },
    ),
    "qwen2 with experts, windows": (
        "qwen2_moe",
        _SIZES
        | _EXPERTS
        | _LAYERS
        | {"shared_expert_intermediate_size": 20, "use_sliding_window": True, "max_window_layers": 3},
    ),
    "qwen3 with experts, windows": (
        "qwen3_moe",
        _SIZES | _EXPERTS | {"head_dim": 12, "use_sliding_window": True, "sliding_window": 7, "norm_topk_prob": True},
    ),
    "qwen3": ("qwen3", _SIZES | {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3 with experts": ("qwen3_moe", _SIZES | _EXPERTS | {"head_dim": 12, "norm_topk_prob": True}),
    "qwen3, some with experts": (
        "qwen3_moe",
        _SIZES
        | _EXPERTS
        | {
            "head_dim": 12,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "llama, yarn": ("llama", _SIZES | {"head_dim": 32, "rope_parameters": _YARN}),
    "gemma": ("gemma", _SIZES | {"head_dim": 12}),
    "gemma2": (
        "gemma2",
        _SIZES
        | _LAYERS
        | {
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            # large scores and logits, which caps bend
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _SIZES
        | _LAYERS
        | {
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": _LINEAR,
            },
        },
    ),
    "olmo": ("olmo", _WITH_LAYER_NORM | {"clip_qkv": 0.3, "initializer_range": 0.05}),
    "olmo2": ("olmo2", _SIZES),
    "olmo3": (
        "olmo3",
        _SIZES | _LAYERS | {"rope_parameters": {"sliding_attention": {"rope_theta": 5e5}, "full_attention": _LINEAR}},
    ),
    "phi": ("phi", _WITH_LAYER_NORM | {"layer_norm_eps": 0.02}),
    "phi3": (
        "phi3",
        _SIZES | {"sliding_window": 19, "original_max_position_embeddings": 16, "rope_parameters": _LONGROPE},
    ),
    "phi3, short sequences": ("phi3", _SIZES | {"original_max_position_embeddings": 32, "rope_parameters": _LONGROPE}),
    "smollm3": ("smollm3", _SIZES | {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "glm4": ("glm4", _SIZES | {"head_dim": 16, "attention_bias": True}),
    "glm4 with experts": (
        "glm4_moe",
        _SIZES
        | _GLM_EXPERTS
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "use_qk_norm": True, "norm_topk_prob": True},
    ),
    "glm4 with experts, no groups": (
        "glm4_moe",
        _SIZES
        | _GLM_EXPERTS
        | {"first_k_dense_replace": 2, "attention_bias": True, "use_qk_norm": False, "norm_topk_prob": False},
    ),
    "gpt_oss": (
        "gpt_oss",
        _SIZES
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            # within reach of gates and what they multiply
            "swiglu_limit": 0.4,
            "swiglu_alpha": 1.3,
            "rope_parameters": _YARN,
        },
    ),
    "gpt_oss, square experts": (
        "gpt_oss",
        _SIZES
        | {
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention"],
            "swiglu_limit": 0.4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "llama4": (
        "llama4_text",
        _SIZES
        | _LLAMA4
        | {
            "interleave_moe_layer_step": 2,
            "floor_scale": 4,
            "attn_scale": 0.5,
            # as in Scout: no wavelength lies between both ends, and here many lie beside them
            "head_dim": 16,
            "rope_parameters": _LLAMA3
            | {"high_freq_factor": 1.0, "rope_theta": 16.0, "original_max_position_embeddings": 17},
        },
    ),
    "llama4, lists of layers": (
        "llama4_text",
        _SIZES
        | _LLAMA4
        | {
            "moe_layers": [0, 1, 3],
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention", "full_attention"],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "granite": (
        "granite",
        _SIZES
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.5,
        },
    ),
    "nemotron": ("nemotron", _WITH_LAYER_NORM | {"head_dim": 16, "norm_eps": 0.02}),
    "cohere2": ("cohere2", _WITH_LAYER_NORM | _LAYERS | {"layer_norm_eps": 0.02, "logit_scale": 0.6}),
    "starcoder2": (
        "starcoder2",
        _WITH_LAYER_NORM | {"norm_epsilon": 0.02, "sliding_window": 7, "initializer_range": 0.3},
    ),
}
"""By a name: the `model_type`, and its keys."""
