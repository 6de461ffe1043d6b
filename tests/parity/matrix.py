"""What is proven with what, as tables for README.md in this folder: `make matrix` writes them between two lines."""

import re
from collections.abc import Sized
from pathlib import Path

from tests.parity.bugs import BUGS
from tests.parity.cases import Case
from tests.parity.often import candidates, often
from tests.parity.rows import AXES, MORE, Has, is_alone
from tests.parity.sets import SLOW, cases_of
from tests.parity.test_checkpoints import (
    BESIDE,
    DENSE,
    FP8,
    FP8_BESIDE,
    FP8_EXPERTS,
    FP8_EXPERTS_OFTEN,
    FP8_OFTEN,
    OFTEN,
)
from tests.parity.test_checkpoints import EXPERTS as WITH_EXPERTS

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- generated: make matrix -->", "<!-- /generated: make matrix -->"


def main() -> None:
    text = README.read_text()
    README.write_text(with_matrix(text))


def with_matrix(text: str) -> str:
    """A README whose matrix is up to date."""
    before, begin, rest = text.partition(BEGIN)
    assert begin, f"{README} has no line {BEGIN}"
    assert END in rest, f"{README} has no line {END}"
    return f"{before}{BEGIN}\n{matrix()}\n{END}{rest.split(END)[1]}"


def matrix() -> str:
    """Both tables, and what they count."""
    default = [case for case in candidates() if case in often()]
    slow = [case for case in _every() if case not in often()]
    groups = (DENSE, WITH_EXPERTS, FP8, FP8_EXPERTS)
    layouts = sum(map(len, groups))
    pairs = sum(map(_pairs, groups))
    fp8_pairs = _pairs(FP8) + _pairs(FP8_EXPERTS)
    often_pairs = BESIDE * len(OFTEN) + FP8_BESIDE * len(FP8_OFTEN) + _pairs(FP8_EXPERTS_OFTEN)
    lines = [
        "A cell `8/768` counts runs on up to eight ranks that are compared with one rank in fp64:",
        f"8 of them in `make test`, 768 more in `make test-slow`. In all there are {len(default):,} and {len(slow):,}.",
        "The first row counts runs with one axis alone; an empty cell means that no run has both.",
        f"Checkpoints of {layouts} layouts are loaded into each other, {pairs} pairs ({often_pairs} of them in",
        f"`make test`), {fp8_pairs} of them with delayed scales of fp8; {len(BUGS)} planted bugs are caught",
        "(half of those tests are slow).",
        "",
        *_table({"alone": is_alone, **AXES}, default, slow),
        "",
        *_table(MORE, default, slow),
    ]
    return "\n".join(lines)


def _pairs(layouts: Sized) -> int:
    """How many there are, in both directions."""
    return len(layouts) * (len(layouts) - 1)


def _every() -> list[Case]:
    """The cases of all sets."""
    return list(dict.fromkeys([*candidates(), *(case for name in SLOW for case in cases_of(name))]))


def _table(rows: dict[str, Has], default: list[Case], slow: list[Case]) -> list[str]:
    lines = [f"| | {' | '.join(AXES)} |", f"|---{'|--:' * len(AXES)}|"]
    for row, has_row in rows.items():
        cells = [_cell(lambda c, a=has_row, b=has_axis: a(c) and b(c), default, slow) for has_axis in AXES.values()]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def _cell(has: Has, default: list[Case], slow: list[Case]) -> str:
    often, seldom = sum(map(has, default)), sum(map(has, slow))
    return re.sub(r"^0/0$", "", f"{often}/{seldom}")


if __name__ == "__main__":
    main()
