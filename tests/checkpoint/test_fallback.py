"""What was saved in another place comes home as if it had been saved there: what is to be kept stays, the rest goes."""

import os
import shutil
from pathlib import Path

import pytest

from megaspec.checkpoint import fallback
from megaspec.checkpoint.examine import no_objections
from megaspec.checkpoint.fallback import (
    adopt,
    candidates_anywhere,
    fallback_folder,
    newest_anywhere,
    put_aside_from,
    refuse_unwritable,
)
from megaspec.checkpoint.spec import CheckpointSpec
from megaspec.checkpoint.store import Store
from megaspec.core.errors import WriteError
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO, assert_holds, save


def apart(tmp_path: Path, *, home: tuple[int, ...], elsewhere: tuple[int, ...]) -> tuple[Path, Store]:
    """A run with checkpoints of these steps in its folder, and of those in the other place."""
    run = tmp_path / "run"
    for step in home:
        save(Store(run, chunk_bytes=CHUNK), step)
    there = Store(fallback_folder(str(tmp_path / "other"), run), chunk_bytes=CHUNK)
    for step in elsewhere:
        save(there, step)
    return run, there


def asked(tmp_path: Path, **keys: object) -> CheckpointSpec:
    return CheckpointSpec(fallback_dir=str(tmp_path / "other"), **keys)


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"keep": 1}, [1, 2, 6]),
        ({"keep": 2}, [1, 2, 5, 6]),
        ({"keep": "all"}, [1, 2, 3, 4, 5, 6]),
        ({"keep": 1, "keep_every": 4}, [1, 2, 4, 6]),
        ({"keep": 1, "keep_best": 1}, [1, 2, 3, 6]),
    ],
    ids=str,
)
def test_what_the_run_keeps_is_kept_wherever_it_was_saved(tmp_path, keys, kept) -> None:
    run, _ = apart(tmp_path, home=(1, 2), elsewhere=(3, 4, 5, 6))
    losses = {step: abs(step - 3.2) for step in range(1, 7)}
    adopted = adopt(run, asked(tmp_path, **keys), losses=losses)
    assert adopted.step == 6
    assert Store(run).steps() == kept
    for step in kept:
        with Store(run).open(step, SOLO) as reader:
            assert_holds(reader, step)
    # what is left there would be there for good
    assert os.listdir(tmp_path / "other") == []


def test_the_newest_is_damaged_and_the_one_before_it_is_not_thrown_away(tmp_path) -> None:
    run, there = apart(tmp_path, home=(1,), elsewhere=(2, 3))
    shard = there.folder / "step-00000003" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    adopted = adopt(run, asked(tmp_path, keep=1))
    assert adopted.step == 2
    assert "a checkpoint is not good" in adopted.lines[0]
    assert there.steps() == [3]


def test_what_has_no_room_stays_and_the_newest_of_it_is_named(tmp_path, monkeypatch) -> None:
    run, there = apart(tmp_path, home=(1,), elsewhere=(2, 3))
    free = [1 << 30, 10]
    monkeypatch.setattr(fallback, "free_bytes", lambda path: free.pop(0))
    adopted = adopt(run, asked(tmp_path))
    assert adopted.step == 3
    # the run folder has the newest
    older = there.folder / "step-00000002"
    assert adopted.place is None
    assert [line.partition(" belongs ")[0] for line in adopted.left] == [f"step 2 stays where it was saved: {older}"]
    assert there.steps() == [2]
    save(there, 4)
    monkeypatch.setattr(fallback, "free_bytes", lambda path: 10)
    adopted = adopt(run, asked(tmp_path))
    assert (adopted.step, adopted.place) == (None, there.folder)
    assert "step-00000004 belongs into" in adopted.left[0]
    assert "has no room for it: need" in adopted.left[0]
    assert there.steps() == [2, 4]
    assert newest_anywhere(run, str(tmp_path / "other"), no_objections) == 4
    assert [found.step for found in candidates_anywhere(run, str(tmp_path / "other"))] == [4, 3, 2, 1]


def test_without_another_place_for_what_follows_a_full_run_folder_is_an_error(tmp_path, monkeypatch) -> None:
    """The step would have to be trained to its end before the next save says so."""
    run, there = apart(tmp_path, home=(1,), elsewhere=(2,))
    fallback.note(run, there.folder / "step-00000002")
    monkeypatch.setattr(fallback, "free_bytes", lambda path: 10)
    with pytest.raises(WriteError, match=r"step-00000002 belongs into .* which has no room for it"):
        adopt(run, CheckpointSpec())
    assert there.steps() == [2]


