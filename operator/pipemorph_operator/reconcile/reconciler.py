"""Reconciles one job: read, decide, create objects, write status, delete, emit events.

The order makes a crash at any step harmless. Objects first: after a crash they are found again by
name. Then status: it has the new attempt's number before the old attempt's Job is deleted. Then
deletions: leftovers of a crash are found in the next reconcile. Events last: only people read them.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pipemorph.api.status import JobStatus
from pipemorph.errors import one_line
from pipemorph_operator import names
from pipemorph_operator.children import gang
from pipemorph_operator.children.naming import page_secret as page_secret_name
from pipemorph_operator.children.objects import page_secret, secret
from pipemorph_operator.cluster.client import REQUEST_ERRORS, ApiRefused, Cluster, path, path_of
from pipemorph_operator.cluster.events import Event, emit
from pipemorph_operator.cluster.facts import (
    MESSAGE_LENGTH,
    JobFacts,
    PodFacts,
    made_by,
    why_creating,
    why_no_pod,
)
from pipemorph_operator.cluster.job import current_name, dump, operator_part
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.metrics import JOBS
from pipemorph_operator.reconcile.decide import decide, internal_error, objects_rejected
from pipemorph_operator.reconcile.decision import Decision, Observed
from pipemorph_operator.reconcile.node_accusations import NodeAccusations
from pipemorph_operator.reconcile.plans import Plans

log = logging.getLogger("pipemorph.operator")

Key = tuple[str, str]

OwnedJobs = Callable[[str, str], Sequence[JobFacts]]
"""Returns the known Jobs, by namespace and the PipeMorphJob's UID."""

FORBIDDEN, NOT_FOUND = 403, 404
BAD, INVALID = 400, 422
TOO_MANY, SERVER_FAULT = 429, 500
"""Errors that a retry may resolve. After a status of 500 or above the object may exist anyway."""
CONFLICT = 409
"""Another client wrote at the same time; the request itself is valid."""
SECRET_BYTES = 32
RESTORE_SECONDS = 60.0
"""Least time between two tries to make a job's lasting objects again: most find them there."""
NAMESPACE_ENDS_SECONDS = 60.0
"""Delay before the next reconcile of a job whose namespace is being deleted."""


class Overtaken(Exception):
    """The job was changed after it was read, so the decision may be outdated."""


