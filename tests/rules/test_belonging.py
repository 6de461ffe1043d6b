"""A run goes on from its own checkpoints only: those of other runs, and those that don't say where they stand, are told
by the key that differs, and the newest one that is its own is taken."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaspec import cli
from megaspec.checkpoint.codec import decode
from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.examine import read_manifest
from megaspec.checkpoint.folders import candidates
from megaspec.checkpoint.format import MANIFEST, Manifest
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.shard import SavedPiece
from megaspec.checkpoint.store import Store
from megaspec.commands import starting
from megaspec.core.errors import CheckpointError
from megaspec.launcher.exit_file import read_exit
from megaspec.rules.belonging import objections, run_identity
from megaspec.rules.difference import is_free
from megaspec.run_folder import newest_good, newest_step
from megaspec.runtime import rank
from megaspec.runtime.build import TrainState
from megaspec.runtime.loop import Run
from megaspec.runtime.state import misfits
from megaspec.spec import ForkPoint, Spec
from megaspec.train.batch_schedule import BatchSchedule
from tests.checkpoint.test_format import seal
from tests.runtime.lives import build_here
from tests.runtime.specs import make_run, spec

STEPS = {
    "train.steps": 6,
    "checkpoint.every": 2,
    "precision.kind": "fp32",
    "optim.schedule": {"warmup_steps": 4, "decay_steps": 6},
}
FP16 = STEPS | {"precision": {"kind": "fp16", "initial_scale": 1024.0}}


def life(folder: Path, made: Spec) -> Run:
    """A run of one rank, from its newest checkpoint to its end."""
    run = Run(build_here(made, 0), folder, Store(folder), SoloComm())
    run.start()
    run.train()
    return run


def go_on(made: Spec, folder: Path) -> Run:
    """A run that has gone on from its newest checkpoint and not trained."""
    run = Run(build_here(made, 0), folder, Store(folder), SoloComm())
    run.start()
    return run


def step_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with the checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    life(folder, spec(STEPS))
    return folder


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_bytes())["manifest"]


def put_foreign(run: Path, other: Spec, *, step: int) -> None:
    """A checkpoint of another run among those of `run`."""
    shutil.copytree(step_of(run, 6), step_of(run, step))
    body = manifest_of(step_of(run, 6))
    body["step"] = step
    body["spec"] = other.model_dump(mode="json")
    samples = BatchSchedule(other.train, moved=other.samples_moved).consumed(step)
    body["state"] |= {"step": step, "samples": samples}
    (step_of(run, step) / MANIFEST).write_bytes(seal(body))


OTHERS = {
    "seed": ({"train.seed": 7}, "data.seed=7 (this run: 1234), train.seed=7 (this run: 1234)"),
    "batch": ({"train.global_batch": 8}, "train.global_batch=8 (this run: 4)"),
    "rate": ({"optim.lr": 0.5}, "optim.lr=0.5 (this run: 0.01)"),
    "data": ({"data.masked": 0.3}, "data.masked=0.3 (this run: 0.2)"),
    "model of the same shapes": ({"model.norm": {"kind": "rms", "eps": 0.5}}, "model.norm.eps=0.5 (this run: 1e-05)"),
    "order of the data": ({}, "another run, run: segments=[32] (this run: [24])"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_told_by_what_differs(name, run, capsys) -> None:
    changes, said = OTHERS[name]
    put_foreign(run, spec(STEPS | changes | {"train.steps": 8}), step=8)
    before = {path.name: path.read_bytes() for path in step_of(run, 8).iterdir()}
    assert go_on(spec(STEPS), run).step == 6
    told = capsys.readouterr().err
    assert "step-00000008 (now quarantine/step-00000008-1)" in told
    assert "it is a checkpoint of another run, run: " in told
    assert said in told
    assert "megaspec resume run --fork NEW" in told
    assert "step 6 is the newest good one" in told
    # Moved, and not a byte lost.
    aside = run / "checkpoints" / "quarantine" / "step-00000008-1"
    assert before == {path.name: path.read_bytes() for path in aside.iterdir()}


def test_where_only_foreign_ones_are_left_nothing_moves(run) -> None:
    """The fault may as well lie in spec.json."""
    before = sorted(run.rglob("*"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"data\.seed=1234 .this run: 7") as caught:
            go_on(spec(STEPS | {"train.seed": 7}), run)
        assert caught.value.exit_code == 66
    assert sorted(run.rglob("*")) == before


LEGITIMATE = {
    "another layout": {"kernels.attention": "reference", "train.micro_batch": 1},
    "longer": {"train.steps": 9},
    "other reports": {"log.every": 7, "checkpoint.keep": 3, "train.eval_every": 3, "train.eval_samples": 2},
    "another folder": {"run_dir": "elsewhere"},
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_what_may_change_within_a_run_is_no_objection(name, run) -> None:
    made = spec(STEPS | LEGITIMATE[name])
    if name == "longer":
        made = made.model_copy(update={"segments": (24, 12)})
    assert go_on(made, run).step == 6
    assert not (run / "checkpoints" / "quarantine").exists()


def test_a_fork_takes_the_checkpoint_that_it_began_with_and_no_other_of_its_parent(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    parent = make_run(Path("parent"), STEPS)
    life(parent, Spec.model_validate_json((parent / "spec.json").read_text()))
    changes = ["train.seed=9", "data.seed=9", "optim.lr=1e-3", "train.global_batch=8", "train.steps=10"]
    shutil.move(step_of(parent, 6), "kept")
    assert cli.main(["resume", "parent", "--fork", "child", *changes]) == 0
    child = Spec.model_validate_json(Path("child/spec.json").read_text())
    manifest = decode(step_of(Path("child"), 4).joinpath(MANIFEST).read_bytes(), "")
    assert child.forked_from is not None
    assert (child.forked_from.manifest, child.forked_from.step) == (manifest.digest, 4)
    assert child.forked_from.tokens == manifest.state["tokens"] > 0
    assert go_on(child, Path("child")).step == 4

    # It stays so when the fork goes on, and with what it saves itself.
    assert cli.main(["resume", "child", "train.steps=12"]) == 0
    longer = Spec.model_validate_json(Path("child/spec.json").read_text())
    assert longer.forked_from == child.forked_from
    assert life(Path("child"), longer).step == 12
    assert go_on(longer, Path("child")).step == 12
    assert cli.main(["checkpoint", "verify", "child"]) == 0

    # Another one of the parent, and the child's in the parent's folder, are foreign.
    shutil.copytree("kept", step_of(Path("child"), 14))
    (step_of(Path("child"), 14) / MANIFEST).write_bytes(restep(Path("kept"), 14))
    shutil.copytree(step_of(Path("child"), 12), step_of(parent, 12))
    capsys.readouterr()
    whose = "it belongs to the run that this was forked from, parent, and is not the checkpoint of step 4 with which"
    for folder, said in (("child", whose), ("parent", "it is a checkpoint of another run, child: ")):
        assert cli.main(["checkpoint", "verify", folder]) == 66
        assert said in capsys.readouterr().out
    assert newest_step(Path("child")) == 12
    assert newest_step(parent) == 4


def test_a_fork_that_changes_nothing_is_a_run_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    parent = make_run(Path("parent"), STEPS)
    life(parent, Spec.model_validate_json((parent / "spec.json").read_text()))
    assert cli.main(["resume", "parent", "--fork", "child", "train.steps=8"]) == 0
    child = Spec.model_validate_json(Path("child/spec.json").read_text())
    life(Path("child"), child)
    manifest = decode(step_of(Path("child"), 8).joinpath(MANIFEST).read_bytes(), "")
    (line,) = objections(manifest, Spec.model_validate_json((parent / "spec.json").read_text()))
    assert "forked_from=" in line


def emptied(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def of_no_checkpoint(folder: Path) -> None:
    for path in (folder / "checkpoints").iterdir():
        shutil.rmtree(path)


def without_files(folder: Path) -> None:
    for file in (folder / "checkpoints").rglob("*.safetensors"):
        file.unlink()


def in_quarantine(folder: Path) -> None:
    (folder / "checkpoints" / "quarantine").mkdir()
    step_of(folder, 6).rename(folder / "checkpoints" / "quarantine" / "step-00000006-1")


def bit_flipped(folder: Path) -> None:
    (file,) = step_of(folder, 6).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [emptied, of_no_checkpoint, without_files, in_quarantine, bit_flipped])
def test_a_fork_without_a_good_checkpoint_never_starts_from_the_seed(harm, run, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(starting, "launch", lambda *_, **__: started.append(1) or 0)
    shutil.rmtree("run/checkpoints/step-00000002")
    source = make_run(Path("source"), STEPS)
    Path("run/checkpoints").rename(source / "checkpoints")
    assert cli.main(["resume", "source", "--fork", "child", "train.steps=8"]) == 0
    child = Spec.model_validate_json(Path("child/spec.json").read_text())
    harm(Path("child"))
    # the command, unless it takes reading every byte, which ranks do
    started.clear()
    said = r"this run began as a fork, from step 6 of another run, and can't start from step 0"
    again = "delete child and fork again: megaspec resume SOURCE --fork child"
    commands = [["resume", "child"], ["train", "recipe=hello", "run_dir=child", "resume=auto"]]
    for words in commands[: 0 if harm is bit_flipped else 2]:
        assert cli.main(words) == 66
        err = capsys.readouterr().err
        assert said in err
        assert again in err
    assert not started
    # a rank
    with pytest.raises(CheckpointError, match=said) as caught:
        go_on(child, Path("child"))
    assert again in str(caught.value)
    assert caught.value.exit_code == 66


def test_an_earlier_run_that_has_no_checkpoint_starts_with_a_word(tmp_path, capsys) -> None:
    unknown = spec(STEPS).model_copy(update={"forked_from": "unknown"})
    assert go_on(unknown, tmp_path).step == 0
    assert "did not note whether it began as a fork: if it did, stop it" in capsys.readouterr().err
    # some forks show all the same
    with pytest.raises(CheckpointError, match="this run began as a fork, from a step of another run"):
        go_on(unknown.model_copy(update={"samples_moved": 4}), tmp_path)
    assert go_on(spec(STEPS), tmp_path).step == 0
    assert capsys.readouterr().err == ""


def cut_short(folder: Path) -> None:
    (file,) = step_of(folder, 6).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])


def half_removed(folder: Path) -> None:
    (step_of(folder, 6) / MANIFEST).unlink()


def of_another_run(folder: Path) -> None:
    shutil.rmtree(step_of(folder, 2))
    put_foreign(folder, spec(STEPS | {"train.seed": 7}), step=8)
    shutil.rmtree(step_of(folder, 6))


@pytest.mark.parametrize("harm", [cut_short, half_removed, of_another_run])
def test_the_step_that_is_named_as_saved_is_a_whole_checkpoint(harm, run, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    mine = make_run(Path("mine"), STEPS)
    (run / "checkpoints").rename(mine / "checkpoints")
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 74)
    assert cli.main(["resume", "mine"]) == 74
    assert "megaspec: step 6 is saved; megaspec resume mine goes on" in capsys.readouterr().err
    harm(mine)
    assert cli.main(["resume", "mine"]) == 74
    said = capsys.readouterr()
    assert "megaspec: step 4 is saved; megaspec resume mine goes on" in said.err
    assert "mine after step 4" in said.out
    assert read_exit(mine).step == newest_step(mine) == 4
    with RunLock(mine) as lock:
        rank.begin(mine, lock, lambda: rank.newest_step(mine, spec(STEPS)))
    assert read_exit(mine).step == newest_step(mine)


def test_only_the_very_run_that_a_fork_is_from_is_called_so(tmp_path, monkeypatch) -> None:
    """Not one that differs from it in the experiment alone, in the data, or in how it began."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    parent = make_run(Path("parent"), STEPS)
    life(parent, Spec.model_validate_json((parent / "spec.json").read_text()))
    assert cli.main(["resume", "parent", "--fork", "child", "optim.lr=1e-3"]) == 0
    child = Spec.model_validate_json(Path("child/spec.json").read_text())
    earlier = decode(step_of(parent, 2).joinpath(MANIFEST).read_bytes(), "")
    assert child.forked_from.source == run_identity(earlier.spec)

    def said(**changes: Any) -> str:
        (line,) = objections(replace(earlier, spec=earlier.spec | changes), child)
        return line

    # what is free to change within a run is, and the run may have moved
    longer = earlier.spec["train"] | {"steps": 60}
    for same in ({}, {"train": longer, "segments": [24, 12]}, {"run_dir": "moved", "name": "other"}):
        assert said(**same).startswith("it belongs to the run that this was forked from")
    others = [
        {"train": earlier.spec["train"] | {"seed": 3}},
        {"segments": [20]},
        {"data_fingerprint": "0" * 64},
        {"samples_moved": 8},
        {"forked_from": {"source": "0" * 64, "manifest": "1" * 64, "step": 1, "tokens": 2}},
    ]
    for other in others:
        assert said(**other).startswith("it is a checkpoint of another run")


