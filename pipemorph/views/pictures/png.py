"""Renders a timeline as PNG: ops, bubbles, delays and microbatches in flight."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from pipemorph.extras import missing_package_error
from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.planning.ir import OpKind
from pipemorph.views.pictures.colours import BUBBLE, DELAY, FILL, IDLE, IDLE_NAMES, INK, NAMES
from pipemorph.views.pictures.timeline import Timeline, compute_idle_fraction, trace_in_flight

# Above this number, arrows hide the ops they belong to.
MOST_ARROWS = 160
INCHES_WIDE = 14.0


def render_png(timeline: Timeline) -> bytes:
    """Render a PNG. Raises :class:`InputError` if matplotlib is not installed."""
    stages = len(timeline.stages)
    rows = _rows_height(stages)
    figure = _make_figure(rows + 3.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[rows, 1.6])
    span = _duration_ms(timeline)
    _draw_panel(top, timeline, span, rows)
    handles = _make_legend([timeline])
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    _draw_in_flight(bottom, timeline, timeline.begin)
    top.set_xlim(0, span)
    bottom.set_xlabel("ms")
    return _encode_png(figure)


def render_panels(title: str, timelines: Sequence[Timeline]) -> bytes:
    """Render several timelines below each other on one time scale, each from its own start.

    Raises :class:`InputError` if matplotlib is not installed.
    """
    rows = max(_rows_height(len(timeline.stages)) for timeline in timelines)
    figure = _make_figure((rows + 0.8) * len(timelines) + 1.2)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    span = max(_duration_ms(timeline) for timeline in timelines)
    for axes, timeline in zip(panels, timelines, strict=True):
        _draw_panel(axes, timeline, span, rows)
        axes.axvline(_duration_ms(timeline), color="black", linewidth=0.8)
    panels[-1].set_xlim(0, span * 1.005)
    panels[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    handles = _make_legend(timelines)
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=min(5, len(handles)),
        fontsize=8,
        frameon=False,
    )
    return _encode_png(figure)


def _rows_height(stages: int) -> float:
    """Height in inches for the rows of ``stages``."""
    return max(1.6, min(0.42 * stages, 16.0))


def _duration_ms(timeline: Timeline) -> float:
    """Duration in milliseconds."""
    return max(timeline.end - timeline.begin, 1e-12) * 1e3


def _make_figure(height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_package_error("pictures need matplotlib", "pictures") from None
    figure = Figure(figsize=(INCHES_WIDE, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _encode_png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw_panel(axes: Any, timeline: Timeline, span: float, rows: float) -> None:
    """Draw ops, arrows and title. ``span``: width of the panel in milliseconds."""
    begin = timeline.begin
    _draw_ops(axes, timeline, begin, span, rows)
    _draw_arrows(axes, timeline, begin)
    axes.set_title(timeline.title, fontsize=11, loc="left")


def _draw_ops(axes: Any, timeline: Timeline, begin: float, span: float, rows: float) -> None:
    stages = len(timeline.stages)
    # A label must fit into its op: about 0.075 inch per character at 6 points.
    inches_per_ms = (INCHES_WIDE - 1.5) / span
    count = max(len(ops) for ops in timeline.stages)
    # White edges separate ops, but hide ops of only a few pixels.
    edge = 0.4 if count < 40 * INCHES_WIDE / 2 else 0.0
    for i, ops in enumerate(timeline.stages):
        axes.broken_barh([(0, _duration_ms(timeline))], (i - 0.45, 0.9), facecolor=BUBBLE)
        for cause in _list_causes([timeline]):
            idle = [
                ((bubble.start - begin) * 1e3, (bubble.end - bubble.start) * 1e3)
                for bubble in timeline.bubbles[i]
                if bubble.cause is cause
            ]
            axes.broken_barh(idle, (i - 0.45, 0.9), facecolor=IDLE[cause])
        for kind in OpKind:
            bars = [
                ((op.start - begin) * 1e3, (op.end - op.start) * 1e3)
                for op in ops
                if op.kind is kind
            ]
            if not bars:
                continue
            axes.broken_barh(
                bars, (i - 0.45, 0.9), facecolor=FILL[kind], edgecolor="white", linewidth=edge
            )
        for op in ops:
            text = str(op.microbatch)
            width = (op.end - op.start) * 1e3
            if rows / stages > 0.2 and width * inches_per_ms > 0.07 * len(text) + 0.02:
                axes.text(
                    (op.start - begin) * 1e3 + width / 2,
                    i,
                    text,
                    ha="center",
                    va="center",
                    fontsize=6,
                    color=INK[op.kind],
                )
    every = max(1, stages // 16)
    axes.set_yticks(range(0, stages, every))
    axes.set_yticklabels(
        [
            f"{timeline.format_row_name(i)}  idle"
            f" {compute_idle_fraction(timeline.stages[i], begin, timeline.end):.0%}"
            for i in range(0, stages, every)
        ],
        fontsize=8,
    )
    axes.set_ylim(stages - 0.5, -0.5)


def _make_legend(timelines: Sequence[Timeline]) -> list[Any]:
    """Legend entries for everything drawn in ``timelines``."""
    from matplotlib.patches import Patch

    kinds = {op.kind for timeline in timelines for ops in timeline.stages for op in ops}
    patches = [Patch(facecolor=FILL[kind], label=NAMES[kind]) for kind in OpKind if kind in kinds]
    causes = _list_causes(timelines)
    if not all(timeline.bubbles for timeline in timelines):
        patches.append(Patch(facecolor=BUBBLE, label="bubble"))
    patches += [Patch(facecolor=IDLE[cause], label=IDLE_NAMES[cause]) for cause in causes]
    if any(timeline.messages and not timeline.placement for timeline in timelines):
        patches.append(Patch(facecolor=DELAY, label="message on a slow link"))
    return patches


def _list_causes(timelines: Sequence[Timeline]) -> list[IdleCause]:
    """Causes of idle time in ``timelines``, in a fixed order."""
    found = {
        bubble.cause for timeline in timelines for bubbles in timeline.bubbles for bubble in bubbles
    }
    return [cause for cause in IdleCause if cause in found]


def _draw_arrows(axes: Any, timeline: Timeline, begin: float) -> None:
    if timeline.placement:
        return  # Rows are ranks, and a link may connect any two.
    every = max(1, -(-len(timeline.messages) // MOST_ARROWS))
    for message in timeline.messages[::every]:
        low, high = message.link + 0.45, message.link + 0.55
        start, stop = (low, high) if message.forward else (high, low)
        axes.annotate(
            "",
            xy=((message.arrived - begin) * 1e3, stop),
            xytext=((message.sent - begin) * 1e3, start),
            arrowprops={"arrowstyle": "-|>", "color": DELAY, "linewidth": 0.7, "mutation_scale": 5},
        )


def _draw_in_flight(axes: Any, timeline: Timeline, begin: float) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    stages = len(timeline.stages)
    shades = colormaps["viridis"]
    for i, ops in enumerate(timeline.stages):
        curve = trace_in_flight(ops)
        colour = shades(0.9 * i / max(1, stages - 1))
        axes.step(
            [0.0] + [(time - begin) * 1e3 for time, _ in curve],
            [0] + [now for _, now in curve],
            where="post",
            linewidth=1.0,
            color=colour,
            label=timeline.format_row_name(i) if i in (0, stages - 1) or stages <= 8 else None,
        )
    limits = [limit for limit in timeline.limits if limit is not None]
    for limit in sorted(set(limits)):
        whose = [i for i, other in enumerate(timeline.limits) if other == limit]
        everyone = len(whose) == stages
        axes.axhline(
            limit,
            color="#d3222a" if everyone else shades(0.9 * whose[0] / max(1, stages - 1)),
            linewidth=1.0,
            linestyle="--",
            label=f"cap {limit}" if everyone else f"cap {limit}, stage {_format_ranges(whose)}",
        )
    axes.set_ylabel("in flight", fontsize=8)
    # Room for the legend above the curves.
    axes.set_ylim(bottom=0, top=1.3 * max(1.0, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(loc="upper right", fontsize=7, ncols=4, edgecolor="none", framealpha=0.8)


def _format_ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` → ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
