"""Two jobs on one run folder, and a disk without room."""

import json
import os
import re
import shutil
import signal

import numpy as np
import pytest

from megaspec.checkpoint.fallback import fallback_folder
from megaspec.checkpoint.files import free_bytes
from megaspec.checkpoint.lock import RunLock
from megaspec.cli import main
from megaspec.core.errors import WriteError
from megaspec.data.kept_room import write_into_room
from megaspec.recipe import Recipe
from megaspec.run_folder import newest_step, read_run, read_target
from tests.checkpoint.checkpoint_cases import counters_read
from tests.faults.entry import NEW_HOLDER
from tests.faults.runs import STEPS, assert_same, go, make_run, newest, recipe
from tests.faults.supervised import plan_faults, supervised, wait_until
from tests.faults.test_stop import ROOT, wait_for_step
from tests.faults.test_supervise import FAST, a_recipe, weights_of
from tests.small_disks import empty, fill, small_disk
from tests.warm import WarmProcess


def test_a_second_job_is_refused_at_once_and_told_who_has_the_folder(tmp_path, capsys):
    run = make_run(tmp_path / "run", recipe(steps=5000))
    path = os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "launchers"))
    first = WarmProcess(["resume", str(run)], env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    try:
        wait_for_step(run, first)
        before = (run / "spec.json").read_bytes()
        with counters_read() as counters:
            assert main(["resume", str(run), "train.steps=6000"]) == 78
        # at once: nobody waits for the lock
        assert not counters
        assert str(first.pid) in capsys.readouterr().err
        assert (run / "spec.json").read_bytes() == before
        first.terminate()
        first.communicate()
        assert first.returncode == 75
    finally:
        first.kill()
        first.wait()


def test_a_job_that_lost_its_run_writes_nothing_more(tmp_path, factory, capfd):
    """It stood still while another one took over: neither a line nor a checkpoint comes from it afterwards."""
    run = make_run(tmp_path / "run", recipe(save_every=20))
    assert go(run, factory, fault={"rank": 0, "kind": "lose", "point": "step", "count": 4}) == 78
    assert "took it over" in capfd.readouterr().err
    assert (run / "metrics.jsonl").read_text().endswith(NEW_HOLDER)
    assert not (run / "checkpoints").exists()
    assert json.loads((run / "exit_code.json").read_text())["code"] is None


def test_a_run_folder_that_is_renamed_under_way(tmp_path, factory, capfd):
    run = make_run(tmp_path / "run", recipe())
    assert go(run, factory, fault={"rank": 0, "kind": "move", "point": "step", "count": 5}) == 73
    said = capfd.readouterr().err
    assert f"run_dir={run} was moved or removed while the run was under way" in said
    assert "took it over" not in said
    assert "Traceback" not in said
    assert not run.exists()
    assert newest(tmp_path / "elsewhere")[0] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_in_a_save(tmp_path, factory, undisturbed, capfd, rank):
    run = make_run(tmp_path / "run", recipe())
    fault = {"rank": rank, "kind": "full", "point": "before_chunk_write", "count": 3}
    assert go(run, factory, fault=fault) == 73
    said = capfd.readouterr().err
    assert "No space left on device" in said
    assert str(run / "checkpoints") in said
    assert "need" in said
    assert newest(run)[0] >= 3
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])


def test_checkpoints_of_another_run_are_passed_over(tmp_path, factory, undisturbed, capfd):
    """Copied over by mistake they verified as good, and the run went on from foreign weights at another sample."""
    run = make_run(tmp_path / "run", recipe())
    other = make_run(tmp_path / "other", recipe(seed=7))
    fault = {"rank": 1, "kind": "point", "point": "step", "count": 8}
    assert go(run, factory, fault=fault) == 74
    assert go(other, factory) == 0
    own = newest(run)
    foreign = other / "checkpoints" / f"step-{STEPS:08d}"
    shutil.copytree(foreign, run / "checkpoints" / foreign.name)
    capfd.readouterr()
    assert go(run, factory) == 0
    said = capfd.readouterr().err
    assert f"it is a checkpoint of another run, {other}: data.seed=7 (this run: 1234)" in said
    assert f"step {own[0]} is the newest good one" in said
    assert_same(run, undisturbed[2])
    # Where there is no own one, the run does not start anew, and nothing moves.
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(foreign, run / "checkpoints" / foreign.name)
    assert go(run, factory) == 66
    assert "Traceback" not in capfd.readouterr().err
    assert [path.name for path in (run / "checkpoints").iterdir()] == [foreign.name]


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "500k") as place:
        yield place


