"""Attacks in a namespace on another's job; docs/reference/attacks.md lists them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from operator_support import FULL_NAME, SYSTEM, Jobs, Object, manifest, may
from testbed import ApiError, wait_for
from testbed.api import ApiClient
from viewers import may_list

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

JOB_UID = "pipemorph.io/job-uid"
DEADLINE = 120.0


def editor(jobs: Jobs) -> ApiClient:
    """User with the right to edit the namespace, and no other."""
    name = f"editor-of-{jobs.namespace}"
    arguments = ["--clusterrole=edit", f"--user={name}", f"--namespace={jobs.namespace}"]
    jobs.cluster.kubectl("create", "rolebinding", "editor", *arguments)
    client = ApiClient(jobs.cluster.kubeconfig(name))
    wait_for("the editor's rights", lambda: may_list(client, jobs.namespace), DEADLINE)
    return client


def test_people_of_a_namespace_may_not_do_more_than_they_need(jobs: Jobs) -> None:
    jobs.apply(manifest("seen", stages=1))
    jobs.pods("seen", 1)
    client, namespace = editor(jobs), jobs.namespace
    viewer_name = f"viewer-of-{namespace}"
    arguments = ["--clusterrole=view", f"--user={viewer_name}", f"--namespace={namespace}"]
    jobs.cluster.kubectl("create", "rolebinding", "viewer", *arguments)
    viewer = ApiClient(jobs.cluster.kubeconfig(viewer_name))
    wait_for("the viewer's rights", lambda: may_list(viewer, namespace), DEADLINE)
    status = {"status": {"attempt": 99}}
    tries: list[Callable[[], Any]] = [
        lambda: client.patch("pipemorphjobs", "seen", status, namespace, subresource="status"),
        lambda: client.get("leases", FULL_NAME, SYSTEM),
        lambda: client.list("nodes"),
        lambda: client.list("pipemorphjobs", SYSTEM),
        lambda: viewer.list("secrets", namespace),
        lambda: viewer.patch("pipemorphjobs", "seen", {"spec": {"suspend": True}}, namespace),
    ]
    for attempt in tries:
        assert error_of(attempt).code == 403
    assert viewer.get("pipemorphjobs", "seen", namespace)["status"]["attempt"] == 0
    client.patch("pipemorphjobs", "seen", {"spec": {"suspend": True}}, namespace)


def pod(name: str, **labels: str) -> Object:
    container = {"name": "a", "image": "none.invalid/a"}
    spec = {"schedulerName": "absent", "containers": [container]}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


def test_pods_of_other_users_do_not_pass_as_ranks(jobs: Jobs) -> None:
    """Pods of others must not be in the job's Service, whose NetworkPolicy would let them in."""
    jobs.apply(manifest("guarded", stages=1))
    rank = jobs.pods("guarded", 1)[0]
    label = {JOB_UID: rank["metadata"]["labels"][JOB_UID]}
    client, namespace = editor(jobs), jobs.namespace
    client.create("pods", pod("mine"), namespace)
    job = {
        "metadata": {"name": "own"},
        "spec": {"template": copy.deepcopy(pod("x")) | {"metadata": {"labels": label}}},
    }
    job["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    tries: list[Callable[[], Any]] = [
        lambda: client.create("pods", pod("forged", **label), namespace),
        lambda: client.patch("pods", "mine", {"metadata": {"labels": label}}, namespace),
        lambda: client.create("jobs", job, namespace),
    ]
    for attempt in tries:
        refused = error_of(attempt)
        assert (refused.code, JOB_UID in str(refused)) == (403, True)
    # Labelled objects keep the label in all edits; the policy ignores those without one.
    client.patch(
        "pods", rank["metadata"]["name"], {"metadata": {"labels": {"seen": "yes"}}}, namespace
    )
    del job["spec"]["template"]["metadata"]
    client.create("jobs", job, namespace)


def error_of(attempt: Callable[[], Any]) -> ApiError:
    try:
        made = attempt()
    except ApiError as error:
        return error
    raise AssertionError(f"it was taken: {made}")


@pytest.mark.parametrize(
    ("verb", "group", "resource"),
    [
        ("get", "", "secrets"),
        ("patch", "networking.k8s.io", "networkpolicies"),
        ("delete", "networking.k8s.io", "networkpolicies"),
        ("create", "", "pods"),
        ("update", "", "pods"),
        ("create", "", "pods/exec"),
        ("create", "", "serviceaccounts/token"),
        ("update", "coordination.k8s.io", "leases"),
        ("get", "", "configmaps"),
        ("patch", "", "configmaps"),
        ("patch", "pipemorph.io", "pipemorphjobs"),
    ],
)
def test_what_neither_process_may_do_in_a_namespace(
    jobs: Jobs, verb: str, group: str, resource: str
) -> None:
    resource, _, sub = resource.partition("/")
    request = {"verb": verb, "group": group, "resource": resource, "subresource": sub}
    for account in (FULL_NAME, f"{FULL_NAME}-ingest"):
        assert not may(jobs, account, request | {"namespace": jobs.namespace}), account


