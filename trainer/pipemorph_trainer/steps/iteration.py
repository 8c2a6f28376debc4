"""Runs the iterations of one rank.

The section "An iteration" of ``docs/trainer.md`` lists the steps in order.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from time import monotonic, time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemorph.api.mesh import COLUMN, DATA, LOCKSTEP
from pipemorph.wire import OpsTrace, ReductionSample
from pipemorph_trainer.agent.messages import ControlClient
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.errors import BatchError
from pipemorph_trainer.executor import refusal as refusals
from pipemorph_trainer.executor.device_times import DeviceTimes, LossCopy
from pipemorph_trainer.executor.dispatch import Executor, Inputs, OpContext, Outcome
from pipemorph_trainer.executor.local_stage import OwnStage, offloaded
from pipemorph_trainer.executor.mailbox import Mailbox, name_call
from pipemorph_trainer.executor.split import SplitReport, StageRunner
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.links.link import Links
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.links.recorder import OpClock
from pipemorph_trainer.plans.arriving import ArrivingPlans
from pipemorph_trainer.plans.book import PlanBook
from pipemorph_trainer.plans.token import Agreement, TokenPass
from pipemorph_trainer.profiling import profiling
from pipemorph_trainer.state.gradients import Replicas
from pipemorph_trainer.state.reduction import Reducer
from pipemorph_trainer.state.ring import RingProbe
from pipemorph_trainer.state.tied import Tied
from pipemorph_trainer.steps.turns import Call, Turns
from pipemorph_trainer.telemetry.reporter import Reporter
from pipemorph_trainer.telemetry.rounds import IterationReports
from pipemorph_trainer.telemetry.trace import TraceWriter
from pipemorph_trainer.topology.accelerator import Accelerator
from pipemorph_trainer.topology.failures import Failures
from pipemorph_trainer.topology.hierarchy import Pending
from pipemorph_trainer.topology.world import World
from pipemorph_trainer.trackers.listeners import Listeners

log = logging.getLogger("pipemorph.trainer")

PLAN_POLL_SECONDS = 0.02
RAISE_SECONDS = 3.0
"""Time in which all ranks that run collectives inside an op raise an error that each of them finds,
such as that of a bad sample."""


class SharedLoss:
    """Shares the loss of one iteration after another: :meth:`begin`, :meth:`post`, :meth:`wait`.

    The loss is the mean over columns of the sum over microbatches, divided by a divisor. Replicas,
    shards and context ranks have different data, tensor ranks the same loss.
    """

    def __init__(
        self,
        *,
        world: World,
        accelerator: Accelerator | None,
        wait: CollectiveWait,
    ) -> None:
        # Keeps the world and not its groups, whose last references World.leave() drops.
        self._world, self._divisor = world, 1.0
        self._accelerator, self._wait_for = accelerator, wait
        self._loss = torch.zeros(4, dtype=torch.float64)
        self._sum: Pending | None = None
        self._copy: LossCopy | None = None
        self.refused = False
        """Whether a replica refused the step. Valid after :meth:`wait`."""
        self.asked: Callable[[], bool] | None = None
        """Whether this rank is asked to end."""
        self.asked_to_move: Callable[[], bool] | None = None
        self.leaving = False
        """Whether a rank was asked to end when it shared its loss, the same on all ranks. Stays
        True. Valid after :meth:`wait`."""
        self.moving = False
        """Whether a rank was asked to leave for another place when it shared its loss, the same on
        all ranks. Valid after :meth:`wait`."""

    def begin(self, divisor: float) -> None:
        """Begin a call. ``divisor``: of the sum over microbatches; only used on the last stage."""
        self._sum = self._copy = None
        self._divisor = divisor
        if not self._world.coordinate.last:
            self._share([])

    def post(self, losses: list[Tensor]) -> None:
        """Start to share the loss, on the last stage after its last F, so that it arrives long
        before it is needed. Losses of a device are shared when they are on the host; meanwhile
        later ops are launched."""
        if losses and self._accelerator is not None:
            self._copy = LossCopy(self._accelerator, losses)
        else:
            self._share([float(loss) for loss in losses])

    def between_ops(self) -> None:
        """Share the losses of a device if they have reached the host. Pass on what has come from
        other ranks."""
        if self._copy is not None and self._copy.done():
            self._share(self._copy.take())
        if self._sum is not None:
            self._sum.advance()

    def wait(self, call: str, *, refused: bool) -> float:
        """Wait for the loss of ``call``, such as ``iteration 7``: the mean over microbatches and
        replicas. Raises :class:`PipelineError` if it does not arrive.

        ``refused``: this replica refuses the call, so the last stage has no loss."""
        if self._sum is None and refused:
            self._share([], refused=True)
        self._wait_for.waiting.begin(f"the loss of {call} from the last stage")
        if self._copy is not None:
            self._share(self._copy.take())
        assert self._sum is not None, "the last stage has shared no loss"
        self._sum.wait(self._wait_for)
        self._wait_for.waiting.end()
        self.refused = bool(self._loss[1])
        self.leaving = self.leaving or bool(self._loss[2])
        self.moving = bool(self._loss[3])
        return float(self._loss[0]) / self._world.coordinate.mesh.columns

    def _share(self, losses: Sequence[float], *, refused: bool = False) -> None:
        self._copy = None
        total = 0.0
        for loss in losses:
            total += loss
        leaves = self.asked is not None and self.asked()
        moves = self.asked_to_move is not None and self.asked_to_move()
        values = [total / self._divisor, refused, leaves, moves]
        self._loss = torch.tensor(values, dtype=torch.float64)
        self._sum = self._world.everyone.all_reduce(self._loss)


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a rank is and has when it runs iterations.

    ``world``: the ranks with which it shares losses, gradients and agreements. ``links``: of its
    stages. ``stages``: run the ops, by stage; all are of one kind. ``replicas``: keeps the replicas
    of the stages equal; None for one replica or emulated stages. ``reducer``: averages their
    gradients; that of ``replicas``, or of emulated stages. ``ring``: measures the edges of the ring
    in which it does so; None: nobody wants to know. ``tied``: sums the gradients of weights that
    other stages hold, too; None without any. ``plans``: of this rank; those from ``control`` are
    added to it. ``reporter``, ``traces``: report each iteration, and write its trace, by stage;
    none if no traces are wanted. ``listeners``: told of each iteration that is reported, on rank 0.
    ``failures``: of ranks, which others tell. ``poller``: waits for events. ``op_clock``: tells the
    links when ops run. ``wait``: waits for collectives, and describes the wait. ``deadline``:
    longest wait for one message, seconds. ``slowed``: makes ops longer, see
    :class:`~pipemorph_trainer.executor.dispatch.OpContext`.
    """

    world: World
    links: Links
    stages: Mapping[int, OwnStage]
    replicas: Replicas | None
    reducer: Reducer | None
    ring: RingProbe | None
    tied: Tied | None
    plans: PlanBook
    control: ControlClient
    reporter: Reporter
    traces: Mapping[int, TraceWriter]
    listeners: Listeners
    failures: Failures
    poller: Poller
    op_clock: OpClock
    wait: CollectiveWait
    deadline: float
    slowed: Callable[[float, int], None] | None = None


