"""The real trainer with the environment its pods were given: what a kubelet would run, run here.

Only addresses are replaced, as there is no pod network: rank 0's and the ingest's name become
this machine's. Job file, secret, authority and token are those of the cluster.
"""

import base64
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from operator_support import DEADLINE, ROOT, History, Jobs, condition, free_port, manifest
from prometheus_client.parser import text_string_to_metric_families
from testbed import wait_for
from testbed.processes import Process

pytest_plugins = ("operator_fixtures",)
pytestmark = [pytest.mark.cluster]

Object = dict[str, Any]

ITERATIONS = 48


class Rank:
    """One rank as a process of this machine."""

    def __init__(self, jobs: Jobs, name: str, pod: Object, folder: Path, port: int) -> None:
        spec = pod["spec"]
        container = spec["containers"][0]
        rank = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
        env = {v["name"]: v.get("value", rank).replace("$$", "$") for v in container["env"]}
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        here = folder / f"rank-{rank}"
        here.mkdir()
        for volume in spec["volumes"]:
            where = here / mounts.get(volume["name"], "/nowhere").lstrip("/")
            where.mkdir(parents=True, exist_ok=True)
            for file, data in self._files(jobs, name, pod, volume).items():
                (where / file).write_bytes(data)
        for key, value in env.items():
            if value.startswith("/etc/pipemorph/"):
                env[key] = str(here / value.lstrip("/"))
        self.metrics_port = free_port()  # One machine has one port 9464.
        env |= {
            "PIPEMORPH_METRICS_PORT": str(self.metrics_port),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PIPEMORPH_INGEST_URL": f"https://localhost:{jobs.installation.port}",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{ROOT / 'trainer'}:{ROOT}",
        }
        command = [sys.executable if part == "python" else part for part in container["command"]]
        self.pod = pod
        self.process = Process(
            f"rank {rank}", command, folder / f"rank-{rank}.log", environment=env
        )

    def metrics(self) -> dict[str, float]:
        """The largest value of each metric, as Prometheus would scrape it."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = max(values.get(sample.name, sample.value), sample.value)
        return values

    def adapted(self, above: int = 0) -> dict[str, float] | None:
        """Its metrics, if it runs a plan of a version above this one; by default, another one than
        the first."""
        told = self.metrics()
        return told if told.get("pipemorph_rank_applied_plan_version", 0) > above else None

    @staticmethod
    def _files(jobs: Jobs, name: str, pod: Object, volume: Object) -> dict[str, bytes]:
        client, namespace = jobs.cluster.client, jobs.namespace
        if "configMap" in volume:
            data = client.get("configmaps", volume["configMap"]["name"], namespace)["data"]
            return {key: value.encode() for key, value in data.items()}
        if "secret" in volume:
            data = client.get("secrets", volume["secret"]["secretName"], namespace)["data"]
            return {key: base64.b64decode(value) for key, value in data.items()}
        if "projected" in volume:
            token = volume["projected"]["sources"][0].get("serviceAccountToken")
            if token is not None and token["audience"].startswith("pipemorph.io/"):
                text = jobs.token(name, pod, audience=token["audience"])
                return {token["path"]: text.encode()}
        return {}


@pytest.mark.timeout(900)
def test_the_real_trainer_adapts_to_a_slow_link_and_the_job_completes(
    jobs: Jobs, tmp_path: Path
) -> None:
    times = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 5.0}
    job = manifest(
        "real",
        stages=3,
        schedule={"microbatches": 8},
        emulation={"stageTimes": [times], "messageBytes": 16384},
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS},
        faults=[{"link": 1, "fromIteration": 8, "toIteration": 28, "delayMs": 60.0}],
    )
    jobs.apply(job)
    port = free_port()
    ranks = [Rank(jobs, "real", pod, tmp_path, port) for pod in jobs.run("real", 3)]
    history = History(jobs, "real")
    try:
        for rank in ranks:
            rank.process.start()
        history.wait("a slow link", lambda job: condition(job, "LinksHealthy")[0] == "False")
        adapted = history.wait("a plan for link 1", _adapted_to_link_1)
        assert adapted["status"]["training"]["appliedPlanVersion"] >= 1
        for rank in ranks:
            # Each tells of the plan with its own next telemetry.
            told = wait_for(f"{rank.process.name} to run the plan", rank.adapted, DEADLINE)
            assert told["pipemorph_rank_iteration_seconds"] > 0
            assert told["pipemorph_rank_link_bytes_total"] > 0
            assert told["pipemorph_rank_link_wire_seconds"] > 0
        history.wait("the end of the delay", _link_1_is_well)
        for rank in ranks:
            _ended_well(rank)
            jobs.cluster.fake_pod_succeeded(jobs.namespace, rank.pod["metadata"]["name"])
        done = jobs.wait("real", "Complete")
        assert condition(done, "PreflightPassed")[0] == "True"
        # The ingest has the last word on training, apart from the operator.
        jobs.wait("real", _trained_to_the_end)
    finally:
        for rank in ranks:
            rank.process.stop()


@pytest.mark.timeout(900)
def test_a_job_keeps_its_plan_without_an_ingest_and_tells_the_next_one(
    jobs: Jobs, tmp_path: Path
) -> None:
    times = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 5.0}
    job = manifest(
        "alone",
        stages=3,
        schedule={"microbatches": 8},
        emulation={"stageTimes": [times], "messageBytes": 16384},
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": 100_000},
        faults=[{"link": 1, "fromIteration": 8, "toIteration": 100_000, "delayMs": 60.0}],
    )
    jobs.apply(job)
    port = free_port()
    ranks = [Rank(jobs, "alone", pod, tmp_path, port) for pod in jobs.run("alone", 3)]
    history = History(jobs, "alone")
    ingest = jobs.installation.ingest
    try:
        for rank in ranks:
            rank.process.start()
        before = _training(history.wait("the plan for link 1", _adapted_to_link_1))
        ingest.kill()
        applied = [_applied(rank) for rank in ranks]
        iteration = ranks[0].metrics()["pipemorph_rank_iteration"]
        wait_for(
            "iterations without an ingest",
            lambda: ranks[0].metrics()["pipemorph_rank_iteration"] > iteration + 4,
            2 * DEADLINE, details=ranks[0].process.log_end,
        )  # fmt: skip
        assert [_applied(rank) for rank in ranks] == applied, "the plan has changed"
        ingest.start()
        after = _training(history.wait("later reports", _iterates(before)))
        told = f"{before}\nbecame {after}\n{ranks[0].process.log_end(200)}"
        assert after["adaptations"] >= before["adaptations"], told
        assert after["wantedPlanVersion"] >= before["wantedPlanVersion"] > 0
        assert "handed in the snapshot" in ranks[0].process.log_end(200)
    finally:
        for rank in ranks:
            rank.process.stop()
        if not ingest.process.running:
            ingest.start()


def _applied(rank: Rank) -> float:
    return rank.metrics()["pipemorph_rank_applied_plan_version"]


def _iterates(before: Object) -> Callable[[Object], bool]:
    return lambda job: bool(_training(job).get("iteration", 0) > before.get("iteration", 0))


def _training(job: Object) -> Object:
    found: Object = job["status"].get("training") or {}
    return found


def _trained_to_the_end(job: Object) -> bool:
    training = _training(job)
    return training["state"] == "finished" or training["iteration"] >= ITERATIONS - 2


def _adapted_to_link_1(job: Object) -> bool:
    """On a busy machine another link may really be slow at times, and be adapted to as well."""
    change = _training(job).get("lastAdaptation") or {}
    return condition(job, "ScheduleAdapted")[0] == "True" and 1 in change.get("links", [])


def _link_1_is_well(job: Object) -> bool:
    slow = {link["link"] for link in _training(job).get("slowLinks", [])}
    return condition(job, "LinksHealthy")[0] in ("True", "False") and 1 not in slow


def _ended_well(rank: Rank) -> None:
    wait_for(
        f"{rank.process.name} to end",
        lambda: rank.process.returncode is not None,
        DEADLINE,
        details=rank.process.log_end,
    )
    assert rank.process.returncode == 0, rank.process.log_end()
