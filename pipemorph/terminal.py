"""Tables, pages and live lines of the commands: by rich on a terminal, plain columns elsewhere.

Text from a peer, a rank or a file is data: none of it is markup, and no character of it controls
the terminal.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from pipemorph.errors import one_line

__all__ = [
    "GAP",
    "Group",
    "RenderableType",
    "StreamConsole",
    "Table",
    "Text",
    "make_live_display",
    "make_printable",
    "make_single_line",
    "make_table",
    "render_parts",
]  # fmt: skip
PLAIN_COLUMNS = 1 << 20
"""Width of output that is no terminal: no line is wrapped, and no column folded."""
MOST_CELL = 1000
"""Longest cell of a table, characters."""
GAP = 2
"""Spaces between two columns."""


class StreamConsole(Console):
    """Console on a stream. It never hides the cursor, so a kill cannot leave it hidden, and raises
    the errors of the stream. ``terminal``: the stream is a terminal; None: by ``isatty``.
    ``plain_columns``: width if it is none."""

    def __init__(
        self, stream: TextIO, *, terminal: bool | None = None, plain_columns: int = PLAIN_COLUMNS
    ) -> None:
        if terminal is None:
            terminal = stream.isatty()
        coloured = terminal and not os.environ.get("NO_COLOR")
        super().__init__(
            file=stream, force_terminal=terminal, force_jupyter=False, markup=False,
            highlight=False, emoji=False, color_system="auto" if coloured else None,
            width=None if terminal else plain_columns,
        )  # fmt: skip

    def show_cursor(self, show: bool = True) -> bool:
        return False

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_live_display(console: Console) -> Live:
    """Display that is replaced in place, and cut at the terminal's last row."""
    return Live(
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="crop",
    )


def make_single_line(text: str) -> Text:
    """Make ``text`` a single line that is cut at the terminal's edge."""
    return Text(make_printable(text).replace("\n", " "), no_wrap=True, overflow="ellipsis")


def make_printable(text: str) -> str:
    """Replace unprintable characters of ``text``, except line breaks, by spaces."""
    return "\n".join(
        "".join(c if c.isprintable() else " " for c in line)
        for line in text.removesuffix("\n").split("\n")
    )


def make_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Container[str] = (),
    styles: Mapping[str, str] | None = None,
) -> Table:
    """Table with headings, unless all of these are empty. ``right``: headings of right-aligned
    columns; ``styles``: from the text of a cell to its style. Cells are cut at :data:`MOST_CELL`
    characters."""
    made = Table(
        *(
            Column(
                Text(heading),
                justify="right" if heading in right else "left",
                no_wrap=heading in right,
                overflow="fold",
            )
            for heading in headings
        ),
        box=None,
        padding=(0, GAP, 0, 0),
        pad_edge=False,
        show_header=any(headings),
        header_style="bold",
    )
    for row in rows:
        cells = (one_line(cell, MOST_CELL) for cell in row)
        made.add_row(*(Text(cell, (styles or {}).get(cell, "")) for cell in cells))
    return made


def render_parts(
    *parts: RenderableType, out: str | None = None, plain_columns: int = PLAIN_COLUMNS
) -> str:
    """Render the parts below each other, for standard output; plain text for a file ``out``.
    ``plain_columns``: width of output that is no terminal."""
    written, terminal = io.StringIO(), out is None and sys.stdout.isatty()
    console = StreamConsole(written, terminal=terminal, plain_columns=plain_columns)
    for part in parts:
        console.print(Text(make_printable(part)) if isinstance(part, str) else part)
    if terminal:
        return written.getvalue()
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())
