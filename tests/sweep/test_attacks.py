"""A sweep's folder that somebody else has filled: nothing outside of it is touched, nothing hangs, all is told."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megaspec.checkpoint.fallback import file_elsewhere
from megaspec.cli import main
from megaspec.core.errors import RecipeError
from megaspec.sweep.results import Follower
from megaspec.sweep.spec import SweepSpec
from megaspec.sweep.state import HEAD, LOGS, POINTS, Axis, Point, SweepFolder, SweepHead
from tests.sweep.conftest import lives, states, sweep

STEP = '{{"event": "step", "step": {}, "steps": 9, "loss": {}, "sequence_tokens": 80, "seconds": 0.5}}\n'


@pytest.fixture
def made():
    """The folder of a sweep of two points that are done, made without any run."""
    folder = SweepFolder(Path("sweeps/s"))
    folder.path.mkdir(parents=True)
    head = SweepHead(
        name="s",
        spec=SweepSpec(),
        plain=(),
        config_dirs=(),
        axes=(Axis(key="data.seed", words=("data.seed=1", "data.seed=2")),),
        metric="loss",
        direction="minimize",
        launcher="megaspec",
        state="done",
    )
    ends = [
        Point(
            number=n, overrides=(f"data.seed={n}",), folder=f"0{n}-seed-{n}", fingerprint=f"{n}", state="done", code=0
        )
        for n in (1, 2)
    ]
    folder.make(head, ends)
    for point in ends:
        folder.run(point).mkdir()
        (folder.run(point) / "metrics.jsonl").write_text(STEP.format(1, 4.0) + STEP.format(2, 3.0 + point.number))
    return folder


def unfinished() -> list[dict]:
    """A sweep of two points, neither of which was run. -> the lines of its points.jsonl."""
    assert sweep("data.seed=1,2") == 0
    lines = [json.loads(line) for line in Path("sweeps/s", POINTS).read_text().splitlines()[:2]]
    write_points(lines)
    assert states() == ["waiting", "waiting"]
    return lines


def write_points(lines: list[dict]) -> None:
    Path("sweeps/s", POINTS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def everything_outside() -> dict[str, bytes]:
    """Every file of the working folder that is not of the sweep."""
    files = (f for f in Path().rglob("*") if f.is_file() and f.parts[0] != "sweeps")
    return {str(f): f.read_bytes() for f in files}


@pytest.mark.usefixtures("stubbed")
@pytest.mark.parametrize("command", ["resume", "show"])
def test_a_point_has_its_run_in_the_sweep_and_nowhere_else(command, capsys):
    """Absolute, on the way out, in the place of another file, in another point's, or where a log would be elsewhere."""
    lines = unfinished()
    Path("home").mkdir()
    before = everything_outside()
    bad = [str(Path("home/01").resolve()), "../home", "..", ".", "", "01/../../../home", "01/x", "logs", "lock", POINTS]
    for folder in [*bad, "01-a\n", "02-seed-2", "01-" + "x" * 200, 7, None, "01-\u0000", "-01", "1_0"]:
        write_points([lines[0] | {"folder": folder}, lines[1]])
        assert main(["sweep", command, "sweeps/s"]) == 64, folder
        assert "sweeps/s/points.jsonl is damaged in line 1: " in capsys.readouterr().err
    write_points([*lines, {k: v for k, v in lines[0].items() if k != "recipe"} | {"folder": "01-other"}])
    assert main(["sweep", command, "sweeps/s"]) == 64
    assert "point 1 has two folders" in capsys.readouterr().err
    assert everything_outside() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 0}, {"pid": -1}, {"pid": 1}, {"pid": 2**31}, {"pid": 10**30}, {"pid": True}, {"pid": "7"},
        {"number": 0}, {"number": 10**12}, {"number": 1.5}, {"code": -9}, {"code": 10**6}, {"ranks": -1},
        {"state": "asleep"}, {"overrides": "a=1"}, {"overrides": [1]}, {"recipe": []}, {"more": 1}, {"folder": ["01"]},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_point_can_not_be_is_told(made, changes, capsys):
    lines = [json.loads(line) for line in (made.path / POINTS).read_text().splitlines()]
    write_points([lines[0] | changes, lines[1]])
    assert main(["sweep", "show", "sweeps/s"]) == 64
    assert "sweeps/s/points.jsonl is damaged in line 1: " in capsys.readouterr().err


