"""Executor of a stage: runs each op of an iteration when its message has arrived.

A plan has no communication: an F waits for the F upstream and a B for the B downstream, each for
its own message only, and sends start when an op ends. Each kind of op runs in microbatch order. So
gradients are summed in one order, and results are bitwise equal, for all schedules, delays and
routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import time
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd import profiler

from pipemorph.planning import Op, OpKind
from pipemorph.planning.offload import DeviceResidency
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.backward.output_structure import SINGLE_TENSOR, OutputStructure
from pipemorph_trainer.errors import PipelineError, ShapeError
from pipemorph_trainer.executor.device_times import DeviceTimes, MeasuredCopy, MeasuredOp
from pipemorph_trainer.executor.mailbox import Mailbox, name_call
from pipemorph_trainer.executor.microbatch_costs import NO_COSTS, MicrobatchWork
from pipemorph_trainer.executor.op_runner import Grads, OpRunner
from pipemorph_trainer.executor.step_abort import (
    BoundaryChangedError,
    FirstForwardBarrier,
    is_batch_error,
)
from pipemorph_trainer.executor.work_spread import WorkVariance, measure_work
from pipemorph_trainer.profiling import profiling
from pipemorph_trainer.transport.link import LinkEnd, StageLinks
from pipemorph_trainer.transport.link_recorder import OpClock
from pipemorph_trainer.transport.message import (
    UNLIMITED_RECEIVES,
    MessageBatch,
    MessageContents,
    ReceiveLimits,
    TensorMeta,
    describe_metas,
    new_tuple,
    select_gradients,
)

NEVER = float("inf")
UNLIMITED = DeviceResidency(None)


class CallStart(NamedTuple):
    """State of a stage at the beginning of a call.

    ``shapes_from_above``, ``shapes_to_below``: shapes are exchanged with this neighbour.
    ``refused``: the batch of this stage or of a stage above does not fit. ``upstream_refused``: a
    stage above refused, so no message comes from above. ``work``: costs and order of the
    microbatches.
    """

    shapes_from_above: bool = False
    shapes_to_below: bool = False
    refused: bool = False
    upstream_refused: bool = False
    work: MicrobatchWork = NO_COSTS


UNCHANGED_START = CallStart()
"""State without a change since the last call."""


class ShapeGenerations(NamedTuple):
    """Number of shape exchanges so far with each neighbour."""

    above: int = 0
    below: int = 0


FIRST_GENERATIONS = ShapeGenerations()
"""State before the first exchange of shapes."""


@dataclass
class MicrobatchInputs:
    """Data of an iteration on this rank, per microbatch. Empty if the stage needs none."""

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Sequence[dict[str, Any]] = ()
    targets: Sequence[Any] = ()
    outputs: list[Any] | None = None
    """Gets the last stage's output for each microbatch; None: outputs are dropped."""
    divisor: float | None = None
    """Divisor of each loss, for the mean; None: the number of microbatches."""
    scale: float = 1.0
    """Factor of each loss, for its backward alone."""
    costs: tuple[float, ...] = ()
    """Costs of the microbatches, on stage 0; empty if unknown."""

    def sort_by_place(self, work: MicrobatchWork) -> MicrobatchInputs:
        """Return the inputs of the microbatch in each place. :attr:`outputs` is the same list."""
        if not work.order:
            return self
        return replace(
            self,
            args=work.to_places(self.args),
            kwargs=work.to_places(self.kwargs),
            targets=work.to_places(self.targets),
        )


