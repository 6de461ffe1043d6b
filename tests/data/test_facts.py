from dataclasses import replace
from pathlib import Path

import pytest

from megaspec.data.facts import data_facts, evaluation_facts, prepare_command
from megaspec.data.spec import BlendPart, IndexedSpec, PrepareSpec, RandomSpec, SyntheticSpec
from tests.data.helpers import add_manifest, stream_spec, write_dataset, write_texts


def indexed(*prefixes, **fields) -> IndexedSpec:
    blend = tuple(BlendPart(prefix=str(prefix)) for prefix in prefixes)
    return IndexedSpec(kind="indexed", blend=blend, **{"seq_len": 8, "split": (8.0, 1.0, 1.0), **fields})


def test_counts_by_split(tmp_path):
    write_dataset(tmp_path / "a", [10] * 8 + [20, 30], vocab_size=500)
    write_dataset(tmp_path / "b", [100] * 10, vocab_size=500)
    facts = data_facts(indexed(tmp_path / "a", tmp_path / "b"))
    assert facts.problems == ()
    assert facts.tokens == {"train": 880, "valid": 120, "test": 130}
    assert facts.samples == {"train": 9 + 99, "valid": 2 + 12, "test": 3 + 12}
    assert facts.train_samples_per_epoch == 108
    assert (facts.vocab_size, facts.eod, facts.tokenizer) == (500, 0, "byte")
    assert len(facts.fingerprint) == 64


def test_fingerprint_follows_the_content(tmp_path):
    write_dataset(tmp_path / "a", [10] * 8, seed=1)
    write_dataset(tmp_path / "same", [10] * 8, seed=1)
    write_dataset(tmp_path / "other", [10] * 8, seed=2)
    prints = [data_facts(indexed(tmp_path / name)).fingerprint for name in ("a", "same", "other")]
    assert prints[0] == prints[1] != prints[2]


def test_without_a_manifest_the_vocabulary_is_unknown(tmp_path):
    write_dataset(tmp_path / "a", [10] * 8, manifest=False)
    facts = data_facts(indexed(tmp_path / "a"))
    assert facts.problems == ()
    assert facts.vocab_size is None
    assert facts.tokens["train"] == 60


def test_every_problem_is_told_at_once(tmp_path):
    write_dataset(tmp_path / "a", [10] * 8)
    (tmp_path / "a.bin").write_bytes(b"")
    facts = data_facts(indexed(tmp_path / "a", tmp_path / "nothing"))
    first, second = facts.problems
    assert first.key == "data.blend.0.prefix"
    assert "a.bin: size=0, its manifest says 160" in first.message
    assert second.key == "data.blend.1.prefix"
    assert "nothing.idx: can't be read" in second.message
    # with the tokenizer of the one that is there
    command = f"megaspec data prepare INPUT --out {tmp_path}/nothing --tokenizer byte"
    assert second.message.endswith(f"; make it with `{command}`")


def test_the_command_that_makes_a_data_set(tmp_path):
    made = PrepareSpec(tokenizer="openai-community/gpt2", input="my text.jsonl")
    gone = indexed(tmp_path / "gone", prepare=made)
    command = f"megaspec data prepare 'my text.jsonl' --out {tmp_path}/gone --tokenizer openai-community/gpt2"
    assert prepare_command(gone, 0) == command
    assert f"`{command}`" in data_facts(gone).problems[0].message
    assert prepare_command(indexed("a b"), 0) == "megaspec data prepare INPUT --out 'a b' --tokenizer NAME"
    # what is there counts more than what the recipe says
    write_dataset(tmp_path / "a", [10] * 8, manifest=False)
    add_manifest(tmp_path / "a", vocab_size=1000, documents=8, tokens=80, tokenizer="bpe:1000")
    (tmp_path / "a.tokenizer.json").write_text("{}")
    both = indexed(tmp_path / "a", tmp_path / "gone", prepare=made)
    assert prepare_command(both, 1).endswith(f"--tokenizer {tmp_path}/a.tokenizer.json")


