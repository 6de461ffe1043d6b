"""What a worker process does with its standard input and output: parts come in, events go out, a JSON line each."""

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

from megaspec.core.errors import DataError, WriteError
from megaspec.data.inputs import InputPart
from megaspec.data.lifeline import end_with_parent

Report = Callable[[dict[str, Any]], None]
"""Sends an event to the parent."""
Work = Callable[[InputPart], None]
"""Does a part. Raises DataError, WriteError, which the parent is told."""


def serve_parts(begin: Callable[[dict[str, Any], Report], Work]) -> int:
    """Serve parts until standard input ends. -> exit code.

    `begin`: takes the first line, the settings, and makes what does the parts. Its DataError is told like one of a
    part's.
    """
    end_with_parent(sys.argv)
    # Ctrl-C reaches the whole group; the parent decides what happens
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    try:
        work = begin(settings, _report)
        for line in sys.stdin:
            part = InputPart.from_json(json.loads(line))
            work(part)
            _report({"done": part.number})
    except DataError as error:
        _report({"data_error": str(error)})
        return error.exit_code
    except WriteError as error:
        _report({"write_error": str(error)})
        return error.exit_code
    return 0


def _report(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