@pytest.mark.usefixtures("stubbed")
def test_no_process_of_another_run_is_ended(capsys):
    """A number in points.jsonl that is another's: a run of the same name elsewhere, and what only has it as a word."""
    lines = unfinished()
    name = lines[0]["folder"]
    Path("runs", name).mkdir(parents=True)
    words = ["-m", "resume", str(Path("runs", name).resolve())]
    others = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *more], start_new_session=True)
        for more in (words, ["resume", str(Path("sweeps/s", name).resolve())])
    ]
    try:
        wait_until(lambda: all("resume" in psutil.Process(p.pid).cmdline() for p in others))
        changes = [{"state": "running", "pid": p.pid} for p in others]
        for change in changes:
            write_points([lines[0] | change, lines[1]])
            assert main(["sweep", "show", "sweeps/s"]) == 0
            assert "running" not in capsys.readouterr().out
            assert main(["sweep", "resume", "sweeps/s"]) == 0
            assert [p.poll() for p in others] == [None, None]
    finally:
        for process in others:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("stubbed")
def test_the_process_of_a_point_that_was_left_is_ended():
    """The other side of the test above: what runs this very folder is found, by whatever path it names it."""
    lines = unfinished()
    run = Path("sweeps/s", lines[0]["folder"])
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "-m", "megaspec", "resume", lines[0]["folder"]],
        cwd=run.parent,
        start_new_session=True,
    )
    try:
        wait_until(lambda: "resume" in psutil.Process(left.pid).cmdline())
        write_points([lines[0] | {"state": "running", "pid": left.pid}, lines[1]])
        assert main(["sweep", "resume", "sweeps/s"]) == 0
        left.wait(10)  # its end comes of itself in a minute
    finally:
        left.kill()
        left.wait()


def wait_until(is_so) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1, 2]", "no object"),
        ("7", "no object"),
        ("null", "no object"),
        ('"step"', "no object"),
        ("not JSON", "Expecting value"),
        ('{"event": "step"}', "it lacks 'step'"),
        ('{"event": "start", "step": 1}', "it lacks 'steps'"),
        ('{"event": "start", "step": null, "steps": 9}', "step is no count"),
        ('{"event": "end"}', "it lacks 'how'"),
        ('{"event": "eval", "split": "valid", "step": 2, "loss": null}', ""),
        (STEP.format('"2"', 1.0), "step is no count"),
        (STEP.format("[2]", 1.0), "step is no count"),
        (STEP.format("true", 1.0), "step is no count"),
        (STEP.format("NaN", 1.0), "step is no count"),
        (STEP.format("1e400", 1.0), "step is no count"),
        (STEP.format("-1", 1.0), "step is no count"),
        (STEP.format("9" * 4000, 1.0), "step is no count"),
        (STEP.format("9" * 6000, 1.0), ""),
        (STEP.format(3, "9" * 4000), "too large"),
        (STEP.format(3, "{}"), ""),
        (STEP.format(3, '"nul"'), "nul"),
        (STEP.format(3, 1.0).replace("0.5", "{}"), ""),
        (STEP.format(3, 1.0).replace("80", "null"), ""),
        ("[" * 100_000 + "]" * 100_000, "nested deeper than 100"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested deeper than 100"),
        ('{"event": "\udcff"}', "can't decode byte 0xff"),
        ("x" * (1 << 20), "longer than 1,048,576 bytes"),
        ("\x1b[31mred", ""),
    ],
    ids=lambda text: text[:40],
)
def test_lines_that_are_no_events_are_passed_over_and_told(made, line, told, capsys):
    path = made.run(made.points()[0]) / "metrics.jsonl"
    before, after = STEP.format(1, 4.0), STEP.format(2, 3.5)
    path.write_bytes(f"{before}{line.rstrip()}\n{after}".encode(errors="surrogateescape"))
    assert main(["sweep", "show", "sweeps/s"]) == 0
    out = capsys.readouterr().out
    assert f"point 1: 1 line passed over, the first {path}:2: " in out
    assert told in out
    assert "\x1b[31m" not in out
    assert Follower(path.parent).read().loss == {1: 4.0, 2: 3.5}
    assert "best loss: point 1" in out


