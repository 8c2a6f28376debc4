"""Peers that the agents of these tests are connected to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import MONITORS, Ingest


@pytest.fixture(autouse=True)
def new_ranks() -> Iterator[None]:
    yield
    MONITORS.clear()


@pytest.fixture
def ingest() -> Iterator[Ingest]:
    server = Ingest()
    yield server
    server.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("token\n")
    return path
