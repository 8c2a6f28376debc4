"""Authenticates callers: a pod of the job, by a service-account token for the job.

A rank's token is projected into its pod, has the job as audience and is bound to the pod. A
TokenReview by the API server verifies it and names the pod, which must be a rank of the job's
current attempt. Results are cached, good and bad ones separately. Forged tokens are free to make,
so each client address and each job may have only a few reviews in progress, lest they block others.
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

from pipemorph.ingest import Identity, Refused
from pipemorph_operator import names
from pipemorph_operator.cluster.client import REQUEST_ERRORS, ApiRefused, Cluster, path, reason_of
from pipemorph_operator.cluster.facts import made_by
from pipemorph_operator.metrics import REFUSED, TOKEN_REVIEWS

KEPT_SECONDS = 60.0
"""Longest caching of a valid token, and so the longest time that a deleted pod's token is still
accepted while the API server answers."""
AGAIN = (0.6, 0.85)
"""Parts of that after which a token in use is reviewed again, beside the requests that it comes
with: none of them waits. At random in between, to spread reviews after a restart."""
AWAY_SECONDS = 300.0
"""How long a token that was valid is accepted while the API server cannot be asked."""
ANSWER_SECONDS, RETRY_SECONDS = 5.0, 10.0
"""An API server that has not answered within the first cannot be asked; when it is asked again."""
KEPT_BAD_SECONDS = 10.0
KEPT_MISPLACED_SECONDS = 2.0
"""Caching of a pod that does not match the job: it may match as soon as status is updated."""
MOST_KEPT = 20_000
MOST_KEPT_BAD = 2_000
MOST_REVIEWS = 32
"""Limit of concurrent TokenReviews."""
MOST_OF_ONE_SOURCE = 64
MOST_OF_ONE_JOB = 64
"""Limit of a job's new tokens in review or waiting for one, beside one for each of its pods."""
MAX_TOKEN = 16 * 1024

REVIEW_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"


T = TypeVar("T")


@dataclass(frozen=True)
class Expected:
    """What a token must match to be accepted for a job."""

    uid: str
    """UID of the PipeMorphJob."""
    audience: str
    attempt: int
    job_uid: str | None
    """UID of the attempt's batch Job; None until it is in status."""
    pods: int = 0
    """How many the job has: the launchers of all may ask at once."""


class _Refusal(Exception):
    def __init__(self, status: int, reason: str, message: str, keep: float) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.keep = status, reason, message, keep


@dataclass(frozen=True)
class _Kept:
    """A token that was found valid. ``until``: it is accepted; ``again_at``: it is reviewed again;
    ``reviewed_at``: it was reviewed last."""

    identity: Identity
    reviewed_at: float
    again_at: float
    until: float


