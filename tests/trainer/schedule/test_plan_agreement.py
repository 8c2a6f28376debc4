"""Plan agreement: one column, one version. Plans held, stage 0's choice, when it is in force."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from launch import run_ranks
from trainer_jobs import Job, make_plan, part

from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.waiting import CollectiveWaiter, CurrentWait
from pipemorph_trainer.schedule.plan_agreement import CANDIDATES, Costs, PlanAgreement, TokenRelay
from pipemorph_trainer.schedule.plan_store import PlanStore
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.transport.control_socket import StepToken

STAGES = 4
FIRST = make_plan(Job(STAGES, 4), 0, "1f1b")
FIRST_OF_TWO = make_plan(Job(2, 4), 0, "1f1b")


def book(stage: int, stages: int = STAGES, first: Plan = FIRST) -> PlanStore:
    mesh = MeshShape(stages)
    return PlanStore(
        part(first, stage, mesh), mesh.find_coordinate(stage), [], no_offload={}, no_recompute={}
    )


# --- the plans of a rank --------------------------------------------------------------------


def test_a_plan_that_does_not_fit_is_not_held() -> None:
    job = Job(3, 4)
    mine = book(1, 3, make_plan(job, 0, "1f1b"))
    mesh = MeshShape(3)
    with pytest.raises(InputError, match="plan 1 has 3 stages and 5 microbatches; the job runs 3"):
        mine.prepare_plan(part(make_plan(Job(3, 5), 1, "1f1b"), 1, mesh))
    with pytest.raises(InputError, match="plan 2 has 2 stages and 4 microbatches; the job runs 3"):
        mine.prepare_plan(part(make_plan(Job(2, 4), 2, "1f1b"), 1, MeshShape(2)))
    with pytest.raises(InputError, match=r"plan 3 is of stages \[2\]; this rank has \[1\]"):
        mine.prepare_plan(part(make_plan(job, 3, "1f1b"), 2, mesh))
    assert mine.list_held_versions() == set()
    mine.prepare_plan(part(make_plan(job, 3, "gpipe"), 1, mesh))
    assert mine.list_held_versions() == {3}
    assert mine.commit_version(3)
    assert not mine.commit_version(3)
    mine.prepare_plan(
        part(make_plan(job, 2, "gpipe"), 1, mesh)
    )  # older than what runs: passed over
    assert mine.list_held_versions() == set()


def test_a_plan_that_is_not_held_is_not_run() -> None:
    with pytest.raises(PipelineError, match=r"rank 2 \(stage 2\) must run plan 5.*it holds 0"):
        book(2).commit_version(5)


def test_one_version_names_one_plan() -> None:
    """A token names the content of the plan, too."""
    mesh = MeshShape(2)
    one = make_plan(Job(2, 4), 1, "1f1b")
    sent: list[StepToken] = []
    passes = []
    for stage, mine in enumerate((one, replace(one, in_flight_limits=(4, 4)))):
        held = book(stage, 2, FIRST_OF_TWO)
        held.prepare_plan(part(mine, stage, mesh))
        up: Any = SimpleNamespace(peer_stage=0, socket=SimpleNamespace(tokens=deque()))
        down: Any = SimpleNamespace(socket=SimpleNamespace(send_token=sent.append))
        ends: Any = SimpleNamespace(
            upstream=up if stage else None, downstream=None if stage else down
        )
        mail: Any = SimpleNamespace(await_queue=lambda *_: sent[-1])
        passes.append(
            TokenRelay(mesh.find_coordinate(stage), ends, mail, PlanAgreement(held, None, None))
        )
    assert passes[0].start_iteration(0, None)[0] == 1
    with pytest.raises(PipelineError, match=r"plan 1 of rank 1 .* is [0-9a-f]{8}, that of stage 0"):
        passes[1].start_iteration(0, None)
    assert passes[0].start_iteration(0, None, evaluation=True)[0] == 0
    assert passes[1].start_iteration(0, None, evaluation=True)[0] == 0, "plan 0 is the same on both"


# --- a column in simulation -----------------------------------------------------------------


class Line:
    """Control socket whose messages arrive when the test lets them, in order."""

    def __init__(self) -> None:
        self.held: frozenset[int] = frozenset()
        self.on_held: Callable[[], None] = lambda: None
        self.up: deque[frozenset[int]] = deque()
        self.down: deque[tuple[int, int]] = deque()
        """Tokens: iteration and version."""

    def send_held(self, versions: frozenset[int]) -> None:
        self.up.append(versions)

    def deliver(self) -> None:
        self.held = self.up.popleft()
        self.on_held()


class Column:
    """Real books and agreements; links and time are the test's."""

    def __init__(self) -> None:
        self.lines = [Line() for _ in range(STAGES - 1)]
        ends = [None, *self.lines, None]
        self.books = [book(stage) for stage in range(STAGES)]
        self.agreements = [PlanAgreement(b, ends[i], ends[i + 1]) for i, b in enumerate(self.books)]
        self.ran: list[list[int]] = [[] for _ in range(STAGES)]
        """Version of each iteration, by stage."""

    def prepare(self, stage: int, version: int) -> None:
        plan = replace(FIRST, version=version)
        self.books[stage].prepare_plan(part(plan, stage, MeshShape(STAGES)))
        self.agreements[stage].send_held_versions()

    def begin(self) -> None:
        self._start(0, len(self.ran[0]), self.agreements[0].choose_version()[0])

    def _start(self, stage: int, iteration: int, version: int) -> None:
        assert iteration == len(self.ran[stage])
        if stage < STAGES - 1:
            self.lines[stage].down.append((iteration, version))
        self.books[stage].commit_version(version)
        self.ran[stage].append(version)

    def moves(self) -> list[Callable[[], None]]:
        """List everything that may happen next on the links."""
        found: list[Callable[[], None]] = [line.deliver for line in self.lines if line.up]
        for stage, line in enumerate(self.lines, 1):
            if line.down:
                found.append(lambda at=stage, by=line: self._start(at, *by.down.popleft()))  # type: ignore[misc]
        return found

    def settle(self) -> None:
        while moves := self.moves():
            moves[0]()


