"""Execution of decisions, where the API server refuses; the decisions are elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_api import FakeCluster
from kstatus import kstatus
from operator_objects import CONFIG, body
from pydantic import ValidationError

from pipemorph_operator.kube.client import KubeApiError, _parse_error, build_path
from pipemorph_operator.kube.events import KubeEvent, emit_event
from pipemorph_operator.kube.job_object import read_status
from pipemorph_operator.reconcile import reconciler
from pipemorph_operator.reconcile.pending_pods import CHECK_AGAIN_SECONDS
from pipemorph_operator.reconcile.reconciler import NAMESPACE_ENDS_SECONDS, Reconciler

JOB = build_path("PipeMorphJob", "team", "gpt")


class Api(FakeCluster):
    """API with a new job, which refuses to write objects of ``kinds``; none: of all others."""

    def __init__(self, refused: KubeApiError | None = None, *kinds: str, **spec: Any) -> None:
        self.refused: KubeApiError | None = None
        self.kinds = kinds
        super().__init__(body(**spec))
        self.refused = refused

    def admit(self, old: Any, new: Any) -> None:
        kind = new["kind"]
        if self.refused and (kind in self.kinds if self.kinds else kind != "PipeMorphJob"):
            raise self.refused

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.objects[JOB]["status"]
        return found

    @property
    def statuses(self) -> int:
        """Number of writes of status."""
        return self.made("apply").count(JOB)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects.values() if each["kind"] == kind]

    def event_reasons(self) -> list[str]:
        return [each["reason"] for each in self.of("Event")]


def refusal(status: int, message: str, *causes: str) -> KubeApiError:
    """Refusal as in the body of an answer."""
    said = {"reason": "Forbidden", "message": message}
    details = {"causes": [{"reason": cause, "field": "metadata.namespace"} for cause in causes]}
    return _parse_error(status, json.dumps(said | {"details": details}).encode())


def reconcile(api: Any) -> float | None:
    return asyncio.run(Reconciler(api, lambda: CONFIG, lambda *_: []).reconcile("team", "gpt"))


def test_a_namespace_that_is_being_deleted_is_nobodys_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = refusal(403, "namespace team is being terminated", "NamespaceTerminating")
    api = Api(ends)
    with caplog.at_level(logging.WARNING):
        assert reconcile(api) == NAMESPACE_ENDS_SECONDS
    assert (caplog.records, api.statuses) == ([], 0)


def test_a_quota_is_said_in_status_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(refusal(403, "exceeded quota: jobs"))
    assert reconcile(api) == CHECK_AGAIN_SECONDS
    status = api.status
    assert status["state"] == "Pending"
    found = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}
    assert found["PodsReady"] == ("False", "ObjectRefused", "exceeded quota: jobs")
    assert "attempt" not in status
    assert kstatus(api.objects[JOB]) == "Failed"
    # The next turn finds the same, and writes and reports nothing.
    caplog.clear()
    assert reconcile(api) == CHECK_AGAIN_SECONDS
    assert (api.statuses, caplog.records) == (1, [])


@pytest.mark.parametrize("answer", [429, 500, 503])
def test_another_refusal_is_said_in_status_and_tried_again_soon(answer: int) -> None:
    api = Api(refusal(answer, "spec.template: Invalid value"), "Job")
    with pytest.raises(KubeApiError, match="Invalid value"):
        reconcile(api)
    assert api.status["state"] == "Pending"
    assert "Invalid value" in json.dumps(api.status["conditions"])
    assert api.event_reasons() == ["ObjectRefused"]
    assert kstatus(api.objects[JOB]) == "InProgress", "no user has to act"
    assert not api.made("delete"), (
        "the Job may have been made all the same, and its pods need the rest"
    )


@pytest.mark.parametrize("answer", [400, 404, 413, 422])
def test_what_the_api_server_does_not_take_is_said_in_status(
    answer: int, caplog: pytest.LogCaptureFixture
) -> None:
    api = Api(refusal(answer, "spec.template: Invalid value"))
    assert reconcile(api) == CHECK_AGAIN_SECONDS
    assert api.status["state"] == "Pending", "an edit could not help any more"
    assert "spec.template: Invalid value" in json.dumps(api.status["conditions"])
    assert "event ObjectRefused was rejected" in caplog.text


@pytest.mark.parametrize("running", [False, True])
def test_a_fault_of_the_operator_is_said_in_status_and_tried_again(
    running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("no such thing")

    monkeypatch.setattr("pipemorph_operator.reconcile.reconciler.decide", broken)
    api = Api()
    if running:
        was = {"type": "Running", "status": "True", "reason": "AllRanksReady", "message": ""}
        api.status["conditions"] = [was | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]
    for _ in range(2):
        with pytest.raises(AttributeError, match="no such thing"):
            reconcile(api)
    status = api.status
    assert api.statuses == 1
    assert status["state"] == ("Running" if running else "Pending")
    condition = next(c for c in status["conditions"] if c["type"] == "Running")
    assert condition["reason"] == "InternalError"
    assert "AttributeError: no such thing" in condition["message"]
    assert api.event_reasons() == ["InternalError"]


def test_a_status_that_cannot_be_read_does_not_hide_why(caplog: pytest.LogCaptureFixture) -> None:
    api = Api()
    api.status["attempt"] = "three"
    with pytest.raises(ValidationError, match="attempt"):
        reconcile(api)
    assert "the internal error could not be written to status" in caplog.text
    assert "StatusRefused" in api.event_reasons()


@pytest.mark.parametrize("gang", [{"volcano": {}}, {"coscheduling": {}}], ids=min)
def test_a_pod_group_goes_with_its_attempts_config_map(gang: dict[str, Any]) -> None:
    """The garbage collector deletes objects whose owners are all gone: there must be no other."""
    api = Api(placement={"gang": gang})
    reconcile(api)
    made = {obj["kind"]: obj["metadata"] for obj in api.objects.values()}
    wanted = ["Secret", "Service", "ConfigMap", "PodGroup", "Job"]
    assert [kind for kind in made if kind in wanted] == wanted, "pods before their group"
    (owner,) = made["PodGroup"]["ownerReferences"]
    assert owner == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": made["ConfigMap"]["name"],
        "uid": made["ConfigMap"]["uid"],
    }
    for kind in ("Service", "ConfigMap", "Job"):
        assert made[kind]["ownerReferences"][0]["kind"] == "PipeMorphJob"
    assert api.status["jobUid"] == made["Job"]["uid"]
    assert len(api.of("Secret")) == 2, "of the engine and of the live page"
    # Suspended, the attempt is over.
    api.objects[JOB]["spec"]["suspend"] = True
    reconcile(api)
    assert not api.of("ConfigMap") + api.of("Secret") + api.of("Job")


def test_what_was_made_before_a_refusal_goes() -> None:
    api = Api(refusal(422, "no"), "Job", placement={"gang": {"volcano": {}}})
    reconcile(api)
    assert api.status["state"] == "Pending"
    assert any("/configmaps/" in url for url in api.made("create")) and not api.of("ConfigMap")


async def test_events_are_named_in_their_order() -> None:
    """Events are shown in this order if one second has several."""
    api, job = FakeCluster(), body()["metadata"]
    for reason in ("Running", "Complete"):
        await emit_event(api, job, KubeEvent("Normal", reason, ""), "operator")
    found = sorted(api.objects.values(), key=lambda event: str(event["metadata"]["name"]))
    assert [event["reason"] for event in found] == ["Running", "Complete"]
    assert all(event["metadata"]["name"].startswith("gpt.") for event in found)


def test_an_event_that_is_emitted_again_is_counted_up() -> None:
    """An event that the API server has dropped meanwhile begins anew."""
    api, job = FakeCluster(), body()["metadata"]
    same, other = (
        KubeEvent("Warning", "Failed", "no room"),
        KubeEvent("Warning", "Failed", "no device"),
    )

    async def emitted(*events: KubeEvent) -> list[tuple[str, int]]:
        for event in events:
            await emit_event(api, job, event, "operator")
        return sorted((each["message"], each["count"]) for each in api.objects.values())

    assert asyncio.run(emitted(same, other, same, same)) == [("no device", 1), ("no room", 3)]
    assert asyncio.run(emitted(other)) == [("no device", 2), ("no room", 3)]
    api.objects.clear()
    assert asyncio.run(emitted(same, same)) == [("no room", 2)]
    assert len(api.made("create")) == 3


@pytest.mark.parametrize(
    ("status", "message", "logged"),
    [
        (422, "no such key: microbatches", True),
        (500, "failed to create typed live object", True),
        (400, "strict decoding error", True),
        (503, "try later", False),
        (403, "namespace team is being terminated", False),
    ],
)
def test_a_status_that_cannot_be_written_is_reported_by_an_event(
    status: int, message: str, logged: bool
) -> None:
    causes = ["NamespaceTerminating"] if status == 403 else []
    api = Api(refusal(status, message, *causes), "PipeMorphJob")
    with contextlib.suppress(KubeApiError):
        reconcile(api)
    said = [each["message"] for each in api.of("Event") if each["reason"] == "StatusRefused"]
    assert said == ([f"status cannot be written; retrying: {message}"] if logged else [])


@pytest.mark.parametrize(
    "written",
    [
        {"state": "Hibernating"},
        {"pods": {"wanted": "many"}, "training": {"iteration": -1}},
        {"attempts": [{"attempt": "x"}, {"attempt": 1, "endedAt": "t", "reason": "Disrupted"}]},
        {"nodes": [{"name": 5}]},
    ],
)
def test_unused_fields_that_another_release_wrote_are_omitted(written: Any) -> None:
    status = read_status({"status": {"attempt": 3, "restarts": 2} | written})
    assert (status.attempt, status.restarts) == (3, 2)
    assert len(status.attempts) == (1 if "attempts" in written else 0)
    with pytest.raises(ValidationError):
        read_status({"status": written | {"restarts": "two"}})


class Meanwhile(Api):
    """API where another client writes, as the first request of a kind arrives."""

    def __init__(self, verb: str, kind: str, change: Callable[[Meanwhile], None]) -> None:
        super().__init__()
        self.change = (verb, f"/{kind}/", change)

    async def arrives(self, verb: str, url: str) -> None:
        wanted, kind, change = self.change
        if verb == wanted and kind in url:
            self.change = ("", "", change)
            self.url = url
            change(self)

    def there(self) -> None:
        """Create the object that is about to be made."""
        self.objects[self.url] = {"kind": "X", "metadata": {"uid": "another", "name": "x"}}


def test_what_was_decided_on_a_status_that_is_no_more_is_decided_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def edited(api: Meanwhile) -> None:
        api.put(body(suspend=True))

    api = Meanwhile("apply", "pipemorphjobs", edited)
    assert reconcile(api) == 0.0
    assert (api.statuses, api.event_reasons(), api.made("delete")) == (1, [], []), (
        "done on account of what is not on record"
    )
    assert [each for each in caplog.records if each.name.startswith("pipemorph")] == []


def test_a_config_map_of_an_earlier_turn_is_replaced() -> None:
    """A ConfigMap cannot be changed, and the job may have been edited since."""
    api = Meanwhile("create", "configmaps", Meanwhile.there)
    reconcile(api)
    assert api.status["state"] == "Starting"
    made = [each["kind"] for each in api.objects.values()]
    assert made[1:6] == ["Secret", "Secret", "Service", "ConfigMap", "Job"]


def test_a_job_that_somebody_else_has_just_made_is_looked_at_again() -> None:
    api = Meanwhile("create", "jobs", Meanwhile.there)
    with pytest.raises(KubeApiError, match="was created by another client meanwhile"):
        reconcile(api)
    assert (api.statuses, api.made("delete")) == (0, []), "its pods need what goes with it"


def turns(api: FakeCluster, count: int, **config: Any) -> list[float | None]:
    """Run a number of reconciles in a row by one process; return what each of them returned."""

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
    status = api.objects[JOB]["status"]
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
    status = api.objects[JOB]["status"]
    jobs = [obj["metadata"]["name"] for obj in api.objects.values() if obj["kind"] == "Job"]
    if condition:
        assert (jobs, status["state"]) == ([], "Failed")
        return
    assert (status["attempt"], status["disruptions"], status["state"]) == (1, 1, "Starting")
    assert jobs == [status["jobName"]]


def test_a_condition_that_another_client_has_set_goes_with_its_state() -> None:
    api = FakeCluster(body())
    turns(api, 2)
    job = api.objects[JOB]
    since = {"reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    job["status"]["conditions"].append({"type": "Stalled", "status": "True"} | since)
    turns(api, 1)
    types = [c["type"] for c in api.objects[JOB]["status"]["conditions"]]
    assert "Stalled" not in types and {"Ready", "Running", "Reconciling"} <= set(types)


def test_what_a_running_attempt_needs_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeCluster(body())

    def deleted() -> set[str]:
        found = [url for url in api.objects if "/services/" in url or "/networkpolicies/" in url]
        for url in found:
            del api.objects[url]
        return set(found)

    turns(api, 1, network_policies=True)
    kinds = [obj["kind"] for obj in api.objects.values()]
    assert kinds.index("NetworkPolicy") < kinds.index("Job"), "ranks without a policy"
    gone = deleted()
    assert len(gone) == 2
    turns(api, 1, network_policies=True)
    assert gone <= api.objects.keys()
    said = [obj["message"] for obj in api.objects.values() if obj.get("reason") == "ObjectRestored"]
    assert len(said) == 2 and all("was deleted and has been created again" in each for each in said)
    # Most find them there, so checks are rare; but none is omitted.
    job = next(obj for obj in api.objects.values() if obj["kind"] == "Job")
    job["status"] = {"active": 2, "ready": 2}
    _, again = turns(api, 2, network_policies=True)
    assert again is not None and 0 < again <= reconciler.RESTORE_SECONDS
    monkeypatch.setattr(reconciler, "RESTORE_SECONDS", 0.0)
    deleted()
    turns(api, 2, network_policies=True)
    assert gone <= api.objects.keys()
    counts = [
        each["count"] for each in api.objects.values() if each.get("reason") == "ObjectRestored"
    ]
    assert counts == [2, 2], "existing objects are not reported"
