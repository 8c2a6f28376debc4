"""Rights to speak for a job on a cluster: tokens and pods, and a storm of forged ones."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from operator_objects import UID
from prometheus_client import REGISTRY

from pipemorph.ingest import AccessDeniedError
from pipemorph_operator.ingest import auth
from pipemorph_operator.ingest.auth import (
    MAX_PER_JOB,
    MAX_PER_SOURCE,
    MAX_REVIEWS,
    OUTAGE_SECONDS,
    POD_NAME,
    POD_UID,
    RETRY_SECONDS,
    REVIEW_AGAIN_FRACTIONS,
    VALID_CACHE_SECONDS,
    PodTokenAuthenticator,
    TokenRequirements,
)
from pipemorph_operator.kube.client import KubeApiError

AUDIENCE = f"pipemorph.io/jobs/team/gpt/{UID}"


def token(**claims: Any) -> str:
    values = {"aud": [AUDIENCE], "exp": 2000} | claims
    middle = base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")
    return f"head.{middle}.signature"


class Api:
    """An API server that knows one pod and its token."""

    def __init__(self) -> None:
        self.reviews = self.reads = 0
        self.away: Exception | None = None
        """The answer to all requests."""
        self.status: dict[str, Any] = {
            "authenticated": True,
            "audiences": [AUDIENCE],
            "user": {
                "username": "system:serviceaccount:team:default",
                "extra": {POD_NAME: ["p0"], POD_UID: ["uid-p0"]},
            },
        }
        self.pod: dict[str, Any] | None = {
            "metadata": {
                "uid": "uid-p0",
                "labels": {"pipemorph.io/job-uid": UID, "pipemorph.io/attempt": "1"},
                "ownerReferences": [{"kind": "Job", "controller": True, "uid": "job-1"}],
            }
        }

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        self.reviews += 1
        await asyncio.sleep(0)
        if self.away is not None:
            raise self.away
        return {"status": self.status}

    async def get(self, url: str) -> dict[str, Any] | None:
        assert url == "/api/v1/namespaces/team/pods/p0"
        self.reads += 1
        return self.pod


class Door:
    def __init__(self) -> None:
        self.api = Api()
        self.now = 1000.0
        self.reason = ""
        self.known = {("team", "gpt"): TokenRequirements(UID, AUDIENCE, 1, "job-1")}
        self.authenticator = PodTokenAuthenticator(
            self.api, lambda ns, name: self.known.get((ns, name)), clock=lambda: self.now
        )

    async def knock(self, text: str, namespace: str = "team", job: str = "gpt") -> int:
        try:
            await self.authenticator.authenticate_caller(text, namespace, job)
        except AccessDeniedError as refused:
            self.reason = refused.reason
            return refused.status
        return 200


async def test_a_rank_is_let_in_and_reviewed_once_a_minute() -> None:
    door = Door()
    assert [await door.knock(token()) for _ in range(5)] == [200] * 5
    assert door.api.reviews == 1
    door.now += VALID_CACHE_SECONDS + 1
    assert await door.knock(token()) == 200
    assert door.api.reviews == 2


async def test_a_token_in_use_is_reviewed_again_and_no_request_waits_for_it() -> None:
    door = Door()
    slow = door.api = door.authenticator._cluster = Slow()
    slow.go.set()
    assert await door.knock(slow.known) == 200
    slow.go.clear()
    door.now += VALID_CACHE_SECONDS * REVIEW_AGAIN_FRACTIONS[1]
    for _ in range(3):
        await asyncio.wait_for(
            door.authenticator.authenticate_caller(slow.known, "team", "gpt"), 15
        )
    assert slow.reviews == 1, "the second has not been answered yet"
    slow.go.set()
    (review,) = door.authenticator._running_reviews.values()
    await asyncio.wait_for(review, 15)
    door.now += VALID_CACHE_SECONDS * (1 - REVIEW_AGAIN_FRACTIONS[1]) + 1
    await asyncio.wait_for(door.authenticator.authenticate_caller(slow.known, "team", "gpt"), 15)
    assert (slow.reviews, slow.reads) == (2, 1), "its pod is the one that was read"


async def test_a_token_in_use_that_is_no_longer_valid_is_refused_after_its_review() -> None:
    door = Door()
    assert await door.knock(token()) == 200
    change(door.api, "unknown")
    door.now += VALID_CACHE_SECONDS + 1
    assert await door.knock(token()) == 401


@pytest.mark.parametrize("away", [ConnectionRefusedError(), TimeoutError()], ids=repr)
async def test_ranks_are_served_while_the_api_server_is_away(away: Exception) -> None:
    """Ranks are let in for five minutes, if they were before."""
    door = Door()
    assert await door.knock(token()) == 200
    door.api.away = away
    for _ in range(int(OUTAGE_SECONDS / RETRY_SECONDS) - 1):
        door.now += RETRY_SECONDS
        assert await door.knock(token()) == 200
    assert await door.knock(forged(1)) == 503
    door.now += RETRY_SECONDS + 1
    assert await door.knock(token()) == 503
    door.api.away = None
    assert await door.knock(token()) == 200


async def test_an_api_server_that_refuses_the_review_is_not_away() -> None:
    door = Door()
    assert await door.knock(token()) == 200
    door.api.away = KubeApiError(403, "Forbidden", "tokenreviews may not be created")
    door.now += VALID_CACHE_SECONDS + 1
    assert await door.knock(token()) == 503


async def test_callers_with_one_token_share_one_review() -> None:
    door = Door()
    await asyncio.gather(
        *(door.authenticator.authenticate_caller(token(), "team", "gpt") for _ in range(50))
    )
    assert door.api.reviews == 1


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("garbage", 401),
        ("a.b.c", 401),
        (token(aud=["other"]), 401),
        (token(aud="other"), 401),
        (token(exp=999), 401),
        ("x" * 100_000, 401),
    ],
)
async def test_what_cannot_be_right_never_reaches_the_api_server(text: str, status: int) -> None:
    door = Door()
    assert await door.knock(text) == status
    assert door.api.reviews == 0


def refused(reason: str) -> float:
    return REGISTRY.get_sample_value("pipemorph_ingest_refused_total", {"reason": reason}) or 0.0


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ('{"exp": -1%s}' % ("0" * 400), "expired"),
        ('{"exp": -1%s}' % ("0" * 5000), "malformed"),
        ('{"exp": 1%s}' % ("0" * 400), "audience"),
        ('{"exp": -Infinity}', "expired"),
        ('{"exp": NaN, "aud": {}}', "audience"),
        ('{"exp": [1], "aud": [[], {}, null]}', "audience"),
        ("[" * 5000, "malformed"),
        ('{"exp": true', "malformed"),
        ("[]", "malformed"),
    ],
    ids=lambda value: value[:24],
)
async def test_claims_of_any_kind_are_refused_and_counted(claims: str, reason: str) -> None:
    middle = base64.urlsafe_b64encode(claims.encode()).decode()
    door, before = Door(), refused(reason)
    assert await door.knock(f"head.{middle}.signature") == 401
    assert (refused(reason) - before, door.api.reviews) == (1, 0)


def change(api: Api, what: str) -> None:
    user = api.status["user"]
    match what:
        case "unknown":
            api.status = {"authenticated": False}
        case "audience":
            api.status["audiences"] = ["https://kubernetes.default.svc"]
        case "unbound":
            user["extra"] = {}
        case "namespace":
            user["username"] = "system:serviceaccount:other:default"
        case "human":
            user["username"] = "alice"
        case "gone":
            api.pod = None
        case _:
            metadata = api.pod["metadata"]
            owner = metadata["ownerReferences"][0]
            metadata |= {
                "replaced": {"uid": "another"},
                "label": {"labels": metadata["labels"] | {"pipemorph.io/job-uid": "another"}},
                "attempt": {"labels": metadata["labels"] | {"pipemorph.io/attempt": "0"}},
                "owner": {"ownerReferences": []},
                "another Job": {"ownerReferences": [owner | {"uid": "job-of-a-stranger"}]},
                "no controller": {"ownerReferences": [owner | {"controller": False}]},
                "no Job": {"ownerReferences": [owner | {"kind": "ReplicaSet"}]},
            }[what]


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        ("unknown", 401, "rejected the token"),
        ("audience", 401, "rejected the token"),
        ("unbound", 403, "not bound to a pod"),
        ("namespace", 403, "belongs to another namespace"),
        ("human", 403, "belongs to another namespace"),
        ("gone", 403, "pod p0 is gone"),
        ("replaced", 403, "pod p0 has been replaced"),
        ("label", 403, "pod p0 is not a rank of this job"),
        ("attempt", 403, "pod p0 is a rank of attempt 0; attempt 1 is in progress"),
        ("owner", 403, "pod p0 was not created by the Job of attempt 1"),
        ("another Job", 403, "pod p0 was not created by the Job of attempt 1"),
        ("no controller", 403, "pod p0 was not created by the Job of attempt 1"),
        ("no Job", 403, "pod p0 was not created by the Job of attempt 1"),
    ],
)
async def test_who_is_turned_away(what: str, status: int, words: str) -> None:
    door = Door()
    change(door.api, what)
    assert await door.knock(token()) == status
    assert words in door.reason


async def test_a_rank_of_an_attempt_that_is_over_is_turned_away_at_once() -> None:
    """The token was found good a moment ago."""
    door = Door()
    assert await door.knock(token()) == 200
    door.known["team", "gpt"] = TokenRequirements(UID, AUDIENCE, 2, None)
    assert await door.knock(token()) == 403
    assert "a rank of attempt 1; attempt 2 is in progress" in door.reason
    change(door.api, "attempt")
    door.known["team", "gpt"] = TokenRequirements(UID, AUDIENCE, 0, None)
    assert await door.knock(token()) == 403
    assert "attempt 0 has no Job in status" in door.reason


class Slow(Api):
    """Knows one token, and withholds all answers until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.now = self.most = 0
        self.known = token()

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.wait()
        self.now -= 1
        self.reviews += 1
        good = body["spec"]["token"] == self.known
        return {"status": self.status if good else {"authenticated": False}}


