"""Who may speak for a job: a pod of that job, by a token made for that job.

A rank's token is projected into its pod, names the job as its audience, and is bound to the pod.
The API server says whether it is genuine (TokenReview), and which pod it is bound to; that pod
must be one of the job's. Answers are kept for a while; a storm of bad tokens asks little of the
API server.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from pipemorph.ingest import Identity, Refused
from pipemorph_operator import names
from pipemorph_operator.api import ApiRefused, path
from pipemorph_operator.ingest import claims
from pipemorph_operator.metrics import REFUSED, TOKEN_REVIEWS

KEPT_SECONDS = 60.0
"""A token that was good stays good this long: so long a deleted pod's may still be taken."""
KEPT_BAD_SECONDS = 10.0
KEPT_MISPLACED_SECONDS = 2.0
"""A pod that is not known to be the job's yet may be so in a moment."""
MOST_KEPT = 20_000
MOST_REVIEWS = 32
"""TokenReviews at a time."""

REVIEW_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"


class Api(Protocol):
    """What is asked of the API server."""

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]: ...

    async def get(self, url: str) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class Expected:
    """What a token must fit to speak for a job."""

    uid: str
    audience: str


class _Refusal(Exception):
    def __init__(self, status: int, reason: str, message: str, keep: float) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.keep = status, reason, message, keep


class PodTokenAuthenticator:
    """An :class:`~pipemorph.ingest.Authenticator` over TokenReview."""

    def __init__(
        self,
        api: Api,
        expected: Callable[[str, str], Expected | None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._expected = expected
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, Identity | _Refusal]] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Identity | _Refusal]] = {}
        self._reviews = asyncio.Semaphore(MOST_REVIEWS)

    async def authenticate(self, token: str, namespace: str, job: str) -> Identity:
        """Identity of the caller. Raises :class:`Refused`."""
        expected = self._expected(namespace, job)
        if expected is None:
            self._count("job")
            raise Refused(403, f"no job {namespace}/{job} takes reports here now")
        key = hashlib.sha256(f"{expected.uid}\0{token}".encode("utf-8", "replace")).digest()
        kept = self._known.get(key)
        answer = kept[1] if kept is not None and kept[0] > self._clock() else None
        if answer is None:
            try:
                claims.check(token, expected.audience, self._clock())
            except claims.Unfit as unfit:
                self._count(unfit.reason)
                raise Refused(401, str(unfit)) from None
            answer = await self._answer(key, token, namespace, expected)
        if isinstance(answer, _Refusal):
            self._count(answer.reason)
            raise Refused(answer.status, answer.message)
        return answer

    async def _answer(
        self, key: bytes, token: str, namespace: str, expected: Expected
    ) -> Identity | _Refusal:
        """Callers with one token share one question."""
        task = self._asking.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(key, token, namespace, expected))
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        # One caller that hangs up must not fail the others that wait for the same answer.
        return await asyncio.shield(task)

    async def _ask(
        self, key: bytes, token: str, namespace: str, expected: Expected
    ) -> Identity | _Refusal:
        answer: Identity | _Refusal
        try:
            async with self._reviews:
                answer = await self._review(token, namespace, expected)
            keep = KEPT_SECONDS
        except _Refusal as refusal:
            answer, keep = refusal, refusal.keep
        except (ApiRefused, aiohttp.ClientError, TimeoutError, OSError) as error:
            # Not known is not yes: the agent tries again, its ranks train on.
            why = str(error) or type(error).__name__
            return _Refusal(401, "unreachable", f"the token could not be checked: {why}", 0.0)
        self._known[key] = (self._clock() + keep, answer)
        self._known.move_to_end(key)
        while len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        return answer

    async def _review(self, token: str, namespace: str, expected: Expected) -> Identity:
        TOKEN_REVIEWS.inc()
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [expected.audience]},
        }
        status = (await self._api.post(REVIEW_PATH, review)).get("status") or {}
        if not status.get("authenticated") or expected.audience not in (
            status.get("audiences") or ()
        ):
            raise _Refusal(
                401, "review", "the API server does not know the token", KEPT_BAD_SECONDS
            )
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        pod, uid = _first(extra, POD_NAME), _first(extra, POD_UID)
        if pod is None or uid is None:
            raise _Refusal(403, "unbound", "the token is bound to no pod", KEPT_BAD_SECONDS)
        subject = str(user.get("username", ""))
        if subject.split(":")[:3] != ["system", "serviceaccount", namespace]:
            raise _Refusal(403, "pod", "the token is of another namespace", KEPT_BAD_SECONDS)
        found = await self._api.get(path("Pod", namespace, pod))
        if found is None or not belongs(found, uid, expected.uid):
            raise _Refusal(
                403, "pod", f"pod {pod} is not a rank of this job", KEPT_MISPLACED_SECONDS
            )
        return Identity(f"pod {pod}")

    @staticmethod
    def _count(reason: str) -> None:
        REFUSED.labels(reason=reason).inc()


def belongs(pod: Mapping[str, Any], pod_uid: str, job_uid: str) -> bool:
    """Whether a pod has that UID and is a rank of the job: its label says so and a Job made it."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    return (
        metadata.get("uid") == pod_uid
        and labels.get(names.LABEL_JOB_UID) == job_uid
        and any(
            owner.get("kind") == "Job" and owner.get("controller")
            for owner in metadata.get("ownerReferences") or ()
        )
    )


def _first(extra: Mapping[str, Any], key: str) -> str | None:
    values = extra.get(key)
    return str(values[0]) if values else None
