"""Every flag of Megatron's pretrain_gpt.py, and those of its older releases and forks, by each of their names."""

import re
from difflib import get_close_matches

from megaspec.core.problems import did_you_mean
from megaspec.megatron import dead, forks, idle, lost, older, translated
from megaspec.megatron.flag import Flag

FLAGS: tuple[Flag, ...] = tuple(
    flag for table in (translated, idle, lost, dead) for group in table.GROUPS for flag in group.flags()
)
"""Of pretrain_gpt.py."""
OTHERS: tuple[Flag, ...] = tuple(flag for table in (older, forks) for group in table.GROUPS for flag in group.flags())
"""Of older releases and of forks."""
BY_NAME: dict[str, Flag] = {name: flag for flag in (*FLAGS, *OTHERS) for name in flag.names}

_NEGATIONS = ("no", "not")
# Long enough to be known when they are misspelt.
_LONG_NEGATIONS = ("disable", "without", "untie")
_NEAR = 0.8


def hint(name: str) -> str:
    """`did you mean --a?`, with the nearest flags of pretrain_gpt.py; "" when none is near.

    A flag that says the opposite is never among them: --no-x for a misspelt --x, or the reverse.
    """
    denies = _denies(name)
    options = [n.removeprefix("--") for flag in FLAGS for n in flag.names if _denies(n) == denies]
    return _with_dashes(did_you_mean(name.removeprefix("--").replace("_", "-"), options))


def _denies(name: str) -> bool:
    """Whether a flag switches something off: --no-x, --disable-x, --a-no-x, and what is meant by --disble-x."""
    words = name.removeprefix("--").replace("_", "-").lower().split("-")
    negations = [w for w in words if w in _NEGATIONS or get_close_matches(w, _LONG_NEGATIONS, n=1, cutoff=_NEAR)]
    return len(negations) % 2 == 1


def _with_dashes(text: str) -> str:
    return re.sub(r"(mean|,|or) (?=\w)", r"\1 --", text)
