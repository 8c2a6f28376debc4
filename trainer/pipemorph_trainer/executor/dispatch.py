"""Runs one iteration of a stage: each op when its message has arrived.

Communication is not part of a plan. An F waits for the F upstream and a B for the B downstream,
each for its own message only. Sends start when an op ends. Each kind of op runs in microbatch
order, so that gradients are summed in one order for all schedules, delays and routes: results are
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import profiler

from pipemorph.api.mesh import Coordinate
from pipemorph.planning import Op, OpKind
from pipemorph.planning.offload import Residency
from pipemorph_trainer.errors import PipelineError, ShapeError
from pipemorph_trainer.executor.call import Generations, Start, name_call
from pipemorph_trainer.executor.device_times import DeviceTimes
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.executor.refusal import Gate, is_of_batch
from pipemorph_trainer.executor.stages.interface import Grads, Runner
from pipemorph_trainer.executor.stages.structure import SINGLE, Structure
from pipemorph_trainer.executor.timed import TimedCopy, TimedOp
from pipemorph_trainer.links.channels.arrival import OpClock
from pipemorph_trainer.links.link import LinkEnd, Neighbourhood
from pipemorph_trainer.links.message import (
    RECEIVE_ALL,
    Batch,
    Contents,
    Receives,
    TensorMeta,
    gradients_of,
    new_tuple,
    words,
)
from pipemorph_trainer.profiling import profiling

NEVER = float("inf")
_NO_RANGE = nullcontext()


@dataclass
class Inputs:
    """One iteration's data on this rank, per microbatch. Empty if the stage needs none."""

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Sequence[dict[str, Any]] = ()
    targets: Sequence[Any] = ()
    outputs: list[Any] | None = None
    """Filled with what the last stage returns for each microbatch; None: it is not kept."""
    divisor: float | None = None
    """By which each loss is divided for the mean; None: the number of microbatches."""
    scale: float = 1.0
    """Of each loss, for its backward alone."""


