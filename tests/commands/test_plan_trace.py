"""`megaspec plan --trace` as it is typed."""

import json

import pytest

from megaspec.cli import main

WORDS = ("recipe=llama3_8b", "hardware=H200", "gpus=4", "model.n_layers=2", "parallelism=default", "parallelism.tp=2")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("RANK", raising=False)


def test_tables(capsys):
    assert main(["plan", *WORDS, "--trace"]) == 0
    out = capsys.readouterr().out
    assert "Rank 0, traced" in out
    assert "Rank 3, traced" in out
    assert out.count("plan and trace agree") == 2
    assert "layers.*.attn.wqkv.weight (2)" in out
    assert "DIFFERENT" not in out


def test_widths_that_share_no_factors(capsys):
    """In one buffer a shard of a layer would be a multiple of 509 · 1,021 · 256 elements, a gigabyte in all."""
    words = ["recipe=llama3_8b", "hardware=H200", "gpus=2", "model.n_layers=2", "parallelism=default"]
    words += ["parallelism.dp_shard=2", "parallelism.dp_strategy=fsdp", "train.global_batch=2"]
    widths = ["model.d_model=509", "model.d_ffn=1021", "model.n_heads=4", "model.n_kv_heads=4", "model.d_head=64"]
    assert main(["plan", *words, *widths, "--trace", "--ranks", "0"]) == 0
    assert "plan and trace agree" in capsys.readouterr().out


def test_json_of_chosen_ranks(capsys):
    assert main(["plan", *WORDS, "--trace", "--ranks", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    [trace] = content["traces"]
    assert (trace["rank"], trace["stage"]) == (2, 0)
    assert trace["parameters"]["layers.0.attn.wqkv.weight"] == [3072, 4096]
    assert all(row["agrees"] for row in trace["compared"])
    assert {one["kind"] for one in trace["collectives"]} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert all(2 in one["ranks"] for one in trace["collectives"])
    assert trace["memory"]["total"] == sum(n for kind, n in trace["memory"].items() if kind not in ("total", "at"))


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_difference_is_told_by_the_exit_code(form, capsys, monkeypatch):
    monkeypatch.setattr("megaspec.verify.trace_compare.MEMORY_TOLERANCE", -1.0)
    assert main(["plan", *WORDS, "--trace", "--ranks", "0", *form]) == 70
    assert ('"agrees": false' if form else "DIFFERENT: ") in capsys.readouterr().out


def test_what_can_be_planned_only_is_refused(capsys):
    assert main(["plan", "recipe=deepseek_v3", "--trace"]) == 64
    assert "can be planned, not trained" in capsys.readouterr().err
