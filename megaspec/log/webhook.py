"""Tells an address of events, an HTTP POST each. Torch-free.

    {"version": 1, "run": "mine", "run_dir": "runs/mine", "event": "alert", "time": 1764079200.5, "text": "...",
     "step": 40, ...}

`text` is one line, which chats show; the other keys are those of the event's line in metrics.jsonl, with texts for
numbers that are not finite. The address is a secret for most services: it comes from the environment, and no message of
ours holds it or a part of it.
"""

import http.client
import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megaspec.core.errors import RecipeError, printable
from megaspec.log.alerts import alert_text
from megaspec.log.background import BackgroundSink
from megaspec.log.console import rolled_back_text, skipped_text
from megaspec.log.events import (
    NAMES,
    AlertRaised,
    CheckpointSaved,
    EvalDone,
    Event,
    HardwareSuspected,
    RolledBack,
    RunEnded,
    RunStarted,
    SlowRank,
    UpdateSkipped,
)
from megaspec.log.jsonl import plain
from megaspec.log.spec import WebhookSpec

VERSION = 1
TRIES = 3
_FIRST_PAUSE = 1.0
_MOST_ANSWER = 1 << 16
_MOST_NAMED = 8


def address_of(webhook: WebhookSpec, environ: Mapping[str, str]) -> str:
    """RecipeError: the variable is not set, or holds no http address; what it holds is not shown."""
    name = webhook.url_variable
    key = f"log.webhook.url_variable={name}"
    address = environ.get(name, "").strip()
    if not address:
        raise RecipeError(
            f"{key} names an environment variable that is not set; export {name}=https://..., or log.webhook=null"
        )
    is_plain = address.isprintable() and " " not in address
    if not is_plain or urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        raise RecipeError(f"{key} names a variable that holds no address; it has to begin with https:// or http://")
    return address


class WebhookSink:
    """Sends events, in the thread that calls it; `BackgroundSink` gives it one of its own. RuntimeError: one could not
    be sent."""

    def __init__(self, webhook: WebhookSpec, run_dir: Path, *, name: str, address: str, pause: float = _FIRST_PAUSE):
        self._events = frozenset(webhook.events)
        self._timeout_seconds = webhook.timeout_seconds
        self._run = {"run": name, "run_dir": str(run_dir)}
        self._address = address
        self._pause = pause
        # no proxy of the environment, no file: and no redirect to another place
        self._opener = urllib.request.OpenerDirector()
        for handler in (urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
            self._opener.add_handler(handler)

    def __call__(self, event: Event) -> None:
        kind = NAMES[type(event)]
        if kind not in self._events or not _is_wanted(event):
            return
        body = {"version": VERSION, **self._run, "event": kind, "time": time.time(), "text": self._text(event)}
        body |= plain(asdict(event))
        self._send(json.dumps(body).encode())

    def close(self) -> None:
        """Nothing is kept open."""

    def _text(self, event: Event) -> str:
        return printable(f"megaspec {self._run['run']}: {event_text(event)}")

    def _send(self, data: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "megaspec"}
        request = urllib.request.Request(self._address, data=data, headers=headers, method="POST")
        why = ""
        for number in range(TRIES):
            if number:
                time.sleep(self._pause * 2 ** (number - 1))
            try:
                with self._opener.open(request, timeout=self._timeout_seconds) as answer:
                    answer.read(_MOST_ANSWER)
                    if 200 <= answer.status < 300:
                        return
                    why = f"it answered {answer.status}"
                    if 300 <= answer.status < 500 and answer.status not in (408, 429):
                        break  # another try would be answered alike
            except (OSError, ValueError, http.client.HTTPException) as error:
                # its text may hold the address
                why = _kind(error)
        raise RuntimeError(f"an event was not sent: {why}")


def tell_end(webhook: WebhookSpec, run_dir: Path, *, name: str, address: str, event: RunEnded) -> str:
    """Tells of an end in place of rank 0, which was killed, or hung, and told nothing. Takes `timeout_seconds` at most.
    -> why it was not sent; "" where it was."""

    def open_sink() -> WebhookSink:
        return WebhookSink(webhook, run_dir, name=name, address=address)

    sink = BackgroundSink(open_sink, close_seconds=lambda: webhook.timeout_seconds)
    try:
        sink(event)
        sink.close()
    except RuntimeError as error:
        return str(error)
    return ""


def _kind(error: Exception) -> str:
    reason: Any = getattr(error, "reason", error)
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__


def _is_wanted(event: Event) -> bool:
    return not isinstance(event, AlertRaised) or event.action in ("webhook", "stop")


def event_text(event: Event) -> str:
    """One line."""
    match event:
        case AlertRaised():
            return f"step {event.step}, {alert_text(event)}"
        case SlowRank():
            lost = f"{event.seconds:.3g} s a step in {event.phase}"
            return f"step {event.step}, rank {event.rank} on {event.host} is slow: it loses {lost}"
        case HardwareSuspected():
            return f"step {event.step}, hardware is suspected: {_suspects_text(event)}"
        case UpdateSkipped():
            return skipped_text(event)
        case RolledBack():
            return rolled_back_text(event)
        case EvalDone():
            return f"step {event.step}, evaluation loss {event.loss:.4f}"
        case CheckpointSaved():
            return f"step {event.step}, saved"
        case RunStarted():
            return f"started at step {event.step} of {event.steps}, attempt {event.attempt}"
        case RunEnded():
            return f"ended after step {event.step}: {event.how}"
        case _:
            return NAMES[type(event)]


def _suspects_text(event: HardwareSuspected) -> str:
    """Ranks with their machines and devices."""
    named = []
    for rank, host, device in zip(event.ranks, event.hosts, event.devices, strict=True):
        named.append(f"rank {rank} on {host}, {device}")
    text = "; ".join(named[:_MOST_NAMED])
    if len(named) > _MOST_NAMED:
        text += f"; and {len(named) - _MOST_NAMED} more"
    if not event.is_certain:
        text += "; which of them is wrong can't be told"
    return f"{text} ({event.what})"
