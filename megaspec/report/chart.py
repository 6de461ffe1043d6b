"""Curves as SVG that is drawn here: a page needs no script. Torch-free."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megaspec.report.html import Html, element, escaped, joined

# In units of the drawing, which a page scales to its width.
_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 30
COLUMNS = _WIDTH - _LEFT - _RIGHT
"""Pixel columns of a chart: of each curve four points are drawn in one at most."""
# Of all curves of a chart together, and of each at least: some 100 kB of drawing.
_MOST_COLUMNS = 2_400
_LEAST_COLUMNS = 8
_COLOURS = 8
_DASHES = 3
MOST_MARKED = 200
"""Points of a curve up to which each has a dot, and events that have a line each."""
# Of the points, and times the range of the others, that may lie outside of it at either end: they are cut off.
_OUTER_SHARE = 0.01
_OUTER_RANGE = 3.0

# Below it an axis has no round values.
_LEAST_ROOM = 1e-290

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """A number by step."""

    name: str
    points: Points
    has_dots: bool = False


@dataclass(frozen=True)
class Level:
    """A number that is the same at every step: what was planned."""

    name: str
    value: float


@dataclass(frozen=True)
class Mark:
    """A step at which something happened."""

    step: int
    what: str


@dataclass(frozen=True)
class Chart:
    """Curves over steps."""

    curves: list[Curve]
    show: Callable[[float], str]
    """A value in words."""
    levels: list[Level] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    from_zero: bool = False
    """The axis of values begins at 0."""
    unit: float = 1.0
    """The axis of values has round multiples of it."""

    def drawn(self) -> Html:
        """The chart and its legend."""
        finite = [value for curve in self.curves for _, value in curve.points if math.isfinite(value)]
        if not finite:
            return joined(element("p", "no numbers yet", class_="soft"), self._legend(0))
        low, high = _range([*finite, *(level.value for level in self.levels)], [level.value for level in self.levels])
        if self.from_zero:
            low = min(0.0, low)
        first = min(curve.points[0][0] for curve in self.curves if curve.points)
        last = max(curve.points[-1][0] for curve in self.curves if curve.points)
        place = _Place(first, max(last, first + 1), low, high)
        parts = [*_value_axis(place, self.show, self.unit), *_step_axis(place)]
        for mark in self.marks[-MOST_MARKED:]:
            if first <= mark.step <= place.last:
                x = place.x(mark.step)
                line = element("line", class_="event", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM)
                parts.append(element("g", element("title", f"step {mark.step:,}: {mark.what}"), line))
        for level in self.levels:
            y = place.y(level.value)
            parts.append(element("line", class_="plan", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y))
        for number, curve in enumerate(self.curves):
            parts += self._curve(curve, number, place)
        outside = sum(not low <= value <= high for value in finite)
        picture = element("svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label="curves by step")
        return joined(picture, self._legend(outside))

    def _columns(self) -> int:
        """Columns in which a curve is drawn: fewer where there are many, so that the page stays small."""
        return max(_LEAST_COLUMNS, min(COLUMNS, _MOST_COLUMNS // len(self.curves)))

    def _curve(self, curve: Curve, number: int, place: "_Place") -> Iterable[Html]:
        colour = number % _COLOURS
        dash = number // _COLOURS % _DASHES
        for piece in _pieces(thinned(curve.points, place.first, place.last, self._columns())):
            at = [(place.x(step), place.y(value)) for step, value in piece]
            if len(at) > 1:
                text = " ".join(f"{x},{y}" for x, y in at)
                yield element("polyline", class_=f"curve s{colour} d{dash}", points=text)
            if len(at) == 1 or (curve.has_dots and len(curve.points) <= MOST_MARKED):
                for (x, y), (step, value) in zip(at, piece, strict=True):
                    dot = element("circle", class_=f"f{colour}", cx=x, cy=y, r=2.6)
                    yield element("g", element("title", f"{curve.name}, step {step:,}: {self.show(value)}"), dot)
        broken = [step for step, value in curve.points if not math.isfinite(value)]
        for step in broken[-MOST_MARKED:]:
            shape = element("circle", class_="broken", cx=place.x(step), cy=_HEIGHT - _BOTTOM, r=3.2)
            yield element("g", element("title", f"{curve.name}, step {step:,}: not finite"), shape)

    def _legend(self, outside: int) -> Html:
        entries = []
        for number, curve in enumerate(self.curves):
            css = f"curve s{number % _COLOURS} d{number // _COLOURS % _DASHES}"
            last = "–"
            if curve.points:
                last = self.show(curve.points[-1][1])
            broken = sum(not math.isfinite(value) for _, value in curve.points)
            told = None
            if broken:
                told = element("span", f"{broken:,} not finite", class_="failed")
            entries.append(element("li", _swatch(css), element("bdi", curve.name), element("b", last), told))
        for level in self.levels:
            entries.append(element("li", _swatch("plan"), level.name, element("b", self.show(level.value))))
        if self.marks:
            entries.append(element("li", _swatch("event"), "a start or a roll back"))
        if outside:
            entries.append(element("li", f"{outside:,} points are outside of the picture"))
        return element("ul", *entries, class_="legend")


@dataclass(frozen=True)
class _Place:
    """Where steps and values lie in the drawing."""

    first: int
    last: int
    low: float
    high: float

    def x(self, step: int) -> float:
        share = (step - self.first) / (self.last - self.first)
        return round(_LEFT + COLUMNS * share, 1)

    def y(self, value: float) -> float:
        """Just outside of the axes for what lies beyond them."""
        share = (value - self.low) / (self.high - self.low)
        share = min(1.02, max(-0.02, share))
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share, 1)


def thinned(points: Points, first: int, last: int, columns: int) -> list[tuple[int, float]]:
    """Of each column of the picture the first, the least, the largest and the last point: it looks the same."""
    if len(points) <= 4 * columns:
        return list(points)
    kept: list[tuple[int, float]] = []
    column: list[tuple[int, float]] = []
    number = -1
    for point in points:
        here = (point[0] - first) * columns // (last - first + 1)
        if here != number:
            kept += _extremes(column)
            column = []
            number = here
        column.append(point)
    return kept + _extremes(column)


def _extremes(column: list[tuple[int, float]]) -> list[tuple[int, float]]:
    if not column:
        return []
    found = {column[0], column[-1]}
    finite = [point for point in column if math.isfinite(point[1])]
    if finite:
        found.add(min(finite, key=lambda point: point[1]))
        found.add(max(finite, key=lambda point: point[1]))
    if len(finite) < len(column):
        # one gap is seen
        found.add(next(point for point in column if not math.isfinite(point[1])))
    return sorted(found, key=lambda point: point[0])


def _pieces(points: Points) -> list[list[tuple[int, float]]]:
    """The parts of a curve between numbers that are not finite."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _range(values: list[float], always: list[float]) -> tuple[float, float]:
    """The least and the largest value of the axis; without single points that are so far out that they flatten all."""
    ordered = sorted(values)
    outer = int(len(ordered) * _OUTER_SHARE)
    low = ordered[0]
    high = ordered[-1]
    usual_low = ordered[outer]
    usual_high = ordered[-1 - outer]
    span = usual_high - usual_low
    if usual_low - low > _OUTER_RANGE * span > 0:
        low = usual_low
    if high - usual_high > _OUTER_RANGE * span > 0:
        high = usual_high
    low = min([low, *always])
    high = max([high, *always])
    # room above and below, some of it where all values are the same, too
    room = 0.04 * (high - low) or 0.05 * abs(high)
    if room < _LEAST_ROOM:
        room = 1.0
    if not math.isfinite(high - low + 2 * room):
        # numbers near the largest that there are
        return low / 4 - 1, high / 4 + 1
    return low - room, high + room


