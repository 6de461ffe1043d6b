"""A launcher that does nothing any more while the kernel says that it runs: its heartbeats are missed."""

import errno
import os
import subprocess
import sys
import time
from itertools import chain, repeat

import pytest

from megaspec.launcher import heartbeat
from megaspec.launcher.heartbeat import EVERY_SECONDS, MISSED, Heartbeat, read_heartbeat, write_heartbeat
from megaspec_launchers import attempt_process
from megaspec_launchers.attempt_process import AttemptProcess, AttemptResult, watch_attempt
from megaspec_launchers.signals import StopRequests

OLD = MISSED * EVERY_SECONDS + 1
WORKS = """
import socket, sys, time
time.sleep(float(sys.argv[1]))
socket.socket(fileno=int(sys.argv[2])).sendall(b'{"code": 0, "why": "", "has_no_layout": false}\\n')
time.sleep(60)
"""


def watched(is_silent, *, seconds):
    """What an attempt comes to whose launcher says after so long that it is done. A look each 10 ms, 30 in a row."""
    process = AttemptProcess([sys.executable, "-c", WORKS, str(seconds)], {})
    try:
        with StopRequests() as stop:
            return watch_attempt(
                process,
                stop,
                look=lambda: "",
                look_seconds=60.0,
                grace_seconds=5.0,
                is_silent=is_silent,
                timeout_seconds=0.3,
            )
    finally:
        process._process.kill()
        process.close()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(attempt_process, "LOOK_SECONDS", 0.01)


def test_a_launcher_that_stays_silent_is_killed():
    result = watched(lambda: True, seconds=60)
    assert result == AttemptResult(74, "the launcher was silent: it wrote no heartbeat, and looked after no rank")


def test_other_children_of_the_process_that_watches_live_on():
    """Tests watch beside ranks of their own, which a launcher that is closed has nothing to do with."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as neighbour:
        watched(lambda: False, seconds=0)
        assert neighbour.poll() is None
        neighbour.communicate(b"\n")
    assert neighbour.returncode == 0


def test_one_that_was_silent_for_a_while_goes_on():
    """A clock that was set, or a machine that slept: the next heartbeat comes before it is given up."""
    looks = chain(repeat(True, 29), [False], repeat(True, 29), repeat(False))
    assert watched(lambda: next(looks), seconds=1) == AttemptResult(0, "")


def test_a_heartbeat_that_found_no_room_is_not_missed(tmp_path, monkeypatch):
    write_heartbeat(tmp_path, Heartbeat("training", step=7, time=time.time() - OLD))
    path = tmp_path / heartbeat.HEARTBEAT
    old = time.time() - OLD
    os.utime(path, (old, old))
    assert read_heartbeat(tmp_path).is_missed()

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(heartbeat, "open_inside", no_room)
    write_heartbeat(tmp_path, Heartbeat("training", step=8))
    monkeypatch.undo()
    beat = read_heartbeat(tmp_path)
    assert (beat.step, beat.is_missed()) == (7, False)
    assert [one.name for one in tmp_path.iterdir()] == [heartbeat.HEARTBEAT]