@dataclass
class Outcome:
    """Record of one iteration on this stage. ``losses``: only on the last stage. ``copies``: of
    activations to host memory and back, and forwards that ran again; part of their ops."""

    ops: list[TimedOp] = field(default_factory=list)
    copies: list[TimedCopy] = field(default_factory=list)
    waits: list[tuple[OpKind, int, float, float]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


class LastOp(Protocol):
    """Is told of the op of an iteration that is the last to write gradients, W or BW."""

    def begin_last_op(self, kind: OpKind) -> None:
        """It begins."""

    def end_last_op(self) -> None:
        """It has ended. No op follows on this stage."""


class Executor:
    """Runs the ops of one stage. Main thread only."""

    def __init__(
        self,
        *,
        coordinate: Coordinate,
        runner: Runner,
        neighbours: Neighbourhood,
        mail: Mailbox,
        op_clock: OpClock,
        boundary: Callable[[], None],
        on_last_forward: Callable[[list[Tensor]], None],
        reserve: Callable[[LinkEnd, tuple[TensorMeta, ...]], None],
        device_times: DeviceTimes | None = None,
        gate: Gate | None = None,
        refuses: bool = False,
        all_raise: Callable[[], bool] = lambda: True,
        last_op: LastOp | None = None,
        slowed: Callable[[float, int], None] | None = None,
    ) -> None:
        """``refuses``: an error of the stage in the first forward of an iteration only refuses this
        iteration, if ``all_raise`` finds that no other rank waits inside the op. ``gate``: for the
        last stage if there are several replicas. ``last_op``: is told of the last op. ``slowed``:
        called at the end of each op with the time of its start and the iteration; it makes the op
        longer."""
        self._coordinate, self._runner = coordinate, runner
        self._device_times = device_times
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self._op_clock = op_clock
        self.mail = mail
        self._boundary, self._on_last_forward = boundary, on_last_forward
        self._reserve = reserve
        self._gate, self._refuses = gate, refuses
        self._all_raise, self._last_op, self._slowed = all_raise, last_op, slowed
        self.refused = False
        """Whether the iteration is refused: messages are sent as planned, but empty."""
        self.cause: Exception | None = None
        """The error that the stage raised in a refused iteration, if any."""
        self._uncounted = 0
        """Calls so far that did not count as iterations: evaluations, and what was refused."""
        self._evaluating = False
        self._above, self._below = self._up, self._down
        self.input_metas: tuple[TensorMeta, ...] = ()
        self.output_metas: tuple[TensorMeta, ...] = ()
        self._gives_gradients = self._gets_gradients = False
        """Whether gradients go to the stage above, and come from the stage below."""
        self._iteration = self._microbatches = 0
        self._generations = Generations()
        self._inputs = Inputs()
        self._structure = SINGLE
        self._shapes_known = False
        self._outcome = Outcome()
        self.residency = Residency(None)
        """What is on the device of the stage."""
        self._recomputes = False
        self._profiled = False

    def end_uncounted(self) -> None:
        """End an evaluation or a refused iteration. The next iteration has the same number, but
        other message keys."""
        self._uncounted += 1
        self.cause = None

    def begin(
        self,
        ops: Sequence[Op],
        iteration: int,
        generations: Generations,
        inputs: Inputs,
        start: Start,
        *,
        device_limit: int | None = None,
        recompute: bool = False,
        receives: tuple[Receives, Receives] = (RECEIVE_ALL, RECEIVE_ALL),
        evaluates: bool = False,
    ) -> Outcome:
        """Prepare for the ``ops`` of one iteration. Returns the record that they fill.

        This waits for the shapes of the stage above if they are exchanged. ``device_limit``: most
        microbatches with activations on the device; with ``recompute`` those of others are dropped
        and computed again, else moved to host memory. ``receives``: from above and from below.
        ``evaluates``: the iteration has only forwards, without gradients; call
        :meth:`end_uncounted` afterwards.
        """
        self._iteration, self._evaluating = iteration, evaluates
        self.mail.call = name_call(iteration, evaluation=self._evaluating)
        self._generations = generations
        self._microbatches = sum(op.kind is OpKind.F for op in ops)
        self._inputs = inputs
        self._outcome = Outcome()
        self.residency, self._recomputes = Residency(device_limit), recompute
        self._profiled = profiling()
        self._shapes_known = not start.shapes_to_below
        fused = frozenset(op.microbatch for op in ops if op.kind is OpKind.BW)
        self._runner.begin_iteration(fused=fused, outputs=inputs.outputs, divisor=inputs.divisor)
        self.refused, self.cause = start.refused, None
        self._from_above, self._from_below = receives
        if self._gate is not None:
            self._gate.begin()
        self._above = None if start.cut_off else self._up
        # The stages below know it from the token.
        self._below = None if start.refused else self._down
        if self._above is not None and start.shapes_from_above:
            self._await_shapes(self._above)
        self._gives_gradients = any(meta.gradient for meta in self.input_metas)
        self._gets_gradients = any(meta.gradient for meta in self.output_metas)
        bounds = self._from_above
        if self._above is not None:
            if not self._gives_gradients:
                # The stage above then waits for nothing from this stage.
                bounds = bounds._replace(after=())
            # First, since it may page-lock memory, while no receive is posted.
            gradients = gradients_of(self.input_metas)
            self._above.outgoing.begin(self._batch(generations.above, gradients))
        if self._below is not None and self._shapes_known:
            self._begin_downstream(self._below)
        if self._above is not None:
            batch = self._batch(generations.above, self.input_metas, bounds)
            self._above.incoming.begin(batch)
        return self._outcome

    def end(self) -> None:
        """End the iteration after its last op."""
        if self.refused and self._gate is not None and not self._evaluating:
            self._gate.refuse()

    def run_op(self, kind: OpKind, microbatch: int) -> None:
        """Wait for the op's message, then run it."""
        source = self._source(kind)
        waited = None if source is None else self.mail.wait_for(source, kind, microbatch)
        if self.refused:
            self._pass_on(kind, microbatch)
        else:
            self._run(kind, microbatch, source, waited)

    def run_now(
        self, kind: OpKind, microbatch: int, waited: tuple[float, float] | None = None
    ) -> None:
        """Run an op whose message is here. ``waited``: from when to when for that."""
        self._run(kind, microbatch, self._source(kind), waited)

    def _run(
        self,
        kind: OpKind,
        microbatch: int,
        source: LinkEnd | None,
        waited: tuple[float, float] | None,
    ) -> None:
        if waited is not None:
            self._outcome.waits.append((kind, microbatch, *waited))
        if kind is OpKind.F:
            self._forward(microbatch)
        elif kind is OpKind.W:
            self._weight(microbatch)
        else:
            self._backward(kind, microbatch, source)

    def _source(self, kind: OpKind) -> LinkEnd | None:
        """The link on which the message of an op arrives; None if it needs none."""
        if kind is OpKind.F:
            return self._above
        return self._below if kind is not OpKind.W and self._gets_gradients else None

    def ready_at(self, kind: OpKind, microbatch: int, *, waits_for_send: bool) -> float:
        """When the message of an op is here and, with ``waits_for_send``, its own can be sent."""
        source, at = self._source(kind), 0.0
        if source is not None:
            letter = "F" if kind is OpKind.F else "B"
            found = self.mail.ready_at(source, letter, microbatch)
            if found is None:
                return NEVER
            at = found
        if waits_for_send and self._below is not None and self._shapes_known:
            at = max(at, self._below.outgoing.slot_free_at())
        return at

    def message(self, kind: OpKind, microbatch: int) -> str:
        """Describes the message that an op needs; empty if it needs none."""
        source = self._source(kind)
        if source is None:
            return ""
        return self.mail.message(source, "F" if kind is OpKind.F else "B", microbatch)

    # --- ops --------------------------------------------------------------------------

    def _forward(self, microbatch: int) -> None:
        try:
            outputs = self._compute_forward(microbatch)
        except Exception as error:
            # Later, others have added to their gradients.
            refusable = microbatch == 0 or self._evaluating
            if not refusable or not self._refuses or not is_of_batch(error):
                raise
            if not self._all_raise():
                raise
            self.cause, outputs = error, None
        if outputs is None:
            self._refuse()
            self._send_empty(OpKind.F, microbatch)
        elif self._below is not None:
            self.mail.send(self._below, microbatch, outputs)
        else:
            self._outcome.losses.append(outputs[0])
            if microbatch == 0 and self._gate is not None and not self._evaluating:
                self._gate.accept()
            if microbatch == self._microbatches - 1:
                self._on_last_forward(self._outcome.losses)
        self._boundary()

    def _compute_forward(self, microbatch: int) -> tuple[Tensor, ...] | None:
        """Run F. Returns its outputs, or the loss; None if its message is empty."""
        inputs, runner = self._inputs, self._runner
        args: Sequence[Any] | None = inputs.args[microbatch] if inputs.args else ()
        if self._above is not None:
            args = self._above.incoming.take(microbatch)
        if args is None:
            return None
        kwargs = inputs.kwargs[microbatch] if inputs.kwargs else {}
        target = inputs.targets[microbatch] if inputs.targets else None
        leaves = not self._evaluating and self.residency.run(OpKind.F, microbatch)
        if leaves and not self._recomputes:
            # Before the op starts, so that this wait is not part of its time.
            runner.reclaim()
        start = self._start_op()
        run = runner.evaluate if self._evaluating else runner.forward
        if not (leaves or self._profiled):
            outputs = run(microbatch, args, kwargs, target)
        else:
            with self._range("F", microbatch) if self._profiled else _NO_RANGE:
                if leaves and self._recomputes:
                    outputs = runner.forward(microbatch, args, kwargs, target, recompute=True)
                elif leaves:
                    outputs = runner.forward(microbatch, args, kwargs, target, offload=True)
                    # Drop the reference, so that the runner can move the inputs.
                    args = ()
                    self._copy(OpKind.F, microbatch, runner.offload)
                else:
                    outputs = run(microbatch, args, kwargs, target)
        self._end_op(OpKind.F, microbatch, start)
        if self._below is not None:
            self._check_outputs(outputs, self._below)
        return outputs

    def _backward(self, kind: OpKind, microbatch: int, source: LinkEnd | None) -> None:
        grads: list[Tensor | None] | None = None
        taken = source.incoming.take(microbatch) if source is not None else []
        if taken is None or (microbatch == 0 and not self._may_begin_backward()):
            self._refuse()
            self._send_empty(kind, microbatch)
            self._boundary()
            return
        if self._below is not None:
            came = iter(taken)
            grads = [next(came) if meta.gradient else None for meta in self.output_metas]
        run = self._runner.backward if kind is OpKind.BW else self._runner.backward_input
        returns = self.residency.run(kind, microbatch)
        if kind is OpKind.BW:
            self._begin_if_last(kind, microbatch)
        start = self._start_op()
        if not (returns or self._profiled):
            found = run(microbatch, grads)
        else:
            letter = "B" if kind is OpKind.BW else "I"
            with self._range(letter, microbatch) if self._profiled else _NO_RANGE:
                if returns and self._recomputes:
                    self._run_again(kind, microbatch)
                elif returns:
                    self._copy(kind, microbatch, self._runner.fetch)
                found = run(microbatch, grads)
        self._end_op(kind, microbatch, start)
        if kind is OpKind.BW:
            self._end_if_last(microbatch)
        if self._above is not None and self._gives_gradients:
            self.mail.send(self._above, microbatch, self._to_send(found))
        self._boundary()

    def _may_begin_backward(self) -> bool:
        """Whether the iteration may change gradients."""
        return self._gate is None or self._gate.passed()

    def _copy(self, kind: OpKind, microbatch: int, copy: Callable[[int], int]) -> None:
        """Copy activations as part of an op: to host memory at the end of an F, back before a B."""
        start = time()
        with _NO_RANGE if self._device_times is None else self._device_times.copy():
            nbytes = copy(microbatch)
        self._outcome.copies.append(TimedCopy(kind, microbatch, start, time(), nbytes))

    def _run_again(self, kind: OpKind, microbatch: int) -> None:
        """Run the forward of a microbatch again, at the beginning of its backward."""
        start = time()
        with _NO_RANGE if self._device_times is None else self._device_times.copy():
            self._runner.recompute(microbatch)
        self._outcome.copies.append(TimedCopy(kind, microbatch, start, time(), 0, again=True))

    def _weight(self, microbatch: int) -> None:
        self.residency.run(OpKind.W, microbatch)
        self._begin_if_last(OpKind.W, microbatch)
        start = self._start_op()
        if not self._profiled:
            self._runner.backward_weight(microbatch)
        else:
            with self._range("W", microbatch):
                self._runner.backward_weight(microbatch)
        self._end_op(OpKind.W, microbatch, start)
        self._end_if_last(microbatch)
        self._boundary()

    def _begin_if_last(self, kind: OpKind, microbatch: int) -> None:
        """Tell of the last op: in every order it is the W or BW of the last microbatch."""
        if self._last_op is not None and microbatch == self._microbatches - 1:
            self._last_op.begin_last_op(kind)

    def _end_if_last(self, microbatch: int) -> None:
        if self._last_op is not None and microbatch == self._microbatches - 1:
            self._last_op.end_last_op()

    def _range(self, letter: str, microbatch: int) -> AbstractContextManager[Any]:
        """A range ``PP:3F7`` for torch.profiler. Not without a profiler, since it costs 40 µs."""
        return profiler.record_function(f"PP:{self._coordinate.stage}{letter}{microbatch}")

    def _start_op(self) -> float:
        self._op_clock.busy = True
        if self._device_times is not None:
            self._device_times.start()
        return time()

    def _end_op(self, kind: OpKind, microbatch: int, start: float) -> None:
        if self._slowed is not None:
            self._slowed(start, self._iteration)
        end = time()
        if self._device_times is not None:
            self._device_times.end()
        op_clock = self._op_clock
        op_clock.ended_at = end
        op_clock.busy = False
        self._outcome.ops.append(new_tuple(TimedOp, (kind, microbatch, start, end)))

    def _send_empty(self, kind: OpKind, microbatch: int) -> None:
        """Send an empty message to the stage that needs the results of an op, if any."""
        end = self._below if kind is OpKind.F else self._above
        if end is None or kind is OpKind.W or not (kind is OpKind.F or self._gives_gradients):
            return
        self.mail.send(end, microbatch, None)

    def _refuse(self) -> None:
        """Refuse this iteration: its remaining messages are sent as planned, but empty, so that
        none is left over for the next iteration."""
        self.refused = True
        self._op_clock.busy = False
        self._runner.discard()
        if self._below is not None and not self._shapes_known:
            self._below.socket.send_shapes(None)
            self._below = None

    def _pass_on(self, kind: OpKind, microbatch: int) -> None:
        """Run an op of a refused iteration: take its message, and send an empty one."""
        source = self._source(kind)
        if source is not None:
            source.incoming.take(microbatch)
        self._send_empty(kind, microbatch)
        self._boundary()

    def _to_send(self, grads: Grads) -> list[Tensor | None]:
        if len(grads) != len(self.input_metas):
            raise PipelineError(
                f"{self._coordinate}: the backward gave {len(grads)} input gradients; expected "
                f"{len(self.input_metas)}, one per tensor that came from stage "
                f"{self._coordinate.stage - 1}"
            )
        return [
            grad for grad, meta in zip(grads, self.input_metas, strict=True) if meta.gradient
        ]  # fmt: skip

    def _batch(
        self,
        generation: int,
        metas: tuple[TensorMeta, ...],
        receives: Receives = RECEIVE_ALL,
    ) -> Batch:
        return Batch(
            generation, self._iteration + self._uncounted, self._microbatches, metas,
            self._uncounted, receives,
        )  # fmt: skip

    def _begin_downstream(self, end: LinkEnd) -> None:
        generation = self._generations.below
        end.outgoing.begin(self._batch(generation, self.output_metas))
        gradients = gradients_of(self.output_metas)
        if gradients:
            end.incoming.begin(self._batch(generation, gradients, self._from_below))

    def _check_outputs(self, outputs: tuple[Tensor, ...], end: LinkEnd) -> None:
        """Send the shapes to the next stage if they are unknown there; else check outputs."""
        structure = self._runner.structure
        if self._shapes_known and structure == self._structure and self._expected(outputs):
            return
        metas = tuple(map(TensorMeta.of, outputs))
        if not self._shapes_known:
            if len(metas) > 31:
                raise ShapeError(
                    f"{self._coordinate}: the stage has {len(metas)} outputs; "
                    "at most 31 can be sent"
                )
            self.output_metas, self._structure = metas, structure
            self._gets_gradients = any(meta.gradient for meta in metas)
            end.socket.send_shapes(Contents(metas, structure.encode()))
            self._reserve(end, gradients_of(metas))
            self._begin_downstream(end)
            self._shapes_known = True
        elif structure != self._structure:
            raise ShapeError(
                f"{self._coordinate}: the structure of the outputs is {structure.encode()} in "
                f"{self.mail.call}; expected {self._structure.encode()} as in its first microbatch"
            )
        else:
            raise ShapeError(
                f"{self._coordinate}: outputs are {words(metas)} in {self.mail.call}; "
                f"expected {words(self.output_metas)} as in its first microbatch. All "
                "microbatches of an iteration need the same shapes; they may change between "
                "iterations together with the shapes given to step()"
            )

    def _expected(self, outputs: tuple[Tensor, ...]) -> bool:
        """Whether the outputs can be sent as those of the first microbatch."""
        known = self.output_metas
        return len(outputs) == len(known) and all(map(TensorMeta.covers, known, outputs))

    def _await_shapes(self, end: LinkEnd) -> None:
        found = self.mail.await_queue(end, f"shapes from stage {end.peer_stage}", end.socket.shapes)
        if found is None:
            self._above = None
            self._refuse()
        else:
            self.input_metas = found.metas
            self._runner.expect(
                Structure.decode(found.structure), [meta.gradient for meta in found.metas]
            )
            self._reserve(end, found.metas)
