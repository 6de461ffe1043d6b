"""GPT-2 (Radford et al. 2019), whose matrices are stored transposed."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.family import ACTIVATIONS, Family
from megaspec.hf.names import Matrix, Names
from megaspec.model.decoder.spec import DecoderSpec


def _transposed(name: str) -> Matrix:
    return Matrix((name,), transposed=True)


NAMES = Names(
    layer="transformer.h.{n}.",
    matrices={
        "attn.wqkv": _transposed("attn.c_attn"),
        "attn.wo": _transposed("attn.c_proj"),
        "mlp.w_up": _transposed("mlp.c_fc"),
        "mlp.w_down": _transposed("mlp.c_proj"),
    },
    vectors={"norm1": "ln_1", "norm2": "ln_2"},
    ends={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    ignored={
        r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias": "the causal mask, which follows from the positions",
    },
)


def read(config: Config) -> dict[str, Any]:
    d_model = config.count("n_embd")
    n_heads = config.count("n_head")
    section = {
        "kind": "decoder",
        "n_layers": config.count("n_layer"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "d_head": d_model // n_heads if d_model and n_heads else None,
        "d_ffn": config.count("n_inner", 4 * (d_model or 1)),
        "vocab_size": config.count("vocab_size"),
        "max_seq_len": config.count("n_positions"),
        "init_std": config.number("initializer_range", 0.02),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "positions": {"kind": "learned"},
        "norm": {"kind": "layer", "eps": config.number("layer_norm_epsilon", 1e-5)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": True,
            "out_bias": True,
            "dropout": config.number("attn_pdrop", 0.1),
        },
        "mlp": {
            "kind": "plain",
            "activation": config.one_of("activation_function", ACTIVATIONS, "gelu_new"),
            "bias": True,
        },
        "dropout": config.number("resid_pdrop", 0.1),
    }
    config.fixed("scale_attn_weights", True, "scores are divided by the root of the head's size")
    config.fixed("scale_attn_by_inverse_layer_idx", False, "every layer's scores have one scale")
    config.ignore("reorder_and_upcast_attn", "how transformers computes")
    config.ignore("embd_pdrop", "of training")
    config.ignore("n_ctx", "the old name of n_positions")
    for name in ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"):
        config.ignore(name, "of classification")
    config.ignore("summary_first_dropout", "of classification")
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    activation = "gelu_new" if spec.mlp.activation == "gelu_tanh" else spec.mlp.activation
    return {
        "n_layer": spec.n_layers,
        "n_embd": spec.d_model,
        "n_head": spec.n_heads,
        "n_inner": spec.d_ffn,
        "n_positions": spec.max_seq_len,
        "vocab_size": spec.vocab_size,
        "initializer_range": spec.init_std,
        "layer_norm_epsilon": spec.norm.eps,
        "activation_function": activation,
        "attn_pdrop": spec.attention.dropout,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "tie_word_embeddings": spec.tied_embeddings,
    }


KINDS = {"positions": "learned", "norm": "layer", "layer": "sequential", "attention": "gqa", "mlp": "plain"}
FAMILY = Family("gpt2", "GPT2LMHeadModel", read, write, lambda spec: NAMES, KINDS)
