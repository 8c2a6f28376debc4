"""Fault trace of a job: holds messages and gradients, and cuts connections.

A delay ``d`` holds every message on its queue for ``d``: the queue is busy for that time, and the
receiver does not use the message earlier. The delay is one number per queue at the sender and a
time in the message's note. Nothing sleeps, and the transports are not involved. Both directions of
the link are delayed.

Faults are confined to this module: a link end has its :class:`LinkFaults`, and channels get its
:meth:`LinkFaults.hold_message`. The gradient reduction of a stage has its :class:`ReductionFaults`,
and a device its :class:`DeviceFaults`, which block the main thread, as a collective or an op would.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import random
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from pipemorph.spec.layout import Layout, Wire
from pipemorph.spec.mesh import DATA_DIMENSIONS, Coordinate
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.transport.message import (
    DIRECT_QUEUE,
    Direction,
    HoldTimes,
    SenderLoad,
    new_tuple,
)

log = logging.getLogger("pipemorph.trainer")

_FREE_AT = struct.Struct("d")
CHUNK_BYTES = 512 << 10
"""Most bytes that a rank sends to the next rank of its ring in one step of a reduction: as NCCL,
whose buffer of 4 MiB has 8 steps."""


@dataclass(frozen=True)
class FaultTrace:
    """Faults of a job. ``layout``: places of its ranks. ``half_duplex``: both directions of a
    direct route share a queue, as they may in torch.distributed; for comparisons."""

    faults: Sequence[Fault] = ()
    half_duplex: bool = False
    layout: Layout | None = None

    def find_link_faults(self, link: int, replica: int) -> list[Fault]:
        """Faults of a link and of the wire under it."""
        layout = self.layout
        if layout is None or layout.is_first:
            mine = [f for f in self.faults if f.link == link and f.replica == replica]
        else:
            mesh = layout.mesh
            mine = self._find_faults_between(
                mesh.find_rank(link, replica), mesh.find_rank(link + 1, replica)
            )
        return mine + (
            [] if layout is None else self._find_wire_faults(layout.find_link_wire(link, replica))
        )

    def _find_faults_between(self, rank: int, other: int) -> list[Fault]:
        """Faults of the link between the places of two ranks in the first layout."""
        assert self.layout is not None
        mesh, places = self.layout.mesh, {self.layout.places[rank], self.layout.places[other]}
        return [
            f
            for f in self.faults
            if f.link is not None
            and {mesh.find_rank(f.link, f.replica), mesh.find_rank(f.link + 1, f.replica)} == places
        ]

    def _find_wire_faults(self, wire: Wire) -> list[Fault]:
        return [f for f in self.faults if f.between is not None and sorted(f.between) == [*wire]]

    def make_reduction_faults(self, coordinate: Coordinate) -> ReductionFaults | None:
        """Faults of the gradient reduction of this rank's group; None if it has none."""
        mesh = coordinate.mesh
        group = mesh.find_data_group(coordinate.column)
        mine = [
            fault
            for fault in self.faults
            if fault.reduction == coordinate.stage and mesh.find_data_group(fault.replica) == group
        ]
        edges: list[list[Fault]] = []
        if self.layout is not None:
            ring = mesh.find_group(coordinate, DATA_DIMENSIONS)
            for at, wire in enumerate(self.layout.find_ring_wires(tuple(ring))):
                across = [*self._find_wire_faults(wire)]
                if not self.layout.is_first:
                    across += self._find_faults_between(ring[at], ring[(at + 1) % len(ring)])
                edges.append(_select_delays(across))
        return ReductionFaults(mine, edges) if mine or any(edges) else None

    def make_device_faults(self, rank: int) -> DeviceFaults | None:
        """Faults of a rank's current device; None if it has none."""
        place = rank if self.layout is None else self.layout.places[rank]
        mine = [fault for fault in self.faults if fault.device == place]
        return DeviceFaults(mine) if mine else None

    def make_shared_queue(self, link: int, replica: int) -> SharedQueue | None:
        """Make the shared queue of both directions of a link; None if it needs none."""
        needed = self.half_duplex and _select_delays(self.find_link_faults(link, replica))
        return SharedQueue.create() if needed else None


