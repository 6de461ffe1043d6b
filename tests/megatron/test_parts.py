"""Each flag of the model, given and not given: the parts that the Spec has then, beside what Megatron builds."""

import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megaspec.compose.compose import compose
from megaspec.estimate.parameters import count_parameters
from megaspec.estimate.target import Target
from megaspec.megatron.command import read_command
from megaspec.megatron.draft import RecipeDraft
from megaspec.megatron.translate import translate
from megaspec.megatron.writing import recipe_text
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.nn.attention.spec import GroupedQuerySpec
from megaspec.nn.mlp.module import ACTIVATIONS
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from tests.megatron.commands import LLAMA, SMALL

MLA = "--multi-latent-attention --qk-layernorm --q-lora-rank 8 --kv-lora-rank 4"
BARE = "--disable-bias-linear"
GQA = GroupedQuerySpec().model_dump()


def draft_of(more: str) -> RecipeDraft:
    return translate(read_command(f"{SMALL} {more}".split()))


def model_of(more: str, tmp_path: Path) -> DecoderSpec:
    """Through the file and the resolver, as a user has it."""
    draft = draft_of(more)
    assert (draft.lost, draft.problems) == ([], [])
    (tmp_path / "recipes").mkdir(exist_ok=True)
    (tmp_path / "recipes" / "moved.yaml").write_text(recipe_text(draft))
    recipe = compose("moved", (), [tmp_path]).recipe
    target = Target(gpus=recipe.launcher.ranks, gpu="H100", sm=90, gpu_memory=80 * 10**9)
    return resolve(recipe, target, Facts(run_dir="runs/moved")).model


def lost_of(more: str) -> list[str]:
    return [problem.message for problem in draft_of(more).lost]


