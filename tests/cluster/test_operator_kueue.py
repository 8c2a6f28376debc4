"""Jobs that Kueue queues, with Kueue played by hand: its webhook by a policy of the API server that
suspends what has a queue's name, admission and eviction by writes to `spec.suspend`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from operator_support import DEADLINE, Jobs, condition, manifest
from testbed import ApiError, Cluster, NotYet, wait_for

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

QUEUE = "kueue.x-k8s.io/queue-name"
POLICY = "played-kueue"
FLAVOR = {"pool": "spot"}
"""What Kueue puts into the pods of a job that it admits: where its quota is."""

Object = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def webhook(cluster: Cluster) -> Iterator[None]:
    """Every Job with a queue is created suspended."""
    group = "/apis/admissionregistration.k8s.io/v1"
    kinds = {"apiGroups": ["batch"], "apiVersions": ["v1"], "resources": ["jobs"]}
    labelled = f"has(object.metadata.labels) && '{QUEUE}' in object.metadata.labels"
    change = "Object{spec: Object.spec{suspend: true}}"
    about = {"metadata": {"name": POLICY}}
    policy = about | {
        "spec": {
            "matchConstraints": {"resourceRules": [kinds | {"operations": ["CREATE"]}]},
            "matchConditions": [{"name": "queued", "expression": labelled}],
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [
                {
                    "patchType": "ApplyConfiguration",
                    "applyConfiguration": {"expression": change},
                }
            ],
        }
    }
    binding = about | {"spec": {"policyName": POLICY}}
    try:
        cluster.client.request("POST", f"{group}/mutatingadmissionpolicies", policy)
    except ApiError as error:
        if error.code != 404:
            raise
        pytest.skip("this API server is older than 1.36: it has no MutatingAdmissionPolicy")
    cluster.client.request("POST", f"{group}/mutatingadmissionpolicybindings", binding)
    container = {"name": "main", "image": "none.invalid/a"}
    probe = {
        "metadata": {"name": "probe", "labels": {QUEUE: "q"}},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }

    def in_force() -> bool:
        url = cluster.client.path("jobs", "default")
        try:
            made = cluster.client.request("POST", url, probe, query={"dryRun": "All"})
        except ApiError as error:
            raise NotYet(str(error)) from None  # It is known before it can be applied.
        return bool(made["spec"].get("suspend"))

    wait_for("the policy to be in force", in_force, DEADLINE)
    yield
    for plural in ("mutatingadmissionpolicybindings", "mutatingadmissionpolicies"):
        cluster.client.request("DELETE", f"{group}/{plural}/{POLICY}")


def queued(name: str, **spec: Any) -> Object:
    return manifest(name, stages=2, placement={"gang": {"kueue": {"queue": "training"}}}, **spec)


def waiting_job(jobs: Jobs, name: str, attempt: int) -> Object:
    """The attempt's Job, once it is the only one and waits for admission."""

    def look() -> Object:
        found = jobs.batch_jobs(name)
        numbers = [job["metadata"]["labels"]["pipemorph.io/attempt"] for job in found]
        if numbers != [str(attempt)]:
            raise NotYet(f"found Jobs of the attempts {numbers}, expected {attempt} alone")
        return found[0]

    made: Object = wait_for(f"the Job of attempt {attempt} of {name}", look, DEADLINE)
    assert made["metadata"]["labels"][QUEUE] == "training"
    assert made["spec"]["suspend"] is True
    jobs.wait(name, "Queued")
    jobs.pods(name, 0, attempt)
    return made


def admit(jobs: Jobs, job: Object) -> None:
    """As Kueue: the pods' place, and the end of the suspension, in one write."""
    change = {"suspend": False, "template": {"spec": {"nodeSelector": FLAVOR}}}
    jobs.cluster.client.patch("jobs", job["metadata"]["name"], {"spec": change}, jobs.namespace)


def evict(jobs: Jobs, job: Object) -> None:
    try:
        change = {"spec": {"suspend": True}}
        jobs.cluster.client.patch("jobs", job["metadata"]["name"], change, jobs.namespace)
    except ApiError as error:
        raise AssertionError(f"the Job to evict is gone: {error}") from None


def test_queued_admitted_evicted_and_admitted_again(jobs: Jobs) -> None:
    jobs.apply(queued("gang", activeDeadlineSeconds=3600))
    first = waiting_job(jobs, "gang", 0)
    waits = jobs.get("gang")["status"]
    assert condition({"status": waits}, "PodsReady") == ("False", "WaitingForAdmission")
    assert "startTime" not in waits, "the deadline runs while the job waits in its queue"
    admit(jobs, first)
    pods = jobs.run("gang", 2)
    assert [pod["spec"]["nodeSelector"] for pod in pods] == [FLAVOR] * 2
    assert "startTime" in jobs.get("gang")["status"]
    # The operator looks again, and leaves alone what Kueue has set.
    jobs.installation.operator.restart()
    jobs.patch("gang", {"activeDeadlineSeconds": 7200})
    jobs.wait("gang", lambda job: job["status"]["observedGeneration"] == 2)
    (running,) = jobs.batch_jobs("gang")
    assert running["spec"]["suspend"] is False
    assert running["spec"]["template"]["spec"]["nodeSelector"] == FLAVOR

    evict(jobs, running)
    second = waiting_job(jobs, "gang", 1)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    status = jobs.get("gang")["status"]
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert [(a["reason"], a["counted"]) for a in status["attempts"]] == [("Evicted", False)]
    admit(jobs, second)
    jobs.succeed(jobs.run("gang", 2, attempt=1))
    jobs.wait("gang", "Complete")


def test_evicted_and_admitted_again_while_the_operator_is_away(jobs: Jobs) -> None:
    """The pods that run then have the number of those before."""
    jobs.apply(queued("away"))
    first = waiting_job(jobs, "away", 0)
    admit(jobs, first)
    before = jobs.run("away", 2)
    began = jobs.get("away")["status"]["jobStartTime"]
    jobs.installation.operator.kill()
    evict(jobs, first)
    jobs.pods("away", 0)
    admit(jobs, first)
    again = jobs.pods("away", 2)
    assert {p["metadata"]["uid"] for p in before}.isdisjoint(p["metadata"]["uid"] for p in again)
    jobs.installation.operator.start()
    admit(jobs, waiting_job(jobs, "away", 1))
    jobs.run("away", 2, attempt=1)
    status = jobs.get("away")["status"]
    assert [a["reason"] for a in status["attempts"]] == ["Evicted"]
    assert status["jobStartTime"] >= began


def test_suspended_by_its_user_while_it_is_queued(jobs: Jobs) -> None:
    jobs.apply(queued("held"))
    waiting_job(jobs, "held", 0)
    jobs.patch("held", {"suspend": True})
    jobs.wait("held", "Suspended")
    jobs.expect_none_left("held")
    jobs.patch("held", {"suspend": False})
    admit(jobs, waiting_job(jobs, "held", 1))
    jobs.run("held", 2, attempt=1)
    status = jobs.get("held")["status"]
    assert (status.get("disruptions", 0), status.get("restarts", 0)) == (0, 0)


def test_evicted_while_its_ranks_start(jobs: Jobs) -> None:
    jobs.apply(queued("early"))
    first = waiting_job(jobs, "early", 0)
    admit(jobs, first)
    jobs.pods("early", 2)
    jobs.wait("early", lambda job: job["status"]["pods"]["active"] == 2)
    evict(jobs, first)
    admit(jobs, waiting_job(jobs, "early", 1))
    jobs.run("early", 2, attempt=1)
    assert jobs.get("early")["status"]["disruptions"] == 1
