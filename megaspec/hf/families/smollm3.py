"""SmolLM 3 (Hugging Face 2025): Llama's blocks, every fourth layer without positions."""

from typing import Any

from megaspec.hf.config import Config
from megaspec.hf.families import llama
from megaspec.hf.family import Family
from megaspec.hf.layer_kinds import put_kinds
from megaspec.hf.rope import read_rope, write_rope
from megaspec.model.decoder.spec import DecoderSpec


def read(config: Config) -> dict[str, Any]:
    section = llama.read(config)
    section["tied_embeddings"] = config.flag("tie_word_embeddings", True)
    section["positions"] = read_rope(config, base=2e6)
    config.fixed("use_sliding_window", False, "its windows stand where layers have no positions")
    config.ignore("sliding_window", "use_sliding_window=false")
    config.ignore("layer_types", "use_sliding_window=false")
    interval = config.count("no_rope_layer_interval", 4)
    n_layers = section["n_layers"] or 0
    turned = config.entries("no_rope_layers", [int((i + 1) % interval != 0) for i in range(n_layers)], of=int)
    if len(turned) != n_layers:
        config.refuse(f"no_rope_layers has {len(turned)} entries for num_hidden_layers={n_layers}")
    kinds = ["turned" if is_turned else "free" for is_turned in turned]
    put_kinds(section, kinds, {"turned": {}, "free": {"positions": {"kind": "none"}}})
    return section


def write(spec: DecoderSpec) -> dict[str, Any]:
    turned = [positions for positions in map(spec.positions_of, spec.types) if positions.is_rotary]
    keys = llama.write(spec.model_copy(update={"positions": turned[0]})) if turned else {}
    return keys | {
        "no_rope_layers": [int(spec.positions_of(layer_type).is_rotary) for layer_type in spec.types],
        "use_sliding_window": False,
        **(write_rope(turned[0]) if turned else {}),
    }


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", read, write, lambda spec: llama.NAMES, llama.KINDS)
