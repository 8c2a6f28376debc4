"""Runs one iteration of a stage: each op when its message has arrived.

Communication is not part of a plan. An F waits for the F upstream and a B for the B downstream,
each for its own message only. Sends start when an op ends. Each kind of op runs in microbatch
order, so that gradients are summed in one order for all schedules, delays and routes: results are
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import time
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd import profiler

from pipemorph.api.mesh import Coordinate
from pipemorph.planning import Op, OpKind
from pipemorph.planning.offload import Residency
from pipemorph_trainer.errors import PipelineError, ShapeError
from pipemorph_trainer.executor.device_times import DeviceTimes, TimedCopy, TimedOp
from pipemorph_trainer.executor.mailbox import Mailbox, name_call
from pipemorph_trainer.executor.refusal import BoundaryChanged, Gate, is_of_batch
from pipemorph_trainer.executor.stages.interface import Grads, Runner
from pipemorph_trainer.executor.stages.structure import SINGLE, Structure
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
from pipemorph_trainer.links.recorder import OpClock
from pipemorph_trainer.profiling import profiling

NEVER = float("inf")
UNLIMITED = Residency(None)


class Start(NamedTuple):
    """What a stage knows at the beginning of a call.

    ``shapes_from_above``, ``shapes_to_below``: whether shapes are exchanged with this neighbour.
    ``refused``: the batch of this stage or of a stage above does not fit. ``cut_off``: a stage
    above refused, so that nothing comes from above.
    """

    shapes_from_above: bool = False
    shapes_to_below: bool = False
    refused: bool = False
    cut_off: bool = False


AS_BEFORE = Start()
"""Nothing has changed since the last call."""


class Generations(NamedTuple):
    """Number of shape exchanges so far with each neighbour."""

    above: int = 0
    below: int = 0


FIRST = Generations()
"""No shapes were exchanged."""


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
    """Is told of the op of a stage that is the last to write gradients, W or BW."""

    def begin_last_op(self, kind: OpKind) -> None:
        """It begins."""

    def end_last_op(self) -> None:
        """It has ended. No op follows on this stage."""


@dataclass(frozen=True, kw_only=True)
class OpContext:
    """What the executors of a rank share.

    ``boundary``: called between two ops. ``on_last_forward``: called with the losses, on the last
    stage. ``reserve``: called with what a link will carry. ``all_raise``: whether no other rank
    waits inside an op in which this one has raised an error. ``last_op``: is told of the last op.
    ``slowed``: called at the end of each op with the time of its start and the iteration; it makes
    the op longer.
    """

    mail: Mailbox
    op_clock: OpClock
    boundary: Callable[[], None]
    on_last_forward: Callable[[list[Tensor]], None]
    reserve: Callable[[LinkEnd, tuple[TensorMeta, ...]], None]
    device_times: DeviceTimes | None = None
    all_raise: Callable[[], bool] = lambda: True
    last_op: LastOp | None = None
    slowed: Callable[[float, int], None] | None = None


@dataclass(frozen=True, kw_only=True)
class StageIteration:
    """What a stage needs for one iteration.

    ``device_limit``: most microbatches with activations on the device; with ``recompute`` those of
    others are dropped and computed again, else moved to host memory. ``receives``: from above and
    from below. ``evaluation``: there are only forwards, without gradients. ``again``: the iteration
    was refused, and its forwards that ran do not run again.
    """

    ops: Sequence[Op]
    iteration: int
    generations: Generations = FIRST
    inputs: Inputs = field(default_factory=Inputs)
    start: Start = AS_BEFORE
    device_limit: int | None = None
    recompute: bool = False
    receives: tuple[Receives, Receives] = (RECEIVE_ALL, RECEIVE_ALL)
    evaluation: bool = False
    again: bool = False


class Executor:
    """Runs the ops of one stage. Main thread only.

    :meth:`begin` puts together how each kind of op runs in this iteration: only with what it uses
    of limits on activations, a profiler, and a refusal.
    """

    def __init__(
        self,
        coordinate: Coordinate,
        runner: Runner,
        neighbours: Neighbourhood,
        shared: OpContext,
        *,
        gate: Gate | None = None,
        refuses: bool = False,
    ) -> None:
        """``refuses``: an error of the stage in the first forward of an iteration only refuses this
        iteration. ``gate``: for the last stage if there are several replicas."""
        self._coordinate, self._runner, self._shared = coordinate, runner, shared
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self.mail, self._boundary, self._op_clock = shared.mail, shared.boundary, shared.op_clock
        self._gate, self._refuses = gate, refuses
        self._start_op: Callable[[], float] = self._start
        self._end_op: Callable[[OpKind, int, float], None] = self._end
        if shared.device_times is not None or shared.slowed is not None:
            self._start_op, self._end_op = self._start_with_hooks, self._end_with_hooks
        self.refused = False
        """Whether the iteration is refused: messages are sent as planned, but empty."""
        self.cause: Exception | None = None
        """The error that the stage raised in a refused iteration, if any."""
        self.repeats = False
        """Whether the results of all forwards of this call are here, should it begin again."""
        self._results: dict[int, tuple[Tensor, ...]] = {}
        self._before: dict[int, tuple[Tensor, ...]] = {}
        """Results of forwards that ran before this iteration began again."""
        self._uncounted = 0
        """Calls so far that did not count as iterations: evaluations, and what was refused."""
        self._above, self._below = self._up, self._down
        self.input_metas: tuple[TensorMeta, ...] = ()
        self.output_metas: tuple[TensorMeta, ...] = ()
        self._gives_gradients = self._gets_gradients = False
        """Whether gradients go to the stage above, and come from the stage below."""
        self._now = StageIteration(ops=(), iteration=0)
        self._microbatches = 0
        self._last = -1
        """The microbatch whose W or BW is the last op, if somebody is told of that."""
        self._structure = SINGLE
        self._shapes_known = False
        self._outcome = Outcome()
        self.residency = UNLIMITED
        """What is on the device of the stage."""
        self._limited: LimitedOps | None = None
        self._computes: dict[OpKind, Callable[..., Any]] = {}
        """What computes each kind of op."""
        self._sources: dict[OpKind, LinkEnd | None] = {}
        """The link on which the message of each kind of op arrives; None if it needs none."""

    def end_uncounted(self, *, again: bool = False) -> None:
        """End an evaluation or a refused iteration. The next iteration has the same number, but
        other message keys. ``again``: it is this one, and its results so far are used."""
        self._uncounted += 1
        self.cause = None
        if self.refused and not again:
            self._runner.discard()

    def begin(self, now: StageIteration) -> Outcome:
        """Prepare for the ops of one iteration. Returns the record that they fill.

        This waits for the shapes of the stage above if they are exchanged. After an evaluation call
        :meth:`end_uncounted`.
        """
        self._now = now
        inputs, start, generations = now.inputs, now.start, now.generations
        self.mail.call = name_call(now.iteration, evaluation=now.evaluation)
        self._microbatches = sum(op.kind is OpKind.F for op in now.ops)
        self._last = -1 if self._shared.last_op is None else self._microbatches - 1
        self._outcome = Outcome()
        self._shapes_known = not start.shapes_to_below
        fused = frozenset(op.microbatch for op in now.ops if op.kind is OpKind.BW)
        self._before = self._before | self._results if now.again else {}
        self._results = {}
        if not now.again:
            self._runner.begin_iteration(
                fused=fused, outputs=inputs.outputs, divisor=inputs.divisor
            )
        self._compose()
        # Ranks that compute together would have to agree.
        together = self._coordinate.mesh.lockstep > 1
        self.repeats = self._limited is None and not (now.evaluation or together)
        self.refused, self.cause = start.refused, None
        if self._gate is not None:
            self._gate.begin()
        self._above = None if start.cut_off else self._up
        # The stages below know it from the token.
        self._below = None if start.refused else self._down
        if self._above is not None and start.shapes_from_above:
            self._await_shapes(self._above)
        self._gives_gradients = any(meta.gradient for meta in self.input_metas)
        self._find_sources()
        bounds = now.receives[0]
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

    def _compose(self) -> None:
        """Put together what computes the ops of this iteration."""
        now, runner = self._now, self._runner
        limit = None if now.evaluation else now.device_limit
        self.residency, self._limited = UNLIMITED, None
        computes: dict[OpKind, Callable[..., Any]] = {
            OpKind.F: runner.evaluate if now.evaluation else runner.forward,
            OpKind.B: runner.backward_input,
            OpKind.BW: runner.backward,
            OpKind.W: runner.backward_weight,
        }
        if limit is not None:
            self.residency = Residency(limit)
            self._limited = LimitedOps(
                runner, self.residency, self._outcome.copies, self._shared.device_times,
                recompute=now.recompute,
            )  # fmt: skip
            computes = self._limited.computes
        if profiling():
            stage = self._coordinate.stage
            computes = {kind: _ranged(stage, kind, each) for kind, each in computes.items()}
        self._computes = computes

    def _find_sources(self) -> None:
        self._gets_gradients = any(meta.gradient for meta in self.output_metas)
        gradients = self._below if self._gets_gradients else None
        self._sources = {
            OpKind.F: self._above, OpKind.B: gradients, OpKind.BW: gradients, OpKind.W: None,
        }  # fmt: skip

    def end(self) -> None:
        """End the iteration after its last op."""
        if self.refused and self._gate is not None and not self._now.evaluation:
            self._gate.refuse()

    def run_op(self, kind: OpKind, microbatch: int) -> None:
        """Wait for the op's message, then run it."""
        source = self._sources[kind]
        waited = None if source is None else self.mail.wait_for(source, kind, microbatch)
        if self.refused:
            self._pass_on(kind, microbatch)
        else:
            self.run_now(kind, microbatch, waited)

    def run_now(
        self, kind: OpKind, microbatch: int, waited: tuple[float, float] | None = None
    ) -> None:
        """Run an op whose message is here. ``waited``: from when to when for that."""
        if waited is not None:
            self._outcome.waits.append((kind, microbatch, *waited))
        if kind is OpKind.F:
            self._forward(microbatch)
        elif kind is OpKind.W:
            self._weight(microbatch)
        else:
            self._backward(kind, microbatch)
        self._boundary()

    def ready_at(self, kind: OpKind, microbatch: int, *, waits_for_send: bool) -> float:
        """When the message of an op is here and, with ``waits_for_send``, its own can be sent."""
        source, at = self._sources[kind], 0.0
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
        source = self._sources[kind]
        if source is None:
            return ""
        return self.mail.message(source, "F" if kind is OpKind.F else "B", microbatch)

    # --- ops --------------------------------------------------------------------------

    def _forward(self, microbatch: int) -> None:
        inputs, below = self._now.inputs, self._below
        args: Sequence[Any] | None = inputs.args[microbatch] if inputs.args else ()
        if self._above is not None:
            args = self._above.incoming.take(microbatch)
        if args is None:
            self._refuse(OpKind.F, microbatch)
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
            if self.repeats:
                self._results[microbatch] = outputs
            if self._limited is not None:
                # Drop the reference, so that the runner can move the inputs.
                args = ()
                self._limited.after_forward(microbatch)
            self._end_op(OpKind.F, microbatch, start)
            if below is not None and not self._expected(outputs):
                self._check_outputs(microbatch, outputs, below)
        except Exception as error:
            if not self._only_refuses(error, microbatch):
                raise
            self.cause = error
            self._refuse(OpKind.F, microbatch)
            return
        if below is not None:
            self.mail.send(below, microbatch, outputs)
        else:
            self._take_loss(outputs[0], microbatch)

    def _take_loss(self, loss: Tensor, microbatch: int) -> None:
        losses = self._outcome.losses
        losses.append(loss)
        if microbatch == 0 and self._gate is not None and not self._now.evaluation:
            self._gate.accept()
        if microbatch == self._microbatches - 1:
            self._shared.on_last_forward(losses)

    def _only_refuses(self, error: Exception, microbatch: int) -> bool:
        """Whether an error in a forward only refuses the iteration: not later, when others have
        added to their gradients."""
        early = microbatch == 0 or self._now.evaluation
        return early and self._refuses and is_of_batch(error) and self._shared.all_raise()

    def _backward(self, kind: OpKind, microbatch: int) -> None:
        source = self._sources[kind]
        taken = source.incoming.take(microbatch) if source is not None else []
        if taken is None or (microbatch == 0 and not self._may_begin_backward()):
            self._refuse(kind, microbatch)
            return
        if self.repeats:
            self.repeats, self._results = False, {}
        grads: list[Tensor | None] | None = None
        if self._below is not None:
            came = iter(taken)
            grads = [next(came) if meta.gradient else None for meta in self.output_metas]
        last = self._shared.last_op if kind is OpKind.BW and microbatch == self._last else None
        if last is not None:
            last.begin_last_op(kind)
        start = self._start_op()
        found = self._computes[kind](microbatch, grads)
        self._end_op(kind, microbatch, start)
        if last is not None:
            last.end_last_op()
        if self._above is not None and self._gives_gradients:
            self.mail.send(self._above, microbatch, self._to_send(found))

    def _may_begin_backward(self) -> bool:
        """Whether the iteration may change gradients."""
        return self._gate is None or self._gate.passed()

    def _weight(self, microbatch: int) -> None:
        # In every order the W or BW of the last microbatch is the last op.
        last = self._shared.last_op if microbatch == self._last else None
        if last is not None:
            last.begin_last_op(OpKind.W)
        start = self._start_op()
        self._computes[OpKind.W](microbatch)
        self._end_op(OpKind.W, microbatch, start)
        if last is not None:
            last.end_last_op()

    def _start(self) -> float:
        self._op_clock.busy = True
        return time()

    def _end(self, kind: OpKind, microbatch: int, start: float) -> None:
        op_clock = self._op_clock
        op_clock.ended_at = end = time()
        op_clock.busy = False
        self._outcome.ops.append(new_tuple(TimedOp, (kind, microbatch, start, end)))

    def _start_with_hooks(self) -> float:
        self._op_clock.busy = True
        if self._shared.device_times is not None:
            self._shared.device_times.start()
        return time()

    def _end_with_hooks(self, kind: OpKind, microbatch: int, start: float) -> None:
        if self._shared.slowed is not None:
            self._shared.slowed(start, self._now.iteration)
        self._end(kind, microbatch, start)
        if self._shared.device_times is not None:
            self._shared.device_times.end()

    # --- refusal ----------------------------------------------------------------------

    def _send_empty(self, kind: OpKind, microbatch: int) -> None:
        """Send an empty message to the stage that needs the results of an op, if any."""
        end = self._below if kind is OpKind.F else self._above
        if end is None or kind is OpKind.W or not (kind is OpKind.F or self._gives_gradients):
            return
        self.mail.send(end, microbatch, None)

    def _refuse(self, kind: OpKind, microbatch: int) -> None:
        """Refuse this iteration from this op on: its remaining messages are sent as planned, but
        empty, so that none is left over for the next iteration."""
        self._drop()
        self._send_empty(kind, microbatch)

    def _drop(self) -> None:
        """Compute no more of this iteration, which is refused."""
        self.refused = True
        self._op_clock.busy = False
        if self._below is not None and not self._shapes_known:
            self._below.socket.send_shapes(None)
            self._below = None
        self._find_sources()

    def _pass_on(self, kind: OpKind, microbatch: int) -> None:
        """Run an op of a refused iteration: take its message, and send an empty one."""
        source = self._sources[kind]
        if source is not None:
            source.incoming.take(microbatch)
        self._send_empty(kind, microbatch)
        self._boundary()

    # --- messages ---------------------------------------------------------------------

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
            generation, self._now.iteration + self._uncounted, self._microbatches, metas,
            self._uncounted, receives,
        )  # fmt: skip

    def _begin_downstream(self, end: LinkEnd) -> None:
        generation = self._now.generations.below
        end.outgoing.begin(self._batch(generation, self.output_metas))
        gradients = gradients_of(self.output_metas)
        if gradients:
            end.incoming.begin(self._batch(generation, gradients, self._now.receives[1]))

    def _check_outputs(self, microbatch: int, outputs: tuple[Tensor, ...], end: LinkEnd) -> None:
        """Send the shapes to the next stage if they are unknown there; else raise."""
        structure = self._runner.structure
        metas = tuple(map(TensorMeta.of, outputs))
        if not self._shapes_known:
            if len(metas) > 31:
                raise ShapeError(
                    f"{self._coordinate}: the stage has {len(metas)} outputs; "
                    "at most 31 can be sent"
                )
            self.output_metas, self._structure = metas, structure
            self._find_sources()
            end.socket.send_shapes(Contents(metas, structure.encode()))
            self._shared.reserve(end, gradients_of(metas))
            self._begin_downstream(end)
            self._shapes_known = True
        else:
            same = structure == self._structure
            found, known = (
                (f"outputs are {words(metas)}", words(self.output_metas)) if same
                else (f"the stage returned {structure}", str(self._structure))
            )  # fmt: skip
            what = f"{self._coordinate}: {found} in {self.mail.call}"
            if microbatch == 0:
                hint = "" if self._refuses else "; make a new schedule, since torch's stages"
                raise BoundaryChanged(
                    f"{what}; before, {known}" + (hint and f"{hint} say this once")
                )
            raise ShapeError(
                f"{what}; expected {known} as in its first microbatch: all microbatches of an"
                " iteration need the same shapes"
            )

    def _expected(self, outputs: tuple[Tensor, ...]) -> bool:
        """Whether the outputs can be sent as those of the first microbatch. A gradient that the
        next stage does not need is ignored when it comes."""
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
        found = self.mail.await_queue(end, f"shapes from stage {end.peer_stage}", end.socket.shapes)
        if found is None:
            self._above = None
            self._drop()
        else:
            self.input_metas = found.metas
            self._runner.expect(
                Structure.decode(found.structure), [meta.gradient for meta in found.metas]
            )
            self._shared.reserve(end, found.metas)