def test_each_process_may_touch_its_own_lease_only(jobs: Jobs) -> None:
    request = {"group": "coordination.k8s.io", "resource": "leases", "namespace": SYSTEM}
    accounts = (FULL_NAME, f"{FULL_NAME}-ingest")
    allowed = {
        (account, verb, lease)
        for account in accounts
        for verb in ("get", "update", "patch", "delete", "list")
        for lease in (*accounts, "another", "")
        if may(jobs, account, request | {"verb": verb, "name": lease})
    }
    assert allowed == {
        (account, verb, account) for account in accounts for verb in ("get", "update")
    }


def test_the_ingest_labels_its_own_pods_and_changes_nothing_else(jobs: Jobs) -> None:
    """Pods of its namespace may be patched; an admission policy lets labels pass only."""
    ingest = f"{FULL_NAME}-ingest"
    request = {"group": "", "resource": "pods"}
    assert may(jobs, ingest, request | {"verb": "patch", "namespace": SYSTEM})
    for verb in ("watch", "patch", "delete"):
        assert not may(jobs, ingest, request | {"verb": verb, "namespace": jobs.namespace})
    client = ApiClient(jobs.installation.account(ingest))
    label = {"metadata": {"labels": {"pipemorph.io/leader": "true"}}}
    image = {"spec": {"containers": [{"name": "c", "image": "none.invalid/other"}]}}
    for component in ("ingest", "operator"):
        name = f"labelled-{component}"
        about = {"name": name, "labels": {"app.kubernetes.io/component": component}}
        containers = [{"name": "c", "image": "none.invalid/image"}]
        # Without a mounted token a merge patch of the containers changes the image only.
        spec = {
            "schedulerName": "absent",
            "automountServiceAccountToken": False,
            "containers": containers,
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}
        jobs.cluster.apply(pod, f"--namespace={SYSTEM}")
        try:
            with pytest.raises(ApiError, match="only the labels of its own pods"):
                client.patch("pods", name, image, SYSTEM)
            if component == "ingest":
                client.patch("pods", name, label, SYSTEM)
            else:
                with pytest.raises(ApiError, match="only the labels of its own pods"):
                    client.patch("pods", name, label, SYSTEM)
        finally:
            jobs.cluster.client.delete("pods", name, SYSTEM)


def test_the_operator_changes_objects_of_its_jobs_and_no_others(jobs: Jobs) -> None:
    """Rights to all of a kind are limited by an admission policy to those with a label."""
    client, there = jobs.cluster.client, jobs.namespace
    operator = ApiClient(jobs.installation.account())
    spec = {"containers": [{"name": "a", "image": "none.invalid/i"}], "schedulerName": "absent"}
    template = {"spec": spec | {"restartPolicy": "Never"}}
    made: dict[str, Object] = {
        "pods": {"spec": spec},
        "secrets": {},
        "configmaps": {},
        "jobs": {"spec": {"suspend": True, "template": template}},
    }
    for kind, extra in made.items():
        client.create(kind, {"metadata": {"name": "users"}} | extra, there)
        with pytest.raises(ApiError, match="only objects of its jobs"):
            operator.delete(kind, "users", there)
        if kind != "pods":  # Only the Job controller makes such pods.
            ours = {"name": "ours", "labels": {JOB_UID: "u"}}
            client.create(kind, {"metadata": ours} | extra, there)
            operator.delete(kind, "ours", there)
    label = {"metadata": {"labels": {"a": "b"}}}
    with pytest.raises(ApiError, match="only objects of its jobs"):
        operator.patch("pods", "users", label, there)
    jobs.apply(manifest("own", stages=1))
    (pod,) = jobs.pods("own", 1)
    name = pod["metadata"]["name"]
    operator.patch("pods", name, label, there)
    containers = copy.deepcopy(pod["spec"]["containers"])
    containers[0]["image"] = "none.invalid/other"
    with pytest.raises(ApiError, match="only labels and finalizers of pods"):
        operator.patch("pods", name, {"spec": {"containers": containers}}, there)
    operator.delete("pods", name, there)
