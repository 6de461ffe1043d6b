"""Every flag of Megatron's pretrain_gpt.py, and those of its older releases and forks, by each of their names."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from types import ModuleType

from megaspec.core.problems import one_of
from megaspec.megatron import dead, forks, idle, lost, older, translated
from megaspec.megatron.flag import Flag


def _flags_of(*tables: ModuleType) -> tuple[Flag, ...]:
    """The flags of all groups of these files."""
    flags: list[Flag] = []
    for table in tables:
        for group in table.GROUPS:
            flags += group.flags()
    return tuple(flags)


def _by_name(flags: Iterable[Flag]) -> dict[str, Flag]:
    """Each of a flag's names -> the flag."""
    named = {}
    for flag in flags:
        named |= dict.fromkeys(flag.names, flag)
    return named


def _words_of(flags: Iterable[Flag]) -> frozenset[str]:
    """The words between the dashes of their names."""
    words: set[str] = set()
    for flag in flags:
        for name in flag.names:
            words.update(name.removeprefix("--").split("-"))
    return frozenset(words)


FLAGS = _flags_of(translated, idle, lost, dead)
"""Of pretrain_gpt.py."""
OTHERS = _flags_of(older, forks)
"""Of older releases and of forks."""
BY_NAME = _by_name([*FLAGS, *OTHERS])

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
_WORDS = _words_of(FLAGS)


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
    if not near:
        return ""
    return f"did you mean {one_of([f'--{one}' for one in near])}?"


def _with_its_words(written: str, options: Sequence[str]) -> list[str]:
    """Flags that have every word of a name, or one that begins so, and are not much longer: shortest first."""
    if len(written) < _SHORTEST:
        return []
    found: list[str] = []
    for option in options:
        # with a dash in front of the first word, too, a word begins behind each dash
        has_all = all(f"-{part}" in f"-{option}" for part in written.split("-"))
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
