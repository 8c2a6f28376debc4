"""Iterations of one rank: ops, losses, reductions, and reports.

The section "An iteration" of ``docs/trainer.md`` lists the steps in order.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from time import monotonic, time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemorph.protocol import FittedCosts, ReductionSample
from pipemorph.spec.mesh import COLUMN_DIMENSIONS, DATA_DIMENSIONS, LOCKSTEP_DIMENSIONS
from pipemorph_trainer.agent.messages import ControlClient
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.backward import SplitReport
from pipemorph_trainer.errors import BatchError
from pipemorph_trainer.executor import step_abort as refusals
from pipemorph_trainer.executor.collector_pauses import CollectorPauses
from pipemorph_trainer.executor.device_times import DeviceTimes, LossCopy
from pipemorph_trainer.executor.local_stage import LocalStage, sum_offload_copies
from pipemorph_trainer.executor.mailbox import Mailbox, name_call
from pipemorph_trainer.executor.microbatch_costs import MicrobatchWork
from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.executor.stage_executor import (
    ExecutorContext,
    MicrobatchInputs,
    StageExecutor,
    StageRecord,
)
from pipemorph_trainer.executor.waiting import CollectiveWaiter
from pipemorph_trainer.profiling import profiling
from pipemorph_trainer.schedule.cost_fitter import MOMENTS, CostFitter
from pipemorph_trainer.schedule.microbatch_orderer import MicrobatchOrderer
from pipemorph_trainer.schedule.microbatch_source import MicrobatchPosition
from pipemorph_trainer.schedule.multi_stage_runner import MultiStageRunner, StepCall
from pipemorph_trainer.schedule.plan_agreement import PlanAgreement, TokenRelay
from pipemorph_trainer.schedule.plan_receiver import PlanReceiver
from pipemorph_trainer.schedule.plan_store import PlanStore
from pipemorph_trainer.sync.gradients import ReplicaSynchronizer
from pipemorph_trainer.sync.reduction import GradientReducer
from pipemorph_trainer.sync.ring_probe import RingProbe
from pipemorph_trainer.sync.tied_weights import TiedWeights
from pipemorph_trainer.telemetry.iteration_reducer import IterationPublisher
from pipemorph_trainer.telemetry.ops_publisher import OpsPublisher
from pipemorph_trainer.telemetry.reporter import TelemetryReporter
from pipemorph_trainer.telemetry.trace import TraceWriter
from pipemorph_trainer.topology.accelerator import Accelerator
from pipemorph_trainer.topology.failure_broadcast import FailureBroadcast
from pipemorph_trainer.topology.hierarchy import PendingCollective
from pipemorph_trainer.topology.world import World
from pipemorph_trainer.trackers.listeners import IterationListeners
from pipemorph_trainer.transport.link import RankLinks
from pipemorph_trainer.transport.link_recorder import OpClock
from pipemorph_trainer.transport.poller import Poller

log = logging.getLogger("pipemorph.trainer")

PLAN_POLL_SECONDS = 0.02
DrawInputs = Callable[
    [RankPlan, int], tuple[dict[int, MicrobatchInputs], dict[int, Any], Exception | None]
]
"""Function that draws the inputs of an iteration, see :meth:`IterationRunner.run_iteration`."""
RAISE_SECONDS = 3.0
"""Seconds within which all ranks that run collectives inside an op raise an error that each of them
finds, such as that of a bad sample."""


class SharedLoss:
    """Loss that all ranks share, in each iteration: :meth:`begin_call`, :meth:`post_losses`,
    :meth:`wait_for_loss`.

    The loss is the mean over columns of the sum over microbatches, divided by a divisor. Replicas,
    shards and context ranks have different data, tensor ranks the same loss. ``fitter``: its
    moments are added up with the losses.
    """

    def __init__(
        self,
        *,
        world: World,
        accelerator: Accelerator | None,
        wait: CollectiveWaiter,
        fitter: CostFitter,
    ) -> None:
        # Refers to the world, not to its groups, whose last references World.leave() drops.
        self._world, self._divisor = world, 1.0
        self._accelerator, self._wait_for, self._fitter = accelerator, wait, fitter
        self._loss = torch.zeros(0, dtype=torch.float64)
        self._sum: PendingCollective | None = None
        self._copy: LossCopy | None = None
        self.fitted: FittedCosts | None = None
        """Costs that have been fitted with the last loss; None: none."""
        self.refused = False
        """True if a replica refused the step. Valid after :meth:`wait_for_loss`."""
        self.end_requested: Callable[[], bool] | None = None
        """Returns True if this rank has a request to end."""
        self.layout_change_requested: Callable[[], bool] | None = None
        self.pauses_exceed_limit: Callable[[], bool] | None = None
        """Returns True if garbage collections pause this rank too long."""
        self.moves_collector = False
        """True if pauses of a rank were too long when it shared its loss. Equal on all ranks; stays
        True. Valid after :meth:`wait_for_loss`."""
        self.is_ending = False
        """True if a rank had a request to end when it shared its loss. Equal on all ranks; stays
        True. Valid after :meth:`wait_for_loss`."""
        self.is_changing_layout = False
        """True if a rank had a request to change its layout when it shared its loss. Equal on all
        ranks. Valid after :meth:`wait_for_loss`."""

    def begin_call(self, divisor: float) -> None:
        """Begin a call. ``divisor``: that of the sum over microbatches, on the last stage."""
        self._sum = self._copy = None
        self._divisor = divisor
        if not self._world.coordinate.is_last:
            self._share_losses([])

    def post_losses(self, losses: list[Tensor]) -> None:
        """Start to share the loss, on the last stage after its last F, long before it is needed.
        Losses of a device are shared when they are on the host; later ops are launched
        meanwhile."""
        if losses and self._accelerator is not None:
            self._copy = LossCopy(self._accelerator, losses)
        else:
            self._share_losses([float(loss) for loss in losses])

    def between_ops(self) -> None:
        """Share the losses of a device if they have reached the host. Pass on those of other
        ranks."""
        if self._copy is not None and self._copy.is_complete():
            self._share_losses(self._copy.wait_for_losses())
        if self._sum is not None:
            self._sum.advance()

    def wait_for_loss(self, call: str, *, refused: bool) -> float:
        """Wait for the loss of ``call``, such as ``iteration 7``: the mean over microbatches and
        replicas. Raises :class:`PipelineError` if it does not arrive.

        ``refused``: this replica refuses the call, so the last stage has no loss."""
        if self._sum is None and refused:
            self._share_losses([], refused=True)
        self._wait_for.waiting.begin_wait(f"the loss of {call} from the last stage")
        if self._copy is not None:
            self._share_losses(self._copy.wait_for_losses())
        assert self._sum is not None, "the last stage has shared no loss"
        self._sum.wait(self._wait_for)
        self._wait_for.waiting.end_wait()
        self.refused = bool(self._loss[1])
        self.is_ending = self.is_ending or bool(self._loss[2])
        self.is_changing_layout = bool(self._loss[3])
        self.moves_collector = self.moves_collector or bool(self._loss[4])
        self.fitted = self._fitter.add_moments(self._loss[-MOMENTS:].tolist())
        return float(self._loss[0]) / self._world.coordinate.mesh.columns

    def _share_losses(self, losses: Sequence[float], *, refused: bool = False) -> None:
        self._copy = None
        total = 0.0
        for loss in losses:
            total += loss
        ends = self.end_requested is not None and self.end_requested()
        moves = self.layout_change_requested is not None and self.layout_change_requested()
        pauses = self.pauses_exceed_limit is not None and self.pauses_exceed_limit()
        moments = self._fitter.take_moments()
        values = [total / self._divisor, refused, ends, moves, pauses, *moments]
        self._loss = torch.tensor(values, dtype=torch.float64)
        self._sum = self._world.all_ranks.all_reduce(self._loss)


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Context of a rank that runs iterations.

    ``world``: ranks with which it shares losses, gradients and agreements. ``links``: those of its
    stages. ``stages``: by number; all are of one kind. ``replicas``: keeps the replicas of the
    stages equal; None for one replica or emulated stages. ``reducer``: averages their gradients;
    that of ``replicas``, or of emulated stages. ``ring``: measures the edges of the reduction's
    ring; None: not needed. ``tied``: sums the gradients of weights that other stages hold, too;
    None without any. ``plans``: those of this rank; plans from ``control`` are added. ``reporter``,
    ``traces``: report each iteration, and write its trace, by stage; empty without traces.
    ``listeners``: get each reported iteration, on rank 0. ``failures``: errors of other ranks.
    ``poller``: waits for events. ``op_clock``: times of ops, for the links. ``wait``: waits for
    collectives, and describes the wait. ``deadline``: longest wait for one message, seconds.
    ``orderer``: orders the microbatches of each iteration on stage 0; None: they run in order.
    ``inject_op_delay``: makes ops longer, see
    :class:`~pipemorph_trainer.executor.stage_executor.ExecutorContext`.
    """

    world: World
    links: RankLinks
    stages: Mapping[int, LocalStage]
    replicas: ReplicaSynchronizer | None
    reducer: GradientReducer | None
    ring: RingProbe | None
    tied: TiedWeights | None
    plans: PlanStore
    control: ControlClient
    reporter: TelemetryReporter
    traces: Mapping[int, TraceWriter]
    listeners: IterationListeners
    failures: FailureBroadcast
    poller: Poller
    op_clock: OpClock
    wait: CollectiveWaiter
    deadline: float
    orderer: MicrobatchOrderer | None = None
    inject_op_delay: Callable[[float, int], None] | None = None