class LimitedOps:
    """Computes the ops of one iteration of a stage whose plan limits the activations on its device.

    ``residency``: says what leaves; ``copies``: gets each copy, and each forward that runs again;
    ``recompute``: what leaves is dropped and computed again, else it moves to host memory and back.
    """

    def __init__(
        self,
        runner: Runner,
        residency: Residency,
        copies: list[TimedCopy],
        device_times: DeviceTimes | None,
        *,
        recompute: bool,
    ) -> None:
        self._runner, self._residency, self._copies = runner, residency, copies
        self._device_times, self._recompute = device_times, recompute
        self._leaves = False
        self.computes: dict[OpKind, Callable[..., Any]] = {
            OpKind.F: self._forward,
            OpKind.B: self._returning(OpKind.B, runner.backward_input),
            OpKind.BW: self._returning(OpKind.BW, runner.backward),
            OpKind.W: self._weight,
        }
        """What computes each kind of op."""

    def before_forward(self, microbatch: int) -> None:
        """Prepare for an F, before it starts, so that this wait is not part of its time."""
        self._leaves = self._residency.run(OpKind.F, microbatch)
        if self._leaves and not self._recompute:
            self._runner.reclaim()

    def _forward(self, microbatch: int, args: Any, kwargs: Any, target: Any) -> Any:
        leaves, again = self._leaves, self._recompute
        return self._runner.forward(
            microbatch, args, kwargs, target,
            offload=leaves and not again, recompute=leaves and again,
        )  # fmt: skip

    def after_forward(self, microbatch: int) -> None:
        """Move the activations of an F to host memory, if they leave, at the end of the op. Its
        arguments must have no other references."""
        if self._leaves and not self._recompute:
            self._copy(OpKind.F, microbatch, self._runner.offload)

    def _returning(self, kind: OpKind, backward: Callable[..., Any]) -> Callable[..., Any]:
        """A backward that begins with the return of what has left."""

        def run(microbatch: int, grads: Any) -> Any:
            if self._residency.run(kind, microbatch):
                if self._recompute:
                    self._copy(kind, microbatch, self._run_again)
                else:
                    self._copy(kind, microbatch, self._runner.fetch)
            return backward(microbatch, grads)

        return run

    def _weight(self, microbatch: int) -> None:
        self._residency.run(OpKind.W, microbatch)
        self._runner.backward_weight(microbatch)

    def _run_again(self, microbatch: int) -> int:
        self._runner.recompute(microbatch)
        return 0

    def _copy(self, kind: OpKind, microbatch: int, copy: Callable[[int], int]) -> None:
        """Copy activations, or run a forward again, as part of an op."""
        start = time()
        with nullcontext() if self._device_times is None else self._device_times.copy():
            nbytes = copy(microbatch)
        again = self._recompute
        self._copies.append(TimedCopy(kind, microbatch, start, time(), nbytes, again=again))


def _ranged(stage: int, kind: OpKind, compute: Callable[..., Any]) -> Callable[..., Any]:
    """The op in a range ``PP:3F7`` for torch.profiler. Not without a profiler, since it costs
    40 µs."""
    letter = {OpKind.B: "I", OpKind.BW: "B"}.get(kind) or kind.name

    def run(microbatch: int, *operands: Any) -> Any:
        with profiler.record_function(f"PP:{stage}{letter}{microbatch}"):
            return compute(microbatch, *operands)

    return run
