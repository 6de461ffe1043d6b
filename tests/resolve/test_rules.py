"""Every rule: the smallest recipe that breaks it, that its way out is one, and everything wrong in one report."""

import re
from dataclasses import replace

import pytest

from megaspec.compose import compose
from megaspec.core.errors import DataError, Problem, RecipeError
from megaspec.resolve.examples import CPU, EXAMPLES, FACTS
from megaspec.resolve.resolver import resolve, settle
from megaspec.resolve.rules import RULES

# Words by which a message says what to do.
WAY_OUT = re.compile(r"\b(try|set|drop|keep|lower|raise|write|install|shorten|it has|start|Llama 3 has)\b")


def broken(overrides, target=CPU, facts=FACTS, recipe="hello") -> list[Problem]:
    composed = compose(recipe, overrides)
    try:
        settle(composed.recipe, target, facts, composed.origins)
    except RecipeError as error:
        return error.problems
    return []


def test_every_rule_has_an_example():
    assert set(EXAMPLES) == set(RULES)


@pytest.mark.parametrize("code", EXAMPLES)
def test_rule(code):
    one = EXAMPLES[code]
    problems = broken(one.overrides, one.target, one.facts, one.recipe)
    assert [p.code for p in problems] == [code], problems
    (problem,) = problems
    assert problem.key == one.key
    assert one.key in problem.message
    assert WAY_OUT.search(problem.message), problem.message
    assert "\n" not in problem.message
    assert problem.origin
    mended = (*one.overrides, *one.mended)
    assert broken(mended, one.target, one.facts, one.recipe) == []


def test_each_rule_says_its_sentence():
    for code, rule in RULES.items():
        assert rule.__doc__, code
        assert rule.__doc__.endswith("."), code
        assert "\n" not in rule.__doc__, code


def test_messages_hold_both_values_and_the_nearest_legal_ones():
    wrong = ("launcher.ranks=24", "parallelism.tp=12", "model.n_heads=32", "model.d_head=4", "model.n_kv_heads=8")
    texts = {p.code: str(p) for p in broken(wrong)}
    assert texts["tp-heads"] == (
        "parallelism.tp=12 must divide model.n_heads=32; try 1, 2, 4, 8, 16 or 32   (command line)"
    )
    (text,) = map(str, broken(("train.global_batch=30", "train.micro_batch=4", "parallelism.dp_replicate=2")))
    assert text == (
        "train.global_batch=30 must be a multiple of train.micro_batch=4 · dp=2 = 8; try 24 or 32, or "
        "train.micro_batch=1, 3 or 5   (command line)"
    )
    (text,) = map(str, broken(("kernels.attention=sdpa", "model.attention_dropout=0.1")))
    assert text == (
        "kernels.attention=sdpa has no attention dropout, model.attention_dropout=0.1; "
        "set kernels.attention=reference   (command line)"
    )


def test_a_file_is_named_where_the_value_is_from():
    (problem,) = broken(("model.max_seq_len=128",))
    assert problem.origin == "recipes/hello.yaml:8"


def test_everything_is_told_at_once():
    codes = {
        p.code
        for p in broken(
            (
                "parallelism.tp=3",
                "launcher.ranks=4",
                "model.n_kv_heads=3",
                "data.seq_len=512",
                "model.max_seq_len=256",
                "optim.schedule.min_lr=1",
                "optim.schedule.kind=wsd",
                "kernels.cross_entropy=triton",
                "train.global_batch=7",
                "train.micro_batch=2",
                "model.vocab_size=5",
            )
        )
    }
    assert codes >= {
        "ranks-degrees",
        "tp-heads",
        "kv-heads",
        "seq-model",
        "lr-min",
        "wsd-steps",
        "kernel-cross-entropy",
        "batch-divides",
        "vocab-data",
    }


def test_data_alone_is_a_data_error_and_with_rules_it_is_told_with_them():
    facts = replace(FACTS, problems=(Problem("data.blend.0.prefix", "data.blend.0.prefix=data/hello: not there"),))
    composed = compose("hello")
    with pytest.raises(DataError, match=r"not there   \(recipes/hello.yaml:7\)") as caught:
        resolve(composed.recipe, CPU, facts, composed.origins)
    assert caught.value.exit_code == 65
    texts = [str(p) for p in broken(("optim.schedule.min_lr=1",), facts=facts)]
    assert len(texts) == 2
    assert "not there" in texts[1]
    unknown = replace(FACTS, vocab_size=None)
    with pytest.raises(DataError, match=r"model\.vocab_size=auto takes the data's vocabulary"):
        resolve(compose("hello", ["model.vocab_size=auto"]).recipe, CPU, unknown)
