"""One Lease (coordination.k8s.io/v1), as somebody sees it who may hold it.

Whether another's Lease has run out is judged by the own clock only, from when it was last seen to
change: clocks need not agree. A write is based on the resourceVersion that was read, so of several
that write at a time one succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pipemorph_operator.cluster.client import ApiRefused, Cluster, path

API_VERSION, KIND = "coordination.k8s.io/v1", "Lease"
DURATION_SECONDS = 6
"""Default duration. Longer ones, as of controllers that exit when they lose their lease, would only
delay a takeover."""
ACT_PART, RETRY_PART = 2 / 3, 1 / 6
"""Parts of the duration: how long the holder may act after a renewal; the time between tries."""
CONFLICT = 409


class NotLeader(ConnectionError):
    """This process may not write: it does not hold its Lease, or could not renew it in time."""


def clock() -> float:
    """Seconds that also pass while the machine is suspended, unlike those of time.monotonic."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """``identity`` must be unique among living processes. ``seconds``: the duration if this process
    holds it."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        identity: str,
        *,
        component: str,
        seconds: int,
        clock: Callable[[], float] = clock,
    ) -> None:
        self._cluster = cluster
        self._about = {"namespace": namespace, "name": name}
        self._identity = identity
        self._component = component
        self._seconds = seconds
        self._clock = clock
        self.read: dict[str, Any] | None = None
        """As last read or written; None if it does not exist, or must be read again."""
        self._spec: dict[str, Any] | None = None
        self._changed_at = 0.0
        self.known = False
        """Whether it has been looked for once."""
        self._held = False
        """Whether this process has held it."""
        self._newest_term = -1
        """Highest term read or written; a Lease that was deleted goes on from it."""

    @property
    def holder(self) -> str:
        """Identity of who holds it, as far as known; empty if nobody does."""
        return (self._spec or {}).get("holderIdentity") or ""

    @property
    def term(self) -> int:
        """Number of the holder: each process that takes the Lease has a higher one."""
        return int((self._spec or {}).get("leaseTransitions") or 0)

    @property
    def is_mine(self) -> bool:
        return self.holder == self._identity

    @property
    def metadata(self) -> dict[str, Any]:
        return dict((self.read or {}).get("metadata") or {})

    def observe(self, lease: dict[str, Any] | None) -> None:
        """Take note of what was read: None if it does not exist."""
        self.known = True
        self.read = lease
        spec = lease.get("spec") or {} if lease is not None else None
        term = (spec or {}).get("leaseTransitions")
        self._newest_term = max(self._newest_term, -1 if term is None else int(term))
        if spec != self._spec:
            self._spec, self._changed_at = spec, self._clock()

    async def look(self) -> None:
        """Read it. Raises :data:`~.client.REQUEST_ERRORS`."""
        self.observe(await self._cluster.get(path(KIND, **self._about)))

    @property
    def free_at(self) -> float:
        """When the Lease of another holder may be taken, if it does not change until then."""
        return self._changed_at + ((self._spec or {}).get("leaseDurationSeconds") or self._seconds)

    @property
    def may_be_taken(self) -> bool:
        return self.holder in ("", self._identity) or self._clock() >= self.free_at

    async def write(self, holder: str) -> None:
        """Write it, based on what was read; ``holder``: empty to leave it to anybody. Raises
        :data:`~.client.REQUEST_ERRORS`, :class:`ApiRefused` with 409 if somebody else has written
        it since."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # For people to read.
        before = self._spec or {}
        spec: dict[str, Any] = before | {
            "holderIdentity": holder,
            "leaseDurationSeconds": self._seconds if holder else 1,
            "renewTime": now,
        }
        # A container that starts again under its identity is another holder, with a higher term.
        if holder and (self.holder != holder or not self._held):
            spec["acquireTime"] = now
            spec["leaseTransitions"] = self._newest_term + 1
        if self.read is not None:
            self.observe(await self._cluster.replace(self.read | {"spec": spec}))
            self._held |= bool(holder)
            return
        about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": dict(self._about)}
        made = await self._cluster.create(about | {"spec": spec}, self._component)
        if made is None:
            raise ApiRefused(CONFLICT, "AlreadyExists", "another replica has made the Lease")
        self.observe(made)
        self._held |= bool(holder)
