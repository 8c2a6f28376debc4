"""Draws lines with styles by rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipemorph.top.page import Line, Style

STYLES: dict[Style, str] = {
    "plain": "",
    "head": "bold",
    "label": "cyan",
    "good": "green",
    "bad": "bold red",
    "faint": "dim",
    "chosen": "reverse",
}


def styled(lines: Sequence[Line]) -> Text:
    """The lines as one text, which is cut at the right edge of the terminal."""
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    for number, each in enumerate(lines):
        text.append("\n" if number else "")
        for span in each:
            text.append(span.text, STYLES[span.style])
    return text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to who writes, in place of ending the process."""
        raise  # noqa: PLE0704  # rich calls this while it handles the error.


class LiveLines:
    """Lines at the bottom of a terminal, drawn anew whenever they change, and text that scrolls
    away above them. Whatever is written raises OSError where the terminal is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._console = _Console(file=stream, highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._drawn: object = None

    @property
    def room(self) -> tuple[int, int]:
        """Columns, and lines that can be drawn."""
        size = self._console.size
        return size.width, max(1, size.height - 1)

    def note(self, text: str) -> None:
        """Write ``text`` above the lines. What is no printable character stays out of it."""
        self._console.print(Text(text))

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines, as many as the terminal has room for."""
        room = self.room
        shown = list(lines)[: room[1]]
        if (shown, room) == self._drawn:
            return
        self._drawn = (shown, room)
        if not self._live.is_started:
            self._live.start()
        self._live.update(styled(shown), refresh=True)

    def close(self) -> None:
        """Leave the lines as they are, and the cursor below them."""
        self._live.stop()
