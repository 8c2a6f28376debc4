"""Nodes that links of several jobs accuse, on a real API server, with no more than the chart's
rights."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from operator_support import (
    CHART,
    DEADLINE,
    FABRIC_MAP,
    FULL_NAME,
    RELEASE,
    SYSTEM,
    Jobs,
    manifest,
    may,
)
from testbed import wait_for
from testbed.api import Object

from pipemorph.api.running import Running
from pipemorph.api.spec import JobSpec
from pipemorph.control import Health, LinkHealth
from pipemorph.fabric.memory import End, FabricMemory
from pipemorph_operator.cluster.client import Cluster
from pipemorph_operator.cluster.fabric_map import Place, config_map
from pipemorph_operator.ingest.fabric import FabricWatch
from pipemorph_operator.reconcile.nodes import NodeMarks

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

PLACE = Place.of(FABRIC_MAP)


@pytest.fixture
def rights(jobs: Jobs) -> Iterator[None]:
    """Those of an installation that marks nodes."""
    jobs.installation.ingest.kill()  # It publishes as well.
    upgrade = ("upgrade", RELEASE, str(CHART), "--namespace", SYSTEM)
    values = ("nodeConditions.enabled=true", "taint.enabled=true", "rackLabel=rack")
    jobs.cluster.helm(*upgrade, *(f"--set=fabric.{value}" for value in values))
    yield
    jobs.cluster.helm(*upgrade, "--reset-values")
    forget(jobs)


def forget(jobs: Jobs) -> None:
    jobs.cluster.kubectl("delete", "configmap", "-n", SYSTEM, "--ignore-not-found", PLACE.name)


class Reports:
    """What a job's agent told of its links: those in ``slow`` are slow."""

    def __init__(self, job: Object, slow: set[int]) -> None:
        self.spec, self.slow = JobSpec.model_validate(job["spec"]), slow
        self.attempt = job["status"]["attempt"]
        self.controller, self.running = self, Running(self.spec.parallelism)
        self.namespace, self.uid = job["metadata"]["namespace"], job["metadata"]["uid"]
        self.job_uid = job["status"]["jobUid"]
        self.reports = SimpleNamespace(reported_at=1.0)

    def links(self, now: float) -> list[LinkHealth]:
        return [
            LinkHealth(i, Health.SLOW if i in self.slow else Health.HEALTHY)
            for i in range(self.spec.parallelism.stages - 1)
        ]

    def rails(self, now: float) -> Any:
        return SimpleNamespace(sick=())

    def fabric(self) -> None:
        """Its pods have not checked their ports."""


def started(jobs: Jobs, name: str, nodes: list[str], slow: set[int]) -> Reports:
    """A running job with one rank on each node."""
    jobs.apply(manifest(name))
    for node, pod in zip(nodes, jobs.pods(name, 4), strict=True):
        jobs.cluster.fake_pod_running(jobs.namespace, pod["metadata"]["name"], node=node)
    return Reports(jobs.wait(name, "Running"), slow)


async def look(
    ingest: Path, operator: Path, reports: list[Any], now: float, monkeypatch: pytest.MonkeyPatch
) -> NodeMarks:
    """One look of each process, as the chart's service accounts."""
    monkeypatch.setenv("KUBECONFIG", str(ingest))
    async with await Cluster.configured() as api:
        watch = FabricWatch(api, lambda: reports, PLACE, "rack", clock=lambda: now)
        await watch.look()
    monkeypatch.setenv("KUBECONFIG", str(operator))
    async with await Cluster.configured() as api:
        marks = NodeMarks(api, PLACE, conditions=True, taint="PreferNoSchedule")
        await marks.look()
        return marks


