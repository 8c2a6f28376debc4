"""One job's turn: get, decide, create or apply, status once, then what the status allows.

The order makes every crash harmless. Objects first: an attempt's objects are found again by
name. Then status: a new attempt's number is on record before the old attempt's Job goes. Then
deletions: what a crash leaves is seen as left over. Events last: they are for people.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from pipemorph.api.status import JobStatus
from pipemorph_operator import names
from pipemorph_operator.children import gang
from pipemorph_operator.children.objects import secret
from pipemorph_operator.cluster.client import ApiRefused, Cluster, path, path_of
from pipemorph_operator.cluster.events import tell
from pipemorph_operator.cluster.facts import JobFacts, PodFacts, why_no_pod
from pipemorph_operator.cluster.job import current_name, dump, operator_part
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.metrics import JOBS
from pipemorph_operator.reconcile.decide import decide, hold, stumble
from pipemorph_operator.reconcile.decision import Decision, Observed
from pipemorph_operator.reconcile.plans import Plans

log = logging.getLogger("pipemorph.operator")

OwnedJobs = Callable[[str, str], Sequence[JobFacts]]
"""Jobs of a namespace and a PipeMorphJob's UID, as last seen."""

FORBIDDEN = 403
TOO_MANY, SERVER_FAULT = 429, 500
"""Answers that may be others a moment later; those from 500 on do not even say that nothing was
made."""
CONFLICT = 409
"""Somebody else wrote at the same time: nothing is wrong with what was asked for."""
SECRET_BYTES = 32
NAMESPACE_ENDS_SECONDS = 60.0
"""Until a job of a namespace that is being deleted is looked at again, should it still be there."""


class Overtaken(Exception):
    """Somebody else has written the job since it was read: what was decided may be wrong by now."""


