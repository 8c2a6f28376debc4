"""The ingest's own parts: tokens, saved state, summaries, pacing. No cluster."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from support import UID, body

from pipemorph.control import JobController
from pipemorph.ingest import Refused
from pipemorph.spec import JobSpec
from pipemorph.status import JobStatus, SlowLink, TrainingStatus
from pipemorph.wire import LinkHealthReport
from pipemorph_operator.api import ApiRefused
from pipemorph_operator.ingest import auth, pace, saved, store
from pipemorph_operator.ingest.__main__ import decide
from pipemorph_operator.ingest.auth import (
    KEPT_SECONDS,
    MOST_OF_ONE_JOB,
    MOST_OF_ONE_SOURCE,
    MOST_REVIEWS,
    POD_NAME,
    POD_UID,
    Expected,
    PodTokenAuthenticator,
)
from pipemorph_operator.ingest.fence import Overtaken
from pipemorph_operator.ingest.store import ClusterStore
from pipemorph_operator.ingest.summary import Source, judge, summarize

AUDIENCE = f"pipemorph.io/jobs/team/gpt/{UID}"


def token(**claims: Any) -> str:
    values = {"aud": [AUDIENCE], "exp": 2000} | claims
    middle = base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")
    return f"head.{middle}.signature"


class Api:
    """An API server that knows one pod and its token."""

    def __init__(self) -> None:
        self.reviews = 0
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
        return {"status": self.status}

    async def get(self, url: str) -> dict[str, Any] | None:
        assert url == "/api/v1/namespaces/team/pods/p0"
        return self.pod


class Door:
    def __init__(self) -> None:
        self.api = Api()
        self.now = 1000.0
        self.reason = ""
        self.known = {("team", "gpt"): Expected(UID, AUDIENCE, 1, "job-1")}
        self.authenticator = PodTokenAuthenticator(
            self.api, lambda ns, name: self.known.get((ns, name)), clock=lambda: self.now
        )

    def knock(self, text: str, namespace: str = "team", job: str = "gpt") -> int:
        async def ask() -> int:
            try:
                await self.authenticator.authenticate(text, namespace, job)
            except Refused as refused:
                self.reason = refused.reason
                return refused.status
            return 200

        return asyncio.run(ask())


def test_a_rank_is_let_in_and_asked_about_once_a_minute() -> None:
    door = Door()
    assert [door.knock(token()) for _ in range(5)] == [200] * 5
    assert door.api.reviews == 1
    door.now += KEPT_SECONDS + 1
    assert door.knock(token()) == 200
    assert door.api.reviews == 2


def test_callers_with_one_token_share_one_review() -> None:
    door = Door()

    async def crowd() -> None:
        await asyncio.gather(
            *(door.authenticator.authenticate(token(), "team", "gpt") for _ in range(50))
        )

    asyncio.run(crowd())
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
def test_what_cannot_be_right_never_reaches_the_api_server(text: str, status: int) -> None:
    door = Door()
    assert door.knock(text) == status
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
def test_claims_of_any_kind_are_refused_and_counted(claims: str, reason: str) -> None:
    middle = base64.urlsafe_b64encode(claims.encode()).decode()
    door, before = Door(), refused(reason)
    assert door.knock(f"head.{middle}.signature") == 401
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
            assert api.pod is not None
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
        ("unknown", 401, "does not know the token"),
        ("audience", 401, "does not know the token"),
        ("unbound", 403, "bound to no pod"),
        ("namespace", 403, "of another namespace"),
        ("human", 403, "of another namespace"),
        ("gone", 403, "pod p0 is gone"),
        ("replaced", 403, "pod p0 is another one of that name"),
        ("label", 403, "pod p0 is not a rank of this job"),
        ("attempt", 403, "pod p0 is a rank of attempt 0; attempt 1 is in progress"),
        ("owner", 403, "pod p0 was not made by the Job of attempt 1"),
        ("another Job", 403, "pod p0 was not made by the Job of attempt 1"),
        ("no controller", 403, "pod p0 was not made by the Job of attempt 1"),
        ("no Job", 403, "pod p0 was not made by the Job of attempt 1"),
    ],
)
def test_who_is_turned_away(what: str, status: int, words: str) -> None:
    door = Door()
    change(door.api, what)
    assert door.knock(token()) == status
    assert words in door.reason


def test_a_rank_of_an_attempt_that_is_over_is_turned_away_at_once() -> None:
    """Also one whose token was found good a moment ago."""
    door = Door()
    assert door.knock(token()) == 200
    door.known["team", "gpt"] = Expected(UID, AUDIENCE, 2, None)
    assert door.knock(token()) == 403
    assert "a rank of attempt 1; attempt 2 is in progress" in door.reason
    change(door.api, "attempt")
    door.known["team", "gpt"] = Expected(UID, AUDIENCE, 0, None)
    assert door.knock(token()) == 403
    assert "attempt 0 has no Job on record" in door.reason


class Slow(Api):
    """Knows one token, and answers nobody before the test lets it."""

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
            await door.authenticator.authenticate(forged(number), "team", job, source)
        except Refused as refused:
            return refused.status
        return 200

    return [asyncio.create_task(knock(*each)) for each in enumerate(sources)]


def test_forged_tokens_of_one_address_leave_questions_to_the_others() -> None:
    door = Door()
    slow = door.api = door.authenticator._api = Slow()

    async def run() -> None:
        storm = flood(door, ["10.0.0.66"] * 1000)
        await asyncio.sleep(0)
        rank = asyncio.create_task(
            door.authenticator.authenticate(slow.known, "team", "other", "10.0.0.1")
        )
        await asyncio.sleep(0)
        slow.go.set()
        await asyncio.wait_for(rank, 15)
        answers = await asyncio.gather(*storm)
        assert (answers.count(401), answers.count(429)) == (MOST_OF_ONE_SOURCE, 936)
        assert slow.reviews == MOST_OF_ONE_SOURCE + 1
        assert slow.most == MOST_REVIEWS
        assert not door.authenticator._under_way

    door.known["team", "other"] = door.known["team", "gpt"]
    door.known["team", "gpt"] = Expected("another-uid", AUDIENCE, 1, "job-1")
    asyncio.run(run())


def test_forged_tokens_of_many_addresses_keep_no_rank_out_that_was_in() -> None:
    door = Door()

    slow = door.api = door.authenticator._api = Slow()
    slow.go.set()
    assert door.knock(slow.known) == 200
    door.now += KEPT_SECONDS + 1

    async def run() -> None:
        slow.go.clear()
        storm = flood(door, [f"10.0.1.{i}" for i in range(200)])
        await asyncio.sleep(0)
        rank = asyncio.create_task(
            door.authenticator.authenticate(slow.known, "team", "gpt", "10.0.0.1")
        )
        await asyncio.sleep(0)
        slow.go.set()
        await asyncio.wait_for(rank, 15)
        answers = await asyncio.gather(*storm)
        assert (answers.count(401), answers.count(429)) == (MOST_OF_ONE_JOB, 136)

    asyncio.run(run())


def test_what_is_bad_pushes_out_nothing_that_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MOST_KEPT", 5)
    monkeypatch.setattr(auth, "MOST_KEPT_BAD", 5)
    door = Door()
    slow = door.api = door.authenticator._api = Slow()
    slow.go.set()
    assert door.knock(slow.known) == 200
    assert {door.knock(forged(i)) for i in range(20)} == {401}
    before = slow.reviews
    assert door.knock(slow.known) == 200
    assert {door.knock(forged(i)) for i in range(15, 20)} == {401}
    assert slow.reviews == before, "the newest bad ones are remembered as well"
    assert len(door.authenticator._bad) == 5


def test_tokens_that_came_together_do_not_expire_together() -> None:
    door = Door()
    for i in range(50):
        assert door.knock(forged(i)) == 200
    ends = [until for until, _ in door.authenticator._good.values()]
    assert max(ends) <= door.now + KEPT_SECONDS
    assert max(ends) - min(ends) > KEPT_SECONDS / 10


def test_a_token_of_one_job_is_none_of_another() -> None:
    door = Door()
    door.known["team", "other"] = Expected("other-uid", AUDIENCE, 1, "job-1")
    assert door.knock(token()) == 200
    assert door.knock(token(), job="other") == 403, "the answer for another job was taken"
    assert door.knock(token(), job="none") == 403


# --- saved state ------------------------------------------------------------------------------


def spec(stages: int = 4) -> JobSpec:
    return JobSpec.model_validate(body(stages=stages)["spec"])


def report(sequence: int, **changes: Any) -> LinkHealthReport:
    values = {
        "job": "gpt", "namespace": "team", "attempt": 0, "sequence": sequence, "sent_at": 1.0,
        "state": "training", "iteration": 0, "observed_epoch": 0, "applied_epoch": 0,
    }  # fmt: skip
    return LinkHealthReport.model_validate(values | changes)


def test_saved_state_comes_back_and_attempts_go_on() -> None:
    controller = JobController(spec())
    controller.report(report(5, observed_epoch=7), 1000.0)
    state = saved.pack(controller.snapshot())
    epoch = controller.epoch
    assert state.epoch == epoch > 7
    back, problem = saved.restore(spec(), state, 0, lambda _: None)
    assert (back.epoch, back.attempt, problem) == (epoch, 0, "")
    later, _ = saved.restore(spec(), state, 3, lambda _: None)
    assert (later.epoch, later.attempt) == (epoch, 3)


@pytest.mark.parametrize("damage", ["", "!!", "AAAA", base64.b64encode(b"{}").decode()])
def test_damaged_state_still_gives_its_epoch(damage: str) -> None:
    state = saved.pack(JobController(spec()).snapshot()).model_copy(
        update={"snapshot": damage, "epoch": 9}
    )
    back, problem = saved.restore(spec(), state, 0, lambda _: None)
    assert back.epoch == 9
    assert "only its epoch is kept" in problem


def test_a_large_plan_fits_into_status() -> None:
    many = JobSpec.model_validate(body(stages=128)["spec"] | {"schedule": {"microbatches": 512}})
    controller = JobController(many)
    snapshot = controller.snapshot()
    plan = {"stages": ["".join(f"F{i}B{i}W{i}" for i in range(512))] * 128}
    state = saved.pack(snapshot | {"bases": plan})
    assert len(state.snapshot) < saved.MAX_PACKED / 4


def test_what_does_not_fit_is_refused() -> None:

    noise = random.Random(1).randbytes(saved.MAX_PACKED).hex()
    with pytest.raises(saved.TooLarge, match="fit into status"):
        saved.pack({"attempt": 0, "epoch": 0, "noise": noise})


# --- summaries --------------------------------------------------------------------------------


def test_conditions_before_with_and_after_reports() -> None:
    controller = JobController(spec())
    found = judge(Source(controller, None, 1), [], 1000.0)
    assert {c.type: (c.status, c.reason) for c in found} == {
        "LinksHealthy": ("Unknown", "NoReportsYet"),
        "ScheduleAdapted": ("False", "InitialPlan"),
        "Offloaded": ("False", "AllLinksDirect"),
        "RailsHealthy": ("Unknown", "NoReportsYet"),
    }
    controller.report(report(1), 1000.0)
    found = judge(Source(controller, 1000.0, 1), found, 1001.0)
    assert found[0].reason == "NoRecentSamples"
    found = judge(Source(controller, 1000.0, 1), found, 1060.0)
    assert (found[0].status, found[0].reason) == ("Unknown", "ReportsStale")


def test_a_new_ingest_leaves_status_as_it_is_until_it_has_a_report() -> None:
    controller = JobController(spec(), attempt=1)
    last = TrainingStatus(attempt=1, state="training", iteration=70)
    assert summarize(Source(controller, None, 3), 101.0, last=last) == last
    assert summarize(Source(controller, 100.0, 3), 101.0, last=last).iteration == 0
    older = last.model_copy(update={"attempt": 0})
    assert summarize(Source(controller, None, 3), 101.0, last=older).iteration == 0


def test_the_links_of_a_job_that_has_ended_are_neither_slow_nor_unknown() -> None:
    last = TrainingStatus(
        attempt=0,
        iteration=70,
        slow_link_count=1,
        slow_links=[
            SlowLink(
                link=1, replica=0, direction="forward", delay_ms=9, wire_time_ms=9, confidence=1
            )
        ],
        unknown_link_count=2,
    )
    ended = Source(JobController(spec()), None, 1, ended=True)
    told = summarize(ended, 100.0, last=last)
    assert (told.iteration, told.slow_link_count, told.unknown_link_count) == (70, 0, 0)
    assert told.slow_links == []
    assert [(c.status, c.reason) for c in judge(ended, [], 100.0) if c.type == "LinksHealthy"] == [
        ("Unknown", "JobFinished")
    ]


class StatusWrites:
    """An API server that takes every status, after as many as it was given refusals."""

    def __init__(self, *refusals: Exception) -> None:
        self.taken: list[dict[str, Any]] = []
        self.refusals = list(refusals)

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        self.taken.append(obj["status"])
        return obj


@pytest.mark.parametrize("there", [True, False], ids=["seen", "while no ingest was there"])
def test_a_job_that_ends_is_told_so_once(there: bool) -> None:
    """Also if it ended while no ingest was there."""
    api: Any = StatusWrites()
    slow = {"type": "LinksHealthy", "status": "False", "reason": "SlowLinks", "message": "m"}
    slow["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    job = body(stages=4)
    job["status"] = {
        "attempt": 0,
        "conditions": [slow],
        "training": {"attempt": 0, "iteration": 7, "slowLinkCount": 1},
    }

    async def run() -> None:
        store = ClusterStore(api)
        if there:
            store.changed("LISTED", job)
        job["status"]["conditions"].append(slow | {"type": "Complete", "status": "True"})
        store.changed("MODIFIED" if there else "LISTED", job)
        store.changed("MODIFIED", job)
        for _ in range(5):
            await asyncio.sleep(0)
        job["status"] |= api.taken[0]
        job["status"]["conditions"].append(slow | {"type": "Complete", "status": "True"})
        store.changed("MODIFIED", job)
        await asyncio.sleep(0)

    asyncio.run(run())
    (told,) = api.taken
    assert (told["training"]["iteration"], told["training"]["slowLinkCount"]) == (7, 0)
    assert told["conditions"][0]["reason"] == "JobFinished"


@pytest.mark.parametrize(
    ("refusals", "written"),
    [
        ([ApiRefused(429, "TooManyRequests", "later"), ConnectionResetError(), TimeoutError()], 1),
        ([ApiRefused(404, "NotFound", "no such job")], 0),
    ],
    ids=["for now", "for good"],
)
def test_the_last_word_on_a_job_is_tried_again(
    refusals: list[Exception], written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links would be slow for ever: nobody looks at a job again that has ended."""
    monkeypatch.setattr(store, "LAST_WORD_PAUSES", (0.0,) * 5)
    api: Any = StatusWrites(*refusals)
    job = body(stages=4)
    job["status"] = {"attempt": 0}
    ended = {"type": "Failed", "status": "True", "reason": "RankFailed", "message": "m"}
    ended["lastTransitionTime"] = "2026-01-01T00:00:00Z"

    async def run() -> None:
        jobs = ClusterStore(api)
        jobs.changed("LISTED", job)
        job["status"]["conditions"] = [ended]
        jobs.changed("MODIFIED", job)
        await asyncio.gather(*jobs._last_words.values())

    asyncio.run(run())
    assert (len(api.taken), api.refusals) == (written, [])


