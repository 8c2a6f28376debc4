"""Direct route: torch.distributed point-to-point, in order, with a bounded send queue.

There is one queue per direction with at most two outstanding sends; a third one blocks compute
until the first is done. Frameworks whose sends share a stream behave like this: a link slower than
its stage blocks ops that are ready (head-of-line blocking). The bound also applies on gloo, so that
the effect can be measured there.

A receive is posted when there is room for its message, and on a device when its sender waits for
nothing from this stage (:mod:`pipemorph_trainer.agent.receive_windows`). One thread per direction
posts receives, waits for them in order and wakes the executor's poller: a gloo receive completes
only during a wait.

On CUDA, NCCL sends the payload, with one communicator per direction (a shared one would serialise
the two directions). The receiver thread has its own stream, since a wait for a message in the
compute stream would delay every op launched after it. Sends are ordered behind the ops in the
compute stream, so only the device knows when one starts: events give the time, at both ends
(:mod:`pipemorph_trainer.transport.channels.send_timestamps`). The compute stream does not wait for
sends: a message is held until its send is done, and the host waits if too many are held. NCCL needs
one GPU per rank; no test of this repository has run it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipemorph.planning.ir import Route
from pipemorph_trainer.errors import PipelineError, WaitTimeoutError, first_sentence
from pipemorph_trainer.profiling import profiling
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent, DeviceStream
from pipemorph_trainer.topology.device_event_clock import DeviceEventClock, DeviceMoment
from pipemorph_trainer.topology.groups import abort_group
from pipemorph_trainer.transport.channels.send_timestamps import SendTimestamps
from pipemorph_trainer.transport.control_socket import ControlSocket
from pipemorph_trainer.transport.link_recorder import (
    LinkRecorder,
    OpClock,
    PeerClock,
    record_wire_time,
)
from pipemorph_trainer.transport.message import (
    ALL_PRESENT,
    DIRECT_QUEUE,
    NONE_PRESENT,
    Direction,
    HoldMessage,
    HoldTimes,
    MessageBatch,
    Note,
    Position,
    SenderLoad,
    SendTimestamp,
    new_tuple,
)
from pipemorph_trainer.transport.poller import Poller

MAX_OUTSTANDING = 2
OUTSTANDING_ON_DEVICE = 8
"""Outstanding sends on a device. Their messages are held until they are done, so this bounds memory
and not compute."""
POLL_SECONDS = 0.0002
LATE_NOTE_SECONDS = 0.0002
"""Pause before the next look-up of a note whose message has arrived."""
POSTED_ON_DEVICE = 2
"""Posted receives of one direction on a device: the current one, and the next one behind it in the
communicator's stream, so that the wire does not wait for a thread of this host. Only the first one
occupies resources of the device other than memory."""
NO_DEADLINE = timedelta(days=365)
"""Timeout of a receive on the CPU, which may be posted long before its message is sent. It is the
executor that has deadlines, and then aborts the receive."""
ENOUGH_POSTED = 2
"""Posted receives that are enough for the receiver thread to post more at the next arrival."""
JOIN_SECONDS = 5.0
EXACT_WITHIN = 0.0005
"""Error, seconds, up to which a wire time counts as exact: a quarter of the least delay of a slow
link, unless a job sets another one."""


class DirectIncoming:
    """Receiving end. Messages arrive in microbatch order, notes over the control socket."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        peer: int,
        direction: Direction,
        socket: ControlSocket,
        poller: Poller,
        op_clock: OpClock,
        peer_clock: PeerClock,
        recorder: LinkRecorder,
        device: torch.device,
        accelerator: Accelerator | None = None,
        posted: int | None = None,
    ) -> None:
        """``accelerator``: of ``device``; None for the CPU. ``posted``: most receives that are
        posted and not complete; None, on the CPU: limited by room only."""
        self._group, self._peer = group, peer
        # dist.isend and dist.irecv look it up at every call.
        self._peer_in_group = dist.get_group_rank(group, peer)
        self.direction = direction
        self._socket, self._poller = socket, poller
        self._op_clock, self._peer_clock, self._recorder = op_clock, peer_clock, recorder
        self._device = device
        self._accelerator = accelerator
        self._side: DeviceStream | None = None
        self._device_time: DeviceEventClock | None = None
        if accelerator is not None:
            self._side = accelerator.new_stream()
            self._device_time = DeviceEventClock(accelerator)
            socket.on_send_timestamps = self._apply_send_timestamps
        self._untimed: dict[Position, _UntimedMessage] = {}
        """Messages that were consumed, and whose departures are unknown yet."""
        self._early_timestamps: dict[Position, DeviceMoment] = {}
        """Departures of messages that were not consumed yet."""
        self._most_posted = posted
        # The lock guards the state that decides which receives may be posted.
        self._posting = threading.Lock()
        self._next = self._sent = self._taken = self._ran = 0
        self._under_way = 0
        self._posted: queue.SimpleQueue[_PostedReceive | RuntimeError | _PostRequest | None] = (
            queue.SimpleQueue()
        )
        self._arrived: dict[Position, _ArrivedMessage] = {}
        self.error: str | None = None
        """Failure of this route; None while it is up."""
        self._next_missing: Position = -1, 0
        self._batch: MessageBatch | None = None
        self._thread: threading.Thread | None = None

    def begin_batch(self, batch: MessageBatch) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_receiver,
                name=f"pipemorph-{self.direction.label}-from-{self._peer}",
                daemon=True,
            )
            self._thread.start()
        self._expire_send_timestamps(batch.iteration)
        with self._posting:
            self._batch = batch
            self._next = self._sent = self._taken = 0
        if self._most_posted is None:
            self._posted.put(_PostRequest())
        else:
            self._post_due_receives()

    def record_sent(self, messages: int) -> None:
        self._sent = messages
        if self._most_posted is not None:
            self._post_due_receives()

    def record_ops(self, ops: int) -> None:
        self._ran = ops
        if self._most_posted is not None:
            self._post_due_receives()

    @property
    def held_count(self) -> int:
        """Number of messages that have arrived or have a posted receive, and were not consumed."""
        return self._next - self._taken

    def ready_at(self, microbatch: int) -> float | None:
        assert self._batch is not None
        iteration = self._batch.iteration
        # The order matters: the thread sets it after the last message has arrived.
        error = self.error
        if (iteration, microbatch) not in self._arrived:
            if error is not None:
                raise PipelineError(error)
            return None
        arrived = self._socket.find_note((self.direction, iteration, microbatch))
        if arrived is None:
            if self._socket.lost is not None:
                raise PipelineError(self._socket.lost)
            # The note was sent before the message, so it is about to arrive.
            return time.time() + LATE_NOTE_SECONDS
        note = arrived.note
        return note.not_before + self._peer_clock.offset if note.not_before else 0.0

    def has_message(self, microbatch: int) -> bool:
        """True if this message of the current iteration has arrived and was not consumed."""
        return self._batch is not None and (self._batch.iteration, microbatch) in self._arrived

    def pop_message(self, microbatch: int) -> list[Tensor | None] | None:
        assert self._batch is not None
        batch = self._batch
        iteration = batch.iteration
        tensors, came, exact, posted_at = self._arrived.pop((iteration, microbatch))
        note, noted_at = self._socket.notes.pop((self.direction, iteration, microbatch))
        self._taken = microbatch + 1
        if self._under_way < ENOUGH_POSTED:
            self._post_due_receives()
        if note.generation != batch.generation:
            raise PipelineError(
                f"message of microbatch {microbatch}, iteration {batch.step} belongs to "
                f"shape generation {note.generation}; expected {batch.generation}"
            )
        if self._accelerator is None:
            record_wire_time(
                self._recorder, note, self._peer_clock, came.at, batch.nbytes, exact=exact,
                noted_at=noted_at,
            )  # fmt: skip
        else:
            self._record_or_defer_wire_time(
                (iteration, microbatch), _UntimedMessage(note, came, posted_at, batch.nbytes)
            )
            compute = self._accelerator.compute_stream()
            for tensor in tensors:
                self._accelerator.keep_until_done(tensor, compute)
        if note.present == ALL_PRESENT:
            return [*tensors]
        if note.present == NONE_PRESENT:
            return None
        return [t if note.present >> k & 1 else None for k, t in enumerate(tensors)]

    def _record_or_defer_wire_time(self, position: Position, taken: _UntimedMessage) -> None:
        """Record the wire time of a message from a device, now or when its departure is known."""
        departed = self._early_timestamps.pop(position, None)
        if self._recorder.paused:
            return
        if departed is not None:
            self._record_wire_time(taken, departed)
        else:
            self._untimed[position] = taken

    def _apply_send_timestamps(self, direction: int, departures: Sequence[SendTimestamp]) -> None:
        """Apply the sender's times at which messages were complete on its device."""
        if direction != self.direction:
            return
        for position, moment in departures:
            taken = self._untimed.pop(position, None)
            if taken is not None:
                self._record_wire_time(taken, moment)
            else:
                self._early_timestamps[position] = moment

    def _record_wire_time(self, taken: _UntimedMessage, departed: DeviceMoment | None) -> None:
        """Record the wire time of a message from a device, counted from the completion of its
        tensors.

        It is exact to within :data:`EXACT_WITHIN` if this end was ready for the message by then.
        Otherwise it is an upper bound, since NCCL may have sent earlier, depending on its network.
        Without a departure, and for a message that a fault holds, it counts from the launch."""
        if self._recorder.route is not Route.DIRECT:
            return  # The window of this route is closed.
        note, exact = taken.note, False
        if departed is not None and not note.not_before:
            within = departed.error_seconds + taken.arrived_at.error_seconds
            posted_at = taken.posted_at - self._peer_clock.offset
            exact = self._peer_clock.known and within <= EXACT_WITHIN and posted_at <= departed.at
            start = departed.at if exact else max(note.started_at, departed.at - within)
            note = note._replace(posted_at=start, started_at=start)
        # NCCL may use another network path than the control socket, so the note's time is unused.
        record_wire_time(
            self._recorder, note, self._peer_clock, taken.arrived_at.at, taken.nbytes, exact=exact
        )

    def _expire_send_timestamps(self, iteration: int) -> None:
        """Drop departures, and record wire times without one, of iterations before the last."""
        last = iteration - 1
        for position in [each for each in self._early_timestamps if each[0] < last]:
            del self._early_timestamps[position]
        for position in [each for each in self._untimed if each[0] < last]:
            self._record_wire_time(self._untimed.pop(position), None)

    def close(self, *, abandon: bool = False) -> None:
        """End the receiver thread, and wait for it: if it is inside torch when the interpreter
        ends, the process crashes. ``abandon``, after a failure: abort its receives first, since
        their messages may never arrive."""
        if self._thread is None:
            return
        self._posted.put(None)
        if not abandon:
            self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            self.abort_connection()
            self._thread.join(JOIN_SECONDS)

    def abort_receives(self) -> Position:
        """Abort all receives, also the peer's on this connection; return the first missing message.
        Arrived messages can still be consumed. Raises :class:`PipelineError` if a receive hangs."""
        self.close(abandon=True)
        if self.receiving:
            raise PipelineError(
                f"a receive from rank {self._peer} has not ended {2 * JOIN_SECONDS:g} s after "
                "its connection was closed"
            )
        return self._next_missing

    @property
    def receiving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def abort_connection(self) -> None:
        """Abort all posted receives. On the CPU this closes the connection of both directions."""
        abort_group(self._group, _choose_backend(self._device))

    def _use_receive_stream(self) -> AbstractContextManager[None]:
        """Context for receives: on a device, their own stream."""
        if self._accelerator is None or self._side is None:
            return nullcontext()
        return self._accelerator.use_stream(self._side)

    def _run_receiver(self) -> None:
        """Run the receiver thread."""
        if self._accelerator is not None:
            self._accelerator.enter_thread()
        with self._use_receive_stream():
            self._receive_posted()

    def _receive_posted(self) -> None:
        """Wait for posted receives in order; after each, post more receives and wake the poller."""
        last_at = 0.0
        try:
            while (posted := self._posted.get()) is not None:
                if isinstance(posted, RuntimeError):
                    raise posted
                if isinstance(posted, _PostRequest):
                    self._post_due_receives()
                    continue
                iteration, microbatch, contents, posted_at = posted
                del posted
                tensors, came, exact = self._wait_for_message(contents)
                # A receive that was posted behind another is ready when that one has completed.
                posted_at = max(posted_at, last_at)
                self._arrived[iteration, microbatch] = _ArrivedMessage(
                    tensors, came, exact, posted_at
                )
                last_at = came.at
                del tensors
                self._next_missing = iteration, microbatch + 1
                with self._posting:
                    self._under_way -= 1
                self._post_due_receives()
                if self._poller.awaited:
                    self._poller.wake()
                if self._device_time is not None:
                    self._device_time.refresh_reference()
        except RuntimeError as error:
            self.error = f"the connection to rank {self._peer} failed: {first_sentence(error)}"
            self._poller.wake()

    def _post_due_receives(self) -> None:
        """Post all receives that may be posted, in either thread. An error is raised in order."""
        with self._posting:
            while self._may_post_next():
                assert self._batch is not None
                try:
                    tensors, works = self._post_receive(self._batch)
                except RuntimeError as error:
                    self._posted.put(error)
                    self._next = self._batch.microbatches
                    return
                contents = [(tensors, works)]
                del tensors, works
                posted_at = time.time() if self._device_time is not None else 0.0
                self._posted.put(
                    _PostedReceive(self._batch.iteration, self._next, contents, posted_at)
                )
                self._next += 1
                self._under_way += 1

    def _may_post_next(self) -> bool:
        """True if the next receive may be posted: there is room for its message, and on a device
        its sender waits for nothing from this stage, and not too many receives are posted."""
        batch = self._batch
        if batch is None or self._next == batch.microbatches:
            return False
        after, window, ops = batch.receives
        if window is not None and self._next >= self._taken + window:
            return False
        return self._most_posted is None or (
            (not after or self._sent >= after[self._next])
            and (not ops or self._ran >= ops[self._next])
            and self._under_way < self._most_posted
        )

    def _wait_for_message(
        self, contents: list[tuple[list[Tensor], list[Any]]]
    ) -> tuple[list[Tensor], DeviceMoment, bool]:
        """Wait for one message. Returns its tensors, their arrival, and on the CPU true if no op
        has delayed this thread. It drops its references, so that the stage can offload the
        memory."""
        tensors, works = contents.pop()
        if self._accelerator is not None and self._device_time is not None:
            event = self._wait_for_data(self._accelerator, works)
            return tensors, self._device_time.time_event(event), False
        for work in works:
            work.wait(NO_DEADLINE)
        stamp = time.time()
        return tensors, DeviceMoment(stamp, 0.0), self._op_clock.was_undisturbed(stamp)

    def _post_receive(self, batch: MessageBatch) -> tuple[list[Tensor], list[Any]]:
        with self._use_receive_stream():
            tensors = [meta.new_empty(self._device) for meta in batch.metas]
            works = [
                self._group.recv([t], self._peer_in_group, int(self.direction)) for t in tensors
            ]
        return tensors, works

    def _wait_for_data(self, accelerator: Accelerator, works: list[Any]) -> DeviceEvent:
        """Wait for the data itself, since NCCL's ``wait`` only makes the side stream wait. Returns
        the event behind the data."""
        assert self._side is not None
        for work in works:
            work.wait()
        event = accelerator.record_event(self._side, timed=True)
        event.synchronize()
        for work in works:
            if not _is_complete(work):
                raise RuntimeError("a receive was given up")
        return event


