"""Random decoders: every choice of parts that the language has, in sizes that take no time."""

from typing import Any

from hypothesis import strategies as st

VOCABULARY = 24
TOKENS = 8

_NORMS = st.one_of(
    st.fixed_dictionaries({"kind": st.just("rms"), "weight": st.sampled_from(["scale", "one_plus", "none"])}),
    st.fixed_dictionaries(
        {
            "kind": st.just("layer"),
            "weight": st.sampled_from(["scale", "one_plus", "none"]),
            "bias": st.booleans(),
        }
    ),
)
_SCALINGS: list[dict[str, Any]] = [
    {"kind": "llama3", "original_max_seq_len": 4},
    {"kind": "linear", "factor": 2.0},
    {"kind": "dynamic", "factor": 2.0, "original_max_seq_len": 4},
    {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 4},
    {"kind": "proportional", "fraction": 0.5},
]
_ROTARY = st.one_of(
    st.fixed_dictionaries({"kind": st.just("rotary"), "base": st.sampled_from([100.0, 10_000.0])}),
    st.fixed_dictionaries({"kind": st.just("rotary"), "scaling": st.sampled_from(_SCALINGS)}),
    # two features of four, four of six
    st.just({"kind": "rotary", "fraction": 0.67}),
)
_POSITIONS = st.one_of(
    _ROTARY,
    st.just({"kind": "learned"}),
    st.just({"kind": "none"}),
)
_MASKS = st.one_of(
    st.just({"kind": "causal"}),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["window", "chunk"]), "size": st.sampled_from([1, 3, TOKENS, 2 * TOKENS])}
    ),
)


@st.composite
def _attention(draw: st.DrawFn, *, positions: set[str], norm: str) -> dict[str, Any]:
    """`positions`: kinds that the layers have."""
    qk_norms = ["none", "per_head"]
    if norm == "rms":
        qk_norms.append("whole")
    if "rotary" in positions:
        qk_norms.append("l2")
    temperature: dict[str, Any] = {"kind": "none"}
    if positions != {"rotary"} and draw(st.booleans()):
        temperature = {"kind": "log", "scale": 0.5, "floor_scale": 3.0}
    return {
        "kind": "gqa",
        "mask": draw(_MASKS),
        "qkv_bias": draw(st.booleans()),
        "out_bias": draw(st.booleans()),
        "qk_norm": draw(st.sampled_from(qk_norms)),
        "clip_qkv": draw(st.sampled_from([None, 0.5])),
        "score_scale": draw(st.sampled_from([None, 0.3])),
        "score_cap": draw(st.sampled_from([None, 2.0])),
        "sinks": draw(st.booleans()),
        "output_gate": draw(st.booleans()),
        "temperature": temperature,
    }


_MLP = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["gated", "plain"]),
            "activation": st.sampled_from(["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"]),
            "bias": st.booleans(),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("clamped"), "limit": st.sampled_from([0.5, 7.0]), "bias": st.booleans()}),
)
_MIXERS = ("attention", "mlp", "moe")


@st.composite
def _router(draw: st.DrawFn, *, n_experts: int) -> dict[str, Any]:
    router: dict[str, Any] = {
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "norm_top_k": draw(st.booleans()),
        "logit_bias": draw(st.booleans()),
    }
    if router["score"] == "sigmoid" and draw(st.booleans()):
        router["expert_bias"] = True
        router["bias_rate"] = draw(st.sampled_from([0.0, 1e-3]))
    if n_experts == 4 and draw(st.booleans()):
        router |= {"n_groups": 2, "group_top_k": 1, "group_score": draw(st.sampled_from(["share", "best", "best_two"]))}
    return router


@st.composite
def _moe(draw: st.DrawFn) -> dict[str, Any]:
    shared = draw(st.sampled_from([None, 4, 8]))
    n_experts = draw(st.sampled_from([2, 4]))
    router = draw(_router(n_experts=n_experts))
    return {
        "n_experts": n_experts,
        "top_k": 2 if router["norm_top_k"] else draw(st.sampled_from([1, 2])),
        "d_expert": draw(st.sampled_from([4, 12])),
        "d_shared": shared,
        "shared_gate": shared is not None and draw(st.booleans()),
        "weights_on": draw(st.sampled_from(["outputs", "outputs", "inputs"])),
        "router": router,
    }


@st.composite
def decoders(draw: st.DrawFn) -> dict[str, Any]:
    """The section `model` of a recipe that breaks no rule."""
    n_layers = draw(st.integers(1, 3))
    n_heads = draw(st.sampled_from([2, 4]))
    model: dict[str, Any] = {
        "kind": "decoder",
        "n_layers": n_layers,
        "d_model": draw(st.sampled_from([8, 16, 24])),
        "n_heads": n_heads,
        "n_kv_heads": draw(st.sampled_from([n for n in (1, 2, 4) if n <= n_heads])),
        "d_head": draw(st.sampled_from([4, 6])),
        "d_ffn": draw(st.sampled_from([4, 20])),
        "vocab_size": VOCABULARY,
        "vocab_pad_to": 1,
        "max_seq_len": 2 * TOKENS,
        "tied_embeddings": draw(st.booleans()),
        "embedding_scale": draw(st.sampled_from([1.0, 3.5])),
        "init_std": 0.2,
        "residual_scale": draw(st.sampled_from([1.0, 0.7])),
        "head_bias": draw(st.booleans()),
        "logit_scale": draw(st.sampled_from([1.0, 0.3])),
        "logit_cap": draw(st.sampled_from([None, 2.0])),
        "norm": draw(_NORMS),
        "positions": draw(_POSITIONS),
        "mlp": draw(_MLP),
        "moe": draw(st.none() | _moe()),
    }
    kind = draw(st.sampled_from(["sequential", "sequential", "parallel", "flat"]))
    layer: dict[str, Any] = {"kind": kind}
    if kind == "sequential":
        layer["norms"] = draw(st.sampled_from(["pre", "post", "sandwich"]))
    if kind == "flat":
        allowed = _MIXERS if model["moe"] else _MIXERS[:2]
        mixers = draw(st.lists(st.sampled_from(allowed), min_size=n_layers, max_size=n_layers))
        if model["moe"] and "moe" not in mixers:
            mixers[-1] = "moe"
        layer["mixers"] = mixers
    elif model["moe"]:
        model["moe"]["first_dense"] = draw(st.integers(0, n_layers - 1))
    model["layer"] = layer
    positions = {model["positions"]["kind"]}
    if kind != "flat" and n_layers > 1 and draw(st.booleans()):
        other: dict[str, Any] = {"mask": draw(_MASKS)}
        if positions <= {"rotary", "none"} and draw(st.booleans()):
            other["positions"] = draw(_ROTARY | st.just({"kind": "none"}))
            positions.add(other["positions"]["kind"])
        model["layer_types"] = {"plain": {}, "other": other}
        model["layer_pattern"] = draw(st.sampled_from([["plain", "other"], ["other", "plain", "other"]]))
    model["attention"] = draw(_attention(positions=positions, norm=model["norm"]["kind"]))
    return model
