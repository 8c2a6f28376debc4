"""Renders timelines as text, as pictures, and for trace viewers."""

from pipemorph.pictures.chrome import chrome_trace
from pipemorph.pictures.html import render_html
from pipemorph.pictures.png import render_panels, render_png
from pipemorph.pictures.text import render_text
from pipemorph.pictures.timeline import Timeline
from pipemorph.planning.simulation.messages import Message

__all__ = [
    "Message",
    "Timeline",
    "chrome_trace",
    "render_html",
    "render_panels",
    "render_png",
    "render_text",
]