def test_a_node_that_two_jobs_accuse_is_marked_until_it_is_well(
    jobs: Jobs, rights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{jobs.namespace}-{i}" for i in range(7)]
    for i, name in enumerate(names):
        jobs.cluster.fake_node(name, {"rack": f"r{i % 2}"})
    a, b, c, d, e, f, bad = names
    reports = [
        started(jobs, "one", [a, bad, b, c], {0, 1}),
        started(jobs, "two", [d, e, f, bad], {2}),
    ]
    accounts = (
        jobs.installation.account(f"{FULL_NAME}-ingest"),
        jobs.installation.account(FULL_NAME),
    )
    marks = asyncio.run(look(*accounts, reports, 1000.0, monkeypatch))
    # The memory is that of all jobs of the cluster, those of other tests as well.
    assert [each for each in marks.suspects if each.startswith(jobs.namespace)] == [bad]

    def seen() -> tuple[str, list[str]]:
        node = jobs.cluster.client.get("nodes", bad)
        conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
        assert conditions["Ready"] == "True", "others' conditions stay"
        taints = [t["key"] for t in node["spec"].get("taints", [])]
        return conditions.get("PipeMorphNetworkSlow", ""), taints

    assert seen() == ("True", ["pipemorph.io/network-slow"])
    described = jobs.cluster.kubectl("describe", "node", bad)
    assert "LinksSlow" in described
    assert "3 of 3 pairs of ends" in described
    # Both processes restart, and hours pass in which its links are well.
    for each in reports:
        each.slow = set()
    for hours in range(1, 7):
        asyncio.run(look(*accounts, reports, 1000.0 + 3600 * hours, monkeypatch))
    assert seen() == ("False", [])
    assert "LinksRecovered" in jobs.cluster.kubectl("describe", "node", bad)
    for name in ("one", "two"):
        for pod in jobs.pods(name, 4):
            jobs.cluster.fake_pod_gone(jobs.namespace, pod["metadata"]["name"])


def test_who_marks_nodes_may_do_nothing_else_to_them(jobs: Jobs, rights: None) -> None:
    asked = {
        (verb, resource): {"group": "", "verb": verb, "resource": name, "subresource": sub}
        for verb in ("get", "list", "create", "update", "patch", "delete")
        for resource in ("nodes", "nodes/status")
        for name, _, sub in [resource.partition("/")]
    }

    def allowed(account: str) -> set[tuple[str, str]]:
        return {what for what, each in asked.items() if may(jobs, account, each)}

    nodes = {(verb, "nodes") for verb in ("get", "list", "update")}
    wanted = nodes | {("patch", "nodes/status")}
    # The authorizer sees a new right when its watch delivers it.
    wait_for("the operator's rights", lambda: allowed(FULL_NAME) == wanted, DEADLINE)
    ingest = f"{FULL_NAME}-ingest"
    wait_for("the ingest's rights", lambda: allowed(ingest) == {("list", "nodes")}, DEADLINE)


def test_the_replica_that_serves_next_remembers_what_the_last_one_knew(jobs: Jobs) -> None:
    installation = jobs.installation
    first, (second, _) = installation.ingest, installation.ingest_replica("second-fabric")
    memory, now = FabricMemory(), time.time()
    for other in "abc":
        memory.observe("j", End("bad"), End(other), slow=True, now=now)

    def pairs() -> tuple[float, ...]:
        running = (each for each in (first, second) if each.process.running)
        return tuple(each.metric("pipemorph_fabric_pairs") for each in running)

    first.kill()
    jobs.cluster.client.request(
        "POST",
        f"/api/v1/namespaces/{SYSTEM}/configmaps",
        config_map(PLACE, (), memory, now),
    )
    try:
        first.start()
        wait_for("the first to know it", lambda: pairs() == (3.0,), DEADLINE)
        second.start()
        assert pairs() == (3.0, 0.0), "one that stands by looks at nothing"
        found = jobs.cluster.client.get("configmaps", PLACE.name, SYSTEM)["data"]["findings"]
        assert '"name": "bad"' in found
        first.kill()
        wait_for("the second to know it", lambda: pairs() == (3.0,), DEADLINE)
    finally:
        second.process.stop()
        first.kill()
        forget(jobs)
