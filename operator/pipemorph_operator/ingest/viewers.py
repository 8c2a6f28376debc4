"""Authenticates users who watch a job: by a token for that job's page, and a right to the job.

The token is one that the API server has made for a service account, with the page as its only
audience. A TokenReview says whose it is, a SubjectAccessReview whether that account may ``get`` the
PipeMorphJob. Without both, a caller learns nothing, not even whether there is such a job. Verdicts
are cached for a short time, good and bad ones separately. That is done in the process that makes
pages, so that reports do not wait for it; the ingest itself refuses what cannot be a token for the
page. Viewers come through the API server and so from one address; what is reviewed for them at a
time is bounded, apart from what is for ranks. So are the metrics: any user of the cluster may ask
for a page with a forged token, which says nothing of pods.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

from pipemorph.ingest import Identity, Refused, WatchProcessLost
from pipemorph.ingest.watch.messages import Check, Verdict
from pipemorph.watch.access import audience
from pipemorph_operator.cluster.client import REQUEST_ERRORS, reason_of
from pipemorph_operator.ingest import token_claims
from pipemorph_operator.ingest.auth import REVIEW_PATH, keep
from pipemorph_operator.metrics import (
    API_REQUESTS,
    VIEWER_REVIEWS,
    VIEWERS_REFUSED,
    api_requests,
)
from pipemorph_operator.names import API_GROUP, PLURAL

KEPT_SECONDS, KEPT_BAD_SECONDS = 30.0, 10.0
"""How long a verdict is cached, and so the longest time that somebody watches whose token or right
is gone."""
MOST_KEPT = 2_000
MOST_KEPT_BAD = 2_000
MOST_REVIEWS = 4
"""Callers that are reviewed at once."""
MOST_WAITING = 64
"""Callers that wait for their review; the others are told to ask again."""
MOST_OF_ONE_JOB = 16
"""Of them, for one job."""
ACCESS_PATH = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class Api(Protocol):
    """The API requests that this needs."""

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]: ...


Refusal = tuple[int, str, str]
"""Status, reason for the metric, and what to tell."""


Ask = Callable[[Check], Awaitable[Verdict]]


class ViewerAuthenticator:
    """An :class:`~pipemorph.ingest.Authenticator` of viewers, at the ingest: lets another process
    review what could be a token for the page."""

    def __init__(
        self,
        ask: Ask,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``ask``: :class:`ViewerReviews` in that process, raises
        :class:`~pipemorph.ingest.WatchProcessLost`."""
        self._ask, self._clock = ask, clock

    async def authenticate(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        """Identity of the caller. Raises :class:`Refused`."""
        try:
            token_claims.check(token, audience(namespace, job), self._clock())
        except token_claims.Unfit as unfit:
            self._refuse(401, unfit.reason, str(unfit))
        try:
            verdict = await self._ask(Check(token, namespace, job))
        except WatchProcessLost as lost:
            self._refuse(503, "lost", str(lost))
        VIEWER_REVIEWS.inc(verdict.reviews)
        for (verb, code), count in verdict.requests.items():
            API_REQUESTS.labels(verb=verb, code=code).inc(count)
        if verdict.status != 200:
            self._refuse(verdict.status, verdict.reason, verdict.said)
        return Identity(verdict.said)

    @staticmethod
    def _refuse(status: int, reason: str, message: str) -> NoReturn:
        VIEWERS_REFUSED.labels(reason=reason).inc()
        raise Refused(status, message)


class ViewerReviews:
    """Reviews tokens of viewers, in the process that makes pages."""

    def __init__(self, api: Api, *, clock: Callable[[], float] = time.time) -> None:
        self._api, self._clock = api, clock
        # Until when a verdict holds, and the verdict. Good ones are in the order of their last use.
        self._good: OrderedDict[bytes, tuple[float, Identity]] = OrderedDict()
        self._bad: OrderedDict[bytes, tuple[float, Refusal]] = OrderedDict()
        self._asking: dict[bytes, tuple[tuple[str, str], asyncio.Task[Identity | Refusal]]] = {}
        self._reviews = asyncio.Semaphore(MOST_REVIEWS)
        self._untold = 0
        """Reviews of which no verdict has told."""
        self._requests = api_requests()
        """As told by verdicts."""

    async def __call__(self, asked: Check) -> Verdict:
        """The verdict."""
        verdict = await self._verdict(asked)
        reviews, self._untold = self._untold, 0
        before, self._requests = self._requests, api_requests()
        requests = self._requests - before
        if isinstance(verdict, Identity):
            return Verdict(200, verdict.subject, "", reviews, requests)
        status, reason, said = verdict
        return Verdict(status, said, reason, reviews, requests)

    async def _verdict(self, asked: Check) -> Identity | Refusal:
        wanted = audience(asked.namespace, asked.job)
        key = hashlib.sha256(f"{wanted}\0{asked.token}".encode("utf-8", "replace")).digest()
        verdict = self._known(key, self._clock())
        if verdict is not None:
            return verdict
        review = self._reviewed(key, asked.token, asked.namespace, asked.job)
        # A caller that is gone must not cancel the review for the others.
        return await asyncio.shield(review) if isinstance(review, asyncio.Task) else review

    def _known(self, key: bytes, now: float) -> Identity | Refusal | None:
        """A verdict that holds."""
        good, bad = self._good.get(key), self._bad.get(key)
        if good is not None:
            self._good.move_to_end(key)
            return good[1] if now < good[0] else None
        return bad[1] if bad is not None and now < bad[0] else None

    def _reviewed(
        self, key: bytes, token: str, namespace: str, job: str
    ) -> asyncio.Task[Identity | Refusal] | Refusal:
        """The review of the token; callers with the same one share it."""
        where = namespace, job
        found = self._asking.get(key)
        if found is not None:
            return found[1]
        # One that was good before is not forged.
        known = key in self._good
        same = sum(each == where for each, _ in self._asking.values())
        if not known and (len(self._asking) >= MOST_WAITING or same >= MOST_OF_ONE_JOB):
            return 429, "crowded", "too many new tokens are being checked; try again"
        task = asyncio.create_task(self._ask(key, token, namespace, job))
        self._asking[key] = where, task
        task.add_done_callback(lambda _: self._asking.pop(key, None))
        return task

    async def _ask(self, key: bytes, token: str, namespace: str, job: str) -> Identity | Refusal:
        try:
            async with self._reviews:
                verdict = await self._review(token, namespace, job)
        except REQUEST_ERRORS as error:
            return 503, "unreachable", f"the token could not be checked: {reason_of(error)}"
        if isinstance(verdict, Identity):
            keep(self._good, key, (self._clock() + KEPT_SECONDS, verdict), MOST_KEPT)
        else:
            self._good.pop(key, None)
            keep(self._bad, key, (self._clock() + KEPT_BAD_SECONDS, verdict), MOST_KEPT_BAD)
        return verdict

    async def _review(self, token: str, namespace: str, job: str) -> Identity | Refusal:
        self._untold += 1
        wanted = audience(namespace, job)
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [wanted]},
        }
        status = (await self._api.post(REVIEW_PATH, review)).get("status") or {}
        if not status.get("authenticated") or wanted not in (status.get("audiences") or ()):
            return 401, "review", "the API server rejected the token"
        user = status.get("user") or {}
        name = str(user.get("username", ""))
        access = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": name,
                "uid": user.get("uid", ""),
                "groups": user.get("groups") or [],
                "extra": user.get("extra") or {},
                "resourceAttributes": {
                    "verb": "get",
                    "group": API_GROUP,
                    "resource": PLURAL,
                    "namespace": namespace,
                    "name": job,
                },
            },
        }
        answer = (await self._api.post(ACCESS_PATH, access)).get("status") or {}
        if not answer.get("allowed"):
            return 403, "access", f"{name} may not get pipemorphjobs {namespace}/{job}"
        return Identity(name)
