"""Sizes that ship, as their families: each can be exported, and counts what transformers' class of it counts."""

import json
import os

import pytest
import torch

from megaspec.compose.compose import compose
from megaspec.estimate.parameters import count_parameters
from megaspec.hf.family import objections
from megaspec.hf.table import FAMILIES, read_model
from megaspec.resolve.fill import plainly_filled
from megaspec.rules.run_facts import Facts
from tests.golden_specs import GPUS

# conf/model: its family, and the parameters that the published weights have.
PUBLISHED = {
    "llama3_8b": ("llama", 8_030_261_248),
    "mistral_7b": ("mistral", 7_241_732_096),
    "qwen2_5_7b": ("qwen2", 7_615_616_512),
    "qwen3_8b": ("qwen3", 8_190_735_360),
    "gemma2_2b": ("gemma2", 2_614_341_888),
    "gemma3_1b": ("gemma3_text", 999_885_952),
    "olmo2_7b": ("olmo2", 7_298_617_344),
    "phi4": ("phi3", 14_659_507_200),
}
PHI_3_MINI = {
    "model_type": "phi3",
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("name", "model_type", "total"), [(name, *rest) for name, rest in PUBLISHED.items()])
def test_a_size_that_ships_is_its_familys(name: str, model_type: str, total: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = plainly_filled(compose(name).recipe, GPUS["H100"].model_copy(update={"gpus": 16}), Facts("x")).model
    family = FAMILIES[model_type]
    assert objections(family, spec) == []
    assert count_parameters(spec).total == total
    config = AutoConfig.for_model(model_type, **json.loads(json.dumps(family.write(spec))))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == total


def test_phi_3_mini_as_it_is_published() -> None:
    spec = read_model(PHI_3_MINI, "config.json")
    assert count_parameters(spec).total == 3_821_079_552
    assert spec.attention.mask.size == 2047
