"""Idle time by cause: what is put into a simulated iteration is found, and nothing remains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipemorph.diagnose.analysis.idle_time import attribute_idle_time
from pipemorph.planning import Link, OpKind, Policy, Problem, StageTimes, plan
from pipemorph.planning.simulation.simulator import Simulation, simulate
from pipemorph.protocol import OpsTrace
from pipemorph.protocol.op_traces import RankTimes
from pipemorph.protocol.samples import IDLE_CAUSES

STAGES, EACH = 4, 8
UNIT = StageTimes(forward=0.02, backward_input=0.02, backward_weight=0.02)
CALM = Problem(
    microbatches=EACH, stages=(UNIT,) * STAGES, links=(Link(),) * (STAGES - 1),
    policy=Policy.ZERO_BUBBLE,
)  # fmt: skip
SCHEDULE = plan(CALM).schedule
NOTHING = (0.0,) * STAGES


def run_iteration(
    problem: Problem = CALM, before: Sequence[float] = NOTHING, **times: Sequence[float]
) -> list[OpsTrace]:
    """Simulate an iteration that ends with the norm of all ranks. ``before``: seconds that each
    rank spends before its ops, which ``times`` name."""
    simulation = simulate(SCHEDULE, problem, before=before)
    return trace_ranks([simulation], before, times)


def trace_ranks(
    columns: Sequence[Simulation], before: Sequence[float] = NOTHING, times: Any = None
) -> list[OpsTrace]:
    ends = [ops[-1].end for column in columns for ops in column.ranks]
    traces = []
    for place, column in enumerate(columns):
        for stage, ops in enumerate(column.ranks):
            origin = 1000.0 + before[stage] - (times or {}).get("drawn", NOTHING)[stage]
            rows, waits, at = [], [], 1000.0 + before[stage]
            for op in ops:
                start = 1000.0 + op.start
                if start > at:
                    waits.append((op.kind, op.microbatch, at, start))
                at = 1000.0 + op.end
                rows.append((op.kind, op.microbatch, start, at))
            rank_times = RankTimes(
                window=max(ends), norm=max(ends) - ops[-1].end,
                **{name: row[stage] for name, row in (times or {}).items()},
            )  # fmt: skip
            found = OpsTrace.from_ops(
                (place * STAGES + stage, stage, place), 3, 0, origin, rows,
                waits=waits, rank_times=rank_times,
            )  # fmt: skip
            assert found is not None
            traces.append(found)
    return traces


def count_idle(traces: Sequence[OpsTrace]) -> float:
    """Count the mean idle seconds of a rank."""
    busy = sum(sum(trace.durations) for trace in traces) / 1e6
    windows = [trace.rank_times.window for trace in traces if trace.rank_times is not None]
    return (sum(windows) - busy) / len(windows)


def scale_stage(stage: int, factor: float) -> Problem:
    slow = StageTimes(**{k: v * factor for k, v in UNIT.model_dump(exclude_unset=True).items()})
    stages = tuple(slow if i == stage else UNIT for i in range(STAGES))
    return CALM.model_copy(update={"stages": stages})


def test_without_causes_all_idle_time_is_the_bubble() -> None:
    found = attribute_idle_time(run_iteration())
    assert found is not None and set(found) == {*IDLE_CAUSES}
    assert found["bubble"] == pytest.approx(0.06, abs=1e-4)
    assert sum(abs(v) for k, v in found.items() if k != "bubble") < 1e-4


SLOW_UNIT = StageTimes(forward=0.03, backward_input=0.03, backward_weight=0.03)
LATE = CALM.model_copy(update={"links": (Link(), Link(delay=0.03), Link())})
VARYING = CALM.model_copy(update={"microbatch_costs": ((0.5, 1.6, 0.9, 1.5, 0.4, 1.7, 0.8, 0.6),)})


@pytest.mark.parametrize(
    ("cause", "traces"),
    [
        ("link", run_iteration(LATE)),
        ("stage", run_iteration(scale_stage(2, 1.5))),
        ("work", run_iteration(VARYING)),
        ("data", run_iteration(before=(0.1, 0, 0, 0), data=(0.1, 0, 0, 0))),
        ("data", run_iteration(before=(0.1, 0, 0, 0), drawn=(0.1, 0, 0, 0))),
        ("gc", run_iteration(before=(0, 0.1, 0, 0), gc=(0, 0.1, 0, 0))),
        ("checkpoint", run_iteration(before=(0.2,) * 4, checkpoint=(0.2,) * 4)),
    ],
)
def test_what_was_put_in_is_found(cause: str, traces: list[OpsTrace]) -> None:
    injected, idle = count_idle(traces) - count_idle(run_iteration()), count_idle(traces)
    found = attribute_idle_time(traces)
    assert found is not None and injected > 0.02
    assert sum(found.values()) == pytest.approx(idle, abs=1e-5)
    assert found[cause] == pytest.approx(injected, rel=0.1)  # type: ignore[index]
    assert abs(found["other"]) <= 0.03 * idle
    rest = {name: each for name, each in found.items() if name not in (cause, "bubble", "other")}
    assert max(rest.values()) <= 0.03 * idle, rest


def test_pauses_in_ops_and_between_them_count_as_pauses() -> None:
    """An op that was paused is no slower than others."""
    costs = [[1.0] * EACH for _ in range(STAGES)]
    costs[1][3] = 3.0
    paused = run_iteration(CALM.model_copy(update={"microbatch_costs": tuple(map(tuple, costs))}))
    slow = [op for op in paused[1].ops if op.microbatch == 3]
    assert paused[1].rank_times is not None
    times = paused[1].rank_times.model_copy(
        update={
            "pauses": [(round(1e6 * (op.start - paused[1].origin + 0.001)), 40_000) for op in slow]
        }
    )
    paused[1] = paused[1].model_copy(update={"rank_times": times})
    found = attribute_idle_time(paused)
    assert found is not None
    # Its own pauses count, too: they are no work.
    longer = count_idle(paused) - count_idle(run_iteration()) + 3 * 0.04 / STAGES
    assert found["gc"] == pytest.approx(longer, rel=0.02)
    assert found["stage"] + found["work"] < 0.002


def test_a_slow_device_of_one_replica_delays_all_of_them() -> None:
    calm, slow = simulate(SCHEDULE, CALM), simulate(SCHEDULE, scale_stage(2, 1.5))
    idle, usual = count_idle(trace_ranks([calm, slow])), count_idle(trace_ranks([calm, calm]))
    found = attribute_idle_time(trace_ranks([calm, slow]))
    assert found is not None and found["stage"] == pytest.approx(idle - usual, rel=0.02)


@pytest.mark.parametrize(("cause", "slow_stages"), [("stage", [1, 2]), ("work", [0, 1, 2, 3])])
def test_a_replica_with_more_work_is_no_slow_device(cause: str, slow_stages: list[int]) -> None:
    stages = tuple(SLOW_UNIT if i in slow_stages else UNIT for i in range(STAGES))
    calm, slow = simulate(SCHEDULE, CALM), CALM.model_copy(update={"stages": stages})
    traces = trace_ranks([calm, calm, simulate(SCHEDULE, slow)])
    added = count_idle(traces) - count_idle(trace_ranks([calm] * 3))
    found = attribute_idle_time(traces)
    assert found is not None and found[cause] == pytest.approx(added, rel=0.1)  # type: ignore[index]
    assert found["work" if cause == "stage" else "stage"] < 0.01 * added


def test_reductions_count_from_the_last_rank_on() -> None:
    """The first ranks wait for the last one, which is no reduction."""
    traces = run_iteration()
    ends = [sum(t.gaps) + sum(t.durations) for t in traces]
    latest = max(ends)
    rows = []
    for trace, end in zip(traces, ends, strict=True):
        assert trace.rank_times is not None
        waited = (latest - end) / 1e6
        window = trace.rank_times.window + 0.05
        update = {"window": window, "norm": 0.0, "tied": waited + 0.05}
        rows.append(
            trace.model_copy(update={"rank_times": trace.rank_times.model_copy(update=update)})
        )
    found = attribute_idle_time(rows)
    assert found is not None and found["reduction"] == pytest.approx(0.05, abs=1e-4)
    assert abs(found["other"]) < 1e-4


def test_clocks_of_other_hosts_do_not_matter() -> None:
    traces = run_iteration(LATE)
    for stage in range(1, STAGES):
        times = traces[stage].rank_times
        assert times is not None
        times = times.model_copy(update={"clock_offset": 5.0})
        traces[stage] = traces[stage].model_copy(
            update={"origin": traces[stage].origin + 5.0 * stage, "rank_times": times}
        )
    found, same = attribute_idle_time(traces), attribute_idle_time(run_iteration(LATE))
    assert found is not None and found == pytest.approx(same, abs=1e-5)


def test_several_stages_of_a_rank_are_one_rank() -> None:
    """Between stages of a rank there is no transfer, and idle time is that of ranks."""
    problem = CALM.model_copy(update={"policy": Policy.ZERO_BUBBLE_V, "placement": "v", "ranks": 2})
    problem = Problem.model_validate(problem.model_dump(exclude_unset=True))
    simulation = simulate(plan(problem).schedule, problem)
    last, traces = simulation.makespan, []
    for rank, ops in enumerate(simulation.ranks):
        for chunk, stage in enumerate(simulation.schedule.stages_by_rank[rank]):
            rows = [
                (op.kind, op.microbatch, 1000 + op.start, 1000 + op.end)
                for op in ops
                if op.chunk == chunk
            ]
            times = RankTimes(window=last, norm=last - ops[-1].end) if not chunk else None
            trace = OpsTrace.from_ops(
                (rank, stage, 0), 3, 0, 1000.0, rows, rank_times=times,
                waits=[(OpKind.F, 0, 1000.0, rows[0][2])],
            )  # fmt: skip
            assert trace is not None
            traces.append(trace)
    found = attribute_idle_time(traces)
    assert found is not None
    assert sum(found.values()) == pytest.approx(count_idle([t for t in traces if t.rank_times]) -
        sum(sum(t.durations) for t in traces if not t.rank_times) / 2e6, abs=1e-5)  # fmt: skip
    assert abs(found["other"]) <= 1e-4


def test_what_does_not_belong_together_has_no_causes() -> None:
    traces = run_iteration()
    assert attribute_idle_time([]) is None
    assert attribute_idle_time([replace_times(traces[0], None), *traces[1:]]) is None
    # An order in which the ranks would wait for each other for ever.
    backwards = traces[1].model_copy(update={"kinds": traces[1].kinds[::-1]})
    assert attribute_idle_time([traces[0], backwards, *traces[2:]]) is None


def replace_times(trace: OpsTrace, times: RankTimes | None) -> OpsTrace:
    return trace.model_copy(update={"rank_times": times})
