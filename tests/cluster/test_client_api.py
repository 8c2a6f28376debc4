"""``pipemorph.client`` on a real API server, with the operator and its ingest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from notebooks import CLIENT_NOTEBOOK, run_cells
from operator_support import DEADLINE, Jobs, manifest
from played_ranks import Ranks
from testbed import tools

from pipemorph.client import ClusterBackend, JobClient, JobDeadlineError
from pipemorph.errors import InputError

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster


@pytest.fixture
def client(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobClient:
    """Client of the test's namespace, with the kubectl of the testbed."""
    (tmp_path / "kubectl").symlink_to(tools.find("kubectl"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(jobs.cluster.admin))
    monkeypatch.setenv("HOME", str(tmp_path))
    return JobClient(ClusterBackend(namespace=jobs.namespace))


def test_a_job_is_submitted_awaited_and_deleted(jobs: Jobs, client: JobClient) -> None:
    """Ranks are played: they report a slow link until the plan has changed."""
    name = client.submit_job(manifest("noted"))
    assert name == f"{jobs.namespace}/noted"
    assert client.wait_for_job_status(name, {"Starting"}, timeout=DEADLINE).iteration == 0
    with pytest.raises(JobDeadlineError, match=r"expected Running; 0/4 pods are ready, no iter"):
        client.wait_for_job_status(name, {"Running"}, timeout=0.0)
    pods = jobs.run("noted", 4)
    assert client.wait_for_job_status(name, {"Running"}, timeout=DEADLINE).status.ready == "4/4"
    ranks = Ranks.of(jobs, "noted", pods[0])
    ranks.until("LinksHealthy=True")
    ranks.delays[1] = 0.06
    ranks.until("ScheduleAdapted=True")
    job = client.wait_for_job_status(name, {"ScheduleAdapted"}, timeout=DEADLINE)
    assert [each.link for each in job.slow_links] == [1] and job.adaptations >= 1
    assert "link 1 (+60 ms" in job.explain()
    assert [each.name for each in client.list_jobs()] == [name]
    jobs.succeed(pods)
    states = [each.state for each in client.watch_job(name, timeout=DEADLINE)]
    assert states[-1] == "Complete"
    client.delete_job(name)
    with pytest.raises(InputError, match=r'pipemorphjobs.pipemorph.io "noted" not found'):
        client.get_job(name)


def test_invalid_and_unknown_jobs_are_refused(client: JobClient) -> None:
    for name in ("absent", "elsewhere/absent"):
        with pytest.raises(InputError):
            client.get_job(name)
    job = manifest("noted")
    client.submit_job(job)
    with pytest.raises(InputError, match=r'pipemorphjobs.pipemorph.io "noted" already exists'):
        client.submit_job(job)
    client.delete_job("noted")


def test_the_notebook_runs_a_job_on_a_cluster(jobs: Jobs, client: JobClient) -> None:
    names: dict[str, Any] = {}
    assert run_cells(CLIENT_NOTEBOOK, names, most=1) == 1
    names["job"]["metadata"]["namespace"] = jobs.namespace
    names["job"]["spec"]["template"] = manifest("any")["spec"]["template"]
    assert run_cells(CLIENT_NOTEBOOK, names, tag="cluster") == 2
    assert client.list_jobs() == []
