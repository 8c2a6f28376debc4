"""Runs the stages of one rank in turns: one executor and one token per stage, one order per rank.

The next op of the order waits for its message, on whichever stage it is; where dispatch varies, of
the ops of all stages that have begun the first runs whose message is here. Each kind of op runs in
microbatch order on every stage, so that results do not depend on the order.

A stage begins a call when its token arrives, which passes all stages of a column in their order. So
the second stage of a rank can begin when all stages between the two have begun. It does as soon as
its token is seen between two ops, so that its receives are posted, and at the latest before its
first op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import time
from typing import Any

from pipemorph.api.mesh import Coordinate, MeshShape
from pipemorph.planning import Dispatch, Op, OpKind, Schedule
from pipemorph.planning.offload import Residency
from pipemorph_trainer.agent.choosers import Candidate, Chooser
from pipemorph_trainer.agent.rank_plan import RankPlan, RankReceives, RankStage
from pipemorph_trainer.agent.receives import forward_ops, forward_window
from pipemorph_trainer.executor.device_times import TimedCopy, TimedOp
from pipemorph_trainer.executor.dispatch import (
    NEVER,
    Executor,
    Inputs,
    Outcome,
    StageIteration,
    Start,
)
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.links.message import RECEIVE_ALL, Receives
from pipemorph_trainer.plans.token import TokenPass


@dataclass
class Call:
    """A call of ``step`` or ``evaluate`` on this rank. ``inputs``, and ``shapes``, which change if
    those of the inputs do: by stage. ``refused``: an input of this rank does not fit."""

    iteration: int
    inputs: Mapping[int, Inputs]
    shapes: Mapping[int, Any]
    refused: bool = False
    evaluation: bool = False
    again: bool = False
    """Whether it was refused and begins again, with the results of the forwards that ran."""


class Turns:
    """The stages of this rank. ``executors``, ``tokens``: by stage. ``ends``: of links whose
    receives wait for ops of this rank, see :class:`Receives`. ``pace``: see :func:`run_ready`. Main
    thread only."""

    def __init__(
        self,
        coordinate: Coordinate,
        executors: Mapping[int, Executor],
        tokens: Mapping[int, TokenPass],
        mail: Mailbox,
        ends: Sequence[LinkEnd] = (),
        *,
        pace: Callable[[], None] | None = None,
    ) -> None:
        self._mesh, self._rank = coordinate.mesh, coordinate.along("pp")
        self._held, self._executors, self._tokens = coordinate.held, executors, tokens
        self._mail, self._ends, self._pace = mail, ends, pace
        # A stage may gather parameters when it begins, which all their ranks have to do in one
        # order.
        self._early = self._mesh.lockstep == 1
        self._call = Call(0, {}, {})
        self._first_start = Start()
        self._orders: Mapping[int, Sequence[Op]] = {}
        """Ops of the current call, by stage."""
        self._microbatches = 0
        self._plan: RankPlan | None = None
        self._pending: list[int] = []
        """Stages that have not begun the call yet, in order."""
        self._begun: dict[int, Executor] = {}
        """Executors of the stages that have begun the call."""
        self._noted: dict[int, tuple[int, int]] = {}
        """By stage, how many of its ops and copies :attr:`ran` and :attr:`copied` have."""
        self.outcomes: dict[int, Outcome] = {}
        """Of the newest call, by stage."""
        self.ran: list[tuple[int, TimedOp]] = []
        """``(stage, op)`` of the newest call, in the order run."""
        self.copied: list[tuple[int, TimedCopy]] = []
        """``(stage, copy)`` of activations in it, in order."""

    def start(self, call: Call) -> int:
        """Start a call: wait for the token of the first stage. Returns the version of the plan that
        it runs; an evaluation keeps the current one."""
        self._call, self.outcomes, self.ran, self.copied = call, {}, [], []
        self._begun = {}
        version, self._first_start = self._start(self._held[0])
        return version

    def run(self, plan: RankPlan) -> None:
        """Run the ops of the iteration that was started. Afterwards :attr:`refused` says whether it
        was refused anywhere, as far as this rank knows.

        Raises :class:`PipelineError`, which names the missing message, if it cannot be finished.
        """
        self._plan, self._microbatches = plan, plan.microbatches
        self._orders = plan.orders
        if plan.dispatch is Dispatch.GUIDED:
            self._run_ready(Chooser(plan))
        else:
            self._run(plan.order)
        for executor in self._executors.values():
            executor.end()
        self._mail.wait_until_taken()

    def evaluate(self, microbatches: int) -> None:
        """Run only the forwards of the evaluation that was started, without gradients. Call
        :meth:`end_uncounted` afterwards."""
        self._plan = None
        schedule = forwards(self._mesh, microbatches)
        self._microbatches = microbatches
        self._orders = dict(enumerate(schedule.stages))
        self._run([(self._held[op.chunk], op) for op in schedule.ranks[self._rank]])
        self._mail.wait_until_taken()

    def _run(self, order: Sequence[tuple[int, Op]]) -> None:
        """Run the ops of all stages in their order."""
        self._tell(0)
        self._pending = list(self._held)
        self._begin_next()
        if len(self._held) == 1:
            (stage,) = self._held
            run_op = self._executors[stage].run_op
            for _, op in order:
                run_op(op.kind, op.microbatch)
            self._ran_alone(stage)
            return
        for ran, (stage, op) in enumerate(order, 1):
            self._run_in_turn(stage, op)
            self._tell(ran)

    def _run_in_turn(self, stage: int, op: Op) -> None:
        while self._pending and self._pending[0] <= stage:
            self._begin_next()
        self._executors[stage].run_op(op.kind, op.microbatch)
        self._note(stage)

    def _run_ready(self, chooser: Chooser) -> None:
        """Run the ops of all stages as their messages arrive. Receives are posted as for the plan's
        order, as far as all ops of it have run."""
        self._tell(0)
        self._pending = list(self._held)
        self._begin_next()
        for stage, *_ in run_ready(chooser, self._begun, self._mail, pace=self._pace):
            self._note(stage)
            if self._ends:
                self._tell(chooser.in_turn())
        # Of a refused iteration.
        for stage, op in chooser.rest():
            self._run_in_turn(stage, op)
            chooser.ran(stage, op.kind)
            self._tell(chooser.in_turn())

    def _note(self, stage: int) -> None:
        """Note what a stage has run since its last op."""
        outcome, (ops, copies) = self.outcomes[stage], self._noted[stage]
        if len(outcome.ops) > ops:
            self.ran.append((stage, outcome.ops[-1]))
        if len(outcome.copies) > copies:
            self.copied.append((stage, outcome.copies[-1]))
        self._noted[stage] = len(outcome.ops), len(outcome.copies)

    def _ran_alone(self, stage: int) -> None:
        """Note what ran of a rank with one stage."""
        outcome = self.outcomes[stage]
        self.ran = [(stage, op) for op in outcome.ops]
        self.copied = [(stage, copy) for copy in outcome.copies]

    def _tell(self, ops: int) -> None:
        """Tell the receiving ends how many ops of the call have run."""
        for end in self._ends:
            end.incoming.ran(ops)

    def between_ops(self) -> None:
        """Begin the stages whose token has arrived, without waiting."""
        while self._pending and self._early and self._tokens[self._pending[0]].arrived():
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next stage that has not begun. Waits for its token."""
        stage = self._pending.pop(0)
        start = self._first_start if stage == self._held[0] else self._start(stage)[1]
        plan, call = self._plan, self._call
        mine: RankStage | None
        if plan is None:
            schedule = forwards(self._mesh, self._microbatches)
            ops = forward_ops(schedule, self._rank)[stage] if self._ends else ()
            above = Receives(window=forward_window(schedule), ops=ops)
            mine, receives = None, (above, RECEIVE_ALL)
        else:
            mine = plan.by_stage[stage]
            receives = receives_of(mine.above), receives_of(mine.below)
        executor = self._executors[stage]
        self._noted[stage] = 0, 0
        now = StageIteration(
            ops=self._orders[stage], iteration=call.iteration,
            generations=self._tokens[stage].generations, inputs=call.inputs[stage], start=start,
            device_limit=None if mine is None else mine.device_limit,
            recompute=mine is not None and mine.recompute,
            receives=receives, evaluation=call.evaluation, again=call.again,
        )  # fmt: skip
        self.outcomes[stage] = executor.begin(now)
        self._begun[stage] = executor

    def _start(self, stage: int) -> tuple[int, Start]:
        call = self._call
        return self._tokens[stage].start(
            call.iteration, call.shapes[stage], refused=call.refused,
            evaluation=call.evaluation, again=call.again,
        )  # fmt: skip

    @property
    def refused(self) -> bool:
        """Whether a stage of this rank knows that the call is refused."""
        return any(executor.refused for executor in self._executors.values())

    @property
    def cause(self) -> Exception | None:
        """The error that a stage of this rank raised in a refused call, if any."""
        causes = (executor.cause for executor in self._executors.values())
        return next((cause for cause in causes if cause is not None), None)

    @property
    def repeats(self) -> bool:
        """Whether the stages of this rank have the results of all forwards of a refused call."""
        return all(executor.repeats for executor in self._executors.values())

    def end_uncounted(self, *, again: bool = False) -> None:
        """End an evaluation or a refused iteration. The next iteration has the same number, but
        other message keys. ``again``: it is this one."""
        for executor in self._executors.values():
            executor.end_uncounted(again=again)

    def restart(self) -> None:
        """Exchange shapes again in the next call: this one was refused."""
        for token in self._tokens.values():
            token.restart()

    def allow(self, deadline: float) -> None:
        """Set the longest wait for each message, seconds."""
        self._mail.allow(deadline)


