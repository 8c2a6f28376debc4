"""Packages that only ``make soak`` installs."""

from __future__ import annotations

import importlib.util

import pytest


def require_package(name: str) -> None:
    """Fail the test if a package is missing: a skip would pass for a check."""
    if importlib.util.find_spec(name) is None:
        pytest.fail(f"{name} is missing; `make soak` installs it", pytrace=False)
