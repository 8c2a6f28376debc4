"""Who may watch a job on a cluster, and a storm of those who may not."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from prometheus_client import REGISTRY

from pipemorph.ingest import Refused, WatchProcessLost
from pipemorph.ingest.watch.messages import Check, Verdict
from pipemorph.watch.access import audience
from pipemorph_operator.cluster.client import ApiRefused
from pipemorph_operator.ingest import viewers
from pipemorph_operator.ingest.auth import REVIEW_PATH
from pipemorph_operator.ingest.viewers import ACCESS_PATH, ViewerAuthenticator, ViewerReviews
from pipemorph_operator.metrics import API_REQUESTS

AUDIENCE = audience("team", "gpt")
USER = {
    "username": "system:serviceaccount:team:pipemorph-viewer",
    "uid": "u1",
    "groups": ["system:serviceaccounts"],
    "extra": {"authentication.kubernetes.io/credential-id": ["JTI=1"]},
}


def token(**claims: Any) -> str:
    values = {"aud": [AUDIENCE], "exp": 2000} | claims
    middle = base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")
    return f"head.{middle}.signature"


class Api:
    """An API server that knows one token, and whether its account may get the job."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.authenticated = self.allowed = True
        self.audiences = [AUDIENCE]
        self.away: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((url, body["spec"]))
        await self.gate.wait()
        if self.away is not None:
            raise self.away
        if url == REVIEW_PATH:
            status = {"authenticated": self.authenticated, "audiences": self.audiences}
            return {"status": status | {"user": USER}}
        assert url == ACCESS_PATH
        return {"status": {"allowed": self.allowed}}


class Door:
    def __init__(self) -> None:
        self.api, self.now = Api(), 1000.0
        self.reviews = ViewerReviews(self.api, clock=lambda: self.now)
        self.authenticator = ViewerAuthenticator(self.reviews, clock=lambda: self.now)

    async def ask(self, text: str, job: str = "gpt") -> int:
        try:
            await self.authenticator.authenticate(text, "team", job, "10.0.0.9")
        except Refused as refused:
            return refused.status
        return 200

    def knock(self, text: str, job: str = "gpt") -> int:
        return asyncio.run(self.ask(text, job))


def test_who_may_get_the_job_may_watch_it_and_is_asked_about_every_half_minute() -> None:
    door = Door()
    assert [door.knock(token()) for _ in range(5)] == [200] * 5
    (where, review), (then, access) = door.api.asked
    assert (where, review["audiences"], then) == (REVIEW_PATH, [AUDIENCE], ACCESS_PATH)
    assert (access["user"], access["groups"], access["extra"], access["uid"]) == (
        USER["username"], USER["groups"], USER["extra"], USER["uid"],
    )  # fmt: skip
    assert access["resourceAttributes"] == {
        "verb": "get", "group": "pipemorph.io", "resource": "pipemorphjobs",
        "namespace": "team", "name": "gpt",
    }  # fmt: skip
    door.now += viewers.KEPT_SECONDS + 1
    door.api.allowed = False
    assert door.knock(token()) == 403, "the right is gone"
    assert len(door.api.asked) == 4


@pytest.mark.parametrize(
    "text",
    ["x", "a.b.c", token(exp=999), token(aud=["https://kubernetes.default.svc"]),
     token(aud=[audience("team", "other")]), token(aud=[audience("other", "gpt")])],
)  # fmt: skip
def test_what_cannot_be_right_never_reaches_the_api_server(text: str) -> None:
    door = Door()
    assert door.knock(text) == 401
    assert door.api.asked == []


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"authenticated": False}, 401), ({"audiences": []}, 401), ({"allowed": False}, 403)],
)
def test_who_may_not_learns_nothing_else(changes: dict[str, Any], status: int) -> None:
    """The verdict is cached for some seconds."""
    door = Door()
    vars(door.api).update(changes)
    assert [door.knock(token()) for _ in range(3)] == [status] * 3
    asked = len(door.api.asked)
    door.now += viewers.KEPT_BAD_SECONDS + 1
    assert door.knock(token()) == status and len(door.api.asked) == 2 * asked


def test_a_verdict_on_one_job_is_none_on_another() -> None:
    door = Door()
    both = token(aud=[AUDIENCE, audience("team", "other")])
    assert door.knock(both) == 200
    door.api.audiences = [audience("team", "other")]
    door.api.allowed = False
    assert door.knock(both, "other") == 403
    assert door.knock(both) == 200


@pytest.mark.parametrize("error", [OSError("away"), ApiRefused(403, "Forbidden", "no right")])
def test_nobody_is_let_in_while_the_api_server_cannot_be_asked(error: Exception) -> None:
    door = Door()
    door.api.away = error
    assert door.knock(token()) == 503
    door.api.away = None
    assert door.knock(token()) == 200, "that is not kept"


