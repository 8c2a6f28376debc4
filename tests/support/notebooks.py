"""Runs the cells of a notebook in order, as Jupyter does, without its kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLIENT_NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/notebook/client.ipynb"


def run_cells(
    notebook: Path, names: dict[str, Any], *, tag: str | None = None, most: int = 1000
) -> int:
    """Run the first ``most`` cells of code with this tag, by default those without tags; returns
    their number. ``names``: global variables, which the cells change."""
    ran = 0
    for cell in json.loads(notebook.read_text())["cells"]:
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] != "code" or tags != ([tag] if tag else []) or ran == most:
            continue
        exec(compile("".join(cell["source"]), f"{notebook.name}:{cell['id']}", "exec"), names)
        ran += 1
    return ran
