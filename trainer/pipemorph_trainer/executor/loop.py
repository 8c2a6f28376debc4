"""Runs one iteration of a stage: each op as soon as its message is here.

Communication is not in the plan. An F waits for the F upstream, a B for the B downstream,
and each for its own message only. Sends are handed over when an op ends. Every kind runs in
microbatch order, so that gradients add up in one order whatever the schedule, the delays or
the paths: results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from pipemorph.planning import Dispatch, OpKind, Path, Plan, Schedule
from pipemorph.planning.offload import Residency
from pipemorph_trainer.errors import PeerLostError, PipelineError, ShapeError, WaitTimeoutError
from pipemorph_trainer.executor.bell import Bell
from pipemorph_trainer.executor.device_times import DeviceTimes
from pipemorph_trainer.executor.profiling import profiling
from pipemorph_trainer.executor.waiting import Waiting
from pipemorph_trainer.links import LinkEnd, Neighbourhood, Seat
from pipemorph_trainer.paths.arrival import OpClock
from pipemorph_trainer.paths.message import Batch, TensorMeta
from pipemorph_trainer.profile import TimedCopy, TimedOp
from pipemorph_trainer.stage import Grads, Runner

NEVER = float("inf")
_NO_RANGE = nullcontext()
LONGEST_NAP = 0.25
"""A waiting stage still looks at its control line and its neighbours this often, seconds."""


@dataclass
class Inputs:
    """One iteration's data on this rank, per microbatch; empty where the stage has none."""

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Sequence[dict[str, Any]] = ()
    targets: Sequence[Any] = ()


