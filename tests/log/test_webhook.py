"""A webhook gets what it asked for, and can neither stop, delay nor learn more than that."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megaspec.core.errors import RecipeError
from megaspec.log.background import BackgroundSink
from megaspec.log.events import AlertRaised, HardwareSuspected, RolledBack, RunEnded, SlowRank
from megaspec.log.spec import WebhookSpec
from megaspec.log.webhook import TRIES, WebhookSink, address_of, tell_end
from tests.log.events_for_tests import step_done

CANARY = "T0KEN-that-nobody-may-see"
NO_ADDRESSES = (CANARY, f"file:///etc/{CANARY}", f"ftp://x/{CANARY}", f"https:///{CANARY}", f"https://x/\n{CANARY}")
ALERT = AlertRaised(
    step=40, alert=0, metric="loss", comparison="above", limit=8.0, value=float("inf"), for_steps=20,
    severity="critical", action="webhook",
)  # fmt: skip


@contextmanager
def server(answers: list[int], *, seconds: float = 0.0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers with these codes, the last one for ever. -> its address with a secret in it, and what it was sent."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append({"path": self.path, "type": self.headers["Content-Type"], "body": body})
            time.sleep(seconds)
            code = answers[min(len(got), len(answers)) - 1]
            self.send_response(code)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/hook/{CANARY}", got
        http.shutdown()


def sink_to(address: str, tmp_path, **settings: Any) -> WebhookSink:
    return WebhookSink(WebhookSpec(**settings), tmp_path, name="mine", address=address, pause=0.01)


def test_what_is_sent_is_what_is_documented(tmp_path):
    with server([200]) as (address, got):
        sink = sink_to(address, tmp_path)
        sink(step_done(1))  # nobody asked for steps
        sink(ALERT)
        sink(RunEnded(step=50, how="done"))
    alert, end = [one["body"] for one in got]
    assert got[0]["type"] == "application/json"
    assert alert["text"] == "megaspec mine: step 40, critical: loss=inf was above 8 for 20 in a row (log.alerts.0)"
    assert alert["value"] == "inf"
    assert {
        "version": 1,
        "run": "mine",
        "run_dir": str(tmp_path),
        "event": "alert",
        "step": 40,
    }.items() <= alert.items()
    assert (end["event"], end["how"], end["text"]) == ("end", "done", "megaspec mine: ended after step 50: done")


def test_who_is_suspected_and_what_a_run_goes_back_for_is_said_unasked(tmp_path):
    """Who is on call reads one line: it names the machine."""
    suspected = HardwareSuspected(
        step=7, what="replicas", ranks=[1, 3], hosts=["node1", "node2"], devices=["cuda:1", "cuda:0"],
        tensors=["a", "b"], is_certain=False, agreed_step=5,
    )  # fmt: skip
    back = RolledBack(
        step=8, from_step=11, first_left_out=9, last_left_out=11, first_sample=32, samples=12, kind="nonfinite",
        loss=float("nan"), grad_norm=1.0, where="loss of rank 1 of 2", rollbacks=1, allowed=2,
    )  # fmt: skip
    with server([200]) as (address, got):
        sink = sink_to(address, tmp_path)
        sink(suspected)
        sink(back)
    texts = [one["body"]["text"].removeprefix("megaspec mine: ") for one in got]
    assert texts[0] == (
        "step 7, hardware is suspected: rank 1 on node1, cuda:1; rank 3 on node2, cuda:0; which of them is wrong "
        "can't be told (replicas)"
    )
    assert "back to step 8, rollback 1 of 2" in texts[1]


def test_an_end_that_rank_0_could_not_tell(tmp_path):
    event = RunEnded(step=7, how="exit code 74")
    with server([200]) as (address, got):
        assert tell_end(WebhookSpec(), tmp_path, name="mine", address=address, event=event) == ""
    assert [one["body"]["text"] for one in got] == ["megaspec mine: ended after step 7: exit code 74"]
    with server([404]) as (address, _):
        why = tell_end(WebhookSpec(), tmp_path, name="mine", address=address, event=event)
    assert "it answered 404" in why
    with server([200], seconds=2.0) as (address, _):
        began = time.monotonic()
        why = tell_end(WebhookSpec(timeout_seconds=0.3), tmp_path, name="mine", address=address, event=event)
        assert time.monotonic() - began < 1.5
    assert "did not end in time" in why


def test_an_alert_that_is_for_the_log_alone_is_not_sent(tmp_path):
    with server([200]) as (address, got):
        sink_to(address, tmp_path)(AlertRaised(**vars(ALERT) | {"action": "log"}))
        sink_to(address, tmp_path, events=("end",))(ALERT)
    assert got == []


def test_it_is_tried_again_where_that_may_help(tmp_path):
    with server([503, 429, 204]) as (address, got):
        sink_to(address, tmp_path)(ALERT)
    assert len(got) == 3


@pytest.mark.parametrize(("code", "tries"), [(500, TRIES), (404, 1), (302, 1)])
def test_an_address_that_does_not_take_it_is_told_without_its_name(tmp_path, code, tries):
    """A redirect, too: it would carry the run's numbers to another place."""
    with server([code]) as (address, got), pytest.raises(RuntimeError, match=f"it answered {code}") as told:
        sink_to(address, tmp_path)(ALERT)
    assert len(got) == tries
    assert CANARY not in str(told.value)


@pytest.mark.parametrize(
    "address",
    [f"http://127.0.0.1:9/{CANARY}", f"http://no-such-host.invalid/{CANARY}", f"http://127.0.0.1:1/\n{CANARY}"],
)
def test_an_address_that_cannot_be_reached_is_told_without_its_name(tmp_path, address):
    with pytest.raises(RuntimeError, match="an event was not sent: ") as told:
        sink_to(address, tmp_path)(ALERT)
    assert CANARY not in str(told.value)
    assert "invalid" not in str(told.value)


def test_one_that_hangs_keeps_nobody_waiting(tmp_path, capfd):
    slow = SlowRank(step=9, rank=3, host="n", device="cpu", phase="data", seconds=1.0, usual_seconds=0.1, share=0.5)
    with server([200], seconds=1.0) as (address, _):
        sink = BackgroundSink(lambda: sink_to(address, tmp_path, timeout_seconds=0.2), close_seconds=lambda: 0.5)
        began = time.monotonic()
        for _ in range(1000):
            sink(slow)
        assert time.monotonic() - began < 0.5
        with pytest.raises(RuntimeError, match="did not end in time"):
            sink.close()
        assert time.monotonic() - began < 3


def test_the_variable_is_looked_at_before_anything_starts():
    webhook = WebhookSpec(url_variable="MY_HOOK")
    with pytest.raises(RecipeError, match="MY_HOOK names an environment variable that is not set"):
        address_of(webhook, {})
    for value in NO_ADDRESSES:
        with pytest.raises(RecipeError, match="holds no address") as refused:
            address_of(webhook, {"MY_HOOK": value})
        assert CANARY not in str(refused.value)
    assert address_of(webhook, {"MY_HOOK": " https://example.com/x\n"}) == "https://example.com/x"
    with pytest.raises(ValueError, match="url_variable"):
        WebhookSpec(url_variable=f"https://example.com/{CANARY}")
