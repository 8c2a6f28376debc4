"""Renders timelines as text and as pictures."""

from pipemorph.planning.simulation.simulator import Message
from pipemorph.views.pictures.html import render_html
from pipemorph.views.pictures.png import render_panels, render_png
from pipemorph.views.pictures.text import render_text
from pipemorph.views.pictures.timeline import Timeline

__all__ = [
    "Message",
    "Timeline",
    "render_html",
    "render_panels",
    "render_png",
    "render_text",
]
