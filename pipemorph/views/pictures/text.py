"""Renders a timeline for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.views.pictures.timeline import Timeline, compute_idle_fraction, trace_in_flight

# Upper case for even microbatches, lower case for odd ones, to distinguish neighbours.
LETTERS = {OpKind.F: "Ff", OpKind.B: "Bb", OpKind.W: "Ww", OpKind.BW: "Xx"}
IDLE = "·"


def render_text(timeline: Timeline, width: int = 100) -> str:
    """Render a row per stage, in ``width`` columns of equal time with their longest activity."""
    begin, end = timeline.begin, timeline.end
    lines = [timeline.title] if timeline.title else []
    wide = max(len(timeline.format_row_name(i)) for i in range(len(timeline.stages)))
    for i, ops in enumerate(timeline.stages):
        peak = max((now for _, now in trace_in_flight(ops)), default=0)
        lines.append(
            f"{_pad_row_name(timeline.format_row_name(i), wide)}"
            f" |{_render_row(ops, begin, end, width)}|"
            f" idle {compute_idle_fraction(ops, begin, end):4.0%}, in flight ≤ {peak}"
        )
    margin = " " * (wide + 2)
    last = f"{(end - begin) * 1e3:g} ms"
    lines.append(f"{margin}0{last:>{width - 1}}")
    kinds = {op.kind for ops in timeline.stages for op in ops}
    names = {
        OpKind.F: "F forward",
        OpKind.B: "B backward for the input",
        OpKind.W: "W backward for the weights",
        OpKind.BW: "X fused backward",
    }
    if timeline.bubbles and (idle := _format_idle_shares(timeline)):
        lines.append(margin + "idle by cause: " + idle)
    legend = [text for kind, text in names.items() if kind in kinds] + [f"{IDLE} idle"]
    lines.append(margin + ", ".join(legend) + "; case changes with the microbatch")
    return "\n".join(lines)


def _pad_row_name(name: str, wide: int) -> str:
    """Name of a row, with stage numbers right-aligned."""
    word, number = name.split(" ", 1)
    return f"{word} {number:>{wide - len(word) - 1}}"


def _format_idle_shares(timeline: Timeline) -> str:
    """Shares of all stages' time, largest first: ``fill 3.1%, link 2.0%``."""
    whole = len(timeline.stages) * (timeline.end - timeline.begin)
    shares = {
        cause: sum(b.end - b.start for row in timeline.bubbles for b in row if b.cause is cause)
        for cause in IdleCause
    }
    ordered = sorted(shares, key=lambda cause: -shares[cause])
    return ", ".join(f"{cause} {shares[cause] / whole:.1%}" for cause in ordered if shares[cause])


def _render_row(ops: Sequence[TimedOp], begin: float, end: float, width: int) -> str:
    step = (end - begin) / width
    if step <= 0:
        return IDLE * width
    row = []
    first = 0
    for column in range(width):
        start, stop = begin + column * step, begin + (column + 1) * step
        while first < len(ops) and ops[first].end <= start:
            first += 1
        shares: dict[str, float] = {}
        busy = 0.0
        at = first
        while at < len(ops) and ops[at].start < stop:
            op = ops[at]
            share = min(stop, op.end) - max(start, op.start)
            letter = LETTERS[op.kind][op.microbatch % 2]
            shares[letter] = shares.get(letter, 0.0) + share
            busy += share
            at += 1
        shares[IDLE] = step - busy
        row.append(max(shares, key=lambda letter: shares[letter]))
    return "".join(row)