@pytest.mark.parametrize(
    ("more", "part", "expected"),
    [
        ("", "positions", {"kind": "learned"}),
        ("--position-embedding-type learned_absolute", "positions", {"kind": "learned"}),
        ("--position-embedding-type none", "positions", {"kind": "none"}),
        ("--position-embedding-type relative", "positions", {"kind": "none"}),
        ("--position-embedding-type rope", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 1.0, "scaling": {"kind": "none"}}),
        ("--position-embedding-type yarn", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 1.0, "scaling": {"kind": "none"}}),
        ("--use-rotary-position-embeddings", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 1.0, "scaling": {"kind": "none"}}),
        ("--use-rotary-position-embeddings --no-position-embedding --rotary-base 7", "positions",
         {"kind": "rotary", "base": 7.0, "fraction": 1.0, "scaling": {"kind": "none"}}),
        # the model of pretrain_gpt.py never gets the factor
        ("--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 1.0,
          "scaling": {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_seq_len": 8192}}),
        ("--position-embedding-type rope --rope-scaling-factor 32", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 1.0, "scaling": {"kind": "none"}}),
        ("--position-embedding-type rope --rotary-percent 0.25", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 0.25, "scaling": {"kind": "none"}}),
        ("--position-embedding-type rope --rotary-seq-len-interpolation-factor 4", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 1.0, "scaling": {"kind": "linear", "factor": 4.0}}),
        ("--position-embedding-type rope --rotary-seq-len-interpolation-factor 1", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 1.0, "scaling": {"kind": "none"}}),
        # the frequencies of YarnRotaryEmbedding are of the whole head
        ("--position-embedding-type yarn --rotary-percent 0.25", "positions",
         {"kind": "rotary", "base": 1e4, "fraction": 1.0, "scaling": {"kind": "none"}}),
        ("--use-rope-scaling --rotary-base 7", "positions", {"kind": "learned"}),
        ("", "norm", {"kind": "layer", "eps": 1e-5, "weight": "scale", "bias": True}),
        ("--normalization LayerNorm --norm-epsilon 1e-6", "norm",
         {"kind": "layer", "eps": 1e-6, "weight": "scale", "bias": True}),
        ("--apply-layernorm-1p", "norm", {"kind": "layer", "eps": 1e-5, "weight": "one_plus", "bias": True}),
        ("--normalization RMSNorm", "norm", {"kind": "rms", "eps": 1e-5, "weight": "scale"}),
        ("--normalization RMSNorm --apply-layernorm-1p --norm-epsilon 1e-6", "norm",
         {"kind": "rms", "eps": 1e-6, "weight": "one_plus"}),
        # biases have nothing to do with norms
        (BARE, "norm", {"kind": "layer", "eps": 1e-5, "weight": "scale", "bias": True}),
        ("", "attention",
         GQA | {"qkv_bias": True, "out_bias": True, "qk_norm": "none", "dropout": 0.1}),
        (BARE, "attention",
         GQA | {"qkv_bias": False, "out_bias": False, "qk_norm": "none", "dropout": 0.1}),
        (f"{BARE} --add-qkv-bias", "attention",
         GQA | {"qkv_bias": True, "out_bias": False, "qk_norm": "none", "dropout": 0.1}),
        ("--add-qkv-bias", "attention",
         GQA | {"qkv_bias": True, "out_bias": True, "qk_norm": "none", "dropout": 0.1}),
        (f"{BARE} --qk-layernorm --attention-dropout 0", "attention",
         GQA | {"qkv_bias": False, "out_bias": False, "qk_norm": "per_head", "dropout": 0.0}),
        ("", "mlp", {"kind": "plain", "activation": "gelu_tanh", "bias": True}),
        ("--no-bias-gelu-fusion", "mlp", {"kind": "plain", "activation": "gelu", "bias": True}),
        (BARE, "mlp", {"kind": "plain", "activation": "gelu", "bias": False}),
        (f"{BARE} --no-bias-gelu-fusion", "mlp", {"kind": "plain", "activation": "gelu", "bias": False}),
        (f"{BARE} --add-qkv-bias", "mlp", {"kind": "plain", "activation": "gelu", "bias": False}),
        (f"{BARE} --use-te-activation-func", "mlp", {"kind": "plain", "activation": "gelu_tanh", "bias": False}),
        ("--openai-gelu", "mlp", {"kind": "plain", "activation": "gelu_tanh", "bias": True}),
        ("--squared-relu --no-bias-gelu-fusion", "mlp",
         {"kind": "plain", "activation": "relu_squared", "bias": True}),
        (f"{BARE} --squared-relu", "mlp", {"kind": "plain", "activation": "relu_squared", "bias": False}),
        ("--swiglu", "mlp", {"kind": "gated", "activation": "silu", "bias": True}),
        (f"{BARE} --swiglu --no-bias-swiglu-fusion --use-te-activation-func", "mlp",
         {"kind": "gated", "activation": "silu", "bias": False}),
        (f"{LLAMA} {MLA}", "attention",
         {"kind": "mla", "q_rank": 8, "kv_rank": 4, "d_nope": 128, "d_rope": 64, "d_value": 128, "dropout": 0.1}),
        (f"{LLAMA} {MLA} --qk-head-dim 8 --qk-pos-emb-head-dim 2 --v-head-dim 6 --attention-dropout 0", "attention",
         {"kind": "mla", "q_rank": 8, "kv_rank": 4, "d_nope": 8, "d_rope": 2, "d_value": 6, "dropout": 0.0}),
        # the rotary part is turned anyway, and never stretched as in Llama 3.1
        (f"{LLAMA} {MLA} --position-embedding-type none --use-rope-scaling --rotary-base 7", "positions",
         {"kind": "rotary", "base": 7.0, "fraction": 1.0, "scaling": {"kind": "none"}}),
        ("", "layer", {"kind": "sequential", "norms": "pre"}),
    ],
)  # fmt: skip
def test_a_flag_of_the_model_sets_its_part(more, part, expected, tmp_path):
    assert getattr(model_of(more, tmp_path), part).model_dump() == expected


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ("", "tied_embeddings", True),
        ("--untie-embeddings-and-output-weights", "tied_embeddings", False),
        (f"{LLAMA} --untie-embeddings-and-output-weights", "tied_embeddings", False),
        (LLAMA, "tied_embeddings", True),
        ("", "dropout", 0.1),
        ("--hidden-dropout 0", "dropout", 0.0),
        ("", "d_ffn", 256),
        ("--squared-relu", "d_ffn", 256),
        # 64 · 8/3 = 170.7, in multiples of 64
        ("--swiglu", "d_ffn", 128),
        ("--swiglu --ffn-hidden-size 200", "d_ffn", 200),
        ("", "init_std", 0.02),
        ("--init-method-std 0.01", "init_std", 0.01),
        ("", "embedding_scale", 1.0),
        ("", "moe", None),
    ],
)
def test_sizes_and_starts_are_those_of_megatron(more, field, value, tmp_path):
    assert getattr(model_of(more, tmp_path), field) == value


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--num-experts 4 --disable-bias-linear --squared-relu", []),
        ("--num-experts 4 --swiglu", []),
        (f"--num-experts 4 {LLAMA} --add-qkv-bias", []),
        (f"{BARE} --quick-geglu", ["--quick-geglu: x · sigmoid(1.702 x) is no activation here"]),
        (f"{LLAMA} --position-embedding-type mrope", ["--position-embedding-type mrope: no such positions"]),
        (f"{LLAMA} {MLA} --position-embedding-type yarn", ["--position-embedding-type yarn: no such positions"]),
        (f"{LLAMA} {MLA} --position-embedding-type learned_absolute",
         ["learned_absolute: a table of positions beside the rotary part of latent attention"]),
        (f"{MLA} --normalization RMSNorm --swiglu --disable-bias-linear",
         ["--position-embedding-type learned_absolute (Megatron's default): a table of positions beside"]),
        (f"{LLAMA} {MLA} --normalization LayerNorm", ["--normalization LayerNorm: latents are normed by it, too"]),
        (f"{LLAMA} {MLA} --apply-layernorm-1p", ["--apply-layernorm-1p: norms of latents have this weight, too"]),
        (f"{LLAMA} --multi-latent-attention --qk-layernorm",
         ["--q-lora-rank (Megatron's default): with --qk-layernorm, queries without a latent get a second norm"]),
        (f"{LLAMA} --multi-latent-attention", ["without --qk-layernorm; latents are always normed here"]),
        (f"{MLA} --normalization RMSNorm --swiglu --position-embedding-type rope",
         ["--disable-bias-linear (Megatron's default): latent attention has a bias on its output there"]),
        (f"{LLAMA} {MLA} --rotary-scaling-factor 40", ["--rotary-scaling-factor 40: YaRN stretches"]),
        (f"{LLAMA} {MLA} --rotary-scaling-factor 40 --rope-type rope", []),
        (f"{LLAMA} --position-embedding-type yarn --rotary-scaling-factor 4", ["YaRN stretches"]),
        (f"{LLAMA} --rotary-scaling-factor 4", []),
    ],
)  # fmt: skip
def test_what_no_part_can_say_is_lost(more, told):
    lost = lost_of(more)
    assert len(lost) == len(told)
    for message, part in zip(lost, told, strict=True):
        assert part in message