def test_lines_that_a_run_folder_has_no_room_for_count(made, capsys):
    """They wait in the other place of the point's recipe."""
    lines = [json.loads(line) for line in (made.path / POINTS).read_text().splitlines()]
    write_points([line | {"recipe": {"checkpoint": {"fallback_dir": "other"}}} for line in lines])
    run = made.run(made.points()[1])
    waiting = file_elsewhere("other", run, "metrics.jsonl")
    waiting.parent.mkdir(parents=True)
    header = json.dumps({"after": (run / "metrics.jsonl").stat().st_size}) + "\n"
    waiting.write_text(header + STEP.format(3, 2.5) + STEP.format(4, 2.25))
    assert main(["sweep", "show", "sweeps/s"]) == 0
    out = capsys.readouterr().out
    assert "best loss: point 2" in out
    assert "2.25" in out
    waiting.write_text("notes\n")
    assert main(["sweep", "show", "sweeps/s"]) == 64
    assert f"{waiting} holds no lines of a run; it is left out" in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_shown(made, capsys):
    path = made.run(made.points()[0]) / "metrics.jsonl"
    path.write_text(STEP.format(1, "NaN") + STEP.format(2, "Infinity") + STEP.format(3, '"inf"'))
    assert main(["sweep", "show", "sweeps/s"]) == 0
    out = capsys.readouterr().out
    assert "passed over" not in out
    assert "best loss: point 2" in out


def test_a_run_that_starts_again_and_again_takes_no_quadratic_time(tmp_path):
    """One step more and one start, a hundred thousand times, behind a hundred thousand steps."""
    steps, path = 100_000, tmp_path / "metrics.jsonl"
    short = '{{"event":"step","step":{},"steps":9,"loss":1,"sequence_tokens":1,"seconds":1}}\n'
    again = short.format(steps) + f'{{"event":"start","step":{steps - 1},"steps":9}}\n'
    path.write_text("".join(short.format(n) for n in range(steps)) + again * steps)
    begun = time.monotonic()
    result = Follower(tmp_path).read()
    assert (result.step, result.passed_over) == (steps - 1, 0)
    # a fifth of a second for each quadratic look would be hours
    assert time.monotonic() - begun < 120


def test_files_without_an_end_are_read_so_far(made, capsys):
    """A hole of many GiB, without a line in it, in the place of each file."""
    size = 4 << 30
    point = made.points()[0]
    metrics = made.run(point) / "metrics.jsonl"
    begun = time.monotonic()
    os.truncate(metrics, size)
    assert main(["sweep", "show", "sweeps/s"]) == 64
    assert f"{metrics} has more than 1,073,741,824 bytes" in capsys.readouterr().err
    metrics.unlink()
    for name, told in ((POINTS, "more than 268,435,456"), (HEAD, "more than 16,777,216 bytes")):
        path = made.path / name
        content = path.read_bytes()
        os.truncate(path, size)
        assert main(["sweep", "show", "sweeps/s"]) == 64
        err = capsys.readouterr().err
        assert str(path) in err
        assert told in err
        path.write_bytes(content)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"a":' * 900 + "1" + "}" * 900])
@pytest.mark.parametrize("command", ["resume", "show"])
def test_what_is_nested_without_end_is_refused(made, text, command, capsys):
    head = made.path / HEAD
    good = head.read_bytes()
    for bad in (text, good.decode().rstrip()[:-1] + f', "more": {text}}}'):
        head.write_text(bad)
        assert main(["sweep", command, "sweeps/s"]) == 64
        assert f"{head} is damaged: nested deeper than 100" in capsys.readouterr().err
    head.write_bytes(good)
    (made.path / POINTS).write_text(f'{{"number": 1, "recipe": {text}}}\n')
    assert main(["sweep", "show", "sweeps/s"]) == 0  # as a line that a kill has torn
    (made.path / HEAD).write_bytes(b"\xff\xfe{")
    assert main(["sweep", command, "sweeps/s"]) == 64
    assert f"{head} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "device"])
def test_no_link_of_a_sweep_is_followed(made, kind, capsys):
    """Each file and folder of a sweep in turn is something else, which leads to precious files."""
    home, precious = Path("home"), Path("home/precious")
    home.mkdir()
    precious.write_bytes(b"precious")
    run = made.run(made.points()[0])
    begun = time.monotonic()
    for path in (
        made.path / HEAD,
        made.path / POINTS,
        made.path / LOGS,
        made.path / "lock",
        run,
        run / "metrics.jsonl",
    ):
        was = path.with_name("was")
        if path.exists():
            path.rename(was)
        replace(path, kind, home if path in (run, made.path / LOGS, made.path / "lock") else precious)
        for command in ("show", "resume"):
            code = main(["sweep", command, "sweeps/s"])
            err = capsys.readouterr().err
            if command == "resume" and path.is_relative_to(run):
                continue  # nothing of a point that is done is looked at
            assert code == 64, (path, command)
            assert str(path) in err
        assert sorted(f.name for f in home.iterdir()) == ["precious"]
        assert precious.read_bytes() == b"precious"
        path.unlink()
        if was.exists():
            was.rename(path)
    assert time.monotonic() - begun < 60


