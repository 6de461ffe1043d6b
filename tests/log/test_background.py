"""A sink of log.sinks that hangs, fails or is slow keeps nobody waiting, and is told of."""

import threading
import time

import pytest

from megaspec.log import background
from megaspec.log.background import BackgroundSink
from megaspec.log.jsonl import read_metrics
from megaspec.log.sinks import METRICS, open_sinks
from megaspec.log.spec import LogSpec, WandbSpec
from megaspec.runtime import rank
from tests.log.events_for_tests import step_done


class Noting:
    """`act` is called with each event before it is noted."""

    def __init__(self, act=lambda event: None):
        self.act = act
        self.taken = []
        self.is_closed = False

    def __call__(self, event):
        self.act(event)
        self.taken.append(event.step)

    def close(self):
        self.is_closed = True


def send(tmp_path, sink, *, steps=5, seconds=5.0, open_sink=None):
    """-> how long the training was held up, for each event at most."""
    log = LogSpec(console="quiet", tensorboard=False, sinks=(WandbSpec(kind="wandb"),))
    build = open_sink or (lambda *_: sink)
    longest = 0.0
    with open_sinks(log, tmp_path, step=0, builders={WandbSpec: build}, close_seconds=lambda: seconds) as emit:
        for step in range(1, steps + 1):
            start = time.monotonic()
            emit(step_done(step))
            longest = max(longest, time.monotonic() - start)
    assert len(read_metrics(tmp_path / METRICS)) == steps
    return longest


def test_every_event_comes_in_order_and_the_sink_is_closed(tmp_path, capsys):
    sink = Noting(lambda event: time.sleep(0.01))
    send(tmp_path, sink, steps=30)
    assert sink.taken == list(range(1, 31))
    assert sink.is_closed
    assert capsys.readouterr().err == ""


def test_a_sink_that_hangs_keeps_nobody_waiting(tmp_path, capsys):
    never = threading.Event()
    start = time.monotonic()
    longest = send(tmp_path, Noting(lambda event: never.wait(60)), seconds=0.3)
    assert longest < 5
    assert time.monotonic() - start < 30
    never.set()
    assert capsys.readouterr().err == "megaspec: log.sinks.0: it did not end in time; 5 events were not taken\n"


def test_a_sink_that_hangs_while_it_is_opened(tmp_path, capsys):
    never = threading.Event()
    send(tmp_path, None, seconds=0.3, open_sink=lambda *_: never.wait(60))
    never.set()
    assert "5 events were not taken" in capsys.readouterr().err


class ServiceError(Exception):
    """Of a package that has its own."""


@pytest.mark.parametrize("error", [ServiceError("503\n<html>"), KeyError("run"), OSError(111, "Connection refused")])
def test_a_sink_that_raises_is_told_once_and_gets_what_follows(tmp_path, capsys, error):
    def fail(event):
        if event.step < 4:
            raise error

    sink = Noting(fail)
    send(tmp_path, sink)
    assert sink.taken == [4, 5]
    assert sink.is_closed
    err = capsys.readouterr().err
    assert "<html>" not in err
    assert err.count("training goes on") <= 1
    assert "3 events were not taken (last error: " in err


def test_a_sink_that_can_be_opened_later_gets_everything(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(background, "OPEN_AGAIN_SECONDS", 0.05)
    sink = Noting()
    tries = []

    def open_sink(*_):
        tries.append(1)
        if len(tries) < 3:
            raise ServiceError("down")
        return sink

    log = LogSpec(console="quiet", tensorboard=False, sinks=(WandbSpec(kind="wandb"),))
    with open_sinks(log, tmp_path, step=0, builders={WandbSpec: open_sink}) as emit:
        emit(step_done(1))
        end = time.monotonic() + 20
        while not sink.taken and time.monotonic() < end:
            time.sleep(0.02)
        emit(step_done(2))
    assert sink.taken == [1, 2]
    assert capsys.readouterr().err.count("down") == 1


def test_what_waits_is_bounded_and_told(monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    go_on = threading.Event()
    noting = Noting(lambda event: go_on.wait(30))
    sink = BackgroundSink(lambda: noting, close_seconds=lambda: 10.0)
    for step in range(1, 4):
        sink(step_done(step))
    for step in range(4, 6):
        with pytest.raises(RuntimeError, match="does not keep up: 3 events wait"):
            sink(step_done(step))
    go_on.set()
    with pytest.raises(RuntimeError, match="2 events were not taken"):
        sink.close()
    assert noting.taken == [1, 2, 3]


def test_the_end_leaves_the_grace_time_to_the_rank(monkeypatch):
    monkeypatch.setattr(rank, "seconds_since_request", lambda: None)
    assert rank.patience_with_sinks(30.0) == 60.0
    for asked, left in ((5.0, 23.0), (27.0, 1.0), (29.0, 0.0), (100.0, 0.0)):
        monkeypatch.setattr(rank, "seconds_since_request", lambda asked=asked: asked)
        assert rank.patience_with_sinks(30.0) == left
