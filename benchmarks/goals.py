"""How a benchmark begins and ends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--json`` that is described by a module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def finish(goals: Iterable[tuple[str, bool]], file: Path | None, figures: Any) -> bool:
    """Print each goal and whether it holds, and write the figures to ``file``, if one was given;
    whether all goals hold."""
    write(figures, file)
    return tell(goals)


def write(figures: Any, file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def tell(goals: Iterable[tuple[str, bool]]) -> bool:
    """Print each goal and whether it holds; whether all do."""
    missed = 0
    for text, holds in goals:
        print(f"{'ok ' if holds else 'NO '} {text}", flush=True)
        missed += not holds
    return not missed
