"""Fills templates of self-contained HTML files: nothing is loaded from elsewhere.

All pages share one look (``shared.css``) and a few functions (``shared.js``); a template names
where they go. Data is embedded as JSON.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

DATA, STYLE, SCRIPT = "{{DATA}}", "{{STYLE}}", "{{SCRIPT}}"


def fill(template: Path, data: str) -> str:
    """The page of a template. ``data``: JSON, plain ``<`` allowed."""
    # Escaped so that the JSON cannot end the script element or begin a comment. Last, so that a
    # text in it that reads like a mark of the template stays a text.
    return _styled(template).replace(DATA, data.replace("<", "\\u003c"))


@cache
def _styled(template: Path) -> str:
    text = template.read_text(encoding="utf-8")
    for mark, name in ((STYLE, "shared.css"), (SCRIPT, "shared.js")):
        shared = Path(__file__).with_name(name).read_text(encoding="utf-8")
        text = text.replace(mark, shared.strip("\n"))
    return text