def test_callers_with_one_token_share_one_review_and_a_flood_is_bounded() -> None:
    door = Door()

    async def crowd() -> None:
        assert await door.ask(token()) == 200
        door.now += viewers.KEPT_SECONDS + 1
        door.api.asked.clear()
        door.api.gate.clear()
        forged = [asyncio.create_task(door.ask(token(n=n))) for n in range(200)]
        while sum(each.done() for each in forged) < 200 - viewers.MOST_OF_ONE_JOB:
            await asyncio.sleep(0)
        assert {each.result() for each in forged if each.done()} == {429}
        # One of another job, and one that was let in before, still wait for their review.
        other = asyncio.create_task(door.ask(token(aud=[audience("team", "other")]), "other"))
        again = [asyncio.create_task(door.ask(token())) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(door.api.asked) == viewers.MOST_REVIEWS
        assert not other.done() and not any(each.done() for each in again)
        door.api.gate.set()
        assert await asyncio.gather(*again) == [200] * 3
        assert await other == 401, "its audience was not found by the review"
        await asyncio.gather(*forged)
        assert len(door.api.asked) == 2 * viewers.MOST_OF_ONE_JOB + 1 + 2

    asyncio.run(crowd())


def test_verdicts_are_bounded_and_bad_ones_push_out_nothing_that_is_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewers, "MOST_KEPT", 3)
    monkeypatch.setattr(viewers, "MOST_KEPT_BAD", 3)
    door = Door()
    for n in range(3):
        assert door.knock(token(good=n)) == 200
    door.api.authenticated = False
    for n in range(10):
        assert door.knock(token(n=n)) == 401
    asked = len(door.api.asked)
    assert door.knock(token(n=9)) == 401
    assert [door.knock(token(good=n)) for n in (1, 2, 0)] == [200] * 3
    assert len(door.api.asked) == asked, "all of these are known"
    # Of the good ones, the one goes that was not used for longest.
    door.api.authenticated = True
    assert door.knock(token(good=3)) == 200
    asked = len(door.api.asked)
    assert [door.knock(token(good=n)) for n in (0, 2, 3)] == [200] * 3
    assert len(door.api.asked) == asked
    assert door.knock(token(good=1)) == 200 and len(door.api.asked) == asked + 2
    for kept in (door.reviews._good, door.reviews._bad):
        assert len(kept) == 3


def counted(metric: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"pipemorph_ingest_{metric}_total", labels) or 0.0


@pytest.mark.parametrize(
    ("reason", "text", "reviews"),
    [("malformed", "x", 0), ("crowded", token(), 0), ("review", token(), 1)],
)
def test_what_viewers_do_is_not_counted_as_of_pods(
    monkeypatch: pytest.MonkeyPatch, reason: str, text: str, reviews: int
) -> None:
    """Alerts watch what pods do, and any user of the cluster may ask with a forged token."""
    if reason == "crowded":
        monkeypatch.setattr(viewers, "MOST_WAITING", 0)

    def of_pods() -> tuple[float, float]:
        return counted("refused", reason=reason), counted("token_reviews")

    def of_viewers() -> tuple[float, float]:
        return counted("viewers_refused", reason=reason), counted("viewer_token_reviews")

    pods, (refused, reviewed) = of_pods(), of_viewers()
    door = Door()
    door.api.authenticated = False
    assert door.knock(text) in (401, 429)
    assert of_viewers() == (refused + 1, reviewed + reviews)
    assert of_pods() == pods


def test_requests_of_the_process_that_reviews_are_counted_where_they_are_scraped() -> None:
    class Counted(Api):
        async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
            API_REQUESTS.labels(verb="POST", code="201").inc()  # As the client of a cluster does.
            return await super().post(url, body)

    reviews = ViewerReviews(Counted(), clock=lambda: 1000.0)
    asked = Check(token(), "team", "gpt")
    made = [asyncio.run(reviews(asked)) for _ in range(2)]
    assert [each.requests for each in made] == [{("POST", "201"): 2}, {}]

    async def ask(_: Check) -> Verdict:
        return made[0]

    def counted() -> float:
        where = {"verb": "POST", "code": "201"}
        return REGISTRY.get_sample_value("pipemorph_api_requests_total", where) or 0.0

    before = counted()
    viewer = ViewerAuthenticator(ask, clock=lambda: 1000.0)
    asyncio.run(viewer.authenticate(token(), "team", "gpt"))
    assert counted() == before + 2


def test_who_cannot_be_checked_now_is_told_to_ask_again() -> None:
    async def lost(_: Check) -> Verdict:
        raise WatchProcessLost("the process that makes pages ended; ask again")

    viewer = ViewerAuthenticator(lost, clock=lambda: 1000.0)
    with pytest.raises(Refused, match="ask again") as refused:
        asyncio.run(viewer.authenticate(token(), "team", "gpt"))
    assert refused.value.status == 503
