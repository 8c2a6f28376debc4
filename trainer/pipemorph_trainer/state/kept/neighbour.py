"""Sends the newest copy of each rank's state to another pod, whose memory outlives this one's.

Pods form a ring: a rank sends to one of the next pod. A thread does so in *rounds*, over a group of
its own: the ranks agree on the newest iteration of which all have a copy; each sends its copy and
receives another's, in pieces; and once all have theirs, that iteration is *safe*. Until a newer one
is safe, all ranks keep their own copies of it, since those of one iteration belong together, also
after a rank is lost: the next generation may begin with it.

A round has the time of an iteration. The training thread waits for one that takes longer
(:meth:`Neighbour.await_safe`), so that it is bounded how many iterations are repeated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipemorph_trainer.errors import first_sentence
from pipemorph_trainer.state.kept.copies import Copy
from pipemorph_trainer.state.kept.exchange import (
    Head,
    receive_body,
    receive_head,
    send_body,
    send_head,
)
from pipemorph_trainer.state.kept.held import HeldCopies
from pipemorph_trainer.state.kept.slots import Slot, Slots
from pipemorph_trainer.topology.groups import abandon

log = logging.getLogger("pipemorph.trainer")

JOIN_SECONDS = 5.0
"""Longest wait for the thread after a failure."""
_END = -1
"""In place of an iteration: there will be no other round."""


class Ring:
    """Who sends to whom. ``pods``: of every rank, which pod it is in."""

    def __init__(self, pods: Sequence[Hashable]) -> None:
        ranks: dict[Hashable, list[int]] = {}
        for rank, pod in enumerate(pods):
            ranks.setdefault(pod, []).append(rank)
        self._pods = list(ranks.values())

    @property
    def pods(self) -> int:
        return len(self._pods)

    def _place(self, rank: int) -> tuple[int, int]:
        """The pod of a rank, and its number in it."""
        return next((p, mine.index(rank)) for p, mine in enumerate(self._pods) if rank in mine)

    def target(self, rank: int) -> int:
        """To whom a rank sends."""
        pod, number = self._place(rank)
        following = self._pods[(pod + 1) % len(self._pods)]
        return following[number % len(following)]

    def sources(self, rank: int) -> list[int]:
        """From whom a rank receives."""
        pod, _ = self._place(rank)
        return [each for each in self._pods[pod - 1] if self.target(each) == rank]

    def sends_first(self, rank: int) -> bool:
        """Whether a rank sends before it receives: not in every second pod, so that no ring of
        ranks waits for each other."""
        return self._place(rank)[0] % 2 == 0


class Neighbour:
    """The copies that this rank sends to ``ring``'s next pod, and those it receives. ``group``: all
    ranks, used by nobody else. ``deadline``: longest wait for a message, seconds."""

    def __init__(
        self,
        name: str,
        ring: Ring,
        slots: Slots,
        held: HeldCopies,
        *,
        group: dist.ProcessGroup,
        deadline: float,
    ) -> None:
        self._name, self._slots, self._held, self._group = name, slots, held, group
        self._deadline = timedelta(seconds=deadline)
        rank = dist.get_rank()
        self._target, self._sources = ring.target(rank), ring.sources(rank)
        self._sends_first = ring.sends_first(rank)
        self._changed = threading.Condition()
        self._newest = self._tried = _END
        """The newest iteration that can be sent, and that of the last round."""
        self._ending = self._abandoned = False
        self._pinned: Slot | None = None
        """The copy of the safe iteration."""
        self.safe = _END
        """The newest iteration of which all ranks have a copy in another pod; -1: none."""
        self._over = False
        """Whether there is no other round, for whatever reason."""
        self._thread = threading.Thread(target=self._run, name="pipemorph-neighbour", daemon=True)
        self._thread.start()

    # --- for the training thread ---------------------------------------------------------------

    def offer(self, iteration: int) -> None:
        """The copy of an iteration is whole, and does not change any more. Does not wait."""
        with self._changed:
            self._newest = max(self._newest, iteration)
            self._changed.notify_all()

    def end(self, why: str = "") -> None:
        """Tell all ranks, in the next round, that there will be no other. Does not wait."""
        with self._changed:
            if why and not self._ending:
                log.warning("%s: no copies go to another pod any more: %s", self._name, why)
            self._ending = True
            self._changed.notify_all()

    @property
    def offered(self) -> int:
        """The newest iteration that was offered; -1: none."""
        return self._newest

    def await_safe(self, iteration: int) -> None:
        """Wait until an iteration or a newer one is safe, or there is no other round. Ends the
        rounds if that takes longer than the deadline of a message."""
        seconds = self._deadline.total_seconds()
        with self._changed:
            if self._changed.wait_for(
                lambda: self.safe >= iteration or self._ending or self._over, seconds
            ):
                return
        self.end(f"that of iteration {iteration} was not there after {seconds:g} s")

    def close(self, *, goodbye: bool) -> None:
        """End the thread, and give up what is on its way: at once, or with ``goodbye``, when all
        ranks do so, after a moment."""
        self.end()
        if goodbye:
            # A copy that is under way is of no use any more: not worth more than a moment.
            self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            with self._changed:
                self._abandoned = True
            abandon(self._group, "gloo")
            self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            log.warning("%s: the copy for another pod is still on its way", self._name)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        whole = False
        try:
            while self._round():
                pass
            whole = True
        except (RuntimeError, OSError) as error:
            # A lost rank ends the iteration as well, with a better message.
            if not self._abandoned:
                log.warning(
                    "%s: no copies go to another pod any more: %s",
                    self._name, first_sentence(error),
                )  # fmt: skip
        finally:
            if not whole and not self._abandoned:
                # So that the others do not wait for this rank.
                abandon(self._group, "gloo")
            # After a failure the next generation may need what is safe; else nobody does.
            self._slots.unpin_all(None if whole else self._pinned)
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _round(self) -> bool:
        """One round. Returns whether there is another."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._newest > self._tried)
            newest = _END if self._ending else self._newest
            pinned = self._slots.pin()
        agreed = self._least(newest)
        if agreed == _END:
            return False
        with self._changed:
            self._tried = agreed
        mine = None
        for slot in pinned:
            if mine is None and slot.offer is not None and slot.offer.iteration == agreed:
                mine = slot
            else:
                self._slots.unpin(slot)
        copy = mine.copy if mine is not None else None
        made, heads = self._exchange_heads(copy)
        complete = copy is not None and len(made) == len(self._sources)
        verdict = self._least(_END if self._ending else int(complete))
        if verdict > 0:
            assert copy is not None
            good = self._exchange_bodies(copy, made, heads)
            # Before all know it: the next generation may begin at any moment.
            verdict = self._least(_END if self._ending else int(good))
        if verdict > 0:
            self._is_safe(agreed, mine)
            return True
        for each in made.values():
            each.begin()
        if mine is not None:
            self._slots.unpin(mine)
        return verdict != _END

    def _exchange_heads(self, mine: Copy | None) -> tuple[dict[int, Copy], dict[int, Head]]:
        """Tell what is to come. Returns the copies to receive into, by rank, and what they get."""
        heads: dict[int, Head | None] = {}
        for sends in (self._sends_first, not self._sends_first):
            if sends:
                send_head(mine, self._target, self._group)
            else:
                heads = {each: receive_head(each, self._group) for each in self._sources}
        there = {source: head for source, head in heads.items() if head is not None}
        made = {}
        for source, head in there.items():
            try:
                made[source] = self._held.room(source, head)
            except OSError as error:
                self.end(f"rank {source}: {error.strerror}")
        return made, there

    def _exchange_bodies(self, mine: Copy, made: dict[int, Copy], heads: dict[int, Head]) -> bool:
        """Send and receive. Returns whether all bytes came as they were sent."""
        good = True
        for sends in (self._sends_first, not self._sends_first):
            if sends:
                # Whoever ends the rounds may write to the copies that were pinned: then what comes
                # has another checksum.
                send_body(mine, self._target, self._group, self._wait)
                continue
            for source, copy in made.items():
                head = heads[source]
                came = receive_body(copy, head, source, self._group, self._wait)
                if came:
                    copy.finish(head.mark)
                else:
                    log.warning("%s: the copy of rank %d came with other bytes", self._name, source)
                good = good and came
        return good

    def _is_safe(self, iteration: int, mine: Slot | None) -> None:
        for source in self._sources:
            self._held.received(source)
        if self.safe != _END:
            # With the first round of a generation a new layout may be on trial.
            self._held.keep_of(self._sources)
        if self._pinned is not None:
            self._slots.unpin(self._pinned)
        self._pinned = mine
        with self._changed:
            self.safe = iteration
            self._changed.notify_all()

    def _least(self, value: int) -> int:
        """The least of the values of all ranks."""
        found = torch.tensor([value], dtype=torch.int64)
        work: Any = dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._wait(work)
        return int(found)

    def _wait(self, work: Any) -> None:
        work.wait(self._deadline)
