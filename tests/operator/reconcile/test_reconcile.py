"""How decisions are carried out, where the API server refuses; the decisions are elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from fake_api import FakeCluster
from kstatus import kstatus
from operator_objects import CONFIG, body
from pydantic import ValidationError

from pipemorph_operator.cluster.client import ApiRefused, _refusal, path
from pipemorph_operator.cluster.events import Event, emit
from pipemorph_operator.cluster.job import read_status
from pipemorph_operator.reconcile import reconciler
from pipemorph_operator.reconcile.reconciler import NAMESPACE_ENDS_SECONDS, Reconciler
from pipemorph_operator.reconcile.waits import LOOK_AGAIN_SECONDS


class Refusing:
    """An API server with one new job, which takes nothing."""

    def __init__(self, refusal: ApiRefused) -> None:
        self.refusal = refusal
        self.status: dict[str, Any] = {}
        self.statuses: list[dict[str, Any]] = []

    async def get(self, url: str) -> dict[str, Any] | None:
        return body() | {"status": self.status} if "pipemorphjobs" in url else None

    async def create(self, obj: dict[str, Any], owner: str) -> dict[str, Any]:
        raise self.refusal

    async def delete(self, url: str, **_: Any) -> None:
        """Whatever is there."""

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        self.statuses.append(obj["status"])
        return obj


class Events(Refusing):
    """One that takes events and statuses."""

    def __init__(self) -> None:
        super().__init__(refusal(500, "not asked for here"))
        self.events: list[dict[str, Any]] = []

    async def create(self, obj: dict[str, Any], owner: str) -> dict[str, Any]:
        self.events.append(obj)
        return obj


class Taking(Events):
    """One that takes everything and gives each object a UID."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        self.made: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.job: dict[str, Any] | None = None

    async def get(self, url: str) -> dict[str, Any] | None:
        if "/jobs/" in url:
            return self.job
        found = await super().get(url)
        return found | {"spec": found["spec"] | self.spec} if found else None

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        if subresource:
            return await super().apply(obj, owner, subresource=subresource)
        return self.make(obj)

    async def create(self, obj: dict[str, Any], owner: str) -> Any:
        if obj["kind"] == "Event":
            return await super().create(obj, owner)
        return self.make(obj)

    def make(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.made.append(obj)
        return obj | {"metadata": obj["metadata"] | {"uid": f"uid-of-{obj['kind']}"}}

    async def delete(self, url: str, **_: Any) -> None:
        self.deleted.append(url)


class RefusingJobs(Taking):
    """One that takes all but Jobs."""

    def __init__(self, spec: dict[str, Any], status: int) -> None:
        super().__init__(spec)
        self.answer = status

    def make(self, obj: dict[str, Any]) -> dict[str, Any]:
        if obj["kind"] == "Job":
            raise refusal(self.answer, "spec.template: Invalid value")
        return super().make(obj)


def refusal(status: int, message: str, *causes: str) -> ApiRefused:
    """As in the body of an answer."""
    said = {"reason": "Forbidden", "message": message}
    details = {"causes": [{"reason": cause, "field": "metadata.namespace"} for cause in causes]}
    return _refusal(status, json.dumps(said | {"details": details}).encode())


def reconcile(api: Any) -> float | None:
    return asyncio.run(Reconciler(api, lambda: CONFIG, lambda *_: []).reconcile("team", "gpt"))


def test_a_namespace_that_is_being_deleted_is_nobodys_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = refusal(403, "namespace team is being terminated", "NamespaceTerminating")
    api = Refusing(ends)
    with caplog.at_level(logging.WARNING):
        assert reconcile(api) == NAMESPACE_ENDS_SECONDS
    assert (caplog.records, api.statuses) == ([], [])


def test_a_quota_is_said_in_status_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    api = Refusing(refusal(403, "exceeded quota: jobs"))
    assert reconcile(api) == LOOK_AGAIN_SECONDS
    (status,) = api.statuses
    assert status["state"] == "Pending"
    found = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}
    assert found["PodsReady"] == ("False", "ObjectRefused", "exceeded quota: jobs")
    assert "attempt" not in status
    assert kstatus(body() | {"status": status}) == "Failed"
    # The next turn finds the same, and has nothing to write or to tell.
    caplog.clear()
    api.status = status
    assert reconcile(api) == LOOK_AGAIN_SECONDS
    assert (len(api.statuses), caplog.records) == (1, [])