class Iterations:
    """Runs one iteration after another. Main thread only.

    For the first iteration and the first evaluation of a module the deadline is multiplied by the
    number of stages: its first messages follow the first F and B of every stage, in which a module
    is compiled, tuned or loaded.
    """

    def __init__(self, rank: RankContext) -> None:
        world, links = rank.world, rank.links
        self._rank, self._world, self._coordinate = rank, world, world.coordinate
        self._ends, self._stages, self._plans = links.ends, rank.stages, rank.plans
        self._cutting = [end.faults for end in links.ends if end.faults.cuts]
        self._faulty = [end.faults for end in links.ends if end.faults.cuts or end.faults.holds]
        self._on_device = links.ends if links.departures is not None else []
        first = next(iter(rank.stages.values()))
        self._several = len(rank.stages) > 1
        self._in_lockstep = world.group(LOCKSTEP) is not None
        self._microbatches = first.microbatches
        self._replicas, self._reducer = rank.replicas, rank.reducer
        self._tied, self._reporter = rank.tied, rank.reporter
        self._reports = rank.reporter.listened_to
        self._waiting, self._wait_for = rank.wait.waiting, rank.wait
        self._device_times: DeviceTimes | None = None
        if first.accelerator is not None:
            self._device_times = DeviceTimes(first.accelerator)
        self._loss = SharedLoss(world=world, accelerator=first.accelerator, wait=rank.wait)
        self._mail = Mailbox(
            links.ends, poller=rank.poller, waiting=rank.wait.waiting, deadline=rank.deadline,
            between=self._between_ops,
        )  # fmt: skip
        self._turns, agreements = self._prepare_turns(first)
        self.reports = IterationReports(
            world=world, wait=rank.wait, reporter=rank.reporter, listeners=rank.listeners
        )
        self._rounds = self.reports.rounds
        self._warm = first.emulated
        """Whether the first iteration with its measurements is over. Emulated stages need none."""
        self.arriving = ArrivingPlans(
            coordinate=self._coordinate, ends=links.ends, plans=rank.plans, agreements=agreements,
            control=rank.control, reporter=rank.reporter, listeners=rank.listeners,
            warm=self._warm,
        )  # fmt: skip
        self.synchronizes = True
        """Whether gradients are summed and averaged after an iteration."""
        self._evaluated = False
        self._training_began = 0.0
        self._polled_at = 0.0

    def _prepare_turns(self, first: OwnStage) -> tuple[Turns, list[Agreement]]:
        """The stages of this rank, and how each agrees on plans. ``first``: one of them."""
        rank, coordinate = self._rank, self._coordinate
        gate = None
        columns = self._world.hierarchy(COLUMN)
        if columns is not None and coordinate.last and first.module is not None:
            gate = refusals.Gate(columns, rank.wait)
        shared = OpContext(
            mail=self._mail, op_clock=rank.op_clock, boundary=self._between_ops,
            on_last_forward=self._loss.post, reserve=rank.plans.shapes_known,
            device_times=self._device_times, all_raise=self._all_raise, last_op=self._reducer,
            slowed=rank.slowed,
        )  # fmt: skip
        executors: dict[int, Executor] = {}
        tokens: dict[int, TokenPass] = {}
        agreements = []
        for stage, own in rank.stages.items():
            at, neighbours = coordinate.of(stage), rank.links.of[stage]
            executors[stage] = Executor(
                at, own.runner, neighbours, shared, gate=gate if at.last else None,
                # A stage of another trainer does not restart an iteration.
                refuses=own.emulated or own.module is not None,
            )  # fmt: skip
            up, down = neighbours.upstream, neighbours.downstream
            agreement = Agreement(
                rank.plans,
                None if up is None else up.socket,
                None if down is None else down.socket,
                together=self._world.together,
                wait=rank.wait,
            )
            agreements.append(agreement)
            tokens[stage] = TokenPass(at, neighbours, self._mail, agreement)
        turns = Turns(
            coordinate, executors, tokens, self._mail,
            self._ends if self._device_times is not None and self._several else (),
            pace=None if self._device_times is None else self._device_times.pace,
        )  # fmt: skip
        return turns, agreements

    def run(
        self,
        iteration: int,
        inputs: Mapping[int, Inputs],
        shapes: Mapping[int, Any],
        refusal: Exception | None = None,
    ) -> float:
        """Run one iteration: forward and backward of all microbatches, and the gradient average
        over the replicas. Returns the loss.

        ``inputs``: by stage. ``shapes``: change if those of the inputs do. ``refusal``: why the
        input of this rank does not fit. Raises :class:`BatchError` on all ranks if the input of any
        does not fit, and :class:`PipelineError` if a message does not arrive.
        """
        origin = time()
        self._training_began = self._training_began or origin
        if not self._warm:
            self._allow(self._rank.deadline * self._coordinate.stages)
        self._mail.call = name_call(iteration, evaluation=False)
        self._rounds.begin(iteration, at=monotonic())
        self.arriving.take(page_lock=True)
        if self._rank.links.staging is not None:
            self._rank.links.staging.page_lock_added()
        # Only of the last stage it matters.
        final = inputs[self._coordinate.held[-1]]
        self._weigh(final)
        refused = self._any_refuses(f"iteration {iteration}", refusal is not None)
        divisor = final.divisor or self._microbatches
        if final.scale != 1.0:
            final.divisor = divisor / final.scale
        call = Call(iteration, inputs, shapes, refused)
        loss = self._attempt(call, divisor, refusal)
        again = loss is None
        while loss is None:
            self._rounds.begin(iteration, at=monotonic())
            loss = self._attempt(replace(call, again=True), divisor, refusal)
        self._synchronize(iteration)
        for own in self._stages.values():
            own.update()
        self._take_measured()
        self._end(iteration, origin, loss, again=again)
        return loss

    def _attempt(self, call: Call, divisor: float, refusal: Exception | None) -> float | None:
        """Run the ops of an iteration. Returns the loss; None if it has to begin again, since what
        crosses a boundary has changed. Raises :class:`BatchError` if a rank refuses it."""
        iteration = call.iteration
        plan = self._begin(iteration, self._turns.start(call))
        self._loss.begin(divisor)
        if self._tied is not None:
            self._tied.begin()
        if self._reducer is not None and self.synchronizes:
            self._reducer.begin(iteration, stages=len(self._stages))
        self._turns.run(plan)
        self._reduce_shards(iteration)
        # Usually here already: it was sent after the last F.
        loss = self._loss.wait(f"iteration {iteration}", refused=self._turns.refused)
        if self._loss.refused:
            if self._tied is not None:
                self._tied.undo()
            if self._reducer is not None:
                self._reducer.drop()
            self._rounds.drop(iteration)
            if (error := self._refused(f"step() of iteration {iteration}", refusal)) is not None:
                raise error
            return None
        return loss

    def _reduce_shards(self, iteration: int) -> None:
        """Reduce the gradients of a sharded stage."""
        self._waiting.begin(f"gradients of iteration {iteration} of the other shards")
        began = time()
        for own in self._stages.values():
            own.reduce()
        if self._reducer is not None and self._replicas is not None and self._replicas.sharded:
            self._reducer.add(time() - began)
        self._waiting.end()
        if self._reducer is not None and self.synchronizes:
            self._reducer.release()

    def _synchronize(self, iteration: int) -> None:
        """Wait until all gradients are averaged over the replicas, and sum those of tied
        weights."""
        if not self.synchronizes:
            if self._tied is not None:
                self._tied.skip()
            return
        self._waiting.begin(f"gradients of iteration {iteration} of the other replicas")
        if self._replicas is not None:
            self._replicas.sync()
        elif self._reducer is not None:
            self._reducer.finish()
        if self._rank.ring is not None and self._reducer is not None:
            self._rank.ring.after(self._reducer.newest)
        self._waiting.end()
        if self._tied is not None:
            # Last, since it waits for other stages, and so for their ops.
            self._waiting.begin(f"gradients of iteration {iteration} of tied weights")
            self._tied.sum()
            self._waiting.end()

    def evaluate(
        self,
        iteration: int,
        inputs: Mapping[int, Inputs],
        shapes: Mapping[int, Any],
        refusal: Exception | None = None,
    ) -> float:
        """Run the forwards of all microbatches, without gradients. Returns the loss.

        It is no iteration: no plan is committed, and no times are reported. The arguments and
        errors are those of :meth:`run`; ``iteration`` is the one that follows.
        """
        plan = self._plans.in_force
        for end in self._ends:
            end.select(plan.by_link[end.link].route)
            # Messages may have other sizes than those of the training.
            end.recorder.paused = True
        for faults in self._faulty:
            faults.begin(iteration, self._training_began or time())
        self._allow(self._rank.deadline * (1 if self._evaluated else self._coordinate.stages))
        try:
            call = self._mail.call = name_call(iteration, evaluation=True)
            final = inputs[self._coordinate.held[-1]]
            self._weigh(final)
            refused = self._any_refuses(call, refusal is not None)
            marked = {stage: ("evaluation", each) for stage, each in shapes.items()}
            self._turns.start(Call(iteration, inputs, marked, refused, evaluation=True))
            self._loss.begin(final.divisor or self._microbatches)
            self._turns.evaluate(self._microbatches)
            # A sharded stage stays gathered after a forward; there are no gradients to reduce.
            for own in self._stages.values():
                own.reduce()
            loss = self._loss.wait(call, refused=self._turns.refused)
            if self._loss.refused:
                error = self._refused(f"evaluate() before iteration {iteration}", refusal)
                assert error is not None, "an evaluation does not begin again"
                raise error
            self._turns.end_uncounted()
        finally:
            for end in self._ends:
                end.recorder.paused = not self._reports
            if self._device_times is not None:
                self._device_times.forget()
        self._evaluated = True
        self._allow(self._rank.deadline)
        return loss

    def _any_refuses(self, call: str, refuses: bool) -> bool:
        """Whether a rank refuses that runs collectives with this one: then none begins an op, in
        which they would wait for it."""
        if not self._in_lockstep:
            return refuses
        group = self._world.group(LOCKSTEP)
        found = torch.tensor([float(refuses)])
        work = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._wait_for(work, f"the other ranks of the stage to begin {call}")
        return bool(found)

    def _all_raise(self) -> bool:
        """Whether all ranks that run collectives with this one inside an op have raised an error
        there: else some wait in it for the others."""
        group = self._world.group(LOCKSTEP)
        if group is None:
            return True
        if self._rank.failures.heard():
            # The error is what it looks like when the connections to that rank end.
            return False
        work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
        try:
            work.wait(timedelta(seconds=RAISE_SECONDS))
        except RuntimeError as error:
            log.info("%s: the other ranks of the stage raise nothing: %s", self._coordinate, error)
            return False
        return True

    def _weigh(self, inputs: Inputs) -> None:
        """Divide by the weight of the batches of all ranks with other data, where one was given.
        The mean over these ranks follows."""
        if inputs.divisor is None or (group := self._world.group(DATA)) is None:
            return
        total = torch.tensor([inputs.divisor], dtype=torch.float64)
        work = dist.all_reduce(total, group=group, async_op=True)
        self._wait_for(work, f"the weight of {self._mail.call} of the other replicas")
        inputs.divisor = float(total) / dist.get_world_size(group)

    def _refused(self, call: str, refusal: Exception | None) -> BatchError | None:
        """Prepare for the next call after a refused one. Returns the error to raise; None if the
        call is to begin again. ``refusal``: why the input of this rank does not fit, if it does
        not."""
        refusal = refusal or self._turns.cause
        told = refusals.tell(
            self._world, self._wait_for, call, refusal, repeats=self._turns.repeats
        )
        self._turns.end_uncounted(again=told is None)
        # Its messages were empty from some point on.
        self._turns.restart()
        if self._device_times is not None:
            self._device_times.forget()
        if told is None:
            log.info("%s: %s begins again: %s", self._coordinate, call, refusal or "as others say")
            return None
        if refusal is not None:
            self._reporter.publish(message=str(told))
        told.__cause__ = refusal
        return told

    def _begin(self, iteration: int, version: int) -> RankPlan:
        """Commit the version that the column runs in this iteration, and select the links'
        routes."""
        if self._plans.commit(version):
            log.info("%s: plan %d from iteration %d on", self._coordinate, version, iteration)
        plan = self._plans.in_force
        for end in self._ends:
            end.select(plan.by_link[end.link].route)
        for faults in self._faulty:
            faults.begin(iteration, self._training_began)
        for own in self._stages.values():
            own.prepare(plan)
        self._reporter.state = "training"
        if self._reports:
            self._reporter.begin_iteration(iteration, plan)
        return plan

    def _end(self, iteration: int, origin: float, loss: float, *, again: bool) -> None:
        """Prepare a plan that has waited for this, and report the iteration, its profile and its
        trace. ``again``: some of its forwards ran before it began."""
        plan = self._plans.in_force
        outcomes, ran = self._turns.outcomes, self._turns.ran
        ops = [op for _, op in ran]
        if self._device_times is not None:
            self._waiting.begin(f"the device to finish iteration {iteration}")
            ops = self._device_times.resolve(ops)
            moves = self._turns.copied
            copies = self._device_times.resolve_copies([copy for _, copy in moves]) if moves else []
            for stage, outcome in outcomes.items():
                at = zip(ran, ops, strict=True)
                outcome.ops = [op for (whose, _), op in at if whose == stage]
                moved = zip(moves, copies, strict=True)
                outcome.copies = [copy for (whose, _), copy in moved if whose == stage]
            self._waiting.end()
        reduction = None
        if self._reducer is not None and self.synchronizes:
            reduction = self._reducer.measure()
        self.arriving.prepare_postponed()
        self._rounds.offer(iteration, plan.version, ops, loss)
        if profiling():
            self._rounds.wait(iteration)
        if not self._warm:
            # Code that is compiled at first takes different times. After this, waits are short.
            work = dist.barrier(self._world.control, async_op=True)
            self._wait_for(work, "all ranks to finish the first iteration")
        for stage, outcome in outcomes.items():
            first = stage == self._coordinate.stage
            if self._reports:
                self._publish(stage, iteration, plan.version, origin, outcome, again=again)
            if (trace := self._rank.traces.get(stage)) is not None:
                trace.iteration(
                    iteration, plan.version, origin, outcome, reduction if first else None
                )
        if not self._warm:
            self._warm = self.arriving.warm = True
            self._allow(self._rank.deadline)

    def _publish(
        self,
        stage: int,
        iteration: int,
        version: int,
        origin: float,
        outcome: Outcome,
        *,
        again: bool,
    ) -> None:
        """Report what a stage has measured in an iteration."""
        own = self._stages[stage]
        host_bytes = sum(each.host_bytes for each in self._stages.values())
        # Ops of the first iteration are slower than later ones.
        profiled = self._warm and not (own.measures or again)
        self._reporter.publish(
            profile=own.profile(outcome.ops, outcome.copies) if profiled else None,
            offloaded=offloaded(outcome.copies, host_bytes),
            reduction=(
                self._reduction_sample() if self._warm and stage == self._coordinate.stage else None
            ),
            ops=self._asked_ops(stage, iteration, version, origin, outcome),
        )

    def _asked_ops(
        self, stage: int, iteration: int, version: int, origin: float, outcome: Outcome
    ) -> OpsTrace | None:
        """The ops of a stage, if somebody watches who wants those of this iteration."""
        if not self._reporter.wants_ops(iteration):
            return None
        place = self._coordinate.rank, stage, self._coordinate.column
        return OpsTrace.of(place, iteration, version, origin, outcome.ops)

    def _reduction_sample(self) -> ReductionSample | None:
        found = self._reducer.take() if self._reducer is not None else None
        if found is None:
            return None
        column = self._coordinate.column
        return ReductionSample(
            stage=self._coordinate.stage, replica=column,
            group=self._coordinate.mesh.data_group(column), **found._asdict(),
            slowest=self._rank.ring.take() if self._rank.ring is not None else None,
        )  # fmt: skip

    def _allow(self, deadline: float) -> None:
        self._turns.allow(deadline)
        self._wait_for.allow(deadline)

    def _take_measured(self) -> None:
        """Take what the stages have measured: at the end of the first iteration, report what waits
        for W."""
        for stage, own in self._stages.items():
            if own.measures and self._reducer is not None:
                # Its ops were not those of later iterations.
                self._reducer.forget()
            if own.no_offload:
                self._plans.forbid_offload(stage, own.no_offload)
            if isinstance(own.runner, StageRunner) and not self._warm:
                self._report_split(stage, own.runner.report())

    def _report_split(self, stage: int, report: SplitReport) -> None:
        if stage in self._rank.traces:
            self._rank.traces[stage].split(report.record())
        coordinate = self._coordinate.of(stage)
        if coordinate.column == 0:
            # Printed, since few users configure logging.
            print(f"{coordinate}: {report.line()}", file=sys.stderr, flush=True)
        for text in report.lines():
            log.info("%s: %s", coordinate, text)

    def _between_ops(self) -> None:
        """Called between two ops and during all waits for messages. Cheap, and never blocks."""
        for faults in self._cutting:
            # Every time, so that a short iteration is not missed.
            faults.cut_due(time())
        if self._several:
            self._turns.between_ops()
        for end in self._on_device:
            # Every time: in the next iteration but one nobody waits for them any more.
            end.tell_departures()
        now = monotonic()
        if now - self._polled_at < PLAN_POLL_SECONDS:
            return
        self._polled_at = now
        self._loss.between_ops()
        self._rounds.advance()
        self.arriving.take(page_lock=False)
        if self._reports:
            self._reporter.between_ops()

    def ask(self, asked: Callable[[], bool] | None, to_move: Callable[[], bool] | None) -> None:
        """Have ``asked`` tell whether this rank is asked to end, see :attr:`leaving`, and
        ``to_move`` whether to leave for another place, see :attr:`moving`; None: it never is."""
        self._loss.asked, self._loss.asked_to_move = asked, to_move

    @property
    def moving(self) -> bool:
        """Whether a rank was asked to leave for another place when it shared the loss of the last
        iteration, the same on all ranks."""
        return self._loss.moving

    @property
    def leaving(self) -> bool:
        """Whether a rank was asked to end when it shared the loss of an iteration that has ended.
        All ranks find it after the same one."""
        return self._loss.leaving
