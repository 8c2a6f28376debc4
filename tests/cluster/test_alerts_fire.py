"""The chart's alerts, provoked by played ranks, on a real API server with the operator and the
ingest, whose metrics a real Prometheus scrapes. Commands that an alert names are run.

Rules wait for minutes, so that passing trouble wakes no one: :data:`SHORTER` waits here.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_support import DEADLINE, FULL_NAME, RELEASE, SYSTEM, Installation, manifest
from operator_support import Jobs as AllJobs
from played_ranks import Ranks
from prometheus_client import start_http_server
from rendered_chart import rendered
from testbed import Cluster, NotYet, tools, wait_for
from testbed.prometheus import Server, Target

from pipemorph.protocol import TransportSample
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.telemetry.metrics import RankMetrics

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster
TESTBEDS = ("prometheus",)

SLOW = 0.06
SHORTER = {"PipeMorphJobSilent": ("> 600", "> 8"), "PipeMorphWatchSilent": ("> 180", "> 8")}
"""Limits in seconds. The times for which a rule's condition has to hold are one second each."""
LASTING = {"adaptation": {"staleAfterSeconds": 600.0}}
"""Setting of a job whose ranks need not go on while a rule waits."""
ROLE = f"{FULL_NAME}-{SYSTEM}"
Alarm = dict[str, Any]


