"""metrics.jsonl: whole lines, each step once, through kills, resumes and full disks."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.log import jsonl
from megaspec.log.events import CheckpointSaved, EvalDone, RunEnded, RunStarted, Sampled
from megaspec.log.jsonl import JsonlSink, ended_at, losses_by_step, read_metrics
from tests.log.events_for_tests import rolled_back, step_done

ROOT = Path(__file__).parents[2]


def write(path, steps, *, resumed=0):
    sink = JsonlSink(path, step=resumed)
    for step in steps:
        sink(step_done(step))
    sink.close()


def steps_in(path):
    return [line["step"] for line in read_metrics(path) if line["event"] == "step"]


def test_a_line_per_event(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, step=0)
    events = [
        RunStarted(step=0, steps=2),
        step_done(1, loss=0.1 + 0.2),
        EvalDone(step=1, loss=1 / 3, sets={"valid": 1 / 3}, tokens={"valid": 9}, seconds=0.1),
        CheckpointSaved(step=1, path="runs/x/1", seconds=0.2),
        Sampled(step=1, prompt="a\nb", text='"ü\x00\ud800'),
        RunEnded(step=1, how="done"),
    ]
    for n, event in enumerate(events, start=1):
        sink(event)
        assert len(path.read_bytes().splitlines()) == n, "a line waits in this process"
    lines = read_metrics(path)
    assert [line["event"] for line in lines] == ["start", "step", "eval", "checkpoint", "sample", "end"]
    assert lines[1]["loss"] == 0.1 + 0.2
    assert lines[2]["loss"] == 1 / 3
    assert lines[4]["prompt"] == "a\nb"
    sink.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_stay_strict_json(tmp_path, value):
    path = tmp_path / "m"
    sink = JsonlSink(path, step=0)
    sink(step_done(1, loss=value))
    sink.close()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert str(float(line["loss"])) == str(value)


@pytest.mark.parametrize("resumed", [0, 4, 7, 20])
def test_resume_cuts_what_comes_again(tmp_path, resumed):
    path = tmp_path / "m"
    write(path, range(1, 8))
    before = path.read_bytes().splitlines()
    write(path, range(resumed + 1, 12), resumed=resumed)
    kept = [n for n in range(1, 8) if n <= resumed]
    assert steps_in(path) == kept + list(range(resumed + 1, 12))
    assert path.read_bytes().splitlines()[: len(kept)] == before[: len(kept)]


def test_lines_that_belong_to_the_resumed_step_stay(tmp_path):
    path = tmp_path / "m"
    sink = JsonlSink(path, step=0)
    sink(step_done(5))
    sink(EvalDone(step=5, loss=1.0, sets={"valid": 1.0}, tokens={"valid": 9}, seconds=1.0))
    sink(CheckpointSaved(step=5, path="p", seconds=1.0))
    sink(step_done(6))
    sink(RunEnded(step=6, how="failed"))
    sink.close()
    write(path, [], resumed=5)
    assert [line["event"] for line in read_metrics(path)] == ["step", "eval", "checkpoint"]


@pytest.mark.parametrize(
    "damage", ['{"event": "step", "st', '{"no": "step"}\n', "[1]\n", "\x00\x00\x00", '{"step": 3}']
)
def test_a_torn_tail_is_cut(tmp_path, damage):
    path = tmp_path / "m"
    write(path, range(1, 4))
    with path.open("a") as file:
        file.write(damage)
    write(path, [4], resumed=3)
    assert steps_in(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", ['{"event": "step", "st\n', '{"no": "step"}\n', "[1]\n", "\x00\x00\n", "\n"])
def test_a_damaged_line_in_the_midst_costs_none_behind_it(tmp_path, damage):
    path = tmp_path / "m"
    write(path, range(1, 4))
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join([whole[0], damage, *whole[1:]]))
    write(path, [3], resumed=2)
    lines = path.read_text().splitlines(keepends=True)
    assert lines[:3] == [whole[0], damage, whole[1]]
    assert [json.loads(line)["step"] for line in lines[2:]] == [2, 3]


def test_the_other_name_of_a_file_keeps_its_lines(tmp_path):
    """As `cp -al` copies a run, or where somebody linked a file of ours into one."""
    path = tmp_path / "m"
    write(path, range(1, 8))
    before = path.read_bytes()
    os.link(path, tmp_path / "other")
    write(path, [5, 6], resumed=4)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "other").read_bytes() == before
    (tmp_path / "notes").write_text("notes\n")
    os.link(tmp_path / "notes", tmp_path / "foreign")
    write(tmp_path / "foreign", [1])
    assert steps_in(tmp_path / "foreign") == [1]
    assert (tmp_path / "notes").read_text() == "notes\n"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["foreign", "m", "notes", "other"]


WRITER = """
import sys, time
from pathlib import Path
from megaspec.log.jsonl import JsonlSink
from tests.log.events_for_tests import rolled_back, step_done
resumed = int(sys.argv[2])
sink = JsonlSink(Path(sys.argv[1]), step=resumed)
print("up", flush=True)
for step in range(resumed + 1, resumed + 100_000):
    sink(step_done(step))
