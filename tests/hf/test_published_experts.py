"""Mixtures of experts at published sizes: each can be exported, and counts what transformers' class of it counts."""

import os

import pytest
import torch

from megaspec.compose.compose import compose
from megaspec.estimate.parameters import count_parameters
from megaspec.hf.family import objections
from megaspec.hf.table import FAMILIES
from megaspec.resolve.fill import plainly_filled
from megaspec.rules.run_facts import Facts
from tests.golden_specs import GPUS


@pytest.mark.parametrize(
    ("name", "model_type", "total"),
    [
        ("mixtral_8x7b", "mixtral", 46_702_792_704),
        ("qwen3_30b_a3b", "qwen3_moe", 30_532_122_624),
        ("olmoe_1b_7b", "olmoe", 6_919_161_856),
    ],
)
def test_a_size_that_ships_is_its_familys(name: str, model_type: str, total: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = plainly_filled(compose(name).recipe, GPUS["H100"].model_copy(update={"gpus": 64}), Facts("x")).model
    family = FAMILIES[model_type]
    assert objections(family, spec) == []
    assert count_parameters(spec).total == total
    config = AutoConfig.for_model(model_type, **family.write(spec))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == total
