"""Every flag of Megatron's pretrain_gpt.py, and those of its older releases and forks, by each of their names."""

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache

from megaspec.core.problems import one_of
from megaspec.megatron import dead, forks, idle, lost, older, translated
from megaspec.megatron.flag import Flag

FLAGS: tuple[Flag, ...] = tuple(
    flag for table in (translated, idle, lost, dead) for group in table.GROUPS for flag in group.flags()
)
"""Of pretrain_gpt.py."""
OTHERS: tuple[Flag, ...] = tuple(flag for table in (older, forks) for group in table.GROUPS for flag in group.flags())
"""Of older releases and of forks."""
BY_NAME: dict[str, Flag] = {name: flag for flag in (*FLAGS, *OTHERS) for name in flag.names}

_NEGATIONS = ("no", "not", "non", "un", "never", "dont", "off", "skip", "ignore", "exclude", "omit")
# In one word with what they deny: --noswiglu.
_ATTACHED = ("non", "no")
# Long enough to be known when they are misspelt.
_LONG_NEGATIONS = ("disable", "without", "untie")
_NEAR = 0.8
# Of whole names; below it they have little more than endings such as -size in common.
_NEAR_NAMES = 0.74
_MOST = 3
# Of a name whose words a flag has, so that --use is not --use-mup and --hidden is --hidden-dropout.
_SHORTEST = 4
_MUCH_LONGER = 2.4
_WORDS = frozenset(word for flag in FLAGS for name in flag.names for word in name.removeprefix("--").split("-"))


def hint(name: str) -> str:
    """`did you mean --a?`, with the nearest flags of pretrain_gpt.py; "" when none is near.

    A flag that says the opposite is never among them: --no-x for a misspelt --x, or the reverse.
    """
    written = name.removeprefix("--").replace("_", "-").lower()
    denies = _denies(written)
    options: list[str] = []
    for flag in FLAGS:
        options += [one.removeprefix("--") for one in flag.names if _denies(one) == denies]
    if written in options:
        near = [written]
    else:
        near = get_close_matches(written, options, n=_MOST, cutoff=_NEAR_NAMES)
        near = list(dict.fromkeys([*near, *_with_its_words(written, options)]))[:_MOST]
    return f"did you mean {one_of([f'--{one}' for one in near])}?" if near else ""


def _with_its_words(written: str, options: Sequence[str]) -> list[str]:
    """Flags that have every word of a name, or one that begins so, and are not much longer: shortest first."""
    found: list[str] = []
    if len(written) < _SHORTEST:
        return found
    for option in options:
        words = option.split("-")
        has_all = all(any(word.startswith(part) for word in words) for part in written.split("-"))
        if has_all and len(option) <= _MUCH_LONGER * len(written):
            found.append(option)
    return sorted(found, key=len)[:_MOST]


def _denies(name: str) -> bool:
    """Whether a flag switches something off: --no-x, --disable-x, --a-no-x, and what is meant by --disble-x."""
    words = name.removeprefix("--").replace("_", "-").lower().split("-")
    negations = [word for word in words if _is_negation(word)]
    return len(negations) % 2 == 1


@cache
def _is_negation(word: str) -> bool:
    if word in _NEGATIONS or get_close_matches(word, _LONG_NEGATIONS, n=1, cutoff=_NEAR):
        return True
    return any(word.startswith(one) and word.removeprefix(one) in _WORDS for one in _ATTACHED)
