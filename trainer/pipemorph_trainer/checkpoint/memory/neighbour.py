"""Sends the newest copy of each rank's state to another pod, whose memory outlives this pod's.

Pods form a ring: a rank sends to a rank of the next pod. A thread does so in *rounds*, over a group
of its own. The ranks agree on the newest iteration of which all have a copy. Each sends its copy
and receives another's, in pieces. When all have received theirs, that iteration is *safe*. Until a
newer iteration is safe, all ranks keep their own copies of this one: after the loss of a rank, the
next generation may resume it, and needs the copies of all ranks.

A round may take as long as an iteration. The training thread waits for a longer round
(:meth:`NeighbourReplicator.await_safe`), which bounds the number of iterations that are repeated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipemorph_trainer.checkpoint.memory.copy_slots import CopySlot, CopySlots
from pipemorph_trainer.checkpoint.memory.copy_transfer import (
    CopyHeader,
    receive_body,
    receive_header,
    send_body,
    send_header,
)
from pipemorph_trainer.checkpoint.memory.neighbour_copies import NeighbourCopies
from pipemorph_trainer.checkpoint.memory.state_copy import StateCopy
from pipemorph_trainer.errors import first_sentence
from pipemorph_trainer.topology.groups import abort_group

log = logging.getLogger("pipemorph.trainer")

JOIN_SECONDS = 5.0
"""Timeout for the thread to end after a failure."""
_END = -1
"""Sent in place of an iteration: there is no further round."""


class PodRing:
    """Ring of pods that receive each other's copies. ``pods``: the pod of each rank."""

    def __init__(self, pods: Sequence[Hashable]) -> None:
        ranks: dict[Hashable, list[int]] = {}
        for rank, pod in enumerate(pods):
            ranks.setdefault(pod, []).append(rank)
        self._pods = list(ranks.values())

    @property
    def pods(self) -> int:
        return len(self._pods)

    def _locate_rank(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's pod in the ring, and the rank's number in its pod."""
        return next((p, mine.index(rank)) for p, mine in enumerate(self._pods) if rank in mine)

    def find_target(self, rank: int) -> int:
        """Return the rank to which a rank sends."""
        pod, number = self._locate_rank(rank)
        next_pod = self._pods[(pod + 1) % len(self._pods)]
        return next_pod[number % len(next_pod)]

    def find_sources(self, rank: int) -> list[int]:
        """List the ranks from which a rank receives."""
        pod, _ = self._locate_rank(rank)
        return [each for each in self._pods[pod - 1] if self.find_target(each) == rank]

    def sends_first(self, rank: int) -> bool:
        """True if a rank sends before it receives: in every second pod, so that ranks do not wait
        for each other in a ring."""
        return self._locate_rank(rank)[0] % 2 == 0


class NeighbourReplicator:
    """Sends this rank's copies to the next pod of ``ring``, and receives others. ``group``: all
    ranks, used for nothing else. ``deadline``: longest wait for a message, seconds."""

    def __init__(
        self,
        name: str,
        ring: PodRing,
        slots: CopySlots,
        held: NeighbourCopies,
        *,
        group: dist.ProcessGroup,
        deadline: float,
    ) -> None:
        self._name, self._slots, self._held, self._group = name, slots, held, group
        self._deadline = timedelta(seconds=deadline)
        rank = dist.get_rank()
        self._target, self._sources = ring.find_target(rank), ring.find_sources(rank)
        self._sends_first = ring.sends_first(rank)
        self._changed = threading.Condition()
        self._newest = self._tried = _END
        """Newest iteration that can be sent, and iteration of the last round."""
        self._ending = self._abandoned = False
        self._pinned: CopySlot | None = None
        """Slot with the copy of the safe iteration."""
        self.safe_iteration = _END
        """Newest iteration of which all ranks have a copy in another pod; -1: none."""
        self._over = False
        """True after the last round."""
        self._thread = threading.Thread(target=self._run, name="pipemorph-neighbour", daemon=True)
        self._thread.start()

    # --- for the training thread ---------------------------------------------------------------

    def offer_copy(self, iteration: int) -> None:
        """Offer the copy of an iteration, which is whole and does not change. Does not wait."""
        with self._changed:
            self._newest = max(self._newest, iteration)
            self._changed.notify_all()

    def end_rounds(self, why: str = "") -> None:
        """End the rounds: all ranks learn of it in the next one. Does not wait."""
        with self._changed:
            if why and not self._ending:
                log.warning("%s: no copies go to another pod any more: %s", self._name, why)
            self._ending = True
            self._changed.notify_all()

    @property
    def newest_offered(self) -> int:
        """Newest iteration that was offered; -1: none."""
        return self._newest

    def await_safe(self, iteration: int) -> None:
        """Wait until an iteration or a newer one is safe, or the rounds have ended. Ends the rounds
        if that takes longer than the deadline of a message."""
        seconds = self._deadline.total_seconds()
        with self._changed:
            if self._changed.wait_for(
                lambda: self.safe_iteration >= iteration or self._ending or self._over, seconds
            ):
                return
        self.end_rounds(f"the copy of iteration {iteration} did not arrive within {seconds:g} s")

    def close(self, *, goodbye: bool) -> None:
        """End the thread and abort transfers: at once, or after a moment with ``goodbye``, which
        all ranks give."""
        self.end_rounds()
        if goodbye:
            # A copy in transfer is no longer needed, so it gets only a moment to complete.
            self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            with self._changed:
                self._abandoned = True
            abort_group(self._group, "gloo")
            self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            log.warning("%s: the copy for another pod is still being sent", self._name)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        whole = False
        try:
            while self._run_round():
                pass
            whole = True
        except (RuntimeError, OSError) as error:
            # A lost rank also ends the iteration, with a better message.
            if not self._abandoned:
                log.warning(
                    "%s: no copies go to another pod any more: %s",
                    self._name, first_sentence(error),
                )  # fmt: skip
        finally:
            if not whole and not self._abandoned:
                # Ends the wait of the other ranks for this one.
                abort_group(self._group, "gloo")
            # After a failure the next generation may need the safe copy.
            self._slots.unpin_all(None if whole else self._pinned)
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _run_round(self) -> bool:
        """Run a round. Returns True if another follows."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._newest > self._tried)
            newest = _END if self._ending else self._newest
            pinned = self._slots.pin_newest()
        agreed = self._reduce_minimum(newest)
        if agreed == _END:
            return False
        with self._changed:
            self._tried = agreed
        mine = None
        for slot in pinned:
            if mine is None and slot.offer is not None and slot.offer.iteration == agreed:
                mine = slot
            else:
                self._slots.unpin_slot(slot)
        copy = mine.copy if mine is not None else None
        made, heads = self._exchange_headers(copy)
        complete = copy is not None and len(made) == len(self._sources)
        verdict = self._reduce_minimum(_END if self._ending else int(complete))
        if verdict > 0:
            assert copy is not None
            good = self._exchange_bodies(copy, made, heads)
            # Marked as whole before all ranks agree: the next generation may begin at any moment.
            verdict = self._reduce_minimum(_END if self._ending else int(good))
        if verdict > 0:
            self._record_safe(agreed, mine)
            return True
        for each in made.values():
            each.begin_write()
        if mine is not None:
            self._slots.unpin_slot(mine)
        return verdict != _END

    def _exchange_headers(
        self, mine: StateCopy | None
    ) -> tuple[dict[int, StateCopy], dict[int, CopyHeader]]:
        """Exchange heads. Returns the copies to receive into and the received heads, by rank."""
        heads: dict[int, CopyHeader | None] = {}
        for sends in (self._sends_first, not self._sends_first):
            if sends:
                send_header(mine, self._target, self._group)
            else:
                heads = {each: receive_header(each, self._group) for each in self._sources}
        there = {source: head for source, head in heads.items() if head is not None}
        made = {}
        for source, head in there.items():
            try:
                made[source] = self._held.begin_receive(source, head)
            except OSError as error:
                self.end_rounds(f"rank {source}: {error.strerror}")
        return made, there

    def _exchange_bodies(
        self, mine: StateCopy, made: dict[int, StateCopy], heads: dict[int, CopyHeader]
    ) -> bool:
        """Send and receive bodies. Returns True if all arrived as they were sent."""
        good = True
        for sends in (self._sends_first, not self._sends_first):
            if sends:
                # A rank that ends the rounds may write to its pinned copies; the receiver then gets
                # another checksum.
                send_body(mine, self._target, self._group, self._wait_for_work)
                continue
            for source, copy in made.items():
                head = heads[source]
                valid = receive_body(copy, head, source, self._group, self._wait_for_work)
                if valid:
                    copy.finish_write(head.mark)
                else:
                    log.warning("%s: the copy of rank %d has a bad checksum", self._name, source)
                good = good and valid
        return good

    def _record_safe(self, iteration: int, mine: CopySlot | None) -> None:
        """Mark an iteration as safe, and unpin the copy of the previous one."""
        for source in self._sources:
            self._held.finish_receive(source)
        if self.safe_iteration != _END:
            # In the first round of a generation, a new layout may still be on trial.
            self._held.remove_other_owners(self._sources)
        if self._pinned is not None:
            self._slots.unpin_slot(self._pinned)
        self._pinned = mine
        with self._changed:
            self.safe_iteration = iteration
            self._changed.notify_all()

    def _reduce_minimum(self, value: int) -> int:
        """Return the least of the values of all ranks."""
        found = torch.tensor([value], dtype=torch.int64)
        work: Any = dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._wait_for_work(work)
        return int(found)

    def _wait_for_work(self, work: Any) -> None:
        work.wait(self._deadline)