def unnoted(manifest: Manifest) -> Manifest:
    """As an earlier version saved it."""
    content = dict(manifest.spec)
    del content["forked_from"]
    return replace(manifest, spec=content)


def test_nothing_is_claimed_of_how_an_earlier_version_began(run) -> None:
    manifest = decode(step_of(run, 6).joinpath(MANIFEST).read_bytes(), "")
    made = spec(STEPS)
    unknown = made.model_copy(update={"forked_from": "unknown"})
    for saved in (manifest, unnoted(manifest)):
        assert objections(saved, made) == []
        assert objections(saved, unknown) == []
    # a fork of a version that notes it noted it in all its checkpoints
    point = ForkPoint(source="0" * 64, manifest="1" * 64, step=2, tokens=9)
    fork = made.model_copy(update={"forked_from": point})
    assert "forked_from=unknown (this run: " in objections(unnoted(manifest), fork)[0]
    assert "(this run: unknown)" in objections(replace(manifest, spec=fork.model_dump(mode="json")), unknown)[0]
    # the source of a fork may have learned from more tokens, and skipped updates
    state = manifest.state | {"tokens": 10**9, "optimizer_updates": 1}
    assert objections(replace(unnoted(manifest), state=state), unknown) == []
    assert len(objections(replace(manifest, state=state), made)) == 2
    other = unknown.model_copy(update={"optim": made.optim.model_copy(update={"lr": 0.5})})
    assert "or of the one that this was forked from, if it was: its Spec is of an earlier version" in str(
        objections(manifest, other)
    )


