"""The life of a job on a real API server and Job controller, by an operator with its own rights."""

import json
from collections.abc import Iterator

import pytest
from kstatus import kstatus
from operator_support import (
    DEADLINE,
    UNSEEN,
    Installation,
    Jobs,
    Object,
    condition,
    manifest,
    said,
)
from played_ranks import Ranks
from testbed import TestbedError, wait_for

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster


def children(jobs: Jobs) -> list[str]:
    """Everything that is left of jobs in the namespace."""
    kinds = "jobs,pods,services,secrets,configmaps,pipemorphjobs"
    found = jobs.cluster.kubectl("get", kinds, "-n", jobs.namespace, "-o", "name").split()
    return [name for name in found if name != "configmap/kube-root-ca.crt"]


def expect_nothing_left(jobs: Jobs) -> None:
    wait_for(
        "nothing to be left",
        lambda: not children(jobs),
        DEADLINE,
        details=lambda: f"found {children(jobs)}",
    )


LOST_NODE = "test_pods_of_a_node_that_is_gone_start_again_elsewhere"


@pytest.fixture(scope="module", autouse=True)
def lost_node(
    request: pytest.FixtureRequest, installation: Installation
) -> Iterator[tuple[Jobs, list[Object]]]:
    """A running job one of whose nodes has just gone. The pod garbage collector takes a minute to
    say so: this begins before the other tests, and the one that it is for is the last."""
    with installation.cluster.namespace() as namespace:
        jobs = Jobs(installation, namespace)
        if not any(item.name == LOST_NODE for item in request.session.items):
            yield jobs, []
            return
        jobs.apply(manifest("gone", stages=2))
        pods = jobs.pods("gone", 2)
        nodes = [f"{namespace}-{i}" for i in range(2)]
        for node, pod in zip(nodes, pods, strict=True):
            jobs.cluster.fake_node(node)
            jobs.cluster.fake_pod_running(namespace, pod["metadata"]["name"], node=node)
        jobs.wait("gone", "Running")
        jobs.cluster.client.delete("nodes", nodes[1])
        # Of the other one only the name is needed: it must not be given the pods of other tests.
        jobs.cluster.client.patch("nodes", nodes[0], {"spec": {"unschedulable": True}})
        yield jobs, pods
        jobs.cluster.client.delete("nodes", nodes[0])