class Reconciler:
    """Reconciles jobs: reads their state, decides and applies the decision."""

    def __init__(
        self,
        cluster: Cluster,
        config: Callable[[], OperatorConfig],
        owned: OwnedJobs,
        plans: Plans | None = None,
        failed: Callable[[str, str, int], bool] = lambda *_: False,
    ) -> None:
        """``failed``: whether a pod of the job, by namespace, name and attempt, is known to have
        failed."""
        self._cluster = cluster
        self._config = config
        self._owned = owned
        self._plans = plans
        self._failed = failed
        self.accusations = NodeAccusations()
        self._sighted: dict[Key, dict[str, float]] = {}
        """When pods of a job were first seen to end, by job and UID."""
        self._restored: dict[Key, float] = {}
        """When the lasting objects of a job may be made again."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Reconcile one job. Returns the seconds until the next reconcile at the latest, if any.

        Raises :class:`ApiRefused` and connection errors; the caller retries later. Any other
        exception is an internal error, which is reported in status first.
        """
        body = await self._cluster.get(path("PipeMorphJob", namespace, name))
        if body is None:
            self._sighted.pop((namespace, name), None)
            self._restored.pop((namespace, name), None)
            if self._plans is not None:
                self._plans.forget((namespace, name))
            return None
        seen = await self._observe(body)
        config = self._config()
        try:
            decision = decide(seen, config)
            if decision.needs_plan is not None:
                if self._plans is None:
                    raise RuntimeError("a large plan is needed, but there is no planner for it")
                uid = body["metadata"]["uid"]
                plan = self._plans.look((namespace, name), uid, decision.needs_plan)
                seen = replace(seen, plan=plan)
                decision = decide(seen, config)
            if decision.needs_pods:
                seen = await self._look_at_pods(seen)
                decision = decide(seen, config)
        except REQUEST_ERRORS:
            raise
        except Exception as error:
            await self._report_error(seen, error)
            raise
        try:
            return await self._carry_out(seen, decision)
        except Overtaken:
            return 0.0
        except ApiRefused as refused:
            if not refused.namespace_ends:
                raise
            # Not an error: the job is about to be deleted with its namespace.
            log.info("%s/%s: skipped: the namespace is being deleted", namespace, name)
            return NAMESPACE_ENDS_SECONDS

    # --- read -----------------------------------------------------------------------------

    async def _observe(self, body: Mapping[str, Any]) -> Observed:
        metadata = body["metadata"]
        namespace, uid = metadata["namespace"], metadata["uid"]
        wanted = current_name(body)
        found = await self._cluster.get(path("Job", namespace, wanted))
        current = JobFacts.of(found) if found is not None else None
        others = [job for job in self._owned(namespace, uid) if job.name != wanted]
        attempt = current.attempt if current is not None else 0
        failed = self._failed(namespace, metadata["name"], attempt)
        return Observed(body, datetime.now(UTC), current, others, pod_failed=failed)

    async def _look_at_pods(self, seen: Observed) -> Observed:
        """Add the pods of the current attempt, and why some are missing."""
        current, metadata = seen.current, seen.body["metadata"]
        attempt = current.attempt if current else 0
        selector = f"{names.LABEL_JOB_UID}={metadata['uid']},{names.LABEL_ATTEMPT}={attempt}"
        pods = await self._cluster.list(path("Pod", metadata["namespace"]), labels=selector)
        no_pod = ""
        if current is not None and current.missing:
            about = f"involvedObject.uid={current.uid},reason=FailedCreate"
            no_pod = await self._explained(
                metadata["namespace"], about, why_no_pod, f"Job {current.name}"
            )
        # Anybody who may create pods in the namespace can set these labels.
        facts = [PodFacts.of(pod) for pod in pods if current is None or made_by(pod) == current.uid]
        facts = self._with_times((metadata["namespace"], metadata["name"]), facts)
        creating = min((p for p in facts if p.creating), key=lambda p: p.index, default=None)
        if creating is not None:
            about = f"involvedObject.uid={creating.uid}"
            why = await self._explained(
                metadata["namespace"], about, why_creating, f"pod {creating.name}"
            )
            why = why or f"its containers are being created on node {creating.node}"
            facts = [replace(p, stuck=why) if p is creating else p for p in facts]
        return replace(
            seen,
            pods=[pod for pod in facts if not pod.replaced],
            leaving=[pod for pod in facts if pod.replaced and pod.gone_by is not None],
            no_pod=no_pod,
        )

    async def _explained(
        self, namespace: str, about: str, why: Callable[[list[Any]], str], whose: str
    ) -> str:
        """What the events that match the field selector ``about`` explain."""
        try:
            return why(await self._cluster.list(path("Event", namespace), fields=about))
        except ApiRefused as refused:
            if refused.status != FORBIDDEN:
                raise
            # Custom roles of an installation may not include reading events.
            return f"see the events of {whose}; {refused.message}"

    def _with_times(self, key: Key, pods: Sequence[PodFacts]) -> list[PodFacts]:
        """The pods, with how long this process has seen those that end to end."""
        now, before = time.monotonic(), self._sighted.get(key, {})
        ending = [p.uid for p in pods if p.gone_by is not None or p.exit_code is not None]
        self._sighted[key] = times = {uid: before.get(uid, now) for uid in ending}
        return [replace(p, sighted=now - times.get(p.uid, now)) for p in pods]

    # --- write ----------------------------------------------------------------------------

    async def _carry_out(self, seen: Observed, decision: Decision) -> float | None:
        metadata = seen.body["metadata"]
        namespace, uid = metadata["namespace"], metadata["uid"]
        if decision.create is not None:
            decision = await self._create(seen, decision)
        if decision.status is not None:
            await self._write_status(seen.body, decision.status)
        again = await self._restore(seen.body, decision)
        for pod in decision.replace_pods:
            await self._uncount(path("Pod", namespace, pod.name), pod)
        for pod in decision.forget_pods:
            await self._cluster.delete(path("Pod", namespace, pod.name), uid=pod.uid, grace=0)
        for job in decision.delete_jobs:
            await self._cluster.delete(path("Job", namespace, job), propagation="Foreground")
        for name in decision.delete_attempts:
            for kind in ("Secret", "ConfigMap"):
                await self._cluster.delete(path(kind, namespace, name))
            await self._cluster.delete(path("Secret", namespace, page_secret_name(name)))
        if decision.delete_self:
            await self._cluster.delete(path("PipeMorphJob", namespace, metadata["name"]), uid=uid)
        for what in decision.counts:
            JOBS[what].labels(job_namespace=namespace).inc()
        for event in decision.events:
            log.info("%s/%s: %s: %s", namespace, metadata["name"], event.reason, event.message)
            await emit(self._cluster, metadata, event, names.OPERATOR_OWNER)
        await self._accuse_nodes(f"{namespace}/{metadata['name']}", decision.accused)
        return min((each for each in (again, decision.again_in) if each is not None), default=None)

    async def _restore(self, body: Mapping[str, Any], decision: Decision) -> float | None:
        """Create the lasting objects of a running attempt again if somebody has deleted them.
        Returns in how many seconds it may, if not yet."""
        key = body["metadata"]["namespace"], body["metadata"]["name"]
        now = time.monotonic()
        if not decision.restore:
            return None
        if (wait := self._restored.get(key, now) - now) > 0 and not decision.replace_pods:
            return wait
        self._restored[key] = now + RESTORE_SECONDS
        for obj in decision.restore:
            what = f"{obj['kind']} {obj['metadata']['name']}"
            try:
                made = await self._cluster.create(obj, names.OPERATOR_OWNER)
            except ApiRefused as refused:
                # The ranks that run may need what this reconcile does besides.
                log.warning("%s/%s: %s cannot be made again: %s", *key, what, refused.message)
                continue
            if made is not None:
                said = f"{what} had been deleted; it is made again"
                decision.events.append(Event("Warning", names.R_RESTORED, said))
        return None

    async def _accuse_nodes(self, job: str, measured: Mapping[str, str]) -> None:
        """Emit the events of nodes that several jobs accuse now."""
        for node, event in self.accusations.add(job, measured).items():
            log.warning("node %s: %s", node, event.message)
            # With its name as its UID, as in the kubelet's events: so the operator needs no right
            # to read nodes, and `kubectl describe node` shows the event.
            about = {"name": node, "uid": node}
            await emit(
                self._cluster, about, event, names.OPERATOR_OWNER, kind="Node", api_version="v1"
            )

    async def _uncount(self, url: str, pod: PodFacts) -> None:
        """Take a lost pod from the Job controller before it counts the pod's end."""
        changed = {
            "uid": pod.uid,
            "labels": {names.LABEL_REPLACED: "true"},
            "$deleteFromPrimitiveList/finalizers": [names.JOB_FINALIZER],
        }
        try:
            await self._cluster.patch(url, {"metadata": changed}, names.OPERATOR_OWNER)
        except ApiRefused as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):
                raise  # Otherwise the pod is gone, and counted.

    async def _report_error(self, seen: Observed, error: Exception) -> None:
        try:
            await self._carry_out(seen, internal_error(seen, error))
        except Exception as second:
            # Not raised: the caller gets the first error.
            log.exception("the internal error could not be written to status")
            await self._status_refused(seen.body, f"{error}; {second}")

    async def _create(self, seen: Observed, decision: Decision) -> Decision:
        """Create an attempt's objects. If the API server rejects one, returns the decision that
        reports it in status. Raises :class:`ApiRefused` for errors that a retry may resolve."""
        attempt, status = decision.create, decision.status
        assert attempt is not None and status is not None
        try:
            key, token = secrets.token_hex(SECRET_BYTES), secrets.token_urlsafe(SECRET_BYTES)
            await self._cluster.create(secret(attempt, key), names.OPERATOR_OWNER)
            await self._cluster.create(page_secret(attempt, token), names.OPERATOR_OWNER)
            made: dict[str, dict[str, Any]] = {}
            for obj in decision.apply:
                group = obj["kind"] == "PodGroup"
                wanted = gang.owned_by(made["ConfigMap"], obj) if group else obj
                made[obj["kind"]] = await self._make(wanted)
            status.job_uid = made["Job"]["metadata"]["uid"]
        except ApiRefused as refused:
            if refused.namespace_ends or refused.status == CONFLICT:
                raise
            again = refused.status == TOO_MANY or refused.status >= SERVER_FAULT
            rejected = objects_rejected(seen, names.R_REFUSED, refused.message, passing=again)
            if again:
                await self._carry_out(seen, rejected)
                raise
            # The objects before the rejected one exist, and are useless without it.
            rejected.delete_attempts.append(attempt.name)
            return rejected
        return decision

    async def _make(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Create one object of an attempt whose Job does not exist yet.

        The Job, which contains the user's template, is created and not applied: an apply answers an
        unknown field with an internal error. An existing ConfigMap is a leftover of an interrupted
        reconcile, maybe before an edit; it is immutable and no pod uses it, so it is replaced.
        """
        if obj["kind"] not in ("Job", "ConfigMap", "NetworkPolicy"):
            return await self._cluster.apply(obj, names.OPERATOR_OWNER)
        made = await self._cluster.create(obj, names.OPERATOR_OWNER)
        if obj["kind"] == "NetworkPolicy":
            # That of an earlier attempt is the same. The operator may not change NetworkPolicies:
            # the right to would cover those of everybody.
            return made or obj
        if made is None and obj["kind"] == "ConfigMap":
            await self._cluster.delete(path_of(obj))
            made = await self._cluster.create(obj, names.OPERATOR_OWNER)
        if made is None:
            name = obj["metadata"]["name"]
            message = f"{obj['kind']} {name} was created by another client meanwhile"
            raise ApiRefused(CONFLICT, "AlreadyExists", message)
        return made

    async def _write_status(self, body: Mapping[str, Any], status: JobStatus) -> None:
        """Write the operator's part of the status. Raises :class:`Overtaken`."""
        if dump(operator_part(body)) == dump(status):
            return
        # The UID protects a job that was created again under the name. The resourceVersion prevents
        # another operator, or a delayed write, from setting the attempt number back.
        about = ("name", "namespace", "uid", "resourceVersion")
        written = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {k: body["metadata"][k] for k in about},
            "status": dump(status),
        }
        try:
            made = await self._cluster.apply(written, names.OPERATOR_OWNER, subresource="status")
            await self._remove_left(made, status)
        except ApiRefused as refused:
            if refused.status == CONFLICT:
                raise Overtaken(refused.message) from refused
            if refused.status in (INVALID, BAD, SERVER_FAULT):
                await self._status_refused(body, refused.message)
            raise

    async def _remove_left(self, made: Mapping[str, Any], status: JobStatus) -> None:
        """Remove what ``status`` has no longer and another client has set too, such as one that
        restores a backup: an apply leaves such fields, and decisions would rest on them."""
        found, wanted = dump(operator_part(made)), dump(status)
        left: dict[str, Any] = dict.fromkeys(found.keys() - wanted.keys())
        types = {c["type"] for c in found["conditions"]} - {c["type"] for c in wanted["conditions"]}
        if types:
            left["conditions"] = [c for c in made["status"]["conditions"] if c["type"] not in types]
        if left:
            url = f"{path_of(made)}/status"
            version = made["metadata"]["resourceVersion"]
            changes = {"metadata": {"resourceVersion": version}, "status": left}
            await self._cluster.patch(url, changes, names.OPERATOR_OWNER, merge=True)

    async def _status_refused(self, body: Mapping[str, Any], why: str) -> None:
        """Emit why nothing can be written to status, as of an object that was stored under another
        CRD: the event is all that people can see of it."""
        message = one_line(f"status cannot be written; retrying: {why}", MESSAGE_LENGTH)
        event = Event("Warning", names.R_STATUS_REFUSED, message)
        await emit(self._cluster, body["metadata"], event, names.OPERATOR_OWNER)
