"""Where texts go that are written: to the terminal as they grow, or a JSON line each."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from megaspec.core.errors import printable
from megaspec.data.files import write_error
from megaspec.runtime.generate import End, Written

KEYS = ("prompt", "text", "end", "prompt_tokens", "tokens", "sample")
"""Of a line, beside what the line of the prompt holds."""
_SHOWN = "\n\t"
_CUT: dict[End, str] = {"max_seq_len": "the text ends where the model's positions do: model.max_seq_len={}"}


class Output(Protocol):
    """What the writing rank tells of texts."""

    def piece(self, number: int, text: str) -> None:
        """What goes on text `number`."""

    def done(self, written: Written) -> None:
        """A text, in the order of the prompts."""


class OnTerminal:
    """Prompts with what goes on from them, a line end behind each and an empty line between them; the first one that
    is not done as it grows."""

    def __init__(self, prompts: Sequence[str], *, max_seq_len: int):
        self._prompts = prompts
        self._max_seq_len = max_seq_len
        self._pieces: dict[int, list[str]] = {}
        self._shown = 0
        """Texts that were shown to their ends."""
        self._is_begun = False

    def piece(self, number: int, text: str) -> None:
        if number > self._shown:
            self._pieces.setdefault(number, []).append(text)
            return
        self._begin()
        self._print(text)

    def done(self, written: Written) -> None:
        self._begin()
        for piece in self._pieces.pop(written.number, []):
            self._print(piece)
        self._print("\n")
        if written.end in _CUT:
            print(printable(f"megaspec: {_CUT[written.end].format(self._max_seq_len)}"), file=sys.stderr)
        self._shown += 1
        self._is_begun = False

    def _begin(self) -> None:
        if self._is_begun:
            return
        if self._shown:
            self._print("\n")
        self._print(self._prompts[self._shown])
        self._is_begun = True

    def _print(self, text: str) -> None:
        # a lone surrogate can't be, but whatever else a terminal would act on
        print(printable(text, keep=_SHOWN), end="", flush=True)


class AsLines:
    """A JSON object a line: what stood in the prompt's line, and KEYS."""

    def __init__(self, prompts: Sequence[Mapping[str, Any]], counts: Sequence[int], file: TextIO):
        """`prompts`: of each text, with its `prompt`; `counts`: tokens of the prompts."""
        self._prompts = prompts
        self._counts = counts
        self._file = file

    def piece(self, number: int, text: str) -> None:
        """A line is whole or not there."""

    def done(self, written: Written) -> None:
        line = dict(self._prompts[written.number]) | {
            "text": written.text,
            "end": written.end,
            "prompt_tokens": self._counts[written.number],
            "tokens": len(written.ids),
        }
        print(json.dumps(line), file=self._file, flush=True)


def open_lines(path: Path) -> TextIO:
    """A file that was not there. WriteError."""
    try:
        return open(path, "x", encoding="utf-8")
    except OSError as error:
        raise write_error(path, error) from None