@dataclass
class _FaultEffects:
    """Effects of one fault on what it holds: messages of a link's direction, buckets, or ops."""

    messages: int = 0
    hold_seconds: float = 0.0
    first_iteration: int | None = None
    last_iteration: int | None = None

    def add_hold(self, messages: int, seconds: float, iteration: int) -> None:
        """Add messages that the fault held in an iteration, and the seconds."""
        self.messages += messages
        self.hold_seconds += seconds
        self.last_iteration = iteration
        if self.first_iteration is None:
            self.first_iteration = iteration

    def report(self, fault: Fault, held: str) -> dict[str, Any]:
        """Fault with its effects. ``held``: field of the number of messages."""
        return {
            **fault.model_dump(exclude_none=True),
            held: self.messages,
            "hold_seconds": self.hold_seconds,
            "first_iteration": self.first_iteration,
            "last_iteration": self.last_iteration,
        }


class LinkFaults:
    """Faults at one end of a link.

    They hold the messages that this end sends, on both routes: all queues share a bandwidth limit,
    while a delay occupies one queue. ``load``: of this rank, for the notes. ``shared``: the queue
    of the direct route, if both directions share it. The lower end, which sends forward, also cuts
    connections.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        sends: Direction,
        shared: SharedQueue | None = None,
        load: SenderLoad | None = None,
    ) -> None:
        self._faults = _select_delays(faults)
        self._relative = {i for i, f in enumerate(self._faults) if f.delay_forwards}
        """Faults whose delay is not computed yet."""
        self._shared = shared
        self._counts = [_FaultEffects() for _ in self._faults]
        self._random = random.Random(f"{self._faults} {sends}")  # reproducible in each run
        self._direction = sends
        self._queues: dict[int, float] = {}
        self._wire_free = 0.0
        self._iteration = 0
        self._began = 0.0
        self._cuts = [f for f in faults if f.sever is not None and sends is Direction.FORWARD]
        self._cut_record: list[dict[str, Any]] = []
        self.load = load if load is not None else SenderLoad()
        self.cut: Callable[[str], None] | None = None
        """Callback that cuts a connection, by name; None without an engine connection."""

    def begin_iteration(self, iteration: int, training_began: float) -> None:
        """Begin an iteration. Queues are not reset, even if the route changes."""
        self._iteration, self._began = iteration, training_began

    def hold_message(self, queue: int, nbytes: int, now: float) -> HoldTimes:
        """Hold a message that enters ``queue`` at ``now``; return its times.

        ``not_before``: 0 if no fault applies and the queue is free. A bandwidth limit holds back
        only the last byte, a delay also the first one.
        """
        load = self.load
        if not self._faults:
            return new_tuple(HoldTimes, (now, 0.0, 0.0, load.waited, load.inflated))
        if self._shared is None or queue != DIRECT_QUEUE:
            held = self._hold_in_queue(queue, nbytes, now)
        else:
            with self._shared.locked():
                self._queues[queue] = self._shared.free_at
                held = self._hold_in_queue(queue, nbytes, now)
                self._shared.free_at = self._queues[queue]
        return held._replace(waited=load.waited, inflated=load.inflated)

    def _hold_in_queue(self, queue: int, nbytes: int, now: float) -> HoldTimes:
        began = self._began
        active = [
            i for i, f in enumerate(self._faults) if _is_active(f, self._iteration, began, now)
        ]
        start = max(now, self._queues.get(queue, 0.0))
        for i in self._relative.intersection(active):
            self._compute_delay(i)
        if not active:
            return HoldTimes(start, start if start > now else 0.0)
        delay, rate = _combine_effects((self._faults[i] for i in active), self._random.random())
        sent = start
        if rate:
            start = max(start, self._wire_free)
            sent = self._wire_free = start + nbytes / rate
        done = sent + delay
        self._queues[queue] = done
        for i in active:
            self._counts[i].add_hold(1, done - start, self._iteration)
        return HoldTimes(start, done, delay)

    def _compute_delay(self, index: int) -> None:
        """Replace a delay in forwards by one in milliseconds, by this rank's newest forwards."""
        fault = self._faults[index]
        assert fault.delay_forwards is not None
        self._relative.discard(index)
        forwards = self.load.forwards
        if not forwards:
            log.warning(
                "fault trace: link %s: no forward was measured before delayForwards began, so it"
                " delays nothing; begin it later, under a control loop",
                fault.link,
            )
            return
        delay_ms = (fault.delay_ms or 0.0) + 1e3 * fault.delay_forwards * median(forwards)
        self._faults[index] = fault.model_copy(update={"delay_ms": round(delay_ms, 3)})

    @property
    def has_delays(self) -> bool:
        """True if there are faults that hold messages."""
        return bool(self._faults)

    @property
    def has_cuts(self) -> bool:
        """True if there are cuts to make."""
        return bool(self._cuts)

    def make_due_cuts(self, now: float) -> None:
        """Make the cuts that are due. Called between ops, so that they happen during an
        iteration."""
        # Restarted ranks do not repeat cuts whose iterations are over. Seconds count from the
        # restart.
        for fault in [f for f in self._cuts if _is_active(f, self._iteration, self._began, now)]:
            self._cuts.remove(fault)
            if self.cut is None:
                log.warning("fault trace: link %d has no engine connection to cut", fault.link)
            else:
                self.cut(str(fault.sever))
            applied = {"applied": self.cut is not None, "iteration": self._iteration}
            self._cut_record.append(fault.model_dump(exclude_none=True) | applied)

    def close(self) -> None:
        """Close the shared queue. Idempotent."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def report_effects(self) -> list[dict[str, Any]]:
        """Faults with their effects in this direction, one entry per fault."""
        held = [
            {**count.report(fault, "messages_held"), "direction": self._direction.label}
            for fault, count in zip(self._faults, self._counts, strict=True)
        ]
        return [*held, *self._cut_record]


class ReductionFaults:
    """Faults of the group in which this rank reduces its gradients. All ranks of the group call it.

    ``faults``: of the whole reduction. ``edges``: of each edge of the ring; a bucket goes round the
    ring in steps, each as long as on the slowest edge.
    """

    def __init__(self, faults: Sequence[Fault], edges: Sequence[Sequence[Fault]] = ()) -> None:
        self._whole, self._edges = len(faults), edges
        self._faults = [*faults, *{id(f): f for edge in edges for f in edge}.values()]
        self._counts = [_FaultEffects() for _ in self._faults]
        self._began: float | None = None
        self._iteration = 0

    def _select_active(self, faults: Sequence[Fault], iteration: int, now: float) -> list[Fault]:
        # The first call comes at most one iteration after training began.
        began = self._began = self._began or now
        return [f for f in faults if _is_active(f, iteration, began, now)]

    def hold_buckets(
        self, sent: Sequence[float], sizes: Sequence[int], iteration: int
    ) -> list[float]:
        """Wait until all buckets have arrived, and return their times. ``sent``: times at which the
        last rank of the group sent each bucket, wall clock. ``sizes``: bytes."""
        now, self._iteration = time.time(), iteration
        active = self._select_active(self._faults, iteration, now)
        if not active or not sizes:
            return list(sent)
        delay, rate = _combine_effects(f for f in active if f in self._faults[: self._whole])
        ends, free = [], 0.0
        for at, nbytes in zip(sent, sizes, strict=True):
            free = (
                max(at, free)
                + (nbytes / rate if rate else 0.0)
                + self._compute_ring_delay(nbytes, now)
            )
            ends.append(free + delay)
        for fault, count in zip(self._faults, self._counts, strict=True):
            if fault in active:
                count.add_hold(len(sizes), ends[-1] - sent[0], iteration)
        time.sleep(max(0.0, ends[-1] - now))
        return ends

    def _compute_ring_delay(self, nbytes: int, now: float) -> float:
        """Seconds that the faults of the edges add to the reduction of a bucket."""
        ranks = max(1, len(self._edges))
        chunk = min(CHUNK_BYTES, -(-nbytes // ranks))
        rounds = -(-nbytes // (chunk * ranks)) if chunk else 0
        slowest = max(
            (self.compute_edge_delay(at, chunk, now) for at in range(len(self._edges))), default=0.0
        )
        return 2 * (ranks - 1) * rounds * slowest

    def compute_edge_delay(self, at: int, nbytes: int, now: float) -> float:
        """Seconds that the faults of an edge add to a step of ``nbytes`` bytes."""
        if not self._edges:
            return 0.0
        delay, rate = _combine_effects(self._select_active(self._edges[at], self._iteration, now))
        return delay + (nbytes / rate if rate else 0.0)

    def report_effects(self) -> list[dict[str, Any]]:
        """Faults with their effects on this rank, one entry per fault."""
        pairs = zip(self._faults, self._counts, strict=True)
        return [count.report(fault, "buckets_held") for fault, count in pairs]


class DeviceFaults:
    """Faults of the device of this rank: its ops take longer, or it pauses."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._counts = [_FaultEffects() for _ in faults]
        self._began: float | None = None
        self._iteration: int | None = None

    def hold_op(self, start: float, iteration: int) -> None:
        """Wait at the end of an op that began at ``start``, wall clock, so that it takes as long as
        on the slow device; after the first op of an iteration also for the pauses."""
        now = time.time()
        began = self._began = self._began or now
        first, self._iteration = iteration != self._iteration, iteration
        active = [_is_active(fault, iteration, began, now) for fault in self._faults]
        factor, pause = 1.0, 0.0
        for fault, count, slow in zip(self._faults, self._counts, active, strict=True):
            paused = (fault.pause_ms or 0.0) / 1e3 if first else 0.0
            if slow and (fault.slowdown or paused):
                factor *= fault.slowdown or 1.0
                pause += paused
                held = ((fault.slowdown or 1.0) - 1) * (now - start) + paused
                count.add_hold(1, held, iteration)
        if factor > 1.0 or pause:
            time.sleep((factor - 1.0) * max(0.0, now - start) + pause)

    def report_effects(self) -> list[dict[str, Any]]:
        """Faults with their effects on this rank, one entry per fault."""
        pairs = zip(self._faults, self._counts, strict=True)
        return [count.report(fault, "ops_held") for fault, count in pairs]


