"""Lines of metrics.jsonl that there was no room for lie in another place until there is: none is lost or doubled,
through kills at any moment, starts and runs that go back. On a disk that is really full."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaspec.log import follow, jsonl, overflow
from megaspec.log.events import EvalDone, RunEnded
from megaspec.log.follow import LineFollower
from megaspec.log.jsonl import JsonlSink, ended_at, is_evaluated, losses_by_step, read_metrics
from tests.log.events_for_tests import rolled_back, step_done
from tests.small_disks import empty, fill, small_disk

ROOT = Path(__file__).parents[2]
# A page of a small disk, and more than a line has.
LINES = 40


@dataclass(frozen=True)
class Places:
    disk: Path
    home: Path
    elsewhere: Path

    def open(self, step: int = 0) -> JsonlSink:
        return JsonlSink(self.home, step=step, elsewhere=self.elsewhere)

    def steps(self) -> list[int]:
        return [line["step"] for line in read_metrics(self.home)]


@pytest.fixture
def places(tmp_path):
    with small_disk(tmp_path / "disk", "400k") as disk:
        yield Places(disk, disk / "metrics.jsonl", tmp_path / "other" / "run-12345678" / "metrics.jsonl")


def tell(sink: JsonlSink, steps: range) -> str:
    """The first error that these lines made; "" for none."""
    said = ""
    for step in steps:
        try:
            sink(step_done(step))
        except OSError as error:
            said = said or str(error)
    return said


def told_on_a_full_disk(places: Places) -> JsonlSink:
    """A sink that was told of steps 1 to LINES - 1, of which the disk has room for the first ones alone."""
    sink = places.open()
    tell(sink, range(1, 3))
    fill(places.disk)
    tell(sink, range(3, LINES))
    return sink


def end(sink: JsonlSink) -> str:
    try:
        sink.close()
    except OSError as error:
        return str(error)
    return ""


def test_a_disk_that_is_full_for_some_steps_costs_no_line(places, capfd):
    sink = places.open()
    assert tell(sink, range(1, 11)) == ""
    for first in (11, 111):
        fill(places.disk)
        said = tell(sink, range(first, first + LINES))
        assert said.endswith(f"No space left on device: lines go to {places.elsewhere} until there is room")
        assert places.elsewhere.exists()
        empty(places.disk)
        assert tell(sink, range(first + LINES, first + 100)) == ""
        assert places.steps() == list(range(1, first + 100))
        assert capfd.readouterr().err == "megaspec: metrics.jsonl: there is room again: no line waits any more\n"
        # and no folder of the run's is left there
        assert list(places.elsewhere.parents[1].iterdir()) == []
    assert end(sink) == ""
    assert places.steps() == list(range(1, 211))


def test_room_for_some_of_the_lines(places):
    """What comes home comes in order, and what follows waits behind what waits."""
    sink = places.open()
    tell(sink, range(1, 3))
    fill(places.disk)
    tell(sink, range(3, 2 * LINES))
    at_home = places.steps()
    # two pages: room for some twenty lines
    (places.disk / "filler").open("r+").truncate((places.disk / "filler").stat().st_size - 8192)
    tell(sink, range(2 * LINES, 3 * LINES))
    assert len(at_home) < len(places.steps()) < 3 * LINES - 1
    assert places.steps() == list(range(1, len(places.steps()) + 1))
    assert "until there is room" in end(sink)
    empty(places.disk)
    sink = places.open(3 * LINES - 1)
    assert end(sink) == ""
    assert places.steps() == list(range(1, 3 * LINES))


def test_a_start_that_is_ended_while_the_disk_is_full_leaves_its_lines_to_the_next(places, capfd):
    sink = told_on_a_full_disk(places)
    assert "until there is room" in end(sink)
    # this one, too; it goes on from an earlier step, so that lines behind it go
    sink = places.open(LINES - 10)
    tell(sink, range(LINES - 9, LINES))
    assert "until there is room" in end(sink)
    empty(places.disk)
    sink = places.open(LINES - 5)
    tell(sink, range(LINES - 4, LINES + 3))
    assert end(sink) == ""
    assert places.steps() == list(range(1, LINES + 3))
    assert "tells nothing" not in capfd.readouterr().err
    assert list(places.elsewhere.parents[1].iterdir()) == []


def test_a_run_that_goes_back_takes_lines_away_wherever_they_are(places):
    sink = told_on_a_full_disk(places)
    with pytest.raises(OSError, match="until there is room"):
        sink(rolled_back(LINES - 20, LINES - 1))
    tell(sink, range(LINES - 19, LINES - 10))
    empty(places.disk)
    tell(sink, range(LINES - 10, LINES))
    end(sink)
    expected = [*range(1, LINES - 19), LINES - 20, *range(LINES - 19, LINES)]
    assert places.steps() == expected
    # behind what is at home
    fill(places.disk)
    sink = places.open(LINES - 1)
    tell(sink, range(LINES, 2 * LINES))
    # what it cuts off at home makes room for its own line
    sink(rolled_back(LINES - 1, 2 * LINES))
    empty(places.disk)
    end(sink)
    assert places.steps() == [*expected, LINES - 1]


WRITER = """
import sys
from pathlib import Path
from megaspec.log.jsonl import JsonlSink
from tests.log.events_for_tests import step_done
import os
home, elsewhere, step, calls = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
left = [calls]
def counted(real):
    def call(*words, **keywords):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)
        return real(*words, **keywords)
    return call
