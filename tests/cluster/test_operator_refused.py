"""Refusals by a real API server of a job, its Jobs or its pods are quoted in status."""

import pytest
from operator_support import Jobs, Object, condition, manifest, said

from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.job_object import read_job
from pipemorph_operator.resources import Attempt, build_objects

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

MOUNT = {"name": "data", "mountPath": "/data"}
DATA = [{"name": "data", "emptyDir": {}}]
WRONG_TEMPLATES: list[tuple[str, Object, Object, str, str]] = [
    ("image", {"image": None}, {}, "NoTrainerImage", "no image"),
    ("restart", {}, {"restartPolicy": "Always"}, "InvalidSpec", "restartPolicy is Always"),
    (
        "typo",
        {"resouces": {"limits": {"example.com/gpu": 8}}},
        {},
        "ObjectRefused",
        'unknown field "spec.template.spec.containers[0].resouces"',
    ),
    ("kind", {"workingDir": 5}, {}, "ObjectRefused", "cannot unmarshal number"),
    ("size", {"resources": {"limits": {"cpu": "x"}}}, {}, "ObjectRefused", "quantities must match"),
    (
        "twice",
        {"volumeMounts": [MOUNT, MOUNT]},
        {"volumes": DATA},
        "ObjectRefused",
        'mountPath: Invalid value: "/data": must be unique',
    ),
    ("port", {"ports": [{"containerPort": -1}]}, {}, "ObjectRefused", "containerPort: Invalid"),
]


def test_a_wrong_template_is_explained_and_the_job_runs_once_it_is_edited(jobs: Jobs) -> None:
    good = manifest("good")["spec"]["template"]["spec"]
    for name, trainer, more, *_ in WRONG_TEMPLATES:
        wrong = good | more | {"containers": [good["containers"][0] | trainer]}
        jobs.apply(manifest(name, stages=1, template={"spec": wrong}))
    for name, _, _, reason, words in WRONG_TEMPLATES:
        refused = ("False", reason)
        held = jobs.wait(name, lambda job, want=refused: condition(job, "PodsReady") == want)
        assert held["status"]["state"] == "Pending"
        assert words in said(held, "PodsReady")
        jobs.expect_event(name, f"Warning {reason}: ")
    for name, _, more, *_ in WRONG_TEMPLATES:
        # A merge patch: absent fields stay, and null ones go.
        fixed = dict.fromkeys(more) | {"containers": good["containers"]}
        jobs.patch(name, {"template": {"spec": fixed}})
    for name, *_ in WRONG_TEMPLATES:
        jobs.run(name, 1)


def refused_pods(jobs: Jobs, name: str) -> str:
    """Refusals of pods that cannot be made, in status and in an event."""
    refused = ("False", "PodsRefused")
    held = jobs.wait(name, lambda job: condition(job, "PodsReady") == refused)
    assert held["status"]["state"] == "Starting"
    jobs.expect_event(name, "Warning PodsRefused: ")
    return said(held, "PodsReady")


RDMA = {"rdma": {"resourceName": "example.com/hca"}}


def test_pods_that_pod_security_refuses_are_explained(jobs: Jobs) -> None:
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}}
    jobs.cluster.client.patch("namespaces", jobs.namespace, level)
    jobs.apply(manifest("locked", stages=2, placement=RDMA))
    jobs.apply(manifest("plain", stages=1))
    words = refused_pods(jobs, "locked")
    assert "0 of 2 ranks are ready; 2 pods cannot be created: " in words
    assert 'violates PodSecurity "baseline:latest"' in words
    assert "IPC_LOCK" in words
    assert "ipcLock: false" in words, "it is not said what to do"
    jobs.run("plain", 1)
    # Suspended and resumed, the edit holds.
    jobs.patch("locked", {"placement": {"rdma": {"ipcLock": False}}, "suspend": True})
    jobs.wait("locked", "Suspended")
    jobs.patch("locked", {"suspend": False})
    jobs.run("locked", 2, attempt=1)


def test_a_container_of_the_operators_own_passes_the_strictest_policy(jobs: Jobs) -> None:
    """Made as the operator makes it: here it runs without an image of its own."""
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    jobs.cluster.client.patch("namespaces", jobs.namespace, level)
    body = manifest("own", stages=1)
    del body["spec"]["template"]
    body["metadata"] |= {"namespace": jobs.namespace, "uid": "0b7c9d2e-0000-0000-0000-444455556666"}
    attempt = Attempt(read_job(body), body["metadata"]["uid"], 0)
    config = OperatorConfig(ingest_url="https://none.invalid", trainer_image="none.invalid/a")
    template = build_objects(attempt, config)[-1]["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] = pod["metadata"] | {"name": "own"}
    jobs.cluster.client.create("pods", pod, jobs.namespace)
