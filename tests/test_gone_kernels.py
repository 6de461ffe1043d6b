"""A run of an earlier version that names an implementation which is gone: told with the way out, and it goes on."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.core.errors import RecipeError
from megaspec.log.jsonl import read_metrics
from megaspec.recipe import Recipe
from megaspec.run_folder import read_run
from megaspec_kernels.catalog import CATALOG
from megaspec_kernels.gone import PLAIN, GoneKernel, gone_kernels, without_gone

TINY = """
defaults:
  - override /model: hello
  - override /data: synthetic
  - override /precision: fp32
model: {n_layers: 1, d_model: 16, n_heads: 2, n_kv_heads: 1, d_ffn: 64, vocab_size: 32}
data: {seq_len: 8, vocab_size: 32}
train: {steps: 2, global_batch: 4, eval_every: 2, eval_samples: 2, sample: null}
optim: {schedule: {warmup_steps: 1}}
checkpoint: {every: 1}
launcher: {ranks: 1}
log: {console: quiet, tensorboard: false}
"""
GONE = "kernels.fp8_cast=cuda is gone, this version has triton or reference; say which: megaspec {} {} "
GONE += "kernels.fp8_cast=reference"


def make_old(run: Path) -> None:
    """What a version wrote that had this implementation: into the recipe, the Spec, and each checkpoint's."""
    for name in ("recipe.json", "spec.json"):
        content = json.loads((run / name).read_text())
        content["kernels"]["fp8_cast"] = "cuda"
        (run / name).write_text(json.dumps(content))
    for path in run.glob("checkpoints/*/manifest.json"):
        inner, end = re.fullmatch(
            rb'\{"sha256":"[0-9a-f]{64}","manifest":(.*)(\}\s*)', path.read_bytes(), re.S
        ).groups()
        old, changed = re.subn(rb'"fp8_cast": ?"reference"', b'"fp8_cast":"cuda"', inner)
        assert changed == 1
        path.write_bytes(b'{"sha256":"%s","manifest":%s%s' % (hashlib.sha256(old).hexdigest().encode(), old, end))


@pytest.fixture
def run(tmp_path, monkeypatch, warm_launches) -> str:
    """Of two steps, both saved; where commands are given."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "recipe=tiny", "name=old"]) == 0
    make_old(Path("runs/old"))
    return "runs/old"


def files_of(run: str) -> dict[str, bytes]:
    """But for who had the run last."""
    paths = [path for path in Path(run).rglob("*") if path.is_file() and path.parent.name != "lock"]
    return {str(path): path.read_bytes() for path in paths}


def test_it_is_told_what_is_gone_and_goes_on_by_another(run, capfd):
    before = files_of(run)
    refused = [
        ("resume", ["resume", run, "train.steps=3"]),
        ("resume", ["resume", run, "--fork", "new", "train.steps=3"]),
        ("resume", ["resume", run, "train.steps=3", "--supervise"]),
        ("resume", ["train", "recipe=tiny", "name=old", "resume=auto", "train.steps=3"]),
        ("resume", ["show", run]),
        ("resume", ["diff", run, run]),
        ("eval", ["eval", run]),
    ]
    for command, words in refused:
        assert cli.main(words) == 64, words
        assert GONE.format(command, run) in capfd.readouterr().err, words
    assert files_of(run) == before
    # what computed weights matters to nobody who reads them
    for words in (["checkpoint", "list", run], ["hf", "export", run, "exported"]):
        assert cli.main(words) == 0, words
    shutil.copytree(run, "runs/again")
    assert cli.main(["eval", run, "kernels.fp8_cast=reference"]) == 0
    assert files_of(run) == before
    capfd.readouterr()
    assert cli.main(["resume", run, "kernels.fp8_cast=reference", "train.steps=3"]) == 0
    assert "kernels.fp8_cast changed" in capfd.readouterr().out
    assert [line["step"] for line in read_metrics(Path(run, "metrics.jsonl")) if line["event"] == "step"] == [1, 2, 3]
    assert not Path(run, "checkpoints/quarantine").exists()
    saved = read_run(Path(run))
    assert saved.recipe["kernels"]["fp8_cast"] == saved.spec.kernels.fp8_cast == "reference"
    # auto is an answer where it is given, and a recipe's own word
    assert cli.main(["resume", "runs/again", "kernels.fp8_cast=auto", "--fork", "forked", "train.steps=3"]) == 0
    words = [
        "recipe=tiny",
        "name=old",
        "run_dir=runs/again",
        "resume=auto",
        "train.steps=3",
        "kernels.fp8_cast=reference",
    ]
    assert cli.main(["train", *words]) == 0
    steps = [line["step"] for line in read_metrics(Path("runs/again/metrics.jsonl")) if line["event"] == "step"]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize("operation", CATALOG)
def test_any_name_that_the_catalog_does_not_have(operation):
    assert PLAIN in CATALOG[operation].implementations
    content = {"kernels": {operation: "deleted", "compile": "none"}, "decisions": [{"key": f"kernels.{operation}"}]}
    assert gone_kernels(content) == (GoneKernel(operation, "deleted"),)
    assert without_gone(content) == {"kernels": {operation: PLAIN, "compile": "none"}, "decisions": []}
    for name in ("auto", *CATALOG[operation].implementations):
        assert gone_kernels({"kernels": {operation: name}}) == ()
    for device in ("cuda", "cpu"):
        instead = GoneKernel(operation, "deleted").instead(device)
        needs = CATALOG[operation].implementations[instead]
        assert device in needs.devices
        assert not needs.package
        Recipe.model_fields["kernels"].annotation.model_validate({operation: instead})


def test_the_cast_that_was_deleted():
    assert GoneKernel("fp8_cast", "cuda").instead("cuda") == "triton"


def test_a_name_that_the_recipe_alone_has_is_told_too(run):
    content = json.loads(Path(run, "spec.json").read_text())
    content["kernels"]["fp8_cast"] = "reference"
    Path(run, "spec.json").write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=r"runs/old: kernels\.fp8_cast=cuda is gone"):
        read_run(Path(run))


def test_what_is_no_name_is_damage(tmp_path, run):
    content = json.loads(Path(run, "spec.json").read_text())
    content["kernels"]["fp8_cast"] = 7
    Path(run, "spec.json").write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=r"spec.json is damaged: kernels\.fp8_cast"):
        read_run(Path(run), allows_gone=True)
