"""Ops of one rank, in steps, from the hooks into the op table."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, NamedTuple

from pipemorph.diagnose.operation import DATA, GC, OPTIMIZER
from pipemorph_trainer.observe.device_marks import DeviceMarks
from pipemorph_trainer.observe.observed_rank import FinishedStep, ObservedRank
from pipemorph_trainer.record import OpRecorder, RecordedOp, open_table

if TYPE_CHECKING:
    from pipemorph_trainer.observe.step_reporter import StepReporter
    from pipemorph_trainer.telemetry.run_queue import RunQueue

_log = logging.getLogger("pipemorph_trainer.observe")

WAITS_SECONDS, WAITS_SHARE = 0.05, 0.001
"""Least seconds between two readings of the waits for a processor, and the most share of the time
that they take: some microseconds per thread."""
MOST_OPS = 1 << 20
"""Most ops of a step that are recorded: memory stays bounded where steps never end."""


class MarkedOp(NamedTuple):
    """An op with marks instead of times. ``posted``, ``waited``: of a receive. ``bytes``: of a
    message."""

    optype: str
    start: Any
    end: Any
    microbatch: int = -1
    stage: int = -1
    posted: Any = None
    waited: Any = None
    bytes: int = -1


class TimedCall(NamedTuple):
    """Call of a hooked function that has returned ``result``, between two marks."""

    start: Any
    end: Any
    result: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument, which was passed by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


class Observation:
    """Observation of this process. Its hooks call it; no error of it leaves :meth:`guard`.

    ``active`` is False after :meth:`stop`, or after an error.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.active = True
        self._folder = folder
        self._most_bytes = most_bytes
        self._place: ObservedRank | None = None
        self._table: OpRecorder | None = None
        self._reporter: StepReporter | None = None
        """Reporter to ``pipemorph serve --observe``, if a variable names one."""
        self._device: DeviceMarks | None = None
        self._undo: list[Callable[[], object]] = []
        self._ops: list[MarkedOp] = []
        self._run_queue: RunQueue | None = None
        self._waits: list[tuple[float, float]] = []
        """Readings in this step: time, and seconds waited since the one before."""
        self._next_reading = 0.0
        self._earlier = _Step(-1, [], 0.0, 0.0, 0.0, [])
        """Step before: on a device its times are read while the next one runs."""
        self._epoch = time() - perf_counter()
        self._thread = threading.get_ident()
        self._step = 0
        self._calls = 0
        """Calls of the schedule in this step."""
        self._microbatches = 0
        """Microbatches of the calls before the last one, in this step."""
        self._next_microbatches = self._version = 0
        self._has_setup = self._has_optimizer = self._optimizer_ended = False
        self._optimizers: list[Any] = []
        """Marks at the starts of the optimizers that run: one may call another."""
        self._pause: Any = None
        self.omits = 0
        """Above 0 in a call of the schedule that is not recorded."""
        self._omitted = 0.0
        """Seconds of such calls in this step."""
        self._began = self._ended = perf_counter()
        """End of the step before, and of the last optimizer."""

    # Hooks

    def guard(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function of the observation. An error is logged, and ends the observation."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever it is
            name = getattr(function, "__name__", "a hook")
            kind = type(error).__name__
            _log.warning("observing ends, training goes on: %s: %s: %s", name, kind, error)
            self.stop()

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace an attribute by what ``make`` makes of it. Returns False if there is none."""
        original = getattr(owner, name, None)
        if original is None:
            return False
        replaced = functools.wraps(original)(make(original))
        setattr(owner, name, replaced)

        def restore() -> None:
            # Another tool may have wrapped it since; its wrapper stays.
            if getattr(owner, name) is replaced:
                setattr(owner, name, original)

        self._undo.append(restore)
        return True

    def time_calls(self, owner: Any, name: str, add: Callable[[TimedCall], object]) -> bool:
        """Time the calls of a function, and pass each to ``add``. Returns False if there is no such
        function."""

        return self.replace(owner, name, lambda original: self.make_timed(original, add))

    def make_timed(self, original: Any, add: Callable[[TimedCall], object]) -> Any:
        """Return a function that calls ``original``, and passes the call to ``add``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.active or self.omits:
                return original(*args, **kwargs)
            start = self.mark()
            result = original(*args, **kwargs)
            self.guard(add, TimedCall(start, self.mark(), result, args, kwargs))
            return result

        return timed

    def make_step(
        self,
        original: Callable[..., Any],
        find_state: Callable[..., tuple[bool, bool]],
        begin: Callable[[Sequence[Any], Mapping[str, Any]], object],
    ) -> Callable[..., Any]:
        """Return a function that calls ``original``, a schedule. ``find_state`` gets the arguments,
        and returns whether the call trains, and whether it has set-up, as the first one; ``begin``
        gets them before a call that trains. Set-up and calls that do not train are omitted."""

        def step(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            trains, has_setup = find_state(*args, **kwargs)
            if trains:
                self.guard(begin, args, kwargs)
            if has_setup or not trains:
                return self.omit_call(original, *args, **kwargs)
            return original(*args, **kwargs)

        return step

    def warn_lacks(self, package: str, lacks: Sequence[str]) -> None:
        """Log what is not recorded, since the installed package has no such functions."""
        if lacks:
            _log.warning("%s has no %s: not recorded", package, ", ".join(lacks))

    def call_at_stop(self, function: Callable[[], object]) -> None:
        """Call ``function`` when the observation ends."""
        self._undo.append(function)

    def hook_process(self) -> None:
        """Hook Python's garbage collector and the end of the process."""
        gc.callbacks.append(self._note_collection)
        self._undo.append(lambda: gc.callbacks.remove(self._note_collection))
        atexit.register(self.stop)
        # A child, such as a loader's worker, has none of the ops.
        os.register_at_fork(after_in_child=self._forget_process)

    def _forget_process(self) -> None:
        self.active, self._reporter = False, None
        self._ops.clear()

    def stop(self) -> None:
        """Write what was recorded, and put all hooks back. Again: nothing."""
        if not self.active:
            return
        self.active = False
        atexit.unregister(self.stop)
        for undo in reversed(self._undo):
            with suppress(ValueError, AttributeError):
                undo()
        self._undo.clear()
        try:
            self._write_step(self._earlier)
            self._write_step(self._end_step())
        except Exception as error:  # noqa: BLE001 - training goes on, whatever it is
            _log.warning("the last step was not recorded: %s", error)
        if self._table is not None:
            self._table.close()
        if self._reporter is not None:
            self._reporter.close()

    # Times

    def use_device(self, device: Any) -> None:
        """Take times from events on a CUDA device from now on."""
        if self._device is None:
            self._device = DeviceMarks(device)

    def mark(self) -> Any:
        """Mark of now: seconds of ``perf_counter``, or an event in the device's stream."""
        return perf_counter() if self._device is None else self._device.record()

    # Steps

    def set_place(self, place: ObservedRank) -> None:
        """Set the place of this rank, once it is known."""
        if self._place is None:
            self._place = place
            if place.records:
                self._table = open_table(
                    self._folder / f"rank{place.rank}.jsonl",
                    stage=place.stage,
                    dp_rank=place.dp_rank,
                    rank=place.rank,
                    schedule=place.schedule,
                    most_bytes=self._most_bytes,
                )
                if os.environ.get("PIPEMORPH_INGEST_URL"):
                    self._start_reporter(place)

    def _start_reporter(self, place: ObservedRank) -> None:
        # Imported late: other observations need no HTTP.
        from pipemorph_trainer.observe.step_reporter import StepReporter, describe_place
        from pipemorph_trainer.telemetry.run_queue import RunQueue

        try:
            where = describe_place(place)
            self._reporter = StepReporter.from_env(where, lambda: self._read_host(perf_counter()))
            if self._reporter is not None and self._device is None:
                self._run_queue = RunQueue()
        except Exception as error:  # noqa: BLE001 - steps are recorded, whatever it is
            kind = type(error).__name__
            _log.warning("steps are not reported, training goes on: %s: %s", kind, error)

    def begin_call(self, microbatches: int, version: int, *, has_setup: bool = False) -> None:
        """Begin a call of the schedule that trains ``microbatches``.

        Calls without an optimizer's step between them are one training step, which accumulates
        gradients. ``version`` is another one after a parameter has changed: it ends the steps of
        jobs without an optimizer of torch. A step with a call that has set-up is not recorded.
        """
        if self._optimizer_ended or (not self._has_optimizer and version != self._version):
            self._begin_step()
        self._version = version
        self._optimizers.clear()
        self._microbatches += self._next_microbatches
        self._next_microbatches = microbatches
        self._calls += 1
        self._has_setup |= has_setup

    def _begin_step(self) -> None:
        if not self._calls:
            return
        step = self._end_step()
        if self._device is not None:
            step, self._earlier = self._earlier, step
        self._write_step(step)
        self._step += 1
        self._calls = self._microbatches = self._next_microbatches = 0
        self._optimizer_ended = self._has_setup = False

    def _end_step(self) -> _Step:
        """End the step with its optimizer, or now. One with set-up has no ops."""
        ops, self._ops = [] if self._has_setup else self._ops, []
        omitted, self._omitted = self._omitted, 0.0
        waits, self._waits = self._waits, []
        began, self._began = self._began, self._ended if self._optimizer_ended else perf_counter()
        return _Step(self._step, ops, began, self._began, omitted, waits)

    def omit_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``original`` without recording what it runs, nor the data that were loaded for it,
        if no call of this step has begun."""
        if not self._calls:
            self._ops.clear()
        self.omits += 1
        began = perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            self.omits -= 1
            self._omitted += perf_counter() - began

    def add(self, op: MarkedOp) -> None:
        """Add an op of this step. Its microbatch is numbered within this call of the schedule."""
        if op.microbatch >= 0 and self._microbatches:
            op = op._replace(microbatch=op.microbatch + self._microbatches)
        if len(self._ops) < MOST_OPS:
            self._ops.append(op)
        if self._run_queue is not None and (now := perf_counter()) >= self._next_reading:
            self._waits.append((now, self._run_queue.take_waited_seconds() or 0.0))
            pause = max(WAITS_SECONDS, (perf_counter() - now) / WAITS_SHARE)
            self._next_reading = now + pause

    # Between calls of the schedule

    def begin_optimizer(self) -> None:
        """Begin the step of an optimizer, perhaps within another one's."""
        self._optimizers.append(self.mark())

    def end_optimizer(self) -> None:
        """End it; the outermost one is recorded, and ends the training step."""
        if not self._optimizers:
            return
        start = self._optimizers.pop()
        if not self._optimizers:
            self._has_optimizer = True
            if self._calls:
                self._optimizer_ended, self._ended = True, perf_counter()
                self.add(MarkedOp(OPTIMIZER, start, self.mark()))

    def add_loading(self, call: TimedCall) -> None:
        """Add the time that the training thread waited for its data; it is the next step's if the
        optimizer has ended this one."""
        if threading.get_ident() != self._thread:
            return
        if self._optimizer_ended:
            self._begin_step()
        self.add(MarkedOp(DATA, call.start, call.end))

    def _note_collection(self, phase: str, _: object) -> None:
        if not self.active or self._device is not None or self.omits:
            return
        if phase == "start":
            self._pause = perf_counter()
        elif self._pause is not None:
            if self._calls:
                self.add(MarkedOp(GC, self._pause, perf_counter()))
            self._pause = None

    # Files

    def _write_step(self, ended: _Step) -> None:
        if self._table is None or not ended.ops:
            return
        seconds = self._read_host if self._device is None else self._device.read_times()
        chunks = self._place.chunks if self._place is not None else ()
        self._table.begin_step(ended.step)
        rows = []
        for op in ended.ops:
            start, end = seconds(op.start), seconds(op.end)
            posted, waited = (
                None if each is None else seconds(each) for each in (op.posted, op.waited)
            )
            chunk = chunks.index(op.stage) if op.stage in chunks else -1
            rows.append(
                RecordedOp(
                    op.optype, start, max(0.0, end - start), op.microbatch, chunk, op.stage,
                    posted, waited, bytes=op.bytes,
                )
            )  # fmt: skip
        if self._reporter is not None:
            shift = self._epoch
            waits = [(at + shift, seconds) for at, seconds in ended.waits]
            times = ended.began + shift, ended.ended + shift
            self._reporter.add_step(FinishedStep(ended.step, rows, *times, ended.omitted, waits))
        self._table.add_ops(rows)

    def _read_host(self, mark: float) -> float:
        return mark + self._epoch


class _Step(NamedTuple):
    """Step that has ended. ``began``, ``ended``: seconds of ``perf_counter``; ``omitted``: seconds
    in calls that are not recorded; ``waits``: for a processor, with the times of readings."""

    step: int
    ops: list[MarkedOp]
    began: float
    ended: float
    omitted: float
    waits: list[tuple[float, float]]