def test_two_tokenizers_in_one_blend(tmp_path):
    write_dataset(tmp_path / "a", [10] * 8)
    write_dataset(tmp_path / "b", [10] * 8, manifest=False)
    manifest = add_manifest(tmp_path / "b", vocab_size=1000, documents=8, tokens=80)
    from megaspec.data.manifest import write_manifest

    record = manifest.tokenizer.model_copy(update={"sha256": "1" * 64, "name": "other"})
    write_manifest(tmp_path / "b", manifest.model_copy(update={"tokenizer": record}))
    (problem,) = data_facts(indexed(tmp_path / "a", tmp_path / "b")).problems
    assert "mixes tokens of byte" in problem.message
    assert "other" in problem.message


@pytest.mark.parametrize("split", [(0.0, 1.0, 0.0), (0.0, 0.0, 0.0)])
def test_no_document_for_training(tmp_path, split):
    write_dataset(tmp_path / "a", [10] * 8)
    (problem,) = data_facts(indexed(tmp_path / "a", split=split)).problems
    assert "leaves no document for training" in problem.message


@pytest.mark.parametrize(
    "spec",
    [SyntheticSpec(kind="synthetic", seq_len=8, vocab_size=99), RandomSpec(kind="random", seq_len=8, vocab_size=99)],
    ids=lambda spec: spec.kind,
)
def test_made_data(spec):
    facts = data_facts(spec)
    assert facts.vocab_size == 99
    assert facts.train_samples_per_epoch is None
    assert facts.problems == ()


def test_a_blend_without_weights_counts_sequences_of_each(tmp_path):
    write_dataset(tmp_path / "a", [10] * 8)
    write_dataset(tmp_path / "b", [8])
    (problem,) = data_facts(indexed(tmp_path / "a", tmp_path / "b", split=(1.0, 0.0, 0.0))).problems
    assert problem.key == "data.blend.1.prefix"
    assert "has 8 tokens for training, data.seq_len=8 needs 9 of each" in problem.message
    weighted = tuple(BlendPart(prefix=str(tmp_path / name), weight=1.0) for name in "ab")
    spec = indexed(tmp_path / "a", split=(1.0, 0.0, 0.0)).model_copy(update={"blend": weighted})
    assert data_facts(spec).problems == ()


def test_an_evaluation_set_has_the_tokenizer_of_the_training_data(tmp_path):
    write_dataset(tmp_path / "a", [10] * 8)
    write_dataset(tmp_path / "web", [10] * 8)
    data = indexed(tmp_path / "a").model_copy(
        update={"valid": {"web": indexed(tmp_path / "web", split=(0.0, 1.0, 0.0))}}
    )
    training = data_facts(data)
    web = evaluation_facts(data, training)["web"]
    assert (web.problems, web.tokens["valid"]) == ((), 80)
    other = replace(training, tokenizer_sha256="f" * 64)
    (problem,) = evaluation_facts(data, other)["web"].problems
    assert (problem.key, problem.code) == ("data.valid.web", "data-tokenizers")
    gone = data.model_copy(update={"valid": {"web": indexed(tmp_path / "gone")}})
    (problem,) = evaluation_facts(gone, training)["web"].problems
    assert problem.key == "data.valid.web.blend.0.prefix"


def test_an_evaluation_set_of_files_that_are_streamed_for_training_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "web"):
        write_texts(tmp_path / f"{name}.jsonl", 20)
    # the same file by another name
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "b.jsonl")
    found = {}
    for name, files in {"web": ("web.jsonl",), "b": (tmp_path / "link.jsonl",)}.items():
        data = stream_spec("a.jsonl", "b.jsonl").model_copy(update={"valid": {name: stream_spec(*files)}})
        found[name] = evaluation_facts(data, data_facts(data))[name].problems
    assert found["web"] == ()
    (problem,) = found["b"]
    assert (problem.key, problem.code) == ("data.valid.b.files", "valid-trained")
    assert "link.jsonl is training data, too" in problem.message


def test_an_evaluation_set_that_is_training_data_by_another_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "a", [10] * 8)
    for split, is_refused in (((0.0, 1.0, 0.0), True), ((969.0, 30.0, 1.0), False)):
        data = indexed(Path("a")).model_copy(update={"valid": {"web": indexed(tmp_path / "a", split=split)}})
        problems = evaluation_facts(data, data_facts(data))["web"].problems
        assert [one.key for one in problems] == ["data.valid.web.blend.0.prefix"] * is_refused
