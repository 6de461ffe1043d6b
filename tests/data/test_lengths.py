"""PREFIX.lengths.json: counted in any pieces, left aside where it is of other files, and put together for a blend."""

import json

import numpy as np
import pytest

from megaspec.cli import main
from megaspec.core.document_lengths import mean_length, twice_the_pairs_in_a_row
from megaspec.data import lengths as module
from megaspec.data.facts import data_facts
from megaspec.data.inspect import as_json, inspect
from megaspec.data.lengths import count_bins, lengths_path, load_lengths, write_lengths
from megaspec.data.manifest import load_manifest
from megaspec.data.spec import BlendPart, IndexedSpec, RandomSpec, SyntheticSpec
from tests.commands.test_data import run
from tests.data.helpers import stream_spec, write_texts
from tests.data.helpers import write_dataset as write_tokens


def indexed(*parts, **fields) -> IndexedSpec:
    given = {"seq_len": 64, "split": (1.0, 0.0, 0.0), "document_mask": True, **fields}
    return IndexedSpec(kind="indexed", blend=tuple(parts), **given)


def write_dataset(prefix, lengths, *, manifest=True) -> None:
    """Documents of so many bytes each."""
    write_tokens(prefix, lengths, vocab_size=257, manifest=manifest)


def counted(prefix) -> None:
    write_lengths(prefix, inspect(prefix).lengths)


def test_bins_double_and_lose_nothing(monkeypatch):
    lengths = np.array([0, 1, 1, 2, 3, 4, 7, 8, 2**31 - 1], dtype=np.int32)
    bins = count_bins(lengths)
    assert [(one.shortest, one.longest, one.documents) for one in bins] == [
        (0, 0, 1), (1, 1, 2), (2, 3, 2), (4, 7, 2), (8, 15, 1), (2**30, 2**31 - 1, 1)
    ]  # fmt: skip
    assert [one.tokens for one in bins] == [0, 2, 5, 11, 8, 2**31 - 1]
    assert [one.squares for one in bins[:5]] == [0, 2, 13, 65, 64]
    assert bins[5].squares == pytest.approx((2**31 - 1) ** 2, rel=1e-15)
    assert count_bins(lengths[:0]) == ()
    # a piece at a time
    monkeypatch.setattr(module, "_CHUNK", 2)
    assert count_bins(lengths) == bins


def test_it_is_read_as_it_was_written(tmp_path):
    write_dataset(tmp_path / "a", [5, 0, 17, 900, 1])
    assert run("inspect", tmp_path / "a") == 0
    record = load_lengths(tmp_path / "a", load_manifest(tmp_path / "a"))
    assert (record.documents, record.tokens) == (5, 923)
    # a document of no token is none
    assert mean_length(record.lengths) == pytest.approx(923 / 4)
    assert record.idx_sha256 == load_manifest(tmp_path / "a").idx_sha256
    assert load_lengths(tmp_path / "nothing", None) is None


def test_inspect_in_json_says_what_the_key_takes(tmp_path, capsys):
    write_dataset(tmp_path / "a", [5, 17, 900, 1])
    assert run("inspect", tmp_path / "a", "--json", "--samples", 1) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said.pop("lengths_file"), said.pop("lengths_not_kept")) == (f"{tmp_path}/a.lengths.json", None)
    assert said == json.loads(json.dumps(as_json(inspect(tmp_path / "a", samples=1))))
    assert said["lengths"]["tokens"] == 923
    assert mean_length(RandomSpec.model_validate_json(lengths_of(said)).document_lengths) == pytest.approx(923 / 4)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_inspect_tells_where_it_can_write_nothing(tmp_path, capsys, flags):
    """In the way lies a folder, which stops root, too."""
    write_dataset(tmp_path / "a", [5, 17])
    lengths_path(tmp_path / "a").mkdir()
    # whoever looks at files that are whole sees that they are
    assert main(["data", "inspect", str(tmp_path / "a"), *flags]) == 0
    printed = capsys.readouterr()
    assert f"megaspec: lengths are not kept: {tmp_path}/a.lengths.json: can't be written: " in printed.err
    assert "or set data.document_lengths to what --json prints under that name" in printed.err
    if not flags:
        assert "whole: every field" in printed.out
        assert "for plan and tune" not in printed.out
        return
    # one document
    said = json.loads(printed.out)
    assert said["lengths_file"] is None
    assert "can't be written" in said["lengths_not_kept"]
    assert mean_length(RandomSpec.model_validate_json(lengths_of(said)).document_lengths) == 11


def lengths_of(said) -> str:
    """The recipe's words for the lengths that a report names."""
    lengths = said["document_lengths"]
    return json.dumps({"kind": "random", "vocab_size": 9, "seq_len": 8, "document_lengths": lengths})


def test_files_that_are_made_again_lose_what_was_counted(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "some words"}\n')
    words = ["prepare", tmp_path / "t.jsonl", "--out", tmp_path / "d", "--tokenizer", "byte", "--workers", 1]
    assert run(*words) == 0
    assert run("inspect", tmp_path / "d") == 0
    # nothing is made again
    assert run(*words) == 0
    assert lengths_path(tmp_path / "d").exists()
    (tmp_path / "t.jsonl").write_text('{"text": "some more words"}\n')
    assert run(*words, "--overwrite") == 0
    assert not lengths_path(tmp_path / "d").exists()


