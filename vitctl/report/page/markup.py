"""HTML whose text is escaped unless it was made here: names of classes and files, recipes and messages come
from others.
"""

import html
import re
from collections.abc import Iterable, Sequence

from vitctl.system.text import printable

# A cell of a column of numbers, or one without a value.
_NUMBER = re.compile(r"[–]?|[±+-]?[\d.,]+(e[+-]?\d+)?%?")
_EMPTY = {"img", "meta", "br", "link", "col", "path", "line", "rect", "circle"}


class Html(str):
    """Markup that may stand in a page as it is. Only this module makes it from text."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """A value as text: control characters and marks of direction are shown as escapes."""
    return value if isinstance(value, Html) else Html(html.escape(printable(str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element of HTML or SVG.

    Args:
        name: of the element.
        children: markup stays as it is, all else is escaped; None is left out.
        attributes: `class_` is class, `data_x` is data-x; None and False are left out, True has no value.
    """
    written = "".join(
        f" {_attribute(key)}" + ("" if value is True else f'="{escaped(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY and not children:
        return Html(
            f"<{name}{written}>" if name in ("img", "meta", "br", "link", "col") else f"<{name}{written}/>"
        )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Markup and text, one after the other; None is left out."""
    return Html(between.join(escaped(part) for part in parts if part is not None))


def raw(text: str) -> Html:
    """Text of this package that is markup already: its style sheet and its script. Never text of a run."""
    return Html(text)


def table(caption: object, header: Sequence[object], rows: Sequence[Sequence[object]], *, names: int = 1,
          note: object = None) -> Html:  # fmt: skip
    """A table with a caption; the first cell heads its row, and columns of numbers are at the right.

    Args:
        caption: what the table shows.
        header: of the columns.
        rows: of cells.
        names: how many columns are names, even where they look like numbers.
        note: a line below.
    """
    numeric = [n >= names and all(_NUMBER.fullmatch(str(row[n])) for row in rows) for n in range(len(header))]

    def cell(n: int, value: object) -> Html:
        return tag("td" if n else "th", value, scope=None if n else "row", class_="n" if numeric[n] else None)

    head = [tag("th", name, scope="col", class_="n" if numeric[n] else None) for n, name in enumerate(header)]
    body = [tag("tr", *(cell(n, value) for n, value in enumerate(row))) for row in rows]
    whole = tag("table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *body))
    return join([scrolled(whole, caption), None if note is None else tag("p", note, class_="note")])


def facts(caption: object, rows: Iterable[tuple[object, object]]) -> Html:
    """A table of two columns without a header: what, and its value."""
    body = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in rows]
    return scrolled(tag("table", tag("caption", caption), tag("tbody", *body), class_="facts"), caption)


def scrolled(content: Html, label: object) -> Html:
    """Content that may be wider than the screen: it scrolls by itself, also by keyboard."""
    return tag("div", content, class_="wide", tabindex="0", role="group", aria_label=label)


def folded(summary: object, *content: object, is_open: bool = False) -> Html:
    """Content that is shown when its summary is chosen."""
    return tag("details", tag("summary", summary), *content, open=is_open)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key not in _CAMEL else _CAMEL[key]


_CAMEL = {"viewbox": "viewBox"}