class Shared:
    """An API server with one job that several write: each write makes another version."""

    def __init__(self) -> None:
        self.job = body(stages=4)
        self.job["metadata"]["resourceVersion"] = "1"
        self.job["status"] = {"attempt": 0}
        self.breaks: list[Exception] = []
        """What writers are told of writes that got through."""

    def write(self, status: dict[str, Any]) -> None:
        self.job["status"] |= status
        self.job["metadata"]["resourceVersion"] += "0"

    async def get(self, url: str) -> dict[str, Any]:
        assert url.endswith("/namespaces/team/pipemorphjobs/gpt")
        return copy.deepcopy(self.job)

    async def create(self, obj: dict[str, Any], owner: str) -> dict[str, Any]:
        return obj

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        version = obj["metadata"].get("resourceVersion")
        if version not in (None, self.job["metadata"]["resourceVersion"]):
            raise ApiRefused(409, "Conflict", "the object has been modified")
        self.write(obj["status"])
        if self.breaks:
            raise self.breaks.pop(0)
        return copy.deepcopy(self.job)


def ingest_of(api: Shared) -> tuple[ClusterStore, JobController]:
    cluster: Any = api
    store = ClusterStore(cluster)
    store.changed("LISTED", copy.deepcopy(api.job))
    controller = store.lookup("team", "gpt")
    assert isinstance(controller, JobController)
    return store, controller


