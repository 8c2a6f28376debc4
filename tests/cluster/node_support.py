"""The chart and the project's images on real nodes; jobs whose ranks are real pods."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from testbed import ApiError, TestbedError, wait_for
from testbed.node import RESOURCE, Node
from testbed.node_cluster import NodeCluster

from pipemorph import __version__

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/pipemorph-operator"
RELEASE, SYSTEM = "pipemorph", "pipemorph-system"
OPERATOR = f"{RELEASE}-pipemorph-operator"
INGEST = f"{OPERATOR}-ingest"
TRAINER_IMAGE = f"pipemorph/trainer:{__version__}"
# Values of README and docs/how-to/install.md, but for the registry.
INSTALL = ("--namespace", SYSTEM, "--set", f"trainer.image={TRAINER_IMAGE}")
# Ranks import torch, all at once.
START = 120.0
COLLECTED = ("pods", "jobs", "services", "secrets", "configmaps")

Object = dict[str, Any]


def manifest(name: str, *, stages: int = 4, iterations: int, **spec: Any) -> Object:
    """A job of emulated stages, each with one RDMA device. No template: the chart's image.

    Not `ipcLock`: the image's user is not root, to whom alone a pod's capabilities are given.
    """
    times = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 5.0}
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": name},
        "spec": {
            "parallelism": {"stages": stages},
            "schedule": {"microbatches": 12, "stageTimes": [times] * stages},
            "emulation": {"stageTimes": [times], "messageBytes": 65536},
            "trainer": {"module": "pipemorph_trainer.examples.emulated", "iterations": iterations},
            "placement": {"rdma": {"resourceName": RESOURCE, "ipcLock": False}},
        }
        | spec,
    }


class Jobs:
    """Jobs of one namespace, run by the operator that the chart installed."""

    def __init__(self, nodes: NodeCluster, namespace: str) -> None:
        self.nodes = nodes
        self.namespace = namespace

    def apply(self, job: Object) -> None:
        self.nodes.apply(job, f"--namespace={self.namespace}")

    def get(self, name: str) -> Object:
        return self.nodes.client.get("pipemorphjobs", name, self.namespace)

    def watch(self, name: str, *, since: str, seconds: int) -> Iterator[Object]:
        client = self.nodes.client
        return client.watch("pipemorphjobs", name, self.namespace, since=since, seconds=seconds)

    def patch(self, name: str, spec: Object) -> None:
        self.nodes.client.patch("pipemorphjobs", name, {"spec": spec}, self.namespace)

    def wait(self, name: str, wanted: str | Callable[[Object], object], deadline: float) -> Object:
        """Wait for a state (`Running`), a condition (`LinksHealthy=False`) or the result of a
        function of the job; a miss shows the last log lines of the ranks and the operator."""
        check: str | Callable[[Object], object] = wanted
        if isinstance(wanted, str) and "=" not in wanted:

            def check(job: Object) -> bool:
                return bool(job.get("status", {}).get("state") == wanted)

        try:
            return self.nodes.wait("pipemorphjobs", name, check, deadline, namespace=self.namespace)
        except TestbedError as error:
            raise TestbedError(f"{wanted}: {error}\n{self.logs(name)}") from None

    def pods(self, name: str, attempt: int | None = None) -> list[Object]:
        """Pods of a job, or of one attempt, by rank."""
        labels = f"pipemorph.io/job-name={name}"
        if attempt is not None:
            labels += f",pipemorph.io/attempt={attempt}"
        index = "batch.kubernetes.io/job-completion-index"
        found = self.nodes.client.list("pods", self.namespace, labels=labels)
        return sorted(found, key=lambda pod: int(pod["metadata"]["annotations"][index]))

    def logs(self, name: str, lines: int = 15) -> str:
        """Last log lines of the ranks and of both processes of the operator."""
        text = []
        for pod in self.pods(name):
            with suppress(TestbedError):
                text.append(self._log(self.namespace, f"pod/{pod['metadata']['name']}", lines))
        for deployment in (OPERATOR, INGEST):
            with suppress(TestbedError):
                text.append(self._log(SYSTEM, f"deployment/{deployment}", lines))
        return "\n".join(text)

    def _log(self, namespace: str, what: str, lines: int) -> str:
        said = self.nodes.kubectl("logs", f"--namespace={namespace}", f"--tail={lines}", what)
        return f"{what}:\n{said}"

    def remaining_objects(self, name: str) -> list[str]:
        """Remaining objects of a job, as KIND/NAME."""
        labels = f"pipemorph.io/job-name={name}"
        return [
            f"{kind}/{found['metadata']['name']}"
            for kind in COLLECTED
            for found in self.nodes.client.list(kind, self.namespace, labels=labels)
        ]

    def delete(self, name: str) -> None:
        """Delete a job and wait until none of its objects remain, on the nodes either."""
        uids = {pod["metadata"]["uid"] for pod in self.pods(name)}
        self.nodes.client.delete("pipemorphjobs", name, self.namespace)
        self.nodes.wait("pipemorphjobs", name, "deleted", namespace=self.namespace)
        wait_for(
            f"all of {name} to go",
            lambda: not self.remaining_objects(name),
            120.0,
            details=lambda: f"found {self.remaining_objects(name)}",
        )
        wait_for(
            f"the pods of {name} to go from the nodes",
            lambda: not uids & {uid for node in self.nodes.nodes for uid in pods_on(node)},
            120.0,
        )


def pods_on(node: Node) -> list[str]:
    """UIDs of the pods whose folders a node still has."""
    folder = node.directory / "var-lib/kubelet/pods"
    return [path.name for path in folder.iterdir()]


def addresses(node: Node) -> list[str]:
    """Addresses that the node's CNI plugin has given out and not got back."""
    folder = node.directory / "var-lib/cni/networks/testbed"
    return sorted(path.name for path in folder.iterdir() if path.name[0].isdigit())


