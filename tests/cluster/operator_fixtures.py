"""Fixtures of the operator's tests; test modules name this file in `pytest_plugins`."""

from collections.abc import Iterator

import pytest
from operator_support import CHART, RELEASE, SYSTEM, Installation, Jobs, wait_for_kind
from testbed import Cluster


@pytest.fixture(scope="session")
def installation(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """The chart, installed once, with both programs running. A test that kills one starts it."""
    cluster.helm("install", RELEASE, str(CHART), "--namespace", SYSTEM, "--create-namespace")
    cluster.wait("crds", "pipemorphjobs.pipemorph.io", "Established")
    wait_for_kind(cluster, "pipemorphjobs")
    made = Installation(cluster, tmp_path_factory.mktemp("operator"))
    made.operator.start()
    made.ingest.start()
    yield made
    made.operator.process.stop()
    made.ingest.process.stop()
    cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM)


@pytest.fixture
def jobs(installation: Installation, namespace: str) -> Iterator[Jobs]:
    """Jobs of a test, in a namespace of their own; both programs run when it starts."""
    for program in (installation.operator, installation.ingest):
        if not program.process.running:
            program.start()
    made = Jobs(installation, namespace)
    yield made
    # A node without a kubelet that stays would be given the pods of later tests.
    client = made.cluster.client
    for node in client.list("nodes"):
        name = node["metadata"]["name"]
        if name.startswith(f"{namespace}-"):
            client.delete("nodes", name)
