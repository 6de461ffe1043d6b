"""Llama 4, text (Meta 2025): chunks with rotary positions that are stored as pairs, between layers that see everything
and have none; experts whose input is weighted, beside a shared one."""

from dataclasses import replace
from typing import Any

from megaspec.hf.blocks import pairs_to_halves
from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import ACTIVATIONS, THEIR_ACTIVATIONS, Family, base_keys, base_section
from megaspec.hf.layer_kinds import CHUNKED, FULL, put_kinds
from megaspec.hf.names import Matrix, Names, matrix
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.nn.attention.spec import ChunkMask, LogTemperature


def names(spec: DecoderSpec) -> Names:
    """Rows of query and key heads lie in pairs, in layers without positions too, where their order says nothing."""
    pairs = (spec.d_head, pairs_to_halves(spec.d_head, spec.d_head))
    return replace(
        llama.NAMES,
        matrices={
            "attn.wqkv": Matrix(
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), within=(pairs, pairs, None)
            ),
            "attn.wo": matrix("self_attn.o_proj"),
            "mlp.w_gate_up": matrix("feed_forward.gate_proj", "feed_forward.up_proj"),
            "mlp.w_down": matrix("feed_forward.down_proj"),
            "moe.router": matrix("feed_forward.router"),
            # all experts in one tensor of [experts, inputs, outputs]
            "moe.experts.w_gate_up": Matrix(("feed_forward.experts.gate_up_proj",), transposed=True, weight=""),
            "moe.experts.w_down": Matrix(("feed_forward.experts.down_proj",), transposed=True, weight=""),
            "moe.shared.w_gate_up": matrix(
                "feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"
            ),
            "moe.shared.w_down": matrix("feed_forward.shared_expert.down_proj"),
        },
    )


