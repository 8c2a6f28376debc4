"""The life of a job on a real API server and Job controller, by an operator with its own rights."""

import json

import pytest
from kstatus import kstatus
from operator_support import DEADLINE, Jobs, condition, manifest
from played_ranks import Ranks
from testbed import wait_for

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster


def children(jobs: Jobs) -> list[str]:
    """Remaining children of jobs in the namespace."""
    kinds = "jobs,pods,services,secrets,configmaps,pipemorphjobs"
    found = jobs.cluster.kubectl("get", kinds, "-n", jobs.namespace, "-o", "name").split()
    return [name for name in found if name != "configmap/kube-root-ca.crt"]


def expect_all_gone(jobs: Jobs) -> None:
    wait_for(
        "all objects to go",
        lambda: not children(jobs),
        DEADLINE,
        details=lambda: f"found {children(jobs)}",
    )


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
    assert "Complete" in shown
    assert kstatus(done) == "Current"
    wait = ("wait", "--for=condition=Ready", "--timeout=10s")
    jobs.cluster.kubectl(*wait, "pmj/one", "-n", jobs.namespace)
    for reason in ("AttemptStarted", "Running", "Complete"):
        jobs.expect_event("one", f"Normal {reason}:")
    jobs.cluster.kubectl("delete", "pmj", "one", "-n", jobs.namespace)
    expect_all_gone(jobs)


def test_a_failed_pod_restarts_all_ranks_once_under_another_number(jobs: Jobs) -> None:
    jobs.apply(manifest("lost", stages=2, failurePolicy={"maxRestarts": 1}))
    old = jobs.run("lost", 2)
    jobs.cluster.fake_pod_failed(jobs.namespace, old[1]["metadata"]["name"], exit_code=3)
    new = jobs.run("lost", 2, attempt=1)
    job = jobs.get("lost")
    status, metadata = job["status"], job["metadata"]
    assert "finalizers" not in metadata, "one of kopf remains"
    assert not [key for key in metadata.get("annotations", {}) if "kopf" in key]
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
    # The ingest learns of the end apart from the operator.
    wait_for(
        "the job's series to be gone",
        lambda: not any(sample.labels.get("name") == name for sample in ingest.samples()),
        DEADLINE,
    )


def test_a_job_deleted_while_it_is_created_leaves_nothing(jobs: Jobs) -> None:
    for i in range(5):
        jobs.apply(manifest(f"gone-{i}", stages=2))
        jobs.cluster.client.delete("pipemorphjobs", f"gone-{i}", jobs.namespace)
    # Again under the same names: the old ones' remains must not be taken for the new ones'.
    for i in range(5):
        jobs.apply(manifest(f"gone-{i}", stages=2))
    for i in range(5):
        jobs.run(f"gone-{i}", 2)
        jobs.cluster.client.delete("pipemorphjobs", f"gone-{i}", jobs.namespace)
    expect_all_gone(jobs)


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