def _round_steps(low: float, high: float, count: int) -> list[float]:
    """Round values of an axis."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = power * next(factor for factor in (1, 2, 5, 10, 20) if factor * power >= rough * 0.999)
    found = []
    for number in range(math.ceil(low / size), math.floor(high / size) + 1):
        found.append(number * size)
    return found


def _value_axis(place: _Place, show: Callable[[float], str], unit: float) -> Iterable[Html]:
    for count in _round_steps(place.low / unit, place.high / unit, 5):
        value = count * unit
        y = place.y(value)
        yield element("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y)
        yield element("text", show(value), x=_LEFT - 6, y=round(y + 4, 1), text_anchor="end")


def _step_axis(place: _Place) -> Iterable[Html]:
    bottom = _HEIGHT - _BOTTOM
    yield element("line", class_="axis", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=bottom, y2=bottom)
    for value in _round_steps(place.first, place.last, 6):
        if value == round(value):
            step = round(value)
            yield element("text", f"{step:,}", x=place.x(step), y=bottom + 16, text_anchor="middle")


def _swatch(css: str) -> Html:
    return element("svg", element("line", class_=css, x1=0, x2=22, y1=5, y2=5), viewBox="0 0 22 10", aria_hidden="true")


def bars(rows: list[tuple[str, dict[str, float]]], show: Callable[[float], str]) -> Html:
    """A bar for each row, of parts by kind that lie behind each other, and which colour is which kind."""
    kinds: list[str] = []
    for _, parts in rows:
        kinds += [kind for kind, value in parts.items() if value > 0 and kind not in kinds]
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0)
    if not kinds or longest <= 0:
        return Html("")
    drawn = []
    left = 150
    for number, (name, parts) in enumerate(rows):
        y = 8 + 26 * number
        drawn.append(element("text", name, x=left - 8, y=y + 13, text_anchor="end"))
        x = float(left)
        for kind in kinds:
            width = (_WIDTH - left - 80) * parts.get(kind, 0.0) / longest
            if width > 0:
                box = element(
                    "rect",
                    x=round(x, 1),
                    y=y,
                    width=round(width, 1),
                    height=18,
                    class_=f"f{kinds.index(kind) % _COLOURS}",
                )
                drawn.append(element("g", element("title", f"{kind}: {show(parts[kind])}"), box))
            x += width
        drawn.append(element("text", show(sum(parts.values())), x=round(x + 6, 1), y=y + 13))
    picture = element(
        "svg", *drawn, viewBox=f"0 0 {_WIDTH} {16 + 26 * len(rows)}", role="img", aria_label="parts of each sum"
    )
    entries = []
    for number, kind in enumerate(kinds):
        box = element("rect", x=0, y=0, width=14, height=10, class_=f"f{number % _COLOURS}")
        entries.append(element("li", element("svg", box, viewBox="0 0 22 10", aria_hidden="true"), escaped(kind)))
    return joined(picture, element("ul", *entries, class_="legend"))
