"""Authenticates callers: pods of the job, by a service-account token for the job.

A rank's token is projected into its pod, has the job as audience and is bound to the pod. A
TokenReview by the API server verifies it and names the pod, which must be a rank of the job's
current attempt. Results are cached, good and bad ones separately. Forged tokens cost nothing, so
each client address and each job may have only a few reviews in progress: they cannot block others.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pipemorph.ingest import AccessDeniedError, Identity
from pipemorph_operator import names
from pipemorph_operator.kube.client import (
    REQUEST_ERRORS,
    KubeApiError,
    KubeClient,
    build_path,
    describe_error,
)
from pipemorph_operator.kube.object_facts import read_controller_uid
from pipemorph_operator.metrics import REFUSED, TOKEN_REVIEWS

VALID_CACHE_SECONDS = 60.0
"""Caching of a valid token, and so the longest time for which a deleted pod's token is accepted
while the API server answers."""
REVIEW_AGAIN_FRACTIONS = (0.6, 0.85)
"""Range of fractions of that time; after a random one a token in use is reviewed again, in the
background: no request waits. Random, to spread reviews after a restart."""
OUTAGE_SECONDS = 300.0
"""Time for which a valid token stays accepted while the API server is unreachable."""
ANSWER_SECONDS, RETRY_SECONDS = 5.0, 10.0
"""Time after which an unanswered review counts as unreachable; delay before the next review."""
INVALID_CACHE_SECONDS = 10.0
MISPLACED_CACHE_SECONDS = 2.0
"""Caching of a pod that does not match the job: it may match as soon as status is updated."""
MAX_VALID_CACHED = 20_000
MAX_INVALID_CACHED = 2_000
MAX_REVIEWS = 32
"""Limit of concurrent TokenReviews."""
MAX_PER_SOURCE = 64
MAX_PER_JOB = 64
"""Limit of a job's new tokens in review or waiting for one, in addition to one for each pod."""
MAX_TOKEN = 16 * 1024

REVIEW_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"


T = TypeVar("T")


@dataclass(frozen=True)
class TokenRequirements:
    """Properties that a token must match to be accepted for a job."""

    uid: str
    """UID of the PipeMorphJob."""
    audience: str
    attempt: int
    job_uid: str | None
    """UID of the attempt's batch Job; None until it is in status."""
    pod_count: int = 0
    """Number of the job's pods: the launchers of all may connect at once."""


class _ReviewRefusal(Exception):
    def __init__(self, status: int, reason: str, message: str, keep: float) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.keep = status, reason, message, keep


@dataclass(frozen=True)
class _ValidToken:
    """Valid token with the times, in seconds, of its last and next review, and of its end."""

    identity: Identity
    reviewed_at: float
    review_at: float
    valid_until: float


