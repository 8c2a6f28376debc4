"""Optional packages: how to install them for this Python.

Packages are named one by one: ``pipemorph`` of a package index need not be this project.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib import metadata
from typing import Literal

from pipemorph.errors import InputError

MIN_TORCH = (2, 11)
"""The version of torch that pyproject.toml requires. Vendors' images bring torch without pip."""

Extra = Literal["trainer", "pictures", "parquet", "completion"]


def format_install_command(extra: Extra) -> str:
    """The command that installs the packages of ``extra``, an optional dependency of
    pyproject.toml, for this Python."""
    try:
        required = metadata.requires("pipemorph") or []
    except metadata.PackageNotFoundError:
        # Imported from a source tree.
        return f"pip install -e '.[{extra}]' in the folder with pipemorph's pyproject.toml"
    packages = [
        shlex.quote(package.strip())
        for package, _, marker in (each.partition(";") for each in required)
        if f"extra == '{extra}'" in marker.replace('"', "'")
    ]
    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(packages)}"


def require_trainer(what: str) -> None:
    """Raise :class:`InputError` if this Python lacks packages of ranks. ``what``: plural
    subject."""
    for package in ("torch", "numpy"):
        try:
            found = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise missing_package_error(f"{what} need {package}", "trainer")
    require_torch_version()


def require_torch_version() -> None:
    """Raise :class:`InputError` if the installed torch is older than :data:`MIN_TORCH`. Reads its
    metadata and does not import it; without metadata, as of a source tree, there is no check."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    if (found := re.match(r"(\d+)\.(\d+)", version)) and (
        (int(found[1]), int(found[2])) < MIN_TORCH
    ):
        least = ".".join(map(str, MIN_TORCH))
        raise InputError(
            f"torch {version} is installed, the trainer needs {least} or newer: "
            f"{format_install_command('trainer')}"
        )


def missing_package_error(what: str, extra: Extra) -> InputError:
    """Error of a missing package. ``what``: the beginning of the message, up to the package."""
    return InputError(f"{what}, which is not installed: {format_install_command(extra)}")