def read(config: Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    d_expert = config.count("intermediate_size")
    section = base_section(config) | {
        "d_ffn": config.count("intermediate_size_mlp", 16384),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "positions": {"kind": "none"},
        "norm": {"kind": "rms", "eps": config.number("rms_norm_eps", 1e-5)},
        "attention": {
            "kind": "gqa",
            "qkv_bias": bias,
            "out_bias": bias,
            "qk_norm": "l2" if config.flag("use_qk_norm", True) else "none",
            "dropout": config.number("attention_dropout", 0.0),
        },
        "mlp": {"kind": "gated", "activation": config.one_of("hidden_act", ACTIVATIONS, "silu")},
        "moe": {
            "n_experts": config.count("num_local_experts", 16),
            "top_k": config.count("num_experts_per_tok", 1),
            "d_expert": d_expert,
            "d_shared": d_expert,
            "weights_on": "inputs",
            "router": {"score": "sigmoid", "norm_top_k": False},
            **_read_layers(config),
        },
    }
    _read_temperature(config, section)
    _read_kinds(config, section)
    for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        config.ignore(name, "of training")
    config.ignore("cache_implementation", "of generation")
    config.ignore("for_llm_compressor", "of how a file was made")
    return section


def _read_temperature(config: Config, section: dict[str, Any]) -> None:
    """Of layers without positions."""
    scale = config.number("attn_scale", 0.1)
    floor_scale = config.number("floor_scale", 8192.0)
    # files of 2025 have a 4 there, which is as good as true
    if isinstance(config.values.get("attn_temperature_tuning"), bool):
        is_tuned = config.flag("attn_temperature_tuning")
    else:
        is_tuned = config.count("attn_temperature_tuning", 1, least=0) > 0
    if is_tuned:
        section["attention"]["temperature"] = {"kind": "log", "scale": scale, "floor_scale": floor_scale}


def _read_kinds(config: Config, section: dict[str, Any]) -> None:
    """Which layers see a chunk, and which have positions: each said by a list of its own."""
    n_layers = config.values.get("num_hidden_layers") or 0
    interval = config.count("no_rope_layer_interval", 4)
    turns = config.entries("no_rope_layers", None, of=int) or [int((i + 1) % interval != 0) for i in range(n_layers)]
    masks = config.entries("layer_types", [CHUNKED if one else FULL for one in turns], of=str)
    rope = read_rope(config, base=500_000.0)
    chunk = {}
    if CHUNKED in masks:
        chunk = {"mask": {"kind": "chunk", "size": config.count("attention_chunk_size", 8192)}}
    else:
        config.ignore("attention_chunk_size", "no layer has chunks")
    if len(turns) != n_layers or set(turns) - {0, 1}:
        config.refuse(f"no_rope_layers must have 1 or 0 for each of num_hidden_layers={n_layers}: whether it has rope")
        return
    if len(masks) != n_layers or set(masks) - {CHUNKED, FULL}:
        config.refuse(f"layer_types must have {CHUNKED} or {FULL} for each of num_hidden_layers={n_layers}")
        return
    # what the published sizes have goes by the name of its mask
    types = {
        CHUNKED: chunk | {"positions": rope},
        FULL: {},
        f"{CHUNKED}_without_positions": chunk,
        f"{FULL}_with_positions": {"positions": rope},
    }
    kinds = []
    for mask, is_turned in zip(masks, turns, strict=True):
        suffix = ""
        if mask == CHUNKED and not is_turned:
            suffix = "_without_positions"
        if mask == FULL and is_turned:
            suffix = "_with_positions"
        kinds.append(mask + suffix)
    put_kinds(section, kinds, types)


def _read_layers(config: Config) -> dict[str, Any]:
    """Layers with experts, from the first whole step on, or those of a list."""
    step = config.count("interleave_moe_layer_step", 1)
    listed = config.entries("moe_layers", None, of=int)
    n_layers = config.values.get("num_hidden_layers")
    if listed is None or type(n_layers) is not int:
        return {"every": step, "first_dense": step - 1}
    for number in listed:
        if not 0 <= number < n_layers:
            config.refuse(f"moe_layers has {number}, num_hidden_layers={n_layers} are numbered from 0")
    if listed == list(range(step - 1, n_layers, step)):
        return {"every": step, "first_dense": step - 1}
    if not listed:
        config.refuse("moe_layers=[] leaves no layer with experts")
    return {"layers": [int(i in listed) for i in range(n_layers)]}


def write(spec: DecoderSpec) -> dict[str, Any]:
    chunk = None
    rotary = None
    masks = []
    turns = []
    for layer_type in spec.types:
        mask = spec.attention_of(layer_type).mask
        positions = spec.positions_of(layer_type)
        is_chunk = isinstance(mask, ChunkMask)
        masks.append(CHUNKED if is_chunk else FULL)
        turns.append(int(positions.is_rotary))
        if is_chunk:
            chunk = chunk or mask.size
        if positions.is_rotary:
            rotary = rotary or positions
    has_experts = spec.moe.in_layers(spec.n_layers)
    keys = base_keys(spec) | {
        "intermediate_size": spec.moe.d_expert,
        "intermediate_size_mlp": spec.d_ffn,
        "num_local_experts": spec.moe.n_experts,
        "num_experts_per_tok": spec.moe.top_k,
        "moe_layers": [i for i, has in enumerate(has_experts) if has],
        "rms_norm_eps": spec.norm.eps,
        "hidden_act": THEIR_ACTIVATIONS[spec.mlp.activation],
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": spec.attention.dropout,
        "use_qk_norm": spec.attention.qk_norm == "l2",
        "no_rope_layers": turns,
        "layer_types": masks,
        "attention_chunk_size": chunk,
    }
    if spec.moe.layers is None and spec.moe.first_dense == spec.moe.every - 1:
        # the list says it for readers that know no step
        keys["interleave_moe_layer_step"] = spec.moe.every
    keys["attn_temperature_tuning"] = isinstance(spec.attention.temperature, LogTemperature)
    if isinstance(spec.attention.temperature, LogTemperature):
        keys["attn_scale"] = spec.attention.temperature.scale
        # whole tokens, wherever they are
        steps = spec.attention.temperature.floor_scale
        keys["floor_scale"] = int(steps) if steps.is_integer() else steps
    if rotary is not None:
        keys |= write_rope(rotary)
    return keys


KINDS = {"norm": "rms", "layer": "sequential", "attention": "gqa", "mlp": "gated"}
FAMILY = Family("llama4_text", "Llama4ForCausalLM", read, write, names, KINDS, has_experts=True)