@given(
    arrivals=st.lists(st.tuples(st.integers(0, STAGES - 1), st.integers(1, 3)), max_size=24),
    order=st.lists(st.integers(0, 9), max_size=120),
)
def test_all_stages_run_one_version_in_an_iteration(
    arrivals: list[tuple[int, int]], order: list[int]
) -> None:
    """Plans arrive at any stage, in any order, late or never; messages take any time."""
    column = Column()
    pending = deque(arrivals)
    for drawn in order:
        moves = column.moves()
        if drawn < 3 and pending:
            column.prepare(*pending.popleft())
        elif drawn < 5 or not moves:
            column.begin()
        else:
            moves[drawn % len(moves)]()
    while pending:
        column.prepare(*pending.popleft())
    column.settle()
    held_by_all = set.intersection(*({v for s, v in arrivals if s == i} for i in range(STAGES)))
    column.begin()
    column.settle()
    assert all(ran == column.ran[0] for ran in column.ran)
    assert column.ran[0] == sorted(column.ran[0])
    assert set(column.ran[0]) <= held_by_all | {0}
    # Nothing is lost: the newest plan that has reached all stages is in force.
    assert column.ran[0][-1] == max(held_by_all, default=0)


def test_a_plan_is_in_force_in_the_iteration_after_the_last_stage_got_it() -> None:
    column = Column()
    column.begin()
    column.settle()
    for late in range(STAGES):
        version = late + 1
        for stage in range(STAGES):
            if stage != late:
                column.prepare(stage, version)
        column.settle()
        column.begin()
        column.settle()
        column.prepare(late, version)
        column.settle()
        column.begin()
        column.settle()
    assert column.ran == [[0, 0, 1, 1, 2, 2, 3, 3, 4]] * STAGES


def test_a_stage_sends_its_plans_once() -> None:
    column = Column()
    for stage in reversed(range(STAGES)):
        column.prepare(stage, 1)
        column.settle()
    for again in ("before it is in force", "and after"):
        column.agreements[1].send_held_versions()
        assert not any(line.up for line in column.lines), again
        column.begin()
        column.settle()


# --- columns that must change together ------------------------------------------------------


def choose_together(context: TrainerContext, held: list[list[int]]) -> tuple[int, Costs]:
    """Choose a version, without costs and with those of a rank."""
    join_process_group(context, torch.device("cpu"))
    mine = book(0)
    for version in held[context.rank]:
        mine.prepare_plan(part(replace(FIRST, version=version), 0, MeshShape(STAGES)))
    agreement = PlanAgreement(
        mine, None, None,
        together=dist.group.WORLD, wait=CollectiveWaiter(CurrentWait("rank"), 30.0),
    )  # fmt: skip
    without = agreement.choose_version()
    chosen = agreement.choose_version((1.0, 0.5, 2.0, context.rank + 3.0))
    assert without == (chosen[0], ())
    assert type(chosen[0]) is int, "a token is packed from whole numbers"
    dist.destroy_process_group()
    return chosen


def test_columns_that_share_collectives_choose_what_all_of_them_hold() -> None:
    most = (1.0, 0.5, 2.0, 4.0)
    """Costs of the column with the most work, for which all others wait in each op."""
    assert run_ranks(2, choose_together, [[2, 3, 5], [2, 3, 4]]) == [(3, most)] * 2
    many = list(range(3, 3 + CANDIDATES))
    found = run_ranks(2, choose_together, [many, [1]])
    assert found == [(0, most)] * 2, "the current one is always offered"
