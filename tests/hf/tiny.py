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
}
"""By a name: the `model_type`, and its keys."""
