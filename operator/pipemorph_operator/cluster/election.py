"""Leader election by a Lease (coordination.k8s.io/v1): of several replicas one acts at a time.

The rules are those of Kubernetes' own controllers. The holder renews the Lease and stops writing if
it could not for two thirds of the Lease's duration. Another replica takes the Lease when it has not
seen it change for the whole duration, or at once if it was released. Each replica judges by its own
clock only, so clocks need not agree; a write is based on the resourceVersion that was read, so of
two replicas that take the Lease one succeeds. Operator and ingest have a Lease each.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from pipemorph.arguments import whole_number
from pipemorph_operator.cluster.client import REQUEST_ERRORS, ApiRefused, Cluster, path, reason_of
from pipemorph_operator.cluster.events import Event, emit
from pipemorph_operator.metrics import LEADS
from pipemorph_operator.names import LABEL_LEADER, OPERATOR_OWNER

log = logging.getLogger("pipemorph.election")

API_VERSION, KIND = "coordination.k8s.io/v1", "Lease"
DURATION_SECONDS = 6
"""Default duration. Longer ones, as of controllers that exit when they lose their lease, would only
delay a takeover."""
ACT_PART, RETRY_PART = 2 / 3, 1 / 6
"""Parts of the duration: how long the holder may act after a renewal; the time between tries."""
CONFLICT = 409
CHECK_SECONDS, RETRY_SECONDS = 5.0, 0.5
REMOVE_SECONDS = 1.0
"""Limit for the removal of a label; the Lease of a leader that stops lasts longer."""

Work = Callable[[], Coroutine[Any, Any, None]]


class NotLeader(ConnectionError):
    """This process may not write: it does not hold its Lease, or could not renew it in time."""


def clock() -> float:
    """Seconds that also pass while the machine is suspended, unlike those of time.monotonic."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Election:
    """A candidate. ``identity`` must be unique among living processes; one that starts again under
    its identity takes its Lease at once."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        identity: str,
        *,
        component: str = OPERATOR_OWNER,
        seconds: int = DURATION_SECONDS,
        outlasts_renewals: bool = False,
        clock: Callable[[], float] = clock,
    ) -> None:
        """``component``: who elects. ``seconds``: duration of the Lease. ``outlasts_renewals``:
        whether the work goes on, without writes, while the Lease cannot be renewed, and ends when
        another holder is read; an API server that is away for all elects no other leader."""
        self._cluster = cluster
        self._about = {"namespace": namespace, "name": name}
        self._identity = identity
        self._component = component
        self._seconds = seconds
        self._outlasts_renewals = outlasts_renewals
        self._clock = clock
        self._act_until = float("-inf")
        self._works = False
        """Whether the leader's work runs."""
        self.term = 0
        """Term in which this process leads: ``leaseTransitions`` of the Lease that it holds. A
        later leader has a higher one, unless the Lease was deleted while no process had read it."""
        self._failing = False
        self._read: dict[str, Any] | None = None
        """The Lease as last read or written; None if it does not exist, or must be read again."""
        self._spec: dict[str, Any] | None = None
        self._changed_at = 0.0
        self.known = False
        """Whether the Lease has been read once."""
        self._held = False
        """Whether this process has held it."""
        self._newest_term = -1
        """Highest term read or written; a Lease that was deleted goes on from it."""

    @staticmethod
    def configured(
        cluster: Cluster,
        options: argparse.Namespace,
        component: str,
        *,
        outlasts_renewals: bool = False,
    ) -> Election:
        """The candidate of ``options`` (:func:`add_options`)."""
        namespace, name = options.lease
        return Election(
            cluster,
            namespace,
            name,
            options.identity or f"{socket.gethostname()}_{uuid.uuid4()}",
            component=component,
            seconds=options.lease_seconds,
            outlasts_renewals=outlasts_renewals,
        )

    @property
    def leads(self) -> bool:
        """Whether this process may act now."""
        return self._clock() < self._act_until

    @property
    def stands_by(self) -> bool:
        """Whether another process holds the Lease, as last read."""
        return bool(self.holder) and not self.is_mine

    def permit(self) -> float:
        """Seconds for which this process may still act. Raises :class:`NotLeader`."""
        left = self._act_until - self._clock()
        if left <= 0:
            raise NotLeader(f"this replica does not lead any more: {self.state()}")
        return left

    def state(self) -> str:
        """Who leads, in one line."""
        if self.leads:
            return f"{self._identity} leads"
        if self._works and self._outlasts_renewals:
            return f"{self._identity} leads and writes nothing: its Lease cannot be renewed"
        other = "" if self.is_mine else self.holder
        return f"{self._identity} stands by; {other or 'nobody'} leads"

    async def run(self, lead: Work, stop: asyncio.Event) -> None:
        """Run ``lead`` whenever this process leads, until ``stop`` is set.

        ``lead`` runs until it is cancelled, because the Lease was lost or the process stops; the
        Lease is then released. Raises what ``lead`` raises.
        """
        while not stop.is_set():
            if await self._round():
                await self._lead(lead, stop)
            await self._pause(stop)

    async def _lead(self, lead: Work, stop: asyncio.Event) -> None:
        log.info("%s leads", self._identity)
        self._works = True
        LEADS[self._component].set(1)
        work = asyncio.create_task(lead())
        tell = asyncio.create_task(self._tell())
        try:
            while self._goes_on and not stop.is_set() and not work.done():
                await self._pause(stop, work)
                if not stop.is_set():
                    await self._round()
            if work.done():
                work.result()
                raise RuntimeError("the leader's work has ended")
        finally:
            for task in (work, tell):
                task.cancel()
            await asyncio.wait((work, tell))
            self._works = False
            LEADS[self._component].set(0)
            if self.leads:
                await self._release()
            log.warning("%s does not lead any more", self._identity)

    @property
    def _goes_on(self) -> bool:
        """Whether the leader's work may go on."""
        return self.leads or (self._outlasts_renewals and self.is_mine)

    async def _pause(self, stop: asyncio.Event, *ends: asyncio.Future[None]) -> None:
        """Wait for the next try, ``stop``, or the first of ``ends``."""
        seconds = self._seconds * RETRY_PART * random.uniform(0.8, 1.2)
        left = (self._act_until if self.leads else self.free_at) - self._clock()
        if left > 0:
            seconds = min(seconds, left + 0.01)
        stopping: asyncio.Future[Any] = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, *ends), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    # --- the Lease ------------------------------------------------------------------------

    async def _round(self) -> bool:
        """Read the Lease, and take or renew it if this process may. Returns whether it holds it."""
        began = self._clock()
        limit = self._seconds * ACT_PART / 2
        if self.leads:
            limit = min(limit, self._act_until - began)
        try:
            async with asyncio.timeout(limit):
                if not self.leads or self._read is None:
                    await self._look()
                # Work that runs has ended its turn if another may have led since the last renewal.
                overtaken = self._works and not self.leads and not self.is_mine
                if overtaken or not self.may_be_taken:
                    self._act_until = float("-inf")
                    return False
                await self._write(self._identity)
        except REQUEST_ERRORS as error:
            self._read = None  # Somebody else may have written it: read it again.
            conflict = isinstance(error, ApiRefused) and error.status == CONFLICT
            if not (conflict or self._failing):
                self._failing = True
                log.warning("the Lease cannot be taken or renewed: %s", reason_of(error))
            return False
        self._failing = False
        self.term = self.lease_term
        self._act_until = began + self._seconds * ACT_PART
        return True

    @property
    def holder(self) -> str:
        """Identity of who holds it, as far as known; empty if nobody does."""
        return (self._spec or {}).get("holderIdentity") or ""

    @property
    def lease_term(self) -> int:
        """Number of the holder: each process that takes the Lease has a higher one."""
        return int((self._spec or {}).get("leaseTransitions") or 0)

    @property
    def is_mine(self) -> bool:
        return self.holder == self._identity

    def observe(self, lease: dict[str, Any] | None) -> None:
        """Take note of what was read: None if it does not exist."""
        self.known = True
        self._read = lease
        spec = lease.get("spec") or {} if lease is not None else None
        term = (spec or {}).get("leaseTransitions")
        self._newest_term = max(self._newest_term, -1 if term is None else int(term))
        if spec != self._spec:
            self._spec, self._changed_at = spec, self._clock()

    async def _look(self) -> None:
        """Read the Lease. Raises :data:`~.client.REQUEST_ERRORS`."""
        self.observe(await self._cluster.get(path(KIND, **self._about)))

    @property
    def free_at(self) -> float:
        """When the Lease of another holder may be taken, if it does not change until then."""
        return self._changed_at + ((self._spec or {}).get("leaseDurationSeconds") or self._seconds)

    @property
    def may_be_taken(self) -> bool:
        return self.holder in ("", self._identity) or self._clock() >= self.free_at

    async def _write(self, holder: str) -> None:
        """Write the Lease, based on what was read; ``holder``: empty to leave it to anybody. Raises
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
        if self._read is not None:
            self.observe(await self._cluster.replace(self._read | {"spec": spec}))
            self._held |= bool(holder)
            return
        about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": dict(self._about)}
        made = await self._cluster.create(about | {"spec": spec}, self._component)
        if made is None:
            raise ApiRefused(CONFLICT, "AlreadyExists", "another replica has made the Lease")
        self.observe(made)
        self._held |= bool(holder)

    async def _release(self) -> None:
        """Let another replica take the Lease at once. It takes it a little later if this fails."""
        limit = self._act_until - self._clock()
        self._act_until = float("-inf")
        try:
            async with asyncio.timeout(limit):
                if self._read is None:
                    await self._look()
                if self.is_mine:
                    await self._write("")
        except REQUEST_ERRORS as error:
            log.warning("the Lease could not be released: %s", reason_of(error))

    async def _tell(self) -> None:
        about = dict((self._read or {}).get("metadata") or {})
        said = Event("Normal", "LeaderElection", f"{self._identity} became leader")
        try:
            await emit(
                self._cluster, about, said, self._component, kind=KIND, api_version=API_VERSION
            )
        except REQUEST_ERRORS as error:
            log.warning("the event could not be written: %s", reason_of(error))


class LeaderLabel:
    """The label of the pod that leads, by which a Service selects it.

    The leader labels its own pod and no other one of its Deployment, and checks that every few
    seconds: a leader that died may still have the label, and so may a container that was started
    again in its pod. Until the label is removed there, requests that meet that pod are answered
    with 503.

    ``pod``: name of this process's pod. ``selector``: label selector of all pods of its
    Deployment. ``owner``: field owner of the label."""

    def __init__(
        self, cluster: Cluster, namespace: str, pod: str, selector: str, *, owner: str
    ) -> None:
        self._cluster = cluster
        self._namespace, self._pod = namespace, pod
        self._selector, self._owner = selector, owner

    async def hold(self, leading: Cluster) -> None:
        """Label this pod alone, and check the labels again, until cancelled. ``leading``: client
        that writes only while this process leads."""
        failing = False
        while True:
            try:
                await self._take(leading)
                failing = False
            except REQUEST_ERRORS as error:
                if not failing:
                    log.warning("the leader's pod could not be labelled: %s", reason_of(error))
                failing = True
            await asyncio.sleep(RETRY_SECONDS if failing else CHECK_SECONDS)

    async def _take(self, leading: Cluster) -> None:
        labelled = await leading.list(
            path("Pod", self._namespace), labels=f"{self._selector},{LABEL_LEADER}=true"
        )
        pods = {pod["metadata"]["name"] for pod in labelled}
        for other in sorted(pods - {self._pod}):
            await self._write(leading, other, None)
            log.info("removed the leader's label of pod %s", other)
        if self._pod not in pods:
            await self._write(leading, self._pod, "true")

    async def remove(self) -> None:
        """Remove the label of this pod. If that fails, the next leader removes it."""
        try:
            async with asyncio.timeout(REMOVE_SECONDS):
                await self._write(self._cluster, self._pod, None)
        except REQUEST_ERRORS as error:
            log.warning("the leader's label could not be removed: %s", reason_of(error))

    async def _write(self, cluster: Cluster, pod: str, value: str | None) -> None:
        changes = {"metadata": {"labels": {LABEL_LEADER: value}}}
        await cluster.patch(path("Pod", self._namespace, pod), changes, self._owner)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :meth:`Election.configured`."""
    parser.add_argument(
        "--lease",
        type=_namespaced,
        required=True,
        metavar="NAMESPACE/NAME",
        help="the Lease that the leader holds; it is made if it does not exist",
    )
    parser.add_argument(
        "--lease-seconds",
        type=whole_number(1, 3600),
        default=DURATION_SECONDS,
        help="a replica takes the Lease of another that has not renewed it for so long"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--identity",
        help="name of this process in the Lease, such as its pod's; no two may have the same one"
        " at a time (default: random)",
    )


def _namespaced(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAMESPACE/NAME")
    return namespace, name