class IterationRunner:
    """Runner of iterations, one after another. Main thread only.

    In the first iteration and the first evaluation of a module the deadline is multiplied by the
    number of stages: their first messages follow the first F and B of every stage, in which a
    module is compiled, tuned or loaded.
    """

    def __init__(self, rank: RankContext) -> None:
        world, links = rank.world, rank.links
        self._rank, self._world, self._coordinate = rank, world, world.coordinate
        self._ends, self._stages, self._plans = links.ends, rank.stages, rank.plans
        self._cutting = [end.faults for end in links.ends if end.faults.has_cuts]
        self._faulty = [
            end.faults for end in links.ends if end.faults.has_cuts or end.faults.has_delays
        ]
        self._on_device = links.ends if links.send_timestamps is not None else []
        first = next(iter(rank.stages.values()))
        self._several = len(rank.stages) > 1
        self._in_lockstep = world.get_group(LOCKSTEP_DIMENSIONS) is not None
        self._microbatches = first.microbatches
        self.position = MicrobatchPosition(self._coordinate.dp_size)
        """Position in the microbatches of the run."""
        self._replicas, self._reducer = rank.replicas, rank.reducer
        self._tied, self._reporter = rank.tied, rank.reporter
        self._reports = rank.reporter.has_listener
        self._waiting, self._wait_for = rank.wait.waiting, rank.wait
        self._device_times: DeviceTimes | None = None
        if first.accelerator is not None:
            self._device_times = DeviceTimes(first.accelerator)
        self.fitter = CostFitter()
        """Fits the costs of microbatches."""
        self._loss = SharedLoss(
            world=world, accelerator=first.accelerator, wait=rank.wait, fitter=self.fitter
        )
        self._mail = Mailbox(
            links.ends, poller=rank.poller, waiting=rank.wait.waiting, deadline=rank.deadline,
            between=self._between_ops,
        )  # fmt: skip
        self._turns, agreements = self._build_stage_runner(first)
        self.reports = IterationPublisher(
            world=world, wait=rank.wait, reporter=rank.reporter, listeners=rank.listeners
        )
        self._rounds = self.reports.reducer
        self._warm = first.emulated
        """True if the first iteration with its measurements is over. Emulated stages need none."""
        self.plan_receiver = PlanReceiver(
            coordinate=self._coordinate, ends=links.ends, plans=rank.plans, agreements=agreements,
            control=rank.control, reporter=rank.reporter, listeners=rank.listeners,
            warm=self._warm, orders=rank.orderer is not None,
        )  # fmt: skip
        self.synchronizes = True
        """True if gradients are summed and averaged after an iteration."""
        self.ops = OpsPublisher(
            self._coordinate, rank.reporter, rank.traces,
            links.by_stage[self._coordinate.stage].upstream,
        )  # fmt: skip
        """Publisher of the ops of the newest iteration."""
        self._evaluated = False
        self._training_began = 0.0
        self._polled_at = 0.0

    def _build_stage_runner(
        self, first: LocalStage
    ) -> tuple[MultiStageRunner, list[PlanAgreement]]:
        """Build the runner of this rank's stages, and their agreements. ``first``: one of them."""
        rank, coordinate = self._rank, self._coordinate
        gate = None
        columns = self._world.get_hierarchy(COLUMN_DIMENSIONS)
        if columns is not None and coordinate.is_last and first.module is not None:
            gate = refusals.FirstForwardBarrier(columns, rank.wait)
        shared = ExecutorContext(
            mailbox=self._mail, op_clock=rank.op_clock, between_ops=self._between_ops,
            on_last_forward=self._loss.post_losses, reserve_slots=rank.plans.set_link_shapes,
            device_times=self._device_times, peers_raised_too=self._peers_raised_too,
            last_op_observer=self._reducer, inject_op_delay=rank.inject_op_delay,
        )  # fmt: skip
        executors: dict[int, StageExecutor] = {}
        tokens: dict[int, TokenRelay] = {}
        agreements = []
        for stage, own in rank.stages.items():
            at, neighbours = coordinate.with_stage(stage), rank.links.by_stage[stage]
            executors[stage] = StageExecutor(
                at, own.runner, neighbours, shared, gate=gate if at.is_last else None,
                # A stage of another trainer cannot restart an iteration.
                refuses=own.emulated or own.module is not None,
            )  # fmt: skip
            up, down = neighbours.upstream, neighbours.downstream
            agreement = PlanAgreement(
                rank.plans,
                None if up is None else up.socket,
                None if down is None else down.socket,
                together=self._world.same_plan_columns,
                wait=rank.wait,
                # Replicas may have other numbers of microbatches, and other costs.
                share_costs=not rank.plans.rebalances,
            )
            agreements.append(agreement)
            tokens[stage] = TokenRelay(at, neighbours, self._mail, agreement, rank.orderer)
        turns = MultiStageRunner(
            coordinate, executors, tokens, self._mail,
            self._ends if self._device_times is not None and self._several else (),
            pace=None if self._device_times is None else self._device_times.wait_for_device,
        )  # fmt: skip
        return turns, agreements

    def run_iteration(
        self,
        iteration: int,
        inputs: Mapping[int, MicrobatchInputs],
        shapes: Mapping[int, Any],
        refusal: Exception | None = None,
        draw: DrawInputs | None = None,
    ) -> float:
        """Run one iteration: forward and backward of all microbatches, and the gradient average
        over the replicas. Returns the loss.

        ``inputs``: by stage. ``shapes``: change if those of the inputs do. ``refusal``: why the
        input of this rank does not fit. ``draw``: returns these three once the plan is known, from
        the plan and the number of its first microbatch. Raises :class:`BatchError` on all ranks if
        the input of any does not fit, and :class:`PipelineError` if a message does not arrive.
        """
        origin = time()
        self._training_began = self._training_began or origin
        if not self._warm:
            self._set_deadline(self._rank.deadline * self._coordinate.stages)
        self._mail.call = name_call(iteration, evaluation=False)
        self._rounds.begin_iteration(iteration, at=monotonic())
        self.plan_receiver.take_plan(page_lock=True)
        if self._rank.links.staging is not None:
            self._rank.links.staging.page_lock_added()
        call = StepCall(iteration, inputs, shapes, refusal=refusal)
        if draw is None:
            self._agree_on_inputs(call)
        else:
            call.draw = partial(self._draw_inputs, call, draw)
        loss = self._attempt_iteration(call)
        again = loss is None
        while loss is None:
            self._rounds.begin_iteration(iteration, at=monotonic())
            loss = self._attempt_iteration(replace(call, is_retry=True))
        self._synchronize_gradients(iteration)
        for own in self._stages.values():
            own.update_emulated_state()
        self._apply_measurements()
        self._end_iteration(iteration, origin, loss, again=again)
        return loss

    def _draw_inputs(self, call: StepCall, draw: DrawInputs, version: int) -> None:
        """Draw the inputs of a call that runs the plan of this version."""
        plan = self._plans.get_plan(version)
        self._waiting.begin_wait(f"the source of microbatches of iteration {call.iteration}")
        first = self.position.find_first_number(plan, self._coordinate.dp_rank)
        with self.ops.window.measure_part("drawn"):
            call.inputs, call.shapes, call.refusal = draw(plan, first)
        self._waiting.end_wait()
        self._agree_on_inputs(call)

    def _agree_on_inputs(self, call: StepCall) -> None:
        """Complete the inputs of a call by what other ranks must agree on."""
        # Only the last stage's inputs have a weight and a scale.
        final = call.inputs[self._coordinate.held_stages[-1]]
        self._average_batch_weight(final, drawn=call.draw is not None)
        call.refused = self._any_refuses(f"iteration {call.iteration}", call.refusal is not None)
        # Of equal shares, whatever the plan: the mean over replicas follows, and shares have the
        # same sum.
        call.divisor = final.divisor or self._microbatches
        if final.scale != 1.0:
            final.divisor = call.divisor / final.scale

    def _attempt_iteration(self, call: StepCall) -> float | None:
        """Run the ops of an iteration. Returns the loss; None if it must begin again, since the
        form of a stage's output has changed. Raises :class:`BatchError` if a rank refuses it."""
        iteration = call.iteration
        plan = self._begin_iteration(iteration, self._turns.start_call(call))
        if not call.is_retry:
            self.position.advance(plan)
        self._loss.begin_call(call.divisor)
        if self._tied is not None:
            self._tied.begin_iteration()
        if self._reducer is not None and self.synchronizes:
            self._reducer.begin_iteration(iteration, stages=len(self._stages))
        self._turns.run_iteration(plan)
        self._reduce_shards(iteration)
        # The loss is usually here: it was sent after the last F.
        loss = self._loss.wait_for_loss(f"iteration {iteration}", refused=self._turns.refused)
        if self._loss.refused:
            if self._tied is not None:
                self._tied.undo_iteration()
            if self._reducer is not None:
                self._reducer.drop_iteration()
            self._rounds.drop_iteration(iteration)
            if (
                error := self._settle_refusal(f"step() of iteration {iteration}", call.refusal)
            ) is not None:
                raise error
            return None
        return loss

    def _reduce_shards(self, iteration: int) -> None:
        """Reduce the gradients of a sharded stage."""
        self._waiting.begin_wait(f"gradients of iteration {iteration} of the other shards")
        began = time()
        for own in self._stages.values():
            own.reduce_gradients()
        if self._reducer is not None and self._replicas is not None and self._replicas.sharded:
            self._reducer.add_seconds(time() - began)
        self._waiting.end_wait()
        if self._reducer is not None and self.synchronizes:
            self._reducer.release_gradients()

    def _synchronize_gradients(self, iteration: int) -> None:
        """Wait until all gradients are averaged over the replicas, and sum those of tied
        weights."""
        if not self.synchronizes:
            if self._tied is not None:
                self._tied.skip_sum()
            return
        self._waiting.begin_wait(f"gradients of iteration {iteration} of the other replicas")
        if self._replicas is not None:
            self._replicas.sync_replicas()
        elif self._reducer is not None:
            self._reducer.finish_iteration()
        if self._rank.ring is not None and self._reducer is not None:
            self._rank.ring.measure_if_due(self._reducer.newest_reduction)
        self._waiting.end_wait()
        if self._tied is not None:
            # Last, since it waits for other stages, and so for their ops.
            self._waiting.begin_wait(f"gradients of iteration {iteration} of tied weights")
            with self.ops.window.measure_part("tied"):
                self._tied.sum_gradients()
            self._waiting.end_wait()

    def resume_position(self, iteration: int) -> None:
        """Set the position of a run that resumes at ``iteration`` from a state without one."""
        if not self.position.total:
            self.position.resume_at(iteration, self._microbatches)

    def run_evaluation(
        self,
        iteration: int,
        inputs: Mapping[int, MicrobatchInputs],
        shapes: Mapping[int, Any],
        refusal: Exception | None = None,
    ) -> float:
        """Run the forwards of all microbatches, without gradients. Returns the loss.

        It is no iteration: no plan is committed, and no times are reported. The arguments and
        errors are those of :meth:`run_iteration`; ``iteration`` is the next one.
        """
        plan = self._plans.current_plan
        for end in self._ends:
            end.select_route(plan.by_link[end.link].route)
            # Messages may have other sizes than in training.
            end.recorder.paused = True
        for faults in self._faulty:
            faults.begin_iteration(iteration, self._training_began or time())
        self._set_deadline(
            self._rank.deadline * (1 if self._evaluated else self._coordinate.stages)
        )
        try:
            call = self._mail.call = name_call(iteration, evaluation=True)
            final = inputs[self._coordinate.held_stages[-1]]
            self._average_batch_weight(final)
            refused = self._any_refuses(call, refusal is not None)
            marked = {stage: ("evaluation", each) for stage, each in shapes.items()}
            self._turns.start_call(StepCall(iteration, inputs, marked, refused, evaluation=True))
            self._loss.begin_call(final.divisor or self._microbatches)
            self._turns.run_evaluation(self._microbatches)
            # A sharded stage is still gathered after a forward; there are no gradients to reduce.
            for own in self._stages.values():
                own.reduce_gradients()
            loss = self._loss.wait_for_loss(call, refused=self._turns.refused)
            if self._loss.refused:
                error = self._settle_refusal(f"evaluate() before iteration {iteration}", refusal)
                assert error is not None, "an evaluation does not begin again"
                raise error
            self._turns.end_uncounted()
        finally:
            for end in self._ends:
                end.recorder.paused = not self._reports
            if self._device_times is not None:
                self._device_times.drop_marks()
        self._evaluated = True
        self._set_deadline(self._rank.deadline)
        return loss

    def _any_refuses(self, call: str, refuses: bool) -> bool:
        """True if a rank refuses that runs collectives with this one: then none of them begins an
        op, in which it would wait for that rank."""
        if not self._in_lockstep:
            return refuses
        group = self._world.get_group(LOCKSTEP_DIMENSIONS)
        found = torch.tensor([float(refuses)])
        work = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._wait_for(work, f"the other ranks of the stage to begin {call}")
        return bool(found)

    def _peers_raised_too(self) -> bool:
        """True if all ranks that run collectives with this one inside an op have raised an error
        there; else some of them wait in the op for the others."""
        group = self._world.get_group(LOCKSTEP_DIMENSIONS)
        if group is None:
            return True
        if self._rank.failures.read_failure():
            # The error is only a symptom of the lost connections to that rank.
            return False
        work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
        try:
            work.wait(timedelta(seconds=RAISE_SECONDS))
        except RuntimeError as error:
            log.info("%s: the other ranks of the stage raise no error: %s", self._coordinate, error)
            return False
        return True

    def _average_batch_weight(self, inputs: MicrobatchInputs, *, drawn: bool = False) -> None:
        """Divide by the weight of the batches of all ranks with other data, if one was given. The
        mean over these ranks follows. ``drawn``: a rank whose source failed does not know whether
        others have a weight."""
        takes_part = inputs.divisor is not None or (drawn and self._coordinate.is_last)
        group = self._world.get_group(DATA_DIMENSIONS)
        if not takes_part or group is None:
            return
        total = torch.tensor([inputs.divisor or 0.0], dtype=torch.float64)
        work = dist.all_reduce(total, group=group, async_op=True)
        self._wait_for(work, f"the weight of {self._mail.call} of the other replicas")
        inputs.divisor = float(total) / dist.get_world_size(group) or None

    def _settle_refusal(self, call: str, refusal: Exception | None) -> BatchError | None:
        """Prepare for the next call after a refused one. Returns the error to raise; None if the
        call must begin again. ``refusal``: why the input of this rank does not fit, else None."""
        refusal = refusal or self._turns.cause
        error = refusals.gather_refusals(
            self._world, self._wait_for, call, refusal, repeats=self._turns.can_retry
        )
        self._turns.end_uncounted(again=error is None)
        # The neighbours do not have its shapes: messages were empty from some point on.
        self._turns.forget_shapes()
        if self._device_times is not None:
            self._device_times.drop_marks()
        if error is None:
            reason = refusal or "another rank refused it"
            log.info("%s: %s begins again: %s", self._coordinate, call, reason)
            return None
        if refusal is not None:
            self._reporter.publish(message=str(error))
        error.__cause__ = refusal
        return error

    def _begin_iteration(self, iteration: int, version: int) -> RankPlan:
        """Commit the version that the column runs in this iteration, and select the routes of
        links."""
        if self._plans.commit_version(version):
            log.info("%s: plan %d from iteration %d on", self._coordinate, version, iteration)
        plan = self._plans.current_plan
        for end in self._ends:
            end.select_route(plan.by_link[end.link].route)
        for faults in self._faulty:
            faults.begin_iteration(iteration, self._training_began)
        for own in self._stages.values():
            own.reserve_host_memory(plan)
        self._reporter.state = "training"
        if self._reports:
            self._reporter.begin_iteration(iteration, plan)
        return plan

    def _end_iteration(self, iteration: int, origin: float, loss: float, *, again: bool) -> None:
        """Prepare a postponed plan, and report the iteration, its profile and its trace. ``again``:
        some of its forwards ran before it began."""
        plan = self._plans.current_plan
        outcomes, ran = self._turns.outcomes, self._turns.ran
        ops = [op for _, op in ran]
        if self._device_times is not None:
            self._waiting.begin_wait(f"the device to finish iteration {iteration}")
            ops = self._device_times.resolve_ops(ops)
            moves = self._turns.copied
            copies = self._device_times.resolve_copies([copy for _, copy in moves]) if moves else []
            for stage, outcome in outcomes.items():
                at = zip(ran, ops, strict=True)
                outcome.ops = [op for (whose, _), op in at if whose == stage]
                moved = zip(moves, copies, strict=True)
                outcome.copies = [copy for (whose, _), copy in moved if whose == stage]
            self._waiting.end_wait()
        for outcome in outcomes.values():
            outcome.name_microbatches()
        reduction = None
        if self._reducer is not None and self.synchronizes:
            reduction = self._reducer.measure_reduction()
        self.plan_receiver.prepare_postponed()
        fitted = self._loss.fitted
        works = [
            outcome.measure_work()
            for stage, outcome in outcomes.items()
            if self._can_measure(stage, again=again)
        ]
        self._rounds.record_ops(
            iteration, plan.version, ops, loss, costs=self.work.costs, fitted=fitted,
            work=[each for each in works if each is not None],
        )  # fmt: skip
        if fitted is not None and self._coordinate.rank == 0:
            text = f"from iteration {iteration + 1} on, {fitted.format_text()}"
            log.info("%s", text)
            self._reporter.publish(message=text)
        if 0 in outcomes and self._can_measure(0, again=again):
            self.fitter.measure_microbatches(outcomes[0])
        if profiling():
            self._rounds.wait_for_iteration(iteration)
        if not self._warm:
            # Compilation times differ between ranks. After this barrier, waits are short.
            work = dist.barrier(self._world.control, async_op=True)
            self._wait_for(work, "all ranks to finish the first iteration")
        for stage, outcome in outcomes.items():
            if self._reports:
                self._publish_measurements(stage, outcome, again=again)
            first = stage == self._coordinate.stage
            self.ops.hold_stage(
                stage, outcome, iteration=iteration, version=plan.version, origin=origin,
                reduction=reduction if first else None,
            )  # fmt: skip
        self.ops.end_step(origin, reduction)
        if not self._warm:
            self._warm = self.plan_receiver.warm = True
            self._set_deadline(self._rank.deadline)

    def _publish_measurements(self, stage: int, outcome: StageRecord, *, again: bool) -> None:
        """Report a stage's measurements of an iteration."""
        own = self._stages[stage]
        host_bytes = sum(each.host_bytes for each in self._stages.values())
        profiled = self._can_measure(stage, again=again)
        self._reporter.publish(
            profile=own.profile_iteration(outcome) if profiled else None,
            offloaded=sum_offload_copies(outcome.copies, host_bytes),
            reduction=(
                self._take_reduction_sample()
                if self._warm and stage == self._coordinate.stage
                else None
            ),
        )

    def _can_measure(self, stage: int, *, again: bool) -> bool:
        """True if a stage's op times of this iteration are those of later ones, too. ``again``:
        some of its forwards ran before the iteration began again."""
        return self._warm and not (self._stages[stage].is_measuring or again)

    def _take_reduction_sample(self) -> ReductionSample | None:
        found = self._reducer.take_reduction() if self._reducer is not None else None
        if found is None:
            return None
        column = self._coordinate.column
        return ReductionSample(
            stage=self._coordinate.stage, replica=column,
            group=self._coordinate.mesh.find_data_group(column), **found._asdict(),
            slowest=self._rank.ring.take_slowest_edge() if self._rank.ring is not None else None,
        )  # fmt: skip

    def _set_deadline(self, deadline: float) -> None:
        self._turns.set_deadline(deadline)
        self._wait_for.set_deadline(deadline)

    def _apply_measurements(self) -> None:
        """Apply the stages' measurements; at the end of the first iteration, report the gradients
        that wait for W."""
        for stage, own in self._stages.items():
            if own.is_measuring and self._reducer is not None:
                # Its ops differ from those of later iterations.
                self._reducer.forget_write_counts()
            if own.offload_refusal:
                self._plans.forbid_offload(stage, own.offload_refusal)
            if isinstance(own.runner, ModuleRunner) and not self._warm:
                self._report_split(stage, own.runner.build_report())

    def _report_split(self, stage: int, report: SplitReport) -> None:
        if stage in self._rank.traces:
            self._rank.traces[stage].write_split(report.to_record())
        coordinate = self._coordinate.with_stage(stage)
        if coordinate.column == 0:
            # Printed, since few users configure logging.
            print(f"{coordinate}: {report.format_line()}", file=sys.stderr, flush=True)
        for text in report.format_lines():
            log.info("%s: %s", coordinate, text)

    def _between_ops(self) -> None:
        """Serve links, plans and reports, between two ops and in all waits. Cheap, and never
        blocks."""
        for faults in self._cutting:
            # At each call, so that a short iteration is not missed.
            faults.make_due_cuts(time())
        if self._several:
            self._turns.between_ops()
        for end in self._on_device:
            # At each call: two iterations later the receiver has stopped waiting for them.
            end.report_send_timestamps()
        now = monotonic()
        if now - self._polled_at < PLAN_POLL_SECONDS:
            return
        self._polled_at = now
        self._loss.between_ops()
        self._rounds.report_finished()
        self.plan_receiver.take_plan(page_lock=False)
        if self._reports:
            self._reporter.publish_between_ops()

    def set_request_sources(
        self, to_end: Callable[[], bool] | None, to_move: Callable[[], bool] | None
    ) -> None:
        """Set the sources of requests to this rank. ``to_end()``: it shall end, see
        :attr:`is_ending`. ``to_move()``: it shall change its layout, see
        :attr:`is_changing_layout`. None: never."""
        self._loss.end_requested, self._loss.layout_change_requested = to_end, to_move

    def set_collector(self, collector: CollectorPauses) -> None:
        """Set the source of :attr:`moves_collector` on this rank, and that of the pauses."""
        self._loss.pauses_exceed_limit = lambda: collector.exceeds_limit
        self.ops.drain_pauses = collector.drain_pauses
        self.ops.window.count_paused = collector.count_paused

    @property
    def moves_collector(self) -> bool:
        """True if garbage collections paused a rank too long when it shared a loss. Equal on all
        ranks."""
        return self._loss.moves_collector

    @property
    def work(self) -> MicrobatchWork:
        """Costs and order of the microbatches of the newest call."""
        return self._turns.work

    @property
    def is_changing_layout(self) -> bool:
        """True if a rank had a request to change its layout when it shared the last iteration's
        loss. Equal on all ranks."""
        return self._loss.is_changing_layout

    @property
    def is_ending(self) -> bool:
        """True if a rank had a request to end when it shared the loss of a finished iteration. All
        ranks see it after the same iteration."""
        return self._loss.is_ending
