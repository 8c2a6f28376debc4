"""A direct route that breaks costs nothing but the connection: no message, no bit, no restart."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from launch import Ranks
from trainer_jobs import Job, Record, assert_same, reference, train

from pipemorph.planning import Route
from pipemorph.protocol import LinkSample
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.executor import stage_executor
from pipemorph_trainer.schedule import iteration as iterations
from pipemorph_trainer.schedule import multi_stage_runner
from pipemorph_trainer.transport.channels import direct, failover
from pipemorph_trainer.transport.link_recorder import LinkRecorder

# Several runs in a test, each with a deadline of its own.
pytestmark = [pytest.mark.timeout(600)]

GIVEN_UP = re.compile(r"rank (\d) \(stage \d\), link (\d): the direct route failed: (.*);")
ITERATIONS = 4


def run(job: Job, entry: Any, *args: Any) -> tuple[list[Record], list[str]]:
    results = Ranks(job.stages, entry, job, *args).wait(90)
    for result in results:
        assert result.exitcode == 0, f"rank {result.rank}: {result.error or result.output}"
    return [result.value for result in results], [result.output for result in results]


def given_up(outputs: list[str]) -> set[tuple[int, int]]:
    """``(rank, link)`` of every end that gave its route up, each at most once."""
    found = [m for output in outputs for m in GIVEN_UP.findall(output)]
    ends = [(int(rank), int(link)) for rank, link, _ in found]
    assert len(ends) == len(set(ends)), f"an end gave up twice: {found}"
    return set(ends)


def watched(context: TrainerContext, job: Job) -> tuple[Record, list[LinkSample]]:
    """Train; also returns all samples of links that this rank has published."""
    seen: list[LinkSample] = []
    drain = LinkRecorder.drain_window

    def keep(self: Any, waited: float | None = None) -> LinkSample | None:
        sample = drain(self, waited)
        seen.extend([sample] if sample is not None else [])
        return sample

    LinkRecorder.drain_window = keep  # type: ignore[method-assign]
    return train(context, job), seen


def test_samples_tell_of_the_route_that_replaces_a_broken_one() -> None:
    """Samples change from the iteration in which it broke, so that it is known in this one."""
    fault = Fault(link=0, from_iteration=1, sever="direct")
    job = Job(2, 8, faults=[fault], iterations=3)
    values, _ = run(job, watched)
    for _, seen in values:  # type: ignore[misc]
        assert {(s.iteration, s.route, s.failed_over) for s in seen} >= {
            (0, Route.DIRECT, False), (1, Route.DELEGATED, True), (2, Route.DELEGATED, True),
        }  # fmt: skip
        assert all((s.route is Route.DELEGATED) == s.failed_over for s in seen)


def hurried(context: TrainerContext, job: Job) -> Record:
    """Train with iterations that are shorter than the time between checks of the control line."""
    iterations.PLAN_POLL_SECONDS = 60.0
    return train(context, job)


@pytest.mark.parametrize("dispatch", ["guided", pytest.param("static", marks=pytest.mark.full)])
def test_a_trace_that_cuts_every_direct_route_changes_no_bit(dispatch: str) -> None:
    faults = [Fault(link=link, from_iteration=1 + link, sever="direct") for link in (0, 1)]
    job = Job(3, 8, dispatch=dispatch, faults=faults, iterations=ITERATIONS)
    records, outputs = run(job, hurried)
    assert given_up(outputs) == {(0, 0), (1, 0), (1, 1), (2, 1)}
    assert_same(records, reference(job))


def cut_at(
    context: TrainerContext, job: Job, rank: int, iteration: int, op: int
) -> tuple[Record, int]:
    """Train; ``rank`` cuts all its direct routes before its ``op``-th op of ``iteration``.

    Also returns how many messages were sent a second time.
    """
    again = 0
    run_op, send_again = stage_executor.StageExecutor.run_op, failover.FailoverOutgoing.resend_from

    def run_and_cut(self: Any, kind: Any, microbatch: int) -> None:
        here = (context.rank, self._now.iteration, len(self._outcome.ops))
        if here == (rank, iteration, op):
            for end in filter(None, (self._up, self._down)):
                end.failover.incoming._direct.abort_connection()
        run_op(self, kind, microbatch)

    def count(self: Any, position: Any) -> None:
        nonlocal again
        again += sum(unconsumed.position >= position for unconsumed in self._unconsumed)
        send_again(self, position)

    stage_executor.StageExecutor.run_op = run_and_cut  # type: ignore[method-assign]
    failover.FailoverOutgoing.resend_from = count  # type: ignore[method-assign]
    return train(context, job), again


MOMENTS = ((0, 0), (0, 3), (1, 0), (1, 5), (1, 11))
"""Iterations, and their ops."""


@pytest.mark.parametrize(
    ("rank", "moments"),
    [
        # The rank in the middle cuts both links, with both of their ends.
        pytest.param(1, MOMENTS, marks=pytest.mark.full),
        pytest.param(0, MOMENTS[1::2], marks=pytest.mark.full),
        pytest.param(2, MOMENTS[1::2], marks=pytest.mark.full),
        pytest.param(0, MOMENTS[::2], marks=pytest.mark.soak),
        pytest.param(2, MOMENTS[::2], marks=pytest.mark.soak),
    ],
)
def test_wherever_in_an_iteration_it_breaks(
    rank: int, moments: tuple[tuple[int, int], ...]
) -> None:
    """The first iteration, too, whose shapes are being exchanged. Forwards, backwards and the
    messages of both on the way are lost somewhere among these."""
    resent = 0
    job = Job(3, 8, policy="1f1b", iterations=2)
    wanted = reference(job)
    ends = {0: {(0, 0), (1, 0)}, 2: {(1, 1), (2, 1)}}
    ends[1] = ends[0] | ends[2]
    # Messages on their way at a moment depend on the machine: if none was, others are tried.
    others = [moment for moment in MOMENTS if moment not in moments]
    for number, (iteration, op) in enumerate((*moments, *others)):
        if number >= len(moments) and resent:
            break
        values, outputs = run(job, cut_at, rank, iteration, op)
        assert given_up(outputs) == ends[rank], (iteration, op)
        assert_same([record for record, _ in values], wanted)  # type: ignore[misc]
        resent += sum(again for _, again in values)  # type: ignore[misc]
    assert resent, f"nothing was on its way in any of {MOMENTS}: they show nothing"


def deaf_at_the_end(context: TrainerContext, job: Job, through: str) -> Record:
    """Train; the last gradients of the last iteration do not get to rank 0, which finds out
    when rank 1 is through with its ops, or shows for some seconds that it is not."""
    post, run_ops = (
        direct.DirectIncoming._post_receive,
        multi_stage_runner.MultiStageRunner.run_iteration,
    )
    posted = 0

    def refuse(self: Any, batch: Any) -> Any:
        nonlocal posted
        posted += batch.iteration == job.iterations - 1
        if context.rank == 0 and posted == job.microbatches - 1:
            deadline = time.monotonic() + 3
            while not Path(through).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise RuntimeError("no more")
        return post(self, batch)

    def run_and_tell(self: Any, plan: Any) -> None:
        run_ops(self, plan)
        if context.rank == 1 and self._call.iteration == job.iterations - 1:
            Path(through).touch()

    direct.DirectIncoming._post_receive = refuse  # type: ignore[method-assign]
    multi_stage_runner.MultiStageRunner.run_iteration = run_and_tell  # type: ignore[method-assign]
    return train(context, job)


def test_a_rank_that_is_through_still_gives_what_its_neighbour_lost(tmp_path: Path) -> None:
    """Were it in a collective, it would wait for the neighbour that waits for it."""
    # All forwards come first, so that rank 1 needs nothing of rank 0 in the end.
    job = Job(2, 8, policy="gpipe", iterations=2, deadline=15.0)
    records, outputs = run(job, deaf_at_the_end, str(tmp_path / "through"))
    assert given_up(outputs) == {(0, 0), (1, 0)}
    assert_same(records, reference(job))
