"""What the operator costs at scale, against a real API server and Job controller.

    python benchmarks/operator_scale.py [--jobs 1000] [--ranks 1000] [--json FILE]

The control plane is that of tests/cluster (built once from Go modules); no kubelet, so what is
measured is the operator, the ingest, the API server and the Job controller. Everything shares
this machine, the load generator included. Sections:

pods      apply of one job of RANKS ranks until all its pods exist, against a plain Indexed Job of
          the same pods in the same run (goal: at most 1.2 times)
jobs      JOBS jobs of two ranks: API requests of the operator per job, its memory, and the time
          a restarted operator needs until it has looked at all of them
reports   JOBS jobs report every 2 s: time to answer a report, p50 and p99, and time of the report
          that brings a directive, persisted in status before it is answered
capacity  reports one ingest process answers per second, with every connection busy (goal: 2,000)
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/cluster"), str(ROOT / "operator")]

import aiohttp  # noqa: E402
from operator_support import CHART, RELEASE, SYSTEM, Installation, Jobs, manifest  # noqa: E402
from testbed import Cluster, tools, wait_for  # noqa: E402

DEADLINE = 1800.0
PERIOD = 2.0
SLOW_AFTER = 6
"""Reports of a job before its link goes slow, at the earliest."""
SPREAD = 30
"""Reports over which the links of all jobs go slow: a minute."""

Result = dict[str, float]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def count_pods(cluster: Cluster, namespace: str, labels: str, wanted: int) -> bool:
    """Whether so many pods exist. Names only: the same small load for whoever makes them."""
    said = cluster.kubectl(
        "get", "pods", "-n", namespace, "-l", labels, "-o", "name", "--chunk-size=0"
    )
    return len(said.split()) >= wanted


def time_to_pods(jobs: Jobs, apply: Callable[[], None], labels: str, ranks: int) -> float:
    started = time.monotonic()
    apply()
    wait_for(
        f"{ranks} pods",
        lambda: count_pods(jobs.cluster, jobs.namespace, labels, ranks),
        DEADLINE,
        interval=0.5,
    )
    return time.monotonic() - started


def pods(installation: Installation, ranks: int) -> Result:
    """One large job against a plain Indexed Job of the very same pods."""
    cluster = installation.cluster
    with cluster.namespace("bench") as namespace:
        jobs = Jobs(installation, namespace)
        stages = next(s for s in (64, 50, 32, 20, 16, 10, 8, 4, 2, 1) if ranks % s == 0)
        cut = {"stages": stages, "replicas": ranks // stages}
        times = time_to_pods(
            jobs,
            lambda: jobs.apply(manifest("large", stages=stages, parallelism=cut)),
            "pipemorph.io/job-name=large",
            ranks,
        )
        made = jobs.batch_jobs("large")[0]
        plain = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "plain"},
            "spec": {
                k: copy.deepcopy(v)
                for k, v in made["spec"].items()
                if k not in ("selector", "manualSelector", "suspend")
            },
        }
        plain["spec"]["template"]["metadata"]["labels"] = {"app": "plain"}
        cluster.client.delete("pipemorphjobs", "large", namespace)
        wait_for(
            "the pods of the job to go",
            lambda: not count_pods(cluster, namespace, "pipemorph.io/job-name=large", 1),
            DEADLINE,
        )
        base = time_to_pods(
            jobs,
            lambda: cluster.apply(plain, f"--namespace={namespace}"),
            "job-name=plain",
            ranks,
        )
        cluster.client.delete("jobs", "plain", namespace)
    return {"ranks": ranks, "seconds": times, "plain_seconds": base, "ratio": times / base}


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def many(installation: Installation, jobs: Jobs, count: int) -> Result:
    """Jobs that exist: what they cost the operator."""
    operator = installation.operator
    before = operator.metric("pipemorph_api_requests_total")
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: create(jobs, manifest(f"j{i}", stages=2)), range(count)))
    wait_for(
        f"{count} attempts",
        lambda: operator.metric("pipemorph_operator_jobs_created_total") >= count,
        DEADLINE,
        interval=1.0,
    )
    wait_for(
        "the operator to be idle",
        lambda: operator.metric("pipemorph_operator_queue_depth") == 0,
        DEADLINE,
        interval=1.0,
    )
    created = time.monotonic() - started
    requests = operator.metric("pipemorph_api_requests_total") - before
    memory = resident_bytes(operator.process.pid)
    operator.kill()
    started = time.monotonic()
    operator.start()
    wait_for(
        "every job to be looked at",
        lambda: operator.metric("pipemorph_operator_reconcile_seconds_count") >= count,
        DEADLINE,
        interval=0.5,
    )
    return {
        "jobs": count,
        "seconds_to_create": created,
        "requests_per_job": requests / count,
        "memory_mib": memory / 2**20,
        "memory_after_restart_mib": resident_bytes(operator.process.pid) / 2**20,
        "restart_seconds": time.monotonic() - started,
    }


def create(jobs: Jobs, job: dict[str, Any]) -> None:
    """As fast as a program can: without kubectl."""
    jobs.cluster.client.request(
        "POST", f"/apis/pipemorph.io/v1alpha1/namespaces/{jobs.namespace}/pipemorphjobs", job
    )


def tokens(jobs: Jobs, count: int) -> dict[str, str]:
    """A rank's token per job."""

    def one(i: int) -> tuple[str, str]:
        labels = f"pipemorph.io/job-name=j{i}"
        found: list[Any] = wait_for(
            f"a pod of j{i}",
            lambda: jobs.cluster.client.list("pods", jobs.namespace, labels=labels) or None,
            DEADLINE,
        )
        return f"j{i}", jobs.token(f"j{i}", found[0])

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(one, range(count)))