class _PostRequest:
    """Request to the receiver thread to post the receives that may be posted."""


class _PostedReceive(NamedTuple):
    """Posted receive. ``contents``: a list with one item, the tensors of the message and their
    works; emptied when they are used. ``posted_at``: on a device, wall clock."""

    iteration: int
    microbatch: int
    contents: list[tuple[list[Tensor], list[Any]]]
    posted_at: float


class _ArrivedMessage(NamedTuple):
    """Message that has arrived. ``exact``: true if its time is exact, on the CPU. ``posted_at``: on
    a device, when its receive was posted and was the next one."""

    tensors: list[Tensor]
    arrived_at: DeviceMoment
    exact: bool
    posted_at: float


class _UntimedMessage(NamedTuple):
    """Message from a device whose departure is unknown yet."""

    note: Note
    arrived_at: DeviceMoment
    posted_at: float
    nbytes: int


class DirectOutgoing:
    """Sending end: a queue of at most ``max_outstanding`` sends."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        peer: int,
        direction: Direction,
        socket: ControlSocket,
        hold: HoldMessage | None,
        on_block: Callable[[str, int], None],
        on_unblock: Callable[[], None],
        deadline: float,
        device: torch.device,
        max_outstanding: int = MAX_OUTSTANDING,
        departures: SendTimestamps | None = None,
        load: SenderLoad | None = None,
    ) -> None:
        """``hold``: None without faults. ``load``: of this rank, for notes without faults.
        ``departures``: of a rank on a device; None on the CPU. On a device, sends are polled, since
        ``wait`` makes the compute stream wait."""
        self._max_outstanding, self._polls_sends = max_outstanding, departures is not None
        self._send_timestamps = departures
        self._unreported_timestamps: deque[SendTimestamp] = deque()
        """Departures that the receiver does not have yet."""
        self._group, self._peer = group, peer
        # dist.isend and dist.irecv look it up at every call.
        self._peer_in_group = dist.get_group_rank(group, peer)
        self.direction, self._tag = direction, int(direction)
        self._socket, self._hold, self._load = socket, hold, load or SenderLoad()
        self._on_block, self._on_unblock = on_block, on_unblock
        self._device = device
        self._outstanding: deque[_OutstandingSend] = deque()
        self._batch: MessageBatch | None = None
        self.set_deadline(deadline)

    def set_deadline(self, deadline: float) -> None:
        """Set the longest time of a send, seconds."""
        self._deadline, self._timeout = deadline, timedelta(seconds=deadline)

    def begin_batch(self, batch: MessageBatch) -> None:
        self._batch = batch

    def slot_free_at(self) -> float:
        """Consider faults only: the completion of a gloo send is unknown before its wait."""
        if len(self._outstanding) < self._max_outstanding:
            return 0.0
        return self._outstanding[0].not_before

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        batch = self._batch
        assert batch is not None
        outstanding = self._outstanding
        if self._polls_sends:
            while outstanding and self._is_send_complete(outstanding[0]):
                outstanding.popleft()
        elif outstanding and self._is_consumed(outstanding[0]):
            outstanding.popleft()
        if len(outstanding) >= self._max_outstanding:
            self._finish_oldest()
        posted = time.time()
        if self._hold is None:
            load = self._load
            held = new_tuple(HoldTimes, (posted, 0.0, 0.0, load.waited, load.inflated))
        else:
            held = self._hold(DIRECT_QUEUE, batch.nbytes, posted)
        present = ALL_PRESENT if tensors is not None else NONE_PRESENT
        payload: list[Tensor] = []
        if tensors is None:
            tensors = [None] * len(batch.metas)
        for meta, tensor in zip(batch.metas, tensors, strict=True):
            if tensor is None:
                present &= ~(1 << len(payload))
                payload.append(torch.zeros(meta.shape, dtype=meta.dtype, device=self._device))
            else:
                # Detached, since a message carries no autograd graph.
                plain = tensor.detach() if tensor.requires_grad else tensor
                payload.append(plain.contiguous())
        self._socket.send_note(
            self.direction,
            (batch.generation, batch.iteration, microbatch, present, posted, *held),
        )
        if self._send_timestamps is not None:
            self._send_timestamps.mark_message(
                (batch.iteration, microbatch), self._unreported_timestamps
            )
        send, peer, tag = self._group.send, self._peer_in_group, self._tag
        try:
            works: list[Any] = [send([t], peer, tag) for t in payload]
        except RuntimeError as error:
            raise self._make_connection_error(error) from error
        outstanding.append(
            new_tuple(
                _OutstandingSend,
                (batch.step, batch.iteration, microbatch, held.not_before, works, payload),
            )
        )

    def _is_consumed(self, sent: _OutstandingSend) -> bool:
        """True if the neighbour has reported that it consumed this message: then its send is done
        and needs no wait. It reports so only where failover is possible. With a profiler the wait
        is needed, since it ends the record of the send."""
        taken = self._socket.consumed.get(self._tag)
        return taken is not None and (sent.iteration, sent.microbatch) < taken and not profiling()

    def report_send_timestamps(self) -> None:
        """Send the receiver the departures of messages that have become complete on the device."""
        departed = self._unreported_timestamps
        if departed:
            known = [departed.popleft() for _ in range(len(departed))]
            self._socket.send_timestamps(self.direction, known)

    def _finish_oldest(self) -> None:
        """Wait for the oldest send, at most until the deadline."""
        sent = self._outstanding[0]
        self._on_block(f"iteration {sent.step}", sent.microbatch)
        began = time.monotonic()
        try:
            if self._polls_sends:
                self._poll_until_sent(sent)
            else:
                for work in sent.works:
                    work.wait(self._timeout)
        except RuntimeError as error:
            if time.monotonic() - began >= self._deadline:
                raise WaitTimeoutError(f"the deadline is {self._deadline:g} s") from error
            raise self._make_connection_error(error) from error
        if sent.not_before:
            time.sleep(max(0.0, sent.not_before - time.time()))
        self._outstanding.popleft()
        self._on_unblock()

    def _poll_until_sent(self, sent: _OutstandingSend) -> None:
        """Wait on the host until a send is done. The device does not wait."""
        give_up_at = time.monotonic() + self._deadline
        while not self._is_send_complete(sent):
            if time.monotonic() >= give_up_at:
                raise WaitTimeoutError(f"the deadline is {self._deadline:g} s")
            time.sleep(POLL_SECONDS)

    def _is_send_complete(self, sent: _OutstandingSend) -> bool:
        """True if a send is done. Raises :class:`PipelineError` if it failed."""
        try:
            return all(_is_complete(work) for work in sent.works)
        except RuntimeError as error:
            raise self._make_connection_error(error) from error

    def _make_connection_error(self, error: RuntimeError) -> PipelineError:
        return PipelineError(f"the connection to rank {self._peer} failed: {first_sentence(error)}")

    def abort_sends(self) -> None:
        """Abort the outstanding sends, and drop them. Otherwise those of NCCL would stay on the
        device until their timeout, since receives have another communicator."""
        abort_group(self._group, _choose_backend(self._device))
        self._outstanding.clear()

    def finish_sends(self) -> None:
        """Wait until all sends are done."""
        while self._outstanding:
            self._finish_oldest()

    def close(self) -> None:
        self.finish_sends()


def _choose_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _is_complete(work: Any) -> bool:
    """True if an operation on a device is done. Raises :class:`RuntimeError` if it failed: an
    aborted operation also ends, but without its data."""
    complete = bool(work.is_completed())
    failure = work.exception()
    if failure is not None:
        raise RuntimeError(str(failure))
    return complete


class _OutstandingSend(NamedTuple):
    """Message that is being sent. Its tensors are held until the send is done. ``step``: the
    iteration as users count."""

    step: int
    iteration: int
    microbatch: int
    not_before: float
    works: list[Any]
    payload: list[Tensor]
