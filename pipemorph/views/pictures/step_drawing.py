"""Draws iterations as they run: a row per stage, on one time scale."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.planning.simulation.simulator import Message
from pipemorph.views.pictures.colours import IDLE_NAMES, LETTERS, NAMES
from pipemorph.views.pictures.drawing import Drawing, estimate_width, format_mark, list_marks
from pipemorph.views.pictures.timeline import Timeline, compute_idle_fraction, trace_in_flight

WIDTH = 1400.0
RIGHT = 150.0
"""Width of the figures beside each row, pixels."""
BAND = 26.0
"""Height of a slow link between the rows of its stages, pixels."""
NUMBER_SIZE = 9.0
MOST_ROWS_HEIGHT, MOST_ROW, LEAST_ROW = 420.0, 26.0, 7.0


def draw_steps(title: str, timelines: Sequence[Timeline], width: float = WIDTH) -> Drawing:
    """Draw timelines below each other, each from its own start. ``title``: of them all; empty if
    that of the only one suffices; ``width``: pixels."""
    first = title or timelines[0].title
    drawing = Drawing(width, "; ".join(filter(None, (title, *(t.title for t in timelines)))))
    drawing.add_text("ink", 12, 20, first, size=15, bold=True)
    y = drawing.add_legend(12, 34, _list_legend(timelines)) + 4
    span = max(1e-12, *(timeline.end - timeline.begin for timeline in timelines))
    for timeline in timelines:
        if title:
            drawing.add_text("ink", 12, y + 12, timeline.title, size=12, bold=True)
            y += 22
        y = _StepPanel(drawing, timeline, span, y).draw() + 10
    drawing.height = y
    return drawing


def _list_legend(timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    """Colours and names of everything drawn."""
    letters = {LETTERS[op.kind] for each in timelines for ops in each.stages for op in ops}
    causes = {b.cause for each in timelines for row in each.bubbles for b in row}
    entries = [(letter, name) for letter, name in NAMES.items() if letter in letters]
    if not all(timeline.bubbles for timeline in timelines):
        entries.append(("idle", "idle"))
    entries += [
        (cause.value, f"idle, {IDLE_NAMES[cause]}") for cause in IdleCause if cause in causes
    ]
    if any(timeline.messages for timeline in timelines):
        entries.append(("delayed", "slow link: its messages, from sent to arrived"))
    return entries


class _StepPanel:
    """Draws one timeline from ``top``. ``span``: seconds across the picture."""

    def __init__(self, drawing: Drawing, timeline: Timeline, span: float, top: float) -> None:
        self.drawing, self.timeline, self.span, self.top = drawing, timeline, span, top
        self.rows = len(timeline.stages)
        names = [timeline.format_row_name(i) for i in range(self.rows)]
        self.names = names
        self.left = 24 + estimate_width(max([*names, "link 00"], key=len), 10)
        self.right = drawing.width - RIGHT
        self.scale = (self.right - self.left) / span
        self.row = max(LEAST_ROW, min(MOST_ROW, MOST_ROWS_HEIGHT / self.rows))
        self.links = {} if timeline.placement else _group_by_link(timeline.messages)
        self.tops = []
        y = top
        for i in range(self.rows):
            self.tops.append(y)
            y += self.row + (BAND if i in self.links else 0)
        self.bottom = y

    def x(self, seconds: float) -> float:
        return self.left + (seconds - self.timeline.begin) * self.scale

    def draw(self) -> float:
        """Draw all; returns the end, with the axis."""
        self._draw_axis()
        for i in range(self.rows):
            self._draw_row(i)
        self._draw_numbers()
        for link, messages in self.links.items():
            self._draw_link(link, messages)
        for message in self.timeline.messages if self.timeline.placement else ():
            self._draw_message_of_placement(message)
        end = self.x(self.timeline.end)
        self.drawing.add_line("ink", [(end, self.top - 2), (end, self.bottom + 2)])
        return self.bottom + 18

    def _draw_axis(self) -> None:
        drawing = self.drawing
        marks = list_marks(0.0, self.span * 1e3, (self.right - self.left) / 110)
        for k, mark in enumerate(marks):
            x = self.left + mark / 1e3 * self.scale
            drawing.add_line("rule", [(x, self.top - 2), (x, self.bottom + 3)])
            text = format_mark(mark) + (" ms" if k == len(marks) - 1 else "")
            drawing.add_text("dim", x, self.bottom + 10, text, anchor="middle", size=10)

    def _draw_row(self, i: int) -> None:
        timeline, drawing, y = self.timeline, self.drawing, self.tops[i]
        ops, tall = timeline.stages[i], self.row - (2 if self.row > 12 else 1)
        begin, end = self.x(timeline.begin), self.x(timeline.end)
        drawing.add_rects("idle", [(begin, y, end - begin, tall)])
        for cause in IdleCause if timeline.bubbles else ():
            idle = [b for b in timeline.bubbles[i] if b.cause is cause]
            if idle:
                boxes = [(self.x(b.start), y, (b.end - b.start) * self.scale, tall) for b in idle]
                drawing.add_rects(cause.value, boxes)
        for kind, letter in LETTERS.items():
            boxes = []
            for op in ops:
                if op.kind is kind:
                    wide = (op.end - op.start) * self.scale
                    boxes.append((self.x(op.start), y, max(0.4, wide - (wide > 3)), tall))
            if boxes:
                drawing.add_rects(letter, boxes)
        if i % max(1, round(11 / self.row)) == 0:
            middle = y + max(tall, 9) / 2
            drawing.add_text("dim", self.left - 8, middle, self.names[i], anchor="end", size=10)
            share = compute_idle_fraction(ops, timeline.begin, timeline.end)
            peak = max((now for _, now in trace_in_flight(ops)), default=0)
            limit = timeline.limits[i] if timeline.limits else None
            of = f" of {limit}" if limit is not None else ""
            drawing.add_text(
                "dim", self.right + 12, middle, f"idle {share:.0%}, in flight ≤ {peak}{of}",
                size=10,
            )  # fmt: skip

    def _draw_numbers(self) -> None:
        """Write microbatches on kinds of ops of which nine of ten have room for the largest."""
        if self.row < 12:
            return
        every = [op for ops in self.timeline.stages for op in ops]
        for kind, letter in LETTERS.items():
            mine = [op for op in every if op.kind is kind]
            if not mine:
                continue
            need = 5.2 * len(str(max(op.microbatch for op in mine))) + 1.5
            if sum((op.end - op.start) * self.scale >= need for op in mine) < 0.9 * len(mine):
                continue
            for i, ops in enumerate(self.timeline.stages):
                for op in ops:
                    if op.kind is kind and (op.end - op.start) * self.scale >= need:
                        self.drawing.add_text(
                            f"on-{letter}", self.x((op.start + op.end) / 2),
                            self.tops[i] + self.row / 2 - 1, str(op.microbatch),
                            anchor="middle", size=NUMBER_SIZE,
                        )  # fmt: skip

    def _draw_link(self, link: int, messages: Sequence[Message]) -> None:
        """Draw a slow link in the band between its stages: each message from sent to arrived."""
        top, low = self.tops[link] + self.row, self.tops[link] + self.row + BAND - 3
        begin, end = self.x(self.timeline.begin), self.x(self.timeline.end)
        self.drawing.add_rects("plot", [(begin, top, end - begin, BAND - 3)])
        self.drawing.add_text(
            "ink", self.left - 8, top + BAND / 2, f"link {link}", anchor="end", size=10
        )
        for message in messages:
            y0, y1 = (top, low) if message.forward else (low, top)
            ends = [(self.x(message.sent), y0), (self.x(message.arrived), y1)]
            self.drawing.add_line("delayed", ends)
        late = median(message.arrived - message.sent for message in messages)
        self.drawing.add_text(
            "ink", self.right + 12, top + BAND / 2, f"{late * 1e3:.3g} ms per message", size=10
        )

    def _draw_message_of_placement(self, message: Message) -> None:
        """Draw a message between rows that are any two ranks."""
        ranks = self.timeline.placement[message.link], self.timeline.placement[message.link + 1]
        y0, y1 = (self.tops[rank] + self.row / 2 for rank in ranks[:: 1 if message.forward else -1])
        self.drawing.add_line(
            "delayed", [(self.x(message.sent), y0), (self.x(message.arrived), y1)]
        )


def _group_by_link(messages: Sequence[Message]) -> dict[int, list[Message]]:
    groups: dict[int, list[Message]] = {}
    for message in messages:
        groups.setdefault(message.link, []).append(message)
    return groups