def run_ready(
    chooser: Chooser,
    executors: Mapping[int, Executor],
    mail: Mailbox,
    *,
    pace: Callable[[], None] | None,
) -> Iterator[Candidate]:
    """Run ops, of those that ``chooser`` allows the first whose message has arrived, and yield each
    when it has run. Ends when all have, or when an executor's iteration is refused: then the rest
    is to be run in the plan's order.

    ``executors``: of the stages that have begun the iteration; others may be added meanwhile.
    ``pace``: on a device, called before each op: waits until the device is not too far behind.
    """

    held: dict[int, Residency] = {}

    def allowed() -> list[Candidate]:
        nonlocal held
        if len(held) < len(executors):
            # A copy, since another thread may describe the wait while a stage begins.
            begun = list(executors.items())
            held = {stage: executor.residency for stage, executor in begun}
        return chooser.candidates(held)

    def refused() -> bool:
        return any(executor.refused for executor in executors.values())

    def look() -> tuple[Candidate | None, float]:
        """What can run now; None, and when that changes without another message."""
        now, first = time(), NEVER
        for candidate in allowed():
            stage, kind, microbatch, waits_for_send = candidate
            at = executors[stage].ready_at(kind, microbatch, waits_for_send=waits_for_send)
            if at <= now:
                return candidate, now
            first = min(first, at)
        return None, first

    def awaited() -> str:
        """The messages with which the rank could continue, those for F first."""
        rows = sorted(allowed(), key=lambda each: each.kind is not OpKind.F)
        found = (executors[each.stage].message(each.kind, each.microbatch) for each in rows)
        return " or ".join(filter(None, found)) or "the token of a stage that has not begun"

    mail.listen()
    while not chooser.finished:
        if pace is not None:
            pace()
        found, waited = mail.wait_for_any(look, awaited, stop=refused)
        if found is None:
            return
        stage, kind, microbatch, _ = found
        # Of the ops that it could have run, the one whose message came.
        executors[stage].run_now(kind, microbatch, waited)
        chooser.ran(stage, kind)
        yield found


def receives_of(planned: RankReceives | None) -> Receives:
    """The receives of one link, as links take them."""
    return RECEIVE_ALL if planned is None else Receives(planned.after, planned.window, planned.ops)


@lru_cache(maxsize=4)
def forwards(mesh: MeshShape, microbatches: int) -> Schedule:
    """The forwards of an evaluation: every rank runs a round of as many microbatches as there are
    ranks on one stage, then on the next."""
    ranks = mesh.sizes["pp"]
    chunks = mesh.stages_per_rank
    order = tuple(
        Op(OpKind.F, microbatch, chunk)
        for first in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + ranks, microbatches))
    )
    return Schedule(microbatches, (order,) * ranks, mesh.placed)