class Scene:
    """Installation whose counters begin at 0, jobs in a namespace, and a Prometheus."""

    def __init__(
        self, installation: Installation, namespace: str, rank: RankMetrics, server: Server
    ) -> None:
        self.installation, self.rank, self.server = installation, rank, server
        self.cluster: Cluster = installation.cluster
        self.jobs = AllJobs(installation, namespace)
        self.namespace = namespace

    def firing(self, name: str, /, **labels: str) -> list[Alarm]:
        wanted = labels | {"alertname": name}
        return [each for each in self.server.firing() if wanted.items() <= each["labels"].items()]

    def expect(self, name: str, /, **labels: str) -> Alarm:
        """Wait until the alert fires, follow its instructions, and return it."""
        alarm: Alarm = wait_for(
            f"{name} to fire with {labels}",
            lambda: next(iter(self.firing(name, **labels)), None),
            DEADLINE,
            interval=0.3,
            details=lambda: self._details(name),
        )
        assert alarm["labels"]["severity"] in ("info", "warning", "critical")
        for text in alarm["annotations"].values():
            assert "{{" not in text and "<no value>" not in text, text
        return alarm

    def _details(self, name: str) -> str:
        (rule,) = (each for each in self.server.rules() if each["name"] == name)
        names = sorted({each["labels"]["alertname"] for each in self.server.firing()})
        return f"{rule['query']} is {self.server.ask(rule['query'])}; {', '.join(names)} fire"

    def follow(self, alarm: Alarm) -> dict[str, str]:
        """Run the commands of the alert. Returns their output, by the first two words."""
        commands = re.findall("`([^`]+)`", alarm["annotations"]["description"])
        assert commands, f"it does not say what to run: {alarm['annotations']}"
        return {" ".join(shlex.split(each)[:2]): self._run(shlex.split(each)) for each in commands}

    def _run(self, words: list[str]) -> str:
        if words[0] == "pipemorph":
            if words[1:3] == ["fabric", "check"]:
                words = [*words, "--help"]  # The check needs two hosts.
            path = f"{tools.find('kubectl').parent}:{os.environ['PATH']}"
            done = subprocess.run(
                [str(Path(sys.executable).parent / "pipemorph"), *words[1:]],
                env=os.environ | {"KUBECONFIG": str(self.cluster.admin), "PATH": path},
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{words}: {done.stderr}"
            return done.stdout
        assert words[0] == "kubectl", words
        if words[1] == "logs":
            # The two programs run outside this cluster, so the search is for their pods' names.
            kind = "deployments" if SYSTEM in words else "pods"
            chosen = [f"--selector={words[words.index('-l') + 1]}"] if "-l" in words else []
            words = ["", "get", kind, "-n", words[words.index("-n") + 1], "-o", "name", *chosen]
        printed = self.cluster.kubectl(*words[1:])
        assert printed.strip(), f"{words} printed nothing"
        return printed


class Stuck(Ranks):
    """Ranks that receive plans, and never adopt one."""

    def deliver(self, now: float) -> None:
        super().deliver(now)
        self.next = None


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart's, with less patience."""
    values = {"metrics.alerts.enabled": True, "ingest.replicas": 1}
    (made,) = rendered(
        "--show-only=templates/alerts.yaml", release=RELEASE, namespace=SYSTEM, **values
    )
    spec = made["spec"]
    for rule in (rule for group in spec["groups"] for rule in group["rules"]):
        if "for" in rule:
            rule["for"] = "1s"
        if rule["alert"] in SHORTER:
            long, short = SHORTER[rule["alert"]]
            assert long in rule["expr"]
            rule["expr"] = rule["expr"].replace(long, short)
    path = tmp_path_factory.mktemp("alerts") / "rules.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture(scope="module")
def scene(
    installation: Installation, rules: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """An ingest and an operator that have counted nothing yet."""
    before = installation.ingest, installation.port
    installation.ingest.process.stop()
    installation.operator.restart()
    installation.ingest, installation.port = installation.ingest_replica("alerts")
    rank = RankMetrics("rail", 1, 0)
    with ExitStack() as stack:
        namespace = stack.enter_context(installation.cluster.namespace())
        ranks, _ = start_http_server(0, "127.0.0.1", rank.registry)
        stack.callback(ranks.server_close)
        stack.callback(ranks.shutdown)
        stack.callback(installation.ingest.process.stop)
        installation.ingest.start()

        def program(component: str, port: int) -> Target:
            service = f"{FULL_NAME}-{component}-metrics"
            pod = {"namespace": SYSTEM, "service": service, "pod": f"{component}-0"}
            return Target(port, pod)

        targets = [
            program("operator", installation.operator.metrics_port),
            program("ingest", installation.ingest.metrics_port),
            Target(ranks.server_port, {"namespace": namespace, "pod": "rail-1"}),
        ]
        server = Server(tmp_path_factory.mktemp("prometheus"), targets, rules=rules)
        stack.callback(server.close)
        yield Scene(installation, namespace, rank, server)
        stack.callback(_tidy, installation.cluster, namespace)
    installation.ingest, installation.port = before


def _tidy(cluster: Cluster, namespace: str) -> None:
    """Nodes without a kubelet, and the pods that wait for one."""
    for pod in cluster.client.list("pods", namespace):
        cluster.fake_pod_gone(namespace, pod["metadata"]["name"])
    for node in cluster.client.list("nodes"):
        if node["metadata"]["name"].startswith(f"{namespace}-"):
            cluster.client.delete("nodes", node["metadata"]["name"])


def test_nothing_fires_where_nothing_is_wrong(scene: Scene) -> None:

    def quiet() -> bool:
        """Replicas do not lead before the first scrape."""
        if len(scene.server.ask("up == 1")) < 3:
            raise NotYet("not all is scraped")
        assert {rule["health"] for rule in scene.server.rules()} <= {"ok", "unknown"}
        found = {each["labels"]["alertname"] for each in scene.server.firing()}
        # A watch is confirmed once a minute where nothing happens, and its limit is shorter here.
        if found - {"PipeMorphWatchSilent"}:
            raise NotYet(f"these fire: {sorted(found)}")
        return all(rule["health"] == "ok" for rule in scene.server.rules())

    wait_for("no alert to fire", quiet, DEADLINE)


@pytest.fixture(scope="module")
def accused(scene: Scene) -> str:
    """A node at the ends of slow links of two jobs."""
    jobs, names = scene.jobs, [f"{scene.namespace}-{i}" for i in range(7)]
    for name in names:
        scene.cluster.fake_node(name)
    a, b, c, d, e, f, bad = names
    for job, nodes, slow in (("one", [a, bad, b, c], {0, 1}), ("two", [d, e, f, bad], {2})):
        jobs.apply(manifest(job, **LASTING))
        pods = jobs.pods(job, 4)
        for node, pod in zip(nodes, pods, strict=True):
            scene.cluster.fake_pod_running(scene.namespace, pod["metadata"]["name"], node=node)
        jobs.wait(job, "Running")
        ranks = Ranks.of(jobs, job, pods[0])
        ranks.run(4)
        for link in slow:
            ranks.delays[link] = SLOW
        ranks.until("LinksHealthy=False")
        # Events of both slow links of a job.
        wait_for(
            f"the slow links of {job}",
            lambda ranks=ranks, job=job, slow=slow: (
                {each["link"] for each in jobs.get(job)["status"]["training"]["slowLinks"]} == slow
                or ranks.run(1)
            ),
            DEADLINE,
            interval=0.0,
        )
    return bad


def test_a_slow_link(scene: Scene, accused: str) -> None:
    alarm = scene.expect("PipeMorphLinkSlow", namespace=scene.namespace, name="one")
    assert f"{scene.namespace}/one has had 2 slow links" in alarm["annotations"]["summary"]
    printed = scene.follow(alarm)
    assert "link 0 (+60 ms" in printed["pipemorph explain"]


def test_a_plan_that_ranks_do_not_adopt(scene: Scene) -> None:
    scene.jobs.apply(manifest("stuck", **LASTING))
    ranks = Stuck.of(scene.jobs, "stuck", scene.jobs.run("stuck", 4)[0])
    ranks.run(4)
    assert not scene.firing("PipeMorphPlanNotAdopted", name="stuck")
    ranks.delays[1] = SLOW
    wait_for("a plan", lambda: ranks.observed > 0 or ranks.run(1), DEADLINE, interval=0.0)
    ranks.run(2)
    alarm = scene.expect("PipeMorphPlanNotAdopted", namespace=scene.namespace, name="stuck")
    printed = scene.follow(alarm)
    assert "Running" in printed["kubectl get"] and "pod/" in printed["kubectl logs"]


def test_a_link_without_its_rails_and_a_rail_that_comes_and_goes(scene: Scene) -> None:
    scene.jobs.apply(manifest("rail", stages=2, **LASTING))
    ranks = Ranks.of(scene.jobs, "rail", scene.jobs.run("rail", 2)[0])

    def end(fallbacks: int) -> TransportSample:
        return TransportSample(
            link=0, direction="forward", agreed="rdma", transport="tcp", fallbacks=fallbacks,
            failbacks=max(fallbacks - 1, 0), reconnects=0, trouble="rxe0 port 1: port error",
        )  # fmt: skip

    ranks.run(2)
    assert not scene.firing("PipeMorphRailSick") and not scene.firing("PipeMorphRailFlapping")
    ranks.send(ports=2, transports=[end(1)])
    alarm = scene.expect("PipeMorphRailSick", namespace=scene.namespace, name="rail")
    assert "rxe0 port 1: port error" in scene.follow(alarm)["kubectl describe"]

    def tell(fallbacks: int) -> None:
        scene.rank.record_telemetry(
            RankTelemetry(
                stage=1, state="training", iteration=1, applied_plan_version=0,
                prepared_plan_version=0, transports=[end(fallbacks)],
            )
        )  # fmt: skip

    tell(0)
    wait_for(
        "the rank to be scraped",
        lambda: bool(scene.server.ask("pipemorph_rank_link_fallbacks_total")),
        DEADLINE,
    )
    tell(5)
    alarm = scene.expect("PipeMorphRailFlapping", namespace=scene.namespace, name="rail", link="0")
    assert "Fallen Links" in scene.follow(alarm)["kubectl describe"]


def test_a_job_that_is_silent(scene: Scene) -> None:
    scene.jobs.apply(manifest("mute", stages=2))
    ranks = Ranks.of(scene.jobs, "mute", scene.jobs.run("mute", 2)[0])
    ranks.until("LinksHealthy=True")
    assert not scene.firing("PipeMorphJobSilent", name="mute")
    alarm = scene.expect("PipeMorphJobSilent", namespace=scene.namespace, name="mute")
    assert "mute" in scene.follow(alarm)["kubectl get"], "the NetworkPolicy of the job"


def test_somebody_with_tokens_of_others(scene: Scene) -> None:
    pod = scene.jobs.pods("stuck", 4)[0]
    ranks = Ranks.of(scene.jobs, "stuck", pod)
    assert not scene.firing("PipeMorphTokensMisused")
    forged = ranks.token[:-4] + ("AAAA" if not ranks.token.endswith("AAAA") else "BBBB")
    assert ranks.post(b"{}", token=forged)[0] == 401
    scene.follow(scene.expect("PipeMorphTokensMisused", reason="review"))
    # The log line has the address after "refused".
    log = scene.installation.ingest.process.log.read_text()
    assert re.search(rf"refused POST for job {scene.namespace}/stuck from 127\.0\.0\.1", log)


def test_connections_that_say_nothing(scene: Scene) -> None:
    assert not scene.firing("PipeMorphConnectionsRefused")
    with ExitStack() as stack:
        for _ in range(700):
            address = ("127.0.0.1", scene.installation.port)
            stack.enter_context(socket.create_connection(address, timeout=10))
        alarm = scene.expect("PipeMorphConnectionsRefused")
    scene.follow(alarm)
    log = scene.installation.ingest.process.log.read_text()
    assert re.search(r"connections not served: .*from 127\.0\.0\.1", log)


def test_jobs_that_cannot_be_reconciled(scene: Scene) -> None:
    client, kind = scene.cluster.client, "clusterroles"
    granted = client.get(kind, ROLE)["rules"]
    without = [each for each in granted if each["resources"] != ["pipemorphjobs/status"]]
    assert len(without) == len(granted) - 1
    assert not scene.firing("PipeMorphReconcileErrors")
    client.patch(kind, ROLE, {"rules": without})
    try:
        for number in range(3):
            scene.jobs.apply(manifest(f"denied-{number}", stages=1))
        alarm = scene.expect("PipeMorphReconcileErrors", result="error")
    finally:
        client.patch(kind, ROLE, {"rules": granted})
    scene.follow(alarm)
    log = scene.installation.operator.process.log.read_text()
    assert re.search(rf"{scene.namespace}/denied-0: will retry: .*forbidden", log)
    for number in range(3):
        scene.jobs.pods(f"denied-{number}", 1)


def test_a_node_that_links_of_several_jobs_accuse(scene: Scene, accused: str) -> None:
    alarm = scene.expect("PipeMorphNodeAccused", node=accused)
    printed = scene.follow(alarm)
    assert "NodeAccused" in printed["kubectl describe"]
    for job in ("one", "two"):
        assert f"{scene.namespace}/{job}: link" in printed["kubectl describe"]
    assert "cordoned" in printed["kubectl cordon"]


def test_a_process_that_does_not_hear_from_the_api_server(scene: Scene) -> None:
    edits = itertools.count()

    def confirmed() -> bool:
        """The ingest receives each change of a job."""
        scene.jobs.patch("stuck", {"activeDeadlineSeconds": 7200 + next(edits)})
        return not scene.firing("PipeMorphWatchSilent", kind="PipeMorphJob")

    wait_for("the watch to be confirmed", confirmed, DEADLINE, interval=0.5)
    scene.cluster.control_plane.stop_apiserver()
    try:
        alarm = scene.expect("PipeMorphWatchSilent", kind="PipeMorphJob")
    finally:
        scene.cluster.control_plane.start_apiserver()
    assert "readyz check passed" in scene.follow(alarm)["kubectl get"]


def test_no_operator_leads(scene: Scene) -> None:
    wait_for("one to lead", lambda: not scene.firing("PipeMorphNoLeader"), DEADLINE)
    scene.installation.operator.kill()
    try:
        alarm = scene.expect("PipeMorphNoLeader")
        assert FULL_NAME in scene.follow(alarm)["kubectl get"], "its Lease"
    finally:
        scene.installation.operator.start()


def test_no_ingest_leads(scene: Scene) -> None:
    assert not scene.firing("PipeMorphIngestNoLeader")
    scene.installation.ingest.kill()
    alarm = scene.expect("PipeMorphIngestNoLeader")
    assert f"{FULL_NAME}-ingest" in scene.follow(alarm)["kubectl get"], "its Lease"
