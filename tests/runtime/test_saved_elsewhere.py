"""A run's newest checkpoint lies where the run folder did not take it: whoever opens a run takes that one, and says so.

With another step than the run folder's newest in each answer, so that an older one can't pass for it.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.checkpoint import fallback
from megaspec.checkpoint.fallback import fallback_folder
from megaspec.commands.weights_source import open_source
from megaspec.core.errors import CheckpointError
from megaspec.report.folder import RunFolder
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.run_folder import newest_good, newest_step, read_run, saved_in_words
from tests.hf.folders import save_tokenizer
from tests.runtime import lives
from tests.runtime.specs import TARGET, make_run, recipe

SETTINGS = {
    "precision.kind": "fp32",
    "data.vocab_size": 101,
    "model.vocab_size": 101,
    "train.steps": 4,
    "train.eval_every": 2,
    "train.eval_samples": 4,
    "optim.schedule.warmup_steps": 1,
}


@dataclass(frozen=True)
class Apart:
    """A run whose folder has steps 1 to 3, and whose step 4 is in the other place."""

    run: Path
    other: Path
    newest: Path


@pytest.fixture
def apart(pool, tmp_path) -> Apart:
    other = tmp_path / "other"
    checkpoint = {"every": 1, "keep": 9, "fallback_dir": str(other)}
    run = make_run(tmp_path / "run", SETTINGS | {"checkpoint": checkpoint})
    spec = read_run(run).spec
    pool.run(lives.live, spec.model_dump_json(), str(run), ranks=spec.world_size)
    (run / "tokenizer").mkdir()
    save_tokenizer(run / "tokenizer")
    home = run / "checkpoints" / "step-00000004"
    newest = fallback_folder(str(other), run) / "checkpoints" / home.name
    newest.parent.mkdir(parents=True)
    shutil.move(home, newest)
    return Apart(run, other, newest)


def _write(run: Path, out: Path) -> dict[str, tuple[str, ...]]:
    """Commands that open the newest checkpoint of a run, by name."""
    return {
        "eval": ("eval", str(run), "--json"),
        "generate": ("generate", str(run), "abc", "--tokens", "2", "--temperature", "0", "--json"),
        "export": ("hf", "export", str(run), str(out)),
        "save": ("checkpoint", "save", str(run), "--out", str(out)),
        "inspect": ("checkpoint", "inspect", str(run), "--json"),
        "diff": ("checkpoint", "diff", str(run), str(run)),
    }


@pytest.mark.usefixtures("warm_launches")
@pytest.mark.parametrize("name", _write(Path(), Path()))
def test_the_newest_is_taken_and_named(name, apart, tmp_path, capfd) -> None:
    words = _write(apart.run, tmp_path / "out")[name]
    capfd.readouterr()
    assert cli.main(list(words)) == 0
    out, err = capfd.readouterr()
    assert f"step 4 is read from {apart.newest}" in err
    if name in ("eval", "inspect"):
        assert json.loads(out)["step"] == 4
    if name in ("export", "save"):
        assert f"step 4 of {apart.run}" in out
    # nothing was moved, and an older one is still to be had
    assert sorted(os.listdir(apart.run / "checkpoints")) == ["step-00000001", "step-00000002", "step-00000003"]
    if name not in ("generate", "diff"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert cli.main([*words, "--step", "3"]) == 0
        assert "is read from" not in capfd.readouterr().err


@pytest.mark.usefixtures("warm_launches")
@pytest.mark.parametrize("name", _write(Path(), Path()))
def test_a_place_that_cannot_be_looked_into_is_an_error(name, apart, tmp_path, capfd) -> None:
    """Under a file nothing can be listed; as root no permission keeps a test away."""
    os.rename(apart.newest, tmp_path / "kept")
    apart.newest.parent.rmdir()
    apart.newest.parent.write_text("")
    words = _write(apart.run, tmp_path / "out")[name]
    assert cli.main(list(words)) == 66
    err = capfd.readouterr().err
    assert f"{apart.newest.parent}: cannot be listed" in err
    assert "the newest checkpoint may be there" in err
    assert "take step 3, the newest that is seen" in err
    if name not in ("generate", "diff"):
        assert cli.main([*words, "--step", "3"]) == 0


def test_a_place_that_is_gone_with_what_the_note_names(apart, tmp_path, capfd) -> None:
    fallback.note(apart.run, apart.newest)
    shutil.rmtree(apart.other)
    assert cli.main(["hf", "export", str(apart.run), str(tmp_path / "out")]) == 66
    assert f"{apart.newest} is not there, in which step 4 was saved" in capfd.readouterr().err
    assert cli.main(["checkpoint", "list", str(apart.run)]) == 66
    out = capfd.readouterr().out
    assert f"{apart.newest} is not there, in which step 4 was saved" in out
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["3", "2", "1"]
    # a fork takes what there is, as the run itself would, and tells
    good = newest_good(apart.run, read_run(apart.run).spec)
    assert good.candidate.step == 3
    assert good.passed_over == (f"{apart.newest} is not there, in which step 4 was saved",)


def test_a_place_that_is_gone_and_of_which_nothing_is_known_is_told(apart, tmp_path, capfd) -> None:
    """A finished run that was brought to another machine is read there as before."""
    shutil.rmtree(apart.other)
    assert cli.main(["hf", "export", str(apart.run), str(tmp_path / "out")]) == 0
    out, err = capfd.readouterr()
    assert f"step 3 of {apart.run}" in out
    assert f"checkpoint.fallback_dir={apart.other} is not there" in err
    # a run of weights alone has no other place
    assert cli.main(["checkpoint", "save", str(apart.run), "--out", str(tmp_path / "alone"), "--step", "2"]) == 0
    capfd.readouterr()
    assert cli.main(["hf", "export", str(tmp_path / "alone"), str(tmp_path / "b")]) == 0
    assert "is not there" not in capfd.readouterr().err


def test_of_a_newest_that_is_damaged_the_one_before_is_taken_with_a_word(apart, tmp_path, capfd) -> None:
    shard = next(apart.newest.glob("rank-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert cli.main(["hf", "export", str(apart.run), str(tmp_path / "out")]) == 0
    out, err = capfd.readouterr()
    assert f"step 3 of {apart.run}" in out
    assert f"a checkpoint is not good: {apart.newest}" in err
    assert "step 3 is the newest good one" in err


def test_another_run_begins_with_it(apart, tmp_path, pool, capfd) -> None:
    changes = {**SETTINGS, "train.steps": 2, "checkpoint": {"every": 0}, "init.load": str(apart.run)}
    made = recipe(changes)
    facts = gather_facts(made)
    assert facts.weights is not None
    assert (facts.weights.step, facts.weights.problem) == (4, "")
    assert gather_facts(recipe(changes | {"init.step": 2})).weights.step == 2
    missing = gather_facts(recipe(changes | {"init.step": 9})).weights.problem
    assert missing == f"init.step=9: {apart.run} has checkpoints of 1, 2, 3, 4"
    spec = resolve(made, TARGET, facts)
    pool.run(lives.live, spec.model_dump_json(), str(tmp_path / "next"), ranks=spec.world_size)
    # by then the run may have moved it home
    shutil.move(apart.newest, apart.run / "checkpoints" / apart.newest.name)
    pool.run(lives.live, spec.model_dump_json(), str(tmp_path / "later"), ranks=spec.world_size)


def test_all_that_asks_for_steps_knows_of_it(apart, tmp_path, capfd) -> None:
    saved = read_run(apart.run)
    assert newest_step(apart.run) == 4
    assert "step 4 is saved" in saved_in_words(apart.run)
    assert newest_good(apart.run, saved.spec).candidate.path == apart.newest
    page = RunFolder(apart.run)
    page.read()
    assert page.kept_steps == {1, 2, 3, 4}
    with open_source(saved, 4).reader as reader:
        assert reader.path == apart.newest
    with pytest.raises(CheckpointError, match=r"--step 9: .*run has checkpoints of 1, 2, 3, 4"):
        open_source(saved, 9)
    assert cli.main(["checkpoint", "average", str(apart.run), "--last", "2", "--out", str(tmp_path / "mean")]) == 0
    assert f"0.5 of step 4 of {apart.run}" in capfd.readouterr().out
    assert cli.main(["checkpoint", "verify", str(apart.run), "--step", "4"]) == 0
    assert f"good, in {apart.newest.parent}" in capfd.readouterr().out