def _combine_effects(faults: Iterable[Fault], part: float = 0.5) -> tuple[float, float]:
    """Sum the delays, seconds, and find the least rate, bytes per second, 0 for none. ``part``:
    fraction of the jitter."""
    delay, rate = 0.0, 0.0
    for fault in faults:
        delay += ((fault.delay_ms or 0.0) + part * (fault.jitter_ms or 0.0)) / 1e3
        if fault.bandwidth_mbps is not None:
            limit = fault.bandwidth_mbps * 1e6 / 8
            rate = limit if not rate else min(rate, limit)
    return delay, rate


def _has_begun(fault: Fault, iteration: int, began: float, now: float) -> bool:
    if _is_timed_in_seconds(fault):
        return now - began >= (fault.from_seconds or 0.0)
    return iteration >= (fault.from_iteration or 0)


def _is_active(fault: Fault, iteration: int, began: float, now: float) -> bool:
    if _is_timed_in_seconds(fault):
        ended = fault.to_seconds is not None and now - began >= fault.to_seconds
    else:
        ended = fault.to_iteration is not None and iteration >= fault.to_iteration
    return not ended and _has_begun(fault, iteration, began, now)


def _select_delays(faults: Sequence[Fault]) -> list[Fault]:
    """Faults that hold messages, without those that cut connections."""
    return [f for f in faults if f.delay_ms or f.delay_forwards or f.jitter_ms or f.bandwidth_mbps]


