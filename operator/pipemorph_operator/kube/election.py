"""Leader election by a Lease (coordination.k8s.io/v1): one of several replicas acts at a time.

The rules are those of Kubernetes' own controllers. The holder renews the Lease, and stops writing
if it could not renew it for two thirds of its duration. Another replica acquires a Lease that it
has seen unchanged for the whole duration, or that was released. Each replica uses its own clock
only, so clocks need not agree. A write names the resourceVersion that was read, so only one of two
concurrent writes succeeds. Operator and ingest have a Lease each.
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

from pipemorph.argument_types import whole_number_type
from pipemorph_operator.kube.client import (
    REQUEST_ERRORS,
    KubeApiError,
    KubeClient,
    build_path,
    describe_error,
)
from pipemorph_operator.kube.events import KubeEvent, emit_event
from pipemorph_operator.metrics import LEADS
from pipemorph_operator.names import LABEL_LEADER, OPERATOR_OWNER

log = logging.getLogger("pipemorph.election")

API_VERSION, KIND = "coordination.k8s.io/v1", "Lease"
DURATION_SECONDS = 6
"""Default duration of a Lease. Longer ones help controllers that exit on its loss; here, they would
only delay a takeover."""
WRITE_FRACTION, RETRY_FRACTION = 2 / 3, 1 / 6
"""Fractions of the duration: time to write after a renewal; time between tries."""
CONFLICT = 409
CHECK_SECONDS, RETRY_SECONDS = 5.0, 0.5
REMOVE_SECONDS = 1.0
"""Time limit for the removal of a label; the Lease of a stopping leader lasts longer."""

Work = Callable[[], Coroutine[Any, Any, None]]


class NotLeaderError(ConnectionError):
    """Raised if this process may not write: it does not hold its Lease, or renewed it too late."""


def read_boot_clock() -> float:
    """Seconds of a clock that also runs while the machine is suspended, unlike time.monotonic."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderElection:
    """Candidate of an election. ``identity`` must be unique among living processes; a process that
    restarts with its identity acquires its Lease at once."""

    def __init__(
        self,
        cluster: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        component: str = OPERATOR_OWNER,
        seconds: int = DURATION_SECONDS,
        outlasts_renewals: bool = False,
        clock: Callable[[], float] = read_boot_clock,
    ) -> None:
        """``component``: name of the program. ``seconds``: duration of the Lease.
        ``outlasts_renewals``: the work continues without writes while the Lease cannot be renewed,
        until another holder is read: without the API server, no other leader is elected."""
        self._cluster = cluster
        self._about = {"namespace": namespace, "name": name}
        self._identity = identity
        self._component = component
        self._seconds = seconds
        self._outlasts_renewals = outlasts_renewals
        self._clock = clock
        self._act_until = float("-inf")
        self._works = False
        """True while the leader's work runs."""
        self.term = 0
        """Term in which this process leads: ``leaseTransitions`` of the Lease that it holds. Later
        leaders have higher terms, unless the Lease was deleted before any process had read it."""
        self._failing = False
        self._read: dict[str, Any] | None = None
        """Lease as last read or written; None if it does not exist, or must be read again."""
        self._spec: dict[str, Any] | None = None
        self._changed_at = 0.0
        self.has_read_lease = False
        """True once the Lease has been read."""
        self._held = False
        """True once this process has held the Lease."""
        self._newest_term = -1
        """Highest term read or written; a Lease that is created again continues from it."""

    @staticmethod
    def from_options(
        cluster: KubeClient,
        options: argparse.Namespace,
        component: str,
        *,
        outlasts_renewals: bool = False,
    ) -> LeaderElection:
        """Candidate configured by ``options`` (:func:`add_election_options`)."""
        namespace, name = options.lease
        return LeaderElection(
            cluster,
            namespace,
            name,
            options.identity or f"{socket.gethostname()}_{uuid.uuid4()}",
            component=component,
            seconds=options.lease_seconds,
            outlasts_renewals=outlasts_renewals,
        )

    @property
    def is_leader(self) -> bool:
        """True if this process may write now."""
        return self._clock() < self._act_until

    @property
    def is_standby(self) -> bool:
        """True if another process holds the Lease, as last read."""
        return bool(self.holder) and not self.is_holder

    def remaining_write_seconds(self) -> float:
        """Remaining seconds in which this process may write. Raises :class:`NotLeaderError`."""
        remaining = self._act_until - self._clock()
        if remaining <= 0:
            raise NotLeaderError(f"this replica does not lead any more: {self.describe_state()}")
        return remaining

    def describe_state(self) -> str:
        """Line that names the leader."""
        if self.is_leader:
            return f"{self._identity} leads"
        if self._works and self._outlasts_renewals:
            return f"{self._identity} leads and writes nothing: its Lease cannot be renewed"
        other = "" if self.is_holder else self.holder
        return f"{self._identity} stands by; {other or 'no replica'} leads"

    async def run(self, lead: Work, stop: asyncio.Event) -> None:
        """Run ``lead`` whenever this process leads, until ``stop`` is set.

        Cancels ``lead`` when the Lease is lost or the process stops; then releases the Lease.
        Raises the exceptions of ``lead``.
        """
        while not stop.is_set():
            if await self._try_acquire_or_renew():
                await self._run_as_leader(lead, stop)
            await self._wait_for_next_try(stop)

    async def _run_as_leader(self, lead: Work, stop: asyncio.Event) -> None:
        log.info("%s leads", self._identity)
        self._works = True
        LEADS[self._component].set(1)
        work = asyncio.create_task(lead())
        event = asyncio.create_task(self._emit_leader_event())
        try:
            while self._may_continue and not stop.is_set() and not work.done():
                await self._wait_for_next_try(stop, work)
                if not stop.is_set():
                    await self._try_acquire_or_renew()
            if work.done():
                work.result()
                raise RuntimeError("the leader's work has ended")
        finally:
            for task in (work, event):
                task.cancel()
            await asyncio.wait((work, event))
            self._works = False
            LEADS[self._component].set(0)
            if self.is_leader:
                await self._release_lease()
            log.warning("%s does not lead any more", self._identity)

    @property
    def _may_continue(self) -> bool:
        """True if the leader's work may continue."""
        return self.is_leader or (self._outlasts_renewals and self.is_holder)

    async def _wait_for_next_try(self, stop: asyncio.Event, *ends: asyncio.Future[None]) -> None:
        """Wait until the next try, ``stop``, or the first of ``ends``."""
        seconds = self._seconds * RETRY_FRACTION * random.uniform(0.8, 1.2)
        remaining = (self._act_until if self.is_leader else self.acquirable_at) - self._clock()
        if remaining > 0:
            seconds = min(seconds, remaining + 0.01)
        stopping: asyncio.Future[Any] = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, *ends), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    # --- the Lease ------------------------------------------------------------------------

    async def _try_acquire_or_renew(self) -> bool:
        """Read the Lease; acquire or renew it if allowed. Returns True if this process holds it."""
        began = self._clock()
        limit = self._seconds * WRITE_FRACTION / 2
        if self.is_leader:
            limit = min(limit, self._act_until - began)
        try:
            async with asyncio.timeout(limit):
                if not self.is_leader or self._read is None:
                    await self._read_lease()
                # Running work must end if another process may have led since the last renewal.
                overtaken = self._works and not self.is_leader and not self.is_holder
                if overtaken or not self.is_acquirable:
                    self._act_until = float("-inf")
                    return False
                await self._write_lease(self._identity)
        except REQUEST_ERRORS as error:
            self._read = None  # Another process may have written it: read it again.
            conflict = isinstance(error, KubeApiError) and error.status == CONFLICT
            if not (conflict or self._failing):
                self._failing = True
                log.warning("the Lease cannot be acquired or renewed: %s", describe_error(error))
            return False
        self._failing = False
        self.term = self.lease_term
        self._act_until = began + self._seconds * WRITE_FRACTION
        return True

    @property
    def holder(self) -> str:
        """Identity of the holder as last read; empty if there is none."""
        return (self._spec or {}).get("holderIdentity") or ""

    @property
    def lease_term(self) -> int:
        """Term of the holder: grows with each process that acquires the Lease."""
        return int((self._spec or {}).get("leaseTransitions") or 0)

    @property
    def is_holder(self) -> bool:
        return self.holder == self._identity

    def record_lease(self, lease: dict[str, Any] | None) -> None:
        """Record the Lease as read; None: it does not exist."""
        self.has_read_lease = True
        self._read = lease
        spec = lease.get("spec") or {} if lease is not None else None
        term = (spec or {}).get("leaseTransitions")
        self._newest_term = max(self._newest_term, -1 if term is None else int(term))
        if spec != self._spec:
            self._spec, self._changed_at = spec, self._clock()

    async def _read_lease(self) -> None:
        """Read the Lease. Raises :data:`~.client.REQUEST_ERRORS`."""
        self.record_lease(await self._cluster.get(build_path(KIND, **self._about)))

    @property
    def acquirable_at(self) -> float:
        """Time at which the Lease of another holder may be acquired if it does not change."""
        return self._changed_at + ((self._spec or {}).get("leaseDurationSeconds") or self._seconds)

    @property
    def is_acquirable(self) -> bool:
        return self.holder in ("", self._identity) or self._clock() >= self.acquirable_at

    async def _write_lease(self, holder: str) -> None:
        """Write the Lease, based on the version read; an empty ``holder`` releases it. Raises
        :data:`~.client.REQUEST_ERRORS`, with 409 if another process has written it since."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # For people to read.
        before = self._spec or {}
        spec: dict[str, Any] = before | {
            "holderIdentity": holder,
            "leaseDurationSeconds": self._seconds if holder else 1,
            "renewTime": now,
        }
        # A container that restarts with its identity is another holder, with a higher term.
        if holder and (self.holder != holder or not self._held):
            spec["acquireTime"] = now
            spec["leaseTransitions"] = self._newest_term + 1
        if self._read is not None:
            self.record_lease(await self._cluster.replace(self._read | {"spec": spec}))
            self._held |= bool(holder)
            return
        about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": dict(self._about)}
        made = await self._cluster.create(about | {"spec": spec}, self._component)
        if made is None:
            raise KubeApiError(CONFLICT, "AlreadyExists", "another replica has created the Lease")
        self.record_lease(made)
        self._held |= bool(holder)

    async def _release_lease(self) -> None:
        """Let another replica acquire the Lease at once. If this fails, it waits for its expiry."""
        limit = self._act_until - self._clock()
        self._act_until = float("-inf")
        try:
            async with asyncio.timeout(limit):
                if self._read is None:
                    await self._read_lease()
                if self.is_holder:
                    await self._write_lease("")
        except REQUEST_ERRORS as error:
            log.warning("the Lease could not be released: %s", describe_error(error))

    async def _emit_leader_event(self) -> None:
        about = dict((self._read or {}).get("metadata") or {})
        said = KubeEvent("Normal", "LeaderElection", f"{self._identity} became leader")
        try:
            await emit_event(
                self._cluster, about, said, self._component, kind=KIND, api_version=API_VERSION
            )
        except REQUEST_ERRORS as error:
            log.warning("the event could not be written: %s", describe_error(error))


class LeaderLabel:
    """Label of the leader's pod, by which a Service selects it.

    The leader labels its own pod, removes the label from all other pods of its Deployment, and
    checks that every few seconds: the pod of a leader that died may still have the label, also if
    its container was restarted. Until it is removed there, that pod answers requests with 503.

    ``pod``: name of this process's pod. ``selector``: label selector of all pods of its
    Deployment. ``owner``: field owner of the label."""

    def __init__(
        self, cluster: KubeClient, namespace: str, pod: str, selector: str, *, owner: str
    ) -> None:
        self._cluster = cluster
        self._namespace, self._pod = namespace, pod
        self._selector, self._owner = selector, owner

    async def maintain_label(self, leading: KubeClient) -> None:
        """Label this pod alone, and check the labels periodically, until cancelled. ``leading``:
        client that writes only while this process leads."""
        failing = False
        while True:
            try:
                await self._claim_label(leading)
                failing = False
            except REQUEST_ERRORS as error:
                if not failing:
                    log.warning("the leader's pod could not be labelled: %s", describe_error(error))
                failing = True
            await asyncio.sleep(RETRY_SECONDS if failing else CHECK_SECONDS)

    async def _claim_label(self, leading: KubeClient) -> None:
        labelled = await leading.list(
            build_path("Pod", self._namespace), labels=f"{self._selector},{LABEL_LEADER}=true"
        )
        pods = {pod["metadata"]["name"] for pod in labelled}
        for other in sorted(pods - {self._pod}):
            await self._patch_label(leading, other, None)
            log.info("removed the leader's label of pod %s", other)
        if self._pod not in pods:
            await self._patch_label(leading, self._pod, "true")

    async def remove_label(self) -> None:
        """Remove the label of this pod. If that fails, the next leader removes it."""
        try:
            async with asyncio.timeout(REMOVE_SECONDS):
                await self._patch_label(self._cluster, self._pod, None)
        except REQUEST_ERRORS as error:
            log.warning("the leader's label could not be removed: %s", describe_error(error))

    async def _patch_label(self, cluster: KubeClient, pod: str, value: str | None) -> None:
        changes = {"metadata": {"labels": {LABEL_LEADER: value}}}
        await cluster.patch(build_path("Pod", self._namespace, pod), changes, self._owner)


def add_election_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :meth:`LeaderElection.from_options`."""
    parser.add_argument(
        "--lease",
        type=_parse_namespaced_name,
        required=True,
        metavar="NAMESPACE/NAME",
        help="the Lease that the leader holds; it is created if it does not exist",
    )
    parser.add_argument(
        "--lease-seconds",
        type=whole_number_type(1, 3600),
        default=DURATION_SECONDS,
        help="a replica acquires a Lease that its holder has not renewed for this time"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--identity",
        help="name of this process in the Lease, such as its pod's; must be unique among running"
        " processes (default: random)",
    )


def _parse_namespaced_name(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAMESPACE/NAME")
    return namespace, name