class PodTokenAuthenticator:
    """Implements :class:`~pipemorph.ingest.Authenticator` with TokenReviews."""

    def __init__(
        self,
        cluster: KubeClient,
        expected: Callable[[str, str], TokenRequirements | None],
        arrival: Callable[[str, str], Awaitable[None]] | None = None,
        may_come: Callable[[str, str], bool] = lambda *_: False,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``expected``: requirements of a job's tokens; None if there is no such job. ``arrival``
        waits a moment for a job that may be known soon; ``may_come``: True if it still may."""
        self._cluster = cluster
        self._expected = expected
        self._arrival, self._may_come = arrival, may_come
        self._clock = clock
        self._good: OrderedDict[bytes, _ValidToken] = OrderedDict()
        self._bad: OrderedDict[bytes, tuple[float, _ReviewRefusal]] = OrderedDict()
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._running_reviews: dict[bytes, asyncio.Task[Identity | _ReviewRefusal]] = {}
        self._reviews = asyncio.Semaphore(MAX_REVIEWS)

    async def authenticate_caller(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        """Identify the caller. Raises :class:`AccessDeniedError`."""
        expected = self._expected(namespace, job)
        if expected is None and self._arrival is not None:
            await self._arrival(namespace, job)
            expected = self._expected(namespace, job)
        if expected is None:
            if self._may_come(namespace, job):
                raise AccessDeniedError(503, f"job {namespace}/{job} is not known here yet")
            self._count_refusal("job")
            raise AccessDeniedError(
                403, f"job {namespace}/{job} is unknown or not accepting reports"
            )
        scope = f"{expected.uid}\0{expected.job_uid}\0{expected.attempt}\0{token}"
        key = hashlib.sha256(scope.encode("utf-8", "replace")).digest()
        now, good, bad = self._clock(), self._good.get(key), self._bad.get(key)
        answer: Identity | _ReviewRefusal | None = None
        if good is not None and now < good.valid_until:
            answer = good.identity
        elif good is None and bad is not None and now < bad[0]:
            answer = bad[1]
        if answer is None or (good is not None and now >= good.review_at):
            try:
                check_claims(token, expected.audience, now)
            except InvalidTokenError as unfit:
                self._count_refusal(unfit.reason)
                raise AccessDeniedError(401, str(unfit)) from None
            reviewed = self._start_review(key, token, namespace, expected, source)
            if answer is None:
                # A disconnecting caller must not cancel the review for the others.
                answer = (
                    reviewed
                    if isinstance(reviewed, _ReviewRefusal)
                    else await asyncio.shield(reviewed)
                )
        if isinstance(answer, _ReviewRefusal):
            self._count_refusal(answer.reason)
            raise AccessDeniedError(answer.status, answer.message)
        return answer

    def _start_review(
        self, key: bytes, token: str, namespace: str, expected: TokenRequirements, source: str
    ) -> asyncio.Task[Identity | _ReviewRefusal] | _ReviewRefusal:
        """Review of the token, shared by concurrent callers with the same token."""
        task = self._running_reviews.get(key)
        if task is None:
            # Limits of unknown tokens do not apply to a token that was valid before.
            parties = [] if key in self._good else [("source", source), ("job", expected.uid)]
            most = {"source": MAX_PER_SOURCE, "job": MAX_PER_JOB + expected.pod_count}
            for kind, who in parties:
                if self._under_way[kind, who] >= most[kind]:
                    message = f"{most[kind]} new tokens of this {kind} are already being checked"
                    return _ReviewRefusal(429, "crowded", f"{message}; try again", 0.0)
            task = asyncio.create_task(self._review_and_cache(key, token, namespace, expected))
            self._running_reviews[key] = task
            self._under_way.update(parties)
            task.add_done_callback(lambda _: self._finish_review(key, parties))
        return task

    def _finish_review(self, key: bytes, parties: list[tuple[str, str]]) -> None:
        self._running_reviews.pop(key, None)
        for party in parties:
            self._under_way[party] -= 1
            if not self._under_way[party]:
                del self._under_way[party]

    async def _review_and_cache(
        self, key: bytes, token: str, namespace: str, expected: TokenRequirements
    ) -> Identity | _ReviewRefusal:
        known = self._good.get(key)
        try:
            async with (
                self._reviews,
                asyncio.timeout(ANSWER_SECONDS if known is not None else None),
            ):
                identity = await self._review_token(token, namespace, expected, known)
        except _ReviewRefusal as refusal:
            self._good.pop(key, None)
            cache_answer(
                self._bad, key, (self._clock() + refusal.keep, refusal), MAX_INVALID_CACHED
            )
            return refusal
        except REQUEST_ERRORS as error:
            now = self._clock()
            # A refusal of the review is an answer, unless the API server is overloaded or failing.
            away = not isinstance(error, KubeApiError) or error.status >= 500 or error.status == 429
            if away and known is not None and now < (end := known.reviewed_at + OUTAGE_SECONDS):
                again_at = now + RETRY_SECONDS / 2
                until = min(end, now + RETRY_SECONDS + ANSWER_SECONDS)
                cache_answer(
                    self._good,
                    key,
                    replace(known, review_at=again_at, valid_until=until),
                    MAX_VALID_CACHED,
                )
                return known.identity
            # Reject the call if the token cannot be checked: the agent retries, and ranks train on.
            message = f"the token could not be checked: {describe_error(error)}"
            return _ReviewRefusal(503, "unreachable", message, 0.0)
        now = self._clock()
        again_at = now + VALID_CACHE_SECONDS * random.uniform(*REVIEW_AGAIN_FRACTIONS)
        cache_answer(
            self._good,
            key,
            _ValidToken(identity, now, again_at, now + VALID_CACHE_SECONDS),
            MAX_VALID_CACHED,
        )
        return identity

    async def _review_token(
        self, token: str, namespace: str, expected: TokenRequirements, known: _ValidToken | None
    ) -> Identity:
        """Review a token. ``known``: its entry if it was valid before. Then its pod is known to be
        a rank, and the review fails once the pod is gone, because the token is bound to it."""
        TOKEN_REVIEWS.inc()
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [expected.audience]},
        }
        status = (await self._cluster.post(REVIEW_PATH, review)).get("status") or {}
        if not status.get("authenticated") or expected.audience not in (
            status.get("audiences") or ()
        ):
            raise _ReviewRefusal(
                401, "review", "the API server rejected the token", INVALID_CACHE_SECONDS
            )
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        pod, uid = _read_first_value(extra, POD_NAME), _read_first_value(extra, POD_UID)
        if pod is None or uid is None:
            raise _ReviewRefusal(
                403, "unbound", "the token is not bound to a pod", INVALID_CACHE_SECONDS
            )
        subject = str(user.get("username", ""))
        if subject.split(":")[:3] != ["system", "serviceaccount", namespace]:
            raise _ReviewRefusal(
                403, "pod", "the token belongs to another namespace", INVALID_CACHE_SECONDS
            )
        if known is not None:
            return known.identity
        found = await self._cluster.get(build_path("Pod", namespace, pod))
        problem = "is gone" if found is None else explain_misplaced_pod(found, uid, expected)
        if problem:
            raise _ReviewRefusal(403, "pod", f"pod {pod} {problem}", MISPLACED_CACHE_SECONDS)
        return Identity(f"pod {pod}", uid)

    @staticmethod
    def _count_refusal(reason: str) -> None:
        REFUSED.labels(reason=reason).inc()


def explain_misplaced_pod(pod: Mapping[str, Any], pod_uid: str, expected: TokenRequirements) -> str:
    """Reason why a pod is not a rank of the current attempt; empty if it is one.

    Checks its UID, its labels for job and attempt, and that its controller is that attempt's Job:
    any user who may create pods or Jobs in the namespace can set labels.
    """
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    if metadata.get("uid") != pod_uid:
        return "has been replaced by another pod of that name"
    if labels.get(names.LABEL_JOB_UID) != expected.uid:
        return "is not a rank of this job"
    attempt = labels.get(names.LABEL_ATTEMPT)
    if attempt != str(expected.attempt):
        return f"is a rank of attempt {attempt}; attempt {expected.attempt} is in progress"
    if expected.job_uid is None:
        return f"cannot be verified yet: attempt {expected.attempt} has no Job in status"
    if read_controller_uid(pod) != expected.job_uid:
        return f"was not created by the Job of attempt {attempt}"
    return ""


def cache_answer(cache: OrderedDict[bytes, T], key: bytes, answer: T, most: int) -> None:
    """Store an answer as the newest of at most ``most``."""
    cache[key] = answer
    cache.move_to_end(key)
    while len(cache) > most:
        cache.popitem(last=False)


def _read_first_value(extra: Mapping[str, Any], key: str) -> str | None:
    values = extra.get(key)
    return str(values[0]) if values else None


# --- unverified claims of a token -------------------------------------------------------------
#
# Checking them rejects most invalid tokens without an API request.


class InvalidTokenError(Exception):
    """Raised for a token that is certainly invalid. ``reason``: label of a metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_claims(token: str, audience: str, now: float) -> None:
    """Raise :class:`InvalidTokenError` for a token that is not a JWT, has expired or has another
    audience.

    Does not verify the signature: the API server reviews tokens that pass.
    """
    claims = _decode_claims(token)
    expires = claims.get("exp")
    if isinstance(expires, (int, float)) and expires <= now:
        # The claim can be any number, even one beyond the range of float.
        raise InvalidTokenError("expired", f"the token expired {now - max(expires, 0):.0f} s ago")
    found = claims.get("aud")
    audiences = found if isinstance(found, list) else [found]
    if audience not in audiences:
        raise InvalidTokenError("audience", "the token's audience is not this job's ingest")


def _decode_claims(token: str) -> dict[str, Any]:
    parts = token.split(".")
    try:
        if len(token) > MAX_TOKEN or len(parts) != 3:
            raise ValueError("not three parts")
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        if not isinstance(claims, dict):
            raise ValueError("claims are not an object")
    except (ValueError, binascii.Error, RecursionError):
        raise InvalidTokenError("malformed", "the token is not a service-account token") from None
    return claims
