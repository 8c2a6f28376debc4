"""Arguments and goals of benchmarks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Argument parser with ``--json``, described by a module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def finish_benchmark(goals: Iterable[tuple[str, bool]], file: Path | None, figures: Any) -> bool:
    """Print each goal and its result, and write the figures to ``file`` if it is given. Returns
    True if all goals hold."""
    write_figures(figures, file)
    return print_goals(goals)


def write_figures(figures: Any, file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def print_goals(goals: Iterable[tuple[str, bool]]) -> bool:
    """Print each goal and its result. Returns True if all goals hold."""
    missed = 0
    for text, holds in goals:
        print(f"{'ok ' if holds else 'NO '} {text}", flush=True)
        missed += not holds
    return not missed
