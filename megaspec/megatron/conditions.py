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
    if status is None:
        return None
    return not status


def both(left: bool | None, right: bool | None) -> bool | None:
    """`&&`: one that is False decides."""
    if left is False or right is False:
        return False
    if left is None or right is None:
        return None
    return True


def either(left: bool | None, right: bool | None) -> bool | None:
    """`||`: one that is True decides."""
    if left is True or right is True:
        return True
    if left is None or right is None:
        return None
    return False


def decide(operands: Sequence[str | None]) -> bool | None:
    """Tests of text and of whole numbers, by the number of operands as POSIX has it; an operand of None can't be known.

    Files are never looked at: None.
    """
    count = len(operands)
    if count > _MOST_OPERANDS:
        return None
    # the order is POSIX's: the number of operands decides what `!`, `-a` and `-o` among them are
    if count == 0:
        return False
    if count == 1:
        return _is_not_empty(operands[0])
    if count > 3:
        if not _is_readable(operands):
            return None
        if count == 4 and operands[0] == "!":
            return negation(decide(operands[1:]))
        # -o binds less tightly than -a: it is looked for first
        for joint, join in (("-o", either), ("-a", both)):
            if joint in operands[1:-1]:
                place = operands.index(joint, 1)
                return join(decide(operands[:place]), decide(operands[place + 1 :]))
    if count == 3 and operands[1] is not None:
        return _compared(operands[0], operands[1], operands[2])
    if operands[0] == "!":
        return negation(decide(operands[1:]))
    if count == 2 and operands[0] == "-n":
        return _is_not_empty(operands[1])
    if count == 2 and operands[0] == "-z":
        return negation(_is_not_empty(operands[1]))
    return None


def _is_not_empty(operand: str | None) -> bool | None:
    if operand is None:
        return None
    return operand != ""


def _is_readable(operands: Sequence[str | None]) -> bool:
    """True where `-a`, `-o` and `!` join tests; others are errors, in spite of a part that would decide."""
    test: list[str] = []
    # one more -a ends the last test as the others are ended
    for operand in (*operands, "-a"):
        if operand is None or operand in ("(", ")"):
            return False
        if operand not in ("-a", "-o"):
            test.append(operand)
            continue
        if not _is_test(test):
            return False
        test = []
    return True


def _is_test(words: list[str]) -> bool:
    """True for one test, of one to three words, behind any number of `!`."""
    while len(words) > 1 and words[0] == "!":
        words = words[1:]
    if len(words) == 3:
        return words[1] in ("=", "==", "!=") or words[1] in COMPARISONS
    if len(words) == 2:
        return re.fullmatch(r"-[a-zA-Z]", words[0]) is not None
    return len(words) == 1


def _compared(left: str | None, comparison: str, right: str | None) -> bool | None:
    """A test of three operands. None: it can't be known, or is none that is read here."""
    # between two words -a and -o join, and -z and -n are a test of one word behind !
    if comparison == "-a":
        return both(decide([left]), decide([right]))
    if comparison == "-o":
        return either(decide([left]), decide([right]))
    if left == "!" and comparison in ("-z", "-n"):
        return negation(decide([comparison, right]))
    if left is None or right is None:
        return None
    if comparison in ("=", "=="):
        return left == right
    if comparison == "!=":
        return left != right
    compare = COMPARISONS.get(comparison)
    if compare is None or not _INTEGER.fullmatch(left) or not _INTEGER.fullmatch(right):
        return None
    return compare(int(left), int(right))


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
    return _matches_signs(text, signs)


def _matches_signs(text: str, signs: list["_PatternSign | None"]) -> bool:
    """Reads text and signs side by side. Where they part, the last `*` takes one character more and all behind it is
    read again; an earlier `*` never has to, since the last one can take whatever it would."""
    at = 0  # in the text
    n = 0  # in the signs
    star = -1  # where the last `*` stands; -1: there was none yet
    reached = 0  # up to where in the text it reaches so far
    while at < len(text):
        is_past_end = n == len(signs)
        if not is_past_end and signs[n] is None:
            star = n
            reached = at
            n += 1
        elif not is_past_end and signs[n].takes(text[at]):
            at += 1
            n += 1
        elif star >= 0:
            reached += 1
            at = reached
            n = star + 1
        else:
            return False
    # what is left of the pattern has to stand for nothing
    return all(sign is None for sign in signs[n:])


@dataclass(frozen=True)
class _PatternSign:
    """What one character of a text may be."""

    characters: str
    is_set: bool
    """False for one character that stands for itself."""
    is_negated: bool = False

    def takes(self, character: str) -> bool:
        return (character in self.characters) != self.is_negated


def _signs(pieces: Sequence[tuple[str, bool]]) -> list[_PatternSign | None] | None:
    """A pattern's signs, None among them for `*`; None for a pattern that is not read here."""
    signs: list[_PatternSign | None] = []
    for number, (piece, is_read) in enumerate(pieces):
        if not is_read:
            signs += [_PatternSign(character, is_set=False) for character in piece]
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
                signs.append(_PatternSign("", is_set=True, is_negated=True))
            elif character == "[":
                end = _end_of_set(piece, at)
                if end < 0 and is_last:
                    signs.append(_PatternSign("[", is_set=False))
                    continue
                if end < 0:
                    return None
                characters = _set(piece[at:end])
                if characters is None:
                    return None
                signs.append(characters)
                at = end + 1
            else:
                signs.append(_PatternSign(character, is_set=False))
    return signs


def _end_of_set(piece: str, begin: int) -> int:
    """Where the `]` stands of a `[` in front of `begin`; -1: nowhere. A `]` that comes first, or behind a first `!` or
    `^`, is one of the characters."""
    n_first = 1
    if piece[begin : begin + 1] in ("!", "^"):
        n_first = 2
    return piece.find("]", begin + n_first)


def _set(written: str) -> _PatternSign | None:
    """What stands in `[ ]`: characters and ranges of digits. None: letters' order is the machine's language's."""
    is_negated = written[0] in ("!", "^")
    characters = written
    if is_negated:
        characters = written[1:]
    if "[" in characters:
        return None
    expanded: list[str] = []
    at = 0
    while at < len(characters):
        first = characters[at]
        is_range = characters[at + 1 : at + 2] == "-" and at + 2 < len(characters)
        if not is_range:
            expanded.append(first)
            at += 1
            continue
        last = characters[at + 2]
        if not (first + last).isascii() or not first.isdecimal() or not last.isdecimal():
            return None
        expanded += [chr(code) for code in range(ord(first), ord(last) + 1)]
        at += 3
    return _PatternSign("".join(expanded), is_set=True, is_negated=is_negated)