def epochs(api: Shared) -> tuple[int, int]:
    """On record: of the newest plan, and of the one in the snapshot."""
    control = JobStatus.model_validate(api.job["status"]).control
    assert control is not None
    return control.epoch, saved.unpack(control)["epoch"]


def test_of_two_ingests_the_one_that_is_behind_loses(caplog: pytest.LogCaptureFixture) -> None:
    """Both hold the job at the same epoch; the next one must not stand for two plans."""
    api = Shared()
    (one, first), (other, second) = ingest_of(api), ingest_of(api)
    first.report(report(1, observed_epoch=4), 1000.0)
    second.report(report(1, observed_epoch=4), 1000.0)

    async def run() -> None:
        await one.persist("team", "gpt", first.snapshot())
        before = api.job["status"]["control"]
        with pytest.raises(Overtaken):
            await other.persist("team", "gpt", second.snapshot() | {"flaps": 7})
        assert api.job["status"]["control"] == before
        await one.persist("team", "gpt", first.snapshot())

    asyncio.run(run())
    assert "another ingest has written a plan of this job; it goes on from there" in caplog.text
    taken = other.lookup("team", "gpt")
    assert isinstance(taken, JobController) and taken is not second
    assert taken.epoch == first.epoch == epochs(api)[0] >= 4


