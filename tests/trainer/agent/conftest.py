"""What the agents of these tests are connected to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Ingest


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