def forged(number: int) -> str:
    return token(jti=number)


def flood(door: Door, sources: list[str], job: str = "gpt") -> list[asyncio.Task[int]]:
    """A forged token from each of these addresses."""

    async def knock(number: int, source: str) -> int:
        try:
            await door.authenticator.authenticate_caller(forged(number), "team", job, source)
        except AccessDeniedError as refused:
            return refused.status
        return 200

    return [asyncio.create_task(knock(*each)) for each in enumerate(sources)]


async def test_forged_tokens_of_one_address_leave_questions_to_the_others() -> None:
    door = Door()
    slow = door.api = door.authenticator._cluster = Slow()
    door.known["team", "other"] = door.known["team", "gpt"]
    door.known["team", "gpt"] = TokenRequirements("another-uid", AUDIENCE, 1, "job-1")
    storm = flood(door, ["10.0.0.66"] * 1000)
    await asyncio.sleep(0)
    rank = asyncio.create_task(
        door.authenticator.authenticate_caller(slow.known, "team", "other", "10.0.0.1")
    )
    await asyncio.sleep(0)
    slow.go.set()
    await asyncio.wait_for(rank, 15)
    answers = await asyncio.gather(*storm)
    assert (answers.count(401), answers.count(429)) == (MAX_PER_SOURCE, 936)
    assert slow.reviews == MAX_PER_SOURCE + 1
    assert slow.most == MAX_REVIEWS
    assert not door.authenticator._under_way


