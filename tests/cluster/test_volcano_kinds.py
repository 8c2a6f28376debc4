"""PodGroups for Volcano, checked by its own kind; no scheduler handles them here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_support import ROOT, Object, wait_for_kind
from testbed import Cluster
from testbed.errors import TestbedError
from testbed.manifests import installed, kinds

from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.job_object import read_job
from pipemorph_operator.resources import Attempt, build_objects

pytestmark = pytest.mark.cluster

EXAMPLE = ROOT / "examples/kubernetes/volcano.yaml"
CRD = "podgroups.scheduling.volcano.sh"


@pytest.fixture(scope="module", autouse=True)
def pod_groups(cluster: Cluster) -> Iterator[None]:
    (wanted,) = (kind for kind in kinds("volcano") if kind["metadata"]["name"] == CRD)
    with installed(cluster, [wanted]):
        wait_for_kind(cluster, CRD)
        yield


def made_of(namespace: str, **placement: Any) -> Object:
    """The PodGroup that the operator makes of the example, with some of its placement changed."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["metadata"] |= {"namespace": namespace, "uid": "u", "generation": 1}
    job["metadata"]["resourceVersion"] = "1"
    job["spec"]["placement"] |= placement
    config = OperatorConfig(ingest_url="https://ingest:8443", ca_pem="PEM", trainer_image="t")
    found: Object = next(
        each
        for each in build_objects(Attempt(read_job(job), "u", 0, ()), config)
        if each["kind"] == "PodGroup"
    )
    return found


def take(cluster: Cluster, group: Object, path: Path) -> None:
    """Raises TestbedError if the API server refuses it, or does not know one of its fields."""
    path.write_text(yaml.safe_dump(group))
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(path))


def test_volcano_takes_a_hypernode_for_each_pipeline(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    group = made_of(namespace)
    assert [each["subGroupSize"] for each in group["spec"]["subGroupPolicy"]] == [8, 8]
    take(cluster, group, tmp_path / "group.yaml")
    group["spec"]["subGroupPolicy"][1]["networkTopology"]["mode"] = "firm"
    with pytest.raises(TestbedError, match="mode"):
        take(cluster, group, tmp_path / "group.yaml")


def test_volcano_takes_a_hypernode_for_the_whole_job(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    group = made_of(namespace, topology={"key": "rack", "required": True})
    assert group["spec"]["networkTopology"] == {"mode": "hard", "highestTierAllowed": 1}
    take(cluster, group, tmp_path / "group.yaml")
    group["spec"]["networkTopology"]["tier"] = 1
    with pytest.raises(TestbedError, match="tier"):
        take(cluster, group, tmp_path / "group.yaml")
