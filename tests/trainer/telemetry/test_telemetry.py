"""Reports of a rank: wire times, op times, iterations, traces and what was injected."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, median_low
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks

from pipemorph.planning import OpKind
from pipemorph.protocol import IterationSample, LinkSample
from pipemorph.protocol.rank_messages import RankAnswer
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import EmulatedStage, Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.executor.collector_pauses import PauseTimes
from pipemorph_trainer.executor.device_times import MeasuredOp
from pipemorph_trainer.executor.waiting import CollectiveWaiter, CurrentWait
from pipemorph_trainer.executor.work_spread import WorkVariance
from pipemorph_trainer.telemetry import reporter
from pipemorph_trainer.telemetry.iteration_reducer import IterationReducer
from pipemorph_trainer.topology.groups import ProcessGroups
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.topology.world import World

HEAD_OF_LINE_MS = 300.0
ROUTES = ["direct", pytest.param("delegated", marks=pytest.mark.needs_engine)]
OPS = ("forward", "backward_input", "backward_weight")
TIMES = (0.004, 0.005, 0.002)
MICROBATCHES, ITERATIONS = 8, 4


@dataclass
class Recorder:
    """Control line that records published messages."""

    messages: list[RankTelemetry] = field(default_factory=list)
    requested_ops_iteration: int = -1

    def publish(self, telemetry: RankTelemetry) -> None:
        self.messages.append(telemetry)

    def pop_newest_plan(self) -> RankPlan | None:
        return None

    def pop_answers(self) -> list[RankAnswer]:
        return []

    acknowledges = False
    connections = 0

    def close(self) -> None:
        """Close nothing, as nothing is open."""


def entry(
    context: TrainerContext,
    route: str,
    faults: list[Fault],
    policy: str = "zero-bubble",
    clips: Sequence[bool] = (True,) * ITERATIONS,
) -> tuple[list[RankTelemetry], list[float]]:
    control = Recorder()
    losses = []
    with Pipeline(
        EmulatedStage(*TIMES, message_bytes=4096),
        context=context,
        microbatches=MICROBATCHES,
        policy=policy,
        options=Options(route=route, faults=faults, control=control),  # type: ignore[arg-type]
        deadline_seconds=30,
    ) as pipe:
        for iteration in range(ITERATIONS):
            losses.append(float(pipe.step()))
            if clips[iteration]:
                pipe.clip_grad_norm_(1.0)
    return control.messages, losses


def finished_of(messages: list[RankTelemetry]) -> list[IterationSample]:
    reports = [message.report for message in messages if message.report is not None]
    return [each.finished_iteration for each in reports if each.finished_iteration is not None]


def samples(messages: list[RankTelemetry], direction: str) -> list[LinkSample]:
    return [s for m in messages for s in m.links if s.direction == direction]


@pytest.mark.times
@pytest.mark.parametrize("route", ROUTES)
def test_an_injected_delay_is_what_is_measured(route: str) -> None:
    delay = Fault(link=0, delay_ms=30.0, from_iteration=1, to_iteration=3)
    results = run_ranks(2, entry, route, [delay])
    for rank, direction in ((1, "forward"), (0, "backward")):
        found = samples(results[rank][0], direction)
        held = [s for s in found if s.iteration in (1, 2)]
        free = [s for s in found if s.iteration in (0, 3)]
        assert sum(s.wire.count for s in held) == 2 * MICROBATCHES
        # Held on its queue for 30 ms, to the microsecond; queueing is apart. A receiver that
        # a busy machine has stopped sees a message late, and none early.
        assert {sample.route for sample in held} == {route}
        least = [sample.wire.min for sample in held]
        for value in (min(least), median(least)):
            assert value == pytest.approx(0.030, abs=1e-4), held
        assert median(sample.wire.p50 for sample in held) < 0.045, held
        assert sum(s.wire.exact for s in held) > MICROBATCHES
        assert sum(s.wire.count for s in free) == 2 * MICROBATCHES
        assert min(s.wire.min for s in free) < 0.010
    if route == "direct":
        queued = [s.queue_p50 for s in samples(results[1][0], "forward") if s.iteration in (1, 2)]
        assert max(queued) > 0.020, "a slow direct link must queue"


@pytest.mark.times
def test_a_slow_link_is_reported_before_the_iteration_ends() -> None:
    results = run_ranks(2, entry, "direct", [Fault(link=0, delay_ms=40.0)])
    first = [m for m in results[1][0] if m.iteration == 0 and m.links and m.profile is None]
    assert first, "nothing was reported in mid-iteration"
    measured = [sample.wire.p50 for message in first for sample in message.links]
    assert pytest.approx(0.040, abs=1e-3) in measured


def unheard(context: TrainerContext) -> tuple[int, int]:
    """Messages made, and the most samples held at an end of an iteration."""
    held = 0
    with (
        patch.object(reporter, "RankTelemetry") as made,
        Pipeline(
            EmulatedStage(*TIMES, message_bytes=4096),
            context=context,
            microbatches=MICROBATCHES,
            policy="zero-bubble",
        ) as pipe,
    ):
        for _ in range(2 * ITERATIONS):
            pipe.step()
            ends = pipe._parts.reporter._ends
            held = max(held, *(len(end.recorder._messages) for end in ends))
    return made.call_count, held


def test_without_an_agent_nothing_is_reported_and_nothing_piles_up() -> None:
    for made, held in run_ranks(2, unheard):
        assert made == 0
        assert held <= 3 * MICROBATCHES


@pytest.mark.times
def test_profiles_and_iterations() -> None:
    results = run_ranks(2, entry, "direct", [])
    for rank, (messages, _) in enumerate(results):
        profiles = [m.profile for m in messages if m.profile is not None]
        assert len(profiles) == ITERATIONS
        for profile in profiles:
            assert profile.stage == rank
            assert profile.split == "emulated"
            assert profile.peak_memory > 1 << 20
        for kind, wanted in zip(OPS, TIMES, strict=True):
            measured = [getattr(profile, kind) for profile in profiles]
            # An op is shorter by what the one before it ran over, 2 ms at most. A busy machine may
            # make those of an iteration longer.
            assert wanted - 0.002 <= min(measured)
            assert median_low(measured) < wanted + 0.02, measured
        assert messages[0].state == "starting"
        assert messages[-1].state == "finished"
    finished = finished_of(results[0][0])
    assert [f.index for f in finished] == list(range(ITERATIONS))
    assert [f.loss for f in finished] == pytest.approx(results[0][1])
    busy = MICROBATCHES * sum(TIMES)
    for sample in finished:
        assert busy <= sample.ops_seconds <= sample.seconds
        assert 0.0 < sample.bubble_fraction <= 1.0
    assert median_low(sample.bubble_fraction for sample in finished) < 0.8
    assert not finished_of(results[1][0])


def test_a_barrier_between_iterations_is_reported() -> None:
    results = run_ranks(2, entry, "direct", [], "zero-bubble", (True, False, False, True))
    finished = finished_of(results[0][0])
    assert [sample.barrier for sample in finished] == [True, False, False, True]
    for sample in finished:
        assert 0.0 < sample.bubble_fraction <= 1.0


@pytest.mark.full
@pytest.mark.parametrize("route", ROUTES)
def test_traces_and_the_record_of_faults(route: str, tmp_path: Path) -> None:
    faults = [Fault(link=0, delay_ms=10.0, from_iteration=1, to_iteration=2)]
    if route == "delegated":
        faults.append(Fault(link=0, from_iteration=2, sever="data"))
    run_ranks(2, entry, route, faults, context={"trace_dir": tmp_path})
    for rank in range(2):
        lines = [
            json.loads(line)
            for line in (tmp_path / f"ops-rank{rank}.jsonl").read_text().splitlines()
        ]
        assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
        for line in lines:
            assert (line["rank"], line["stage"], line["replica"]) == (rank, rank, 0)
            assert line["emulated"] is True
            assert line["plan_version"] == 0
            kinds = [op[0] for op in line["ops"]]
            assert {k: kinds.count(k) for k in "FBW"} == dict.fromkeys("FBW", MICROBATCHES)
            times = [t for op in line["ops"] for t in op[2:]]
            assert times == sorted(times)
            assert times[0] >= 0
        record = json.loads((tmp_path / f"faults-rank{rank}.json").read_text())
        delay = record["faults"][0]
        assert delay["messages_held"] == MICROBATCHES
        assert delay["hold_seconds"] == pytest.approx(0.010 * MICROBATCHES, rel=1e-3)
        assert (delay["first_iteration"], delay["last_iteration"]) == (1, 1)
        cuts = [entry for entry in record["faults"] if "sever" in entry]
        assert [cut["applied"] for cut in cuts] == (
            [True] if route == "delegated" and not rank else []
        )


def fourth_forward(context: TrainerContext, route: str) -> float:
    """Seconds from the end of stage 0's F0 to the start of its F3, in an iteration for which the
    neighbour has granted the slots of a delegated route."""
    with Pipeline(
        EmulatedStage(*TIMES, message_bytes=4096),
        context=context,
        microbatches=6,
        policy="gpipe",
        options=Options(route=route, faults=[Fault(link=0, delay_ms=HEAD_OF_LINE_MS)]),  # type: ignore[arg-type]
    ) as pipe:
        for _ in range(1 if route == "direct" else 2):
            pipe.step()
    trace = (context.trace_dir / f"ops-rank{context.rank}.jsonl").read_text()
    forwards = [op for op in json.loads(trace.splitlines()[-1])["ops"] if op[0] == "F"]
    return float(forwards[3][2] - forwards[0][3])


@pytest.mark.times
@pytest.mark.parametrize("route", ROUTES)
def test_a_slow_direct_link_blocks_compute_and_a_delegated_one_does_not(
    route: str, tmp_path: Path
) -> None:
    """Head of line: the third send waits for the first before F3 can start."""
    gap = run_ranks(2, fourth_forward, route, context={"trace_dir": tmp_path})[0]
    if route == "direct":
        assert gap >= 0.95e-3 * HEAD_OF_LINE_MS
    else:
        assert gap < 0.8e-3 * HEAD_OF_LINE_MS


def select_figures(each: IterationSample) -> tuple[int | float | None, ...]:
    spreads = each.work_spread, each.unexplained_spread
    return (each.index, each.gc_inside, each.gc_between, each.cost, *spreads)


def begun_apart(context: TrainerContext) -> list[tuple[int | float | None, ...]]:
    """Rank 1 begins iteration 1 long after rank 0, and has twice the work."""
    join_process_group(context, torch.device("cpu"))
    groups = ProcessGroups()
    world = SimpleNamespace(column=dist.GroupMember.WORLD, columns=None)
    wait = CollectiveWaiter(CurrentWait(f"rank {context.rank}"), 30.0)
    reduced: list[IterationSample] = []
    rounds = IterationReducer(world=cast(World, world), wait=wait, report=reduced.append)
    goes_on = groups.create_group(backend="gloo")
    rounds.begin_iteration(0, at=time.monotonic())
    costs = [2.0 + 2.0 * context.rank, 4.0 + 4.0 * context.rank]
    work = [WorkVariance(0.16 + 0.18 * context.rank, 0.01)] * 2
    ops = [MeasuredOp(OpKind.F, 0, 1.0, 2.0)]
    rounds.record_ops(0, 0, ops, 0.5, costs=costs, work=work)
    rounds.end_iteration(0, time.monotonic(), None, PauseTimes(0.1, 0.2 * context.rank))
    if context.rank == 1:
        dist.barrier(goes_on)
        rounds.begin_iteration(1, at=time.monotonic())
        rounds.finish_all()
        return list(map(select_figures, reduced))
    rounds.begin_iteration(1, at=time.monotonic())
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        rounds.report_finished()
        assert not reduced, "reported before all ranks had begun the next one"
    dist.barrier(goes_on)
    rounds.finish_all()
    return list(map(select_figures, reduced))


def test_an_iteration_is_reported_when_all_ranks_have_begun_the_next_one() -> None:
    """A rank that dies before that runs it again."""
    assert run_ranks(2, begun_apart) == [[(0, 0.1, 0.2, 6.0, 0.5, 0.1)]] * 2