class PodTokenAuthenticator:
    """An :class:`~pipemorph.ingest.Authenticator` that uses TokenReviews."""

    def __init__(
        self,
        cluster: Cluster,
        expected: Callable[[str, str], Expected | None],
        arrival: Callable[[str, str], Awaitable[None]] | None = None,
        may_come: Callable[[str, str], bool] = lambda *_: False,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``expected``: what a job's tokens must match; None if there is no such job. ``arrival``
        waits a moment if it may be known soon; ``may_come``: whether it still may."""
        self._cluster = cluster
        self._expected = expected
        self._arrival, self._may_come = arrival, may_come
        self._clock = clock
        self._good: OrderedDict[bytes, _Kept] = OrderedDict()
        self._bad: OrderedDict[bytes, tuple[float, _Refusal]] = OrderedDict()
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._asking: dict[bytes, asyncio.Task[Identity | _Refusal]] = {}
        self._reviews = asyncio.Semaphore(MOST_REVIEWS)

    async def authenticate(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        """Identity of the caller. Raises :class:`Refused`."""
        expected = self._expected(namespace, job)
        if expected is None and self._arrival is not None:
            await self._arrival(namespace, job)
            expected = self._expected(namespace, job)
        if expected is None:
            if self._may_come(namespace, job):
                raise Refused(503, f"job {namespace}/{job} is not known here yet")
            self._count("job")
            raise Refused(403, f"job {namespace}/{job} is unknown or not accepting reports")
        scope = f"{expected.uid}\0{expected.job_uid}\0{expected.attempt}\0{token}"
        key = hashlib.sha256(scope.encode("utf-8", "replace")).digest()
        now, good, bad = self._clock(), self._good.get(key), self._bad.get(key)
        answer: Identity | _Refusal | None = None
        if good is not None and now < good.until:
            answer = good.identity
        elif good is None and bad is not None and now < bad[0]:
            answer = bad[1]
        if answer is None or (good is not None and now >= good.again_at):
            try:
                check_claims(token, expected.audience, now)
            except Unfit as unfit:
                self._count(unfit.reason)
                raise Refused(401, str(unfit)) from None
            reviewed = self._reviewed(key, token, namespace, expected, source)
            if answer is None:
                # A caller that disconnects must not cancel the review for the others.
                answer = (
                    reviewed if isinstance(reviewed, _Refusal) else await asyncio.shield(reviewed)
                )
        if isinstance(answer, _Refusal):
            self._count(answer.reason)
            raise Refused(answer.status, answer.message)
        return answer

    def _reviewed(
        self, key: bytes, token: str, namespace: str, expected: Expected, source: str
    ) -> asyncio.Task[Identity | _Refusal] | _Refusal:
        """The review of the token; concurrent callers with the same token share one."""
        task = self._asking.get(key)
        if task is None:
            # A token that was valid before is not forged: limits for unknown tokens do not apply.
            parties = [] if key in self._good else [("source", source), ("job", expected.uid)]
            most = {"source": MOST_OF_ONE_SOURCE, "job": MOST_OF_ONE_JOB + expected.pods}
            for kind, who in parties:
                if self._under_way[kind, who] >= most[kind]:
                    message = f"{most[kind]} new tokens of this {kind} are already being checked"
                    return _Refusal(429, "crowded", f"{message}; try again", 0.0)
            task = asyncio.create_task(self._ask(key, token, namespace, expected))
            self._asking[key] = task
            self._under_way.update(parties)
            task.add_done_callback(lambda _: self._asked(key, parties))
        return task

    def _asked(self, key: bytes, parties: list[tuple[str, str]]) -> None:
        self._asking.pop(key, None)
        for party in parties:
            self._under_way[party] -= 1
            if not self._under_way[party]:
                del self._under_way[party]

    async def _ask(
        self, key: bytes, token: str, namespace: str, expected: Expected
    ) -> Identity | _Refusal:
        known = self._good.get(key)
        try:
            async with (
                self._reviews,
                asyncio.timeout(ANSWER_SECONDS if known is not None else None),
            ):
                identity = await self._review(token, namespace, expected, known)
        except _Refusal as refusal:
            self._good.pop(key, None)
            keep(self._bad, key, (self._clock() + refusal.keep, refusal), MOST_KEPT_BAD)
            return refusal
        except REQUEST_ERRORS as error:
            now = self._clock()
            # An API server that refuses the review has been asked.
            away = not isinstance(error, ApiRefused) or error.status >= 500 or error.status == 429
            if away and known is not None and now < (end := known.reviewed_at + AWAY_SECONDS):
                again_at = now + RETRY_SECONDS / 2
                until = min(end, now + RETRY_SECONDS + ANSWER_SECONDS)
                keep(self._good, key, replace(known, again_at=again_at, until=until), MOST_KEPT)
                return known.identity
            # Reject if it cannot be checked: the agent retries while its ranks keep training.
            message = f"the token could not be checked: {reason_of(error)}"
            return _Refusal(503, "unreachable", message, 0.0)
        now = self._clock()
        again_at = now + KEPT_SECONDS * random.uniform(*AGAIN)
        keep(self._good, key, _Kept(identity, now, again_at, now + KEPT_SECONDS), MOST_KEPT)
        return identity

    async def _review(
        self, token: str, namespace: str, expected: Expected, known: _Kept | None
    ) -> Identity:
        """``known``: of a token that was valid, whose pod is known to be a rank. Its review fails
        once that pod is gone: the token is bound to it."""
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
            raise _Refusal(401, "review", "the API server rejected the token", KEPT_BAD_SECONDS)
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        pod, uid = _first(extra, POD_NAME), _first(extra, POD_UID)
        if pod is None or uid is None:
            raise _Refusal(403, "unbound", "the token is not bound to a pod", KEPT_BAD_SECONDS)
        subject = str(user.get("username", ""))
        if subject.split(":")[:3] != ["system", "serviceaccount", namespace]:
            raise _Refusal(403, "pod", "the token is of another namespace", KEPT_BAD_SECONDS)
        if known is not None:
            return known.identity
        found = await self._cluster.get(path("Pod", namespace, pod))
        problem = "is gone" if found is None else misplaced(found, uid, expected)
        if problem:
            raise _Refusal(403, "pod", f"pod {pod} {problem}", KEPT_MISPLACED_SECONDS)
        return Identity(f"pod {pod}", uid)

    @staticmethod
    def _count(reason: str) -> None:
        REFUSED.labels(reason=reason).inc()


def misplaced(pod: Mapping[str, Any], pod_uid: str, expected: Expected) -> str:
    """Why a pod is not a rank of the current attempt, or has another UID; empty if it matches.

    Checks its labels for job and attempt, and that its controller is that attempt's Job: anybody
    who may create pods or Jobs in the namespace can set labels.
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
    if made_by(pod) != expected.job_uid:
        return f"was not created by the Job of attempt {attempt}"
    return ""


def keep(kept: OrderedDict[bytes, T], key: bytes, answer: T, most: int) -> None:
    """Keep an answer as the newest of at most ``most``."""
    kept[key] = answer
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _first(extra: Mapping[str, Any], key: str) -> str | None:
    values = extra.get(key)
    return str(values[0]) if values else None


# --- unverified claims of a token -------------------------------------------------------------
#
# To check them rejects most invalid tokens without an API request.


class Unfit(Exception):
    """The token is certainly invalid. ``reason``: label of a metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_claims(token: str, audience: str, now: float) -> None:
    """Raise :class:`Unfit` for a token that is not a JWT, has expired or has another audience.

    Does not verify the signature: the API server reviews the tokens that pass.
    """
    claims = _claims(token)
    expires = claims.get("exp")
    if isinstance(expires, (int, float)) and expires <= now:
        # The claim can be any number, even one beyond the range of float.
        raise Unfit("expired", f"the token expired {now - max(expires, 0):.0f} s ago")
    found = claims.get("aud")
    audiences = found if isinstance(found, list) else [found]
    if audience not in audiences:
        raise Unfit("audience", "the token's audience is not this job's ingest")


def _claims(token: str) -> dict[str, Any]:
    parts = token.split(".")
    try:
        if len(token) > MAX_TOKEN or len(parts) != 3:
            raise ValueError("not three parts")
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        if not isinstance(claims, dict):
            raise ValueError("claims are not an object")
    except (ValueError, binascii.Error, RecursionError):
        raise Unfit("malformed", "the token is not a service-account token") from None
    return claims
