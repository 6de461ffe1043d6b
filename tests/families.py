"""Chosen parts of a decoder that several tests name, as the language writes them."""

from typing import Any

LLAMA: dict[str, Any] = {"kind": "decoder"}
"""What a decoder is where nothing is said."""
GPT2: dict[str, Any] = {
    "kind": "decoder",
    "positions": {"kind": "learned"},
    "norm": {"kind": "layer"},
    "attention": {"kind": "gqa", "qkv_bias": True, "out_bias": True},
    "mlp": {"kind": "plain", "activation": "gelu_tanh", "bias": True},
    "tied_embeddings": True,
}
POST: dict[str, Any] = LLAMA | {"layer": {"kind": "sequential", "norms": "post"}}
"""Norms behind each sub-layer alone, as in OLMo 2."""
SANDWICH: dict[str, Any] = LLAMA | {
    "layer": {"kind": "sequential", "norms": "sandwich"},
    "norm": {"kind": "rms", "weight": "one_plus"},
    "mlp": {"kind": "gated", "activation": "gelu_tanh"},
    "embedding_scale": 2.5,
}
"""Norms before and behind each sub-layer, with Gemma's other choices."""
PARALLEL: dict[str, Any] = LLAMA | {
    "layer": {"kind": "parallel"},
    "norm": {"kind": "layer", "bias": False},
    "attention": {"kind": "gqa", "qkv_bias": True},
    "mlp": {"kind": "plain", "activation": "relu_squared", "bias": True},
}
"""Attention and feed-forward side by side, behind one norm without a bias, as in Cohere's models."""
FLAT: dict[str, Any] = LLAMA | {"positions": {"kind": "none"}}
"""One sub-layer a layer, without positions, as in Nemotron-H; its list of sub-layers is as long as the model."""
MIXED: dict[str, Any] = LLAMA | {
    "positions": {
        "kind": "rotary",
        "fraction": 0.5,
        "scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 8},
    },
    "layer_types": {
        "near": {"mask": {"kind": "window", "size": 3}},
        "far": {
            "positions": {"kind": "rotary", "scaling": {"kind": "dynamic", "factor": 2, "original_max_seq_len": 4}}
        },
        "free": {"positions": {"kind": "none"}},
    },
    "layer_pattern": ["near", "free", "far"],
}
"""Layers that see a window, and that turn their heads in different ways, or not, as in Gemma 3 and Cohere 2."""
ENDS: dict[str, Any] = LLAMA | {
    "residual_scale": 0.6,
    "head_bias": True,
    "logit_scale": 0.7,
    "logit_cap": 1.5,
    "mlp": {"kind": "clamped", "limit": 0.5, "bias": True},
}
"""Factors on branches and logits, a cap and a bias, as Granite, Cohere, Gemma 2 and Phi have them."""
FAMILIES = {
    "llama": LLAMA,
    "gpt": GPT2,
    "post": POST,
    "sandwich": SANDWICH,
    "parallel": PARALLEL,
    "flat": FLAT,
    "mixed": MIXED,
    "ends": ENDS,
}
"""By the name that tests have for them."""


def with_attention(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A model with other options of its attention."""
    return model | {"attention": {"kind": "gqa"} | model.get("attention", {}) | changes}
