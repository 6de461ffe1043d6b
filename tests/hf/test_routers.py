"""Mixtures of experts, DeepSeek's too, block by block: each against transformers' in true fp64."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.dropout import Dropout
from megaspec.nn.linear import Linear
from megaspec.nn.mlp.module import GatedMlp
from megaspec.nn.mlp.spec import GatedMlpSpec
from megaspec.nn.moe.activation import weighted
from megaspec.nn.moe.module import Experts, Moe
from megaspec.nn.moe.router import Router
from megaspec.nn.moe.spec import MoeSpec
from megaspec_kernels.registry import REGISTRY
from tests.hf.true_fp64 import true_fp64

B, T, D, F, E = 2, 24, 32, 20, 8
OUTPUT = 1e-12
GRADIENTS = 1e-10
SEEN = 1e-4


@dataclass(frozen=True)
class Block:
    """A mixture of experts, as transformers' configuration says it and as ours does."""

    name: str
    model_type: str
    module: str
    """transformers' class."""
    keys: dict[str, Any]
    moe: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> MoeSpec:
        return MoeSpec.model_validate({"n_experts": E, "d_expert": F} | self.moe)


_DEEPSEEK = {"n_routed_experts": E, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": F}
_GLM = _DEEPSEEK | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
_GROUPS = {"n_groups": 4, "group_top_k": 2}
_SIGMOID = {"score": "sigmoid", "expert_bias": True, "group_score": "best_two", **_GROUPS}
_QWEN = {"num_experts": E, "num_experts_per_tok": 3, "moe_intermediate_size": F, "shared_expert_intermediate_size": 12}
BLOCKS = [
    Block(
        "deepseek_v2, greedy",
        "deepseek_v2",
        "DeepseekV2Moe",
        _DEEPSEEK | {"topk_method": "greedy", "routed_scaling_factor": 1.5, "norm_topk_prob": True},
        # it reads no norm_topk_prob
        {"top_k": 3, "d_shared": 2 * F, "router": {"norm_top_k": False, "scale": 1.5}},
    ),
    Block(
        "deepseek_v2, groups",
        "deepseek_v2",
        "DeepseekV2Moe",
        _DEEPSEEK
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        {
            "top_k": 3,
            "d_shared": 2 * F,
            "router": {"norm_top_k": False, "scale": 16.0, "group_score": "best", **_GROUPS},
        },
    ),
    Block(
        "deepseek_v3",
        "deepseek_v3",
        "DeepseekV3MoE",
        _GLM | {"norm_topk_prob": True},
        {"top_k": 3, "d_shared": 2 * F, "router": {"scale": 1.5, **_SIGMOID}},
    ),
    Block(
        "deepseek_v3, scores as they are",
        "deepseek_v3",
        "DeepseekV3MoE",
        _GLM | {"norm_topk_prob": False},
        {"top_k": 3, "d_shared": 2 * F, "router": {"scale": 1.5, "norm_top_k": False, **_SIGMOID}},
    ),
    Block(
        "glm4_moe",
        "glm4_moe",
        "Glm4MoeMoE",
        _GLM | {"norm_topk_prob": True},
        {"top_k": 3, "d_shared": 2 * F, "router": {"scale": 1.5, **_SIGMOID}},
    ),
    Block(
        "llama4_text",
        "llama4_text",
        "Llama4TextMoe",
        {"num_local_experts": E, "num_experts_per_tok": 2, "intermediate_size": F},
        {"top_k": 2, "d_shared": F, "weights_on": "inputs", "router": {"score": "sigmoid", "norm_top_k": False}},
    ),
    Block(
        "qwen2_moe",
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        _QWEN | {"norm_topk_prob": False},
        {"top_k": 3, "d_shared": 12, "shared_gate": True, "router": {"norm_top_k": False}},
    ),
]


def theirs_of(block: Block) -> nn.Module:
    """Transformers' block with every parameter and buffer drawn."""
    # imported here: it takes seconds, and offline before it looks
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig

    config = AutoConfig.for_model(block.model_type, hidden_size=D, **block.keys)
    # grouped products take no fp64
    config._experts_implementation = "eager"
    package = block.model_type.removesuffix("_text")
    modeling = import_module(f"transformers.models.{package}.modeling_{package}")
    with true_fp64():
        module = getattr(modeling, block.module)(config)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for value in (*module.parameters(), *module.buffers()):
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return module.train(False)


def ours_of(spec: MoeSpec, values: Mapping[str, Tensor]) -> Moe:
    mlp = GatedMlpSpec()
    form = GatedMlp(D, spec.d_expert, mlp, out=Dropout(0.0, "expert"))
    shared = None
    if spec.d_shared:
        shared = GatedMlp(D, spec.d_shared, mlp, out=Dropout(0.0, "shared"))
    module = Moe(
        Router(D, spec, site="router"),
        Experts(
            spec.n_experts,
            form,
            activation=weighted(mlp, form.activate),
            weights_on=spec.weights_on,
            kernel=REGISTRY["grouped"]["reference"],
            unpermute=REGISTRY["unpermute"]["reference"],
        ),
        shared=shared,
        shared_gate=Linear(D, 1) if spec.shared_gate else None,
        pad=spec.pad_to_capacity,
        out=Dropout(0.0, "moe"),
    ).double()
    state = dict(module.named_parameters())
    if module.router.expert_bias is not None:
        state["router.expert_bias"] = module.router.expert_bias
    assert state.keys() <= values.keys()
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(values[name])
    return module


def as_ours(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors, or the gradients of these, by our names and as ours lie."""
    found = {}
    for name, value in theirs.items():
        if name in ("gate.weight", "router.weight"):
            found["router.weight"] = value
        elif name == "gate.e_score_correction_bias":
            found["router.expert_bias"] = value
        elif name == "shared_expert_gate.weight":
            found["shared_gate.weight"] = value
    gate_up, down = theirs["experts.gate_up_proj"], theirs["experts.down_proj"]
    if gate_up.shape[1] == D:
        # stored as [inputs, outputs]
        gate_up, down = gate_up.mT, down.mT
    found["experts.w_gate_up.weight"] = gate_up.flatten(0, 1)
    found["experts.w_down.weight"] = down.flatten(0, 1)
    shared = "shared_experts" if "shared_experts.gate_proj.weight" in theirs else "shared_expert"
    both = [theirs[f"{shared}.{name}.weight"] for name in ("gate_proj", "up_proj")]
    found["shared.w_gate_up.weight"] = torch.cat(both)
    found["shared.w_down.weight"] = theirs[f"{shared}.down_proj.weight"]
    return found


def inputs() -> Tensor:
    return torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def run_theirs(module: nn.Module, x: Tensor) -> Tensor:
    with true_fp64():
        y = module(x)
    if isinstance(y, tuple):
        y = y[0]
    return y.view_as(x)


def run_ours(module: Moe, x: Tensor) -> Tensor:
    index = torch.arange(T)
    return module(x, SequenceContext(index, index=index, length=T))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_outputs_and_gradients_are_theirs(block: Block) -> None:
    theirs = theirs_of(block)
    ours = ours_of(block.spec, as_ours(theirs.state_dict()))
    x_theirs, x_ours = inputs().requires_grad_(), inputs().requires_grad_()
    expected, found = run_theirs(theirs, x_theirs), run_ours(ours, x_ours)
    assert expected.std() > 0.05, "outputs that say nothing"
    assert (found - expected).abs().max() < OUTPUT * expected.abs().max()
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    expected.backward(grad)
    found.backward(grad)
    assert (x_ours.grad - x_theirs.grad).abs().max() < GRADIENTS * x_theirs.grad.abs().max()
    wanted = as_ours({name: value.grad for name, value in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - wanted[name]).abs().max() < GRADIENTS * wanted[name].abs().max(), name


# Each option of theirs that we read, and its neighbours.
NEIGHBOURS: dict[str, list[Any]] = {
    "router.norm_top_k": [True, False],
    "router.scale": [1.0, 2.0],
    "router.score": ["softmax", "sigmoid", "sqrt_softplus"],
    "router.expert_bias": [False],
    "router.group_score": ["best", "best_two", "share"],
    "router.group_top_k": [1, 3],
    "router.n_groups": [2],
    "top_k": [1, 2, 3, 4],
    "weights_on": ["inputs", "outputs"],
}


def mutants(spec: MoeSpec) -> Iterator[tuple[str, MoeSpec]]:
    """Every block that differs from this one in one option."""
    content = spec.model_dump()
    for path, values in NEIGHBOURS.items():
        section, _, name = path.rpartition(".")
        here = content[section] if section else content
        if here[name] is None or (name == "group_score" and content["router"]["n_groups"] is None):
            continue
        for value in values:
            if value == here[name] or (name == "expert_bias" and not here[name]):
                continue
            changed = {**here, name: value}
            yield f"{path}={value}", MoeSpec.model_validate({**content, section: changed} if section else changed)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_another_option_is_another_block(block: Block) -> None:
    values = as_ours(theirs_of(block).state_dict())
    truth = run_ours(ours_of(block.spec, values), inputs()).detach()
    seen = {}
    for path, mutant in mutants(block.spec):
        moved = run_ours(ours_of(mutant, values), inputs()).detach() - truth
        seen[path] = float(moved.abs().max() / truth.abs().max())
    # Megatron's share of 3 experts over 2 groups is one expert: the same as the best
    equal = {"router.group_score=share"} if block.spec.router.group_score == "best" else set()
    assert len(seen) >= 6
    assert {path for path, moved in seen.items() if moved < SEEN} == equal


def test_a_router_with_a_bias_on_its_logits_is_gpt_oss() -> None:
    """What its experts are weighed by, and every gradient of it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    spec = MoeSpec.model_validate({"n_experts": E, "top_k": 3, "d_expert": F, "router": {"logit_bias": True}})
    with true_fp64():
        theirs = GptOssTopKRouter(GptOssConfig(hidden_size=D, num_local_experts=E, num_experts_per_tok=3))
    ours = Router(D, spec, site="router").double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(0.5 * torch.randn(mine.shape, generator=generator))
            other.copy_(mine)
    index = torch.arange(T)
    routing = ours(inputs(), SequenceContext(index, index=index, length=T))
    with true_fp64():
        _, weights, experts = theirs(inputs().flatten(0, 1))
    chosen = torch.zeros(B * T, E, dtype=torch.float64)
    expected = chosen.scatter(1, experts, weights)
    found = chosen.scatter(1, routing.experts, routing.weights)
    assert (found - expected).abs().max() < OUTPUT
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(grad)
    found.backward(grad)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() < GRADIENTS * other.grad.abs().max()
    # without the bias other experts are taken
    with torch.no_grad():
        ours.bias.zero_()
    moved = ours(inputs(), SequenceContext(index, index=index, length=T))
    assert (chosen.scatter(1, moved.experts, moved.weights) - expected).abs().max() > SEEN
