"""Fixtures of the tests on real nodes; test modules name this file in `pytest_plugins`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from node_support import CHART, INGEST, INSTALL, OPERATOR, RELEASE, SYSTEM, Jobs
from testbed.node_cluster import NodeCluster


@pytest.fixture(scope="module")
def release(node_cluster: NodeCluster, project_archives: dict[str, Path]) -> Iterator[NodeCluster]:
    """The cluster with the project's images on its nodes and the chart installed, as documented."""
    for archive in project_archives.values():
        node_cluster.import_image(archive)
    node_cluster.helm("install", RELEASE, str(CHART), *INSTALL, "--create-namespace")
    for name in (OPERATOR, INGEST):
        node_cluster.wait("deployments", name, "Available", 180.0, namespace=SYSTEM)
    yield node_cluster
    node_cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--ignore-not-found")
    node_cluster.client.delete("crds", "pipemorphjobs.pipemorph.io")
    node_cluster.client.delete("namespaces", SYSTEM)
    for archive in project_archives.values():
        # Nodes to come need not have them.
        node_cluster.archives.remove(archive)


@pytest.fixture
def node_jobs(release: NodeCluster, node_namespace: str) -> Jobs:
    return Jobs(release, node_namespace)
