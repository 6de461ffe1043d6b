"""From the arguments of a Megatron run, as the golden files name them, to a filled recipe. More cases are added by
dropping another `flops_memory*.json` of the same form into tests/golden/."""

import json
from pathlib import Path
from typing import Any

from megaspec.recipe import Recipe
from tests.families import GPT2, LLAMA

GOLDEN = Path(__file__).parents[1] / "golden"


def cases() -> dict[str, dict[str, Any]]:
    """Every golden case, by name."""
    found = {}
    for file in sorted(GOLDEN.glob("flops_memory*.json")):
        found |= json.loads(file.read_text())["cases"]
    return found


def recipe_of(args: dict[str, Any]) -> Recipe:
    """The recipe of a case. Asserts that the language can say it."""
    for absent in ("mtp_num_layers", "moe_latent_size", "attention_output_gate", "experimental_attention_variant"):
        assert not args.get(absent), f"{absent}={args[absent]} can't be said"
    norm = "RMSNorm" if args["swiglu"] else "LayerNorm"
    assert args["normalization"] == norm, f"{args['normalization']} with swiglu={args['swiglu']} can't be said"
    pp, chunks = args["pipeline_model_parallel_size"], args["virtual_pipeline_model_parallel_size"] or 1
    is_sharded, dp = args["use_distributed_optimizer"], args["data_parallel_size"]
    micro_batch = args["micro_batch_size"]
    content = {
        "name": "golden",
        "run_dir": "-",
        "model": _model(args),
        "parallelism": {
            "tp": args["tensor_model_parallel_size"],
            "pp": pp,
            "cp": args["context_parallel_size"],
            "ep": args["expert_model_parallel_size"],
            "etp": args["expert_tensor_parallel_size"] or args["tensor_model_parallel_size"],
            "dp_strategy": "zero1" if is_sharded else "replicate",
            "dp_replicate": 1 if is_sharded else dp,
            "dp_shard": dp if is_sharded else 1,
            "sequence_parallel": args["sequence_parallel"],
            "pipeline": {
                "schedule": "interleaved" if chunks > 1 else "1f1b",
                "virtual_stages": chunks,
                "micro_batch_group": pp,
            },
            "recompute": {"kind": args["recompute_granularity"] or "none"},
        },
        "precision": {"kind": "bf16"},
        "data": {"kind": "random", "vocab_size": 256, "seq_len": args["seq_length"], "seed": 1},
        "optim": {"kind": "adamw", "lr": 1e-4, "schedule": {"decay_steps": 1}},
        "kernels": {"attention": "sdpa", "cross_entropy": "triton", "grouped": "torch", "compile": "block"},
        "train": {"steps": 1, "global_batch": micro_batch * dp * pp, "micro_batch": micro_batch},
        "log": {"tensorboard": False},
        "launcher": {"ranks": args["world_size"]},
    }
    recipe = Recipe.model_validate_json(json.dumps(content))
    own = recipe.parallelism
    assert own.tp * own.pp * own.cp * dp == args["world_size"]
    return recipe


def _model(args: dict[str, Any]) -> dict[str, Any]:
    family = LLAMA if args["swiglu"] else GPT2
    model = family | {
        "n_layers": args["num_layers"],
        "d_model": args["hidden_size"],
        "n_heads": args["num_attention_heads"],
        "n_kv_heads": args["num_query_groups"] if args["group_query_attention"] else args["num_attention_heads"],
        "d_head": args["kv_channels"],
        "d_ffn": args["ffn_hidden_size"],
        # Megatron's is padded already
        "vocab_size": args["padded_vocab_size"],
        "vocab_pad_to": 1,
        "max_seq_len": args["seq_length"],
        "tied_embeddings": not args["untie_embeddings_and_output_weights"],
    }
    if args["multi_latent_attention"]:
        model["attention"] = {
            "kind": "mla",
            "q_rank": args["q_lora_rank"],
            "kv_rank": args["kv_lora_rank"],
            "d_nope": args["qk_head_dim"],
            "d_rope": args["qk_pos_emb_head_dim"],
            "d_value": args["v_head_dim"],
        }
    if args["num_experts"]:
        model["moe"] = _experts(args)
    return model


def _experts(args: dict[str, Any]) -> dict[str, Any]:
    frequency = args["moe_layer_freq"]
    where = {"every": frequency} if isinstance(frequency, int) else {"layers": [int(one) for one in frequency]}
    return where | {
        "n_experts": args["num_experts"],
        "top_k": args["moe_router_topk"],
        "d_expert": args["moe_ffn_hidden_size"] or args["ffn_hidden_size"],
        "d_shared": args["moe_shared_expert_intermediate_size"],
        "shared_gate": bool(args["moe_shared_expert_gate"]),
        "router": {"expert_bias": bool(args.get("moe_router_enable_expert_bias"))},
    }
