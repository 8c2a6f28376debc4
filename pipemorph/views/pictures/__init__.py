"""Drawing kit of all pages and pictures: palette, pages, steps, charts.

:func:`fill_template` makes a page, :func:`draw_steps` and :func:`draw_chart` a :class:`Drawing`,
which becomes SVG or PNG.
"""

from pipemorph.planning.simulation.simulator import Message
from pipemorph.views.pictures.chart import ChartLine, ChartSpan, draw_chart
from pipemorph.views.pictures.drawing import Drawing
from pipemorph.views.pictures.html import fill_template, render_html
from pipemorph.views.pictures.step_drawing import draw_steps
from pipemorph.views.pictures.text import render_text
from pipemorph.views.pictures.timeline import Timeline

__all__ = [
    "ChartLine",
    "ChartSpan",
    "Drawing",
    "Message",
    "Timeline",
    "draw_chart",
    "draw_steps",
    "fill_template",
    "render_html",
    "render_text",
]
