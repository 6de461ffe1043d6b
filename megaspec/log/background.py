"""A sink in a thread of its own: one that hangs, fails or is slow never keeps a training waiting. Torch-free."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from megaspec.log.events import Event

# Events that wait for a sink; what comes while so many wait is dropped. Those of a step have some 400 bytes.
MOST_WAITING = 10_000
# How long the end of a run waits for what has not been taken yet.
CLOSE_SECONDS = 60.0
# Between two tries to open a sink that could not be opened.
OPEN_AGAIN_SECONDS = 30.0


class _Sink(Protocol):
    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


class BackgroundSink:
    """Opens a sink, hands it events and closes it, all in one thread.

    Taking an event costs the caller a lock. An error of the sink is raised here at the next event, as RuntimeError;
    the sink gets the following events all the same. One that can't be opened is opened again later, and its events
    wait. `close_seconds`: asked when it is closed how long it may wait for the thread.
    """

    def __init__(
        self,
        open_sink: Callable[[], _Sink],
        *,
        close_seconds: Callable[[], float] = lambda: CLOSE_SECONDS,
    ):
        self._open_sink = open_sink
        self._close_seconds = close_seconds
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_closed = False
        """The sink has been closed, or could not be opened by the end."""
        self._error: str | None = None
        """What went wrong and has not been raised yet."""
        self._last_error = ""
        self._n_lost = 0
        # a daemon: a thread that hangs in a service's package must not keep the process
        self._thread = threading.Thread(target=self._run, name="sink", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                self._n_lost += 1
                self._fails(f"it does not keep up: {MOST_WAITING:,} events wait, further ones are dropped")
            else:
                self._waiting.append(event)
                self._changed.notify()
            error = self._error
            self._error = None
        if error is not None:
            raise RuntimeError(error)

    def close(self) -> None:
        """Waits for what has not been taken. RuntimeError: some of it never was."""
        end = time.monotonic() + self._close_seconds()
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            self._changed.wait_for(lambda: self._is_closed, timeout=max(0.0, end - time.monotonic()))
            n_lost = self._n_lost + len(self._waiting)
            if not self._is_closed:
                raise RuntimeError(self._told(f"it did not end in time; {_events(n_lost)} not taken"))
            if n_lost:
                raise RuntimeError(self._told(f"{_events(n_lost)} not taken"))
            if self._error is not None:
                raise RuntimeError(self._error)

    def _told(self, text: str) -> str:
        if self._last_error:
            text += f" (last error: {self._last_error})"
        return text

    def _fails(self, error: str) -> None:
        self._error = error
        self._last_error = error

    def _run(self) -> None:
        sink = self._opened()
        while sink is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    break
                # stays in the queue until it is taken, so that an end before counts it
                event = self._waiting[0]
            self._tries(sink, event)
            with self._changed:
                self._waiting.popleft()
        if sink is not None:
            self._closes(sink)
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _opened(self) -> _Sink | None:
        """None: it could not be opened before the end."""
        while True:
            try:
                return self._open_sink()
            except Exception as error:
                with self._changed:
                    self._fails(_in_words(error))
                    self._changed.wait_for(lambda: self._is_closing, timeout=OPEN_AGAIN_SECONDS)
                    if self._is_closing:
                        return None

    def _tries(self, sink: _Sink, event: Event) -> None:
        # whatever somebody else's package raises costs its curve, never the run
        try:
            sink(event)
        except Exception as error:
            with self._changed:
                self._n_lost += 1
                self._fails(_in_words(error))

    def _closes(self, sink: _Sink) -> None:
        try:
            sink.close()
        except Exception as error:
            with self._changed:
                self._fails(_in_words(error))


def _in_words(error: Exception) -> str:
    """The first line of an error: services answer with pages."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _events(count: int) -> str:
    if count == 1:
        return "1 event was"
    return f"{count:,} events were"
