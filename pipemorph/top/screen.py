"""Shows a :class:`~pipemorph.top.browser.Browser` on a terminal by rich, and reads its keys."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from pipemorph.top.browser import Browser
from pipemorph.top.styled import styled

TICK_SECONDS = 0.25
"""Longest time between a change and its being shown."""

KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\r": "enter", b"\n": "enter", b"\x1b[C": "enter", b"\x1bOC": "enter",
    b"\x1b": "back", b"\x1b[D": "back", b"\x1bOD": "back", b"b": "back", b"\x7f": "back",
}  # fmt: skip
"""What a terminal sends."""
_SENT = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.)?|[^\x1b]", re.DOTALL)
"""One key of it."""


def show(browser: Browser, poll: Callable[[], None]) -> None:
    """Show the browser until the user quits. ``poll``: called four times a second; it hands new
    answers to the browser, and does not wait for them."""
    console = Console(highlight=False)
    with (
        _keys() as pressed,
        _ends_on_sigterm(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        drawn: object = None
        while not browser.over:
            poll()
            size = console.size
            page = browser.page(time.time(), size.width, size.height)
            if (page, size) != drawn:
                drawn = (page, size)
                live.update(styled(page), refresh=True)
            for key in pressed(TICK_SECONDS):
                browser.press(key)


def _known(sent: bytes) -> list[str]:
    """The keys of what a terminal has sent, which may be several; those that mean nothing are left
    out."""
    keys = []
    for each in _SENT.findall(sent):
        if each in KEYS:
            keys.append(KEYS[each])
        elif len(each) == 1:
            keys.append(chr(each[0]))
    return keys


@contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """A function that waits up to so many seconds for keys. Standard input is a terminal."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read(seconds: float) -> list[str]:
        if not select.select([fd], [], [], seconds)[0]:
            return []
        sent = os.read(fd, 64)
        if not sent:
            return ["q"]  # the terminal is gone
        return _known(sent)

    tty.setcbreak(fd)
    # A suspended program would leave the shell on this screen.
    mode = termios.tcgetattr(fd)
    mode[6][termios.VSUSP] = os.fpathconf(fd, "PC_VDISABLE")
    termios.tcsetattr(fd, termios.TCSANOW, mode)
    try:
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """SIGTERM leaves the terminal as it was."""

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
