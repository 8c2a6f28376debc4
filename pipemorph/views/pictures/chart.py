"""Draws a chart of lines over one axis, such as seconds over iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipemorph.views.pictures.colours import LINES
from pipemorph.views.pictures.drawing import Drawing, estimate_width, format_mark, list_marks

LEFT, RIGHT, TOP, AXIS = 62.0, 20.0, 74.0, 40.0


class ChartLine(NamedTuple):
    """Line of a chart. ``points``: ascending x; ``stepped``: y holds until the next x; ``dots``:
    only marks, as for figures of others."""

    name: str
    points: Sequence[tuple[float, float]]
    stepped: bool = False
    dashed: bool = False
    dots: bool = False


class ChartSpan(NamedTuple):
    """Part of the x axis with a pale ground, such as the time of a fault."""

    begin: float
    end: float
    text: str


def draw_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    x_name: str,
    y_name: str,
    spans: Sequence[ChartSpan] = (),
    marks: Sequence[tuple[float, str]] = (),
    width: float = 900,
    height: float = 360,
) -> Drawing:
    """Draw lines from y = 0 to the largest y. ``x_name``, ``y_name``: what the axes show, with
    units; ``marks``: x and text of dashed uprights. Raises :class:`ValueError` without points."""
    xs = [x for line in lines for x, _ in line.points]
    xs += [edge for span in spans for edge in (span.begin, span.end)]
    if not xs:
        raise ValueError("lines have no points; expected one at least")
    low, high = min(xs), max(xs)
    most = 1.08 * max((y for line in lines for _, y in line.points), default=1.0) or 1.0
    right, bottom = width - RIGHT, height - AXIS

    def place_x(value: float) -> float:
        return LEFT + (value - low) / ((high - low) or 1.0) * (right - LEFT)

    def place_y(value: float) -> float:
        return bottom - value / most * (bottom - TOP)

    drawing = Drawing(width, f"{title}; {y_name} over {x_name}")
    drawing.height = height
    drawing.add_text("ink", 12, 18, title, size=15, bold=True)
    drawing.add_legend(12, 30, [(LINES[k % len(LINES)], each.name) for k, each in enumerate(lines)])
    for span in spans:
        begin, end = place_x(span.begin), place_x(span.end)
        drawing.add_rects("plot", [(begin, TOP, end - begin, bottom - TOP)])
        drawing.add_text("ink", (begin + end) / 2, TOP + 8, span.text, anchor="middle")
    for value in list_marks(0.0, most, (bottom - TOP) / 45):
        y = place_y(value)
        drawing.add_line("rule", [(LEFT, y), (right, y)])
        drawing.add_text("dim", LEFT - 6, y, format_mark(value), anchor="end")
    for value in list_marks(low, high, (right - LEFT) / 90):
        drawing.add_text("dim", place_x(value), bottom + 11, format_mark(value), anchor="middle")
    drawing.add_text("dim", right, bottom + 28, x_name, anchor="end")
    drawing.add_text("dim", 12, TOP - 12, y_name)
    for value, text in marks:
        x = place_x(value)
        drawing.add_line("mark", [(x, TOP), (x, bottom)], dashed=True)
        near = x + estimate_width(text, 10) + 8 > right
        drawing.add_text("mark", x - 4 if near else x + 4, TOP + 24, text,
                         anchor="end" if near else "start", size=10)  # fmt: skip
    for k, line in enumerate(lines):
        colour = LINES[k % len(LINES)]
        path = [(place_x(x), place_y(y)) for x, y in line.points]
        if line.dots:
            drawing.add_rects(colour, [(x - 3.5, y - 3.5, 7, 7) for x, y in path])
            continue
        if line.stepped:
            path = [
                each
                for here, after in zip(path, [*path[1:], path[-1]], strict=True)
                for each in (here, (after[0], here[1]))
            ]
        if path:
            drawing.add_line(colour, path, 2.2, dashed=line.dashed)
    return drawing
