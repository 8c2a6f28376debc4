"""The benchmark of a large job reports what its agent used."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import scale


@pytest.mark.full
def test_the_agent_of_a_large_job_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host receives the slow links, and answers with a plan."""
    monkeypatch.setattr(scale, "SETTLE", 1.5)
    monkeypatch.setattr(scale, "FAULT", 2.0)
    found = asyncio.run(scale.measure_large_job(32, 4, 1.5))
    assert all(0 <= found[phase] < 1 for phase in ("well", "one_slow", "half_slow"))
    assert found["plan_version"] >= 1 and found["reports"] > 3
    assert found["sent"] > 1000 and found["answered"] > 1000
