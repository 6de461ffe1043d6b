"""Values that are not of their type and rules that are broken: one report, without what hangs on the former."""

import pytest

from megaspec.checkable import PartlyError
from megaspec.cli import main
from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.resolve.beside import with_rules
from megaspec.resolve.resolver import settle
from megaspec.rules.examples import CPU, EXAMPLES, H200

NINE = (
    "model.d_ffn=28671",
    "model.n_kv_heads=6",
    "model.n_layers=83",
    "data.seq_len=8191",
    "parallelism.tp=12",
)
MACHINE = H200.model_copy(update={"gpus": 64})


def told(recipe: str, overrides: tuple[str, ...], target=CPU, **more) -> list[str]:
    """Codes, in order."""
    with pytest.raises(PartlyError) as caught:
        compose(recipe, overrides)
    return [p.code for p in with_rules(caught.value, lambda _: target, **more).problems]


def rules(recipe: str, overrides: tuple[str, ...], target=CPU) -> list[str]:
    composed = compose(recipe, overrides)
    with pytest.raises(RecipeError) as caught:
        settle(composed.recipe, target, EXAMPLES["tp-heads"].facts, composed.origins)
    return [p.code for p in caught.value.problems]


@pytest.mark.parametrize(
    "wrong", ["model.dropout=1.5", "model.n_layer=3", "+modle.x=1", "log.every=-1", "train.seed=x"]
)
def test_a_value_that_no_rule_reads_hides_none(wrong):
    codes = told("llama3_70b", (*NINE, wrong), MACHINE)
    assert codes[0].startswith("key.")
    assert codes[1:] == rules("llama3_70b", NINE, MACHINE)
    assert len(codes) > 6


def test_rules_that_read_a_wrong_value_are_not_asked():
    codes = told("llama3_70b", (*NINE, "model.n_heads=-64"), MACHINE)
    assert {"pp-layers", "cp-seq"} <= set(codes)
    assert not {"tp-heads", "kv-heads"} & set(codes)


def test_what_is_decided_from_a_wrong_value_is_not_held_against_anyone():
    # with a degree that is unknown, so are the data-parallel ranks that divide the batch
    assert told("hello", ("parallelism.tp=-1", "train.global_batch=7", "train.micro_batch=2")) == ["key.type"]
    assert told("hello", ("log.every=-1", "train.global_batch=7", "train.micro_batch=2"))[1:] == ["batch-divides"]


@pytest.mark.parametrize("code", EXAMPLES)
def test_every_rule_is_told_beside_another_mistake(code):
    one = EXAMPLES[code]
    with pytest.raises(PartlyError) as caught:
        compose(one.recipe, [*one.overrides, "log.evry=3"])
    if one.facts != EXAMPLES["tp-heads"].facts or code == "vocab-data":
        return  # the data says so, which is not there
    assert code in [p.code for p in with_rules(caught.value, lambda _: one.target).problems]


def test_typing_alone_stays_as_it_is():
    assert told("hello", ("model.dropout=1.5",)) == ["key.type"]
    assert told("hello", ("model.kind=x",))[0] == "key.type"


def test_a_run_is_told_all_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["recipe=llama3_8b", "model.attention={kind: mla, kv_rank: 64, d_nope: 64, d_rope: 64, d_value: 64}"]
    assert main(["train", *words]) == 64
    text = capsys.readouterr().err
    assert "model.attention.kind=mla: latent attention can be planned, not trained" in text
    assert "data/llama3" in text
    assert main(["train", *words, "model.n_kv_heads=6", "model.dropout=2"]) == 64
    text = capsys.readouterr().err
    for part in ("model.dropout=2", "model.n_kv_heads=6", "not trained", "data/llama3"):
        assert part in text
    assert main(["train", "recipe=hello"]) == 65
    assert "data/hello" in capsys.readouterr().err
