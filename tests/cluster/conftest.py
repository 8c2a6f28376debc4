"""Fixtures that give tests a real Kubernetes; docs/testbeds.md says what they need.

`cluster` (API level): etcd, kube-apiserver and kube-controller-manager, or the user's cluster.
`node_cluster` (node level): those, and a scheduler, and a kubelet that runs real pods.
`namespace`, `node_namespace`: a namespace of one test in either.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from testbed import Cluster, TestbedError, project_images, tools
from testbed.machine import missing_for_nodes
from testbed.node_cluster import NodeCluster

FOREIGN = "PIPEMORPH_TEST_KUBECONFIG"
SKIP = "PIPEMORPH_TEST_SKIP"

BUILD_FAILED = pytest.StashKey[dict[str, str]]()
IMAGES = "images"
ARCHIVES = pytest.StashKey[dict[str, Path]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BUILD_FAILED] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time for a start on a busy machine, which the first test of a run is charged with."""
    for item in items:
        levels = item.get_closest_marker("cluster") or item.get_closest_marker("node")
        if levels is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is missing before the first test, which has a time limit and hidden output."""
    if session.config.option.collectonly or session.testsfailed:
        return
    config = session.config
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")

    def say(text: str) -> None:
        if terminal is None:
            return
        if capture is not None:
            with capture.global_and_fixture_disabled():
                terminal.write_line(f"test cluster: {text}")
        else:
            terminal.write_line(f"test cluster: {text}")

    wanted = _programs(session.items)
    # Only some tests of the node level run the project's own images.
    images = "node" in wanted and any(
        "project_archives" in getattr(item, "fixturenames", ()) for item in session.items
    )
    for level, names in wanted.items():
        try:
            if level == "node":
                missing_for_nodes(say, project_images.NEEDED if images else {})
            tools.ensure(names, say)
        except TestbedError as error:
            # Reported by each test that needs it, as its own failure.
            config.stash[BUILD_FAILED][level] = str(error)
    if images and "node" not in config.stash[BUILD_FAILED]:
        try:
            config.stash[ARCHIVES] = project_images.ensure(say)
        except TestbedError as error:
            config.stash[BUILD_FAILED][IMAGES] = str(error)


def _programs(items: Sequence[pytest.Item]) -> dict[str, Sequence[str]]:
    """What the selected tests need, by level, apart from levels that are not to be run."""

    def marked(*names: str) -> bool:
        return any(all(item.get_closest_marker(name) for name in names) for item in items)

    def more(level: str) -> tuple[str, ...]:
        needed = {"kwok": tools.KWOK_TOOLS, "kueue": tools.KUEUE_TOOLS}
        return tuple(
            tool for name, names in needed.items() if marked(level, name) for tool in names
        )

    skipped = skipped_levels()
    wanted: dict[str, Sequence[str]] = {}
    # For the user's own cluster, programs are looked for when they are used.
    if marked("cluster") and "cluster" not in skipped and not os.environ.get(FOREIGN):
        wanted["cluster"] = tools.API_TOOLS + more("cluster")
    if marked("node") and "node" not in skipped:
        wanted["node"] = tools.NODE_TOOLS + more("node")
    return wanted


def skipped_levels() -> set[str]:
    """The levels that somebody at a desk chose to do without; CI must not set this."""
    words = set(os.environ.get(SKIP, "").replace(",", " ").split())
    if words - {"cluster", "node", "rdma"}:
        raise pytest.UsageError(f"{SKIP}={os.environ[SKIP]}: expected some of cluster, node, rdma")
    return words | ({"node"} if "cluster" in words else set())


def _refuse_or_skip(config: pytest.Config, level: str) -> None:
    if level in skipped_levels():
        pytest.skip(f"{SKIP} names {level}: what this test checks is not checked")
    failed = config.stash[BUILD_FAILED].get(level)
    if failed is not None:
        pytest.fail(
            f"no {level} level here: {failed}\n(on a machine that cannot have it, run with "
            f"{SKIP}={level}: these tests are then reported as skipped)",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    _refuse_or_skip(request.config, "cluster")
    directory = tmp_path_factory.mktemp("cluster")
    foreign = os.environ.get(FOREIGN)
    if foreign:
        yield Cluster.foreign(directory, Path(foreign))
        return
    with Cluster.own(directory) as made:
        yield made


@pytest.fixture(scope="session")
def node_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeCluster]:
    _refuse_or_skip(request.config, "node")
    with NodeCluster.started(
        tmp_path_factory.mktemp("nodes"), mounts=project_images.torch_mounts()
    ) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def project_archives(request: pytest.FixtureRequest) -> dict[str, Path]:
    """The images of the project's Dockerfile, built before the first test."""
    _refuse_or_skip(request.config, "node")
    failed = request.config.stash[BUILD_FAILED].get(IMAGES)
    if failed is not None:
        pytest.fail(f"no images: {failed}", pytrace=False)
    return request.config.stash[ARCHIVES]


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace() as name:
        yield name


@pytest.fixture
def node_namespace(node_cluster: NodeCluster) -> Iterator[str]:
    with node_cluster.namespace() as name:
        yield name


@pytest.fixture
def own_cluster(cluster: Cluster) -> Cluster:
    """The cluster, in tests that stop its API server or sign with its keys."""
    if cluster.control_plane is None:
        pytest.skip(f"{FOREIGN} names a cluster whose control plane is not ours to stop")
    return cluster


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