@pytest.mark.parametrize("got_through", [False, True])
def test_other_writers_than_an_ingest_are_written_after(got_through: bool) -> None:
    """The operator; and the ingest itself, of whose writes the answer may be lost."""
    api = Shared()
    store, controller = ingest_of(api)

    async def run() -> None:
        for epoch in (3, 5, 8):
            controller.report(report(epoch, observed_epoch=epoch), 1000.0)
            if got_through:
                api.breaks = [TimeoutError()]
                with pytest.raises(TimeoutError):
                    await store.persist("team", "gpt", controller.snapshot())
                controller.report(report(epoch + 1, observed_epoch=epoch + 1), 1000.0)
            api.write({"state": "Running"})
            await store.persist("team", "gpt", controller.snapshot())
            assert epochs(api) == (controller.epoch,) * 2

    asyncio.run(run())
    assert store.lookup("team", "gpt") is controller


def test_a_job_created_again_under_the_name_is_not_written_to() -> None:
    api = Shared()
    store, controller = ingest_of(api)

    async def run() -> None:
        api.job["metadata"] |= {"uid": "another", "resourceVersion": "9"}
        with pytest.raises(ApiRefused, match="409"):
            await store.persist("team", "gpt", controller.snapshot())

    asyncio.run(run())
    assert "control" not in api.job["status"]


