"""PodGroups of the coscheduling plugin, with its own CRD; no scheduler handles them here."""

from collections.abc import Iterator

import pytest
from operator_support import FULL_NAME, SYSTEM, Jobs, manifest, wait_for_kind
from testbed import Cluster, wait_for
from testbed.manifests import installed, kinds

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

GROUP = "scheduling.x-k8s.io"
CRD = f"podgroups.{GROUP}"


@pytest.fixture(scope="module", autouse=True)
def pod_groups(cluster: Cluster) -> Iterator[None]:
    """The kind, and the rights on it that the chart's ``rbac.coscheduling`` gives."""
    with installed(cluster, kinds("coscheduling")):
        wait_for_kind(cluster, CRD)
        rights = ("create", "clusterrole", "groups", "--verb=create,patch", f"--resource={CRD}")
        cluster.kubectl(*rights)
        account = f"--serviceaccount={SYSTEM}:{FULL_NAME}"
        cluster.kubectl("create", "clusterrolebinding", "groups", "--clusterrole=groups", account)
        yield
        cluster.kubectl("delete", "clusterrolebinding,clusterrole", "groups")


@pytest.mark.timeout(900)  # The garbage collector reads new kinds every 30 s.
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