@dataclass
class StageRecord:
    """Record of one iteration on this stage. ``losses``: only on the last stage. ``copies``: of
    activations to host memory and back, and forwards that ran again; part of their ops. ``work``:
    costs and order of the microbatches."""

    ops: list[MeasuredOp] = field(default_factory=list)
    copies: list[MeasuredCopy] = field(default_factory=list)
    waits: list[tuple[OpKind, int, float, float]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    work: MicrobatchWork = NO_COSTS

    def name_microbatches(self) -> None:
        """Replace the places of all ops, copies and waits by the microbatches that ran there."""
        if order := self.work.order:
            self.ops = [op._replace(microbatch=order[op.microbatch]) for op in self.ops]
            self.copies = [each._replace(microbatch=order[each.microbatch]) for each in self.copies]
            self.waits = [
                (kind, order[place], start, end) for kind, place, start, end in self.waits
            ]

    def measure_work(self) -> WorkVariance | None:
        """Measure the variance of the microbatches' work; None if the ops do not show it."""
        copying = {(copy.kind, copy.microbatch): copy.end - copy.start for copy in self.copies}
        return measure_work(self.ops, self.work.costs, copying)


class LastOpObserver(Protocol):
    """Observer of a stage's last op that writes gradients, a W or BW."""

    def begin_last_op(self, kind: OpKind) -> None:
        """Called before the op."""

    def end_last_op(self) -> None:
        """Called after the op. No op follows on this stage."""


@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """Context that the executors of a rank share.

    ``between_ops``: called between two ops. ``on_last_forward``: called with the losses, on the
    last stage. ``reserve_slots``: called with the tensors that a link will carry.
    ``peers_raised_too``: returns True if no other rank waits inside an op in which this one has
    raised an error. ``last_op_observer``: observes the last op. ``inject_op_delay``: called at the
    end of each op with its start time and the iteration; makes the op longer.
    """

    mailbox: Mailbox
    op_clock: OpClock
    between_ops: Callable[[], None]
    on_last_forward: Callable[[list[Tensor]], None]
    reserve_slots: Callable[[LinkEnd, tuple[TensorMeta, ...]], None]
    device_times: DeviceTimes | None = None
    peers_raised_too: Callable[[], bool] = lambda: True
    last_op_observer: LastOpObserver | None = None
    inject_op_delay: Callable[[float, int], None] | None = None


@dataclass(frozen=True, kw_only=True)
class StageIteration:
    """Input of a stage for one iteration.

    ``device_limit``: most microbatches with activations on the device; those of others are dropped
    and computed again with ``recompute``, else moved to host memory. ``receives``: from above and
    from below. ``evaluation``: only forwards run, without gradients. ``is_retry``: the iteration
    was refused, and forwards that have run do not run again.
    """

    ops: Sequence[Op]
    iteration: int
    generations: ShapeGenerations = FIRST_GENERATIONS
    inputs: MicrobatchInputs = field(default_factory=MicrobatchInputs)
    start: CallStart = UNCHANGED_START
    device_limit: int | None = None
    recompute: bool = False
    receives: tuple[ReceiveLimits, ReceiveLimits] = (UNLIMITED_RECEIVES, UNLIMITED_RECEIVES)
    evaluation: bool = False
    is_retry: bool = False


class StageExecutor:
    """Executor of one stage's ops. Main thread only.

    :meth:`begin_iteration` selects a function for each kind of op, so that an iteration pays for
    limits on activations, a profiler and a refusal only if it uses them.
    """

    def __init__(
        self,
        coordinate: Coordinate,
        runner: OpRunner,
        neighbours: StageLinks,
        shared: ExecutorContext,
        *,
        gate: FirstForwardBarrier | None = None,
        refuses: bool = False,
    ) -> None:
        """``refuses``: an error in the first forward of an iteration refuses only this iteration.
        ``gate``: for the last stage, if there are several replicas."""
        self._coordinate, self._runner, self._shared = coordinate, runner, shared
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self.mailbox, self._boundary, self._op_clock = (
            shared.mailbox,
            shared.between_ops,
            shared.op_clock,
        )
        self._gate, self._refuses = gate, refuses
        self._start_op: Callable[[], float] = self._mark_op_start
        self._end_op: Callable[[OpKind, int, float], None] = self._mark_op_end
        if shared.device_times is not None or shared.inject_op_delay is not None:
            self._start_op, self._end_op = (
                self._mark_op_start_with_hooks,
                self._mark_op_end_with_hooks,
            )
        self.refused = False
        """True if the iteration is refused: messages are sent as planned, but empty."""
        self.cause: Exception | None = None
        """Error that the stage raised in a refused iteration, if any."""
        self.can_retry = False
        """True if this stage has the results of all forwards of this call, to repeat it."""
        self._results: dict[int, tuple[Tensor, ...]] = {}
        self._before: dict[int, tuple[Tensor, ...]] = {}
        """Results of forwards that ran before this iteration began again."""
        self._uncounted = 0
        """Number of calls so far that were no iterations: evaluations, and refused ones."""
        self._above, self._below = self._up, self._down
        self.input_metas: tuple[TensorMeta, ...] = ()
        self.output_metas: tuple[TensorMeta, ...] = ()
        self._gives_gradients = self._gets_gradients = False
        """True if gradients go to the stage above, or come from the stage below, respectively."""
        self._now = StageIteration(ops=(), iteration=0)
        self._microbatches = 0
        self._last = -1
        """Microbatch whose W or BW is the last op, if that is observed; else -1."""
        self._structure = SINGLE_TENSOR
        self._shapes_known = False
        self._outcome = StageRecord()
        self.residency = UNLIMITED
        """Microbatches with activations on the stage's device."""
        self._limited: LimitedOps | None = None
        self._computes: dict[OpKind, Callable[..., Any]] = {}
        """Functions that compute each kind of op."""
        self._sources: dict[OpKind, LinkEnd | None] = {}
        """Links on which the message of each kind of op arrives; None if it needs none."""

    def end_uncounted(self, *, again: bool = False) -> None:
        """End an evaluation or a refused iteration. The next iteration has the same number, but
        other message keys. ``again``: it is this iteration, and uses the results so far."""
        self._uncounted += 1
        self.cause = None
        if self.refused and not again:
            self._runner.discard_microbatches()

    def begin_iteration(self, now: StageIteration) -> StageRecord:
        """Prepare for the ops of one iteration. Returns the record that the ops fill.

        Waits for the shapes of the stage above if they are exchanged. After an evaluation, call
        :meth:`end_uncounted`.
        """
        self._now = now
        inputs, start, generations = now.inputs, now.start, now.generations
        self.mailbox.call = name_call(now.iteration, evaluation=now.evaluation)
        self.mailbox.work = start.work
        self._microbatches = sum(op.kind is OpKind.F for op in now.ops)
        self._last = -1 if self._shared.last_op_observer is None else self._microbatches - 1
        self._outcome = StageRecord(work=start.work)
        self._shapes_known = not start.shapes_to_below
        fused = frozenset(op.microbatch for op in now.ops if op.kind is OpKind.BW)
        self._before = self._before | self._results if now.is_retry else {}
        self._results = {}
        if not now.is_retry:
            self._runner.begin_iteration(
                fused=fused, outputs=inputs.outputs, divisor=inputs.divisor,
                microbatches=self._microbatches,
            )  # fmt: skip
        self._select_op_functions()
        # Ranks that compute together would have to agree on it.
        together = self._coordinate.mesh.lockstep_size > 1
        self.can_retry = self._limited is None and not (now.evaluation or together)
        self.refused, self.cause = start.refused, None
        if self._gate is not None:
            self._gate.begin_iteration()
        self._above = None if start.upstream_refused else self._up
        # The token informs the stages below.
        self._below = None if start.refused else self._down
        if self._above is not None and start.shapes_from_above:
            self._await_shapes(self._above)
        self._gives_gradients = any(meta.gradient for meta in self.input_metas)
        self._find_sources()
        bounds = now.receives[0]
        if self._above is not None:
            if not self._gives_gradients:
                # The stage above then waits for no message of this stage.
                bounds = bounds._replace(after=())
            # Outgoing first: it may page-lock memory, so no receive may be posted.
            gradients = select_gradients(self.input_metas)
            self._above.outgoing.begin_batch(self._describe_batch(generations.above, gradients))
        if self._below is not None and self._shapes_known:
            self._begin_downstream(self._below)
        if self._above is not None:
            batch = self._describe_batch(generations.above, self.input_metas, bounds)
            self._above.incoming.begin_batch(batch)
        return self._outcome

    def _select_op_functions(self) -> None:
        """Select the functions that compute the ops of this iteration."""
        now, runner = self._now, self._runner
        limit = None if now.evaluation else now.device_limit
        self.residency, self._limited = UNLIMITED, None
        computes: dict[OpKind, Callable[..., Any]] = {
            OpKind.F: runner.evaluate_microbatch if now.evaluation else runner.run_forward,
            OpKind.B: runner.backward_input,
            OpKind.BW: runner.run_fused_backward,
            OpKind.W: runner.backward_weight,
        }
        if limit is not None:
            self.residency = DeviceResidency(limit)
            self._limited = LimitedOps(
                runner, self.residency, self._outcome.copies, self._shared.device_times,
                recompute=now.recompute,
            )  # fmt: skip
            computes = self._limited.computes
        if profiling():
            stage = self._coordinate.stage
            computes = {
                kind: _with_profiler_range(stage, kind, each) for kind, each in computes.items()
            }
        self._computes = computes

    def _find_sources(self) -> None:
        self._gets_gradients = any(meta.gradient for meta in self.output_metas)
        gradients = self._below if self._gets_gradients else None
        self._sources = {
            OpKind.F: self._above, OpKind.B: gradients, OpKind.BW: gradients, OpKind.W: None,
        }  # fmt: skip

    def end_iteration(self) -> None:
        """End the iteration after its last op."""
        if self.refused and self._gate is not None and not self._now.evaluation:
            self._gate.refuse_step()

    def run_op(self, kind: OpKind, microbatch: int) -> None:
        """Wait for the op's message, then run it."""
        source = self._sources[kind]
        waited = None if source is None else self.mailbox.wait_for_message(source, kind, microbatch)
        if self.refused:
            self._run_refused_op(kind, microbatch)
        else:
            self.run_ready_op(kind, microbatch, waited)

    def run_ready_op(
        self, kind: OpKind, microbatch: int, waited: tuple[float, float] | None = None
    ) -> None:
        """Run an op whose message is here. ``waited``: start and end of the wait for it."""
        if waited is not None:
            self._outcome.waits.append((kind, microbatch, *waited))
        if kind is OpKind.F:
            self._run_forward(microbatch)
        elif kind is OpKind.W:
            self._run_backward_weight(microbatch)
        else:
            self._run_backward(kind, microbatch)
        self._boundary()

    def ready_at(self, kind: OpKind, microbatch: int, *, waits_for_send: bool) -> float:
        """Return when an op's message is here and, with ``waits_for_send``, its own can be sent."""
        source, at = self._sources[kind], 0.0
        if source is not None:
            letter = "F" if kind is OpKind.F else "B"
            found = self.mailbox.ready_at(source, letter, microbatch)
            if found is None:
                return NEVER
            at = found
        if waits_for_send and self._below is not None and self._shapes_known:
            at = max(at, self._below.outgoing.slot_free_at())
        return at

    def describe_message(self, kind: OpKind, microbatch: int) -> str:
        """Describe the message that an op needs; empty if it needs none."""
        source = self._sources[kind]
        if source is None:
            return ""
        return self.mailbox.describe_message(source, "F" if kind is OpKind.F else "B", microbatch)

    # --- ops --------------------------------------------------------------------------

    def _run_forward(self, microbatch: int) -> None:
        inputs, below = self._now.inputs, self._below
        args: Sequence[Any] | None = inputs.args[microbatch] if inputs.args else ()
        if self._above is not None:
            args = self._above.incoming.pop_message(microbatch)
        if args is None:
            self._refuse_iteration(OpKind.F, microbatch)
            return
        kwargs = inputs.kwargs[microbatch] if inputs.kwargs else {}
        target = inputs.targets[microbatch] if inputs.targets else None
        try:
            if self._limited is not None:
                self._limited.before_forward(microbatch)
            start = self._start_op()
            outputs = self._before.pop(microbatch, None)
            if outputs is None:
                outputs = self._computes[OpKind.F](microbatch, args, kwargs, target)
            if self.can_retry:
                self._results[microbatch] = outputs
            if self._limited is not None:
                # Without this reference the runner can move the inputs.
                args = ()
                self._limited.after_forward(microbatch)
            self._end_op(OpKind.F, microbatch, start)
            if below is not None and not self._outputs_match(outputs):
                self._check_outputs(microbatch, outputs, below)
        except Exception as error:
            if not self._is_refusable_error(error, microbatch):
                raise
            self.cause = error
            self._refuse_iteration(OpKind.F, microbatch)
            return
        if below is not None:
            self.mailbox.send(below, microbatch, outputs)
        else:
            self._record_loss(outputs[0], microbatch)

    def _record_loss(self, loss: Tensor, microbatch: int) -> None:
        losses = self._outcome.losses
        losses.append(loss)
        if microbatch == 0 and self._gate is not None and not self._now.evaluation:
            self._gate.report_forward()
        if microbatch == self._microbatches - 1:
            self._shared.on_last_forward(losses)

    def _is_refusable_error(self, error: Exception, microbatch: int) -> bool:
        """True if an error in a forward only refuses the iteration. False after the first
        microbatch: other stages may then have added to gradients."""
        early = microbatch == 0 or self._now.evaluation
        return early and self._refuses and is_batch_error(error) and self._shared.peers_raised_too()

    def _run_backward(self, kind: OpKind, microbatch: int) -> None:
        source = self._sources[kind]
        taken = source.incoming.pop_message(microbatch) if source is not None else []
        if taken is None or (microbatch == 0 and not self._may_begin_backward()):
            self._refuse_iteration(kind, microbatch)
            return
        if self.can_retry:
            self.can_retry, self._results = False, {}
        grads: list[Tensor | None] | None = None
        if self._below is not None:
            arrived = iter(taken)
            grads = [next(arrived) if meta.gradient else None for meta in self.output_metas]
        last = (
            self._shared.last_op_observer
            if kind is OpKind.BW and microbatch == self._last
            else None
        )
        if last is not None:
            last.begin_last_op(kind)
        start = self._start_op()
        found = self._computes[kind](microbatch, grads)
        self._end_op(kind, microbatch, start)
        if last is not None:
            last.end_last_op()
        if self._above is not None and self._gives_gradients:
            self.mailbox.send(self._above, microbatch, self._select_gradients_to_send(found))

    def _may_begin_backward(self) -> bool:
        """True if the iteration may change gradients."""
        return self._gate is None or self._gate.wait_for_columns()

    def _run_backward_weight(self, microbatch: int) -> None:
        # In every order the W or BW of the last microbatch is the last op.
        last = self._shared.last_op_observer if microbatch == self._last else None
        if last is not None:
            last.begin_last_op(OpKind.W)
        start = self._start_op()
        self._computes[OpKind.W](microbatch)
        self._end_op(OpKind.W, microbatch, start)
        if last is not None:
            last.end_last_op()

    def _mark_op_start(self) -> float:
        self._op_clock.busy = True
        return time()

    def _mark_op_end(self, kind: OpKind, microbatch: int, start: float) -> None:
        op_clock = self._op_clock
        op_clock.ended_at = end = time()
        op_clock.busy = False
        self._outcome.ops.append(new_tuple(MeasuredOp, (kind, microbatch, start, end)))

    def _mark_op_start_with_hooks(self) -> float:
        self._op_clock.busy = True
        if self._shared.device_times is not None:
            self._shared.device_times.mark_op_start()
        return time()

    def _mark_op_end_with_hooks(self, kind: OpKind, microbatch: int, start: float) -> None:
        if self._shared.inject_op_delay is not None:
            self._shared.inject_op_delay(start, self._now.iteration)
        self._mark_op_end(kind, microbatch, start)
        if self._shared.device_times is not None:
            self._shared.device_times.mark_op_end()

    # --- refusal ----------------------------------------------------------------------

    def _send_empty(self, kind: OpKind, microbatch: int) -> None:
        """Send an empty message to the stage that needs the results of an op, if any."""
        end = self._below if kind is OpKind.F else self._above
        if end is None or kind is OpKind.W or not (kind is OpKind.F or self._gives_gradients):
            return
        self.mailbox.send(end, microbatch, None)

    def _refuse_iteration(self, kind: OpKind, microbatch: int) -> None:
        """Refuse this iteration from this op on: its remaining messages are sent as planned, but
        empty, so that none remains for the next iteration."""
        self._drop_iteration()
        self._send_empty(kind, microbatch)

    def _drop_iteration(self) -> None:
        """Stop computing this iteration, which is refused."""
        self.refused = True
        self._op_clock.busy = False
        if self._below is not None and not self._shapes_known:
            self._below.socket.send_shapes(None)
            self._below = None
        self._find_sources()

    def _run_refused_op(self, kind: OpKind, microbatch: int) -> None:
        """Run an op of a refused iteration: receive its message, and send an empty one."""
        source = self._sources[kind]
        if source is not None:
            source.incoming.pop_message(microbatch)
        self._send_empty(kind, microbatch)
        self._boundary()

    # --- messages ---------------------------------------------------------------------

    def _select_gradients_to_send(self, grads: Grads) -> list[Tensor | None]:
        if len(grads) != len(self.input_metas):
            raise PipelineError(
                f"{self._coordinate}: the backward gave {len(grads)} input gradients; expected "
                f"{len(self.input_metas)}, one per tensor that came from stage "
                f"{self._coordinate.stage - 1}"
            )
        return [
            grad for grad, meta in zip(grads, self.input_metas, strict=True) if meta.gradient
        ]  # fmt: skip

    def _describe_batch(
        self,
        generation: int,
        metas: tuple[TensorMeta, ...],
        receives: ReceiveLimits = UNLIMITED_RECEIVES,
    ) -> MessageBatch:
        return MessageBatch(
            generation, self._now.iteration + self._uncounted, self._microbatches, metas,
            self._uncounted, receives,
        )  # fmt: skip

    def _begin_downstream(self, end: LinkEnd) -> None:
        generation = self._now.generations.below
        end.outgoing.begin_batch(self._describe_batch(generation, self.output_metas))
        gradients = select_gradients(self.output_metas)
        if gradients:
            end.incoming.begin_batch(
                self._describe_batch(generation, gradients, self._now.receives[1])
            )

    def _check_outputs(self, microbatch: int, outputs: tuple[Tensor, ...], end: LinkEnd) -> None:
        """Send the shapes to the next stage if it does not have them; else raise."""
        structure = self._runner.structure
        metas = tuple(map(TensorMeta.from_tensor, outputs))
        if not self._shapes_known:
            if len(metas) > 31:
                raise ShapeError(
                    f"{self._coordinate}: the stage has {len(metas)} outputs; "
                    "at most 31 can be sent"
                )
            self.output_metas, self._structure = metas, structure
            self._find_sources()
            end.socket.send_shapes(MessageContents(metas, structure.encode()))
            self._shared.reserve_slots(end, select_gradients(metas))
            self._begin_downstream(end)
            self._shapes_known = True
        else:
            same = structure == self._structure
            found, known = (
                (f"outputs are {describe_metas(metas)}", describe_metas(self.output_metas)) if same
                else (f"the stage returned {structure}", str(self._structure))
            )  # fmt: skip
            what = f"{self._coordinate}: {found} in {self.mailbox.call}"
            if microbatch == 0:
                hint = "" if self._refuses else "; make a new schedule: torch's stages"
                raise BoundaryChangedError(
                    f"{what}; before, {known}" + (hint and f"{hint} exchange shapes once")
                )
            raise ShapeError(
                f"{what}; expected {known} as in its first microbatch: all microbatches of an"
                " iteration need the same shapes"
            )

    def _outputs_match(self, outputs: tuple[Tensor, ...]) -> bool:
        """True if the outputs can be sent like those of the first microbatch. A gradient that no
        output needs is ignored on arrival."""
        known, structure = self.output_metas, self._runner.structure
        if not self._shapes_known or len(outputs) != len(known):
            return False
        if structure is not self._structure and structure != self._structure:
            return False
        for (shape, dtype, gradient), tensor in zip(known, outputs, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype:
                return False
            if tensor.requires_grad and not gradient:
                return False
        return True

    def _await_shapes(self, end: LinkEnd) -> None:
        found = self.mailbox.await_queue(
            end, f"shapes from stage {end.peer_stage}", end.socket.shapes
        )
        if found is None:
            self._above = None
            self._drop_iteration()
        else:
            self.input_metas = found.metas
            self._runner.expect_inputs(
                OutputStructure.decode(found.structure), [meta.gradient for meta in found.metas]
            )
            self._shared.reserve_slots(end, found.metas)


class LimitedOps:
    """Ops of one iteration of a stage whose plan limits the activations on its device.

    ``residency``: selects activations that leave; ``copies``: gets each copy, and each forward that
    runs again; ``recompute``: compute activations again instead of moving them to host memory.
    """

    def __init__(
        self,
        runner: OpRunner,
        residency: DeviceResidency,
        copies: list[MeasuredCopy],
        device_times: DeviceTimes | None,
        *,
        recompute: bool,
    ) -> None:
        self._runner, self._residency, self._copies = runner, residency, copies
        self._device_times, self._recompute = device_times, recompute
        self._leaves = False
        self.computes: dict[OpKind, Callable[..., Any]] = {
            OpKind.F: self._run_forward,
            OpKind.B: self._restore_before(OpKind.B, runner.backward_input),
            OpKind.BW: self._restore_before(OpKind.BW, runner.run_fused_backward),
            OpKind.W: self._run_backward_weight,
        }
        """Functions that compute each kind of op."""

    def before_forward(self, microbatch: int) -> None:
        """Prepare for an F before it starts, so that the wait is not part of its time."""
        self._leaves = self._residency.record_op(OpKind.F, microbatch)
        if self._leaves and not self._recompute:
            self._runner.reclaim_memory()

    def _run_forward(self, microbatch: int, args: Any, kwargs: Any, target: Any) -> Any:
        leaves, again = self._leaves, self._recompute
        return self._runner.run_forward(
            microbatch, args, kwargs, target,
            offload=leaves and not again, recompute=leaves and again,
        )  # fmt: skip

    def after_forward(self, microbatch: int) -> None:
        """Move the activations of an F to host memory, if they leave, at the end of the op. The F's
        arguments must have no other references."""
        if self._leaves and not self._recompute:
            self._time_copy(OpKind.F, microbatch, self._runner.offload_activations)

    def _restore_before(self, kind: OpKind, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward that first restores the activations that are not on the device."""

        def run(microbatch: int, grads: Any) -> Any:
            if self._residency.record_op(kind, microbatch):
                if self._recompute:
                    self._time_copy(kind, microbatch, self._recompute_forward)
                else:
                    self._time_copy(kind, microbatch, self._runner.fetch_activations)
            return backward(microbatch, grads)

        return run

    def _run_backward_weight(self, microbatch: int) -> None:
        self._residency.record_op(OpKind.W, microbatch)
        self._runner.backward_weight(microbatch)

    def _recompute_forward(self, microbatch: int) -> int:
        self._runner.recompute_forward(microbatch)
        return 0

    def _time_copy(self, kind: OpKind, microbatch: int, copy: Callable[[int], int]) -> None:
        """Copy activations, or run a forward again, as part of an op."""
        start = time()
        with nullcontext() if self._device_times is None else self._device_times.mark_copy():
            nbytes = copy(microbatch)
        again = self._recompute
        self._copies.append(MeasuredCopy(kind, microbatch, start, time(), nbytes, recomputed=again))


def _with_profiler_range(
    stage: int, kind: OpKind, compute: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap an op in a range ``PP:3F7`` of torch.profiler, which costs 40 µs."""
    letter = {OpKind.B: "I", OpKind.BW: "B"}.get(kind) or kind.name

    def run_in_range(microbatch: int, *operands: Any) -> Any:
        with profiler.record_function(f"PP:{stage}{letter}{microbatch}"):
            return compute(microbatch, *operands)

    return run_in_range