UPDATES = {
    # nothing is skipped: as many updates as steps
    "fp32": (STEPS, None, [6], [5, 7, 0]),
    # only what was done before the fork may have been skipped
    "fork": (STEPS, 4, [2, 5, 6], [1, 7]),
    "fp16": (FP16, None, [4, 6], [7, -1]),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_as_many_as_steps_where_none_can_be_skipped(name, tmp_path) -> None:
    changes, forked_at, taken, refused = UPDATES[name]
    made = spec(changes)
    life(tmp_path, made)
    manifest = decode(step_of(tmp_path, 6).joinpath(MANIFEST).read_bytes(), "")
    if forked_at is not None:
        point = ForkPoint(source="0" * 64, manifest="1" * 64, step=forked_at, tokens=200)
        made = made.model_copy(update={"forked_from": point})
        manifest = replace(manifest, spec=made.model_dump(mode="json"))
    state = manifest.state
    if state["loss_scale"] is not None:
        state = state | {"loss_scale": state["loss_scale"] | {"finite_in_row": 0}}

    def found(updates: int) -> list[str]:
        return objections(replace(manifest, state=state | {"optimizer_updates": updates}), made)

    assert [found(updates) for updates in taken] == [[]] * len(taken)
    for updates in refused:
        assert found(updates)[0].startswith(f"state: optimizer_updates={updates}, expected ")


def restep(folder: Path, step: int) -> bytes:
    """A manifest that says another step."""
    body = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    body["step"] = step
    return seal(body)


def test_a_fork_is_not_made_from_a_foreign_checkpoint(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    for name, changes in (("one", {}), ("other", {"train.seed": 7, "train.steps": 8, "checkpoint.every": 0})):
        folder = make_run(Path(name), STEPS | changes)
        life(folder, Spec.model_validate_json((folder / "spec.json").read_text()))
    shutil.copytree(step_of(Path("other"), 8), step_of(Path("one"), 8))
    one = Spec.model_validate_json(Path("one/spec.json").read_text())
    good = newest_good(Path("one"), one)
    assert (good.candidate.step, len(good.passed_over)) == (6, 1)
    assert cli.main(["resume", "one", "--fork", "new"]) == 0
    said = capsys.readouterr()
    assert "new starts from step 6 of one" in said.out
    assert "it is a checkpoint of another run, other: data.seed=7 (this run: 1234)" in said.err
    # Its step counts for nothing: the run could not have gone on with its own 6 steps.
    assert cli.main(["resume", "one"]) == 0


def test_prune_never_counts_a_foreign_one(run) -> None:
    put_foreign(run, spec(STEPS | {"train.seed": 7}), step=8)
    made = spec(STEPS)
    store = Store(run)
    assert store.prune(2, inspect=lambda manifest: objections(manifest, made)) == [2]
    assert store.steps() == [4, 6, 8]


# --- every key of a real manifest


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of plain data, sections before what they hold; of lists the first and the last item."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*at, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) - 1} if value else ()):
            yield from paths(value[i], (*at, i))


def set_to(value: Any) -> Callable[[Any, Any], None]:
    def change(place: Any, key: Any) -> None:
        place[key] = value

    return change


def remove(place: Any, key: Any) -> None:
    del place[key]


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "missing": remove,
    "null": set_to(None),
    "text": set_to("x"),
    "true": set_to(True),
    "negative": set_to(-3),
    "large": set_to(10**17),
    "huge": set_to(10**30),
    "NaN": set_to(math.nan),
}
# Beside what is free in a recipe: what says nothing of where a run is.
UNREAD = {("generation",), ("token",), ("spec", "name"), ("spec", "device"), ("spec", "decisions"), ("spec", "plugins")}


def may_be_another(path: tuple[Any, ...], body: dict[str, Any]) -> bool:
    if any(path[: len(one)] == one for one in UNREAD):
        return True
    return path[0] == "spec" and is_free(".".join(map(str, path[1:])), body["spec"])


def is_taken(built: TrainState, data: bytes) -> bool:
    """Whether a run would go on from a checkpoint with this manifest, as far as its manifest goes."""
    try:
        manifest = decode(data, "here")
    except CheckpointError:
        return False
    return not (objections(manifest, built.spec) or misfits(built, manifest))


@pytest.mark.parametrize(("changes", "below"), [(STEPS, ()), (FP16, ("state",))], ids=["fp32", "fp16"])
def test_every_key_of_a_manifest_missing_or_wrong(changes, below, tmp_path) -> None:
    """What is taken says the same as before in everything that a run reads, and nothing else is raised."""
    made = spec(changes)
    built = life(tmp_path, made).built
    body = manifest_of(step_of(tmp_path, 4))
    text = json.dumps(body)
    assert is_taken(built, seal(body))
    few = {"model/embed.weight", "optim/exp_avg/norm.weight", "rng/cpu/0"}
    looked_at = [p for p in paths(body) if p[: len(below)] == below and (p[0] != "tensors" or few & {*p[1:2]})]
    assert len(looked_at) > (100 if below == () else 6)
    for path in looked_at:
        for name, change in CHANGES.items():
            changed = json.loads(text)
            place = changed
            for key in path[:-1]:
                place = place[key]
            change(place, path[-1])
            if not is_taken(built, seal(changed)) or may_be_another(path, body):
                continue
            if path == ("spec", "forked_from"):
                # null is what it says; without it, it is an earlier version's, of which nobody can tell
                assert name in ("null", "missing")
                continue
            # A key that says its default may be left out.
            assert Spec.model_validate_json(json.dumps(changed["spec"])) == made, f"{path} {name}"
            for part in ("step", "state", "files", "tensors"):
                assert changed[part] == body[part], f"{path} {name}"


WRONG: dict[str, tuple[tuple[Any, ...], Callable[[Any, Any], None], str]] = {
    "no samples": (("state", "samples"), remove, r"state: expected the keys .*, found"),
    "no step": (("state", "step"), remove, r"state: expected the keys"),
    "no loss scale": (("state", "loss_scale"), remove, r"state: expected the keys"),
    "another sample": (("state", "samples"), set_to(12), r"state: samples=12, expected 16 after its step"),
    "another step": (("state", "step"), set_to(5), r"state: step=5, expected 4 after its step"),
    "too many tokens": (
        ("state", "tokens"),
        set_to(10**9),
        r"tokens=1000000000, expected .* from 0 to 256",
    ),
    "too many updates": (("state", "optimizer_updates"), set_to(7), r"optimizer_updates=7, expected 4 after its step"),
    "too few updates": (("state", "optimizer_updates"), set_to(3), r"optimizer_updates=3, expected 4 after its step"),
    "no Spec": (("spec",), set_to({}), r"spec\.name: Field required"),
    "a section of the Spec": (("spec", "optim"), remove, r"spec\.optim: Field required"),
    "no generator": (("tensors", "rng/cpu/0"), remove, r"rank-00000.safetensors: its last piece ends at"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_without_a_key_is_passed_over_with_the_reason(name, run, capsys) -> None:
    """A traceback, or a run that goes on from another sample, until this was looked at."""
    path, change, said = WRONG[name]
    for step in (6, 4):
        body = manifest_of(step_of(run, step))
        place = body
        for key in path[:-1]:
            place = place[key]
        change(place, path[-1])
        (step_of(run, step) / MANIFEST).write_bytes(seal(body))
    taken = go_on(spec(STEPS), run)
    assert taken.step == 2
    told = capsys.readouterr().err
    assert "step-00000004 (now quarantine/step-00000004-1)" in told
    assert [c.step for c in candidates(run / "checkpoints")] == [2]
    assert re.search(said, told), told


def save_again(folder: Path, step: int, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """The checkpoint of a step with other tensors."""
    store = Store(folder)
    with store.open(step, SoloComm()) as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
        state, saved = reader.state, reader.spec
    change(tensors)
    pieces = [SavedPiece(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in tensors.items()]
    store.save(step, pieces, spec=saved, state=state, comm=SoloComm())


NORM = "model/norm.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "fewer bytes of a generator": (
        lambda found: found.update({"rng/cpu/0": torch.zeros(100, dtype=torch.uint8)}),
        "rng/cpu/0 has dtype U8 and shape [100], torch's generator has 5056 bytes",
    ),
    "no generator": (lambda found: found.pop("rng/cpu/0"), "0 random generators, expected cpu of 1 ranks"),
    "one generator too many": (
        lambda found: found.update({"rng/cpu/1": found["rng/cpu/0"]}),
        "2 random generators, expected cpu of 1 ranks",
    ),
    "a generator of another rank": (
        lambda found: found.update({"rng/cpu/1": found.pop("rng/cpu/0")}),
        "rng/cpu/0 is missing",
    ),
    "a generator in floats": (
        lambda found: found.update({"rng/cpu/0": torch.zeros(5056)}),
        "rng/cpu/0: dtype F32 and shape [5056], expected bytes",
    ),
    "no weight": (lambda found: found.pop(NORM), f"holds no {NORM}; it was written by another model"),
    "a weight too many": (
        lambda found: found.update({"model/more": torch.zeros(3)}),
        "model/more and 0 more belong to no parameter of this run",
    ),
    "a weight of another shape": (
        lambda found: found.update({NORM: torch.zeros(3)}),
        f"{NORM} has shape [3], this run has [32]",
    ),
    "a weight in whole numbers": (
        lambda found: found.update({NORM: torch.ones(32, dtype=torch.int32)}),
        f"{NORM} has dtype torch.int32, this run has torch.float32",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_the_run_can_not_take_are_passed_over_before_any_is_loaded(name, run, capsys) -> None:
    change, said = TENSORS[name]
    save_again(run, 6, change)
    assert go_on(spec(STEPS), run).step == 4
    assert said in capsys.readouterr().err


def test_bytes_that_are_no_state_of_a_generator_are_an_error_and_no_traceback(run) -> None:
    save_again(run, 6, lambda found: found["rng/cpu/0"].fill_(255))
    with pytest.raises(CheckpointError, match="rng/cpu/0: torch does not take it"):
        go_on(spec(STEPS), run)


def test_weights_alone_are_said_of_the_last_step_alone(tmp_path) -> None:
    folder = tmp_path / "run"
    made = spec(STEPS | {"checkpoint": {"every": 2, "keep": 9, "last": "weights"}})
    life(folder, made)
    good = step_of(folder, 6)
    assert objections(read_manifest(good, 6), made) == []
    assert go_on(made, folder).step == 6
    longer = made.model_copy(update={"train": made.train.model_copy(update={"steps": 8})})
    with pytest.raises(CheckpointError, match=r"step-00000006 holds weights alone .*init.load="):
        go_on(longer, folder)
    assert good.exists(), "it is good, and stays where it is"
    wrong = {
        "a step before it": (4, {"holds": "weights"}, "said of checkpoint.last=weights and the last step, 6"),
        "another word": (6, {"holds": "much"}, "state: expected the keys"),
    }
    for step, state, said in wrong.values():
        body = manifest_of(step_of(folder, step))
        body["state"] |= state
        (step_of(folder, step) / MANIFEST).write_bytes(seal(body))
        (found,) = objections(read_manifest(step_of(folder, step), step), made)
        assert said in found
    body = manifest_of(step_of(folder, 2))
    body["state"]["holds"] = "weights"
    body["spec"]["train"]["steps"] = 2
    (step_of(folder, 2) / MANIFEST).write_bytes(seal(body))
    (found,) = objections(read_manifest(step_of(folder, 2), 2), made)
    assert "expected weights alone, as its state says" in found
