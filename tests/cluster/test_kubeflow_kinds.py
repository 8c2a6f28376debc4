"""The examples for Kubeflow Trainer and JobSet, checked by the kinds of both."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from operator_support import ROOT, Object, wait_for_kind
from testbed import Cluster
from testbed.errors import TestbedError
from testbed.manifests import installed, kinds

pytestmark = pytest.mark.cluster

FOLDER = ROOT / "examples"


@pytest.fixture(scope="module", autouse=True)
def kubeflow(cluster: Cluster) -> Iterator[None]:
    with installed(cluster, (*kinds("jobset"), *kinds("kubeflow-trainer"))):
        for kind in ("jobsets", "trainjobs", "clustertrainingruntimes"):
            wait_for_kind(cluster, kind)
        yield


def take(cluster: Cluster, path: Path, namespace: str) -> None:
    """Raises TestbedError if the API server refuses it, or does not know one of its fields."""
    strictly = ("--dry-run=server", "--validate=strict")
    cluster.kubectl("apply", *strictly, "-n", namespace, "-f", str(path))


def job_set() -> Object:
    """The JobSet that Kubeflow Trainer makes of the runtime."""
    runtime = yaml.safe_load((FOLDER / "kubeflow/runtime.yaml").read_text())
    template = runtime["spec"]["template"]
    about = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return about | {"metadata": {"name": "gpt"}, "spec": template["spec"]}


@pytest.mark.parametrize(
    "name", ["kubeflow/runtime.yaml", "kubeflow/trainjob.yaml", "kubernetes/jobset.yaml"]
)
def test_the_example_is_taken(cluster: Cluster, namespace: str, name: str) -> None:
    take(cluster, FOLDER / name, namespace)


def test_jobset_takes_what_the_runtime_becomes(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    made = job_set()
    path = tmp_path / "jobset.yaml"
    path.write_text(yaml.safe_dump(made))
    take(cluster, path, namespace)
    made["spec"]["replicatedJobs"][1]["dependsOn"][0]["state"] = "Ready"
    path.write_text(yaml.safe_dump(made))
    with pytest.raises(TestbedError, match="state"):
        take(cluster, path, namespace)
