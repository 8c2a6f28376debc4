"""The seats of the ingest's replicas: who serves, and which jobs are whose.

A seat is a Lease. Who holds one is a member, and its jobs are those that :mod:`.dealing` deals to
its seat, over the seats of all members. Each replica reads all seats about once a second, and then
renews its own. A seat that was not seen to change for its whole duration is *vacated* by whoever
sees that: its holder is erased, based on the resourceVersion that was read. So a holder that others
take for dead finds out with its next renewal, which fails; and one that finds its seat as it left
it knows that nobody has served its jobs meanwhile, however long it could not renew it.

With each renewal a replica writes which members it has seen, after it has dropped the jobs that
these took from it. A new member serves when all others have seen it. So no job has two owners, but
for one that goes on while it is cut off from the API server: its writes are refused here.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipemorph_operator.cluster.client import (
    REQUEST_ERRORS,
    ApiRefused,
    Cluster,
    path,
    reason_of,
)
from pipemorph_operator.cluster.election import Work, identity_of
from pipemorph_operator.cluster.lease import (
    ACT_PART,
    API_VERSION,
    CONFLICT,
    DURATION_SECONDS,
    KIND,
    RETRY_PART,
    Lease,
    NotLeader,
    clock,
)
from pipemorph_operator.ingest.seats.dealing import seat_of
from pipemorph_operator.metrics import LEADS, MEMBERS
from pipemorph_operator.names import INGEST_OWNER

log = logging.getLogger("pipemorph.seats")

LABEL = "pipemorph.io/seats-of"
ADDRESS, SEEN = "pipemorph.io/address", "pipemorph.io/seen"
"""Annotations of a seat: where its holder listens, as ``host:port``, and which terms of other seats
it has seen, as ``seat=term seat=term``."""
MOST_SEATS = 16
"""As many as the chart grants the right to write."""
SOON = 1 / 4
"""Part of the usual time between tries while this replica waits to serve."""


class Member(NamedTuple):
    """Who holds a seat. ``term``: which holder of it. ``address``: empty if it tells none."""

    term: int
    address: str


class Seats:
    """A replica that takes one of ``count`` seats, ``NAME-0`` and so on. ``address``: where agents
    reach it, ``host:port``; empty if they shall not be told. ``on_change`` is called whenever other
    members have come or gone: jobs that are not this replica's any more must be dropped when it
    returns."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        identity: str,
        *,
        count: int,
        address: str = "",
        seconds: int = DURATION_SECONDS,
        clock: Callable[[], float] = clock,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._namespace, self._name = namespace, name
        self._identity, self._address = identity, address
        self._seconds, self._clock = seconds, clock
        self._own = [f"{name}-{i}" for i in range(count)]
        self._leases = {seat: self._lease(seat) for seat in self._own}
        self.on_change = on_change
        self.members: Mapping[str, Member] = {}
        """By seat, all that are held."""
        self.mine: str | None = None
        """The seat of this replica."""
        self.acts = False
        """Whether this replica serves."""
        self.known = False
        """Whether the seats have been read once."""
        self._read_since = False
        """Whether the seats have been read since others could see that this replica has its own: of
        two that take seats at a time, one sees the other then."""
        self._heard_at = float("-inf")
        self._act_until = float("-inf")
        self._failing = False

    @staticmethod
    def configured(cluster: Cluster, options: argparse.Namespace) -> Seats:
        """The replica of the ingest's options."""
        namespace, name = options.lease
        host = f"[{options.address}]" if ":" in options.address else options.address
        return Seats(
            cluster,
            namespace,
            name,
            identity_of(options),
            count=options.seats,
            address=f"{host}:{options.port}" if host else "",
            seconds=options.lease_seconds,
        )

    def serves(self, uid: str) -> bool:
        """Whether the job of this UID is this replica's now."""
        return self.acts and seat_of(uid, self.members) == self.mine

    def owner(self, uid: str) -> Member | None:
        """Whose the job is, as far as known; None if nobody's."""
        seat = seat_of(uid, self.members)
        return self.members[seat] if seat is not None else None

    @property
    def first(self) -> bool:
        """Whether this replica does what one of all does."""
        return self.acts and self.mine == min(self.members, key=number_of, default=None)

    @property
    def is_seen(self) -> bool:
        """Whether all others know this member, and so have dropped the jobs that are its own."""
        return self.mine is not None and self._read_since and not self._unseen_by()

    def permit(self) -> float:
        """Seconds for which this replica may write. Raises :class:`NotLeader`."""
        left = self._act_until - self._clock()
        if left <= 0:
            raise NotLeader(f"this replica could not renew its seat: {self.state()}")
        return left

    def state(self) -> str:
        """What this replica does, in one line."""
        number = len(self.members)
        serve = f"{number} replica{'s serve' if number != 1 else ' serves'}"
        if self.mine is None:
            return f"{self._identity} stands by; {serve}"
        has = f"{self._identity} has {self.mine}"
        if not self.acts:
            unseen = ", ".join(self._unseen_by())
            return f"{has}; {unseen} must see that first" if unseen else f"{has}, and will serve"
        return f"{has}; {serve}"

    async def run(self, work: Work, stop: asyncio.Event) -> None:
        """Take a seat and run ``work`` until the seat is lost or ``stop`` is set: then what this
        replica knows of jobs may be out of date. ``work`` runs until it is cancelled; the seat is
        then left to others. Raises what ``work`` raises."""
        working: asyncio.Task[None] | None = None
        try:
            while not stop.is_set():
                had = self.mine
                await self._round()
                if had is not None and self.mine is None:
                    log.warning("%s has lost %s", self._identity, had)
                    return
                if working is None and self.is_seen:
                    self.acts = True
                    LEADS[INGEST_OWNER].set(1)
                    log.info("%s", self.state())
                    working = asyncio.create_task(work())
                if had is not None or self.mine is None or self._read_since:
                    await self._pause(stop, working)
                if working is not None and working.done():
                    working.result()
                    raise RuntimeError("the work of this replica has ended")
        finally:
            self.acts = False
            LEADS[INGEST_OWNER].set(0)
            if working is not None:
                working.cancel()
                await asyncio.wait((working,))
            await self._leave()

    async def _pause(self, stop: asyncio.Event, working: asyncio.Task[None] | None) -> None:
        """Wait for the next try, ``stop``, or the end of ``working``."""
        seconds = self._seconds * RETRY_PART * random.uniform(0.8, 1.2)
        if working is None:
            seconds *= SOON
        stopping = asyncio.create_task(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopping] if working is None else [stopping, working]
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    # --- one round ------------------------------------------------------------------------

    async def _round(self) -> None:
        """Read all seats; vacate those of the dead; renew this replica's or take one."""
        began, had = self._clock(), self.mine
        try:
            async with asyncio.timeout(self._seconds * ACT_PART / 2):
                await self._read(began)
            if self.mine != had:
                return  # Lost: this replica has to start again before it takes another one.
            async with asyncio.timeout(self._seconds * ACT_PART / 2):
                await self._vacate()
                seat = self.mine or self._choice()
                if seat is not None:
                    await self._write(seat)
                    self.mine, self._act_until = seat, began + self._seconds * ACT_PART
            self._failing = False
        except REQUEST_ERRORS as error:
            # After a conflict the next round sees who has written.
            conflict = isinstance(error, ApiRefused) and error.status == CONFLICT
            if not (conflict or self._failing):
                self._failing = True
                log.warning("the seats cannot be read or written: %s", reason_of(error))
        self._count()

    async def _read(self, now: float) -> None:
        url = path(KIND, self._namespace)
        found = await self._cluster.list(url, labels=f"{LABEL}={self._name}")
        # Who could not hear others must not take them for silent: the API server was away.
        silence = now - self._heard_at - 2 * self._seconds * RETRY_PART
        self._heard_at, self.known = now, True
        by_name = {each["metadata"]["name"]: each for each in found}
        for seat in by_name.keys() - self._leases.keys():
            self._leases[seat] = self._lease(seat)  # The number of seats is being changed.
        for seat, lease in self._leases.items():
            if silence > 0 and lease.known:
                lease.excuse(silence)
            body = by_name.get(seat)
            # Objects in lists do not tell their kind.
            lease.observe(body and {"apiVersion": API_VERSION, "kind": KIND} | body)
        self._read_since = self.mine is not None
        if self.mine is not None and not self._leases[self.mine].is_mine:
            self.mine, self._act_until = None, float("-inf")
        self._count()

    async def _vacate(self) -> None:
        for seat, lease in self._leases.items():
            if lease.holder and seat != self.mine and lease.may_be_taken and not lease.is_mine:
                log.warning("%s is vacated: nothing is heard of %s", seat, lease.holder)
                try:
                    await lease.write("")
                except ApiRefused as refused:
                    # Another replica was faster, or it is no seat of this release: the own one
                    # is renewed all the same.
                    log.warning("%s is not vacated: %s", seat, reason_of(refused))
                self._count()

    def _choice(self) -> str | None:
        """The seat that this replica had before it started again, or else a free one."""
        before = [seat for seat in self._own if self._leases[seat].is_mine]
        free = [seat for seat in self._own if not self._leases[seat].holder]
        self._read_since = bool(before)
        return next(iter(before + free), None)

    async def _write(self, seat: str) -> None:
        others = sorted((name, each) for name, each in self.members.items() if name != seat)
        seen = " ".join(f"{name}={each.term}" for name, each in others)
        await self._leases[seat].write(self._identity, {ADDRESS: self._address, SEEN: seen})

    def _count(self) -> None:
        """Who is a member now."""
        members = {
            seat: Member(lease.term, lease.annotation(ADDRESS))
            for seat, lease in self._leases.items()
            if lease.holder
        }
        if members == self.members:
            return
        self.members = members
        MEMBERS.set(len(members))
        if self.acts:
            log.info("%s", self.state())
            self.on_change()

    def _unseen_by(self) -> list[str]:
        """Holders of other seats that have not told that they have seen this replica."""
        assert self.mine is not None
        told = f"{self.mine}={self._leases[self.mine].term}"
        return [
            lease.holder
            for seat, lease in self._leases.items()
            if lease.holder and seat != self.mine and told not in lease.annotation(SEEN).split()
        ]

    async def _leave(self) -> None:
        """Let others have the seat at once. It is vacated a little later if this fails."""
        limit = self._act_until - self._clock()
        self._act_until = float("-inf")
        if self.mine is None:
            return
        lease, self.mine = self._leases[self.mine], None
        try:
            async with asyncio.timeout(limit):
                await lease.look()
                if lease.is_mine:
                    await lease.write("")
        except REQUEST_ERRORS as error:
            log.warning("the seat could not be left: %s", reason_of(error))

    def _lease(self, seat: str) -> Lease:
        return Lease(
            self._cluster,
            self._namespace,
            seat,
            self._identity,
            component=INGEST_OWNER,
            seconds=self._seconds,
            clock=self._clock,
            labels={LABEL: self._name},
        )


def number_of(seat: str) -> int:
    return int(seat.rpartition("-")[2])
