"""The arrows of the house: trainer → core, trainer → engine, and nothing back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_IN_CORE = {"torch", "kubernetes", "kopf", "pipemorph_trainer", "pipemorph_operator"}


def imported_packages(path: Path) -> set[str]:
    """Top-level packages a file imports anywhere, late imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_core_imports_neither_side() -> None:
    files = sorted((ROOT / "pipemorph").rglob("*.py"))
    assert len(files) > 5, "looked in the wrong place"
    broken = {
        str(path.relative_to(ROOT)): sorted(hit)
        for path in files
        if (hit := imported_packages(path) & FORBIDDEN_IN_CORE)
    }
    assert not broken, f"the core must not import these: {broken}"


def test_trainer_does_not_import_the_operator() -> None:
    files = sorted((ROOT / "trainer").rglob("*.py"))
    assert files
    assert not [p for p in files if "pipemorph_operator" in imported_packages(p)]


def test_agent_and_command_start_without_torch() -> None:
    """The agent must start fast, and `pipemorph plan` must run where torch is not."""
    code = (
        "import sys; import pipemorph.cli, pipemorph_trainer.agent.__main__; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr or "torch was imported"
