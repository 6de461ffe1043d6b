"""How a start ended, in the run folder: never an older one's end, never a consequence over its cause."""

import json

import pytest

from megaspec.checkpoint.lock import RunLock
from megaspec.core.errors import CheckpointError, DataError, HangError, Preempted, RunLockedError
from megaspec.launcher.exit_file import EXIT_FILE, MOST_IN_A_ROW, begin, end, read_exit
from megaspec.runtime.rank import Ending


def test_an_end_is_kept_until_the_next_start(tmp_path):
    begin(tmp_path, step=0)
    assert read_exit(tmp_path).code is None
    assert end(tmp_path, 75, step=40) == 75
    kept = json.loads((tmp_path / EXIT_FILE).read_text())
    assert (kept["code"], kept["step"], kept["meaning"]) == (75, 40, "stopped, what was trained is saved: start again")
    begin(tmp_path, step=40)
    assert read_exit(tmp_path).code is None
    assert [p.name for p in tmp_path.iterdir()] == [EXIT_FILE]


def test_failures_without_progress_do_not_go_on_for_ever(tmp_path, capsys):
    def start(code, *, saved):
        begin(tmp_path, step=saved)
        return end(tmp_path, code, step=saved)

    assert [start(74, saved=8) for _ in range(MOST_IN_A_ROW)] == [74, 74, 70]
    assert "start 3 in a row that ended so, and none saved a step" in capsys.readouterr().err
    assert read_exit(tmp_path).code == 70
    # a step that was saved is progress, and a stop is no failure
    assert [start(74, saved=s) for s in range(20, 26)] == [74] * 6
    assert [start(code, saved=30) for code in (74, 74, 75, 74, 74)] == [74, 74, 75, 74, 74]
    # one that ended without a word is neither
    begin(tmp_path, step=30)
    assert start(74, saved=30) == 70


def test_a_link_is_replaced_and_not_followed(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    run.mkdir()
    mine.write_text("mine")
    (run / EXIT_FILE).symlink_to(mine)
    assert read_exit(run) is None
    begin(run, step=0)
    assert mine.read_text() == "mine"
    assert read_exit(run).code is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"code": true}', "[" * 3000, "\0"])
def test_a_file_of_somebody_elses_counts_as_none(tmp_path, content):
    (tmp_path / EXIT_FILE).write_text(content)
    assert read_exit(tmp_path) is None
    assert end(tmp_path, 65, step=0) == 65
    assert read_exit(tmp_path).code == 65


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path, capsys):
    begin(tmp_path / "gone", step=0)
    assert end(tmp_path / "gone", 65, step=0) == 65
    assert f"gone/{EXIT_FILE}" in capsys.readouterr().err


def test_a_start_of_several_ranks_counts_as_one_failure(tmp_path):
    begin(tmp_path, step=0)
    for _ in range(4):
        assert end(tmp_path, 70, step=0) == 70
    assert read_exit(tmp_path).in_a_row == 1


def ends(lock, rank, error):
    """A rank ends with an error, or well with None."""
    if error is None:
        with Ending(lock, rank, lambda: 0):
            return
    with pytest.raises(type(error)), Ending(lock, rank, lambda: 0):
        raise error


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([(0, None), (1, None)], 0),
        ([(1, Preempted("saved")), (0, Preempted("saved"))], 75),
        ([(1, DataError("damaged")), (0, HangError("rank 1 is gone"))], 65),
        ([(0, HangError("rank 1 is gone")), (1, DataError("damaged"))], 65),
        ([(1, IndexError("a bug")), (0, HangError("rank 1 is gone"))], 70),
        ([(0, HangError("rank 2 is gone")), (1, HangError("rank 2 is gone"))], 74),
        ([(0, CheckpointError("damaged")), (1, CheckpointError("damaged"))], 66),
        # the first of several causes, and none that only hears of another
        ([(1, DataError("damaged")), (0, CheckpointError("damaged"))], 65),
        ([(1, DataError("damaged")), (0, IndexError("told by rank 1"))], 65),
        ([(1, IndexError("told by rank 0")), (0, DataError("damaged"))], 65),
        # a rank's own end well says nothing: the first has to have ended well, too
        ([(1, None)], None),
    ],
)
def test_ranks_that_nobody_of_ours_watches_keep_the_cause(tmp_path, ranks, code):
    begin(tmp_path, step=0)
    with RunLock(tmp_path) as lock:
        for rank, error in ranks:
            ends(RunLock.held(tmp_path, lock.token), rank, error)
    assert read_exit(tmp_path).code == code


def test_ranks_that_lost_their_run_leave_the_new_holders_file_alone(tmp_path):
    lost = RunLock(tmp_path).acquire()
    lost.release()
    with RunLock(tmp_path):
        begin(tmp_path, step=0)
        ends(lost, 0, RunLockedError("lost"))
        ends(lost, 1, HangError("rank 0 is gone"))
    assert read_exit(tmp_path).code is None


def test_a_rank_that_misses_one_that_memory_ran_out_for(tmp_path, monkeypatch):
    counts = iter([4, 5])
    monkeypatch.setattr("megaspec.runtime.rank.memory_kills", lambda: next(counts))
    begin(tmp_path, step=0)
    with RunLock(tmp_path) as lock:
        ends(lock, 0, HangError("rank 1 is gone"))
    assert read_exit(tmp_path).code == 64
