"""``pipemorph.client`` on a cluster over a played kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import SLOW, adapted, cluster_job, running

from pipemorph.client import ClusterBackend, JobClient, JobDeadlineError, JobFailedError
from pipemorph.errors import InputError, ObjectNotFoundError

KUBECTL = """#!/usr/bin/python3
import json, pathlib, sys
folder, words = pathlib.Path({folder!r}), sys.argv[1:]
with (folder / "calls").open("a") as file:
    print(*words, file=file)
key = "pods" if words[:2] == ["get", "pods"] else words[0]
answers = json.loads((folder / key).read_text())
said = answers.pop(0) if len(answers) > 1 else answers[0]
(folder / key).write_text(json.dumps(answers))
if words[0] == "create":
    (folder / "created").write_text(sys.stdin.read())
if "error" in said:
    sys.exit(said["error"])
print(said["text"] if "text" in said else json.dumps(said))
sys.exit(said.get("exit", 0))
"""
GONE = 'Error from server (NotFound): pipemorphjobs.pipemorph.io "gpt" not found'
AWAY = "Unable to connect to the server: dial tcp 10.0.0.1:443: connect: connection refused"


class Kubectl:
    """A kubectl whose answers a test sets, by its first argument; the last one is repeated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "kubectl").write_text(KUBECTL.format(folder=str(folder)))
        (folder / "kubectl").chmod(0o755)

    def answers(self, key: str, *answers: dict[str, Any]) -> None:
        (self.folder / key).write_text(json.dumps(answers))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Kubectl(tmp_path)


def job(state: str = "Running", **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = cluster_job("gpt", running(adapted(), SLOW))
    made["status"]["state"] = state
    made["spec"] |= spec
    return made


def pod(name: str, created: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "creationTimestamp": created}}


def test_a_job_is_created_without_defaults_in_the_namespace_of_the_client(
    kubectl: Kubectl,
) -> None:
    manifest = {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "gpt"},
        "spec": {
            "parallelism": {"stages": 2},
            "schedule": {"microbatches": 8},
            "trainer": {"module": "absent.here", "iterations": 5},
        },
    }
    kubectl.answers("create", {"metadata": {"name": "gpt", "namespace": "team"}})
    client = JobClient(ClusterBackend(namespace="team", context="prod"))
    assert client.submit_job(manifest) == "team/gpt"
    assert kubectl.calls() == ["create --filename - --namespace team --output json --context prod"]
    assert json.loads((kubectl.folder / "created").read_text()) == manifest
    kubectl.answers("create", {"error": "Error from server (AlreadyExists): exists"})
    with pytest.raises(InputError, match=r"gpt: Error from server \(AlreadyExists\): exists"):
        client.submit_job(manifest)


def test_jobs_are_read_and_deleted(kubectl: Kubectl) -> None:
    kubectl.answers("get", job(), {"items": [job()]})
    kubectl.answers("delete", {"text": "deleted"})
    client = JobClient(ClusterBackend())
    found = client.get_job("team/gpt")
    assert (found.state, found.is_over) == ("Running", False)
    assert [each.link for each in found.slow_links] == [2]
    assert found.conditions["LinksHealthy"].status == "False"
    assert "slow links: link 2 +60 ms" in repr(found) and found.adaptations > 0
    assert "link 2 (+60 ms" in found.explain()
    assert [each.name for each in client.list_jobs()] == [found.name]
    client.delete_job("team/gpt")
    assert kubectl.calls() == [
        "get pipemorphjobs.pipemorph.io gpt --namespace team --output json",
        "get pipemorphjobs.pipemorph.io --output json",
        "delete pipemorphjobs.pipemorph.io gpt --namespace team --timeout=50s",
    ]
    for call in (client.get_job, client.delete_job):
        with pytest.raises(InputError, match=r"is no name of a job; expected \[NAMESPACE/\]NAME"):
            call("No Name")


def test_waiting_goes_on_while_the_cluster_is_away_but_not_after_a_deletion(
    kubectl: Kubectl,
) -> None:
    client = JobClient(ClusterBackend())

    def wait(*wanted: str, timeout: float = 60.0) -> str:
        return client.wait_for_job_status(
            "gpt", wanted, timeout=timeout, polling_interval=0.001
        ).state

    kubectl.answers("get", job("Starting"), {"error": AWAY}, job())
    assert wait("Running") == "Running"
    kubectl.answers("get", job(), {"error": AWAY})
    with pytest.raises(JobDeadlineError, match=r"expected Complete; gpt: Unable to connect"):
        wait("Complete", timeout=0.3)
    kubectl.answers("get", job(), {"error": GONE})
    with pytest.raises(ObjectNotFoundError, match="NotFound"):
        wait("Complete")
    kubectl.answers("get", {"error": AWAY})
    with pytest.raises(InputError, match="Unable to connect"):
        wait("Complete")
    kubectl.answers("get", job())
    with pytest.raises(JobDeadlineError) as late:
        wait("LinksHealthy", timeout=0.0)
    assert "; LinksHealthy is False: link 2 (+60 ms forward) slow" in str(late.value)
    assert "iteration " in str(late.value) and "pods are ready" in str(late.value)
    kubectl.answers("get", job("Complete"))
    with pytest.raises(JobFailedError, match="expected LinksHealthy; LinksHealthy is False: link"):
        wait("LinksHealthy")
    assert wait("ScheduleAdapted", "Complete") == "Complete"


def test_logs_are_those_of_the_newest_pod_with_the_rank(kubectl: Kubectl) -> None:
    kubectl.answers("get", job(parallelism={"stages": 4, "ranksPerPod": 2}))
    pods = [pod("new", "2026-01-02T00:00:00Z"), pod("old", "2026-01-01T00:00:00Z")]
    kubectl.answers("pods", {"items": pods}, {"items": []})
    kubectl.answers("logs", {"text": "agent\n[rank 2] no\n[rank 3] yes"})
    client = JobClient(ClusterBackend(context="prod"))
    assert list(client.get_job_logs("team/gpt", rank=3, follow=True)) == ["yes"]
    assert kubectl.calls()[1].split()[5].endswith("batch.kubernetes.io/job-completion-index=1")
    assert kubectl.calls()[2] == (
        "logs new --namespace team --container trainer --follow --context prod"
    )
    with pytest.raises(InputError, match="team/gpt: has no pod with rank 0: it waits, or its pods"):
        client.get_job_logs("team/gpt")
    kubectl.answers("pods", {"items": pods})
    kubectl.answers("logs", {"error": "Error from server (BadRequest): container is waiting"})
    with pytest.raises(InputError, match=r"team/gpt, rank 0: Error from server \(BadRequest\)"):
        list(client.get_job_logs("team/gpt"))
    with pytest.raises(InputError, match="rank: is 9; team/gpt has 4 ranks"):
        client.get_job_logs("team/gpt", rank=9)


def test_a_missing_kubectl_is_an_error(kubectl: Kubectl) -> None:
    kubectl.answers("get", job())
    kubectl.answers("pods", {"items": [pod("new", "")]})
    client = JobClient(ClusterBackend())
    program = kubectl.folder / "kubectl"
    program.chmod(0o644)
    with pytest.raises(InputError, match="kubectl cannot be run: Permission denied"):
        client.get_job("gpt")
    program.unlink()
    with pytest.raises(InputError, match="kubectl, which reads a job of a cluster, is not on PATH"):
        client.get_job("gpt")