@pytest.mark.parametrize("manifest", [True, False])
def test_lengths_of_other_files_are_not_used(tmp_path, manifest):
    write_dataset(tmp_path / "a", [50] * 20, manifest=manifest)
    counted(tmp_path / "a")
    spec = indexed(BlendPart(prefix=str(tmp_path / "a")))
    facts = data_facts(spec)
    assert facts.problems == ()
    assert mean_length(facts.document_lengths) == 50
    # the same number of tokens in other documents
    write_dataset(tmp_path / "a", [100] * 10, manifest=manifest)
    facts = data_facts(spec)
    # they decide nothing of a run, so that they keep none from starting
    assert facts.problems == ()
    assert facts.document_lengths == ()
    assert f"{tmp_path}/a.lengths.json is not used: it has the lengths of other files: idx_sha256=" in facts.how_lengths
    assert facts.how_lengths.endswith(f"; `megaspec data inspect {tmp_path}/a` counts how long documents are")
    counted(tmp_path / "a")
    assert mean_length(data_facts(spec).document_lengths) == 100


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:-9], "damaged: content: Invalid JSON"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "damaged: version: Input should be 1"),
        (
            lambda text: text.replace('"squares": 50000.0', '"squares": 49999.0'),
            "content: a bin whose squares are at least tokens² / documents = 50000",
        ),
        (
            lambda text: text.replace('"documents": 20', '"documents": 21', 1),
            "damaged: bins hold 20 documents with 1,000 tokens, not 21 with 1,000",
        ),
        (lambda text: text + " " * 2**20, "larger than"),
    ],
)
def test_damage_is_told_and_stops_nothing(tmp_path, damage, said):
    write_dataset(tmp_path / "a", [50] * 20)
    counted(tmp_path / "a")
    path = lengths_path(tmp_path / "a")
    path.write_text(damage(path.read_text()))
    facts = data_facts(indexed(BlendPart(prefix=str(tmp_path / "a"))))
    assert facts.problems == ()
    assert facts.document_lengths == ()
    assert f"{path} is not used: " in facts.how_lengths
    assert said in facts.how_lengths
    assert facts.how_lengths.count("megaspec data inspect") == 1


def test_lengths_that_nobody_can_read_are_told(tmp_path):
    write_dataset(tmp_path / "a", [50] * 20)
    lengths_path(tmp_path / "a").mkdir()
    facts = data_facts(indexed(BlendPart(prefix=str(tmp_path / "a"))))
    assert facts.problems == ()
    assert "a.lengths.json is not used: it can't be read: Is a directory" in facts.how_lengths


def test_a_blend_counts_by_its_weights(tmp_path):
    write_dataset(tmp_path / "short", [8] * 100)
    write_dataset(tmp_path / "long", [400] * 10)
    for name in ("short", "long"):
        counted(tmp_path / name)
    rows = {}
    for name in ("short", "long"):
        facts = data_facts(indexed(BlendPart(prefix=str(tmp_path / name))))
        rows[name] = twice_the_pairs_in_a_row(facts.document_lengths, 64)

    def row_of(short, long):
        parts = [BlendPart(prefix=str(tmp_path / "short"), weight=short)]
        parts += [BlendPart(prefix=str(tmp_path / "long"), weight=long)]
        facts = data_facts(indexed(*parts))
        assert facts.problems == ()
        return twice_the_pairs_in_a_row(facts.document_lengths, 64)

    assert row_of(3.0, 1.0) == pytest.approx((3 * rows["short"] + rows["long"]) / 4)
    # without weights a pass takes all of both: 800 tokens and 4,000
    assert row_of(None, None) == pytest.approx((rows["short"] + 5 * rows["long"]) / 6)


def test_parts_that_were_not_counted_are_named(tmp_path):
    for name in ("a", "b c", "d"):
        write_dataset(tmp_path / name, [50] * 20)
    counted(tmp_path / "a")
    facts = data_facts(indexed(*(BlendPart(prefix=str(tmp_path / name)) for name in ("a", "b c"))))
    assert facts.problems == ()
    assert facts.document_lengths == ()
    assert facts.how_lengths == f"`megaspec data inspect '{tmp_path}/b c'` counts how long documents are"
    facts = data_facts(indexed(*(BlendPart(prefix=str(tmp_path / name)) for name in ("a", "b c", "d"))))
    text = f"here of 2 data sets: '{tmp_path}/b c', {tmp_path}/d"
    assert facts.how_lengths == f"`megaspec data inspect PREFIX` counts how long documents are, {text}"
    # of very many it says how many
    facts = data_facts(indexed(*([BlendPart(prefix=str(tmp_path / "d"))] * 10)))
    assert facts.how_lengths.endswith("d and 2 more")
    assert facts.how_lengths.count(f"{tmp_path}/d") == 8


def test_a_stream_says_how_it_can_be_known(tmp_path):
    write_texts(tmp_path / "a.jsonl", 3)
    facts = data_facts(stream_spec(tmp_path / "a.jsonl", document_mask=True))
    assert facts.document_lengths == ()
    assert "megaspec data prepare" in facts.how_lengths
    assert "data.document_lengths" in facts.how_lengths


def test_made_sources_know_themselves():
    assert mean_length(SyntheticSpec(kind="synthetic", seq_len=8).made_lengths) == pytest.approx(32)
    random = RandomSpec(kind="random", seq_len=8, vocab_size=9)
    assert random.made_lengths == ()
    assert mean_length(random.model_copy(update={"document_length": 700}).made_lengths) == pytest.approx(700)
