"""Bytes, seconds and counts in words."""

# Bytes of a unit.
GIB = 2**30
MIB = 2**20


def bytes_in_words(count: float) -> str:
    """`79.6 GiB`, `12.5 MiB`."""
    if count >= GIB / 10:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / MIB:,.1f} MiB"


def seconds_in_words(seconds: float, *, like: float | None = None) -> str:
    """`12.35 s`, `850.0 ms`: in the unit that suits `like`, itself if that is None."""
    if like is None:
        like = seconds
    if like >= 10:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.1f} ms"


def count_in_words(count: int) -> str:
    """`8.03B`, `124M`: three figures."""
    for scale, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= scale:
            figures_before_the_point = len(str(count // scale))
            figures_behind = max(0, 3 - figures_before_the_point)
            return f"{count / scale:.{figures_behind}f}{suffix}"
    return str(count)


def plural(noun: str, count: int) -> str:
    """The noun as it stands behind a count: `recipe` behind 1, else `recipes`; `entries` of `entry`."""
    if count == 1:
        return noun
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def counted(count: int, noun: str) -> str:
    """`1 bin`, `1,200 bins`."""
    return f"{count:,} {plural(noun, count)}"
