"""Texts of which a part can't be known: marks around what stands for it, and what such a text is worth."""

import re

# Private characters, which are taken out of whatever is read. `UNKNOWN $NAME END`: what only the machine knows.
UNKNOWN = "\ue000"
MISSING = "\ue001"
"""Around an argument that is not given: known to be empty, and shown as `$1`."""
PATTERN = "\ue003"
"""Around a word that becomes names of files or several words: `*.bin`, `{a,b}`, `~user`."""
END = "\ue002"
MARKS = dict.fromkeys(map(ord, (UNKNOWN, MISSING, PATTERN, END)))
BEGINS = UNKNOWN + MISSING + PATTERN
MARKED = re.compile(f"[{BEGINS}][^{END}]*{END}")
_MISSING_ARGUMENT = re.compile(f"{MISSING}[^{END}]*{END}")


def unknown(written: str) -> str:
    """What can't be known, as it is written."""
    return f"{UNKNOWN}{shown(written)}{END}"


def missing(written: str) -> str:
    """An argument that is not given."""
    return f"{MISSING}{shown(written)}{END}"


def pattern(written: str) -> str:
    """A word that becomes what the machine's files, users or several words say."""
    return f"{PATTERN}{shown(written)}{END}"


def shown(text: str) -> str:
    """A text with what can't be known as it is written."""
    return text.translate(MARKS)


def known(text: str) -> str | None:
    """A text with arguments that are not given as nothing; None where a part of it can't be known."""
    if UNKNOWN in text or PATTERN in text:
        return None
    return _MISSING_ARGUMENT.sub("", text)


def is_marked(text: str) -> bool:
    """True where a part of a text can't be known or is not given."""
    return END in text