def test_a_summary_is_status_as_the_crd_has_it() -> None:
    controller = JobController(spec())
    controller.report(report(1, iteration=12), 1000.0)
    summary = summarize(Source(controller, 1000.0, 1), 1000.0)
    dumped = JobStatus(training=summary).model_dump(mode="json", by_alias=True, exclude_none=True)
    training = dumped["training"]
    assert training["iteration"] == 12
    assert training["lastReportTime"] == "1970-01-01T00:16:40Z"
    assert training["paths"] == ["direct"] * 3
    assert len(training["warmup"]) == 4


def test_turns_are_written_at_once_and_progress_now_and_then() -> None:
    assert pace.is_due(turned=True, since_write=0.0, jobs=5000)
    assert not pace.is_due(turned=False, since_write=1.0, jobs=1)
    assert pace.is_due(turned=False, since_write=5.0, jobs=1)
    assert not pace.is_due(turned=False, since_write=20.0, jobs=1000)
    assert pace.look_interval(1) == pace.LOOK_SECONDS
    writes_per_second = 1000 / pace.progress_interval(1000)
    assert writes_per_second <= pace.WRITES_PER_SECOND


def test_decisions_of_large_jobs_hold_up_large_jobs_only() -> None:
    async def run() -> None:
        asked: list[str] = []

        async def small(replan: Any) -> Any:
            asked.append("small")

        async def large(replan: Any) -> Any:
            asked.append("large")

        for stages, microbatches in ((64, 64), (64, 65)):
            many = body(stages=stages, schedule={"microbatches": microbatches})
            replan: Any = SimpleNamespace(spec=JobSpec.model_validate(many["spec"]))
            await decide(small, large, replan)
        assert asked == ["small", "large"]

    asyncio.run(run())