@pytest.mark.parametrize("answer", [429, 500, 503])
def test_another_refusal_is_said_in_status_and_tried_again_soon(answer: int) -> None:
    api = RefusingJobs({}, answer)
    with pytest.raises(ApiRefused, match="Invalid value"):
        reconcile(api)
    (status,) = api.statuses
    assert (status["state"], "Invalid value" in json.dumps(status["conditions"])) == (
        "Pending",
        True,
    )
    assert [event["reason"] for event in api.events] == ["ObjectRefused"]
    assert kstatus(body() | {"status": status}) == "InProgress", "nobody has to act"
    assert not api.deleted, "the Job may have been made all the same, and its pods need the rest"


@pytest.mark.parametrize("answer", [400, 404, 413, 422])
def test_what_the_api_server_does_not_take_is_said_in_status(
    answer: int, caplog: pytest.LogCaptureFixture
) -> None:
    api = Refusing(refusal(answer, "spec.template: Invalid value"))
    assert reconcile(api) == LOOK_AGAIN_SECONDS
    (status,) = api.statuses
    assert status["state"] == "Pending", "an edit could not help any more"
    assert "spec.template: Invalid value" in json.dumps(status["conditions"])
    assert "event ObjectRefused was rejected" in caplog.text


@pytest.mark.parametrize("running", [False, True])
def test_a_fault_of_the_operator_is_said_in_status_and_tried_again(
    running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("no such thing")

    monkeypatch.setattr("pipemorph_operator.reconcile.reconciler.decide", broken)
    api = Events()
    if running:
        was = {"type": "Running", "status": "True", "reason": "AllRanksReady", "message": ""}
        api.status = {"conditions": [was | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    for _ in range(2):
        with pytest.raises(AttributeError, match="no such thing"):
            reconcile(api)
        api.status = api.statuses[-1]
    (status,) = api.statuses
    assert status["state"] == ("Running" if running else "Pending")
    condition = next(c for c in status["conditions"] if c["type"] == "Running")
    assert condition["reason"] == "InternalError"
    assert "AttributeError: no such thing" in condition["message"]
    assert [event["reason"] for event in api.events] == ["InternalError"]


def test_a_status_that_cannot_be_read_does_not_hide_why(caplog: pytest.LogCaptureFixture) -> None:
    api = Events()
    api.status = {"attempt": "three"}
    with pytest.raises(ValidationError, match="attempt"):
        reconcile(api)
    assert "the internal error could not be written to status" in caplog.text
    assert "StatusRefused" in [event["reason"] for event in api.events]


@pytest.mark.parametrize("gang", [{"volcano": {}}, {"coscheduling": {}}], ids=min)
def test_a_pod_group_goes_with_its_attempts_config_map(gang: dict[str, Any]) -> None:
    """The garbage collector deletes what has no owner left: there must be no other."""
    api = Taking({"placement": {"gang": gang}})
    reconcile(api)
    made = {obj["kind"]: obj["metadata"] for obj in api.made}
    wanted = ["Secret", "Service", "ConfigMap", "PodGroup", "Job"]
    assert list(made) == wanted, "pods before their group"
    (owner,) = made["PodGroup"]["ownerReferences"]
    assert owner == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": made["ConfigMap"]["name"],
        "uid": "uid-of-ConfigMap",
    }
    for kind in ("Service", "ConfigMap", "Job"):
        assert made[kind]["ownerReferences"][0]["kind"] == "PipeMorphJob"
    assert api.statuses[-1]["jobUid"] == "uid-of-Job"
    # Suspended, the attempt is over.
    api.status, api.spec = api.statuses[-1], api.spec | {"suspend": True}
    api.job = {"metadata": made["Job"] | {"uid": "uid-of-Job"}}
    reconcile(api)
    assert f"/api/v1/namespaces/team/configmaps/{made['ConfigMap']['name']}" in api.deleted
    secrets = {each["metadata"]["name"] for each in api.made if each["kind"] == "Secret"}
    assert len(secrets) == 2, "of the engine and of the live page"
    assert {f"/api/v1/namespaces/team/secrets/{each}" for each in secrets} <= set(api.deleted)


def test_what_was_made_before_a_refusal_goes() -> None:
    api = RefusingJobs({"placement": {"gang": {"volcano": {}}}}, 422)
    reconcile(api)
    assert api.statuses[-1]["state"] == "Pending"
    made = next(obj["metadata"]["name"] for obj in api.made if obj["kind"] == "ConfigMap")
    assert f"/api/v1/namespaces/team/configmaps/{made}" in api.deleted


async def test_events_are_named_in_their_order() -> None:
    """As they are shown if one second has several."""
    api = Events()
    job = body()["metadata"]
    told = [Event("Normal", "Running", ""), Event("Normal", "Complete", "")]
    for event in told:
        await emit(api, job, event, "operator")  # type: ignore[arg-type]
    found = sorted(api.events, key=lambda event: str(event["metadata"]["name"]))
    assert [event["reason"] for event in found] == ["Running", "Complete"]
    assert all(event["metadata"]["name"].startswith("gpt.") for event in found)


def test_an_event_that_is_emitted_again_is_counted_up() -> None:
    """Also one that the API server has dropped meanwhile: that begins anew."""
    api, job = FakeCluster(), body()["metadata"]
    same, other = Event("Warning", "Failed", "no room"), Event("Warning", "Failed", "no device")

    async def emitted(*events: Event) -> list[tuple[str, int]]:
        for event in events:
            await emit(api, job, event, "operator")
        return sorted((each["message"], each["count"]) for each in api.objects.values())

    assert asyncio.run(emitted(same, other, same, same)) == [("no device", 1), ("no room", 3)]
    assert asyncio.run(emitted(other)) == [("no device", 2), ("no room", 3)]
    api.objects.clear()
    assert asyncio.run(emitted(same, same)) == [("no room", 2)]
    assert len(api.made("create")) == 3


class Older(Events):
    """One that refuses to write what is stored under another CRD."""

    def __init__(self, answer: ApiRefused) -> None:
        super().__init__()
        self.answer = answer

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        raise self.answer

    async def create(self, obj: dict[str, Any], owner: str) -> Any:
        return await super().create(obj, owner) if obj["kind"] == "Event" else None


@pytest.mark.parametrize(
    ("status", "message", "told"),
    [
        (422, "no such key: microbatches", True),
        (500, "failed to create typed live object", True),
        (400, "strict decoding error", True),
        (503, "try later", False),
        (403, "namespace team is being terminated", False),
    ],
)
def test_a_status_that_cannot_be_written_is_told_by_an_event(
    status: int, message: str, told: bool
) -> None:
    api = Older(refusal(status, message, *(["NamespaceTerminating"] if status == 403 else [])))
    api.status = {"state": "Pending"}
    with contextlib.suppress(ApiRefused):
        reconcile(api)
    said = [event["message"] for event in api.events if event["reason"] == "StatusRefused"]
    assert said == ([f"status cannot be written; retrying: {message}"] if told else [])


@pytest.mark.parametrize(
    "written",
    [
        {"state": "Hibernating"},
        {"pods": {"wanted": "many"}, "training": {"iteration": -1}},
        {"attempts": [{"attempt": "x"}, {"attempt": 1, "endedAt": "t", "reason": "Disrupted"}]},
        {"nodes": [{"name": 5}]},
    ],
)
def test_what_another_release_wrote_and_nothing_rests_on_is_left_out(written: Any) -> None:
    status = read_status({"status": {"attempt": 3, "restarts": 2} | written})
    assert (status.attempt, status.restarts) == (3, 2)
    assert len(status.attempts) == (1 if "attempts" in written else 0)
    with pytest.raises(ValidationError):
        read_status({"status": written | {"restarts": "two"}})


class Written(Taking):
    """One where somebody else writes each job's status at the same time."""

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        if subresource:
            self.statuses.append(obj)
            raise refusal(409, "the object has been modified")
        return await super().apply(obj, owner, subresource=subresource)


def test_what_was_decided_on_a_status_that_is_no_more_is_decided_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Written({})
    assert reconcile(api) == 0.0
    (written,) = api.statuses
    assert written["metadata"]["resourceVersion"] == "7", "it would be taken, whoever wrote since"
    assert (api.events, api.deleted) == ([], []), "done on account of what is not on record"
    assert "refused" not in caplog.text


class Left(Taking):
    """One with a ConfigMap that a turn before left there."""

    def make(self, obj: dict[str, Any]) -> Any:
        path = f"/api/v1/namespaces/team/configmaps/{obj['metadata']['name']}"
        if obj["kind"] == "ConfigMap" and path not in self.deleted:
            return None
        return super().make(obj)


def test_a_config_map_that_a_turn_before_left_is_replaced() -> None:
    """It cannot be changed, and the job may have been edited since."""
    api = Left({})
    reconcile(api)
    assert api.statuses[-1]["state"] == "Starting"
    assert [obj["kind"] for obj in api.made] == ["Secret", "Secret", "Service", "ConfigMap", "Job"]


class Meanwhile(Taking):
    """One where somebody else has just made the Job."""

    def make(self, obj: dict[str, Any]) -> Any:
        return None if obj["kind"] == "Job" else super().make(obj)


def test_a_job_that_somebody_else_has_just_made_is_looked_at_again() -> None:
    api = Meanwhile({})
    with pytest.raises(ApiRefused, match="was created by another client meanwhile"):
        reconcile(api)
    assert (api.statuses, api.deleted) == ([], []), "its pods need what goes with it"


def turns(api: FakeCluster, count: int, **config: Any) -> list[float | None]:
    """So many reconciles in a row by one process; what each of them returned."""

    async def all_of_them() -> list[float | None]:
        reconciler = Reconciler(api, lambda: replace(CONFIG, **config), lambda *_: [])
        return [await reconciler.reconcile("team", "gpt") for _ in range(count)]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("condition", ["", "Failed"])
def test_a_job_that_a_backup_restores_with_its_status_starts_once(condition: str) -> None:
    """The status is another client's then, and names the Job of another UID: an apply does not
    remove it, and 47 attempts ended in 30 s. A job that had ended does not start again."""
    api = FakeCluster(body())
    turns(api, 2)
    status = api.objects[path("PipeMorphJob", "team", "gpt")]["status"]
    job = body() | {"status": status}
    if condition:
        since = {
            "reason": "RankFailed",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        status["conditions"].append({"type": condition, "status": "True"} | since)
    api = FakeCluster(job | {"metadata": job["metadata"] | {"uid": "u-2"}})
    turns(api, 6)
    status = api.objects[path("PipeMorphJob", "team", "gpt")]["status"]
    jobs = [obj["metadata"]["name"] for obj in api.objects.values() if obj["kind"] == "Job"]
    if condition:
        assert (jobs, status["state"]) == ([], "Failed")
        return
    assert (status["attempt"], status["disruptions"], status["state"]) == (1, 1, "Starting")
    assert jobs == [status["jobName"]]


def test_a_condition_that_another_client_has_set_goes_with_its_state() -> None:
    api = FakeCluster(body())
    turns(api, 2)
    job = api.objects[path("PipeMorphJob", "team", "gpt")]
    since = {"reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    job["status"]["conditions"].append({"type": "Stalled", "status": "True"} | since)
    turns(api, 1)
    types = [
        c["type"] for c in api.objects[path("PipeMorphJob", "team", "gpt")]["status"]["conditions"]
    ]
    assert "Stalled" not in types and {"Ready", "Running", "Reconciling"} <= set(types)


def test_what_a_running_attempt_needs_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeCluster(body())

    def deleted() -> set[str]:
        found = [url for url in api.objects if "/services/" in url or "/networkpolicies/" in url]
        for url in found:
            del api.objects[url]
        return set(found)

    turns(api, 1, network_policies=True)
    gone = deleted()
    assert len(gone) == 2
    turns(api, 1, network_policies=True)
    assert gone <= api.objects.keys()
    said = [obj["message"] for obj in api.objects.values() if obj.get("reason") == "ObjectRestored"]
    assert len(said) == 2 and all("had been deleted; it is made again" in each for each in said)
    # Most find them there, so looks are rare; but none is left out.
    job = next(obj for obj in api.objects.values() if obj["kind"] == "Job")
    job["status"] = {"active": 2, "ready": 2}
    _, again = turns(api, 2, network_policies=True)
    assert again is not None and 0 < again <= reconciler.RESTORE_SECONDS
    monkeypatch.setattr(reconciler, "RESTORE_SECONDS", 0.0)
    deleted()
    turns(api, 2, network_policies=True)
    assert gone <= api.objects.keys()