@dataclass
class Outcome:
    """What one iteration was on this stage. ``losses`` only on the last stage. ``copies`` of
    activations to host memory and back are parts of their ops."""

    ops: list[TimedOp] = field(default_factory=list)
    copies: list[TimedCopy] = field(default_factory=list)
    waits: list[tuple[OpKind, int, float, float]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


FirstForward = Callable[[Sequence[Any], dict[str, Any], Any], None]
"""Called once with the arguments, keyword arguments and target of the first F."""


class Executor:
    """Runs the ops of one stage. All methods belong to the main thread."""

    def __init__(
        self,
        *,
        seat: Seat,
        runner: Runner,
        neighbours: Neighbourhood,
        bell: Bell,
        op_clock: OpClock,
        waiting: Waiting,
        deadline: float,
        boundary: Callable[[], None],
        on_first_forward: FirstForward,
        on_last_forward: Callable[[list[Tensor]], None],
        reserve: Callable[[LinkEnd, tuple[TensorMeta, ...]], None],
        device_times: DeviceTimes | None = None,
    ) -> None:
        self._seat, self._runner = seat, runner
        self._device_times = device_times
        self._up, self._down = neighbours.upstream, neighbours.downstream
        self._ends = neighbours.ends
        self._bell, self._op_clock, self._waiting = bell, op_clock, waiting
        self._deadline = deadline
        self._boundary, self._on_last_forward = boundary, on_last_forward
        self._on_first_forward: FirstForward | None = on_first_forward
        self._reserve = reserve
        self.input_metas: tuple[TensorMeta, ...] = ()
        self.output_metas: tuple[TensorMeta, ...] = ()
        self._tag = ""
        self._iteration = self._generation = self._microbatches = 0
        self._inputs = Inputs()
        self._shapes_known = False
        self._outcome = Outcome()
        self._residency = Residency(None)

    def run(
        self, plan: Plan, iteration: int, generation: int, inputs: Inputs, *, handshake: bool
    ) -> Outcome:
        """Run one iteration of ``plan``. With ``handshake``, shapes are exchanged on the way.

        Raises :class:`PipelineError` naming what was waited for if it cannot be finished.
        """
        self.begin(
            plan.schedule, iteration, generation, inputs,
            handshake=handshake, device_limit=plan.device_limits[self._seat.stage],
        )  # fmt: skip
        if plan.dispatch is Dispatch.ONLINE:
            self._run_online(plan)
        else:
            for kind, microbatch in plan.schedule.stages[self._seat.stage]:
                self.run_op(kind, microbatch)
        self._settle()
        return self._outcome

    def _settle(self) -> None:
        """Wait until no neighbour can ask for a message again: what follows on this rank, such
        as a collective, does not attend to neighbours. They need no more than to get there."""
        for end in self._ends:
            if end.settled():
                continue
            self._waiting.begin(
                f"stage {end.peer_stage} to begin the last op that uses {end.sends.letter} of "
                f"iteration {self._iteration} on {end}"
            )
            deadline = monotonic() + self._deadline
            while not end.settled():
                self._sleep(None, deadline)
            self._waiting.end()
        if profiling():
            for end in self._ends:
                end.finish_sends()

    def begin(
        self,
        schedule: Schedule,
        iteration: int,
        generation: int,
        inputs: Inputs,
        *,
        handshake: bool,
        device_limit: int | None = None,
    ) -> Outcome:
        """Prepare for the stage's ops of one iteration of ``schedule``; what they fill in.

        With ``handshake`` this waits for the shapes of the stage above. ``device_limit``: most
        microbatches with their activations on the device.
        """
        self._iteration, self._generation = iteration, generation
        self._microbatches = schedule.microbatches
        self._inputs = inputs
        self._outcome = Outcome()
        self._residency = Residency(device_limit)
        self._shapes_known = not handshake
        kinds = {op.kind for op in schedule.stages[self._seat.stage]}
        self._runner.begin_iteration(only_fused=OpKind.B not in kinds)
        if self._up is not None:
            if handshake:
                self._await_shapes(self._up)
                self._reserve(self._up, self.input_metas)
            self._up.incoming.begin(self._batch(self.input_metas))
            self._up.outgoing.begin(self._batch(_gradients(self.input_metas)))
        if self._down is not None and not handshake:
            self._begin_downstream(self._down)
        return self._outcome

    # --- static and online dispatch ---------------------------------------------------

    def run_op(self, kind: OpKind, microbatch: int) -> None:
        """Wait for the op's message, then run it."""
        if kind is OpKind.F:
            if self._up is not None:
                self._await(self._up, kind, microbatch)
            self._forward(microbatch)
        elif kind is OpKind.W:
            self._weight(microbatch)
        else:
            if self._down is not None and self._has_gradients(self._down):
                self._await(self._down, kind, microbatch)
            self._backward(kind, microbatch)

    def _run_online(self, plan: Plan) -> None:
        """Next ready op of B, F and W: only F while the warm-up lasts; F within the cap, and
        F and B within the device limit."""
        stage, total = self._seat.stage, self._microbatches
        warmup = min(plan.warmup[stage], total)
        limit = plan.in_flight_limits[stage]
        cap = total if limit is None else min(limit, total)
        fused = any(op.kind is OpKind.BW for op in plan.schedule.stages[stage])
        backward = OpKind.BW if fused else OpKind.B
        f = b = w = 0
        deadline: float | None = None
        while w < total:
            if self._device_times is not None:
                self._device_times.pace()
            now = time()
            may_backward = f >= warmup and b < f and self._residency.fits(backward, b)
            may_forward = f < total and f - w < cap and self._residency.fits(OpKind.F, f)
            backward_at = self._backward_ready_at(b) if may_backward else NEVER
            forward_at = self._forward_ready_at(f) if may_forward else NEVER
            if backward_at <= now:
                self._backward(backward, b)
                b += 1
                w += fused
            elif forward_at <= now:
                self._forward(f)
                f += 1
            elif w < b:
                self._weight(w)
                w += 1
            else:
                if deadline is None:
                    deadline = monotonic() + self._deadline
                    self._waiting.begin(self._either(may_forward, f, may_backward, b))
                first = min(backward_at, forward_at)
                self._sleep(first if first < NEVER else None, deadline)
                continue
            if deadline is not None:
                self._waiting.end()
                deadline = None

    def _either(self, may_forward: bool, f: int, may_backward: bool, b: int) -> str:
        """The messages an idle stage under online dispatch could go on with."""
        what = []
        if may_forward and self._up is not None:
            what.append(self._message(self._up, "F", f))
        if may_backward and self._down is not None:
            what.append(self._message(self._down, "B", b))
        return " or ".join(what)

    def _message(self, end: LinkEnd, word: str, microbatch: int) -> str:
        return (
            f"{word} of microbatch {microbatch} of iteration {self._iteration} "
            f"from stage {end.peer_stage} on {end}"
        )

    def _forward_ready_at(self, microbatch: int) -> float:
        at = 0.0
        if self._up is not None:
            found = self._ready_at(self._up, "F", microbatch)
            if found is None:
                return NEVER
            at = found
        if self._down is not None and self._shapes_known:
            at = max(at, self._down.outgoing.slot_free_at())
        return at

    def _backward_ready_at(self, microbatch: int) -> float:
        if self._down is None or not self._has_gradients(self._down):
            return 0.0
        found = self._ready_at(self._down, "B", microbatch)
        return NEVER if found is None else found

    # --- ops --------------------------------------------------------------------------

    def _forward(self, microbatch: int) -> None:
        args: Sequence[Any]
        if self._up is not None:
            args = self._up.incoming.take(microbatch)
        else:
            args = self._inputs.args[microbatch] if self._inputs.args else ()
        kwargs = self._inputs.kwargs[microbatch] if self._inputs.kwargs else {}
        target = self._inputs.targets[microbatch] if self._inputs.targets else None
        if self._on_first_forward is not None:
            self._on_first_forward(args, kwargs, target)
            self._on_first_forward = None
        leaves = self._residency.run(OpKind.F, microbatch)
        if leaves:
            # Not within the op: what an F waits for is not what it takes.
            self._runner.settle()
        start = self._start_op()
        with self._range("F", microbatch):
            if leaves:
                outputs = self._runner.forward(microbatch, args, kwargs, target, offload=True)
                # What came from upstream is the runner's now: it could not leave otherwise.
                args = ()
                self._copy(OpKind.F, microbatch, self._runner.offload)
            else:
                outputs = self._runner.forward(microbatch, args, kwargs, target)
        self._end_op(OpKind.F, microbatch, start)
        if self._down is not None:
            self._check_outputs(outputs, self._down)
            self._send(self._down, microbatch, list(outputs))
        else:
            self._outcome.losses.append(outputs[0])
            if microbatch == self._microbatches - 1:
                self._on_last_forward(self._outcome.losses)
        self._boundary()

    def _backward(self, kind: OpKind, microbatch: int) -> None:
        grads: list[Tensor | None] | None = None
        if self._down is not None:
            came = iter(
                self._down.incoming.take(microbatch) if self._has_gradients(self._down) else ()
            )
            grads = [next(came) if meta.carries_gradient else None for meta in self.output_metas]
        run = self._runner.backward if kind is OpKind.BW else self._runner.backward_input
        returns = self._residency.run(kind, microbatch)
        start = self._start_op()
        letter = "B" if kind is OpKind.BW else "I"
        with self._range(letter, microbatch):
            if returns:
                self._copy(kind, microbatch, self._runner.fetch)
            found = run(microbatch, grads)
        self._end_op(kind, microbatch, start)
        if self._up is not None and self._has_gradients(self._up):
            self._send(self._up, microbatch, self._to_send(found))
        self._boundary()

    def _copy(self, kind: OpKind, microbatch: int, copy: Callable[[int], int]) -> None:
        """Part of an op: activations to host memory at the end of an F, back before a B."""
        start = time()
        with _NO_RANGE if self._device_times is None else self._device_times.copy():
            nbytes = copy(microbatch)
        self._outcome.copies.append(TimedCopy(kind, microbatch, start, time(), nbytes))

    def _weight(self, microbatch: int) -> None:
        self._residency.run(OpKind.W, microbatch)
        start = self._start_op()
        with self._range("W", microbatch):
            self._runner.backward_weight(microbatch)
        self._end_op(OpKind.W, microbatch, start)
        self._boundary()

    def _range(self, letter: str, microbatch: int) -> AbstractContextManager[Any]:
        """``PP:3F7`` for torch.profiler; nothing where nobody profiles, as it costs 40 µs an op."""
        if not profiling():
            return _NO_RANGE
        return profiler.record_function(f"PP:{self._seat.stage}{letter}{microbatch}")

    def _start_op(self) -> float:
        self._op_clock.busy = True
        if self._device_times is not None:
            self._device_times.start()
        return time()

    def _end_op(self, kind: OpKind, microbatch: int, start: float) -> None:
        end = time()
        if self._device_times is not None:
            self._device_times.end()
        self._op_clock.ended_at = end
        self._op_clock.busy = False
        self._outcome.ops.append(TimedOp(kind, microbatch, start, end))

    def _send(self, end: LinkEnd, microbatch: int, tensors: list[Tensor | None]) -> None:
        try:
            end.outgoing.send(microbatch, tensors)
        except PipelineError as error:
            if not self._waiting:
                self._waiting.begin(end.taking(self._iteration, microbatch))
            raise self._named(end, error) from error

    def _to_send(self, grads: Grads) -> list[Tensor | None]:
        if len(grads) != len(self.input_metas):
            raise PipelineError(
                f"{self._seat}: the backward gave {len(grads)} input gradients; expected "
                f"{len(self.input_metas)}, one per tensor that came from stage "
                f"{self._seat.stage - 1}"
            )
        return [
            grad for grad, meta in zip(grads, self.input_metas, strict=True)
            if meta.carries_gradient
        ]  # fmt: skip

    # --- shapes -----------------------------------------------------------------------

    def _batch(self, metas: tuple[TensorMeta, ...]) -> Batch:
        return Batch(self._generation, self._iteration, self._microbatches, metas)

    def _has_gradients(self, end: LinkEnd) -> bool:
        metas = self.input_metas if end is self._up else self.output_metas
        return any(meta.carries_gradient for meta in metas)

    def _begin_downstream(self, end: LinkEnd) -> None:
        end.outgoing.begin(self._batch(self.output_metas))
        gradients = _gradients(self.output_metas)
        if gradients:
            end.incoming.begin(self._batch(gradients))

    def _check_outputs(self, outputs: tuple[Tensor, ...], end: LinkEnd) -> None:
        """Tell the next stage the shapes if they are not known; else hold outputs to them."""
        metas = tuple(TensorMeta.of(output) for output in outputs)
        if not self._shapes_known:
            if len(metas) > 31:
                raise ShapeError(
                    f"{self._seat}: the stage has {len(metas)} outputs; at most 31 can be sent"
                )
            self.output_metas = metas
            end.line.send_shapes(metas)
            self._reserve(end, _gradients(metas))
            self._begin_downstream(end)
            self._shapes_known = True
        elif metas != self.output_metas:
            raise ShapeError(
                f"{self._seat}: outputs are {_words(metas)} in iteration {self._iteration}; "
                f"expected {_words(self.output_metas)} as in its first microbatch. All "
                "microbatches of an iteration need the same shapes; they may change between "
                "iterations together with the shapes given to step()"
            )

    # --- waiting ----------------------------------------------------------------------

    def _await(self, end: LinkEnd, kind: OpKind, microbatch: int) -> None:
        """Return when the message of an op is here and may be used."""
        word = "F" if kind is OpKind.F else "B"
        at = self._ready_at(end, word, microbatch)
        now = time()
        if at is not None and at <= now:
            return
        self._waiting.begin(self._message(end, word, microbatch))
        began, deadline = now, monotonic() + self._deadline
        while True:
            self._sleep(at, deadline)
            at = self._ready_at(end, word, microbatch)
            now = time()
            if at is not None and at <= now:
                break
        self._outcome.waits.append((kind, microbatch, began, now))
        self._waiting.end()

    def _ready_at(self, end: LinkEnd, word: str, microbatch: int) -> float | None:
        """When the message may be used, None if it is not here; an error names the message."""
        try:
            return end.incoming.ready_at(microbatch)
        except PipelineError as error:
            if not self._waiting:
                self._waiting.begin(self._message(end, word, microbatch))
            raise self._named(end, error) from error

    def _named(self, end: LinkEnd, error: PipelineError) -> PipelineError:
        """The same error, with the message that was missing. If the peer is gone, that is why."""
        if isinstance(error, WaitTimeoutError):
            return WaitTimeoutError(f"{self._waiting.describe()}; {error}")
        why = end.gone() if end.is_lost() else str(error)
        return PeerLostError(f"{self._waiting.describe()}; {why}")

    def _sleep(self, at: float | None, deadline: float) -> None:
        """Wait for news, or until ``at`` (wall clock, as in notes). Raises once ``deadline``
        (monotonic, which no correction of the clock moves) has passed, or a peer is lost."""
        left = deadline - monotonic()
        if left <= 0:
            raise WaitTimeoutError(
                f"{self._waiting.describe()}; the deadline is {self._deadline:g} s"
            )
        nap = min(LONGEST_NAP, left)
        self._bell.wait(min(nap, at - time()) if at is not None else nap)
        for each in self._ends:
            self._attend(each)
            if each.line.lost is not None:
                self._check_lost(each, at)
        self._boundary()

    def _attend(self, end: LinkEnd) -> None:
        try:
            end.attend()
        except PipelineError as error:
            raise self._named(end, error) from error

    def _check_lost(self, end: LinkEnd, at: float | None) -> None:
        """A neighbour is gone. What it sent before may still be enough for this wait."""
        self._bell.forget(end.line.fileno())
        if at is None:
            raise PeerLostError(f"{self._waiting.describe()}; {end.gone()}")

    def _check_engine(self, end: LinkEnd) -> None:
        """A neighbour that is stopped keeps its line, and only the engine knows that it is dead.

        Where messages go without the engine, they may be had from it all the same.
        """
        if end.path is not Path.DELEGATED or end.engine_link is None:
            return
        if (why := end.engine_link.error) is not None:
            raise self._named(end, PipelineError(why))

    def _await_shapes(self, end: LinkEnd) -> None:
        self.input_metas = self.await_line(
            end, f"shapes from stage {end.peer_stage}", end.line.shapes
        )

    def await_line(self, end: LinkEnd, what: str, source: Any) -> Any:
        """Wait until ``source``, a queue filled by the line, has something, and take it."""
        if not source:
            end.line.pump()
        if not source:
            self._waiting.begin(f"{what} for iteration {self._iteration} on link {end.link}")
            deadline = monotonic() + self._deadline
            while not source:
                self._check_engine(end)
                self._sleep(None, deadline)
            self._waiting.end()
        return source.popleft()

    def at_iteration(self, iteration: int) -> None:
        """Name the iteration about to begin in what is waited for before it."""
        self._iteration = iteration


def _gradients(metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
    return tuple(meta for meta in metas if meta.carries_gradient)


def _words(metas: tuple[TensorMeta, ...]) -> str:
    return ", ".join(str(meta) for meta in metas) or "nothing"
