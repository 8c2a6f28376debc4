"""Traces of ``torch.profiler`` of torch's own schedules, against observation in the same processes.

``benchmarks/profiler_traces.py`` has all five schedules on four ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from profiled_pipelines import (
    PipelineRun,
    change_trace,
    compare_operations,
    profile_into,
    read_profiles,
)

from pipemorph.diagnose import operation

QUICK: dict[str, Any] = {"microbatches": 4, "steps": 2}
BOUND = re.compile(r"at most ([\d.]+) (µs|ms|s)")
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


def bound_of(notes: list[str]) -> float:
    """Seconds of the error that the notes bound."""
    for note in notes:
        if note.startswith("Clocks of the ranks are aligned") and (found := BOUND.search(note)):
            return float(found[1]) * SECONDS[found[2]]
    raise AssertionError(f"no bound is stated: {notes}")


@pytest.mark.parametrize(
    ("run", "labels"),
    [
        (PipelineRun("1F1B", evaluate=True, **QUICK), False),
        (PipelineRun("InterleavedZeroBubble", **QUICK), True),
        pytest.param(PipelineRun("GPipe", accumulate=2, **QUICK), True, marks=pytest.mark.full),
        pytest.param(PipelineRun("Interleaved1F1B", **QUICK), True, marks=pytest.mark.full),
        pytest.param(PipelineRun("ZBVZeroBubble", whole=True, **QUICK), True,
                     marks=pytest.mark.full),
    ],
    ids=lambda value: value.schedule if isinstance(value, PipelineRun) else "",
)  # fmt: skip
def test_every_op_is_found_with_its_microbatch(
    tmp_path: Path, run: PipelineRun, labels: bool
) -> None:
    profile_into(tmp_path, run, 2)
    change_trace(tmp_path / "rank1.json.gz", seconds=-5.0)
    notes: list[str] = []
    ops = read_profiles(tmp_path, notes)
    compared = compare_operations(ops, tmp_path, run)
    assert compared.recorded == compared.found > 0
    # Clocks of one machine differ by less than the bound, whatever else it does.
    assert abs(compared.clocks[0]) <= bound_of(notes) + 1e-4
    counts = {op.optype for op in ops}
    assert counts >= {*operation.TRANSFERS, operation.OPTIMIZER}
    if labels and "ZeroBubble" in run.schedule and not run.whole:
        # The same without labels: the way of the activations names the stages.
        for rank in range(2):
            change_trace(tmp_path / f"rank{rank}.json.gz", labels=False)
        again = compare_operations(read_profiles(tmp_path), tmp_path, run)
        assert again.recorded == again.found == compared.found


@pytest.mark.times
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_times_are_those_of_the_observation(tmp_path: Path, schedule: str) -> None:
    run = PipelineRun(schedule, steps=3)
    profile_into(tmp_path, run, 2)
    compared = compare_operations(read_profiles(tmp_path), tmp_path, run)
    for optype in compared.errors:
        limit = max(0.02 * compared.median_duration(optype), 0.0003)
        assert compared.median_error(optype) <= limit, optype
    assert sorted(map(abs, compared.bubbles))[len(compared.bubbles) // 2] <= 0.01
    assert abs(compared.clocks[0]) <= 0.001
