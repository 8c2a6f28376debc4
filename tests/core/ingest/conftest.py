"""Shared by the tests of the page of a job."""

from __future__ import annotations

import pytest

from pipemorph.ingest.watch import desk as watching
from pipemorph.ingest.watch import process as watch_process
from pipemorph.watch import documents


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is answered with a new document, and all ops are read."""
    monkeypatch.setattr(documents, "EVERY", 0.0)
    monkeypatch.setattr(watching, "OPS_BURST", 1000.0)
    monkeypatch.setattr(watching, "REQUEST_BURST", 1e6)
    # On a busy machine it would take minutes to start.
    monkeypatch.setattr(watch_process, "NICE", 0)
