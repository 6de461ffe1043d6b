"""What a supervisor keeps in a run's folder, and what it reads there."""

import os
import sys
import types

import pytest

from megaspec.core.errors import RecipeError
from megaspec.estimate import target
from megaspec.estimate.target import gpu_identifiers
from megaspec.launcher.attempts import AttemptEnd, AttemptStart, last_step, read_attempts, tell_attempt
from megaspec.launcher.devices import named_devices, usable_devices
from megaspec.launcher.suspects import (
    Avoided,
    avoid,
    read_avoided,
    read_suspects,
    read_whole_avoided,
    tell_suspects,
)

GPUS = ("GPU-a", "GPU-b", "GPU-c")


def a_start(attempt):
    return AttemptStart(attempt=attempt, host="node1", pid=7, devices=("0", "1"), why="")


def an_end(attempt):
    return AttemptEnd(
        attempt=attempt, code=74, reason="kill", layout="", world_size=2, from_step=0, step=7, saved=5, next="again"
    )


def test_attempts_are_read_as_they_were_told(tmp_path):
    assert read_attempts(tmp_path).attempts == ()
    for what in (a_start(0), an_end(0), a_start(1)):
        tell_attempt(tmp_path, what)
    first, second = read_attempts(tmp_path).attempts
    assert (first.start, first.end) == (a_start(0), an_end(0))
    assert (second.start, second.end) == (a_start(1), None)


def test_a_torn_line_costs_itself_alone_and_is_told(tmp_path):
    tell_attempt(tmp_path, a_start(0))
    path = tmp_path / "attempts.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    tell_attempt(tmp_path, a_start(1))
    with path.open("ab") as file:
        file.write(b'[1]\n{"event": "start", "attempt": "x"}\n{"event": "end", "attempt": 1, "more": 2}\n\xff\n')
        file.write(b'{"event": "pause", "attempt": 2}\n\n')
    tell_attempt(tmp_path, an_end(7))
    found = read_attempts(tmp_path)
    assert [attempt.start.attempt for attempt in found.attempts] == [1]
    assert [one.removeprefix(f"{path}:") for one in found.damaged] == [
        "1: no JSON: cut, or edited",
        "3: no object with the number of an attempt",
        "4: no object with the number of an attempt",
        "5: it has not the keys of an attempt's end",
        "6: no JSON: cut, or edited",
        "7: event is neither start nor end",
        "9: the line that begins attempt 7 is not there",
    ]


def test_a_link_in_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    (tmp_path / "attempts.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="is a link"):
        tell_attempt(tmp_path, a_start(0))
    assert (tmp_path / "mine").read_text() == ""


def test_the_last_step_of_the_metrics(tmp_path):
    assert last_step(tmp_path, "metrics.jsonl") == 0
    lines = ['{"event": "step", "step": 3}', '{"event": "eval", "step": 9}', '{"event": "st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert last_step(tmp_path, "metrics.jsonl") == 3
    elsewhere = tmp_path / "other" / "metrics.jsonl"
    assert last_step(tmp_path, "metrics.jsonl", elsewhere=elsewhere) == 3
    elsewhere.parent.mkdir()
    elsewhere.write_text('{"after": 27}\n{"event": "step", "step": 4}\n')
    assert last_step(tmp_path, "metrics.jsonl", elsewhere=elsewhere) == 4


def test_suspects_are_those_of_an_attempt(tmp_path):
    assert read_suspects(tmp_path, 0) == {}
    tell_suspects(tmp_path, attempt=0, ranks=[5], why="other")
    tell_suspects(tmp_path, attempt=1, ranks=[2, 3], why="weights differ")
    tell_suspects(tmp_path, attempt=1, ranks=[3], why="said by another rank")
    assert read_suspects(tmp_path, 1) == {2: "weights differ", 3: "weights differ"}


def test_what_is_avoided_is_kept(tmp_path):
    assert read_avoided(tmp_path).entries == ()
    device = Avoided("node1", "GPU-b", 3, "weights differ")
    host = Avoided("node2", None, 4, "")
    avoid(tmp_path, device)
    # an editor may leave out the last line's end
    path = tmp_path / "avoided.jsonl"
    path.write_text("\n" + path.read_text().rstrip())
    avoid(tmp_path, host)
    found = read_avoided(tmp_path)
    assert found.entries == (device, host)
    assert found.hosts == {"node2": ""}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"host": "node1", "device": "GPU-c", "attempt": 3, "why": "x"', "is no JSON"),
        (b"nonsense", "is no JSON"),
        (b"\xff", "is no UTF-8 text"),
        (b'["node1"]', "is no object of host, device, attempt, why"),
        (b'{"host": "node1", "device": "GPU-c", "attempt": 3}', "is no object of host, device, attempt, why"),
        (b'{"host": "node1", "device": "GPU-c", "attempt": 3, "why": "x", "more": 1}', "is no object of host"),
        (b'{"host": "node1", "device": 2, "attempt": 3, "why": "x"}', "device=2 is none"),
        (b'{"host": "", "device": "GPU-c", "attempt": 3, "why": "x"}', 'host="" is none'),
        (b"[" * 5_000, ""),
    ],
)
def test_a_damaged_line_of_what_is_avoided_is_refused(line, why, tmp_path):
    device = Avoided("node1", "GPU-b", 3, "weights differ")
    avoid(tmp_path, device)
    with (tmp_path / "avoided.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(RecipeError) as caught:
        read_avoided(tmp_path)
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"{tmp_path / 'avoided.jsonl'}:2: {why}")
    assert 'write {"host": "node1", ' in problem.message
    assert read_whole_avoided(tmp_path).entries == (device,)


