"""The page of a run: whole in one file, true to the folder, and no element or attribute of it comes out of data."""

import json
import math
import os
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.checkpoint.fallback import file_elsewhere
from megaspec.core.errors import DataError
from megaspec.report.chart import Chart, Curve, Level, bars, thinned
from megaspec.report.comparison_page import comparison_page
from megaspec.report.folder import REPORT, RunFolder
from megaspec.report.html import element
from megaspec.report.run_page import run_page
from megaspec.report.words import in_figures
from tests.report.made_runs import PREDICTION, STEPS, events_of, make_run, step_of

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if b), None)
HOSTILE = (
    "<script>document.title='broken'</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</style></svg></title><iframe src=//evil.example>",
    "{{7*7}} &lt;b&gt; javascript:alert(1) <!-- ]]>",
    "\x1b[31mred\x1b]0;title\x07 \r\n\x00 \u202egnp.exe \u2066isolated\u2028line \ud800",
)


class Structure(HTMLParser):
    """Elements and attributes of a page, with their values; and all text."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(attrs)))

    def handle_comment(self, data):
        self.elements.append(("comment", ()))

    def handle_data(self, data):
        self.texts.append(data)


def read(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.read()
    return run


def texts_of(page: str) -> str:
    return "\n".join(Structure(page).texts)


def tiles_of(page: str) -> dict[str, str]:
    """By what it is, the number of each tile."""
    return {what: value for value, what in re.findall(r"<b>([^<]*)</b><span class=\"soft\">([^<]*)</span>", page)}


def test_it_shows_what_the_folder_says(tmp_path):
    page = run_page(read(make_run(tmp_path / "run")))
    tiles = tiles_of(page)
    assert tiles["steps"] == f"{STEPS} / {STEPS}"
    assert tiles["loss of the last step"] == f"{step_of(STEPS)['loss']:.5g}"
    # 32 sequences of 4,096 tokens in the 0.4 s that the kinds of the plan add up to; 8 ranks of 1e15 FLOP/s
    planned = 32 * 4096 / 0.4
    assert f"<b>{planned:,.0f}</b>" in page
    mfu = 100 * planned * 6e9 / (8 * 1e15)
    assert f"<b>{mfu:.1f} %</b>" in page
    [speed] = [what for what in tiles if what.startswith("tokens/s")]
    measured = float(tiles[speed].replace(",", ""))
    assert speed == f"tokens/s, median, {100 * (measured / planned - 1):+.1f} % beside the plan"
    assert tiles["most memory of rank 0"] == "38.0 GiB"
    assert tiles["times started again"] == "1"
    text = texts_of(page)
    for heading in ("Evaluation", "Checkpoints", "Starts", "Attempts of the supervisor", "Stragglers, alerts, skips"):
        assert f"\n{heading}\n" in text
    for word in ("straggler", "alert", "update skipped", "went back", "data left out", "suspected hardware"):
        assert f"\n{word}\n" in text
    for kind in ("weights", "gradients", "optimizer", "activations", "reserve"):
        assert f"\n{kind}\n" in text
    assert "41.0 GiB" in text
    # of the 38 GiB that rank 0 held at most, by kind and what was beside them
    assert "rank 0, measured\n7.0 GiB\n3.0 GiB\n11.0 GiB\n" in text
    assert "\nmeasured beside them\n" in text
    assert "\n17.0 GiB\n38.0 GiB\n" in text
    assert "1 not finite" in text
    # of six checkpoints one is still there
    assert text.count("\nyes\n") == 1


def test_it_asks_nobody_and_runs_nothing(tmp_path):
    page = run_page(read(make_run(tmp_path / "run")))
    assert re.findall(r"(?:https?:)?//\w|@import|url\(|<script|<link|<img|\son\w+=|href", page) == []
    [policy] = [a for tag, a in Structure(page).elements if tag == "meta" and a[0][1] == "Content-Security-Policy"]
    assert dict(policy)["content"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize("text", HOSTILE)
def test_no_element_or_attribute_comes_out_of_data(tmp_path, text):
    # as long as the other, so that nothing is cut that is not cut there
    harmless = run_page(read(make_run(tmp_path / "a")))
    hostile = run_page(read(make_run(tmp_path / "b", text=text, name=text)))
    assert Structure(hostile).elements == Structure(harmless).elements
    shown = Structure(hostile).texts
    assert "".join(shown).count(text.encode("unicode_escape").decode()[:7]) > 30
    assert [c for c in hostile if not c.isprintable() and c not in "\n"] == []
    harmless = comparison_page([read(tmp_path / "a"), read(tmp_path / "a")])
    hostile = comparison_page([read(tmp_path / "b"), read(tmp_path / "b")])
    assert Structure(hostile).elements == Structure(harmless).elements
    assert [c for c in hostile if not c.isprintable() and c not in "\n"] == []


def test_an_element_that_did_not_escape_would_be_found(tmp_path, monkeypatch):
    monkeypatch.setattr("megaspec.report.html.html.escape", lambda text: text)
    harmless = run_page(read(make_run(tmp_path / "a")))
    hostile = run_page(read(make_run(tmp_path / "b", text=HOSTILE[1])))
    assert Structure(hostile).elements != Structure(harmless).elements


def test_a_long_run_stays_small_and_keeps_its_spikes(tmp_path):
    events = [step_of(step, steps=60_000) for step in range(1, 60_001)]
    events[41_233] = step_of(41_234, loss=9.0, steps=60_000)
    page = run_page(read(make_run(tmp_path / "run", events=events)))
    assert len(page) < 1_000_000
    points = [(event["step"], event["loss"]) for event in events]
    drawn = thinned(points, 1, 60_000, 566)
    assert len(drawn) <= 4 * 566
    assert (41_234, 9.0) in drawn
    assert drawn[0] == points[0]
    assert drawn[-1] == points[-1]


BROKEN_LINES = {
    "cut": '{"event": "step", "step": 301, "lo',
    "no JSON": "garbage\n",
    "no object": "[1, 2]\n",
    "no step": '{"event": "step", "loss": 1.0}\n',
    "a text as number": json.dumps(step_of(STEPS + 1, loss="<b>")) + "\n",
    "earlier": json.dumps(step_of(3)) + "\n",
    "too large": json.dumps(step_of(STEPS + 1)).replace(": 0.42", f": 1{'0' * 400}") + "\n",
    "too long": "x" * 1_100_000 + "\n",
    "nested": "[" * 5_000 + "\n",
}


@pytest.mark.parametrize("line", BROKEN_LINES.values(), ids=BROKEN_LINES)
def test_lines_that_are_broken_are_told_and_the_rest_is_shown(tmp_path, line):
    folder = make_run(tmp_path / "run", events=[*events_of("plain")])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line)
    run = read(folder)
    page = run_page(run)
    assert tiles_of(page)["steps"] == f"{STEPS} / {STEPS}"
    [trouble] = run.troubles
    assert trouble in texts_of(page).replace("\n", "")
    if line.endswith("\n"):
        assert f"{folder / 'metrics.jsonl'}:{len(events_of('plain')) + 1}: " in trouble
    else:
        assert "ends inside of a line" in trouble


def test_odd_values_in_whole_lines_break_nothing(tmp_path):
    odd = [None, True, -1, 1e308, "nan", "text", [], {}, {"a": [None]}, [[["deep"]]], 10**300]
    events = events_of("plain")[:40]
    for event in events_of("plain"):
        if event["event"] == "step":
            continue
        for value in odd:
            events.append(dict.fromkeys(event, value) | {"event": event["event"], "step": 40, "steps": STEPS})
    run = read(make_run(tmp_path / "run", events=events))
    for page in (run_page(run), comparison_page([run, run])):
        assert page.endswith("</html>\n")
    for value in odd:
        changed = dict.fromkeys(("name", "model", "train", "data", "decisions", "world_size", "parallelism"), value)
        (tmp_path / "run" / "spec.json").write_text(json.dumps(changed))
        run.read()
        assert run_page(run).endswith("</html>\n")


@pytest.mark.parametrize(
    "values", [[0.0], [1e308, -1e308], [5e-324, 0.0], [math.nan], [math.inf, 1.0], [1e17, 1e17 + 16]]
)
def test_any_numbers_are_drawn(values):
    curve = Curve("any", list(enumerate(values)))
    drawn = Chart([curve], in_figures, levels=[Level("planned", 1.0)]).drawn()
    assert "nan," not in drawn
    assert re.findall(r"(?<=[\" ,])(?:nan|inf)(?=[\" ,])", re.sub(r">[^<]*<", "><", drawn)) == []


def test_bars_are_as_long_as_their_parts():
    drawn = bars([("one", {"a": 3.0, "b": 1.0}), ("two", {"a": 2.0})], str)
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="18"', drawn)]
    assert widths == [307.5, 102.5, 205.0]


def test_what_is_missing_is_told(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "spec.json").write_text('{"name": "new"}')
    page = run_page(read(folder))
    text = texts_of(page)
    assert "metrics.jsonl is not there yet" in text
    assert "prediction.json is not there" in text
    assert "not begun" in text
    make_run(tmp_path / "other")
    (tmp_path / "other" / "prediction.json").write_text("{}")
    assert "prediction.json can't be read" in texts_of(run_page(read(tmp_path / "other")))
    both = texts_of(comparison_page([read(folder), read(tmp_path / "other")]))
    assert "new: metrics.jsonl is not there yet" in both
    assert "made: prediction.json can't be read" in both


def test_a_run_that_goes_back_shows_each_step_once(tmp_path):
    """metrics.jsonl is cut where a run is resumed; a page that follows it begins anew."""
    folder = make_run(tmp_path / "run", events=[step_of(step) for step in range(1, 101)])
    run = read(folder)
    assert list(run.history.steps.steps) == list(range(1, 101))
    with (folder / "metrics.jsonl").open("a") as file:
        start = {"event": "start", "step": 60, "steps": STEPS, "attempt": 1, "time": 1.0}
        file.write("".join(json.dumps(event) + "\n" for event in (start, step_of(61, loss=0.5))))
    run.read()
    assert list(run.history.steps.steps) == list(range(1, 62))
    assert run.history.steps.last("loss") == 0.5
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:10]) + "\n")
    run.read()
    assert list(run.history.steps.steps) == list(range(1, 11))


def test_lines_that_the_folder_has_no_room_for_are_shown_each_once_in_order(tmp_path):
    """They wait in the other place, as log/overflow.py leaves them; some have come home."""
    other = tmp_path / "other"
    steps = [step_of(step) for step in range(1, 61)]
    folder = make_run(tmp_path / "run", events=steps[:30], checkpoint={"fallback_dir": str(other)})
    waiting = file_elsewhere(str(other), folder, "metrics.jsonl")
    waiting.parent.mkdir(parents=True)
    lines = [json.dumps(event) + "\n" for event in steps[20:]]
    after = (folder / "metrics.jsonl").stat().st_size - len("".join(lines[:10]))
    waiting.write_text(json.dumps({"after": after}) + "\n" + "".join(lines))
    run = read(folder)
    assert list(run.history.steps.steps) == list(range(1, 61))
    text = texts_of(run_page(run))
    assert "60 / 300" in text
    assert f"the newest lines are read from {waiting}: the run folder has no room for them" in text
    assert list(read(folder).history.steps.steps) == list(run.history.steps.steps)
    # what comes home is not shown anew
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(lines[10:]) + json.dumps(step_of(61)) + "\n")
    waiting.unlink()
    run.read()
    assert list(run.history.steps.steps) == list(range(1, 62))
    assert run.history.passed_over == 0
    assert "no room for them" not in texts_of(run_page(run))


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_another_place_that_is_no_path_is_told(tmp_path, name):
    text = texts_of(run_page(read(make_run(tmp_path / "run", checkpoint={"fallback_dir": name}))))
    assert "metrics.jsonl is no path; it is left out" in text


@pytest.mark.parametrize(
    "changed",
    [
        {"step_seconds": {"attention": 5e-324}},
        {"step_seconds": {"attention": 1e308, "idle": 1e308}},
        {"step_seconds": {}},
        {"step_seconds": {"attention": 0}},
        {"peak_flops": 5e-324},
        {"flops_per_token_causal": 1e308, "peak_flops": 1e-300},
        {"memory": [{"weights": 10**400}]},
        {"memory": [{}]},
        {"memory": [{"weights": 0}]},
    ],
)
def test_a_plan_with_any_numbers_breaks_nothing(tmp_path, changed):
    folder = make_run(tmp_path / "run")
    (folder / "prediction.json").write_text(json.dumps(PREDICTION | changed))
    run = read(folder)
    drawn = run_page(run)
    assert drawn.endswith("</html>\n")
    for _, attributes in Structure(drawn).elements:
        for name, value in attributes:
            if name in ("x1", "y1", "x", "y", "width", "points"):
                assert "nan" not in value
                assert "inf" not in value
    comparison_page([run, run])


def test_what_is_too_much_is_told(tmp_path):
    sets = {f"set {number}": 1.0 for number in range(100)}
    event = {"event": "eval", "step": 1, "loss": 1.0, "sets": sets, "tokens": {}, "seconds": 1.0, "time": 1.0}
    decisions = [{"key": f"key.{number}", "value": 1, "reason": "why"} for number in range(400)]
    folder = make_run(tmp_path / "run", events=[step_of(1), event, *[{**event, "step": n} for n in range(2, 203)]])
    (folder / "spec.json").write_text(json.dumps({"decisions": decisions}))
    text = texts_of(run_page(read(folder)))
    assert "202 events of metrics.jsonl hold more than is shown of them" in text
    assert "49 more sets stand in the table" in text
    assert "and 102 earlier ones" in text
    assert "400 settings were decided" in text
    assert "and 100 more" in text


def test_restarts_that_left_no_line_are_counted(tmp_path):
    """Two starts behind the checkpoint that the last one goes on from: their lines were cut off."""
    start = {"event": "start", "steps": STEPS, "time": 1.0}
    folder = make_run(tmp_path / "run", events=[{**start, "step": 0, "attempt": 0}, {**start, "step": 0, "attempt": 3}])
    lines = [{"event": "start", "attempt": n, "host": "a", "pid": 1, "devices": None, "why": ""} for n in range(4)]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tiles_of(run_page(read(folder)))["times started again"] == "3"


def test_damaged_lines_of_attempts_are_told(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    assert read(folder).troubles == []
    path = folder / "attempts.jsonl"
    number = len(path.read_text().splitlines()) + 1
    with path.open("a") as file:
        file.write('{"event": "end", "attempt": 1, "code": 7')
    trouble = f"1 line tells of no attempt and can't be shown; the first: {path}:{number}: no JSON: cut, or edited"
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / REPORT), f"{folder}: {trouble}"]
    assert trouble in texts_of((folder / REPORT).read_text())
    with path.open("a") as file:
        file.write("\n[]\n")
    assert read(folder).troubles[0].startswith("2 lines tell of no attempt and can't be shown; the first: ")


def test_runs_are_compared(tmp_path):
    one = make_run(tmp_path / "one", name="one")
    two = make_run(tmp_path / "two", name="one", optim={"kind": "adamw", "lr": 1e-3}, world_size=16)
    page = comparison_page([read(one), read(two)])
    text = texts_of(page)
    assert f"one ({one})" in text
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in rows]
    assert ["optim.lr", "0.0003", "0.001"] in cells
    assert ["world_size", "8", "16"] in cells
    assert [row for row in cells if row and row[0] == "train.steps"] == []


def test_the_command_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two")
    assert cli.main(["report", "one"]) == 0
    assert capsys.readouterr().out == "one/report.html\n"
    assert (one / REPORT).read_text().startswith("<!doctype html>")
    assert cli.main(["report", "one", "two"]) == 0
    assert (tmp_path / "comparison.html").exists()
    assert not (two / REPORT).exists()
    assert cli.main(["report", "two", "--out", "new/page.html"]) == 0
    assert (tmp_path / "new" / "page.html").exists()


def test_mistakes_are_refused_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs" / "one")
    for words in (["one"], ["runs"], ["nowhere"], ["runs/one", "runs/two"]):
        assert cli.main(["report", *words]) == 64, words
    assert "did you mean runs/one?" in capsys.readouterr().err
    assert cli.main(["report", "runs/one", "--out", "/proc/nothing/page.html"]) == 73
    (tmp_path / "folder").mkdir()
    assert cli.main(["report", "runs/one", "--out", "folder"]) == 73
    (folder / "metrics.jsonl").rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "metrics.jsonl")
    assert cli.main(["report", "runs/one"]) == 65
    assert "is a link" in capsys.readouterr().err
    (folder / "metrics.jsonl").unlink()
    (folder / "spec.json").write_text("{")
    assert cli.main(["report", "runs/one"]) == 65
    assert not (folder / REPORT).exists()
    with pytest.raises(DataError, match="can't be read"):
        read(folder)


def test_a_file_that_is_no_page_is_left_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "one")
    make_run(tmp_path / "two")
    (tmp_path / "mine.html").write_text("<!doctype html>\n<html>mine</html>")
    (tmp_path / "comparison.html").write_text("mine")
    (tmp_path / "note.txt").write_text("mine")
    os.mkfifo(tmp_path / "fifo")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for out in ("one/spec.json", "one/metrics.jsonl", "mine.html", "note.txt", "fifo"):
        assert cli.main(["report", "one", "--out", out]) == 64, out
        assert "--out" in capsys.readouterr().err
    assert cli.main(["report", "one", "two"]) == 64
    assert "comparison.html is there, and is no page that `megaspec report` wrote" in capsys.readouterr().err
    # nor is a file made that the run would take for its own
    for out in ("one/heartbeat.json", "one/checkpoints/page.html", "two/../one/logs/page.html"):
        assert cli.main(["report", "two", "one", "--out", out]) == 64, out
        assert "is among the run's own files" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not (folder / "logs").exists()


def test_its_own_pages_and_empty_files_are_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "one")
    (tmp_path / "empty.html").touch()
    for out in ("empty.html", "empty.html", "one/other.html", "one/other.html", "one/report.html"):
        assert cli.main(["report", "one", "--out", out]) == 0, out
    run = read(tmp_path / "one")
    (tmp_path / "trains.html").write_text(run_page(run, seconds_until_reload=9))
    assert cli.main(["report", "one", "one", "--out", "trains.html"]) == 0
    assert cli.main(["report", "one", "--out", "trains.html"]) == 0


def test_a_link_in_its_place_is_replaced_not_followed(tmp_path):
    folder = make_run(tmp_path / "one")
    (tmp_path / "precious").write_text("kept")
    os.symlink(tmp_path / "precious", folder / REPORT)
    assert cli.main(["report", str(folder)]) == 0
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (folder / REPORT).is_symlink()


def test_attributes_are_escaped_too():
    assert element("p", "a", title="\"'><") == '<p title="&quot;&#x27;&gt;&lt;">a</p>'


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("of", ["a run", "runs"])
def test_a_browser_draws_it_in_both_themes(tmp_path, of, theme):
    """No script of a hostile name runs, and the background is the theme's."""
    folder = make_run(tmp_path / "run", text=HOSTILE[0] + HOSTILE[1], name=HOSTILE[0])
    run = read(folder)
    page = run_page(run) if of == "a run" else comparison_page([run, run])
    (folder / REPORT).write_text(page)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900"]
    if theme == "dark":
        command.append("--blink-settings=preferredColorScheme=0")
    picture = tmp_path / "page.png"
    where = f"file://{folder / REPORT}"
    done = subprocess.run([*command, f"--screenshot={picture}", where], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first = corner_of(picture)
    assert first == {"light": (0xF7, 0xF8, 0xFA), "dark": (0x12, 0x15, 0x1B)}[theme]
    done = subprocess.run([*command, "--dump-dom", where], capture_output=True, timeout=60)
    drawn = Structure(done.stdout.decode())
    assert "broken" not in drawn.texts
    assert [tag for tag, _ in drawn.elements if tag in ("script", "img", "iframe")] == []
    assert len(drawn.elements) == len(Structure(page).elements)


def corner_of(picture: Path) -> tuple[int, ...]:
    """Colour of the pixel at the top left: behind the filter's byte it is the same with all filters of PNG."""
    content = picture.read_bytes()
    packed = b""
    at = 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        if content[at + 4 : at + 8] == b"IDAT":
            packed += content[at + 8 : at + 8 + length]
        at += 12 + length
    return tuple(zlib.decompress(packed)[1:4])