class Witness:
    """Sees every status of a job, however short it lasts, until the block ends; for assertions on
    its history."""

    def __init__(self, jobs: Jobs, name: str) -> None:
        self._jobs, self._name = jobs, name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.seen: list[Object] = []

    def __enter__(self) -> "Witness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait(self, what: str, check: Callable[[Object], object], deadline: float) -> Object:
        """Wait for the first status, past or future, for which a check of the job holds:
        `{"status": ...}`. A miss shows the last log lines of the ranks and the operator."""

        def found() -> Object | None:
            return next((job for status in self.seen if check(job := {"status": status})), None)

        def details() -> str:
            newest = json.dumps(self.seen[-1:], indent=1)
            return f"{len(self.seen)} seen, the newest {newest}\n{self._jobs.logs(self._name)}"

        return wait_for(f"{what} of {self._name}", found, deadline, details=details)

    def _look(self) -> None:
        version = ""
        last = False
        while not last:
            # Once more after the end: what the block has seen by other means is seen here too.
            last = self._stop.is_set()
            try:
                if not version:
                    version = self._see(self._jobs.get(self._name))
                for job in self._jobs.watch(self._name, since=version, seconds=1):
                    version = self._see(job)
                if last:
                    self._see(self._jobs.get(self._name))
            except (ApiError, OSError):
                # A failed read is skipped; tests assert on the successful ones.
                version = ""
                self._stop.wait(0.1)

    def _see(self, job: Object) -> str:
        status = job.get("status", {})
        if not self.seen or self.seen[-1] != status:
            self.seen.append(status)
        return str(job["metadata"]["resourceVersion"])

    def never_back(self, *path: str) -> None:
        """A number of status, `never_back("control", "planVersion")`, was there, and only grew."""
        found = []
        for status in self.seen:
            value: Any = status
            for key in path:
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, int):
                found.append(value)
        assert found, f"{'.'.join(path)} was never there"
        back = [(a, b) for a, b in pairwise(found) if b < a]
        assert not back, f"{'.'.join(path)} went backwards: {back}"

    def conditions(self, kind: str) -> list[str]:
        """The statuses a condition went through, each once."""
        found: list[str] = []
        for status in self.seen:
            for entry in status.get("conditions", []):
                if entry["type"] == kind and found[-1:] != [entry["status"]]:
                    found.append(entry["status"])
        return found


def follows(history: Sequence[str], *wanted: str) -> bool:
    """True if a history has these in this order, with or without others between them."""
    rest = iter(history)
    return all(entry in rest for entry in wanted)


def condition(job: Object, kind: str) -> Object:
    """A condition of a job; `{}` if it is not there."""
    found = job.get("status", {}).get("conditions", [])
    return next((entry for entry in found if entry["type"] == kind), {})


def training_status(job: Object) -> str:
    """A job's training status, for the message of an assertion."""
    return json.dumps(job["status"].get("training"), indent=1)


def final_status_written(job: Object) -> bool:
    """Return true if the job is complete and the ingest has written its final status."""
    return (
        job.get("status", {}).get("state") == "Complete"
        and condition(job, "LinksHealthy").get("reason") == "JobFinished"
    )


def at_iteration(number: int) -> Callable[[Object], bool]:
    return lambda job: (training_of(job).get("iteration") or 0) >= number


def training_of(job: Object) -> Object:
    return job.get("status", {}).get("training") or {}


def at_attempt(number: int) -> Callable[[Object], bool]:
    return lambda job: job.get("status", {}).get("attempt") == number


LAUNCHER = "grep -qsa pipemorph_trainer[.]launcher $p/cmdline"


def kill_process(jobs: Jobs, pod: Object, found: str) -> None:
    """Kill the process ``$p`` of a pod for which the shell's ``found`` is true."""
    within = ["exec", f"--namespace={jobs.namespace}", pod["metadata"]["name"], "--"]
    kill = "echo ${p#/proc/} && kill -KILL ${p#/proc/}"
    kill = f"for p in /proc/[0-9]*; do {found} && {kill}; done"
    killed = jobs.nodes.kubectl(*within, "sh", "-c", f"{kill}; true").split()
    assert killed, f"there is no process in {pod['metadata']['name']} for which: {found}"