for name in ("write", "ftruncate", "unlink", "replace", "rmdir", "pread"):
    setattr(os, name, counted(getattr(os, name)))
sink = JsonlSink(home, step=step, elsewhere=elsewhere)
for n in range(step + 1, step + 8):
    try:
        sink(step_done(n))
    except OSError:
        pass
sink.close()
"""


def start_and_kill(places: Places, step: int, calls: int) -> int:
    """A start that is killed at its `calls`-th change of a file. -> its exit code."""
    command = [sys.executable, "-c", WRITER, str(places.home), str(places.elsewhere), str(step), str(calls)]
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "launchers"))
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False).returncode


@pytest.mark.parametrize("is_full", [False, True], ids=["room again", "full still"])
@pytest.mark.parametrize("calls", [0, 1, 2, 3, 4, 6, 9, 12, 15, 18])
def test_a_kill_at_any_moment_loses_and_doubles_nothing(is_full, calls, places):
    sink = told_on_a_full_disk(places)
    end(sink)
    if not is_full:
        empty(places.disk)
    code = start_and_kill(places, LINES - 1, calls)
    # a start with room makes some fifty changes
    assert code == -9
    empty(places.disk)
    sink = places.open(LINES - 1)
    tell(sink, range(LINES, LINES + 5))
    assert end(sink) == ""
    assert places.steps() == list(range(1, LINES + 5))


def test_where_neither_place_has_room_lines_wait_in_memory(places, monkeypatch):
    monkeypatch.setattr(jsonl, "MOST_WAITING", 30)
    full = Places(places.disk, places.home, places.disk / "other" / "metrics.jsonl")
    sink = full.open()
    tell(sink, range(1, 3))
    fill(places.disk)
    said = tell(sink, range(3, 100))
    assert said.endswith("the last 30 lines are kept in memory until there is room")
    empty(places.disk)
    kept = full.steps()
    tell(sink, range(100, 101))
    lost = 100 - len(full.steps())
    assert full.steps() == [*kept, *range(71, 101)]
    assert end(sink) == f"[Errno 28] {lost} lines are lost"


def test_lines_of_another_course_are_left_out_with_a_word(places, capfd):
    sink = told_on_a_full_disk(places)
    end(sink)
    empty(places.disk)
    # meanwhile somebody went on without the other place
    away = shutil.move(places.elsewhere, places.elsewhere.with_name("away"))
    sink = places.open(LINES - 1)
    tell(sink, range(LINES, LINES + 20))
    end(sink)
    before = places.home.read_bytes()
    shutil.move(away, places.elsewhere)
    capfd.readouterr()
    sink = places.open(LINES + 19)
    assert "holds lines of another course of the run; it is left out of metrics.jsonl" in capfd.readouterr().err
    end(sink)
    assert places.home.read_bytes() == before
    places.elsewhere.write_text("notes\n")
    sink = places.open(LINES + 19)
    assert "holds no lines of a run" in capfd.readouterr().err
    end(sink)
    assert places.elsewhere.read_text() == "notes\n"


def test_lines_follow_what_is_left_of_a_file_that_somebody_has_cut(places, capfd):
    sink = told_on_a_full_disk(places)
    end(sink)
    first = places.steps()[-1] + 1
    places.home.write_bytes(b"")
    # full to the last byte again
    fill(places.disk)
    sink = places.open(LINES - 1)
    assert "until there is room" in tell(sink, range(LINES, 2 * LINES))
    end(sink)
    empty(places.disk)
    sink = places.open(2 * LINES - 1)
    assert end(sink) == ""
    assert places.steps() == list(range(first, 2 * LINES))


def test_evaluations_are_known_wherever_their_line_is(places):
    sink = places.open()
    fill(places.disk)
    tell(sink, range(1, LINES))
    with pytest.raises(OSError, match="No space"):
        sink(EvalDone(step=99, loss=7.0, sets={"a": 1.0}, tokens={"a": 9}, seconds=0.1))
    assert not is_evaluated(places.home, 99)
    assert is_evaluated(places.home, 99, elsewhere=places.elsewhere)
    assert losses_by_step(places.home, "mean", elsewhere=places.elsewhere)[99] == 7.0
    end(sink)


def test_an_end_is_known_wherever_its_line_is(places):
    sink = told_on_a_full_disk(places)
    assert ended_at(places.home, elsewhere=places.elsewhere) is None
    with pytest.raises(OSError, match="No space"):
        sink(RunEnded(step=LINES, how="done"))
    end(sink)
    assert ended_at(places.home) is None
    [*_, line] = places.elsewhere.read_text().splitlines()
    assert ended_at(places.home, elsewhere=places.elsewhere) == json.loads(line)["time"]


def test_the_header_counts_bytes_of_the_other_file(places):
    assert overflow._after(b'{"after": 12}\n') == 12
    for text in (b"", b"{}", b'{"after": -1}', b'{"after": true}', b"[1]", b'{"after": "1"}'):
        assert overflow._after(text) is None


class Seen(LineFollower):
    """The steps of all events that were read."""

    def forget(self) -> None:
        self.steps: list[int] = []

    def take(self, event) -> None:
        self.steps.append(event["step"])

    def read(self) -> list[int]:
        self.follow()
        return self.steps


def follower(places: Places) -> Seen:
    return Seen(places.disk, elsewhere=places.elsewhere)


def test_who_follows_reads_each_line_once_wherever_it_is(places):
    """Read behind every line, and once at each moment alone."""
    sink = places.open()
    meanwhile = follower(places)
    for first in (1, 1 + 2 * LINES):
        for step in range(first, first + 2 * LINES):
            if step == first + 3:
                fill(places.disk)
            if step == first + LINES:
                # room for some twenty lines: those that come home are not all
                (places.disk / "filler").open("r+").truncate((places.disk / "filler").stat().st_size - 8192)
            if step == first + 2 * LINES - 2:
                empty(places.disk)
            tell(sink, range(step, step + 1))
            assert meanwhile.read() == list(range(1, step + 1))
            alone = follower(places)
            assert alone.read() == meanwhile.steps
            assert (alone.trouble, alone.passed_over, alone.is_cut) == ("", 0, False)
            assert alone.is_elsewhere == places.elsewhere.exists()
    assert end(sink) == ""


def test_what_comes_home_while_it_is_read_is_read_once(places, monkeypatch):
    """The run brings lines home between the two files' being opened."""
    sink = told_on_a_full_disk(places)
    empty(places.disk)
    real = follow.open_inside

    def open_inside(folder, name):
        tell(sink, range(LINES, LINES + 1))
        assert not places.elsewhere.exists()
        return real(folder, name)

    monkeypatch.setattr(follow, "open_inside", open_inside)
    assert follower(places).read() == list(range(1, LINES + 1))
    end(sink)