def test_a_disk_that_fills_up(disk, factory, undisturbed, capfd):
    run = make_run(disk / "run", recipe())
    assert go(run, factory, fault={"rank": 1, "kind": "point", "point": "step", "count": 5}) == 74
    good, tensors, _ = newest(run)
    # enough for logs, too little for a checkpoint
    fill(disk, but=24_000)
    assert go(run, factory) == 73
    said = capfd.readouterr().err
    assert str(run / "checkpoints") in said
    assert re.search(r"need [0-9,]{6,} bytes, [0-9,]+ bytes are free", said), said
    assert newest(run)[:2] == (good, tensors)
    empty(disk)
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])


@pytest.mark.usefixtures("warm_launches")
def test_a_full_run_folder_ends_no_attempt_while_there_is_another_place(disk, tmp_path, factory, undisturbed, capfd):
    """Not one byte is left. Ranks are killed, then the launcher: what was saved elsewhere is gone on from, once and
    again, and comes home when there is room."""
    other = tmp_path / "other"
    fields = json.loads(recipe(fallback_dir=str(other)).model_dump_json())
    fields["launcher"] |= {"timeout_seconds": 20.0, "restarts": FAST | {"without_progress": 1}}
    run = make_run(disk / "run", Recipe.model_validate_json(json.dumps(fields)))
    plan_faults(run, {1: {"rank": 1, "kind": "kill", "count": 8}, 2: {"rank": 0, "kind": "launcher", "count": 7}})
    # while there is room
    with supervised(run) as supervisor:
        wait_until(lambda: (run / "checkpoints" / "step-00000003").exists())
        supervisor.send_signal(signal.SIGTERM)
        supervisor.communicate()
    at_home = newest_step(run)
    assert at_home < STEPS
    fill(disk)
    with supervised(run) as supervisor:
        _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, said
    assert free_bytes(disk) == 0
    # each attempt saved a new step, which is progress wherever it lies: none was given up
    went_on = [int(step) for step in re.findall(r"the run goes on from step (\d+) in", said)]
    assert len(went_on) == 2, said
    assert at_home < went_on[0] < went_on[1] < STEPS
    assert f"step {went_on[0]} stays where it was saved: {other}" in said
    assert "which has no room for it: need" in said
    # what there was no room for is told, file by file
    for name in ("exit_code.json", "metrics.jsonl"):
        assert re.search(rf"{name}.*No space left on device", said), name
    assert f"lines go to {fallback_folder(str(other), run) / 'metrics.jsonl'} until there is room" in said
    assert "tells nothing of steps" not in said
    assert "lost" not in said
    assert newest_step(run) == STEPS
    # who looks is told where it is
    assert main(["checkpoint", "list", str(run)]) == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.split()[:1] == [str(STEPS)]]
    assert f"whole, in {other}" in line
    empty(disk)
    assert main(["resume", str(run)]) == 0
    said = capfd.readouterr().err
    assert f"step {STEPS} was saved in {other}" in said
    assert newest(run)[:2] == (undisturbed[2].step, undisturbed[2].tensors)
    assert json.loads((run / "exit_code.json").read_text())["code"] == 0
    assert_same(run, undisturbed[2])
    assert list(other.iterdir()) == []


def devices_of(run, names):
    """Says which devices a run may use, by bytes that the disk has already."""
    with (run / "devices").open("r+") as file:
        file.write(names)
        file.truncate()


@pytest.fixture
def larger_disk(tmp_path):
    """With room for what is kept in fp64."""
    with small_disk(tmp_path / "larger", "900k") as place:
        yield place


# By default the room that is kept is proven by test_room_to_change_is_kept_by_who_saves_elsewhere, saving elsewhere by
# test_a_full_run_folder_ends_no_attempt_while_there_is_another_place, and layouts that change by test_supervise.py.
@pytest.mark.slow
def test_a_full_run_folder_ends_no_run_that_has_to_take_another_layout(larger_disk, tmp_path, factory):
    """Not one byte is left when devices are lost, and come back: the layout changes twice, each time in the room that
    was kept for it, and the run comes to the same numbers."""
    other = tmp_path / "other"
    fields = json.loads(a_recipe(layouts=(1,)).model_dump_json())
    fields["checkpoint"]["fallback_dir"] = str(other)
    # so that devices come back before all steps are done
    fields["train"]["steps"] = 60
    asked = Recipe.model_validate_json(json.dumps(fields))
    run = make_run(larger_disk / "run", asked)
    (run / "devices").write_text("0,1")
    plan_faults(run, {"every": {"pause": 0.1, "flips": str(tmp_path)}})
    # while there is room
    with supervised(run) as supervisor:
        wait_until(lambda: (run / "checkpoints" / "step-00000003").exists())
        supervisor.send_signal(signal.SIGTERM)
        supervisor.communicate()
    at_home = newest_step(run)
    devices_of(run, "0")
    fill(larger_disk)
    with supervised(run) as supervisor:
        wait_until(lambda: newest_step(run) > at_home)
        assert read_run(run).spec.world_size == 1
        devices_of(run, "0,1")
        _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, said
    assert free_bytes(larger_disk) == 0
    assert read_run(run).spec.world_size == 2
    assert newest_step(run) == 60
    # nothing of the folder is of another layout than the rest
    assert read_target(run).places == 2
    assert "those of an earlier start stay" not in said
    empty(larger_disk)
    assert main(["resume", str(run)]) == 0
    undisturbed = make_run(tmp_path / "undisturbed", asked)
    assert go(undisturbed, factory) == 0
    step, weights = weights_of(run)
    last, expected = weights_of(undisturbed)
    assert step == last == 60
    for name, theirs in expected.items():
        assert np.abs(weights[name] - theirs).max() <= 1e-12 * max(1.0, np.abs(theirs).max()), name