@pytest.mark.parametrize(
    ("more", "activation", "has_bias"),
    [
        ("--swiglu", "silu", True),
        ("--swiglu --disable-bias-linear", "silu", False),
        ("--squared-relu --disable-bias-linear", "relu_squared", False),
        ("--no-bias-gelu-fusion", "gelu", True),
    ],
)
def test_experts_have_the_activation_and_biases_of_dense_layers(more, activation, has_bias, tmp_path):
    model = model_of(f"--num-experts 4 {more}", tmp_path)
    assert (model.mlp.activation, model.mlp.bias, model.moe.router.logit_bias) == (activation, has_bias, has_bias)
    biases = {name for name, linear in model.facts.linears() if linear.bias and ".moe." in name}
    assert bool(biases) == has_bias


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--no-position-embedding", "with positions learned_absolute, which Megatron refuses"),
        ("--no-position-embedding --position-embedding-type none", "with positions none, which Megatron refuses"),
        ("--swiglu --squared-relu", "--swiglu: with --squared-relu or --quick-geglu; give one"),
    ],
)
def test_what_megatron_refuses_is_refused(more, told):
    assert told in "\n".join(str(problem) for problem in draft_of(more).problems)


def megatrons_gelu(x: torch.Tensor) -> torch.Tensor:
    """bias_gelu of megatron/core/fusions/fused_bias_gelu.py, behind the bias."""
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def test_the_two_forms_of_gelu_are_megatrons():
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    # its constant sqrt(2 / pi) has eight digits
    torch.testing.assert_close(ACTIVATIONS["gelu_tanh"](x), megatrons_gelu(x), rtol=0, atol=1e-8)
    torch.testing.assert_close(ACTIVATIONS["gelu"](x), 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), rtol=0, atol=1e-14)
    assert (F.gelu(x) - megatrons_gelu(x)).abs().max() > 1e-4
    torch.testing.assert_close(ACTIVATIONS["relu_squared"](x), torch.pow(F.relu(x), 2), rtol=0, atol=0)


SWITCHES = (
    "--swiglu",
    "--disable-bias-linear",
    "--add-qkv-bias",
    "--qk-layernorm",
    "--apply-layernorm-1p",
    "--untie-embeddings-and-output-weights",
    "--normalization RMSNorm",
    "--group-query-attention --num-query-groups 2",
    "--position-embedding-type none",
    "--position-embedding-type rope",
)


def parameters_of_megatron(given: list[str]) -> int:
    """What GPTModel builds of SMALL: 4 layers, 64 wide, 4 heads of 16, 256 tokens, 32 positions."""
    d, head = 64, 16
    has_biases = "--disable-bias-linear" not in given
    # add_bias_linear or add_qkv_bias (attention.py)
    has_qkv_bias = has_biases or "--add-qkv-bias" in given
    vectors = 1 if "--normalization RMSNorm" in given else 2
    groups = 2 if "--group-query-attention --num-query-groups 2" in given else 4
    width, products = (128, 2) if "--swiglu" in given else (256, 1)
    qkv = d + 2 * groups * head
    layer = d * qkv + has_qkv_bias * qkv + d * d + has_biases * d
    layer += d * width * products + has_biases * width * products + width * d + has_biases * d
    layer += 2 * vectors * d
    if "--qk-layernorm" in given:
        layer += 2 * vectors * head
    total = 4 * layer + vectors * d + 256 * d
    if not any(one.startswith("--position") for one in given):
        total += 32 * d
    if "--untie-embeddings-and-output-weights" in given:
        total += 256 * d
    return total


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_has_the_parameters_that_megatron_builds(seed, tmp_path):
    draw = random.Random(seed)
    given = [one for one in SWITCHES if draw.random() < 0.5]
    if "--position-embedding-type rope" in given and "--position-embedding-type none" in given:
        given.remove("--position-embedding-type none")
    assert count_parameters(model_of(" ".join(given), tmp_path)).total == parameters_of_megatron(given)
