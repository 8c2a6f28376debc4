"""Records of runs: tests that were unstable, and the cost of each test file.

They are in ``$XDG_CACHE_HOME/pipemorph/tests``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
UNSTABLE_DAYS = 14


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipemorph" / "tests"


def note_unstable(names: Sequence[str], now: float | None = None) -> list[str]:
    """Record tests that failed and passed when run again. Returns those that were unstable in an
    earlier run of the last :data:`UNSTABLE_DAYS` days as well."""
    now = time.time() if now is None else now
    path = folder() / "unstable.json"
    since = now - UNSTABLE_DAYS * 86400
    known = [e for e in _load(path).get("unstable", []) if e["when"] > since]
    before = {entry["test"] for entry in known}
    if names:
        known += [{"test": name, "when": now} for name in names]
        _write(path, {"format": FORMAT, "unstable": known})
    return [name for name in names if name in before]


def note_costs(costs: Mapping[str, float]) -> None:
    """Record the processor seconds of test files, by path."""
    _write(folder() / "costs.json", {"format": FORMAT, "costs": {**known_costs(), **costs}})


def known_costs() -> dict[str, float]:
    """Processor seconds of test files in their last run, by path."""
    found: dict[str, float] = _load(folder() / "costs.json").get("costs", {})
    return found


def _load(path: Path) -> dict[str, Any]:
    """Content of a file: empty if it is absent or unreadable, since records only save time."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("format") == FORMAT else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=1))
    scratch.rename(path)
