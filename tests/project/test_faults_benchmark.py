"""The benchmark of faults that follow each other draws what can be recovered from one by one."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import faults as benchmark

from pipemorph.spec.job_spec import PipeMorphJob

DRAWN, ITERATIONS = 120, 6000


@pytest.fixture(params=range(5))
def drawn(request: pytest.FixtureRequest) -> list[benchmark.DrawnFault]:
    return benchmark.draw_faults(DRAWN, ITERATIONS, random.Random(request.param))[0]


def test_each_kind_comes_as_often_and_is_over_before_the_next_fault(
    drawn: list[benchmark.DrawnFault],
) -> None:
    each = DRAWN // len(benchmark.KINDS)
    assert Counter(fault.kind for fault in drawn) == dict.fromkeys(benchmark.KINDS, each)
    ends = [0]
    for fault in drawn:
        assert fault.iteration > ends[-1]
        bounds = [entry["toIteration"] for entry in fault.to_spec_entries()]
        ends.append(max([fault.iteration, *bounds]))
    assert ends[-1] < ITERATIONS
    assert drawn[0].iteration >= benchmark.SETTLED


def test_a_data_path_is_cut_only_where_it_carries_the_link(
    drawn: list[benchmark.DrawnFault],
) -> None:
    cut: set[int] = set()
    seen: Counter[str] = Counter()
    for fault in drawn:
        if fault.kind in ("kill", "stop", "host"):
            cut.clear()
        for what in fault.severs:
            seen[what] += 1
            assert (what == "data") <= (fault.who in cut)
            assert (what == "direct") <= (fault.who not in cut)
            if what == "direct":
                cut.add(fault.who)
    assert set(seen) == {"direct", "control", "data"}


def test_the_faults_are_those_of_a_job(drawn: list[benchmark.DrawnFault], tmp_path: Path) -> None:
    entries = [entry for fault in drawn for entry in fault.to_spec_entries()]
    policy = {"maxRestarts": DRAWN, "hangSeconds": 3}
    made = benchmark.make_job(tmp_path, ITERATIONS, policy, 20, faults=entries)
    spec = PipeMorphJob.model_validate(made).spec
    assert len(spec.faults) == len(entries)
    assert spec.failure_policy.hang_seconds == 3


def test_too_few_iterations_are_refused() -> None:
    with pytest.raises(SystemExit, match="too few for 4 faults"):
        benchmark.draw_faults(
            4, benchmark.SETTLED + 4 * benchmark.LEAST_APART - 1, random.Random(0)
        )
