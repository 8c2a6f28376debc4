"""Faults that follow each other, for an hour: ``benchmarks/faults.py`` holds all
that is promised of each of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.needs_engine, pytest.mark.soak]

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks/faults.py"
SECONDS = float(os.environ.get("PIPEMORPH_FAULT_SECONDS", "300"))
"""`make soak` gives an hour."""
SECONDS_APART = 60


def disturbed(folder: Path, *options: str, deadline: float) -> dict[str, Any]:
    """Run the benchmark, and return its figures. It fails if any but the goodput does not hold."""
    figures = folder / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--out", str(folder / "runs")]
    benchmark = subprocess.Popen(
        [*command, "--json", str(figures), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = benchmark.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        # The benchmark ends its run on SIGINT.
        benchmark.send_signal(signal.SIGINT)
        said, _ = benchmark.communicate()
    print(said)
    assert benchmark.returncode == 0, said
    return json.loads(figures.read_text())


@pytest.mark.timeout(4 * SECONDS + 600)
def test_an_hour_of_faults(tmp_path: Path) -> None:
    faults = max(8, round(SECONDS / SECONDS_APART))
    options = ("--seconds", str(SECONDS), "--faults", str(faults), "--check")
    disturbed(tmp_path, *options, deadline=4 * SECONDS + 500)
