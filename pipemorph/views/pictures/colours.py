"""Palette of all pages and pictures, on light and on dark ground.

Ops are strong and have the same colour on both grounds, idle times are pale. Readers with
protanopia or deuteranopia can tell apart what a picture shows side by side: ops and causes of idle
time, states of links and ops; ``tests/core/planning/test_planning_colours.py`` simulates both.
"""

from __future__ import annotations

from typing import NamedTuple

from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.planning.ir import OpKind

LETTERS = {OpKind.F: "F", OpKind.B: "B", OpKind.W: "W", OpKind.BW: "U"}
"""Letter of each kind of op: in data of pages, and as name of its colour."""
NAMES = {
    "F": "F forward",
    "B": "B backward, input",
    "W": "W backward, weights",
    "U": "BW fused backward",
}
"""Legend of each letter."""
IDLE_NAMES = {
    IdleCause.FILL: "fill: before its first op",
    IdleCause.DRAIN: "drain: after its last op",
    IdleCause.DEPENDENCY: "dependency: input not computed yet",
    IdleCause.LINK: "link: input in transit",
    IdleCause.CAP: "cap: in_flight_limit forbids a forward",
    IdleCause.ORDER: "order: another op could run",
}


class Shade(NamedTuple):
    """Colour on light and on dark ground."""

    light: str
    dark: str


def _fix(colour: str) -> Shade:
    return Shade(colour, colour)


WHITE, BLACK = _fix("#ffffff"), _fix("#101215")
PALETTE = {
    # Ground and text.
    "back": Shade("#ffffff", "#14181d"),
    "ink": Shade("#1d2530", "#e4e8ed"),
    "dim": Shade("#5a6676", "#9aa6b4"),
    "rule": Shade("#dfe3e8", "#323a44"),
    "plot": Shade("#f3f5f7", "#1b2027"),
    "line": Shade("#64748b", "#808c9c"),
    "accent": Shade("#1f66b8", "#6db3ff"),
    "mark": Shade("#8a2be2", "#c79bff"),
    "good": Shade("#2f9e6e", "#51e0bd"),
    # States of links: none is the colour of an op.
    "healthy": Shade("#dbe4f3", "#1e2d48"),
    "delayed": Shade("#ff4d6a", "#f0427c"),
    "narrow": Shade("#6699cc", "#7db2e8"),
    "down": Shade("#a3211f", "#ec6a58"),
    "unknown": Shade("#a6abb2", "#a9b2bc"),
    "on": BLACK,
    "on-down": Shade("#ffffff", "#101215"),
    # Ops, and the text on them.
    "F": _fix("#2c61b1"),
    "B": _fix("#ed9a1d"),
    "W": _fix("#b6e2c3"),
    "U": _fix("#8a2320"),
    "on-F": WHITE,
    "on-B": BLACK,
    "on-W": BLACK,
    "on-U": WHITE,
    # Other ops of recorded steps: loss, data loader, garbage collection, checkpoint, optimizer.
    "L": _fix("#df99d6"),
    "D": _fix("#f6f69d"),
    "G": _fix("#a8722a"),
    "K": _fix("#0fa070"),
    "O": _fix("#525863"),
    **dict.fromkeys(("on-L", "on-D", "on-G", "on-K"), BLACK),
    "on-O": WHITE,
    # The same ops where they are only compared.
    "pale-F": Shade("#8b95a3", "#6d7682"),
    "pale-B": Shade("#b0b8c3", "#535c67"),
    "pale-W": Shade("#d3d8de", "#3d454e"),
    "pale-U": Shade("#9d8f8c", "#6f625f"),
    # Causes of idle time.
    "idle": Shade("#eee4e4", "#2b2427"),
    "fill": Shade("#f1f3f6", "#222839"),
    "drain": Shade("#ccd3dd", "#3a424e"),
    "dependency": Shade("#efe6a0", "#9e7e17"),
    "link": Shade("#c79aea", "#672777"),
    "cap": Shade("#e68e8d", "#570f1d"),
    "order": Shade("#97c0d9", "#15868c"),
}
"""Colours by name; a page has them as CSS variables."""
LINES = ("accent", "down", "line", "good", "mark", "ink")
"""Colours of the lines of a chart, in their order."""


def format_css_variables() -> str:
    """CSS rules that set ``--NAME`` of each colour, by the reader's colour scheme."""
    light = "".join(f"--{name}:{shade.light};" for name, shade in PALETTE.items())
    dark = "".join(f"--{name}:{s.dark};" for name, s in PALETTE.items() if s.dark != s.light)
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"
