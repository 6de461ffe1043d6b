"""Filled recipes of any world, whatever the rules say of them."""

import json
from typing import Any

from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.fill import plainly_filled
from megaspec.rules.run_facts import Facts
from tests import families

_SMALL = {"n_layers": 4, "d_model": 32, "n_heads": 4, "vocab_size": 37}
GPT = families.GPT2 | _SMALL
LLAMA = families.LLAMA | _SMALL | {"n_kv_heads": 2, "d_ffn": 48}
MLA = {"kind": "mla", "q_rank": 12, "kv_rank": 8, "d_nope": 6, "d_rope": 4, "d_value": 5}
MOE = {
    "n_experts": 8,
    "top_k": 2,
    "d_expert": 16,
    "d_shared": 12,
    "shared_gate": True,
    "router": {"expert_bias": True, "bias_rate": 1e-3},
}


def plan(model: dict[str, Any], changes: dict[str, Any] | None = None) -> Recipe:
    """A recipe for GPUs of a model, with other values by dotted path."""
    content: dict[str, Any] = {
        "name": "planned",
        "model": dict(model),
        "precision": {"kind": "bf16"},
        "data": {"kind": "random", "vocab_size": model["vocab_size"], "seq_len": 16, "seed": 1},
        "optim": {"kind": "adamw", "lr": 1e-3},
        "parallelism": {"tp": 1, "dp_replicate": 1},
        "train": {"steps": 8, "global_batch": 8, "micro_batch": 1},
    }
    for path, value in (changes or {}).items():
        *sections, name = path.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    target = Target(gpus=8, gpu="NVIDIA H200", sm=90, cores=64, versions={"torch": "2.13.0"})
    return plainly_filled(Recipe.model_validate_json(json.dumps(content)), target, Facts(run_dir="run"))
