"""What a shell's `[ ]` says about operands of which some can't be known. True, False, or None: it can't be known."""

import re
from collections.abc import Sequence

# More than any condition that is written by hand; joined ones are weighed inside each other.
_MOST_OPERANDS = 64
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")


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


def _compared(left: str | None, comparison: str, right: str | None) -> bool | None:
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
    first, second = int(left), int(right)
    results = {
        "-eq": first == second,
        "-ne": first != second,
        "-lt": first < second,
        "-le": first <= second,
        "-gt": first > second,
        "-ge": first >= second,
    }
    return results.get(comparison)
