"""PodGroups of the coscheduling plugin on a real API server; no scheduler looks at them here."""

from collections.abc import Iterator

import pytest
from operator_support import FULL_NAME, SYSTEM, Jobs, manifest, wait_for_kind
from testbed import Cluster, wait_for

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

GROUP = "scheduling.x-k8s.io"
CRD = f"podgroups.{GROUP}"


@pytest.fixture(scope="module", autouse=True)
def pod_groups(cluster: Cluster) -> Iterator[None]:
    """The kind, and the rights on it that the chart's ``rbac.coscheduling`` gives."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": anything},
    }
    kind = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # The group is one of those that only the Kubernetes project may define.
        "metadata": {
            "name": CRD,
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups"},
            "versions": [version],
        },
    }
    cluster.apply(kind)
    cluster.wait("crds", CRD, "Established")
    wait_for_kind(cluster, CRD)
    rights = ("create", "clusterrole", "groups", "--verb=create,patch", f"--resource={CRD}")
    cluster.kubectl(*rights)
    account = f"--serviceaccount={SYSTEM}:{FULL_NAME}"
    cluster.kubectl("create", "clusterrolebinding", "groups", "--clusterrole=groups", account)
    yield
    cluster.kubectl("delete", "clusterrolebinding,clusterrole", "groups")
    cluster.kubectl("delete", "crd", CRD, "--wait=false")
    cluster.wait("crds", CRD, "deleted")


@pytest.mark.timeout(900)  # The garbage collector hears of a new kind every 30 s.
def test_a_pod_group_goes_when_its_attempt_is_over(jobs: Jobs) -> None:
    jobs.apply(manifest("gang", stages=2, placement={"gang": {"coscheduling": {}}}))
    pods = jobs.pods("gang", 2)

    def groups() -> list[str]:
        return jobs.cluster.kubectl("get", CRD, "-n", jobs.namespace, "-o", "name").split()

    (first,) = groups()
    assert first.partition("/")[2] == pods[0]["metadata"]["labels"][f"{GROUP}/pod-group"]
    jobs.patch("gang", {"suspend": True})
    wait_for("the garbage collector to take the group", lambda: not groups(), 180.0)
    assert jobs.get("gang")["spec"]["suspend"], "the job itself is gone"
