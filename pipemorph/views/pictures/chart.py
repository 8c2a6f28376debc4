"""Draws a chart of lines over one axis, such as seconds over iterations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pipemorph.views.pictures.colours import LINES
from pipemorph.views.pictures.drawing import (
    Anchor,
    Drawing,
    estimate_width,
    format_mark,
    list_marks,
)

LEFT, RIGHT, TOP, AXIS = 62.0, 20.0, 74.0, 40.0
ROW = 14.0
"""Distance of the heights at which a label may be, pixels."""
CLEARANCE = 2.0
"""Least distance of a label from lines, pixels."""


class ChartLine(NamedTuple):
    """Line of a chart. ``points``: ascending x; ``stepped``: y holds until the next x; ``dots``:
    only marks, as for figures of others; they have the colours of the lines, in their order."""

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
    colours = [
        LINES[sum(each.dots == line.dots for each in lines[:k]) % len(LINES)]
        for k, line in enumerate(lines)
    ]
    sizes = [7.0 if line.dots else 11.0 for line in lines]
    drawing.add_legend(
        12, 30, list(zip(colours, [each.name for each in lines], strict=True)), sizes
    )
    for span in spans:
        begin, end = place_x(span.begin), place_x(span.end)
        drawing.add_rects("plot", [(begin, TOP, end - begin, bottom - TOP)])
    for value in list_marks(0.0, most, (bottom - TOP) / 45):
        y = place_y(value)
        drawing.add_line("rule", [(LEFT, y), (right, y)])
        drawing.add_text("dim", LEFT - 6, y, format_mark(value), anchor="end")
    for value in list_marks(low, high, (right - LEFT) / 90):
        drawing.add_text("dim", place_x(value), bottom + 11, format_mark(value), anchor="middle")
    drawing.add_text("dim", right, bottom + 28, x_name, anchor="end")
    drawing.add_text("dim", 12, TOP - 12, y_name)
    labels = _LabelPlacer(drawing, (LEFT, TOP, right, bottom))
    for value, _ in marks:
        upright = [(place_x(value), TOP), (place_x(value), bottom)]
        drawing.add_line("mark", upright, dashed=True)
        labels.paths.append(upright)
    for colour, line in zip(colours, lines, strict=True):
        path = [(place_x(x), place_y(y)) for x, y in line.points]
        if line.dots:
            drawing.add_rects(colour, [(x - 3.5, y - 3.5, 7, 7) for x, y in path])
            labels.paths += [[(x - 3.5, y), (x + 3.5, y)] for x, y in path]
            continue
        if line.stepped:
            path = [
                each
                for here, after in zip(path, [*path[1:], path[-1]], strict=True)
                for each in (here, (after[0], here[1]))
            ]
        if path:
            drawing.add_line(colour, path, 2.2, dashed=line.dashed)
            labels.paths.append(path)
    for span in spans:
        begin, end = place_x(span.begin), place_x(span.end)
        places: list[tuple[float, Anchor]] = [
            ((begin + end) / 2, "middle"), (begin + 4, "start"), (end - 4, "end"),
        ]  # fmt: skip
        labels.add_text("ink", span.text, 11, places)
    for value, text in marks:
        x = place_x(value)
        labels.add_text("mark", text, 10, [(x + 4, "start"), (x - 4, "end")])
    return drawing


Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class _LabelPlacer:
    """Adds texts within ``area``, each where the fewest lines and other texts are."""

    def __init__(self, drawing: Drawing, area: Box) -> None:
        self.drawing, self.area = drawing, area
        self.paths: list[Sequence[Point]] = []
        self.taken: list[Box] = []

    def add_text(
        self, colour: str, text: str, size: float, places: Sequence[tuple[float, Anchor]]
    ) -> None:
        """Add a text at the first of ``places`` (x and anchor) and the greatest height that cross
        least."""
        left, top, right, bottom = self.area
        wide = estimate_width(text, size)
        found: list[tuple[int, float, Anchor, float, Box]] = []
        for row in range(int((bottom - top) / ROW)):
            y = top + 8 + row * ROW
            for x, anchor in places:
                begin = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
                box = (begin, y - size / 2, begin + wide, y + size / 2)
                outside = 100 * (begin < left or begin + wide > right)
                found.append((outside + self._count_crossings(box), x, anchor, y, box))
        crossings, x, anchor, y, box = min(found, key=lambda each: each[0])
        self.taken.append(box)
        if crossings:  # No place is free, as for changes right after each other.
            self.drawing.add_rects("back", [(box[0], box[1], wide, size)])
        self.drawing.add_text(colour, x, y, text, anchor=anchor, size=size)

    def _count_crossings(self, box: Box) -> int:
        left, top, right, bottom = box
        wide = left - CLEARANCE, top - CLEARANCE, right + CLEARANCE, bottom + CLEARANCE
        texts = sum(a < right and b < bottom and c > left and d > top for a, b, c, d in self.taken)
        return texts + sum(
            any(_meets(wide, *ends) for ends in pairwise(path)) for path in self.paths
        )


def _meets(box: Box, begin: Point, end: Point) -> bool:
    """True if a line has a part within a box; cuts off what is beyond each side."""
    left, top, right, bottom = box
    (x, y), dx, dy = begin, end[0] - begin[0], end[1] - begin[1]
    first, last = 0.0, 1.0
    for step, room in ((-dx, x - left), (dx, right - x), (-dy, y - top), (dy, bottom - y)):
        if step == 0.0 and room < 0.0:
            return False
        if step < 0.0:
            first = max(first, room / step)
        elif step > 0.0:
            last = min(last, room / step)
    return first <= last
