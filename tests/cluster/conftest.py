"""Fixtures that give tests a real Kubernetes; docs/testbeds.md lists their requirements.

`cluster` (API level): etcd, kube-apiserver and kube-controller-manager.
`node_cluster` (node level): those, and a scheduler, and a kubelet that runs real pods.
`namespace`, `node_namespace`: a namespace of one test in either.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import Cluster, project_images
from testbed.node_cluster import NodeCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time for a start on a busy machine, which the first test of a run is charged with."""
    for item in items:
        levels = item.get_closest_marker("cluster") or item.get_closest_marker("node")
        if levels is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.own(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="session")
def node_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeCluster]:
    with NodeCluster.started(
        tmp_path_factory.mktemp("nodes"), mounts=project_images.torch_mounts()
    ) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def project_archives() -> dict[str, Path]:
    """The images of the project's Dockerfile, which `make testbeds` has built."""
    return project_images.find()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace() as name:
        yield name


@pytest.fixture
def node_namespace(node_cluster: NodeCluster) -> Iterator[str]:
    with node_cluster.namespace() as name:
        yield name


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the ends of the control plane's logs to the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if not report.failed:
        return
    for name in ("cluster", "node_cluster"):
        found = getattr(item, "funcargs", {}).get(name)
        if isinstance(found, Cluster):
            report.sections.append((f"logs of {name}", found.logs()))