class Reporter:
    """One job's reports, from the least code that can make them."""

    def __init__(self, jobs: Jobs, name: str, token: str) -> None:
        self.url = f"/v1/jobs/{jobs.namespace}/{name}/reports"
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self.sequence = self.iteration = self.observed = 0
        self.report: dict[str, Any] = {
            "job": name, "namespace": jobs.namespace, "attempt": 0, "sent_at": 1.0,
            "state": "training",
            "stages": [
                {"stage": s, "forward": 0.01, "backward_input": 0.01, "backward_weight": 0.01,
                 "split": "emulated", "peak_memory": 1 << 20}
                for s in range(2)
            ],
        }  # fmt: skip

    def body(self, wire: float) -> bytes:
        self.sequence += 1
        self.iteration += 1
        times = dict.fromkeys(("min", "p50", "p99", "mean"), wire)
        links = [
            {"link": 0, "direction": direction, "path": "direct", "transport": "gloo",
             "iteration": self.iteration, "bytes": 1 << 20, "queue_p50": 0.0,
             "wire": {"count": 2, "exact": 2, **times}}
            for direction in ("forward", "backward")
            for _ in range(2)
        ]  # fmt: skip
        finished = {
            "index": self.iteration - 1, "seconds": 0.5, "loss": 1.0,
            "epoch": self.observed, "bubble_fraction": 0.1,
        }  # fmt: skip
        whole = self.report | {
            "sequence": self.sequence, "iteration": self.iteration, "links": links,
            "iterations": [finished], "observed_epoch": self.observed,
            "applied_epoch": self.observed,
        }  # fmt: skip
        return json.dumps(whole).encode()

    async def send(self, session: aiohttp.ClientSession, wire: float) -> tuple[float, bool]:
        """Seconds to the answer, and whether it brought a directive."""
        body = self.body(wire)
        started = time.monotonic()
        async with session.post(self.url, data=body, headers=self.headers) as answer:
            said = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {said}")
        directive = said["directive"]
        if directive is not None:
            self.observed = directive["epoch"]
        return time.monotonic() - started, directive is not None


def session(installation: Installation) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=0, ssl=installation.trust, resolver=_Here(), keepalive_timeout=60
    )
    name = f"pm-pipemorph-operator-ingest.{SYSTEM}.svc"
    return aiohttp.ClientSession(f"https://{name}:{installation.port}", connector=connector)


