"""Where tables and sentences are printed. What a recipe or a file holds is shown there, and never steers it."""

from typing import Any

from rich import markup
from rich.console import Console
from rich.text import Text

from megaspec.core.errors import printable


def escape(text: str) -> str:
    """A text from a recipe, a file or the command line, as a part of what is printed with rich's markup: one line."""
    return markup.escape(printable(text))


class Terminal(Console):
    """A console for all that commands print. It leaves a broken pipe to whoever called."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False):
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False, emoji=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """Every str that is printed or stands in a table comes by here before its width is taken."""
        return super().render_str(printable(text, keep="\n"), **how)

    def on_broken_pipe(self) -> None:
        """rich would exit with 1."""
        raise BrokenPipeError


def terminal() -> Terminal:
    """Where commands print tables."""
    return Terminal()
