"""The product's Python files, wherever this interpreter finds its packages."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("pipemorph", "pipemorph_operator", "pipemorph_trainer")
SCRIPTS = ("examples", "__main__.py")
"""Folders and files that run something when they are imported; tests start them as processes."""


def find_product(packages: Sequence[str]) -> dict[str, Path]:
    """The files of ``packages`` by their path from the folder above their package."""
    files = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ImportError(f"{package} cannot be imported: `make setup`")
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            if not set(SCRIPTS) & set(file.relative_to(folder).parts):
                files[str(file.relative_to(folder.parent))] = file
    return files


def import_product(files: dict[str, Path]) -> dict[str, str]:
    """Import every file, so that its functions can be mutated, and return why some could not be
    (by path): an extra that is not installed."""
    failed = {}
    for path in files:
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  reported
            failed[path] = f"{type(error).__name__}: {error}"
    return failed
