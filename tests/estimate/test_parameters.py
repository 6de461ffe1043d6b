"""Parameters against published totals, the modules that are built, and counts by hand."""

import pytest

from megaspec.compose.compose import compose
from megaspec.estimate.parameters import count_parameters, rank_parameters
from megaspec.estimate.target import Target
from megaspec.resolve.fill import plainly_filled
from megaspec.rules.run_facts import Facts
from tests.families import with_attention
from tests.plan.plans import GPT, LLAMA, MLA, MOE, plan

H200 = Target(gpus=1024, gpu="NVIDIA H200", sm=90, cores=64, versions={"torch": "2.13.0"})


@pytest.mark.parametrize(
    ("recipe", "total", "active"),
    [
        # Hugging Face counts of the published weights; DeepSeek-V3 without its multi-token prediction
        ("llama3_8b", 8_030_261_248, 8_030_261_248),
        ("llama3_70b", 70_553_706_496, 70_553_706_496),
        ("llama3_1_405b", 405_853_388_800, 405_853_388_800),
        ("llama2_7b", 6_738_415_616, 6_738_415_616),
        ("llama2_13b", 13_015_864_320, 13_015_864_320),
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        ("mistral_7b", 7_241_732_096, 7_241_732_096),
        ("qwen2_5_7b", 7_615_616_512, 7_615_616_512),
        ("qwen3_8b", 8_190_735_360, 8_190_735_360),
        ("gemma2_2b", 2_614_341_888, 2_614_341_888),
        ("gemma3_1b", 999_885_952, 999_885_952),
        ("olmo2_7b", 7_298_617_344, 7_298_617_344),
        ("phi4", 14_659_507_200, 14_659_507_200),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("olmoe_1b_7b", 6_919_161_856, 1_282_017_280),
        ("gpt_oss_20b", 20_914_757_184, 4_187_440_704),
        ("deepseek_v3", 671_026_419_200, 37_552_297_472),
        # 174.6 B in the paper
        ("gpt3_175b", 174_604_259_328, 174_604_259_328),
    ],
)
def test_published_totals(recipe, total, active):
    filled = plainly_filled(compose(recipe).recipe, H200, Facts("x", vocab_size=256))
    count = count_parameters(filled.model)
    assert (count.total, count.active) == (total, active)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("model", "tp"),
    [(GPT, 1), (GPT, 2), (LLAMA, 1), (LLAMA, 2), (LLAMA, 4), (LLAMA | {"n_kv_heads": 1}, 4), (GPT | {"d_head": 6}, 2)],
)
def test_a_rank_holds_what_is_built(model, tp, tied):
    torch = pytest.importorskip("torch")
    from megaspec.parallelism.tensor import TensorParallel
    from megaspec.runtime.build import build_model
    from megaspec_kernels.registry import kernels_of
    from tests.parallelism.test_tensor import OneRank

    recipe = plan(model | {"tied_embeddings": tied}, {"parallelism.tp": tp})
    for rank in range(tp):
        built = build_model(recipe.model, kernels_of(recipe.kernels), dtype=torch.float32)
        TensorParallel(OneRank(tp, rank), recipe.parallelism.sequence_parallel).split_model(built, built.placement)
        assert rank_parameters(recipe, 0).total == sum(p.numel() for p in built.parameters())
    assert count_parameters(recipe.model).total == rank_parameters(
        plan(model | {"tied_embeddings": tied, "vocab_pad_to": 1}), 0
    ).total  # fmt: skip


def test_experts_and_latent_attention_by_hand():
    recipe = plan(LLAMA | {"attention": MLA, "moe": MOE | {"first_dense": 1}}, {"parallelism.ep": 1})
    count = count_parameters(recipe.model)
    queries, keys_values = 32 * 12 + 12 * 4 * 10, 32 * (8 + 4) + 8 * 4 * (6 + 5)
    assert count.attention == 4 * (queries + keys_values + 4 * 5 * 32)
    assert count.mlp == 3 * 32 * 48
    assert count.experts == 3 * 8 * 3 * 32 * 16
    assert count.active_experts == 3 * 2 * 3 * 32 * 16
    assert count.shared_experts == 3 * (3 * 32 * 12 + 32)
    assert count.router == 3 * (32 * 8 + 8)
    assert count.norms == 4 * (2 * 32 + 12 + 8) + 32
    assert count.embedding == count.head == 37 * 32
    assert count.total - count.active == 3 * 6 * 3 * 32 * 16
    q_direct = plan(LLAMA | {"attention": MLA | {"q_rank": None}, "n_layers": 1}).model
    assert count_parameters(q_direct).attention == 32 * 4 * 10 + keys_values + 4 * 5 * 32


def test_which_layers_have_experts():
    def layers(**moe):
        facts = plan(LLAMA | {"n_layers": 6, "moe": MOE | moe}).model.facts
        return [layer.has_experts for layer in facts.layers]

    assert layers() == [True] * 6
    assert layers(every=2) == [True, False, True, False, True, False]
    assert layers(first_dense=3, every=2) == [False, False, False, True, False, True]
    assert layers(layers=[0, 1, 1, 0, 0, 0]) == [False, True, True, False, False, False]
    assert not any(layer.has_experts for layer in plan(LLAMA).model.facts.layers)


def test_a_rank_of_experts():
    changes = {"parallelism.tp": 2, "parallelism.ep": 4, "parallelism.etp": 2, "parallelism.dp_replicate": 4}
    recipe = plan(with_attention(LLAMA, qk_norm="per_head") | {"moe": MOE, "n_layers": 2}, changes)
    held = rank_parameters(recipe, 0)
    assert held.expert == 2 * (8 // 4) * 3 * 32 * (16 // 2)
    # vocabulary: 37 rows over 2 ranks, each padded to 128
    attention, shared = 32 * (16 + 2 * 8) + 16 * 32, 3 * 32 * 6 + 32
    norms, router = 2 * 32 + 2 * 8, 32 * 8 + 8
    assert held.dense == 2 * (attention + shared + norms + router) + 32 + 2 * 128 * 32


def test_stages_hold_the_model_once():
    for model, changes in (
        (LLAMA | {"vocab_pad_to": 1}, {}),
        (GPT | {"vocab_pad_to": 1, "tied_embeddings": False}, {}),
        (LLAMA | {"vocab_pad_to": 1, "n_layers": 8}, {"parallelism.pipeline": {"virtual_stages": 2}}),
        (LLAMA | {"vocab_pad_to": 1}, {"parallelism.pipeline": {"first_layers": 1}}),
        (
            LLAMA | {"vocab_pad_to": 1, "n_layers": 8},
            {"parallelism.pipeline": {"schedule": "zb_v", "virtual_stages": 2}},
        ),
    ):
        recipe = plan(model, {"parallelism.pp": 2} | changes)
        assert sum(rank_parameters(recipe, s).total for s in range(2)) == count_parameters(recipe.model).total


def test_a_tied_head_is_a_copy_on_another_stage_only():
    tied = LLAMA | {"tied_embeddings": True, "vocab_pad_to": 1, "n_layers": 8}
    apart = plan(tied, {"parallelism.pp": 2})
    total = count_parameters(apart.model).total
    assert sum(rank_parameters(apart, s).total for s in range(2)) == total + 37 * 32
    together = plan(tied, {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "zb_v", "virtual_stages": 2}})
    assert sum(rank_parameters(together, s).total for s in range(2)) == total