def test_room_to_change_is_kept_by_who_saves_elsewhere(disk, tmp_path, capfd):
    run = make_run(disk / "run", recipe(fallback_dir=str(tmp_path / "other")))
    alone = make_run(disk / "alone", recipe())
    assert not (alone / ".room").exists()
    before = {name: (run / name).stat().st_size for name in ("recipe.json", "spec.json")}
    for name, size in before.items():
        assert (run / ".room" / name).stat().st_size >= 2 * size
    fill(disk)
    # a run that was copied by hard links keeps its own
    shutil.copytree(run, disk / "linked", copy_function=os.link)
    room = (run / ".room" / "spec.json").read_bytes()
    with pytest.raises(WriteError, match=r"spec\.json: can't be written: No space left"):
        write_into_room(disk / "linked", "spec.json", b"x")
    assert (run / ".room" / "spec.json").read_bytes() == room
    shutil.rmtree(disk / "linked")
    # more than there is room for
    with pytest.raises(WriteError, match=r"spec\.json: can't be written: No space left"):
        write_into_room(run, "spec.json", b"x" * 3 * before["spec.json"])
    assert (run / "spec.json").stat().st_size == before["spec.json"]
    for text in (b"x" * before["spec.json"], b"yy" * before["spec.json"], b"z"):
        write_into_room(run, "spec.json", text)
        assert (run / "spec.json").read_bytes() == text


@pytest.mark.usefixtures("warm_launches")
def test_a_run_of_an_earlier_version_keeps_room_from_its_next_start_on(larger_disk, tmp_path, capfd):
    """One that has begun before there was such room: it is kept as soon as a start finds the disk with some."""
    run = make_run(larger_disk / "run", recipe(fallback_dir=str(tmp_path / "other")))
    shutil.rmtree(run / ".room")
    assert main(["resume", str(run)]) == 0
    for name in ("recipe.json", "target.json", "prediction.json", "spec.json"):
        assert (run / ".room" / name).stat().st_size >= (run / name).stat().st_size
    fill(larger_disk)
    # what another layout has to write, too
    assert main(["resume", str(run), f"train.steps={STEPS + 2}"]) == 0, capfd.readouterr().err
    assert free_bytes(larger_disk) == 0
    assert read_run(run).spec.train.steps == STEPS + 2
    assert newest_step(run) == STEPS + 2


@pytest.mark.usefixtures("warm_launches")
def test_a_disk_that_a_killed_save_has_filled_takes_a_change(larger_disk, tmp_path, capfd):
    """Also of a run that has kept no room: what is left of the save goes before anything is written."""
    run = make_run(larger_disk / "run", recipe())
    assert main(["resume", str(run)]) == 0
    for kind in ("saving", "deleted"):
        left = run / "checkpoints" / f".{kind}-00000099-99"
        left.mkdir()
        (left / "rank-00000.safetensors").write_bytes(bytes(100_000))
    fill(larger_disk)
    assert main(["resume", str(run), f"train.steps={STEPS + 2}"]) == 0, capfd.readouterr().err
    assert newest_step(run) == STEPS + 2
    assert not [name for name in os.listdir(run / "checkpoints") if name.startswith(".")]


def test_a_full_run_folder_takes_no_change(disk, tmp_path, factory, capfd):
    """What is asked for anew can't be kept where no room is: told, and nothing is begun."""
    run = make_run(disk / "run", recipe(fallback_dir=str(tmp_path / "other")))
    # of an earlier version
    shutil.rmtree(run / ".room")
    with RunLock(run):
        pass
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    fill(disk)
    assert main(["resume", str(run), "train.steps=30"]) == 73
    assert "recipe.json: can't be written: No space left on device" in capfd.readouterr().err
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
