"""What was saved in another place comes home as if it had been saved there: what is to be kept stays, the rest goes."""

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaspec import run_folder
from megaspec.checkpoint import contents, fallback
from megaspec.checkpoint.comm import Comm
from megaspec.checkpoint.examine import no_objections
from megaspec.checkpoint.fallback import (
    Adopted,
    adopt,
    candidates_anywhere,
    fallback_folder,
    looked_up_again,
    newest_anywhere,
    put_aside_from,
    refuse_unwritable,
)
from megaspec.checkpoint.format import Manifest
from megaspec.checkpoint.in_use import unless_held
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.opening import open_saved
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.spec import CheckpointSpec
from megaspec.checkpoint.store import Store
from megaspec.commands import checkpoint_table
from megaspec.core.errors import WriteError
from megaspec.resolve import gather
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO, assert_holds, no_rank_failed, on_ranks, save


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


@dataclass
class Opened:
    """What a reader came to."""

    step: int
    salt: int


def _by_reader(reader: Reader) -> Opened:
    with reader:
        assert_holds(reader, reader.step)
        return Opened(reader.step, reader.state["salt"])


def _by_manifest(manifest: Manifest) -> Opened:
    return Opened(manifest.step, manifest.state["salt"])


def _opened_by_all(run: Path, other: str, size: int) -> Opened:
    """Every rank opens the newest."""

    def act(comm: Comm) -> Opened:
        return _by_reader(open_saved(run, other, comm, step=None, inspect=no_objections))

    first, *others = no_rank_failed(on_ranks(size, act))
    assert all(one == first for one in others)
    return first


def _forked(run: Path, other: str) -> Opened:
    """What a fork takes for its beginning, and what it has then."""
    spec = SimpleNamespace(checkpoint=CheckpointSpec(fallback_dir=other))
    good = run_folder.newest_good(run, spec)
    fork = run.with_name("fork")
    fork.mkdir()
    look = partial(run_folder._copy_good, run, other, good, fork)
    looked_up_again(run, other, look)
    with Store(fork).open(good.manifest.step, SOLO) as reader:
        return _by_reader(reader)


# Whoever opens a checkpoint of a run: by run folder and the other place.
READERS: dict[str, Callable[[Path, str], Opened]] = {
    "newest": lambda run, other: _by_reader(open_saved(run, other, SOLO, step=None, inspect=no_objections)),
    "of a step": lambda run, other: _by_reader(open_saved(run, other, SOLO, step=2, inspect=no_objections)),
    "inspected": lambda run, other: _by_reader(contents.open_checkpoint(run)),
    "inspected, of a step": lambda run, other: _by_reader(contents.open_checkpoint(run, 2)),
    "to begin with": lambda run, other: _by_manifest(gather.saved_manifest(run, None)),
    "to begin with, of a step": lambda run, other: _by_manifest(gather.saved_manifest(run, 2)),
    "forked": _forked,
}