def test_who_follows_sees_lines_go_where_a_run_goes_back(places):
    sink = places.open()
    meanwhile = follower(places)
    tell(sink, range(1, 3))
    fill(places.disk)
    tell(sink, range(3, LINES))
    assert meanwhile.read() == list(range(1, LINES))
    with pytest.raises(OSError, match="until there is room"):
        sink(rolled_back(LINES - 20, LINES - 1))
    assert meanwhile.read() == [*range(1, LINES - 19), LINES - 20]
    end(sink)


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 4, 6, 9, 12, 15, 18])
def test_who_follows_a_run_that_was_killed_reads_each_line_once(calls, places):
    sink = told_on_a_full_disk(places)
    end(sink)
    empty(places.disk)
    assert start_and_kill(places, LINES - 1, calls) == -9
    assert follower(places).read() == list(range(1, LINES))


def test_lines_of_another_course_are_no_part_of_what_is_followed(places):
    sink = told_on_a_full_disk(places)
    end(sink)
    empty(places.disk)
    kept = places.elsewhere.read_bytes()
    places.elsewhere.unlink()
    sink = places.open(LINES - 1)
    tell(sink, range(LINES, LINES + 20))
    end(sink)
    at_home = places.steps()
    places.elsewhere.parent.mkdir(exist_ok=True)
    places.elsewhere.write_bytes(kept)
    seen = follower(places)
    for _ in range(2):
        assert seen.read() == at_home
        assert seen.trouble == f"{places.elsewhere} holds lines of another course of the run; it is left out"
    for text, said in ((b"notes\n", "holds no lines of a run; it is left out"), (b'{"aft', ""), (b"", "")):
        places.elsewhere.write_bytes(text)
        assert seen.read() == at_home
        assert seen.trouble.removeprefix(f"{places.elsewhere} ") == said
    places.elsewhere.unlink()
    places.elsewhere.symlink_to(places.home)
    assert seen.read() == at_home
    assert "is a link" in seen.trouble
    for name in ("a\0b", "\ud800"):
        assert Seen(places.disk, elsewhere=Path(name)).read() == at_home


def test_lines_behind_a_file_that_somebody_has_cut_are_followed(places):
    sink = told_on_a_full_disk(places)
    end(sink)
    first = places.steps()[-1] + 1
    places.home.write_bytes(b"")
    assert follower(places).read() == list(range(first, LINES))
