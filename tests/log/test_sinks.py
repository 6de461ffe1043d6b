"""Events reach every sink, and no sink stops a training."""

import errno
import os

import pytest

from megaspec.log import sinks, tensorboard
from megaspec.log.events import EvalDone, RunEnded, Sampled
from megaspec.log.jsonl import read_metrics
from megaspec.log.sinks import METRICS, SINKS, open_sinks
from megaspec.log.spec import LogSpec
from tests.log.events_for_tests import step_done


def log(**choices):
    return LogSpec(**({"every": 1, "console": "plain", "tensorboard": False} | choices))


def test_metrics_are_kept_whatever_else_is_chosen(tmp_path, capsys):
    with open_sinks(log(console="quiet"), tmp_path, step=0) as emit:
        emit(step_done(1))
    assert len(read_metrics(tmp_path / METRICS)) == 1
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "tensorboard").exists()


class Broken:
    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, event):
        self.calls += 1
        raise self.error

    def close(self):
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed"), RuntimeError("lost")])
@pytest.mark.parametrize("name", list(SINKS))
def test_a_sink_that_fails_is_told_once_and_stops_nothing(tmp_path, capsys, monkeypatch, name, error):
    broken = Broken(error)
    monkeypatch.setitem(sinks.SINKS, name, lambda *_: broken)
    with open_sinks(log(tensorboard=True), tmp_path, step=0) as emit:
        for step in range(1, 6):
            emit(step_done(step))
    assert broken.calls == 5
    out, err = capsys.readouterr()
    assert err.count(str(error)) == 1
    assert f"{name}: " in err
    assert "training goes on" in err
    if name != METRICS:
        assert len(read_metrics(tmp_path / METRICS)) == 5
    if name != "log.console":
        assert out.count("step") == 5


def test_a_sink_that_cannot_be_opened_is_told_once(tmp_path, capsys):
    (tmp_path / METRICS).mkdir()
    (tmp_path / "tensorboard").touch()
    with open_sinks(log(tensorboard=True), tmp_path, step=0) as emit:
        emit(step_done(1))
        emit(step_done(2))
    out, err = capsys.readouterr()
    assert out.count("step") == 2
    assert err.count("training goes on") == 2


def test_an_error_of_the_training_passes_through(tmp_path):
    class Bug(Exception):
        pass

    def train():
        with open_sinks(log(), tmp_path, step=0) as emit:
            emit(step_done(1))
            raise Bug

    with pytest.raises(Bug):
        train()
    assert len(read_metrics(tmp_path / METRICS)) == 1


def curves(folder):
    # takes a second to import, and every worker imports this file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def texts(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(e.step, e.tensor_proto.string_val[0]) for e in found.Tensors(tag)] for tag in found.Tags()["tensors"]
    }


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path):
    chosen = log(console="quiet", tensorboard=True)
    with open_sinks(chosen, tmp_path, step=0) as emit:
        for step in range(1, 7):
            emit(step_done(step, loss=1.0))
        emit(EvalDone(step=3, loss=2.5, sets={"web": 2.0, "code": 3.0}, tokens={"web": 5, "code": 5}, seconds=1.0))
    with open_sinks(chosen, tmp_path, step=4) as emit:
        for step in range(5, 9):
            emit(step_done(step, loss=2.0))
        emit(Sampled(step=8, prompt="a", text="b"))
        emit(RunEnded(step=8, how="done"))
    shown = curves(tmp_path / "tensorboard")
    assert shown["loss"] == [(s, 1.0 if s <= 4 else 2.0) for s in range(1, 9)]
    assert shown["eval/loss"] == [(3, 2.5)]
    assert (shown["eval/web/loss"], shown["eval/code/loss"]) == ([(3, 2.0)], [(3, 3.0)])
    assert shown["sequence_tokens"][0] == (1, 1000.0)
    assert "loss_scale" not in shown
    assert texts(tmp_path / "tensorboard") == {"sample/text_summary": [(8, b"ab")]}


def failing_writes(monkeypatch, *, under, code, times):
    """The next `times` writes below `under` fail, behind a few bytes of each."""
    written = os.write
    left = [times]

    def write(fd, data):
        if left[0] == 0 or not os.readlink(f"/proc/self/fd/{fd}").startswith(str(under)):
            return written(fd, data)
        left[0] -= 1
        if left[0] % 2 == 1:
            return written(fd, data[:3])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_tensorboards_file_that_can_not_be_written_for_a_while_is_whole_in_the_end(tmp_path, capsys, monkeypatch, code):
    with open_sinks(log(console="quiet", tensorboard=True), tmp_path, step=0) as emit:
        emit(step_done(1))
        failing_writes(monkeypatch, under=tmp_path / "tensorboard", code=code, times=8)
        for step in range(2, 30):
            emit(step_done(step))
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert "log.tensorboard: " in err
    assert "TensorBoard's file" in err
    assert [step for step, _ in curves(tmp_path / "tensorboard")["loss"]] == list(range(1, 30))


def test_tensorboards_file_that_can_never_be_written_is_told_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensorboard, "MOST_WAITING_BYTES", 2000)
    failing_writes(monkeypatch, under=tmp_path / "tensorboard", code=errno.ENOSPC, times=-2)
    with open_sinks(log(console="quiet", tensorboard=True), tmp_path, step=0) as emit:
        for step in range(1, 40):
            emit(step_done(step))
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert os.strerror(errno.ENOSPC) in err
    assert len(read_metrics(tmp_path / METRICS)) == 39


@pytest.mark.parametrize("name", [METRICS, "tensorboard"])
def test_no_sink_writes_through_a_link(tmp_path, name, capsys):
    run, home = tmp_path / "run", tmp_path / "home"
    run.mkdir()
    home.mkdir()
    target = home if name == "tensorboard" else home / "precious"
    (home / "precious").write_bytes(b"precious")
    (run / name).symlink_to(target)
    with open_sinks(LogSpec(console="quiet", tensorboard=True), run, step=0) as emit:
        emit(step_done(1))
    assert f"{run / name}" in capsys.readouterr().err
    assert [f.name for f in home.iterdir()] == ["precious"]
    assert (home / "precious").read_bytes() == b"precious"


def test_names_of_event_files_can_not_be_foreseen(tmp_path):
    for _ in range(2):
        with open_sinks(LogSpec(console="quiet", tensorboard=True), tmp_path, step=0) as emit:
            emit(step_done(1))
    names = {f.name.rpartition(".")[2] for f in (tmp_path / "tensorboard").iterdir()}
    assert len(names) == 2
    assert all(len(bytes.fromhex(name)) == 8 for name in names)
