"""Which parameters patterns fit, and what a model's facts say where the rest is frozen."""

import pytest

from megaspec.estimate.flops import flops_per_sequence
from megaspec.estimate.memory import memory_of
from megaspec.estimate.trained import facts_of
from megaspec.parallelism.stages import first_trained_stage
from megaspec.plan.plan import _trained
from megaspec.train.trainable import names_of, trained, trained_names
from tests.runtime.specs import spec

NAMES = ["embed.weight", "layers.0.norm1.weight", "layers.0.attn.wo.weight", "head.weight"]


def test_patterns_fit_names():
    assert trained(NAMES, None).names == set(NAMES)
    found = trained(NAMES, ["layers.*.norm*", "head.*", "layers.9.*"])
    assert found.names == {"layers.0.norm1.weight", "head.weight"}
    assert found.idle == ("layers.9.*",)
    assert trained(NAMES, ["HEAD.*"]).idle == ("HEAD.*",)


def test_a_moving_bias_has_a_name_of_its_own():
    moe = {"n_experts": 4, "top_k": 2, "router": {"score": "sigmoid", "expert_bias": True}}
    facts = spec({"model.moe": moe}).model.facts
    bias = "layers.1.moe.router.expert_bias"
    assert bias in names_of(facts)
    assert bias not in facts.weights()
    assert bias in trained_names(facts, ["layers.1.*"])
    assert bias not in trained_names(facts, ["layers.1.moe.router.weight"])


def test_layers_that_train_alike_are_one_kind():
    made = spec({"model.n_layers": 6, "train.trainable": ["layers.2.*", "layers.4.*"]})
    facts = facts_of(made)
    assert [layer.runs_backward for layer in facts.layers] == [False, False, True, True, True, True]
    # before the first that trains, that one, those behind that don't, and the one behind that does
    assert len(facts.kinds) == 4
    assert [linear.makes_input_gradient for linear in facts.layers[2].linears] == [True] * 4
    assert facts.embedding_table.is_frozen
    assert facts.head_makes_input_gradient


@pytest.mark.parametrize("tied", [False, True])
def test_everything_named_is_everything(tied):
    plain = spec({"model.tied_embeddings": tied})
    named = spec({"model.tied_embeddings": tied, "train.trainable": ["*"]})
    for one in (plain, named):
        assert facts_of(one).head_makes_input_gradient
    sizes = {"seq_len": 16}
    flops = flops_per_sequence(plain.model, **sizes)
    assert flops_per_sequence(named.model, trainable=("*",), **sizes) == flops
    made = [spec({"model.tied_embeddings": tied, "train.trainable": one}) for one in (None, ["*"])]
    assert memory_of(made[0]) == memory_of(made[1])


def test_flops_of_the_head_alone():
    """Every product forward, and of the head's alone both gradients; the last norm takes what goes in."""
    model = spec().model
    forward = flops_per_sequence(model, seq_len=16) // 3
    head = 2 * 16 * model.d_model * model.facts.padded_vocab(tp=1)
    assert flops_per_sequence(model, seq_len=16, trainable=("head.*",)) == forward + head
    assert flops_per_sequence(model, seq_len=16, trainable=("head.*", "norm.*")) == forward + 2 * head


def test_the_first_stage_that_trains():
    made = spec({"model.n_layers": 4, "parallelism.pp": 4, "parallelism.pipeline": {"schedule": "1f1b"}})
    for patterns, first in ((None, 0), (["layers.2.*"], 2), (["norm.*"], 3), (["embed.*", "norm.*"], 0)):
        facts = made.model.facts
        names = trained_names(facts, patterns)
        weights = [one for name, one in facts.weights().items() if name in names]
        assert first_trained_stage(weights, 4, made.parallelism) == first, patterns


def test_the_plan_counts_what_is_trained():
    made = spec({"train.trainable": ["layers.*.norm*", "norm.*"]})
    # two norms of two layers, and the last
    assert _trained(made, 10**6) == 5 * 32
    (stage,) = memory_of(made)
    # in a flat buffer each begins at a multiple of 64 elements
    assert stage.gradients == 5 * 64 * 8
    (whole,) = memory_of(spec())
    # two moments in fp64, without padding
    assert stage.optimizer == 2 * 8 * 5 * 32
    assert stage.weights == whole.weights
