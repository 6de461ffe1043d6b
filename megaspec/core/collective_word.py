"""What a word says of a collective: which one, of which group, the how-many-th, and whether it has returned.

A word of 64 bits is written at once, so that another process can read it from a rank that was stopped. Torch-free.
"""

from collections.abc import Sequence

NAMES = (
    "",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "gather",
    "barrier",
    "send",
    "recv",
    "send and recv",
)
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, GATHER, BARRIER, SEND, RECV, SEND_RECV = range(1, 11)
NAME_AT = 56
GROUP_AT = 44
RETURNED = 1 << 43
NUMBER = RETURNED - 1


def words_of_collective(word: int, groups: Sequence[str]) -> str:
    """`in all_reduce number 17 of tp`, or `behind` it where it has returned. Empty: there was none."""
    name = NAMES[(word >> NAME_AT) % len(NAMES)]
    if not name:
        return ""
    index = (word >> GROUP_AT) & 0xFFF
    group = groups[index] if index < len(groups) else f"group {index}"
    place = "behind" if word & RETURNED else "in"
    return f"{place} {name} number {word & NUMBER} of {group}"