def test_bytes_are_not_read_of_what_has_no_room(tmp_path, monkeypatch) -> None:
    run, _ = apart(tmp_path, home=(1,), elsewhere=(2,))
    depths = []
    real = fallback.examine

    def examine(*words, deep, **keywords):
        depths.append(deep)
        return real(*words, deep=deep, **keywords)

    monkeypatch.setattr(fallback, "examine", examine)
    monkeypatch.setattr(fallback, "free_bytes", lambda path: 10)
    assert adopt(run, asked(tmp_path)).place is not None
    assert depths == [False]


def test_a_place_that_cannot_be_looked_into_says_nothing_of_the_newest(tmp_path) -> None:
    run, there = apart(tmp_path, home=(1,), elsewhere=())
    there.folder.parent.mkdir(parents=True)
    there.folder.write_text("")
    assert newest_anywhere(run, str(tmp_path / "other"), no_objections) == 1


def test_a_run_that_was_copied_takes_nothing_from_the_other(tmp_path) -> None:
    run, there = apart(tmp_path, home=(1,), elsewhere=(2, 3))
    fallback.note(run, there.folder / "step-00000003")
    shutil.copytree(run, tmp_path / "copy")
    assert adopt(tmp_path / "copy", asked(tmp_path)).step == 3
    assert there.steps() == [2, 3]
    # the note has served
    assert not (tmp_path / "copy" / "checkpoints" / fallback.NOTE).exists()
    assert adopt(tmp_path / "copy", asked(tmp_path)).lines == ()
    assert adopt(run, asked(tmp_path)).step == 3


def test_what_is_not_there_is_told_until_the_run_is_beyond_it(tmp_path) -> None:
    run, _ = apart(tmp_path, home=(1,), elsewhere=())
    path = "/nowhere/checkpoints/step-00000002"
    (run / "checkpoints" / fallback.NOTE).write_text(f"{path}\n")
    told = f"{path} is not there, in which a checkpoint was saved that this folder had not taken"
    for _ in range(2):
        assert adopt(run, CheckpointSpec()).lines == (told,)
    save(Store(run, chunk_bytes=CHUNK), 2)
    assert adopt(run, CheckpointSpec()).lines == ()
    assert not (run / "checkpoints" / fallback.NOTE).exists()


def test_what_learned_from_data_that_is_left_out_never_comes_home(tmp_path) -> None:
    run, there = apart(tmp_path, home=(1,), elsewhere=(2, 3, 4))
    assert put_aside_from(run, str(tmp_path / "other"), 3, "it has learned") == [4, 3]
    assert there.steps() == [2]
    assert (there.folder / "quarantine" / "step-00000004-1.txt").read_text() == "it has learned\n"
    assert adopt(run, asked(tmp_path)).step == 2


def test_a_place_that_takes_nothing_is_told_before_training(tmp_path) -> None:
    run, _ = apart(tmp_path, home=(1,), elsewhere=())
    (tmp_path / "other").write_text("")
    with pytest.raises(WriteError, match=r"checkpoint.fallback_dir=.*; name a folder that can be written"):
        refuse_unwritable(str(tmp_path / "other"), run)


def test_asking_whether_it_can_be_written_leaves_nothing(tmp_path) -> None:
    run, _ = apart(tmp_path, home=(1,), elsewhere=())
    refuse_unwritable(str(tmp_path / "other"), run)
    assert os.listdir(tmp_path / "other") == []


def test_of_a_step_that_is_in_both_places_the_later_one_is_taken(tmp_path) -> None:
    """A run that goes back takes home what lies elsewhere, and saves the step anew: where there is room for it."""
    run, there = apart(tmp_path, home=(1, 2), elsewhere=())
    earlier = save(there, 2, salt=1)
    os.rename(earlier, tmp_path / "earlier")
    save(there, 2, salt=2)
    # what a kill right after a second save leaves of the first
    os.rename(tmp_path / "earlier", there.folder / ".replaced-00000002-9")
    assert adopt(run, asked(tmp_path)).step == 2
    with Store(run).open(2, SOLO) as reader:
        assert_holds(reader, 2, 2)
    assert os.listdir(tmp_path / "other") == []
