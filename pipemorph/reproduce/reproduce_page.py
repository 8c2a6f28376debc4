"""Renders compared figures as one self-contained HTML file, from the template ``page.html``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipemorph.views.pictures.html import fill_template


def render_reproduce_page(found: dict[str, Any]) -> str:
    """Page of the document of :func:`~pipemorph.reproduce.comparison.run_experiments`."""
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return fill_template(Path(__file__).with_name("page.html"), text)
