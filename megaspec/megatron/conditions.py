"""What a shell's `[ ]` says about operands of which some can't be known. True, False, or None: it can't be known."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# More than any condition that is written by hand; joined ones are weighed inside each other.
_MOST_OPERANDS = 64
_INTEGER = re.compile(r"[ \t\n]*[-+]?[0-9]{1,18}[ \t\n]*")
_EXTENDED = re.compile(r"[?*+@!]\(")
# What a pattern is compared with, in characters times characters: a second's work.
_MOST_COMPARISONS = 1 << 22
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def negation(status: bool | None) -> bool | None:
    """`!`."""
    return None if status is None else not status


def both(left: bool | None, right: bool | None) -> bool | None:
    """`&&`: one that is False decides."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def either(left: bool | None, right: bool | None) -> bool | None:
    """`||`: one that is True decides."""
    if left is True or right is True:
        return True
    return None if left is None or right is None else False


def decide(operands: Sequence[str | None]) -> bool | None:
    """Tests of text and of whole numbers, by the number of operands as POSIX has it; an operand of None can't be known.

    Files are never looked at: None.
    """
    if len(operands) > _MOST_OPERANDS:
        return None
    if len(operands) > 3 and not _is_readable(operands):
        return None
    if len(operands) == 4 and operands[0] == "!":
        return negation(decide(operands[1:]))
    for joint, join in (("-o", either), ("-a", both)):
        if len(operands) > 3 and joint in operands[1:-1]:
            place = operands.index(joint, 1)
            return join(decide(operands[:place]), decide(operands[place + 1 :]))
    if len(operands) == 3 and operands[1] is not None:
        return _compared(operands[0], operands[1], operands[2])
    if operands and operands[0] == "!" and len(operands) > 1:
        return negation(decide(operands[1:]))
    if len(operands) == 2 and operands[0] in ("-z", "-n"):
        is_empty = None if operands[1] is None else operands[1] == ""
        return is_empty if operands[0] == "-z" else negation(is_empty)
    if len(operands) == 1:
        return None if operands[0] is None else operands[0] != ""
    return None if operands else False


def _is_readable(operands: Sequence[str | None]) -> bool:
    """True where `-a`, `-o` and `!` join tests; others are errors, in spite of a part that would decide."""
    term: list[str] = []
    for operand in (*operands, "-a"):
        if operand is None or operand in ("(", ")"):
            return False
        if operand not in ("-a", "-o"):
            term.append(operand)
            continue
        while len(term) > 1 and term[0] == "!":
            term = term[1:]
        is_binary = len(term) == 3 and (term[1] in ("=", "==", "!=") or term[1] in COMPARISONS)
        is_unary = len(term) == 2 and re.fullmatch(r"-[a-zA-Z]", term[0]) is not None
        if len(term) != 1 and not is_binary and not is_unary:
            return False
        term = []
    return True


def _compared(left: str | None, comparison: str, right: str | None) -> bool | None:
    if comparison in ("-a", "-o"):
        join = both if comparison == "-a" else either
        return join(decide([left]), decide([right]))
    if left == "!" and comparison in ("-z", "-n"):
        return negation(decide([comparison, right]))
    if left is None or right is None:
        return None
    if comparison in ("=", "=="):
        return left == right
    if comparison == "!=":
        return left != right
    if not _INTEGER.fullmatch(left) or not _INTEGER.fullmatch(right):
        return None
    compare = COMPARISONS.get(comparison)
    return None if compare is None else compare(int(left), int(right))


def matches(text: str, pieces: Sequence[tuple[str, bool]]) -> bool | None:
    """Whether a text is one that a pattern of `case` or `[[ == ]]` stands for; None: the pattern is none that is read.

    `pieces`: of the pattern, with True where `* ? [ ]` in them are read, and False for those in quotes.
    """
    signs = _signs(pieces)
    if signs is None or len(text) * len(signs) > _MOST_COMPARISONS:
        return None
    # a character is several bytes in some locales
    if not text.isascii() and any(sign is not None and sign.is_set for sign in signs):
        return None
    at, n = 0, 0
    # where the last `*` stands, and up to where it reaches so far
    star, reached = -1, 0
    while at < len(text):
        sign = signs[n] if n < len(signs) else False
        if sign is None:
            star = n
            reached = at
            n += 1
        elif sign and sign.takes(text[at]):
            at += 1
            n += 1
        elif star >= 0:
            reached += 1
            at = reached
            n = star + 1
        else:
            return False
    return all(sign is None for sign in signs[n:])


@dataclass(frozen=True)
class _Sign:
    """What one character of a text may be."""

    characters: str
    is_set: bool
    """False for one character that stands for itself."""
    is_negated: bool = False

    def takes(self, character: str) -> bool:
        return (character in self.characters) != self.is_negated


def _signs(pieces: Sequence[tuple[str, bool]]) -> list[_Sign | None] | None:
    """A pattern's signs, None among them for `*`; None for a pattern that is not read here."""
    signs: list[_Sign | None] = []
    for number, (piece, is_read) in enumerate(pieces):
        if not is_read:
            signs += [_Sign(character, is_set=False) for character in piece]
            continue
        # backslashes, patterns in brackets, and brackets that close in another piece
        if "\\" in piece or _EXTENDED.search(piece):
            return None
        is_last = number == len(pieces) - 1
        at = 0
        while at < len(piece):
            character = piece[at]
            at += 1
            if character == "*":
                signs.append(None)
            elif character == "?":
                signs.append(_Sign("", is_set=True, is_negated=True))
            elif character == "[":
                end = piece.find("]", at + (2 if piece[at : at + 1] in ("!", "^") else 1))
                if end < 0 and is_last:
                    signs.append(_Sign("[", is_set=False))
                    continue
                one = None if end < 0 else _set(piece[at:end])
                if one is None:
                    return None
                signs.append(one)
                at = end + 1
            else:
                signs.append(_Sign(character, is_set=False))
    return signs


def _set(written: str) -> _Sign | None:
    """What stands in `[ ]`: characters and ranges of digits. None: letters' order is the machine's language's."""
    is_negated = written[0] in ("!", "^")
    characters = written[1:] if is_negated else written
    if "[" in characters:
        return None
    expanded: list[str] = []
    at = 0
    while at < len(characters):
        first = characters[at]
        if characters[at + 1 : at + 2] == "-" and at + 2 < len(characters):
            last = characters[at + 2]
            if not (first + last).isascii() or not first.isdecimal() or not last.isdecimal():
                return None
            expanded += [chr(code) for code in range(ord(first), ord(last) + 1)]
            at += 3
        else:
            expanded.append(first)
            at += 1
    return _Sign("".join(expanded), is_set=True, is_negated=is_negated)