class Interrupted:
    """Lets something happen when a process asks the file system the n-th time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, happens: Callable[[], object]):
        self.n_left = n
        self._happens = happens
        for name in ("open", "listdir", "stat", "lstat"):
            monkeypatch.setattr(os, name, partial(self._asked, getattr(os, name)))

    def _asked(self, real: Callable[..., Any], *words: Any, **keywords: Any) -> Any:
        self.n_left -= 1
        if self.n_left == 0:
            self._happens()
        return real(*words, **keywords)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_what_is_moved_home_at_any_moment_is_read(name, every, tmp_path, monkeypatch) -> None:
    """Never an error, never an older one: a start takes it home between any two looks of the reader, by default between
    every third two."""
    monkeypatch.setattr(run_folder, "own_checkpoint", lambda run: no_objections)
    n_moved = 0
    for n in itertools.count(1, every):
        folder = tmp_path / f"{n}"
        run, there = apart(folder, home=(1,), elsewhere=(2,))
        other = str(folder / "other")
        (run / "spec.json").write_text(json.dumps({"checkpoint": {"fallback_dir": other}}))
        with monkeypatch.context() as patch:
            interrupted = Interrupted(patch, n, lambda run=run, folder=folder: adopt(run, asked(folder)))
            assert READERS[name](run, other) == Opened(2, 0)
        if interrupted.n_left > 0:
            break
        n_moved += 1
        # what was held then is there still, and no longer than until the next start
        assert 2 in Store(run).steps()
        assert adopt(run, asked(folder)).lines == ()
        assert os.listdir(folder / "other") == []
        assert there.steps() == []
    assert every * n_moved > 5


@pytest.mark.parametrize("n", range(1, 60, 8))
def test_all_ranks_read_what_is_moved_home(n, tmp_path, monkeypatch) -> None:
    run, _ = apart(tmp_path, home=(1,), elsewhere=(2,))
    with monkeypatch.context() as patch:
        Interrupted(patch, n, lambda: adopt(run, asked(tmp_path)))
        assert _opened_by_all(run, str(tmp_path / "other"), 3) == Opened(2, 0)


def test_who_reads_reads_on_and_a_later_start_removes_it(tmp_path, monkeypatch) -> None:
    run, there = apart(tmp_path, home=(1,), elsewhere=(2,))
    with there.open(2, SOLO) as reader:
        adopted = adopt(run, asked(tmp_path))
        assert adopted.step == 2
        assert adopted.lines[0].endswith(f"is in {run / 'checkpoints'} now; a later start removes it there")
        assert_holds(reader, 2, 0)
        # and copies nothing again
        monkeypatch.setattr(fallback, "_copy", None)
        assert adopt(run, asked(tmp_path)) == Adopted(None, ())
        assert there.steps() == [2]
    assert adopt(run, asked(tmp_path)) == Adopted(None, ())
    assert os.listdir(tmp_path / "other") == []


def test_what_was_left_for_a_reader_never_replaces_what_is_saved_later(tmp_path) -> None:
    """The run has saved the step anew, in a later start, while the earlier one was read in the other place."""
    run = tmp_path / "run"
    with RunLock(run) as lock:
        there = Store(fallback_folder(str(tmp_path / "other"), run), lock=lock, chunk_bytes=CHUNK)
        save(there, 2)
    with there.open(2, SOLO) as reader:
        adopt(run, asked(tmp_path))
        shutil.rmtree(run / "checkpoints" / "step-00000002")
        with RunLock(run) as lock:
            save(Store(run, lock=lock, chunk_bytes=CHUNK), 2, salt=1)
        assert adopt(run, asked(tmp_path)).step is None
        assert_holds(reader, 2, 0)
    adopt(run, asked(tmp_path))
    with Store(run).open(2, SOLO) as reader:
        assert_holds(reader, 2, 1)
    assert os.listdir(tmp_path / "other") == []


def test_who_opens_what_is_just_being_removed_finds_it_at_home(tmp_path) -> None:
    """Its name is still there, and who removes it holds it already."""
    run, there = apart(tmp_path, home=(), elsewhere=(2,))
    path = there.folder / "step-00000002"
    shutil.copytree(path, run / "checkpoints" / path.name)
    with unless_held(path) as is_free:
        assert is_free
        threading.Timer(0.3, shutil.move, (path, tmp_path / "away")).start()
        other = str(tmp_path / "other")
        with open_saved(run, other, SOLO, step=2, inspect=no_objections) as reader:
            assert reader.path.parent == run / "checkpoints"


def test_the_table_of_checkpoints_shows_what_is_moved_home_meanwhile(tmp_path, monkeypatch, capsys) -> None:
    run, _ = apart(tmp_path, home=(1,), elsewhere=(2,))
    monkeypatch.setattr(checkpoint_table, "is_run", lambda folder: True)
    spec = SimpleNamespace(holds="run", checkpoint=CheckpointSpec(fallback_dir=str(tmp_path / "other")))
    monkeypatch.setattr(checkpoint_table, "read_run", lambda folder, allows_gone: SimpleNamespace(spec=spec))
    monkeypatch.setattr(checkpoint_table, "own_checkpoint", lambda run: no_objections)
    real = checkpoint_table.saved_anywhere

    def look_and_move(*words):
        found = real(*words)
        adopt(run, asked(tmp_path))
        return found

    monkeypatch.setattr(checkpoint_table, "saved_anywhere", look_and_move)
    assert checkpoint_table.show(run, deep=True) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[-1]) for row in rows[1:]] == [("2", "good"), ("1", "good")]
