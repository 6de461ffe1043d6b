"""The page of a sweep: whole in one file, asking nobody, with every point on it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megaspec.sweep.page import MOST_DRAWN, write_page
from megaspec.sweep.results import RunResult
from megaspec.sweep.spec import SweepSpec
from megaspec.sweep.state import Axis, Point, SweepHead

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if b), None)
NASTY = "</script><script>document.title='broken'</script>\ud800 &amp; \"'"


def made(
    folder: Path,
    count: int,
    *,
    running: bool = False,
    keys: tuple[str, ...] = ("optim.lr", "model"),
    metric: str = "loss",
) -> tuple[str, list[Point]]:
    """A page of a sweep: the second point failed, the third hasn't begun. -> its text and its points."""
    head = SweepHead(
        name="a-sweep",
        spec=SweepSpec(),
        plain=("recipe=hello",),
        config_dirs=(),
        axes=tuple(Axis(key=key) for key in keys),
        metric=metric,
        direction="minimize",
        launcher="megaspec",
        state="done",
    )
    points, results = [], {}
    for n in range(1, count + 1):
        state, reason = {2: ("failed", NASTY), 3: ("waiting", "")}.get(n, ("done", ""))
        overrides = (f"optim.lr={n / 1000}", f"model={'ab'[n % 2]}")[: len(keys)]
        points.append(
            Point(number=n, overrides=overrides, folder=f"{n:02d}", fingerprint="f", state=state, reason=reason, code=0)
        )
        loss = {} if n == 3 else {s: 3.0 + n / s for s in range(1, 401)}
        if n == 2:
            loss[400] = float("nan")
        results[n] = RunResult(steps=400, loss=loss, speed=dict.fromkeys(loss, 100.0))
    write_page(folder, head, points, results, running=running)
    return (folder / "index.html").read_text(encoding="utf-8"), points


class Found(HTMLParser):
    """Attributes that would fetch something, and the text of every script."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched, self.scripts, self._in_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.fetched += [
            v for k, v in attrs if k in ("src", "srcset", "data", "action") or (k == "href" and tag != "a")
        ]
        if tag == "script":
            self.scripts.append("")
            self._in_script = True

    def handle_endtag(self, tag):
        self._in_script &= tag != "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


def test_it_asks_nobody_and_carries_every_number(tmp_path):
    text, points = made(tmp_path, 12)
    found = Found(text)
    assert found.fetched == ["data:,"]
    assert (
        re.findall(r"(?:https?:)?//\S+|@import|url\(|fetch\(|XMLHttp", text.replace("http://www.w3.org/2000/svg", ""))
        == []
    )
    data, _ = found.scripts
    content = json.loads(data)
    assert [p["n"] for p in content["points"]] == [p.number for p in points]
    assert content["points"][0]["values"] == {"optim.lr": "0.001", "model": "b"}
    assert content["points"][0]["metrics"]["loss"] == 3.0 + 1 / 400
    assert content["points"][1]["metrics"]["loss"] is None
    assert content["points"][1]["reason"].startswith("</script>")
    for point in content["points"]:
        assert len(point["loss"]) <= MOST_DRAWN
        assert [s for s, _ in point["loss"]][-1:] == ([] if point["n"] == 3 else [400])


def dom(folder: Path) -> str:
    """The page as a browser without a network has drawn it."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    profile = f"--user-data-dir={folder / 'profile'}"
    page = f"file://{folder}/index.html"
    done = subprocess.run(
        [*command, profile, "--virtual-time-budget=2000", "--dump-dom", page], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("count", [1, 12, 100])
def test_a_browser_shows_every_point(tmp_path, count):
    made(tmp_path, count)
    drawn = dom(tmp_path)
    table = drawn[drawn.index("<tbody>") : drawn.index("</tbody>")]
    rows = [int(n) for n in re.findall(r'<tr data-n="(\d+)"', table)]
    assert sorted(rows) == list(range(1, count + 1))
    assert rows[0] == 1  # the least loss
    assert sorted(int(n) for n in re.findall(r'class="point coordinate[^"]*" data-n="(\d+)"', drawn)) == sorted(rows)
    curves = [int(n) for n in re.findall(r'class="point curve" data-n="(\d+)"', drawn)]
    assert sorted(curves) == [n for n in sorted(rows) if n != 3]
    assert "<title>a-sweep · sweep</title>" in drawn
    assert "NaN" not in re.sub(r"<script.*?</script>", "", drawn, flags=re.DOTALL)
    for key in ("optim.lr", "model", "loss"):
        assert f">{key}" in drawn
    if count > 2:
        assert "failed (0)" in drawn
        assert "&lt;/script&gt;" in drawn


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_sweep_without_a_number_yet_is_shown(tmp_path):
    text, _ = made(tmp_path, 3, running=True)
    empty = re.sub(r'"loss": \[\[.*?\]\]', '"loss": []', text)
    (tmp_path / "index.html").write_text(re.sub(r'"metrics": \{.*?\}', '"metrics": {"loss": null}', empty))
    drawn = dom(tmp_path)
    assert "no numbers yet" in drawn
    assert len(re.findall(r'<tr data-n="', drawn)) == 3


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_one_key_and_its_result_are_a_pair_of_axes_that_every_line_spans(tmp_path):
    """Compared by a number that no point has: by the loss instead, and the point without one ends at `no result`."""
    text, _ = made(tmp_path, 4, keys=("optim.lr",), metric="valid_loss")
    assert json.loads(Found(text).scripts[0])["metric"] == "loss"
    drawn = dom(tmp_path)
    note = "no point has a value of sweep.metric=valid_loss: compared by loss instead"
    assert f'<div class="note" id="note">{note}</div>' in drawn
    lines = re.findall(r'<path d="M([0-9.]+),[^"]* ([0-9.]+),[0-9.]+" class="point coordinate([^"]*)"', drawn)
    assert sorted(kind for _, _, kind in lines) == ["", "", " none", " none"]  # the second is nan, the third not begun
    [(begin, end)] = {(float(begin), float(end)) for begin, end, _ in lines}
    assert end - begin > 400
    assert ">no result<" in drawn
