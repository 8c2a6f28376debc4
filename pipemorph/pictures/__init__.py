"""Renders timelines as text and as pictures."""

from pipemorph.pictures.html import render_html
from pipemorph.pictures.png import render_panels, render_png
from pipemorph.pictures.text import render_text
from pipemorph.pictures.timeline import Timeline
from pipemorph.planning.simulation.simulator import Message

__all__ = [
    "Message",
    "Timeline",
    "render_html",
    "render_panels",
    "render_png",
    "render_text",
]
