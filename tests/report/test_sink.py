"""The page while a run trains: rank 0 keeps it up to date, and no step waits for it."""

import time
from collections.abc import Callable

import pytest

from megaspec.log.events import RunEnded, RunStarted
from megaspec.log.sinks import open_sinks
from megaspec.log.spec import LogSpec, ReportSpec
from megaspec.report import sink
from megaspec.report.folder import REPORT
from megaspec.report.sink import ReportSink
from tests.log.events_for_tests import rolled_back, step_done

BUILDERS = {ReportSpec: ReportSink}
RELOADS = 'http-equiv="refresh"'


def log(seconds: float) -> LogSpec:
    return LogSpec(console="quiet", tensorboard=False, report=ReportSpec(every_seconds=seconds))


def wait_for(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "spec.json").write_text('{"name": "mine"}')
    return tmp_path


def test_it_is_written_meanwhile_and_at_the_end(run):
    def page() -> str:
        path = run / REPORT
        return path.read_text() if path.exists() else ""

    with open_sinks(log(0.01), run, step=0, builders=BUILDERS) as emit:
        emit(RunStarted(step=0, steps=100))
        wait_for(lambda: "<b>0 / 100</b>" in page())
        for step in range(1, 41):
            emit(step_done(step))
        wait_for(lambda: (emit(step_done(41)), "<b>41 / 100</b>" in page())[1])
        assert RELOADS in page()
        emit(rolled_back(20, 41))
        for step in range(21, 60):
            emit(step_done(step, loss=0.25))
        emit(RunEnded(step=59, how="done"))
    assert "<b>59 / 100</b>" in page()
    assert "<b>0.25</b>" in page()
    # a run that has ended is not loaded again
    assert RELOADS not in page()
    assert [path.name for path in run.iterdir() if path.name.endswith(".tmp")] == []


def test_one_that_is_never_due_is_written_at_start_and_end_alone(run, monkeypatch):
    written = []
    monkeypatch.setattr(sink, "write_atomically", lambda path, chunks: written.append(chunks))
    with open_sinks(log(3600), run, step=0, builders=BUILDERS) as emit:
        emit(RunStarted(step=0, steps=100))
        for step in range(1, 50):
            emit(step_done(step))
        emit(RunEnded(step=49, how="failed"))
    assert len(written) == 2


def test_an_attempt_without_a_last_event_leaves_its_last_steps(run):
    with open_sinks(log(3600), run, step=0, builders=BUILDERS) as emit:
        emit(RunStarted(step=0, steps=100))
        emit(step_done(1))
    assert "<b>1 / 100</b>" in (run / REPORT).read_text()


def test_a_page_that_fails_is_told_once_and_training_goes_on(run, capsys):
    (run / REPORT).mkdir()
    with open_sinks(log(0.001), run, step=0, builders=BUILDERS) as emit:
        for step in range(1, 30):
            emit(step_done(step))
            time.sleep(0.005)
    told = [line for line in capsys.readouterr().err.splitlines() if line.endswith("training goes on")]
    assert len(told) == 1
    assert told[0].startswith(f"megaspec: log.report: {run / REPORT}: can't be written")


def test_a_slow_page_is_written_less_often(run, monkeypatch):
    """A page that takes 0.05 s is due again after 5 s at the earliest."""
    count = []

    def slow(*args, **kwargs):
        count.append(1)
        time.sleep(0.05)
        return ""

    monkeypatch.setattr(sink, "run_page", slow)
    page = ReportSink(ReportSpec(every_seconds=0.001), run, 0)
    for step in range(1, 100):
        page(step_done(step))
    assert len(count) == 1


def test_it_is_left_out_of_a_spec_that_does_not_ask_for_it():
    assert "report" not in LogSpec().model_dump()
    assert log(5).model_dump()["report"] == {"every_seconds": 5.0}
