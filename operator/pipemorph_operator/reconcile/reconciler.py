"""Reconciles a job: read, decide, create objects, write status, delete, emit events.

This order makes a crash at any step harmless. Objects come first: after a crash they are found by
name. Then status: it has the new attempt's number before the old attempt's Job is deleted. Then
deletions: the next reconcile finds leftovers of a crash. Events come last: only people read them.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pipemorph.errors import one_line
from pipemorph.spec.job_status import JobStatus
from pipemorph_operator import names
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.client import (
    REQUEST_ERRORS,
    KubeApiError,
    KubeClient,
    build_object_path,
    build_path,
)
from pipemorph_operator.kube.events import KubeEvent, emit_event
from pipemorph_operator.kube.job_object import (
    build_current_job_name,
    dump_status,
    read_operator_status,
)
from pipemorph_operator.kube.object_facts import (
    MESSAGE_LENGTH,
    JobFacts,
    PodFacts,
    explain_missing_pod,
    explain_pending_pod,
    read_controller_uid,
)
from pipemorph_operator.metrics import JOBS
from pipemorph_operator.reconcile.decide import (
    decide,
    report_internal_error,
    report_rejected_objects,
)
from pipemorph_operator.reconcile.decision import ObservedJob, ReconcileDecision
from pipemorph_operator.reconcile.node_accusations import NodeAccusations
from pipemorph_operator.reconcile.plan_checks import PlanChecker
from pipemorph_operator.resources import gang
from pipemorph_operator.resources.attempt_objects import build_engine_secret, build_page_secret
from pipemorph_operator.resources.object_names import build_page_secret_name as page_secret_name

log = logging.getLogger("pipemorph.operator")

Key = tuple[str, str]

FindOwnedJobs = Callable[[str, str], Sequence[JobFacts]]
"""Returns the known Jobs, by namespace and the PipeMorphJob's UID."""

FORBIDDEN, NOT_FOUND = 403, 404
BAD_REQUEST, INVALID = 400, 422
TOO_MANY, SERVER_FAULT = 429, 500
"""Errors that a retry may resolve. After a status of 500 or above the object may still exist."""
CONFLICT = 409
"""Error if another client wrote at the same time; the request itself is valid."""
SECRET_BYTES = 32
RESTORE_SECONDS = 60.0
"""Least time between two tries to restore a job's lasting objects: usually they exist."""
NAMESPACE_ENDS_SECONDS = 60.0
"""Delay before the next reconcile of a job whose namespace is being deleted."""


class JobChangedError(Exception):
    """Raised if the job was changed after it was read, so that the decision may be outdated."""


