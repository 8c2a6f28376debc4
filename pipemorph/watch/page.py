"""Renders the page of a running job as one self-contained HTML file."""

from __future__ import annotations

import json
from pathlib import Path

from pipemorph.pictures.colours import FILL, IDLE, IDLE_NAMES, IDLE_ON_DARK, INK, NAMES
from pipemorph.pictures.pages import fill
from pipemorph.planning.analysis.bubbles import Cause
from pipemorph.watch.document import LETTERS, WatchView

CAUSES = {Cause.ORDER: "order: nothing of another rank was missing"}
"""Other names than elsewhere, see :mod:`pipemorph.watch.idle`."""
STYLE = {
    "kinds": {
        LETTERS[kind]: {"name": NAMES[kind], "fill": FILL[kind], "ink": INK[kind]} for kind in FILL
    },
    "causes": {
        cause.value: {
            "name": CAUSES.get(cause, IDLE_NAMES[cause]),
            "fill": IDLE[cause],
            "dark": IDLE_ON_DARK[cause],
        }
        for cause in IDLE
    },
}


def render_page(view: WatchView) -> str:
    """The page with a document, from which it goes on by itself where that is ``live``."""
    return page_of(view.model_dump_json())


def page_of(view: str) -> str:
    """The same of a document as JSON."""
    data = f'{{"style":{json.dumps(STYLE)},"view":{view}}}'
    return fill(Path(__file__).with_name("page.html"), data)