@pytest.mark.usefixtures("stubbed")
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "device"])
def test_no_link_in_the_place_of_a_point_or_its_files_is_followed(kind, capsys):
    lines = unfinished()
    home, precious = Path("home"), Path("home/precious")
    home.mkdir()
    precious.write_bytes(b"precious")
    run = Path("sweeps/s", lines[0]["folder"])
    log = Path("sweeps/s/logs", f"{run.name}.log")
    for path in (run, run / "recipe.json", run / "metrics.jsonl", run / "logs", run / "checkpoints", run / "lock"):
        was = path.with_name("was")
        if path.exists():
            path.rename(was)
        replace(path, kind, home if path.name in (run.name, "logs", "checkpoints", "lock") else precious)
        write_points(lines)
        assert main(["sweep", "resume", "sweeps/s"]) == 64
        assert states() == ["failed", "done"]
        assert str(path) in capsys.readouterr().out
        assert sorted(f.name for f in home.iterdir()) == ["precious"]
        assert precious.read_bytes() == b"precious"
        path.unlink()
        if was.exists():
            was.rename(path)
    assert lives()[1] == [lives()[1][0]]  # the life that made it
    assert log.is_file()


def test_no_log_of_a_point_is_written_through_a_link(tmp_path):
    from megaspec.core.errors import WriteError
    from megaspec.sweep import child

    (tmp_path / "logs").mkdir()
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "logs" / "01.log").symlink_to(precious)
    with pytest.raises(WriteError, match=r"01\.log.*link"):
        child.start(tmp_path / "01", tmp_path / "logs" / "01.log", gpus=(), threads=1)
    assert precious.read_bytes() == b"precious"


@pytest.mark.usefixtures("stubbed")
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "device"])
def test_the_request_to_stop_is_a_file_of_the_sweep(kind):
    Path("sweeps/s").mkdir(parents=True)
    folder = SweepFolder(Path("sweeps/s"))
    Path("precious").write_bytes(b"precious")
    replace(folder.path / "stop", kind, Path("precious"))
    with pytest.raises(RecipeError, match="sweeps/s/stop can't be read"):
        folder.refuse_links()
    assert folder.is_asked_to_stop()
    folder.take_stop_back()
    assert not folder.is_asked_to_stop()
    folder.ask_to_stop()
    assert folder.is_asked_to_stop()
    assert Path("precious").read_bytes() == b"precious"


def test_what_a_file_says_reaches_no_terminal_raw(made, capsys):
    red = "\x1b]0;title\x07\x1b[31m[bold]red"
    for point in made.points():
        made.append(point.model_copy(update={"overrides": (f"data.seed={red}",)}).to("failed", code=70, reason=red))
    made.write_head(made.head().model_copy(update={"axes": (Axis(key=red, words=("a=1",)), *made.head().axes)}))
    assert main(["sweep", "show", "sweeps/s"]) == 0
    out = capsys.readouterr().out
    assert "\x1b]0" not in out
    assert "\x1b[31m" not in out
    assert r"\x1b[31m[bold]red" in out


def replace(path: Path, kind: str, target: Path) -> None:
    """Puts something in the place of a file or folder."""
    if kind == "link":
        path.symlink_to(target.resolve())
    elif kind == "dangling link":
        path.symlink_to(target.resolve() / "new" if target.is_dir() else target.resolve().with_name("new"))
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", [LOGS, "lock"])
def test_a_new_sweep_is_not_made_through_links(name, capsys):
    """What a sweep that was killed while it was made may have left is somebody else's here."""
    Path("sweeps/s").mkdir(parents=True)
    Path("home").mkdir()
    Path("sweeps/s", name).symlink_to(Path("home").resolve())
    assert sweep("data.seed=1,2") == 73
    assert f"sweeps/s/{name}" in capsys.readouterr().err
    assert not list(Path("home").iterdir())


@pytest.mark.usefixtures("stubbed")
def test_the_ranks_of_a_point_are_planned_and_not_read(capsys):
    lines = unfinished()
    for ranks in (0, 2**20):
        write_points([lines[0] | {"ranks": ranks}, lines[1]])
        assert sweep("data.seed=1,2", "sweep.slots=2") == 0
        assert states() == ["done", "done"]
    assert "Traceback" not in capsys.readouterr().err
