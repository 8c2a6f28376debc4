"""Stages of one rank, run in turns: one executor and one token per stage, one order per rank.

Under static dispatch the next op of the order waits for its message, on whichever stage it is.
Under guided dispatch the first op whose message is here runs, of all stages that have begun. Each
kind of op runs in microbatch order on every stage, so results do not depend on the order.

A stage begins a call when its token arrives, which passes all stages of a column in order. So the
second stage of a rank can begin when all stages between the two have begun. It begins as soon as
its token is seen between two ops, so that its receives are posted, and at the latest before its
first op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import time
from typing import Any

from pipemorph.planning import Dispatch, Op, OpKind, Schedule
from pipemorph.planning.offload import DeviceResidency
from pipemorph.spec.mesh import Coordinate, MeshShape
from pipemorph_trainer.agent.op_selector import OpCandidate, OpSelector
from pipemorph_trainer.agent.rank_plan import RankPlan, RankReceiveLimits, RankStage
from pipemorph_trainer.agent.receive_windows import (
    compute_forward_window,
    count_ops_before_forward_receives,
)
from pipemorph_trainer.executor.device_times import MeasuredCopy, MeasuredOp
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.executor.microbatch_costs import MicrobatchWork
from pipemorph_trainer.executor.stage_executor import (
    NEVER,
    CallStart,
    MicrobatchInputs,
    StageExecutor,
    StageIteration,
    StageRecord,
)
from pipemorph_trainer.schedule.plan_agreement import DrawnStart, TokenRelay
from pipemorph_trainer.transport.link import LinkEnd
from pipemorph_trainer.transport.message import UNLIMITED_RECEIVES, ReceiveLimits


@dataclass
class StepCall:
    """Call of ``step`` or ``evaluate`` on this rank. ``inputs``: by stage. ``shapes``: by stage;
    change if those of the inputs do. ``refused``: an input of this rank does not fit, for the
    reason ``refusal``, or one of a rank that runs collectives with it. ``divisor``: of the sum of
    losses, on the last stage. ``draw``: sets these for a plan version, once it is known."""

    iteration: int
    inputs: Mapping[int, MicrobatchInputs]
    shapes: Mapping[int, Any]
    refused: bool = False
    refusal: Exception | None = None
    divisor: float = 1.0
    draw: Callable[[int], None] | None = None
    evaluation: bool = False
    is_retry: bool = False
    """True if it was refused and begins again, with the results of the forwards that ran."""


class MultiStageRunner:
    """Runner of this rank's stages. ``executors``, ``tokens``: by stage. ``ends``: those of links
    whose receives wait for ops of this rank, see :class:`ReceiveLimits`. ``pace``: see
    :func:`run_ready_ops`. Main thread only."""

    def __init__(
        self,
        coordinate: Coordinate,
        executors: Mapping[int, StageExecutor],
        tokens: Mapping[int, TokenRelay],
        mail: Mailbox,
        ends: Sequence[LinkEnd] = (),
        *,
        pace: Callable[[], None] | None = None,
    ) -> None:
        self._mesh, self._rank = coordinate.mesh, coordinate.index_along("pp")
        self._held, self._executors, self._tokens = coordinate.held_stages, executors, tokens
        self._mail, self._ends, self._pace = mail, ends, pace
        # A stage may gather parameters when it begins, which all its ranks must do in one order.
        self._early = self._mesh.lockstep_size == 1
        self._call = StepCall(0, {}, {})
        self._first_start = CallStart()
        self._orders: Mapping[int, Sequence[Op]] = {}
        """Ops of the current call, by stage."""
        self._microbatches = 0
        self._plan: RankPlan | None = None
        self._pending: list[int] = []
        """Stages that have not begun the call yet, in order."""
        self._begun: dict[int, StageExecutor] = {}
        """Executors of the stages that have begun the call."""
        self._noted: dict[int, tuple[int, int]] = {}
        """Number of ops and copies of each stage in :attr:`ran` and :attr:`copied`."""
        self.outcomes: dict[int, StageRecord] = {}
        """Records of the newest call, by stage."""
        self.ran: list[tuple[int, MeasuredOp]] = []
        """``(stage, op)`` of the newest call, in the order run."""
        self.copied: list[tuple[int, MeasuredCopy]] = []
        """``(stage, copy)`` of activations in the newest call, in order."""

    def start_call(self, call: StepCall) -> int:
        """Start a call: wait for the token of the first stage. Returns the version of its plan; an
        evaluation does not change the version."""
        self._call, self.outcomes, self.ran, self.copied = call, {}, [], []
        self._begun = {}
        version, self._first_start = self._start_stage(self._held[0])
        return version

    def run_iteration(self, plan: RankPlan) -> None:
        """Run the ops of the started iteration. Afterwards :attr:`refused` is True if it was
        refused anywhere, as far as this rank has received.

        Raises :class:`PipelineError` with the missing message if the iteration cannot be finished.
        """
        self._plan, self._microbatches = plan, plan.microbatches
        self._orders = plan.orders
        if plan.dispatch is Dispatch.GUIDED:
            self._run_as_ready(OpSelector(plan))
        else:
            self._run_in_plan_order(plan.order)
        for executor in self._executors.values():
            executor.end_iteration()
        outputs = self._call.inputs[self._held[-1]].outputs
        if outputs and not self.refused:
            outputs[:] = self.work.to_microbatches(outputs)
        self._mail.wait_until_sends_taken()

    def run_evaluation(self, microbatches: int) -> None:
        """Run only the forwards of the started evaluation, without gradients. Call
        :meth:`end_uncounted` afterwards."""
        self._plan = None
        schedule = plan_evaluation(self._mesh, microbatches)
        self._microbatches = microbatches
        self._orders = dict(enumerate(schedule.stages))
        self._run_in_plan_order([(self._held[op.chunk], op) for op in schedule.ranks[self._rank]])
        self._mail.wait_until_sends_taken()

    def _run_in_plan_order(self, order: Sequence[tuple[int, Op]]) -> None:
        """Run the ops of all stages in their order."""
        self._report_progress(0)
        self._pending = list(self._held)
        self._begin_next_stage()
        if len(self._held) == 1:
            (stage,) = self._held
            run_op = self._executors[stage].run_op
            for _, op in order:
                run_op(op.kind, op.microbatch)
            self._record_single_stage(stage)
            return
        for ran, (stage, op) in enumerate(order, 1):
            self._run_stage_op(stage, op)
            self._report_progress(ran)

    def _run_stage_op(self, stage: int, op: Op) -> None:
        while self._pending and self._pending[0] <= stage:
            self._begin_next_stage()
        self._executors[stage].run_op(op.kind, op.microbatch)
        self._record_op(stage)

    def _run_as_ready(self, chooser: OpSelector) -> None:
        """Run the ops of all stages as their messages arrive. Receives are posted for the plan's
        order, up to its first op that has not run."""
        self._report_progress(0)
        self._pending = list(self._held)
        self._begin_next_stage()
        for stage, *_ in run_ready_ops(chooser, self._begun, self._mail, pace=self._pace):
            self._record_op(stage)
            if self._ends:
                self._report_progress(chooser.find_next_position())
        # Remaining ops of a refused iteration.
        for stage, op in chooser.iterate_remaining_ops():
            self._run_stage_op(stage, op)
            chooser.record_op(stage, op.kind)
            self._report_progress(chooser.find_next_position())

    def _record_op(self, stage: int) -> None:
        """Record the op and the copy that a stage has run since its last op."""
        outcome, (ops, copies) = self.outcomes[stage], self._noted[stage]
        if len(outcome.ops) > ops:
            self.ran.append((stage, outcome.ops[-1]))
        if len(outcome.copies) > copies:
            self.copied.append((stage, outcome.copies[-1]))
        self._noted[stage] = len(outcome.ops), len(outcome.copies)

    def _record_single_stage(self, stage: int) -> None:
        """Record the ops and copies of a rank with one stage."""
        outcome = self.outcomes[stage]
        self.ran = [(stage, op) for op in outcome.ops]
        self.copied = [(stage, copy) for copy in outcome.copies]

    def _report_progress(self, ops: int) -> None:
        """Report to the receiving ends how many ops of the call have run."""
        for end in self._ends:
            end.incoming.record_ops(ops)

    def between_ops(self) -> None:
        """Begin the stages whose token has arrived, without waiting."""
        while self._pending and self._early and self._tokens[self._pending[0]].can_start():
            self._begin_next_stage()

    def _begin_next_stage(self) -> None:
        """Begin the next stage that has not begun. Waits for its token."""
        stage = self._pending.pop(0)
        start = self._first_start if stage == self._held[0] else self._start_stage(stage)[1]
        plan, call = self._plan, self._call
        mine: RankStage | None
        if plan is None:
            schedule = plan_evaluation(self._mesh, self._microbatches)
            ops = (
                count_ops_before_forward_receives(schedule, self._rank)[stage] if self._ends else ()
            )
            above = ReceiveLimits(window=compute_forward_window(schedule), ops=ops)
            mine, receives = None, (above, UNLIMITED_RECEIVES)
        else:
            mine = plan.by_stage[stage]
            receives = make_receive_limits(mine.above), make_receive_limits(mine.below)
        executor = self._executors[stage]
        self._noted[stage] = 0, 0
        now = StageIteration(
            ops=self._orders[stage], iteration=call.iteration,
            generations=self._tokens[stage].generations,
            inputs=call.inputs[stage].sort_by_place(start.work), start=start,
            device_limit=None if mine is None else mine.device_limit,
            recompute=mine is not None and mine.recompute,
            receives=receives, evaluation=call.evaluation, is_retry=call.is_retry,
        )  # fmt: skip
        self.outcomes[stage] = executor.begin_iteration(now)
        self._begun[stage] = executor

    def _start_stage(self, stage: int) -> tuple[int, CallStart]:
        call = self._call
        draw = call.draw
        if stage != self._held[0] or call.is_retry or draw is None:
            return self._tokens[stage].start_iteration(
                call.iteration, call.shapes[stage], refused=call.refused,
                evaluation=call.evaluation, again=call.is_retry, costs=call.inputs[stage].costs,
            )  # fmt: skip

        def draw_inputs(version: int) -> DrawnStart:
            draw(version)
            return DrawnStart(call.shapes[stage], call.refused, call.inputs[stage].costs)

        return self._tokens[stage].start_iteration(call.iteration, None, draw=draw_inputs)

    @property
    def work(self) -> MicrobatchWork:
        """Costs and order of the microbatches of the newest call."""
        return self._first_start.work

    @property
    def refused(self) -> bool:
        """True if the refusal of the call has reached a stage of this rank."""
        return any(executor.refused for executor in self._executors.values())

    @property
    def cause(self) -> Exception | None:
        """Error that a stage of this rank raised in a refused call, if any."""
        causes = (executor.cause for executor in self._executors.values())
        return next((cause for cause in causes if cause is not None), None)

    @property
    def can_retry(self) -> bool:
        """True if the stages of this rank have the results of all forwards of a refused call."""
        return all(executor.can_retry for executor in self._executors.values())

    def end_uncounted(self, *, again: bool = False) -> None:
        """End an evaluation or a refused iteration. The next iteration has the same number, but
        other message keys. ``again``: it is this one."""
        for executor in self._executors.values():
            executor.end_uncounted(again=again)

    def forget_shapes(self) -> None:
        """Exchange shapes again in the next call: this one was refused."""
        for token in self._tokens.values():
            token.forget_shapes()

    def set_deadline(self, deadline: float) -> None:
        """Set the longest wait for each message, seconds."""
        self._mail.set_deadline(deadline)


def run_ready_ops(
    chooser: OpSelector,
    executors: Mapping[int, StageExecutor],
    mail: Mailbox,
    *,
    pace: Callable[[], None] | None,
) -> Iterator[OpCandidate]:
    """Run ops, each time the first that ``chooser`` allows and whose message has arrived, and yield
    each after it has run. Ends when all have run, or when an executor's iteration is refused: then
    run the rest in the plan's order.

    ``executors``: those of the stages that have begun the iteration; others may be added meanwhile.
    ``pace``: on a device, called before each op to wait for a device that is too far behind.
    """

    held: dict[int, DeviceResidency] = {}

    def list_candidates() -> list[OpCandidate]:
        nonlocal held
        if len(held) < len(executors):
            # A copy, since another thread may describe the wait while a stage begins.
            begun = list(executors.items())
            held = {stage: executor.residency for stage, executor in begun}
        return chooser.list_candidates(held)

    def is_refused() -> bool:
        return any(executor.refused for executor in executors.values())

    def find_ready() -> tuple[OpCandidate | None, float]:
        """Return an op that can run now, or None and when that changes without a message."""
        now, first = time(), NEVER
        for candidate in list_candidates():
            stage, kind, microbatch, waits_for_send = candidate
            at = executors[stage].ready_at(kind, microbatch, waits_for_send=waits_for_send)
            if at <= now:
                return candidate, now
            first = min(first, at)
        return None, first

    def describe_awaited() -> str:
        """Describe the messages with which the rank could continue, those for F first."""
        rows = sorted(list_candidates(), key=lambda each: each.kind is not OpKind.F)
        found = (
            executors[each.stage].describe_message(each.kind, each.microbatch) for each in rows
        )
        return " or ".join(filter(None, found)) or "the token of a stage that has not begun"

    mail.wake_on_arrivals()
    while not chooser.finished:
        if pace is not None:
            pace()
        found, waited = mail.wait_for_ready(find_ready, describe_awaited, stop=is_refused)
        if found is None:
            return
        stage, kind, microbatch, _ = found
        # The wait was for any of several ops; this is the one whose message arrived.
        executors[stage].run_ready_op(kind, microbatch, waited)
        chooser.record_op(stage, kind)
        yield found


def make_receive_limits(planned: RankReceiveLimits | None) -> ReceiveLimits:
    """Return the receives of one link in the form that links use."""
    return (
        UNLIMITED_RECEIVES
        if planned is None
        else ReceiveLimits(planned.after, planned.window, planned.ops)
    )


@lru_cache(maxsize=4)
def plan_evaluation(mesh: MeshShape, microbatches: int) -> Schedule:
    """Return the schedule of an evaluation's forwards: every rank runs a round of as many
    microbatches as there are ranks on one stage, then on the next."""
    ranks = mesh.sizes["pp"]
    chunks = mesh.stages_per_rank
    order = tuple(
        Op(OpKind.F, microbatch, chunk)
        for first in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + ranks, microbatches))
    )
    return Schedule(microbatches, (order,) * ranks, mesh.pp_indices)
