"""Where the time of a step went, as lines of text: in the console of a run, and by `megaspec bench step`. No torch."""

from collections.abc import Iterator

from megaspec.log.events import StepsProfiled, TimeOfKind

_COLUMNS = ("", "ms a step", "share", "operations", "work", "rate", "planned ms", "times planned")
_HARDLY_ANY = 0.0005
"""Share of a step below which a kind that was neither planned nor seen is left out."""


def table_lines(event: StepsProfiled) -> Iterator[str]:
    """The table, and what it can't say."""
    rows = [_COLUMNS]
    for kind, one in event.kinds.items():
        if one.seconds >= _HARDLY_ANY * event.seconds or (one.planned_seconds or 0.0) > 0:
            rows.append(_row(kind, one, event))
    rows.append(_sum(event))
    # columns in which something stands below the heading
    filled = [column for column in range(len(_COLUMNS)) if any(row[column] for row in rows[1:])]
    rows = [tuple(row[column] for column in filled) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(filled))]
    yield f"{_steps(event)} of rank {event.rank} on {event.device}: where the time went"
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        yield "  ".join(cells).rstrip()
    yield f"{event.accounted:.1%} of the time is of a kind that is known"
    if event.largest_other:
        named = [f"{name} {_ms(seconds, event)} ms" for name, seconds in event.largest_other.items()]
        yield f"largest of other: {'; '.join(named)}"
    yield from _notes(event)


def _notes(event: StepsProfiled) -> Iterator[str]:
    messages = event.kinds["exposed communication"]
    hidden = messages.busy_seconds - messages.seconds
    if hidden > 0:
        yield f"communication: {_ms(messages.busy_seconds, event)} ms in all, {_ms(hidden, event)} ms beside other work"
    if event.clock_mhz is not None and event.power_watts is not None:
        text = f"SM clock {event.clock_mhz:,.0f} MHz ({event.clock_mhz_lowest:,.0f} to {event.clock_mhz_highest:,.0f})"
        text += f", power {event.power_watts:,.0f} W"
        if event.power_limit_watts is not None:
            text += f" of {event.power_limit_watts:,.0f}"
        yield text
    else:
        yield f"clock and power: not known, {event.no_clock}"
    if event.no_plan is not None:
        yield f"plan: none to compare with, {event.no_plan}"
    if event.unprofiled_seconds is not None:
        profiled = event.seconds / event.steps
        longer = profiled / event.unprofiled_seconds - 1
        text = f"a step without the profiler took {1e3 * event.unprofiled_seconds:,.1f} ms"
        # the profiler shortens nothing: steps differ by more than it takes
        why = "which is the host's time" if longer >= 0 else "so steps differ by themselves"
        yield f"{text}: with it {longer:+.1%}, {why}"
    for name in event.files:
        yield f"written: {name}"


def _steps(event: StepsProfiled) -> str:
    if event.steps == 1:
        return f"step {event.step}"
    return f"steps {event.first_step} to {event.step}"


def _row(kind: str, one: TimeOfKind, event: StepsProfiled) -> tuple[str, ...]:
    planned = ""
    ratio = ""
    if one.planned_seconds is not None:
        planned = f"{1e3 * one.planned_seconds:,.1f}"
        if one.planned_seconds > 0:
            ratio = f"{one.seconds / event.steps / one.planned_seconds:.2f}"
    count = f"{one.count / event.steps:,.0f}" if one.count else ""
    share = f"{one.seconds / event.seconds:.1%}"
    return (kind, _ms(one.seconds, event), share, count, _work(one, event.steps), _rate(one), planned, ratio)


def _sum(event: StepsProfiled) -> tuple[str, ...]:
    planned = [one.planned_seconds for one in event.kinds.values() if one.planned_seconds is not None]
    whole = ""
    ratio = ""
    if planned:
        whole = f"{1e3 * sum(planned):,.1f}"
        ratio = f"{event.seconds / event.steps / sum(planned):.2f}"
    return ("step", _ms(event.seconds, event), "100.0%", "", "", "", whole, ratio)


def _work(one: TimeOfKind, steps: int) -> str:
    """Of a step."""
    if one.flops is not None:
        return _in_units(one.flops / steps, "FLOP")
    if one.bytes is not None:
        return _in_units(one.bytes / steps, "B")
    return ""


def _rate(one: TimeOfKind) -> str:
    """`688 TFLOP/s`, `3,480 GB/s`; "" where nothing is known, or it took no time."""
    if one.seconds <= 0:
        return ""
    if one.flops is not None:
        return _in_units(one.flops / one.seconds, "FLOP/s")
    if one.bytes is not None:
        # as bandwidths are told everywhere
        return f"{one.bytes / one.seconds / 1e9:,.4g} GB/s"
    return ""


def _in_units(amount: float, unit: str) -> str:
    """`79.1 TFLOP`: four figures with the prefix that suits them."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if amount >= scale:
            return f"{amount / scale:,.4g} {prefix}{unit}"
    return f"{amount:,.4g} {unit}"


def _ms(seconds: float, event: StepsProfiled) -> str:
    """Milliseconds of one step."""
    return f"{1e3 * seconds / event.steps:,.1f}"