class Reconciler:
    """Reconciles jobs: reads their state, decides and applies the decision."""

    def __init__(
        self,
        cluster: KubeClient,
        config: Callable[[], OperatorConfig],
        owned: FindOwnedJobs,
        plans: PlanChecker | None = None,
        failed: Callable[[str, str, int], bool] = lambda *_: False,
    ) -> None:
        """``failed`` returns True if a pod of a namespace, job and attempt has failed."""
        self._cluster = cluster
        self._config = config
        self._owned = owned
        self._plans = plans
        self._failed = failed
        self.accusations = NodeAccusations()
        self._sighted: dict[Key, dict[str, float]] = {}
        """Time at which a pod was first seen to end, by job and UID."""
        self._restored: dict[Key, float] = {}
        """Time from which the lasting objects of a job may be restored again."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Reconcile a job. Returns the seconds until the next reconcile at the latest, if any.

        Raises :class:`KubeApiError` and connection errors; the caller retries later. Any other
        exception is an internal error, which is reported in status first.
        """
        body = await self._cluster.get(build_path("PipeMorphJob", namespace, name))
        if body is None:
            self._sighted.pop((namespace, name), None)
            self._restored.pop((namespace, name), None)
            if self._plans is not None:
                self._plans.cancel_check((namespace, name))
            return None
        seen = await self._observe_job(body)
        config = self._config()
        try:
            decision = decide(seen, config)
            if decision.needs_plan is not None:
                if self._plans is None:
                    raise RuntimeError("a large plan is needed, but there is no planner for it")
                uid = body["metadata"]["uid"]
                plan = self._plans.check_plan((namespace, name), uid, decision.needs_plan)
                seen = replace(seen, plan_check=plan)
                decision = decide(seen, config)
            if decision.needs_pods:
                seen = await self._observe_pods(seen)
                decision = decide(seen, config)
        except REQUEST_ERRORS:
            raise
        except Exception as error:
            await self._report_error(seen, error)
            raise
        try:
            return await self._apply_decision(seen, decision)
        except JobChangedError:
            return 0.0
        except KubeApiError as refused:
            if not refused.is_namespace_terminating:
                raise
            # Not an error: the job is about to be deleted with its namespace.
            log.info("%s/%s: skipped: the namespace is being deleted", namespace, name)
            return NAMESPACE_ENDS_SECONDS

    # --- read -----------------------------------------------------------------------------

    async def _observe_job(self, body: Mapping[str, Any]) -> ObservedJob:
        metadata = body["metadata"]
        namespace, uid = metadata["namespace"], metadata["uid"]
        wanted = build_current_job_name(body)
        found = await self._cluster.get(build_path("Job", namespace, wanted))
        current = JobFacts.from_object(found) if found is not None else None
        others = [job for job in self._owned(namespace, uid) if job.name != wanted]
        attempt = current.attempt if current is not None else 0
        failed = self._failed(namespace, metadata["name"], attempt)
        return ObservedJob(body, datetime.now(UTC), current, others, pod_failed=failed)

    async def _observe_pods(self, seen: ObservedJob) -> ObservedJob:
        """Add the pods of the current attempt, and the reason why some are missing."""
        current, metadata = seen.current_job, seen.body["metadata"]
        attempt = current.attempt if current else 0
        selector = f"{names.LABEL_JOB_UID}={metadata['uid']},{names.LABEL_ATTEMPT}={attempt}"
        pods = await self._cluster.list(build_path("Pod", metadata["namespace"]), labels=selector)
        no_pod = ""
        if current is not None and current.missing_pods:
            about = f"involvedObject.uid={current.uid},reason=FailedCreate"
            no_pod = await self._explain_from_events(
                metadata["namespace"], about, explain_missing_pod, f"Job {current.name}"
            )
        # Any user who may create pods in the namespace can set these labels.
        facts = [
            PodFacts.from_object(pod)
            for pod in pods
            if current is None or read_controller_uid(pod) == current.uid
        ]
        facts = self._add_ending_times((metadata["namespace"], metadata["name"]), facts)
        creating = min((p for p in facts if p.is_creating), key=lambda p: p.index, default=None)
        if creating is not None:
            about = f"involvedObject.uid={creating.uid}"
            why = await self._explain_from_events(
                metadata["namespace"], about, explain_pending_pod, f"pod {creating.name}"
            )
            why = why or f"its containers are being created on node {creating.node}"
            facts = [replace(p, pending_reason=why) if p is creating else p for p in facts]
        return replace(
            seen,
            pods=[pod for pod in facts if not pod.is_replaced],
            departing_pods=[
                pod for pod in facts if pod.is_replaced and pod.deletion_deadline is not None
            ],
            missing_pod_reason=no_pod,
        )

    async def _explain_from_events(
        self, namespace: str, about: str, why: Callable[[list[Any]], str], whose: str
    ) -> str:
        """Explanation that ``why`` derives from the events that match field selector ``about``."""
        try:
            return why(await self._cluster.list(build_path("Event", namespace), fields=about))
        except KubeApiError as refused:
            if refused.status != FORBIDDEN:
                raise
            # Custom roles of an installation may not include reading events.
            return f"see the events of {whose}; {refused.message}"

    def _add_ending_times(self, key: Key, pods: Sequence[PodFacts]) -> list[PodFacts]:
        """Pods with ``ending_seconds`` set: the time since this process first saw them end."""
        now, before = time.monotonic(), self._sighted.get(key, {})
        ending = [p.uid for p in pods if p.deletion_deadline is not None or p.exit_code is not None]
        self._sighted[key] = times = {uid: before.get(uid, now) for uid in ending}
        return [replace(p, ending_seconds=now - times.get(p.uid, now)) for p in pods]

    # --- write ----------------------------------------------------------------------------

    async def _apply_decision(self, seen: ObservedJob, decision: ReconcileDecision) -> float | None:
        metadata = seen.body["metadata"]
        namespace, uid = metadata["namespace"], metadata["uid"]
        if decision.create_attempt is not None:
            decision = await self._create_attempt(seen, decision)
        if decision.status is not None:
            await self._write_status(seen.body, decision.status)
        again = await self._restore_objects(seen.body, decision)
        for pod in decision.replace_pods:
            await self._remove_job_finalizer(build_path("Pod", namespace, pod.name), pod)
        for pod in decision.forget_pods:
            await self._cluster.delete(build_path("Pod", namespace, pod.name), uid=pod.uid, grace=0)
        for job in decision.delete_jobs:
            await self._cluster.delete(build_path("Job", namespace, job), propagation="Foreground")
        for name in decision.delete_attempts:
            for kind in ("Secret", "ConfigMap"):
                await self._cluster.delete(build_path(kind, namespace, name))
            await self._cluster.delete(build_path("Secret", namespace, page_secret_name(name)))
        if decision.delete_job:
            await self._cluster.delete(
                build_path("PipeMorphJob", namespace, metadata["name"]), uid=uid
            )
        for what in decision.job_counters:
            JOBS[what].labels(job_namespace=namespace).inc()
        for event in decision.events:
            log.info("%s/%s: %s: %s", namespace, metadata["name"], event.reason, event.message)
            await emit_event(self._cluster, metadata, event, names.OPERATOR_OWNER)
        await self._accuse_nodes(f"{namespace}/{metadata['name']}", decision.accused_nodes)
        return min(
            (each for each in (again, decision.requeue_seconds) if each is not None), default=None
        )

    async def _restore_objects(
        self, body: Mapping[str, Any], decision: ReconcileDecision
    ) -> float | None:
        """Restore deleted lasting objects of a running attempt. Returns the seconds until the next
        try is allowed, if it is not allowed yet."""
        key = body["metadata"]["namespace"], body["metadata"]["name"]
        now = time.monotonic()
        if not decision.restore_objects:
            return None
        if (wait := self._restored.get(key, now) - now) > 0 and not decision.replace_pods:
            return wait
        self._restored[key] = now + RESTORE_SECONDS
        for obj in decision.restore_objects:
            what = f"{obj['kind']} {obj['metadata']['name']}"
            try:
                made = await self._cluster.create(obj, names.OPERATOR_OWNER)
            except KubeApiError as refused:
                # Running ranks may need the rest of this reconcile.
                log.warning("%s/%s: %s cannot be restored: %s", *key, what, refused.message)
                continue
            if made is not None:
                message = f"{what} was deleted and has been created again"
                decision.events.append(KubeEvent("Warning", names.R_RESTORED, message))
        return None

    async def _accuse_nodes(self, job: str, measured: Mapping[str, str]) -> None:
        """Emit events for nodes that several jobs accuse now."""
        for node, event in self.accusations.add_accusations(job, measured).items():
            log.warning("node %s: %s", node, event.message)
            # The UID is the name, as in the kubelet's events: the operator needs no permission to
            # read nodes, and `kubectl describe node` shows the event.
            about = {"name": node, "uid": node}
            await emit_event(
                self._cluster, about, event, names.OPERATOR_OWNER, kind="Node", api_version="v1"
            )

    async def _remove_job_finalizer(self, url: str, pod: PodFacts) -> None:
        """Release a lost pod from the Job controller before that counts the pod's end."""
        changed = {
            "uid": pod.uid,
            "labels": {names.LABEL_REPLACED: "true"},
            "$deleteFromPrimitiveList/finalizers": [names.JOB_FINALIZER],
        }
        try:
            await self._cluster.patch(url, {"metadata": changed}, names.OPERATOR_OWNER)
        except KubeApiError as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):
                raise  # With these, the pod is gone and counted.

    async def _report_error(self, seen: ObservedJob, error: Exception) -> None:
        try:
            await self._apply_decision(seen, report_internal_error(seen, error))
        except Exception as second:
            # Not raised: the caller gets the first error.
            log.exception("the internal error could not be written to status")
            await self._report_refused_status(seen.body, f"{error}; {second}")

    async def _create_attempt(
        self, seen: ObservedJob, decision: ReconcileDecision
    ) -> ReconcileDecision:
        """Create an attempt's objects. If the API server rejects one, returns the decision that
        reports it in status. Raises :class:`KubeApiError` for errors that a retry may resolve."""
        attempt, status = decision.create_attempt, decision.status
        assert attempt is not None and status is not None
        try:
            key, token = secrets.token_hex(SECRET_BYTES), secrets.token_urlsafe(SECRET_BYTES)
            await self._cluster.create(build_engine_secret(attempt, key), names.OPERATOR_OWNER)
            await self._cluster.create(build_page_secret(attempt, token), names.OPERATOR_OWNER)
            made: dict[str, dict[str, Any]] = {}
            for obj in decision.apply_objects:
                group = obj["kind"] == "PodGroup"
                wanted = gang.with_config_map_owner(made["ConfigMap"], obj) if group else obj
                made[obj["kind"]] = await self._create_object(wanted)
            status.job_uid = made["Job"]["metadata"]["uid"]
        except KubeApiError as refused:
            if refused.is_namespace_terminating or refused.status == CONFLICT:
                raise
            again = refused.status == TOO_MANY or refused.status >= SERVER_FAULT
            rejected = report_rejected_objects(
                seen, names.R_REFUSED, refused.message, passing=again
            )
            if again:
                await self._apply_decision(seen, rejected)
                raise
            # The objects created before are useless without the rejected one.
            rejected.delete_attempts.append(attempt.name)
            return rejected
        return decision

    async def _create_object(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Create an object of an attempt whose Job does not exist yet.

        The Job, which contains the user's template, is created, not applied: an apply answers an
        unknown field with an internal error. An existing ConfigMap is from an interrupted earlier
        reconcile; it is immutable and no pod uses it, so it is replaced.
        """
        if obj["kind"] not in ("Job", "ConfigMap", "NetworkPolicy"):
            return await self._cluster.apply(obj, names.OPERATOR_OWNER)
        made = await self._cluster.create(obj, names.OPERATOR_OWNER)
        if obj["kind"] == "NetworkPolicy":
            # That of an earlier attempt is the same. The operator may not change NetworkPolicies:
            # such a permission would cover the policies of all users.
            return made or obj
        if made is None and obj["kind"] == "ConfigMap":
            await self._cluster.delete(build_object_path(obj))
            made = await self._cluster.create(obj, names.OPERATOR_OWNER)
        if made is None:
            name = obj["metadata"]["name"]
            message = f"{obj['kind']} {name} was created by another client meanwhile"
            raise KubeApiError(CONFLICT, "AlreadyExists", message)
        return made

    async def _write_status(self, body: Mapping[str, Any], status: JobStatus) -> None:
        """Write the operator's part of the status. Raises :class:`JobChangedError`."""
        if dump_status(read_operator_status(body)) == dump_status(status):
            return
        # The UID protects a job that was created again under the name. The resourceVersion prevents
        # another operator, or a delayed write, from setting the attempt number back.
        about = ("name", "namespace", "uid", "resourceVersion")
        written = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {k: body["metadata"][k] for k in about},
            "status": dump_status(status),
        }
        try:
            made = await self._cluster.apply(written, names.OPERATOR_OWNER, subresource="status")
            await self._remove_stale_fields(made, status)
        except KubeApiError as refused:
            if refused.status == CONFLICT:
                raise JobChangedError(refused.message) from refused
            if refused.status in (INVALID, BAD_REQUEST, SERVER_FAULT):
                await self._report_refused_status(body, refused.message)
            raise

    async def _remove_stale_fields(self, made: Mapping[str, Any], status: JobStatus) -> None:
        """Remove fields that ``status`` lacks and another client also owns, such as one that
        restores a backup: an apply does not remove them, and decisions would depend on them."""
        found, wanted = dump_status(read_operator_status(made)), dump_status(status)
        drop: dict[str, Any] = dict.fromkeys(found.keys() - wanted.keys())
        types = {c["type"] for c in found["conditions"]} - {c["type"] for c in wanted["conditions"]}
        if types:
            drop["conditions"] = [c for c in made["status"]["conditions"] if c["type"] not in types]
        if drop:
            url = f"{build_object_path(made)}/status"
            version = made["metadata"]["resourceVersion"]
            changes = {"metadata": {"resourceVersion": version}, "status": drop}
            await self._cluster.patch(url, changes, names.OPERATOR_OWNER, merge=True)

    async def _report_refused_status(self, body: Mapping[str, Any], why: str) -> None:
        """Emit the reason why status cannot be written, such as an object stored under another CRD:
        only the event is visible to users."""
        message = one_line(f"status cannot be written; retrying: {why}", MESSAGE_LENGTH)
        event = KubeEvent("Warning", names.R_STATUS_REFUSED, message)
        await emit_event(self._cluster, body["metadata"], event, names.OPERATOR_OWNER)