class _Here(aiohttp.abc.AbstractResolver):
    """The ingest's name is this machine's."""

    async def resolve(
        self, host: str, port: int = 0, family: Any = 0
    ) -> list[aiohttp.abc.ResolveResult]:
        return [
            {"hostname": host, "host": "127.0.0.1", "port": port,
             "family": family, "proto": 0, "flags": 0}
        ]  # fmt: skip

    async def close(self) -> None:
        return None


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


async def steady(installation: Installation, reporters: Sequence[Reporter]) -> Result:
    """Every job reports every two seconds; spread over a minute, every link goes slow."""
    answers: list[float] = []
    directives: list[float] = []

    async def one(number: int, reporter: Reporter, client: aiohttp.ClientSession) -> None:
        start = time.monotonic() + PERIOD * number / len(reporters)
        slow_after = SLOW_AFTER + number % SPREAD
        for turn in range(SLOW_AFTER + SPREAD + 8):
            await asyncio.sleep(max(0.0, start + turn * PERIOD - time.monotonic()))
            took, news = await reporter.send(client, 0.002 if turn < slow_after else 0.08)
            if turn > 0:  # The first opens the connection and asks for a TokenReview.
                (directives if news else answers).append(took)

    async with session(installation) as client:
        await asyncio.gather(*(one(i, r, client) for i, r in enumerate(reporters)))
    if len(directives) < len(reporters) / 2:
        raise RuntimeError(f"{len(directives)} directives for {len(reporters)} slow links")
    return {
        "jobs": len(reporters),
        "reports": len(answers) + len(directives),
        "answer_p50_ms": 1e3 * quantile(answers, 0.5),
        "answer_p99_ms": 1e3 * quantile(answers, 0.99),
        "directives": len(directives),
        "directive_p50_ms": 1e3 * quantile(directives, 0.5),
        "directive_p99_ms": 1e3 * quantile(directives, 0.99),
    }


async def full(installation: Installation, reporters: Sequence[Reporter], seconds: float) -> Result:
    """All connections busy, each within its job's limit."""
    sent = 0
    pid = installation.ingest.process.pid
    stop = time.monotonic() + seconds

    async def one(reporter: Reporter, client: aiohttp.ClientSession) -> None:
        nonlocal sent
        due = time.monotonic()
        while time.monotonic() < stop:
            await reporter.send(client, 0.002)
            sent += 1
            due += 1 / 35  # Under the limit of one job.
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic())

    async with session(installation) as client:
        started, used = time.monotonic(), cpu_seconds(pid)
        await asyncio.gather(*(one(r, client) for r in reporters))
        used = cpu_seconds(pid) - used
        rate = sent / (time.monotonic() - started)
    return {
        "connections": len(reporters),
        "reports_per_second": rate,
        # What the machine's other work takes away does not count here.
        "reports_per_cpu_second": sent / used,
        "memory_mib": resident_bytes(pid) / 2**20,
    }


def run(options: argparse.Namespace) -> dict[str, Result]:
    out: dict[str, Result] = {}

    def section(name: str, result: Result) -> None:
        out[name] = result
        say(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in result.items()))

    tools.ensure(tools.API_TOOLS, say)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Cluster.own(Path(folder) / "cluster") as cluster,
    ):
        cluster.helm("install", RELEASE, str(CHART), "--namespace", SYSTEM, "--create-namespace")
        cluster.wait("crds", "pipemorphjobs.pipemorph.io", "Established")
        (Path(folder) / "operator").mkdir()
        installation = Installation(cluster, Path(folder) / "operator")
        installation.operator.start()
        installation.ingest.start()
        try:
            section("pods", pods(installation, options.ranks))
            installation.operator.restart()
            with cluster.namespace("bench") as namespace:
                jobs = Jobs(installation, namespace)
                section("jobs", many(installation, jobs, options.jobs))
                made = tokens(jobs, options.jobs)
                reporters = [Reporter(jobs, name, token) for name, token in made.items()]
                section("reports", asyncio.run(steady(installation, reporters)))
                section("capacity", asyncio.run(full(installation, reporters[:120], 15.0)))
        finally:
            installation.operator.process.stop()
            installation.ingest.process.stop()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
