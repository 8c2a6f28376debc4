"""Drawing of rectangles, lines and texts: written as SVG, or as PNG by matplotlib.

Lengths are pixels, the origin is at the top left, colours are names of the palette. An SVG follows
the reader's colour scheme, a PNG is light.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, inf, log10
from typing import Literal, NamedTuple

from pipemorph.extras import missing_package_error
from pipemorph.views.pictures.colours import PALETTE

Anchor = Literal["start", "middle", "end"]
FONT = "system-ui, DejaVu Sans, sans-serif"
LETTER_WIDTH = 0.62
"""Width of a letter over its height, for estimates."""
SHARPNESS = 2
"""Pixels of a PNG per pixel of the drawing, as far as :data:`MOST_PIXELS` allows."""
MOST_PIXELS = 4000
"""Most pixels of a PNG's longer side that are due to its sharpness."""


class _Rects(NamedTuple):
    colour: str
    boxes: list[tuple[float, float, float, float]]
    """Left, top, width, height of each."""


class _Line(NamedTuple):
    colour: str
    points: list[tuple[float, float]]
    width: float
    dashed: bool


class _Text(NamedTuple):
    colour: str
    x: float
    y: float
    text: str
    anchor: Anchor
    size: float
    bold: bool


class Drawing:
    """Shapes in the order in which they cover each other. ``label``: text for who cannot see."""

    def __init__(self, width: float, label: str) -> None:
        self.width, self.height, self.label = width, 0.0, label
        self._shapes: list[_Rects | _Line | _Text] = []

    def add_rects(self, colour: str, boxes: Iterable[tuple[float, float, float, float]]) -> None:
        """Add rectangles: left, top, width, height of each."""
        self._shapes.append(_Rects(colour, list(boxes)))

    def add_line(
        self, colour: str, points: Iterable[tuple[float, float]], width: float = 1, *,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        """Add a line through points."""
        self._shapes.append(_Line(colour, list(points), width, dashed))

    def add_text(
        self, colour: str, x: float, y: float, text: str, *, anchor: Anchor = "start",
        size: float = 11, bold: bool = False,
    ) -> None:  # fmt: skip
        """Add a text. ``y``: its middle."""
        self._shapes.append(_Text(colour, x, y, text, anchor, size, bold))

    def add_legend(
        self,
        left: float,
        top: float,
        entries: Sequence[tuple[str, str]],
        sizes: Sequence[float] = (),
    ) -> float:
        """Add boxes of colours with their names, in rows; returns the end of the last row.
        ``sizes``: of the boxes, 11 by default."""
        x, y = left, top
        for (colour, name), size in zip(entries, sizes or [11.0] * len(entries), strict=True):
            wide = 16 + estimate_width(name, 11) + 14
            if x > left and x + wide > self.width:
                x, y = left, y + 17
            self.add_rects(colour, [(x + (11 - size) / 2, y + 8.5 - size / 2, size, size)])
            self.add_text("dim", x + 16, y + 9, name)
            x += wide
        return y + 17 if entries else y

    def to_svg(self) -> str:
        """SVG that loads nothing."""
        used = {shape.colour for shape in self._shapes} | {"back"}
        rules = [
            "".join(f".{name}{{--c:{PALETTE[name][ground]}}}" for name in sorted(used))
            for ground in (0, 1)
        ]
        size = f"{self.width:.0f} {self.height:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{self.width:.0f}"'
            f' style="max-width:100%;height:auto" role="img" aria-label="{escape(self.label)}"'
            f' font-family="{FONT}"><style>rect,text,.a{{fill:var(--c)}}.l{{fill:none;stroke:'
            f"var(--c)}}{rules[0]}@media(prefers-color-scheme:dark){{{rules[1]}}}</style>"
            '<rect width="100%" height="100%" class="back"/>\n'
            + "\n".join(map(_format_svg, self._shapes))
            + "\n</svg>\n"
        )

    def to_png(self) -> bytes:
        """PNG. Raises :class:`InputError` if matplotlib is not installed."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.collections import PolyCollection
            from matplotlib.figure import Figure
            from matplotlib.lines import Line2D
        except ImportError:
            raise missing_package_error("pictures need matplotlib", "pictures") from None
        longest = max(self.width, self.height)
        sharp = max(1.0, min(SHARPNESS, MOST_PIXELS / longest))
        figure = Figure(
            figsize=(self.width / 100, self.height / 100), dpi=100 * sharp,
            facecolor=PALETTE["back"].light,
        )  # fmt: skip
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        points = 0.72  # Per pixel, at 100 pixels an inch.
        for order, shape in enumerate(self._shapes):
            colour = PALETTE[shape.colour].light
            match shape:
                case _Rects(_, boxes):
                    corners = [
                        ((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in boxes
                    ]
                    axes.add_collection(
                        PolyCollection(corners, facecolor=colour, linewidth=0, zorder=order),
                        autolim=False,
                    )
                case _Line(_, path, width, dashed):
                    xs, ys = zip(*path, strict=True)
                    axes.add_line(
                        Line2D(
                            xs, ys, color=colour, linewidth=points * width, zorder=order,
                            linestyle=(0, (4, 3)) if dashed else "-",
                        )
                    )  # fmt: skip
                case _Text(_, x, y, text, anchor, size, bold):
                    axes.text(
                        x, y, text.replace("$", r"\$"), color=colour, fontsize=points * size,
                        ha={"start": "left", "middle": "center", "end": "right"}[anchor],
                        va="center_baseline", weight="bold" if bold else "normal", zorder=order,
                    )  # fmt: skip
        image = io.BytesIO()
        figure.savefig(image, format="png")
        return image.getvalue()


def estimate_width(text: str, size: float) -> float:
    """Width of a text, roughly."""
    return LETTER_WIDTH * size * len(text)


def _format_svg(shape: _Rects | _Line | _Text) -> str:
    match shape:
        case _Rects(colour, boxes):
            path = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for x, y, w, h in boxes)
            return f'<path class="a {colour}" d="{path}"/>'
        case _Line(colour, points, width, dashed):
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            dash = ' stroke-dasharray="4 3"' if dashed else ""
            return f'<path class="l {colour}" stroke-width="{width:g}"{dash} d="M{path}"/>'
        case _Text(colour, x, y, text, anchor, size, bold):
            more = ' font-weight="600"' if bold else ""
            return (
                f'<text class="{colour}" x="{x:.1f}" y="{y + 0.35 * size:.1f}" font-size="{size:g}"'
                f' text-anchor="{anchor}"{more}>{escape(text, quote=False)}</text>'
            )


def list_marks(begin: float, end: float, most: float) -> list[float]:
    """Round values from ``begin`` to ``end``, about ``most`` of them."""
    raw = (end - begin) / max(1.0, most)
    if not 0 < raw < inf:
        return [begin]
    base = 10.0 ** floor(log10(raw))
    every = next(k * base for k in (1, 2, 5, 10) if k * base >= raw * (1 - 1e-9))
    first, last = ceil(begin / every - 1e-9), floor(end / every + 1e-9)
    return [k * every for k in range(first, last + 1)]


def format_mark(value: float) -> str:
    """Text of a mark, without trailing zeros."""
    return f"{value:.6g}"
