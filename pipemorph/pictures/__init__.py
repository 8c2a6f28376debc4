"""Timelines people look at: as text, as a picture, and for a trace viewer."""

from pipemorph.pictures.chrome import chrome_trace
from pipemorph.pictures.png import render_panels, render_png
from pipemorph.pictures.text import render_text
from pipemorph.pictures.timeline import Message, Timeline

__all__ = ["Message", "Timeline", "chrome_trace", "render_panels", "render_png", "render_text"]