@pytest.mark.parametrize(
    ("text", "names"),
    [("0,1,3", ("0", "1", "3")), (" 0 1\n3\n", ("0", "1", "3")), ("GPU-8a1f-22", ("GPU-8a1f-22",)), ("", ())],
)
def test_devices_are_named_in_a_file(tmp_path, text, names):
    assert named_devices(tmp_path) is None
    (tmp_path / "devices").write_text(text)
    assert named_devices(tmp_path) == names


@pytest.mark.parametrize("text", ["0;1", "all", "-1", "cuda:0", "\u0661"])
def test_what_names_no_device_is_refused(tmp_path, text):
    (tmp_path / "devices").write_text(text)
    with pytest.raises(RecipeError, match="is no device; write numbers or GPU-"):
        named_devices(tmp_path)


def test_which_devices_may_be_used():
    assert usable_devices((), None, ()) is None
    assert usable_devices((), ("0", "1"), ("1",)) == ("0",)
    assert usable_devices(GPUS, None, ()) == GPUS
    assert usable_devices(GPUS, None, ("GPU-b",)) == ("GPU-a", "GPU-c")
    # by their numbers, in the order in which they are named; one that is gone is passed over
    assert usable_devices(GPUS, ("2", "0", "7"), ()) == ("GPU-c", "GPU-a")
    assert usable_devices(GPUS, ("GPU-b", "1", "GPU-x"), ()) == ("GPU-b",)
    # the whole host
    assert usable_devices(GPUS, None, ("GPU-b", None)) == ()


class Nvml(types.ModuleType):
    """Three GPUs, as NVML tells of them; older versions give bytes."""

    NVMLError = RuntimeError

    def nvmlInit(self):
        """Does nothing."""

    def nvmlShutdown(self):
        """Does nothing."""

    def nvmlDeviceGetCount(self):
        return len(GPUS)

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetUUID(self, number):
        return GPUS[number].encode() if number == 1 else GPUS[number]


def test_gpus_are_known_by_identifiers_that_stay(monkeypatch):
    monkeypatch.setattr(target, "pynvml", Nvml("pynvml"))
    assert gpu_identifiers({}) == GPUS
    assert gpu_identifiers({"CUDA_VISIBLE_DEVICES": "2,0"}) == ("GPU-c", "GPU-a")
    assert gpu_identifiers({"CUDA_VISIBLE_DEVICES": "GPU-b,1,9,0"}) == ("GPU-b",)
    assert gpu_identifiers({"CUDA_VISIBLE_DEVICES": ""}) == ()
    monkeypatch.setattr(target, "pynvml", None)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert gpu_identifiers({}) == ()


def test_a_device_that_a_person_avoids_by_its_number_is_the_one_of_that_number():
    assert usable_devices(GPUS, None, ["2"]) == ("GPU-a", "GPU-b")
    assert usable_devices(GPUS, ("1", "2"), ["2"]) == ("GPU-b",)
    # without a GPU each name stands for a place
    assert usable_devices((), ("0", "1"), ["1"]) == ("0",)
