"""HTML of which no element and no attribute comes out of data. Torch-free.

Names of runs, sets, machines and what models write are anybody's text. They go into a page by `element` alone, which
escapes every child that is not Html, and shows what a terminal or a bidirectional text would act on (ESC, U+202E) as
an escape. Attributes are written here and never hold data.
"""

import html
from pathlib import Path

from megaspec.core.errors import printable

# Of one text, so that no line of a file makes a page unreadable.
MOST_CHARACTERS = 1_000
LOOK = Path(__file__).with_name("look.css").read_text(encoding="utf-8")
"""What all pages have in common: colours of both themes, cards, tables."""
_STYLE = LOOK + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
# Nothing is loaded, run or sent, whatever stands in the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_VOID = ("meta", "line", "circle", "rect", "path", "polyline")


class Html(str):
    """Text that is HTML already: only what this file made."""


Child = Html | str | int | float | None
"""None is nothing; what is no Html is escaped."""


def escaped(text: str, *, keep: str = "", most: int = MOST_CHARACTERS) -> Html:
    """A text of anybody's, on one line but for the characters to keep, and cut after `most`."""
    if len(text) > most:
        text = f"{text[:most]}… ({len(text):,} characters)"
    return Html(html.escape(printable(text, keep=keep)))


def element(name: str, /, *children: Child, **attributes: str | int | float) -> Html:
    """`<name a="b">children</name>`. An underscore in an attribute's name is a dash, one at its end falls away."""
    written = []
    for key, value in attributes.items():
        said = html.escape(str(value))
        written.append(f' {key.rstrip("_").replace("_", "-")}="{said}"')
    start = f"<{name}{''.join(written)}>"
    if name in _VOID:
        return Html(start.replace(">", "/>"))
    return Html(f"{start}{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    """Children one behind the other."""
    parts = []
    for child in children:
        if child is None:
            continue
        if not isinstance(child, Html):
            child = escaped(str(child))
        parts.append(child)
    return Html("".join(parts))


def card(title: str, *children: Child) -> Html:
    """A box with a heading."""
    return element("section", element("h2", title), *children, class_="card")


def tile(value: Child, what: str) -> Html:
    """A number that is seen at once, and what it is."""
    return element("div", element("b", value), element("span", what, class_="soft"), class_="tile")


def table(titles: list[str], rows: list[list[Child]], *, words: int = 1) -> Html:
    """A table; the first `words` columns, and those whose title ends with a colon, hold words, the others numbers."""
    kinds = []
    for number, title in enumerate(titles):
        kinds.append("text" if number < words or title.endswith(":") else "number")
    cells = [element("th", title.rstrip(":"), class_=kind) for title, kind in zip(titles, kinds, strict=True)]
    body = []
    for row in rows:
        filled = [element("td", value, class_=kind) for value, kind in zip(row, kinds, strict=True)]
        body.append(element("tr", *filled))
    whole = element("table", element("thead", element("tr", *cells)), element("tbody", *body))
    return element("div", whole, class_="scroll")


def newest(rows: list[list[Child]], most: int, count: int) -> tuple[list[list[Child]], Html]:
    """The last rows, the newest first, and how many of all `count` were left out."""
    shown = rows[-most:][::-1]
    left_out = count - len(shown)
    if not left_out:
        return shown, Html("")
    return shown, element("p", f"and {left_out:,} earlier ones", class_="soft")


# With what every page begins, by which one is known for ours.
_FIRST = joined(
    element("meta", charset="utf-8"), element("meta", http_equiv="Content-Security-Policy", content=_POLICY)
)
_START = f'<!doctype html>\n<html lang="en"><head>{_FIRST}'


def is_page(path: Path) -> bool:
    """Whether a file is a page that was written here. OSError: it can't be read."""
    with path.open("rb") as file:
        return file.read(len(_START)) == _START.encode()


def page(title: str, *children: Child, seconds_until_reload: int = 0) -> str:
    """A whole page, in one file that asks nobody. `seconds_until_reload`: 0 for one that stays as it is."""
    head = [
        _FIRST,
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
    ]
    if seconds_until_reload:
        head.append(element("meta", http_equiv="refresh", content=seconds_until_reload))
    head += [element("title", title), element("style", Html(_STYLE))]
    body = element("body", element("main", *children))
    return f"<!doctype html>\n{element('html', element('head', *head), body, lang='en')}\n"
