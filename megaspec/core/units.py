"""Bytes, seconds and counts in words."""

GIB, MIB = 2**30, 2**20


def bytes_in_words(count: float) -> str:
    """`79.6 GiB`, `12.5 MiB`."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / MIB:,.1f} MiB"


def seconds_in_words(seconds: float, *, like: float | None = None) -> str:
    """`12.35 s`, `850.0 ms`: in the unit that suits `like`, itself if that is None."""
    return f"{seconds:,.2f} s" if (seconds if like is None else like) >= 10 else f"{seconds * 1e3:,.1f} ms"


def count_in_words(count: int) -> str:
    """`8.03B`, `124M`: three figures."""
    for scale, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= scale:
            whole = len(str(count // scale))
            return f"{count / scale:.{max(0, 3 - whole)}f}{suffix}"
    return str(count)