def _is_timed_in_seconds(fault: Fault) -> bool:
    return fault.from_seconds is not None or fault.to_seconds is not None


class SharedQueue:
    """Queue that both directions of a link share: the time from which it is free (wall clock,
    seconds), in memory that two processes of one machine map.

    The lower stage creates it and sends its :attr:`name` to the upper stage. The memory is
    anonymous, so it vanishes with the processes.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)

    @staticmethod
    def create() -> SharedQueue:
        fd = os.memfd_create("pipemorph-queue")
        os.ftruncate(fd, mmap.PAGESIZE)
        return SharedQueue(fd)

    @property
    def name(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @staticmethod
    def open(name: str, link: int) -> SharedQueue:
        """Map the lower stage's queue. Raises :class:`PipelineError` if it cannot be opened."""
        try:
            return SharedQueue(os.open(name, os.O_RDWR))
        except OSError as error:
            raise PipelineError(
                f"link {link}: a fault trace on a half-duplex direct route needs both ranks on "
                f"one machine; the neighbour's queue cannot be opened ({error.strerror})"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the queue, to read and set :attr:`free_at` atomically."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    @property
    def free_at(self) -> float:
        return float(_FREE_AT.unpack_from(self._memory)[0])

    @free_at.setter
    def free_at(self, value: float) -> None:
        _FREE_AT.pack_into(self._memory, 0, value)

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)