@pytest.mark.parametrize("pods", [0, 100])
async def test_forged_tokens_of_many_addresses_keep_no_rank_out_that_was_in(pods: int) -> None:
    """Launchers of all pods may send requests at once."""
    door = Door()
    door.known["team", "gpt"] = replace(door.known["team", "gpt"], pod_count=pods)
    slow = door.api = door.authenticator._cluster = Slow()
    slow.go.set()
    assert await door.knock(slow.known) == 200
    door.now += VALID_CACHE_SECONDS + 1
    slow.go.clear()
    storm = flood(door, [f"10.0.1.{i}" for i in range(200)])
    await asyncio.sleep(0)
    rank = asyncio.create_task(
        door.authenticator.authenticate_caller(slow.known, "team", "gpt", "10.0.0.1")
    )
    await asyncio.sleep(0)
    slow.go.set()
    await asyncio.wait_for(rank, 15)
    answers = await asyncio.gather(*storm)
    assert (answers.count(401), answers.count(429)) == (MAX_PER_JOB + pods, 136 - pods)


async def test_what_is_bad_pushes_out_nothing_that_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_VALID_CACHED", 5)
    monkeypatch.setattr(auth, "MAX_INVALID_CACHED", 5)
    door = Door()
    slow = door.api = door.authenticator._cluster = Slow()
    slow.go.set()
    assert await door.knock(slow.known) == 200
    assert {await door.knock(forged(i)) for i in range(20)} == {401}
    before = slow.reviews
    assert await door.knock(slow.known) == 200
    assert {await door.knock(forged(i)) for i in range(15, 20)} == {401}
    assert slow.reviews == before, "the newest bad ones are remembered as well"
    assert len(door.authenticator._bad) == 5


async def test_tokens_that_came_together_do_not_expire_together() -> None:
    door = Door()
    for i in range(50):
        assert await door.knock(forged(i)) == 200
    ends = [entry.review_at for entry in door.authenticator._good.values()]
    assert max(ends) <= door.now + VALID_CACHE_SECONDS
    assert max(ends) - min(ends) > VALID_CACHE_SECONDS / 10


async def test_a_token_of_one_job_is_none_of_another() -> None:
    door = Door()
    door.known["team", "other"] = TokenRequirements("other-uid", AUDIENCE, 1, "job-1")
    assert await door.knock(token()) == 200
    assert await door.knock(token(), job="other") == 403, "the answer for another job was taken"
    assert await door.knock(token(), job="none") == 403


async def test_a_job_that_may_still_come_is_no_reason_to_give_up() -> None:
    async def ask(may_come: bool) -> int:
        door = PodTokenAuthenticator(Api(), lambda *_: None, None, lambda *_: may_come)
        with pytest.raises(AccessDeniedError) as refused:
            await door.authenticate_caller(token(), "default", "gpt")
        return refused.value.status

    assert [await ask(may_come) for may_come in (True, False)] == [503, 403]


async def test_who_asks_for_a_job_that_is_about_to_be_known_waits_for_it() -> None:
    door = Door()
    known = door.known.pop(("team", "gpt"))

    async def arrival(namespace: str, job: str) -> None:
        if job == "gpt":
            door.known[namespace, job] = known

    door.authenticator = PodTokenAuthenticator(
        door.api, lambda ns, name: door.known.get((ns, name)), arrival, clock=lambda: door.now
    )
    assert await door.knock(token()) == 200
    assert await door.knock(token(), job="another") == 403