"""


def test_history_has_each_step_once_through_kills(tmp_path):
    path = tmp_path / "m"
    rng = random.Random(3)
    resumed = 0
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(path), str(resumed)]
        writer = subprocess.Popen(command, cwd=ROOT, env={"PYTHONPATH": "."}, stdout=subprocess.PIPE)
        assert writer.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(rng.uniform(0.01, 0.1))
        writer.kill()
        writer.communicate()
        done = steps_in(path)
        assert done == list(range(1, len(done) + 1))
        resumed = rng.randint(0, len(done))
    write(path, range(resumed + 1, resumed + 5), resumed=resumed)
    assert steps_in(path) == list(range(1, resumed + 5))


def test_a_disk_that_was_full_for_a_while_costs_no_line(tmp_path, monkeypatch):
    path = tmp_path / "m"
    sink = JsonlSink(path, step=0)
    real, room = os.write, [700]

    def limited(fd, data):
        if fd != sink._fd:
            return real(fd, data)
        part = data[: room[0]]
        if not part:
            raise OSError(28, "No space left on device")
        room[0] -= len(part)
        return real(fd, part)

    monkeypatch.setattr(os, "write", limited)
    failed = 0
    for step in range(1, 20):
        if step == 15:
            room[0] = 10**6
        try:
            sink(step_done(step))
        except OSError:
            failed += 1
            assert path.read_bytes().endswith(b"\n"), "half a line was left"
    sink.close()
    assert failed > 5
    assert steps_in(path) == list(range(1, 20))


def test_where_a_run_goes_back_later_lines_are_taken_away(tmp_path, monkeypatch):
    """Those that could not be written yet, too."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, step=0)
    for step in range(1, 7):
        sink(step_done(step))
    write_line = os.write
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        sink(step_done(7))
    monkeypatch.setattr(os, "write", write_line)
    sink(rolled_back(4, 7))
    sink(step_done(5))
    sink.close()
    assert [(line["event"], line["step"]) for line in read_metrics(path)] == [
        *(("step", step) for step in range(1, 5)),
        ("rollback", 4),
        ("step", 5),
    ]


def test_an_end_is_known_by_its_being_the_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert ended_at(path) is None
    sink = JsonlSink(path, step=0)
    assert ended_at(path) is None
    sink(RunEnded(step=1, how="done"))
    assert ended_at(path) == read_metrics(path)[-1]["time"]
    # another start, whose rank was killed
    sink(RunStarted(step=1, steps=2))
    assert ended_at(path) is None
    sink.close()
    path.write_bytes(b'{"event": "end", "time": ')
    assert ended_at(path) is None


def test_losses_of_evaluations_that_are_not_finite_are_known_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, step=0)
    for step, loss in ((2, 1.5), (4, math.nan), (6, math.inf)):
        sink(EvalDone(step=step, loss=loss, sets={"web": loss}, tokens={"web": 9}, seconds=0.1))
    sink.close()
    for name in ("mean", "web"):
        found = losses_by_step(path, name)
        assert (found[2], found[6]) == (1.5, math.inf)
        assert math.isnan(found[4])
    assert losses_by_step(path, "other") == {}


def test_lines_that_never_found_room_are_counted_at_the_end(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path / "metrics.jsonl", step=0)
    sink(step_done(1))
    real = os.write

    def full(fd, data):
        if fd == sink._fd:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    for step in (2, 3):
        with pytest.raises(OSError, match="No space"):
            sink(step_done(step))
    with pytest.raises(OSError, match=r"No space left on device: 2 lines are lost"):
        sink.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [1]


def test_more_lines_than_are_kept_are_counted_though_there_is_room_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MOST_WAITING", 2)
    sink = JsonlSink(tmp_path / "metrics.jsonl", step=0)
    write = os.write
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for step in (1, 2, 3):
        with pytest.raises(OSError, match="No space"):
            sink(step_done(step))
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="1 line is lost"):
        sink.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [2, 3]


@pytest.mark.parametrize(("last", "resumed", "told"), [(3, 6, "steps 4 to 6"), (6, 6, ""), (8, 6, ""), (0, 6, "")])
def test_a_start_tells_which_steps_have_no_line(tmp_path, capfd, last, resumed, told):
    """Once: the start itself is a line. A fork begins with none."""
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, last + 1))
    capfd.readouterr()
    write(path, range(resumed + 1, resumed + 2), resumed=resumed)
    assert capfd.readouterr().err.count("tells nothing of") == bool(told)
    write(path, range(resumed + 2, resumed + 3), resumed=resumed + 1)
    assert "tells nothing" not in capfd.readouterr().err