class Reconciler:
    """Carries decisions out."""

    def __init__(
        self,
        cluster: Cluster,
        config: Callable[[], OperatorConfig],
        owned: OwnedJobs,
        plans: Plans | None = None,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._owned = owned
        self._plans = plans

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """One turn. Returns in how many seconds another is due at the latest, if one is.

        Raises :class:`ApiRefused` and connection errors: come again later. So for anything that
        no decision can be made of, once status says so.
        """
        body = await self._cluster.get(path("PipeMorphJob", namespace, name))
        if body is None:
            if self._plans is not None:
                self._plans.forget((namespace, name))
            return None
        seen = await self._observe(body)
        config = self._config()
        try:
            decision = decide(seen, config)
            if decision.needs_plan is not None:
                if self._plans is None:
                    raise RuntimeError("a large plan is needed, and nobody was given to make it")
                uid = body["metadata"]["uid"]
                plan = self._plans.look((namespace, name), uid, decision.needs_plan)
                seen = replace(seen, plan=plan)
                decision = decide(seen, config)
            if decision.needs_pods:
                seen = await self._look_at_pods(seen)
                decision = decide(seen, config)
        except (ApiRefused, aiohttp.ClientError, TimeoutError, OSError):
            raise
        except Exception as error:
            await self._own_up(seen, error)
            raise
        try:
            return await self._carry_out(seen, decision)
        except Overtaken:
            return 0.0
        except ApiRefused as refused:
            if not refused.namespace_ends:
                raise
            # The job is about to be deleted with all the others; that is no fault of anybody's.
            log.info("%s/%s: nothing is made: the namespace is being deleted", namespace, name)
            return NAMESPACE_ENDS_SECONDS

    # --- read -----------------------------------------------------------------------------

    async def _observe(self, body: Mapping[str, Any]) -> Observed:
        metadata = body["metadata"]
        namespace, uid = metadata["namespace"], metadata["uid"]
        wanted = current_name(body)
        found = await self._cluster.get(path("Job", namespace, wanted))
        current = JobFacts.of(found) if found is not None else None
        others = [job for job in self._owned(namespace, uid) if job.name != wanted]
        return Observed(body, datetime.now(UTC), current, others)

    async def _look_at_pods(self, seen: Observed) -> Observed:
        """With the pods of the current attempt, and why some are not there."""
        current, metadata = seen.current, seen.body["metadata"]
        attempt = current.attempt if current else 0
        selector = f"{names.LABEL_JOB_UID}={metadata['uid']},{names.LABEL_ATTEMPT}={attempt}"
        pods = await self._cluster.list(path("Pod", metadata["namespace"]), labels=selector)
        no_pod = ""
        if current is not None and current.missing:
            about = f"involvedObject.uid={current.uid},reason=FailedCreate"
            url = path("Event", metadata["namespace"])
            try:
                no_pod = why_no_pod(await self._cluster.list(url, fields=about))
            except ApiRefused as refused:
                if refused.status != FORBIDDEN:
                    raise
                # Whoever runs the operator under roles of their own may have left this one out.
                no_pod = f"see the events of Job {current.name}; {refused.message}"
        return replace(seen, pods=[PodFacts.of(pod) for pod in pods], no_pod=no_pod)

    # --- write ----------------------------------------------------------------------------

    async def _carry_out(self, seen: Observed, decision: Decision) -> float | None:
        metadata = seen.body["metadata"]
        namespace, uid = metadata["namespace"], metadata["uid"]
        if decision.create is not None:
            decision = await self._create(seen, decision)
        if decision.status is not None:
            await self._write_status(seen.body, decision.status)
        for job in decision.delete_jobs:
            await self._cluster.delete(path("Job", namespace, job), propagation="Foreground")
        for name in decision.delete_attempts:
            for kind in ("Secret", "ConfigMap"):
                await self._cluster.delete(path(kind, namespace, name))
        if decision.delete_self:
            await self._cluster.delete(path("PipeMorphJob", namespace, metadata["name"]), uid=uid)
        for what in decision.counts:
            JOBS[what].labels(job_namespace=namespace).inc()
        for event in decision.events:
            log.info("%s/%s: %s: %s", namespace, metadata["name"], event.reason, event.message)
            await tell(self._cluster, metadata, event, names.OPERATOR_OWNER)
        return decision.again_in

    async def _own_up(self, seen: Observed, error: Exception) -> None:
        try:
            await self._carry_out(seen, stumble(seen, error))
        except Exception:
            # The first error is what the caller must hear of.
            log.exception("status cannot say what failed")

    async def _create(self, seen: Observed, decision: Decision) -> Decision:
        """Make an attempt's objects; status says what the API server refuses, before another try.
        Raises :class:`ApiRefused` for an answer that may be another one a moment later."""
        attempt, status = decision.create, decision.status
        assert attempt is not None and status is not None
        try:
            key = secrets.token_hex(SECRET_BYTES)
            await self._cluster.create(secret(attempt, key), names.OPERATOR_OWNER)
            made: dict[str, dict[str, Any]] = {}
            for obj in decision.apply:
                group = obj["kind"] == "PodGroup"
                wanted = gang.owned_by(made["ConfigMap"], obj) if group else obj
                made[obj["kind"]] = await self._make(wanted)
            status.job_uid = made["Job"]["metadata"]["uid"]
        except ApiRefused as refused:
            if refused.namespace_ends or refused.status == CONFLICT:
                raise
            held = hold(seen, names.R_REFUSED, refused.message)
            if refused.status == TOO_MANY or refused.status >= SERVER_FAULT:
                await self._carry_out(seen, held)
                raise
            # Those before the one that was refused are there, and of no use without it.
            held.delete_attempts.append(attempt.name)
            return held
        return decision

    async def _make(self, obj: dict[str, Any]) -> dict[str, Any]:
        """One object of an attempt whose Job does not exist yet.

        The Job, with the user's template in it, is created: an apply answers a wrong field with a
        fault of the server's. A ConfigMap that is there was left by a turn that was cut off, maybe
        before an edit; it cannot be changed, and no pod has it.
        """
        if obj["kind"] not in ("Job", "ConfigMap"):
            return await self._cluster.apply(obj, names.OPERATOR_OWNER)
        made = await self._cluster.create(obj, names.OPERATOR_OWNER)
        if made is None and obj["kind"] == "ConfigMap":
            await self._cluster.delete(path_of(obj))
            made = await self._cluster.create(obj, names.OPERATOR_OWNER)
        if made is None:
            name = obj["metadata"]["name"]
            message = f"{obj['kind']} {name} was made by somebody else meanwhile"
            raise ApiRefused(CONFLICT, "AlreadyExists", message)
        return made

    async def _write_status(self, body: Mapping[str, Any], status: JobStatus) -> None:
        """Raises :class:`Overtaken`."""
        if dump(operator_part(body)) == dump(status):
            return
        # With the UID: a job that was created again under the name is another job. With the version
        # that was read: another operator, or a write that was long on its way, cannot set an
        # attempt's number back.
        about = ("name", "namespace", "uid", "resourceVersion")
        written = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {k: body["metadata"][k] for k in about},
            "status": dump(status),
        }
        try:
            await self._cluster.apply(written, names.OPERATOR_OWNER, subresource="status")
        except ApiRefused as refused:
            if refused.status != CONFLICT:
                raise
            raise Overtaken(refused.message) from refused
