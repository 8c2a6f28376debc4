"""Lines of text with styles, and tables that fit a width: what is shown, however it is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from pipemorph.errors import one_line

Style = Literal["plain", "head", "label", "good", "bad", "faint", "chosen"]


@dataclass(frozen=True)
class Span:
    """Text of one style in one line. What is no printable character, as in a message that somebody
    else wrote, does not get to the terminal."""

    text: str
    style: Style = "plain"

    def __post_init__(self) -> None:
        if not self.text.isprintable():
            object.__setattr__(self, "text", one_line(self.text, len(self.text)))


Line = tuple[Span, ...]

LABEL = 11
"""Columns of a fact's label, with the space after it."""
LEAST = 12
"""Columns that a cut text has at least."""
GAP = "  "
"""Between two columns of a table."""


@dataclass(frozen=True)
class Column:
    """A column of a table. ``spare``: where there is no room, the column with the highest number
    goes first; those with 0 stay. A column without any text is left out. ``cut``: where there is
    still no room, its texts are cut off."""

    head: str
    spare: int = 0
    right: bool = False
    cut: bool = False


def line(text: str, style: Style = "plain") -> Line:
    return (Span(text, style),)


def fact(label: str, text: str, width: int | None, style: Style = "plain") -> list[Line]:
    """``label      text``. Text that is longer than ``width`` allows goes on below itself."""
    room = None if width is None else max(width - LABEL, 20)
    parts = [text] if room is None else textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    return [
        (Span(f"{label if not i else '':<{LABEL}}", "label"), Span(part, style))
        for i, part in enumerate(parts)
    ]


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Span]], width: int | None
) -> list[Line]:
    """A heading and a line per row, not wider than ``width`` as far as columns can be spared."""
    widths = [
        max(len(column.head), *(len(row[i].text) for row in rows)) if rows else len(column.head)
        for i, column in enumerate(columns)
    ]
    shown = [i for i in range(len(columns)) if not rows or any(row[i].text for row in rows)]
    while width is not None and _total(shown, widths) > width:
        spare = max(shown, key=lambda i: columns[i].spare)
        if not columns[spare].spare:
            break
        shown.remove(spare)
    over = 0 if width is None else _total(shown, widths) - width
    for i in (i for i in shown if columns[i].cut and over > 0):
        widths[i] = max(widths[i] - over, LEAST)

    def cells(row: Sequence[Span]) -> Line:
        made: list[Span] = []
        for i in shown:
            text = row[i].text
            if len(text) > widths[i]:
                text = text[: widths[i] - 1] + "…"
            fitted = text.rjust(widths[i]) if columns[i].right else text.ljust(widths[i])
            made += (
                [Span(GAP), Span(fitted, row[i].style)] if made else [Span(fitted, row[i].style)]
            )
        return tuple(made)

    head = cells([Span(column.head, "head") for column in columns])
    return [head, *map(cells, rows)]


def _total(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + len(GAP) * (len(shown) - 1)


def plain(lines: Sequence[Line]) -> str:
    """The lines without styles."""
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"


def bars_for(stream: TextIO) -> str:
    """The bars that a stream's encoding has."""
    try:
        BARS.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return PLAIN_BARS
    return BARS


def sparkline(values: Sequence[float], bars: str = BARS) -> str:
    """A bar per value, from 0 to the largest; empty if there are less than two."""
    most = max(values, default=0.0)
    if len(values) < 2 or most <= 0:
        return ""
    return "".join(bars[min(int(value / most * len(bars)), len(bars) - 1)] for value in values)
