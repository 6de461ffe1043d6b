"""FLOPs and bytes against what Megatron-LM's own functions gave (tests/golden/flops_memory*.json)."""

import pytest

from megaspec.estimate.buckets import stage_buckets
from megaspec.estimate.flops import flops_per_sequence, flops_per_token
from megaspec.estimate.formula import sharing_ranks
from megaspec.estimate.memory import memory_of
from megaspec.estimate.parameters import count_parameters
from megaspec.parallelism.stages import stages_of
from tests.estimate.megatron_adapter import cases, recipe_of
from tests.estimate.megatron_memory import activation_bytes, weight_and_optimizer_bytes

CASES = cases()
# Megatron sums in floating point; ours are whole numbers and fractions, rounded once.
ROUNDING = 1e-14


@pytest.mark.parametrize("name", CASES)
def test_flops(name):
    case = CASES[name]
    recipe, seq_len = recipe_of(case["args"]), case["args"]["seq_length"]
    own = recipe.parallelism
    flops = flops_per_sequence(recipe.model, seq_len=seq_len, tp=own.tp)
    assert flops == pytest.approx(case["flops_per_sequence"], rel=ROUNDING)
    assert flops_per_token(recipe.model, seq_len=seq_len) == pytest.approx(case["flops_per_token"], rel=ROUNDING)


def test_weights_and_optimizer_of_the_plan():
    """Of the first stage, to the byte but for what pads buffers: the differences are what Megatron leaves out or counts
    otherwise."""

    def planned(name):
        recipe = recipe_of(CASES[name]["args"])
        stage = memory_of(recipe)[0]
        buckets = stage_buckets(recipe, stages_of(recipe.model.n_layers, recipe.parallelism)[0]).all
        padding = buckets.whole.total - buckets.elements.total
        assert padding < 1e-3 * buckets.elements.total
        # of weights and gradients; the optimizer has none, but one rank more of it than others
        ranks = sharing_ranks(recipe.parallelism)
        evenly = buckets.elements.dense / ranks.dense + buckets.elements.expert / ranks.expert
        unevenly = stage.optimizer - 12 * evenly
        assert 0 <= unevenly < 1e-3 * stage.optimizer
        return stage.weights + stage.gradients + stage.optimizer - unevenly - (2 + 4) * padding

    golden = {name: case["weight_optimizer_bytes"] for name, case in CASES.items()}
    # learned positions, biases of 6 layers; the last norm, of which each stage has a part there
    biases = 6 * (3 * 12288 // 8 + 12288 + 49152 // 8 + 12288)
    left_out = 2048 * 12288 + biases - 2 * 12288 // 16
    assert planned("gpt3-175b") - golden["gpt3-175b"] == (6 + 12 / 8) * left_out
    # the optimizer is shared out over dp and cp, over dp alone there; sines and cosines in fp32
    angles = 8192 * 64 * 2 * 4
    assert planned("llama3-8b") - angles == golden["llama3-8b"] / (6 + 12 / 4) * (6 + 12 / 8)
    angles = 4096 * 64 * 2 * 4
    assert planned("mixtral-8x7b") - angles == golden["mixtral-8x7b"] - (6 + 12 / 16) * 4096 / 4


@pytest.mark.parametrize("name", CASES)
def test_weights_and_optimizer(name):
    recipe = recipe_of(CASES[name]["args"])
    assert weight_and_optimizer_bytes(recipe) == pytest.approx(CASES[name]["weight_optimizer_bytes"], rel=ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_activations(name):
    case, args = CASES[name], CASES[name]["args"]
    for key, changed in {
        "activation_bytes_sp_selective": {"sequence_parallel": True, "recompute_granularity": "selective"},
        "activation_bytes_no_sp": {"sequence_parallel": False},
    }.items():
        if key in case:
            assert activation_bytes(recipe_of(args | changed)) == pytest.approx(case[key], rel=ROUNDING)


def test_layouts_that_the_golden_file_has_not():
    """By hand, from the formulas: interleaved stages, a short step, no shared-out optimizer, experts over etp."""
    args = CASES["gpt3-175b"]["args"] | {"num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 32, "kv_channels": 2}
    args |= {"num_attention_heads": 4, "num_query_groups": 4, "padded_vocab_size": 64, "seq_length": 16}
    args |= {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "world_size": 8}
    args |= {"data_parallel_size": 2, "use_distributed_optimizer": False, "num_experts": None}
    # 4 layers of 4·8² + 2·8·32 over 2 stages, and 8·64 of the vocabulary, over 2; norms of 2·8, 2 a layer and a last
    assert weight_and_optimizer_bytes(recipe_of(args)) == 18 * ((4 * (256 + 512) / 2 + 512) / 2 + (4 * 32 + 16) / 2)
    plain = 16 * 8 * (18 + 4 * 4) * 4 + 8 * 16 * 2 + 16 * 8 * 2
    assert activation_bytes(recipe_of(args)) == plain / 2
    assert activation_bytes(recipe_of(args), micro_batches=1) == plain / 2 / 2
    assert activation_bytes(recipe_of(args | {"virtual_pipeline_model_parallel_size": 2})) == plain * 1.25 / 2
    args |= {"swiglu": True, "normalization": "RMSNorm", "num_experts": 4, "moe_router_topk": 2}
    args |= {"expert_model_parallel_size": 2, "use_distributed_optimizer": True, "moe_layer_freq": [0, 1, 0, 1]}
    args |= {"moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True}
    dense = (4 * 256 + 2 * 3 * 8 * 32 + 2 * 3 * 8 * 12) / 2 + 512
    whole = (9 * 8 + 2 * 8 * 4 + 2 * 8) / 2
    experts = 2 * 4 * 3 * 8 * 16 / 2 / 2
    # experts: 8 ranks are 2 stages of 2 (ep) and 2 replicas, as many as of everything else
    assert weight_and_optimizer_bytes(recipe_of(args)) == (dense / 2 + whole) * 12 + experts * 12


def test_latent_attention_counts_its_norms_as_one_each():
    args = CASES["mixtral-8x7b"]["args"] | {"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 10}
    args |= {"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "kv_channels": 10, "num_layers": 1}
    args |= {"hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2, "seq_length": 16, "num_experts": None}
    args |= {"ffn_hidden_size": 32, "padded_vocab_size": 64, "pipeline_model_parallel_size": 1, "world_size": 16}
    args |= {"expert_model_parallel_size": 1}
    model = recipe_of(args).model
    weights = 12 * (8 + 2 * 10 + 1) + 10 * (8 + 2 * 11 + 1) + 8 * 4 + 2 * 5 * 8
    scores = 6 * (2 * 10 / 2 + 2 * 5 / 2)
    assert flops_per_sequence(model, seq_len=16) == 16 * 6 * (weights + 3 * 8 * 32 + 8 * 64) + 16**2 * scores
    full = flops_per_sequence(model, seq_len=16, convention="full")
    assert full - flops_per_sequence(model, seq_len=16) == 16**2 * scores
    # the parameters have the widths of both latents for them
    assert count_parameters(model).attention == weights - 22
    assert count_parameters(model).norms == 3 * 8 + 22