def test_a_job_runs_completes_and_leaves_nothing(jobs: Jobs) -> None:
    jobs.apply(manifest("one", stages=2, parallelism={"stages": 2, "replicas": 2}))
    pods = jobs.pods("one", 4)
    spec = pods[3]["spec"]
    env = {v["name"]: v.get("value") or v["valueFrom"] for v in spec["containers"][0]["env"]}
    path = env["RANK"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["WORLD_SIZE"] == "4"
    assert env["MASTER_ADDR"].startswith(f"{pods[0]['spec']['hostname']}.{spec['subdomain']}.")
    assert jobs.wait("one", "Starting")["status"]["ready"] == "0/4"
    jobs.run("one", 4)
    jobs.succeed(pods)
    done = jobs.wait("one", "Complete")
    assert condition(done, "Complete") == ("True", "AllRanksFinished")
    assert done["status"]["ready"] == "4/4"
    shown = jobs.cluster.kubectl("get", "pmj", "one", "-n", jobs.namespace)
    columns = [
        "NAME",
        "STATE",
        "READY",
        "REASON",
        "ITERATION",
        "DONE",
        "SLOW-LINKS",
        "PLAN",
        "GAIN",
        "GOODPUT",
        "LEFT",
        "AGE",
    ]
    assert shown.split()[: len(columns)] == columns
    assert "Complete" in shown
    assert kstatus(done) == "Current"
    wait = ("wait", "--for=condition=Ready", "--timeout=10s")
    jobs.cluster.kubectl(*wait, "pmj/one", "-n", jobs.namespace)
    for reason in ("AttemptStarted", "Running", "Complete"):
        jobs.expect_event("one", f"Normal {reason}:")
    jobs.cluster.kubectl("delete", "pmj", "one", "-n", jobs.namespace)
    expect_nothing_left(jobs)


def test_kopf_leaves_no_finalizer_and_no_annotation(jobs: Jobs) -> None:
    jobs.apply(manifest("clean", stages=2))
    jobs.pods("clean", 2)
    metadata = jobs.wait("clean", "Starting")["metadata"]
    assert "finalizers" not in metadata
    assert [k for k in metadata.get("annotations", {}) if "kopf" in k] == []


def test_a_failed_pod_restarts_all_ranks_once_under_another_number(jobs: Jobs) -> None:
    jobs.apply(manifest("lost", stages=2, failurePolicy={"maxRestarts": 1}))
    old = jobs.run("lost", 2)
    jobs.cluster.fake_pod_failed(jobs.namespace, old[1]["metadata"]["name"], exit_code=3)
    new = jobs.run("lost", 2, attempt=1)
    status = jobs.get("lost")["status"]
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert status["attempts"][0]["reason"] == "RankFailed"
    names = {pod["metadata"]["name"].rsplit("-", 2)[0] for pod in (*old, *new)}
    assert len(names) == 2, "both attempts' pods have the same Job"
    mounted = [
        next(v for v in pod["spec"]["volumes"] if v["name"] == "pipemorph-secret")
        for pod in (old[0], new[0])
    ]
    assert mounted[0] != mounted[1], "a late pod of the old attempt holds the new secret"
    jobs.succeed(new)
    jobs.wait("lost", "Complete")


def test_an_edited_template_is_that_of_the_next_attempt(jobs: Jobs) -> None:
    jobs.apply(manifest("edited", stages=1, failurePolicy={"maxRestarts": 1}))
    (pod,) = jobs.run("edited", 1)
    container = {"name": "trainer", "image": "none.invalid/trainer:2"}
    template = {"spec": {"schedulerName": "nobody", "containers": [container]}}
    jobs.patch("edited", {"template": template})
    jobs.wait("edited", lambda job: job["status"]["observedGeneration"] == 2)
    (still,) = jobs.pods("edited", 1)
    assert still["metadata"]["uid"] == pod["metadata"]["uid"], "an edit restarted the ranks"
    jobs.cluster.fake_pod_failed(jobs.namespace, pod["metadata"]["name"], exit_code=3)
    (new,) = jobs.pods("edited", 1, attempt=1)
    images = [p["spec"]["containers"][0]["image"] for p in (pod, new)]
    assert images == ["none.invalid/trainer", "none.invalid/trainer:2"]


def test_when_every_attempt_is_used_the_job_is_failed_and_stays_so(jobs: Jobs) -> None:
    jobs.apply(manifest("spent", stages=2, failurePolicy={"maxRestarts": 1}))
    for attempt in (0, 1):
        pods = jobs.pods("spent", 2, attempt)
        jobs.cluster.fake_pod_failed(jobs.namespace, pods[1]["metadata"]["name"], exit_code=3)
    failed = jobs.wait("spent", "Failed")
    assert condition(failed, "Failed") == ("True", "MaxRestartsExceeded")
    message = said(failed, "Failed")
    assert "rank 1 (stage 1)" in message
    assert "exited with code 3" in message
    jobs.expect_event("spent", "Warning MaxRestartsExceeded")
    # Terminal state wins: neither an edit nor a restart of the operator runs it again.
    jobs.patch("spent", {"failurePolicy": {"maxRestarts": 9}})
    jobs.installation.operator.restart()
    # Nor do suspend and resume.
    for suspend in (True, False):
        jobs.patch("spent", {"suspend": suspend})
    jobs.wait("spent", lambda job: kstatus(job) == "Failed")
    jobs.apply(manifest("after", stages=1))
    jobs.pods("after", 1)
    assert jobs.get("spent")["status"]["attempt"] == failed["status"]["attempt"]
    assert jobs.get("spent")["status"]["state"] == "Failed"


def test_input_that_cannot_be_used_is_not_tried_again(jobs: Jobs) -> None:
    jobs.apply(manifest("input", stages=2, failurePolicy={"maxRestarts": 5}))
    pods = jobs.pods("input", 2)
    jobs.cluster.fake_pod_failed(jobs.namespace, pods[0]["metadata"]["name"], exit_code=2)
    failed = jobs.wait("input", "Failed")
    assert condition(failed, "Failed") == ("True", "InvalidInput")
    assert failed["status"].get("restarts", 0) == 0


def test_a_failed_preflight_is_a_condition(jobs: Jobs) -> None:
    jobs.apply(manifest("fit", stages=1, placement={"sharedMemory": "1Gi"}))
    pods = jobs.pods("fit", 1)
    command = pods[0]["spec"]["containers"][0]["command"]
    assert command[:4] == ["python", "-m", "pipemorph_trainer.preflight", f"--shm={1 << 30}"]
    jobs.cluster.fake_pod_failed(jobs.namespace, pods[0]["metadata"]["name"], exit_code=78)
    failed = jobs.wait("fit", "Failed")
    assert condition(failed, "PreflightPassed") == ("False", "PreflightFailed")


def test_a_lost_node_is_not_held_against_the_job(jobs: Jobs) -> None:
    jobs.apply(manifest("node", stages=2))
    pods = jobs.run("node", 2)
    jobs.cluster.fake_pod_failed(
        jobs.namespace, pods[0]["metadata"]["name"], exit_code=137, disruption="DeletionByPodGC"
    )
    jobs.run("node", 2, attempt=1)
    status = jobs.get("node")["status"]
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert status["attempts"][0]["counted"] is False


def test_suspend_while_it_waits_for_the_last_attempts_ranks(jobs: Jobs) -> None:
    jobs.apply(manifest("pause", stages=2, failurePolicy={"maxRestarts": 1}))
    node = f"{jobs.namespace}-slow"
    jobs.cluster.fake_node(node)
    pods = jobs.pods("pause", 2)
    for pod in pods:
        jobs.cluster.fake_pod_running(jobs.namespace, pod["metadata"]["name"], node=node)
    jobs.wait("pause", "Running")
    jobs.cluster.fake_pod_failed(jobs.namespace, pods[0]["metadata"]["name"])
    jobs.wait("pause", "Restarting")
    jobs.patch("pause", {"suspend": True})
    jobs.cluster.fake_pod_gone(jobs.namespace, pods[1]["metadata"]["name"])
    jobs.wait("pause", "Suspended")
    jobs.expect_none_left("pause")
    jobs.patch("pause", {"suspend": False})
    jobs.run("pause", 2, attempt=1)
    status = jobs.get("pause")["status"]
    assert status["restarts"] == 1
    assert [a["reason"] for a in status["attempts"]] == ["RankFailed"]


def test_suspend_and_resume_in_one_breath_leave_one_attempt_that_runs(jobs: Jobs) -> None:
    jobs.apply(manifest("breath", stages=2))
    jobs.run("breath", 2)
    for suspend in (True, False, True, False):
        jobs.patch("breath", {"suspend": suspend})
    jobs.wait("breath", lambda job: job["status"]["observedGeneration"] == 5)
    attempt = jobs.wait("breath", lambda job: job["status"].get("jobName"))["status"]["attempt"]
    if attempt > 0:  # Else the operator saw the last of it alone.
        jobs.run("breath", 2, attempt)
    assert jobs.wait("breath", "Running")["status"]["restarts"] == 0
    alive = [job for job in jobs.batch_jobs("breath") if "deletionTimestamp" not in job["metadata"]]
    assert len(alive) == 1


def test_a_job_object_that_somebody_suspends_is_an_eviction(jobs: Jobs) -> None:
    """As a queue preempts: another attempt, none of maxRestarts."""
    jobs.apply(manifest("evicted", stages=1))
    jobs.run("evicted", 1)
    name = jobs.batch_jobs("evicted")[0]["metadata"]["name"]
    jobs.cluster.client.patch("jobs", name, {"spec": {"suspend": True}}, jobs.namespace)
    jobs.run("evicted", 1, attempt=1)
    status = jobs.get("evicted")["status"]
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert status["attempts"][0]["reason"] == "Evicted"


def test_metrics_count_what_became_of_jobs_and_forget_those_that_are_gone(jobs: Jobs) -> None:
    operator, ingest = jobs.installation.operator, jobs.installation.ingest
    name, labels = "counted", {"job_namespace": jobs.namespace}

    def count(what: str) -> float:
        return operator.metric(f"pipemorph_operator_jobs_{what}_total", **labels)

    jobs.apply(manifest(name, stages=2, failurePolicy={"maxRestarts": 1}))
    pods = jobs.run(name, 2)
    Ranks.of(jobs, name, pods[0]).run(2)
    series = {"namespace": jobs.namespace, "name": name}
    wait_for(
        "the job's series",
        lambda: ingest.metric("pipemorph_job_iteration", **series) == 2,
        DEADLINE,
    )
    assert ingest.metric("pipemorph_ingest_jobs") >= 1
    for attempt in (0, 1):
        pods = jobs.pods(name, 2, attempt)
        jobs.cluster.fake_pod_failed(jobs.namespace, pods[1]["metadata"]["name"], exit_code=3)
    jobs.wait(name, "Failed")
    jobs.apply(manifest("fine", stages=1))
    jobs.succeed(jobs.run("fine", 1))
    jobs.wait("fine", "Complete")
    expected = {"created": 2, "restarted": 1, "failed": 1, "successful": 1}
    wait_for(
        f"{expected} to be counted",
        lambda: {what: count(what) for what in expected} == expected,
        DEADLINE,
        details=lambda: str({what: count(what) for what in expected}),
    )
    assert operator.metric("pipemorph_operator_reconcile_seconds_count", result="ok") > 0
    assert operator.metric("pipemorph_api_requests_total", verb="PATCH", code="200") > 0
    # The ingest hears of the end apart from the operator.
    wait_for(
        "the job's series to be gone",
        lambda: not any(sample.labels.get("name") == name for sample in ingest.samples()),
        DEADLINE,
    )


@pytest.mark.parametrize("when", ["from the start", "starting", "running"])
def test_suspend_stops_all_ranks_and_resume_starts_an_attempt(jobs: Jobs, when: str) -> None:
    name = when.replace(" ", "-")
    job = manifest(name, stages=2)
    if when == "from the start":
        job["spec"]["suspend"] = True
    jobs.apply(job)
    started = 0
    if when != "from the start":
        jobs.pods(name, 2)
        jobs.wait(name, "Starting")
        if when == "running":
            jobs.run(name, 2)
        jobs.patch(name, {"suspend": True})
        started = 1
    stopped = jobs.wait(name, "Suspended")
    assert condition(stopped, "Suspended") == ("True", "SuspendedBySpec")
    jobs.pods(name, 0, attempt=0)
    jobs.expect_none_left(name)
    jobs.patch(name, {"suspend": False})
    pods = jobs.run(name, 2, attempt=started)
    assert jobs.get(name)["status"]["restarts"] == 0
    jobs.succeed(pods)
    jobs.wait(name, "Complete")
    jobs.patch(name, {"suspend": True})
    jobs.installation.operator.restart()
    assert jobs.get(name)["status"]["state"] == "Complete"


def test_a_deadline_counts_over_attempts_and_ends_the_ranks(jobs: Jobs) -> None:
    jobs.apply(manifest("late", stages=2, failurePolicy={"maxRestarts": 1}))
    pods = jobs.run("late", 2)
    began = jobs.get("late")["status"]["startTime"]
    jobs.cluster.fake_pod_failed(jobs.namespace, pods[1]["metadata"]["name"], exit_code=3)
    jobs.run("late", 2, attempt=1)
    assert jobs.get("late")["status"]["startTime"] == began
    jobs.patch("late", {"activeDeadlineSeconds": 1})
    failed = jobs.wait("late", "Failed")
    assert condition(failed, "Failed") == ("True", "DeadlineExceeded")
    assert kstatus(failed) == "Failed"
    jobs.pods("late", 0, attempt=1)


def test_a_finished_job_is_deleted_after_its_time(jobs: Jobs) -> None:
    jobs.apply(manifest("brief", stages=1, ttlSecondsAfterFinished=2))
    jobs.succeed(jobs.run("brief", 1))
    jobs.wait("brief", "deleted")
    expect_nothing_left(jobs)


def test_jobs_managed_by_others_are_left_alone(jobs: Jobs) -> None:
    jobs.apply(manifest("theirs", stages=1, managedBy="kueue.x-k8s.io/multikueue"))
    jobs.apply(manifest("ours", stages=1, managedBy="pipemorph.io/operator"))
    jobs.pods("ours", 1)
    assert jobs.get("theirs")["status"] == UNSEEN
    with pytest.raises(TestbedError, match="managedBy is immutable"):
        jobs.apply(manifest("theirs", stages=1, managedBy="pipemorph.io/operator"))


def test_two_jobs_of_one_name_in_two_namespaces(jobs: Jobs) -> None:
    with jobs.cluster.namespace() as elsewhere:
        other = Jobs(jobs.installation, elsewhere)
        for each in (jobs, other):
            each.apply(manifest("same", stages=2))
        pods = jobs.run("same", 2)
        other.run("same", 2)
        jobs.succeed(pods)
        jobs.wait("same", "Complete")
        assert other.get("same")["status"]["state"] == "Running"


def test_a_job_deleted_while_it_is_created_leaves_nothing(jobs: Jobs) -> None:
    for i in range(5):
        jobs.apply(manifest(f"gone-{i}", stages=2))
        jobs.cluster.client.delete("pipemorphjobs", f"gone-{i}", jobs.namespace)
    # And again under the same names: the old ones' remains must not be taken for the new ones'.
    for i in range(5):
        jobs.apply(manifest(f"gone-{i}", stages=2))
    for i in range(5):
        jobs.run(f"gone-{i}", 2)
        jobs.cluster.client.delete("pipemorphjobs", f"gone-{i}", jobs.namespace)
    expect_nothing_left(jobs)


def test_a_job_object_deleted_by_hand_is_another_attempt(jobs: Jobs) -> None:
    jobs.apply(manifest("hand", stages=1, failurePolicy={"maxRestarts": 1}))
    jobs.run("hand", 1)
    name = jobs.batch_jobs("hand")[0]["metadata"]["name"]
    jobs.cluster.kubectl("delete", "job", name, "-n", jobs.namespace, "--wait=false")
    jobs.run("hand", 1, attempt=1)
    assert jobs.get("hand")["status"]["attempts"][0]["reason"] == "JobDeleted"


def test_what_only_the_operator_can_know_stalls_with_a_reason(jobs: Jobs) -> None:
    job = manifest("limits", stages=2)
    job["spec"]["schedule"]["inFlightLimit"] = [0, "x"]
    jobs.apply(job)
    stalled = jobs.wait("limits", lambda job: condition(job, "Stalled")[0] == "True")
    assert condition(stalled, "Stalled") == ("True", "InvalidSpec")
    assert "spec.schedule.inFlightLimit" in said(stalled, "Stalled")
    jobs.expect_event("limits", "Warning InvalidSpec")


def test_conflicting_writes_are_set_right(jobs: Jobs) -> None:
    jobs.apply(manifest("fought", stages=2))
    jobs.run("fought", 2)
    # The ingest writes once it has seen the job, and for a silent one that is all.
    jobs.wait("fought", lambda job: condition(job, "RailsHealthy")[0])
    generation = jobs.get("fought")["metadata"]["generation"]
    wrong = {"status": {"state": "Failed", "attempt": 0, "ready": "9/9"}}
    jobs.cluster.client.patch(
        "pipemorphjobs", "fought", wrong, jobs.namespace, subresource="status"
    )
    right = jobs.wait("fought", lambda job: job["status"]["ready"] == "2/2")
    assert right["status"]["state"] == "Running"
    assert right["metadata"]["generation"] == generation
    status = json.dumps(right["status"])
    jobs.cluster.client.patch(
        "pipemorphjobs", "fought", {"metadata": {"labels": {"a": "b"}}}, jobs.namespace
    )
    assert json.dumps(jobs.get("fought")["status"]) == status


@pytest.mark.timeout(900)
def test_pods_of_a_node_that_is_gone_start_again_elsewhere(
    lost_node: tuple[Jobs, list[Object]],
) -> None:
    jobs, pods = lost_node
    jobs.wait("gone", lambda job: job["status"].get("disruptions") == 1, 200.0)
    jobs.cluster.fake_pod_gone(jobs.namespace, pods[0]["metadata"]["name"])
    jobs.run("gone", 2, attempt=1)
    status = jobs.get("gone")["status"]
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert status["attempts"][0]["reason"] == "Disrupted"
