"""The direct route: torch.distributed point-to-point, in order, with a bounded send queue.

There is one queue per direction with at most two outstanding sends; a third one blocks compute
until the first is done. Frameworks whose sends share a stream behave like this: a link slower than
its stage blocks ops that are ready (head-of-line blocking). The bound also applies on gloo, so that
the effect can be measured there.

A receive is posted when there is room for its message, and on a device when its sender waits for
nothing from this stage (:mod:`pipemorph_trainer.agent.receives`). One thread per direction posts
receives, waits for them in order and wakes the executor's poller: a gloo receive completes only
while it is waited for.

On CUDA the payload is sent by NCCL, with one communicator per direction (a shared one would
serialise the two directions). The receiver thread has its own stream, since a wait for a message in
the compute stream would delay every op launched after it. Sends are ordered behind the ops in the
compute stream, so only the device knows when one can start: events say when, at both ends
(:mod:`pipemorph_trainer.links.channels.departures`). The compute stream does not wait for sends: a
message is kept until its send is done, and the host waits if too many are kept. NCCL needs one GPU
per rank; no test of this repository has run it.
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
from pipemorph_trainer.links.channels.departures import Departures
from pipemorph_trainer.links.message import (
    ALL_PRESENT,
    DIRECT_QUEUE,
    NOTHING,
    Batch,
    Departure,
    Direction,
    Held,
    Hold,
    Note,
    Position,
    SenderLoad,
    new_tuple,
)
from pipemorph_trainer.links.peer_socket import PeerSocket
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.links.recorder import LinkRecorder, OpClock, PeerClock, record_arrival
from pipemorph_trainer.profiling import profiling
from pipemorph_trainer.topology.accelerator import Accelerator, Event, Stream
from pipemorph_trainer.topology.device_time import DeviceTime, Moment
from pipemorph_trainer.topology.groups import abandon

MAX_OUTSTANDING = 2
OUTSTANDING_ON_DEVICE = 8
"""Outstanding sends on a device. Their messages are kept until they are done, so this bounds memory
and not compute."""
POLL_SECONDS = 0.0002
LATE_NOTE_SECONDS = 0.0002
"""Pause before a note is looked for again whose message has arrived."""
POSTED_ON_DEVICE = 2
"""Receives of one direction that are posted on a device: one that is under way, and the next one
behind it in its communicator's stream, so that the wire does not wait for a thread of this host.
Only the first one occupies resources of the device beside memory."""
NO_DEADLINE = timedelta(days=365)
"""Of a receive on the CPU, which may be posted long before its message is sent. The executor has
the deadlines; if one is over, the receive is aborted."""
ENOUGH_POSTED = 2
"""Posted receives with which the receiver thread has until the next arrival to post more."""
JOIN_SECONDS = 5.0
EXACT_WITHIN = 0.0005
"""Error of a wire time, seconds, with which it is exact: a quarter of the least delay that links
are judged by, unless a job says otherwise."""


class DirectIncoming:
    """Receiving end. Messages arrive in microbatch order, notes over the control socket."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        peer: int,
        direction: Direction,
        socket: PeerSocket,
        poller: Poller,
        op_clock: OpClock,
        peer_clock: PeerClock,
        recorder: LinkRecorder,
        device: torch.device,
        accelerator: Accelerator | None = None,
        posted: int | None = None,
    ) -> None:
        """``accelerator``: of ``device``; None for the CPU. ``posted``: most receives that are
        posted and not complete; None, on the CPU: as many as there is room for, whatever their
        sender waits for."""
        self._group, self._peer = group, peer
        # What dist.isend and dist.irecv look up at every call.
        self._peer_in_group = dist.get_group_rank(group, peer)
        self.direction = direction
        self._socket, self._poller = socket, poller
        self._op_clock, self._peer_clock, self._recorder = op_clock, peer_clock, recorder
        self._device = device
        self._accelerator = accelerator
        self._side: Stream | None = None
        self._device_time: DeviceTime | None = None
        if accelerator is not None:
            self._side = accelerator.new_stream()
            self._device_time = DeviceTime(accelerator)
            socket.on_departed = self._departed
        self._taken_from: dict[Position, _Taken] = {}
        """Messages that were taken, and whose departures are not known yet."""
        self._departures: dict[Position, Moment] = {}
        """Departures of messages that were not taken yet."""
        self._most_posted = posted
        # Protects the state that decides what may be posted, in both threads.
        self._posting = threading.Lock()
        self._next = self._sent = self._taken = self._ran = 0
        self._under_way = 0
        self._posted: queue.SimpleQueue[_Posted | RuntimeError | _Due | None] = queue.SimpleQueue()
        self._arrived: dict[Position, _Arrived] = {}
        self.error: str | None = None
        """Why this route has failed; None while it is up."""
        self._came: Position = -1, 0
        self._batch: Batch | None = None
        self._thread: threading.Thread | None = None

    def begin(self, batch: Batch) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._receive,
                name=f"pipemorph-{self.direction.word}-from-{self._peer}",
                daemon=True,
            )
            self._thread.start()
        self._give_up_departures(batch.iteration)
        with self._posting:
            self._batch = batch
            self._next = self._sent = self._taken = 0
        if self._most_posted is None:
            self._posted.put(_Due())
        else:
            self._post_due()

    def sent(self, messages: int) -> None:
        self._sent = messages
        if self._most_posted is not None:
            self._post_due()

    def ran(self, ops: int) -> None:
        self._ran = ops
        if self._most_posted is not None:
            self._post_due()

    @property
    def held(self) -> int:
        """Messages that have arrived, or have a posted receive, and were not taken."""
        return self._next - self._taken

    def ready_at(self, microbatch: int) -> float | None:
        assert self._batch is not None
        iteration = self._batch.iteration
        # Read it first: the thread sets it after the last message has arrived.
        error = self.error
        if (iteration, microbatch) not in self._arrived:
            if error is not None:
                raise PipelineError(error)
            return None
        arrived = self._socket.note_of((self.direction, iteration, microbatch))
        if arrived is None:
            if self._socket.lost is not None:
                raise PipelineError(self._socket.lost)
            # It was sent before the message, so it is about to come.
            return time.time() + LATE_NOTE_SECONDS
        note = arrived.note
        return note.not_before + self._peer_clock.offset if note.not_before else 0.0

    def holds(self, microbatch: int) -> bool:
        """Whether this message of the current iteration has arrived and was not taken."""
        return self._batch is not None and (self._batch.iteration, microbatch) in self._arrived

    def take(self, microbatch: int) -> list[Tensor | None] | None:
        assert self._batch is not None
        batch = self._batch
        iteration = batch.iteration
        tensors, came, exact, posted_at = self._arrived.pop((iteration, microbatch))
        note, noted_at = self._socket.notes.pop((self.direction, iteration, microbatch))
        self._taken = microbatch + 1
        if self._under_way < ENOUGH_POSTED:
            self._post_due()
        if note.generation != batch.generation:
            raise PipelineError(
                f"message of microbatch {microbatch}, iteration {batch.step} belongs to "
                f"shape generation {note.generation}; expected {batch.generation}"
            )
        if self._accelerator is None:
            record_arrival(
                self._recorder, note, self._peer_clock, came.at, batch.nbytes, exact=exact,
                noted_at=noted_at,
            )  # fmt: skip
        else:
            self._take_time((iteration, microbatch), _Taken(note, came, posted_at, batch.nbytes))
            compute = self._accelerator.compute_stream()
            for tensor in tensors:
                self._accelerator.keep(tensor, compute)
        if note.present == ALL_PRESENT:
            return [*tensors]
        if note.present == NOTHING:
            return None
        return [t if note.present >> k & 1 else None for k, t in enumerate(tensors)]

    def _take_time(self, position: Position, taken: _Taken) -> None:
        """Record the wire time of a message from a device, now or when its departure is told."""
        departed = self._departures.pop(position, None)
        if self._recorder.paused:
            return
        if departed is not None:
            self._record(taken, departed)
        else:
            self._taken_from[position] = taken

    def _departed(self, direction: int, departures: Sequence[Departure]) -> None:
        """The sender tells when messages were complete on its device."""
        if direction != self.direction:
            return
        for position, moment in departures:
            taken = self._taken_from.pop(position, None)
            if taken is not None:
                self._record(taken, moment)
            else:
                self._departures[position] = moment

    def _record(self, taken: _Taken, departed: Moment | None) -> None:
        """Record the wire time of a message from a device: from the moment at which its tensors
        were complete.

        That is exact to within :data:`EXACT_WITHIN`, if this end was ready for it by then. Else it
        is an upper bound: whether NCCL sends before, depends on its network. So it is, from the
        launch, for a message that a fault holds, since it does from then on, and without a
        departure."""
        if self._recorder.route is not Route.DIRECT:
            return  # The window of its route is closed.
        note, exact = taken.note, False
        if departed is not None and not note.not_before:
            within = departed.within + taken.came.within
            posted_at = taken.posted_at - self._peer_clock.offset
            exact = self._peer_clock.known and within <= EXACT_WITHIN and posted_at <= departed.at
            start = departed.at if exact else max(note.started_at, departed.at - within)
            note = note._replace(posted_at=start, started_at=start)
        # NCCL may take another way than the control socket, so the time of the note says nothing.
        record_arrival(
            self._recorder, note, self._peer_clock, taken.came.at, taken.nbytes, exact=exact
        )

    def _give_up_departures(self, iteration: int) -> None:
        """What was not told in the iteration before ``iteration`` will not be."""
        last = iteration - 1
        for position in [each for each in self._departures if each[0] < last]:
            del self._departures[position]
        for position in [each for each in self._taken_from if each[0] < last]:
            self._record(self._taken_from.pop(position), None)

    def close(self, *, abandon: bool = False) -> None:
        """End the receiver thread, and wait for it: if it is inside torch when the interpreter
        ends, the process crashes. After a failure (``abandon``) its receives are aborted first,
        since their messages may never arrive."""
        if self._thread is None:
            return
        self._posted.put(None)
        if not abandon:
            self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            self.abandon()
            self._thread.join(JOIN_SECONDS)

    def give_up(self) -> Position:
        """Abort all receives, also the peer's on this connection; return the first missing message.
        Arrived messages can still be taken. Raises :class:`PipelineError` if a receive does not
        end."""
        self.close(abandon=True)
        if self.receiving:
            raise PipelineError(
                f"a receive from rank {self._peer} has not ended {2 * JOIN_SECONDS:g} s after "
                "its connection was closed"
            )
        return self._came

    @property
    def receiving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def abandon(self) -> None:
        """Abort all posted receives. On the CPU this closes the connection of both directions."""
        abandon(self._group, _backend(self._device))

    def _beside(self) -> AbstractContextManager[None]:
        """Context for receives: on a device, their own stream."""
        if self._accelerator is None or self._side is None:
            return nullcontext()
        return self._accelerator.using(self._side)

    def _receive(self) -> None:
        """The receiver thread."""
        if self._accelerator is not None:
            self._accelerator.enter_thread()
        with self._beside():
            self._receive_all()

    def _receive_all(self) -> None:
        """Wait for posted receives in order; after each, post more receives and wake the poller."""
        last_at = 0.0
        try:
            while (posted := self._posted.get()) is not None:
                if isinstance(posted, RuntimeError):
                    raise posted
                if isinstance(posted, _Due):
                    self._post_due()
                    continue
                iteration, microbatch, contents, posted_at = posted
                del posted
                tensors, came, exact = self._wait(contents)
                # One that was posted behind another is ready when that one has come.
                posted_at = max(posted_at, last_at)
                self._arrived[iteration, microbatch] = _Arrived(tensors, came, exact, posted_at)
                last_at = came.at
                del tensors
                self._came = iteration, microbatch + 1
                with self._posting:
                    self._under_way -= 1
                self._post_due()
                if self._poller.awaited:
                    self._poller.wake()
                if self._device_time is not None:
                    self._device_time.keep_fresh()
        except RuntimeError as error:
            self.error = f"the connection to rank {self._peer} failed: {first_sentence(error)}"
            self._poller.wake()

    def _post_due(self) -> None:
        """Post all receives that may be posted. Runs in both threads. An error is raised in
        order."""
        with self._posting:
            while self._is_due():
                assert self._batch is not None
                try:
                    tensors, works = self._post(self._batch)
                except RuntimeError as error:
                    self._posted.put(error)
                    self._next = self._batch.microbatches
                    return
                contents = [(tensors, works)]
                del tensors, works
                posted_at = time.time() if self._device_time is not None else 0.0
                self._posted.put(_Posted(self._batch.iteration, self._next, contents, posted_at))
                self._next += 1
                self._under_way += 1

    def _is_due(self) -> bool:
        """Whether the next receive may be posted: there is room for its message, and on a device
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

    def _wait(
        self, contents: list[tuple[list[Tensor], list[Any]]]
    ) -> tuple[list[Tensor], Moment, bool]:
        """Wait for one message. Returns its tensors, when they arrived, and on the CPU whether no
        op has delayed this thread. It keeps no reference to them, since the stage could otherwise
        not offload their memory."""
        tensors, works = contents.pop()
        if self._accelerator is not None and self._device_time is not None:
            event = self._synchronize(self._accelerator, works)
            return tensors, self._device_time.of(event), False
        for work in works:
            work.wait(NO_DEADLINE)
        stamp = time.time()
        return tensors, Moment(stamp, 0.0), self._op_clock.observed(stamp)

    def _post(self, batch: Batch) -> tuple[list[Tensor], list[Any]]:
        with self._beside():
            tensors = [meta.empty(self._device) for meta in batch.metas]
            works = [
                self._group.recv([t], self._peer_in_group, int(self.direction)) for t in tensors
            ]
        return tensors, works

    def _synchronize(self, accelerator: Accelerator, works: list[Any]) -> Event:
        """Wait for the data itself: with NCCL, ``wait`` only makes the side stream wait. Returns
        the event behind it."""
        assert self._side is not None
        for work in works:
            work.wait()
        event = accelerator.record(self._side, timed=True)
        event.synchronize()
        for work in works:
            if not _is_complete(work):
                raise RuntimeError("a receive was given up")
        return event


class _Due:
    """Asks the receiver thread to post what may be posted."""


class _Posted(NamedTuple):
    """A posted receive. ``contents``: a list with one item, the tensors of the message and their
    works; emptied when they are used. ``posted_at``: on a device, wall clock."""

    iteration: int
    microbatch: int
    contents: list[tuple[list[Tensor], list[Any]]]
    posted_at: float


class _Arrived(NamedTuple):
    """A message that has arrived. ``exact``: whether its time is, on the CPU. ``posted_at``: when
    its receive was posted and was the next one, on a device."""

    tensors: list[Tensor]
    came: Moment
    exact: bool
    posted_at: float


class _Taken(NamedTuple):
    """What is known of a message from a device, but for its departure."""

    note: Note
    came: Moment
    posted_at: float
    nbytes: int


class DirectOutgoing:
    """Sending end: one queue with at most ``max_outstanding`` outstanding sends."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        peer: int,
        direction: Direction,
        socket: PeerSocket,
        hold: Hold | None,
        on_block: Callable[[str, int], None],
        on_unblock: Callable[[], None],
        deadline: float,
        device: torch.device,
        max_outstanding: int = MAX_OUTSTANDING,
        departures: Departures | None = None,
        load: SenderLoad | None = None,
    ) -> None:
        """``hold``: None without faults. ``load``: of this rank, for notes without faults.
        ``departures``: of a rank on a device; None on the CPU. On a device, sends are polled
        instead of waited for, since ``wait`` makes the compute stream wait."""
        self._max_outstanding, self._asks = max_outstanding, departures is not None
        self._departures = departures
        self._departed: deque[Departure] = deque()
        """Those that the receiver has not been told."""
        self._group, self._peer = group, peer
        # What dist.isend and dist.irecv look up at every call.
        self._peer_in_group = dist.get_group_rank(group, peer)
        self.direction, self._tag = direction, int(direction)
        self._socket, self._hold, self._load = socket, hold, load or SenderLoad()
        self._on_block, self._on_unblock = on_block, on_unblock
        self._device = device
        self._outstanding: deque[_Sent] = deque()
        self._batch: Batch | None = None
        self.allow(deadline)

    def allow(self, deadline: float) -> None:
        """Set the longest time of a send, seconds."""
        self._deadline, self._timeout = deadline, timedelta(seconds=deadline)

    def begin(self, batch: Batch) -> None:
        self._batch = batch

    def slot_free_at(self) -> float:
        """Only considers faults: a gloo send does not know whether it is complete."""
        if len(self._outstanding) < self._max_outstanding:
            return 0.0
        return self._outstanding[0].not_before

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        batch = self._batch
        assert batch is not None
        outstanding = self._outstanding
        if self._asks:
            while outstanding and self._through(outstanding[0]):
                outstanding.popleft()
        elif outstanding and self._is_taken(outstanding[0]):
            outstanding.popleft()
        if len(outstanding) >= self._max_outstanding:
            self._finish_oldest()
        posted = time.time()
        if self._hold is None:
            load = self._load
            held = new_tuple(Held, (posted, 0.0, 0.0, load.waited, load.inflated))
        else:
            held = self._hold(DIRECT_QUEUE, batch.nbytes, posted)
        present = ALL_PRESENT if tensors is not None else NOTHING
        payload: list[Tensor] = []
        if tensors is None:
            tensors = [None] * len(batch.metas)
        for meta, tensor in zip(batch.metas, tensors, strict=True):
            if tensor is None:
                present &= ~(1 << len(payload))
                payload.append(torch.zeros(meta.shape, dtype=meta.dtype, device=self._device))
            else:
                # Without what autograd knows of it.
                plain = tensor.detach() if tensor.requires_grad else tensor
                payload.append(plain.contiguous())
        self._socket.send_note(
            self.direction,
            (batch.generation, batch.iteration, microbatch, present, posted, *held),
        )
        if self._departures is not None:
            self._departures.mark((batch.iteration, microbatch), self._departed)
        send, peer, tag = self._group.send, self._peer_in_group, self._tag
        try:
            works: list[Any] = [send([t], peer, tag) for t in payload]
        except RuntimeError as error:
            raise self._failed(error) from error
        outstanding.append(
            new_tuple(
                _Sent, (batch.step, batch.iteration, microbatch, held.not_before, works, payload)
            )
        )

    def _is_taken(self, sent: _Sent) -> bool:
        """Whether the neighbour has said that it has used this message: then its send is done, and
        need not be waited for. It says so only where it could request it again. A profiler's
        record of a send ends in its wait."""
        taken = self._socket.taken.get(self._tag)
        return taken is not None and (sent.iteration, sent.microbatch) < taken and not profiling()

    def tell_departures(self) -> None:
        """Tell the receiver which messages have become complete on the device, and when."""
        departed = self._departed
        if departed:
            known = [departed.popleft() for _ in range(len(departed))]
            self._socket.send_departed(self.direction, known)

    def _finish_oldest(self) -> None:
        """Wait for the oldest send, at most until the deadline."""
        sent = self._outstanding[0]
        self._on_block(f"iteration {sent.step}", sent.microbatch)
        began = time.monotonic()
        try:
            if self._asks:
                self._poll(sent)
            else:
                for work in sent.works:
                    work.wait(self._timeout)
        except RuntimeError as error:
            if time.monotonic() - began >= self._deadline:
                raise WaitTimeoutError(f"the deadline is {self._deadline:g} s") from error
            raise self._failed(error) from error
        if sent.not_before:
            time.sleep(max(0.0, sent.not_before - time.time()))
        self._outstanding.popleft()
        self._on_unblock()

    def _poll(self, sent: _Sent) -> None:
        """Wait on the host until a send is done. The device does not wait."""
        give_up_at = time.monotonic() + self._deadline
        while not self._through(sent):
            if time.monotonic() >= give_up_at:
                raise WaitTimeoutError(f"the deadline is {self._deadline:g} s")
            time.sleep(POLL_SECONDS)

    def _through(self, sent: _Sent) -> bool:
        """Whether a send is done. Raises :class:`PipelineError` if it failed."""
        try:
            return all(_is_complete(work) for work in sent.works)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> PipelineError:
        return PipelineError(f"the connection to rank {self._peer} failed: {first_sentence(error)}")

    def give_up(self) -> None:
        """Abort the outstanding sends, and drop them. NCCL's would otherwise stay on the device
        until their timeout, since their communicator is not that of the receives."""
        abandon(self._group, _backend(self._device))
        self._outstanding.clear()

    def finish(self) -> None:
        """Wait until all sends are done."""
        while self._outstanding:
            self._finish_oldest()

    def close(self) -> None:
        self.finish()


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _is_complete(work: Any) -> bool:
    """Whether an operation on a device is done. Raises :class:`RuntimeError` if it failed: an
    aborted one ends, too, but without its data."""
    complete = bool(work.is_completed())
    failure = work.exception()
    if failure is not None:
        raise RuntimeError(str(failure))
    return complete


class _Sent(NamedTuple):
    """A message that is being sent. Its tensors are kept until the send is done. ``step``: the
    iteration as users count."""

    step: int
    iteration: int
    microbatch: int
    not_before: float
    works: list[Any]
    payload: list[Tensor]
