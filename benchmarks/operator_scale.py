"""What the operator costs at scale, against a real API server and Job controller.

    python benchmarks/operator_scale.py [--jobs 1000] [--ranks 1000] [--json FILE] [--check]

The control plane is that of tests/cluster (built once from Go modules); no kubelet, so what is
measured is the operator, the ingest, the API server and the Job controller. Everything shares
this machine, the load generator included, so the table says what each of them took of it. About
eight minutes on two cores with nothing else to do. Each goal is said to hold or not; with --check
the exit status is 1 if one does not. They are for the default sizes. Sections:

pods      apply of one job of RANKS ranks until all its pods exist, against a plain Indexed Job of
          the same pods in the same run (goal: at most 1.2 times); the controllers have their
          default settings, 20 requests a second, here alone
jobs      JOBS jobs of two ranks: API requests of the operator per job, its memory, and the time
          a restarted operator needs until it has looked at all of them
capacity  reports of jobs of 2, 8 and 64 stages that one ingest process answers per second, with
          every connection busy (goal: 2,000 of two stages), by the clock and per second of its own
          processor time; and how many jobs that is at the rate at which agents report
reports   jobs of 8 stages, as many as make half of that, report at the agents' rate and hold a
          long poll; within half a minute link 0 of every job goes slow: time to answer a report,
          and to the directive at the agent, persisted in status meanwhile, from the first report
          that shows the slow link and from the one that completes the evidence; the ingest's memory
storm     the same with jobs of two stages, whose links all go slow in the same moment

Reports are made by the agent's code from what ranks tell it, and sent at its rate while a job
trains: one a second, and one at once when a link turns slow.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/cluster"), str(ROOT / "operator")]

import yaml  # noqa: E402
from agent_reports import PERIOD, Kind, Reports, parsed  # noqa: E402
from operator_support import SYSTEM, Installation, Jobs, manifest, own_installation  # noqa: E402
from testbed import Cluster, tools, wait_for  # noqa: E402

from pipemorph.control import JobController  # noqa: E402
from pipemorph.control.decide.replan import propose  # noqa: E402
from pipemorph.manifest import parse_job  # noqa: E402

DEADLINE = 1800.0
SLOW_AFTER, SPREAD, WATCHED = 5.0, 30.0, 20.0
"""Seconds before the first link goes slow, over which the links of all jobs do, and after."""
MORE_THAN_SENT = 1_000_000
"""A sequence number above those of the load before."""
CONNECTIONS = {2: 120, 8: 60, 64: 16}
"""By stages, jobs that keep the ingest busy, each within its limit of 25 reports a second."""
STEADY_STAGES, STORM_STAGES = 8, 2
PART_OF_CAPACITY = 0.5

MOST_OF_PLAIN, LEAST_REPORTS = 1.2, 2000.0
"""Goals: times a plain Indexed Job; reports per second by the clock."""

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


def hasten_controllers(cluster: Cluster) -> None:
    """Let the controllers make more than 20 requests a second: what follows is not about them,
    and waits for two pods of each job."""
    plane = cluster.control_plane
    assert plane is not None
    plane.controller_manager.stop(grace=2.0)
    plane.controller_manager.command += ["--kube-api-qps=200", "--kube-api-burst=300"]
    plane.controller_manager.start()
    plane.wait_for_controllers()


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def idle_seconds() -> float:
    """Of all processors together, since the machine's start."""
    return int(Path("/proc/stat").read_text().split()[4]) / os.sysconf("SC_CLK_TCK")


class Processors:
    """Who took how much of the processors while something was measured."""

    def __init__(self, installation: Installation) -> None:
        ingest = installation.ingest.process.pid
        plane = installation.cluster.control_plane
        assert plane is not None
        self._pids = {
            "ingest": [ingest],
            "planners": children(ingest),
            "operator": [installation.operator.process.pid],
            "api_server": [plane.apiserver.pid],
            "etcd": [plane.etcd.pid],
            "controllers": [plane.controller_manager.pid],
        }
        self._before = {name: self._now(name) for name in self._pids}
        self._idle, self._started = idle_seconds(), time.monotonic()

    def _now(self, name: str) -> float:
        total = 0.0
        for pid in self._pids[name]:
            with contextlib.suppress(FileNotFoundError):  # a planner that was replaced
                total += cpu_seconds(pid)
        return total

    def used(self, name: str) -> float:
        """Processor seconds since the start."""
        return self._now(name) - self._before[name]

    def shares(self) -> Result:
        """Processors kept busy, by whom; ``idle_cores`` of them had nothing to do."""
        wall = time.monotonic() - self._started
        return {f"{name}_cores": self.used(name) / wall for name in self._pids} | {
            "idle_cores": (idle_seconds() - self._idle) / wall
        }


def many(installation: Installation, jobs: Jobs, count: int) -> Result:
    """Jobs that exist: what they cost the operator."""
    operator = installation.operator
    before = operator.metric("pipemorph_api_requests_total")
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: create(jobs, job_of(2, f"j{i}")), range(count)))
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


def job_of(stages: int, name: str) -> dict[str, Any]:
    """A job that has not nearly finished: no plan is worth a change for its last iterations."""
    trainer = {"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000_000}
    return manifest(name, stages=stages, trainer=trainer)


def sized(jobs: Jobs, stages: int, count: int) -> dict[str, str]:
    """New jobs of so many stages; a rank's token for each."""
    names = [f"s{stages}-{i}" for i in range(count)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: create(jobs, job_of(stages, name)), names))
    return tokens(jobs, names)


def create(jobs: Jobs, job: dict[str, Any]) -> None:
    """As fast as a program can: without kubectl."""
    jobs.cluster.client.request(
        "POST", f"/apis/pipemorph.io/v1alpha1/namespaces/{jobs.namespace}/pipemorphjobs", job
    )


def tokens(jobs: Jobs, names: Sequence[str]) -> dict[str, str]:
    """A rank's token per job."""

    def one(name: str) -> tuple[str, str]:
        labels = f"pipemorph.io/job-name={name}"
        found: list[Any] = wait_for(
            f"a pod of {name}",
            lambda: jobs.cluster.client.list("pods", jobs.namespace, labels=labels) or None,
            DEADLINE,
        )
        return name, jobs.token(name, found[0])

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(one, names))


def load(
    installation: Installation, jobs: Jobs, stages: int, made: dict[str, str], **what: float
) -> dict[str, Any]:
    """Reports of these jobs, from a process of its own: see report_load.py."""
    asked = {
        "port": installation.port,
        "server_name": f"pm-pipemorph-operator-ingest.{SYSTEM}.svc",
        "ca_file": str(installation.folder / "ca.crt"),
        "jobs": [
            {"namespace": jobs.namespace, "name": name, "token": token, "stages": stages}
            for name, token in made.items()
        ],
    } | what
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/report_load.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"report_load.py: {ended.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(ended.stdout)
    return figures


def milliseconds(name: str, values: Sequence[float]) -> Result:
    return {f"{name}_p{100 * q:g}_ms": 1e3 * quantile(values, q) for q in (0.5, 0.99)}


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Timed:
    """Mean of a histogram of the ingest's over what is measured, milliseconds."""

    def __init__(self, installation: Installation, name: str) -> None:
        self._metric = installation.ingest.metric
        self._name = f"pipemorph_ingest_{name}_seconds"
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        return self._metric(f"{self._name}_sum"), self._metric(f"{self._name}_count")

    def count(self) -> float:
        return self._now()[1] - self._before[1]

    def mean_ms(self) -> float:
        seconds, _ = self._now()
        return 1e3 * (seconds - self._before[0]) / max(1.0, self.count())


def reports_to_act_on(stages: int, slow_from: int, limit: int = 10) -> int:
    """How many reports of a slow link, after ``slow_from`` normal ones, a controller needs for
    its directive: the product's own, given what report_load.py sends, on a clock that stands
    still while it decides. What comes later than that is the service's doing."""
    controller = JobController(parse_job(yaml.safe_dump(job_of(stages, "j"))).spec)
    reports = Reports(stages)
    for at in range(slow_from + limit):
        kind: Kind = "first" if at == 0 else "quiet"
        if at >= slow_from:
            kind = "alarm" if at == slow_from else "slow"
        body = reports.body("default", "j", MORE_THAN_SENT + at, 0, kind)
        controller.report(parsed(body), now=at * PERIOD)
        if (asked := controller.replan) is not None:
            controller.settle(asked, propose(asked), now=at * PERIOD)
        if controller.directive() is not None:
            if at < slow_from:
                raise RuntimeError(f"a directive after {at + 1} reports of a link that is well")
            return at - slow_from + 1
    raise RuntimeError(f"no directive after {limit} reports of a link that is slow")


def completing_report(stages: int) -> int:
    """The same, which must not depend on when the link of a job goes slow."""
    # One more: that which asks for a TokenReview.
    turns = range(turns_of(SLOW_AFTER), turns_of(SLOW_AFTER + SPREAD))
    found = {reports_to_act_on(stages, 1 + turn) for turn in turns}
    if len(found) != 1:
        raise RuntimeError(f"evidence is complete after {sorted(found)} reports, depending")
    return found.pop()


def turns_of(seconds: float) -> int:
    """How many reports an agent sends in so many seconds."""
    return max(1, round(seconds / PERIOD))


def steady(
    installation: Installation, jobs: Jobs, stages: int, made: dict[str, str], over: float
) -> Result:
    """Every job reports at the agents' rate; within ``over`` seconds link 0 of each goes slow."""
    ingest = installation.ingest
    completes = completing_report(stages)
    busy, load_before = Processors(installation), os.getloadavg()[0]
    plans, persists = Timed(installation, "plan"), Timed(installation, "persist")
    writes = ingest.metric("pipemorph_ingest_status_writes_total")
    found = load(
        installation, jobs, stages, made, period=PERIOD,
        turns=turns_of(SLOW_AFTER + over + WATCHED), slow_from=turns_of(SLOW_AFTER),
        slow_over=round(over / PERIOD), first=MORE_THAN_SENT, completes=completes,
    )  # fmt: skip
    count = len(made)
    if not found["directives"]:
        raise RuntimeError(f"no directive for any of {count} slow links")
    return {
        "jobs": count,
        "stages": stages,
        "reports": found["reports"],
        "reports_per_second": found["reports"] / found["wall"],
        **milliseconds("answer", found["answers"]),
        # Links that were slow for WATCHED seconds and more without a directive.
        "directives_missing": count - len(found["directives"]) - found["unasked"],
        "directives_unasked": found["unasked"],
        # From the first report that shows the slow link to the directive at the agent: the wait
        # for the reports that complete the evidence is part of it.
        **milliseconds("evidence", found["evidence"]),
        # From the report that completes it, by what the controller needs: reports_to_act_on().
        "completing_report": completes,
        **milliseconds("directive", found["directives"]),
        # Of which: decisions, the wait for a planner included, and their way into status.
        "decisions": plans.count(),
        "decision_ms": plans.mean_ms(),
        "planner_cpu_ms": 1e3 * busy.used("planners") / max(1.0, plans.count()),
        "persist_ms": persists.mean_ms(),
        "status_writes": ingest.metric("pipemorph_ingest_status_writes_total") - writes,
        "ingest_cpu_us_per_report": 1e6 * busy.used("ingest") / found["reports"],
        "load_generator_cpu_us_per_report": 1e6 * found["own_cpu"] / found["reports"],
        "load_generator_late_ms": 1e3 * found["late"],
        "load_generator_cores": found["own_cpu"] / found["wall"],
        **busy.shares(),
        "machine_load_before": load_before,
        "memory_mib": resident_bytes(ingest.process.pid) / 2**20,
        "reconnects": found["reconnects"],
    }


def full(
    installation: Installation, jobs: Jobs, stages: int, made: dict[str, str], seconds: float
) -> Result:
    """All connections busy, each within its job's limit."""
    busy, load_before = Processors(installation), os.getloadavg()[0]
    found = load(installation, jobs, stages, made, seconds=seconds)
    used = busy.used("ingest")
    return {
        "connections": len(made),
        "stages": stages,
        "jobs_at_agents_rate": found["reports"] / found["wall"] * PERIOD,
        # As measured here, beside whatever else this machine's processors have to do …
        "reports_per_second_wall": found["reports"] / found["wall"],
        **milliseconds("answer", found["answers"]),
        # … and per second of processor time of the ingest alone, handshakes included.
        "reports_per_cpu_second": found["reports"] / used,
        "ingest_cpu_us_per_report": 1e6 * used / found["reports"],
        "load_generator_cpu_us_per_report": 1e6 * found["own_cpu"] / found["reports"],
        "load_generator_cores": found["own_cpu"] / found["wall"],
        **busy.shares(),
        "machine_load_before": load_before,
        "processors": os.cpu_count() or 0,
    }


def run(options: argparse.Namespace) -> dict[str, Result]:
    out: dict[str, Result] = {}

    def section(name: str, result: Result) -> None:
        out[name] = result
        say(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in result.items()))

    tools.ensure(tools.API_TOOLS, say)
    with own_installation() as (cluster, installation):
        section("pods", pods(installation, options.ranks))
        hasten_controllers(cluster)
        installation.operator.restart()
        with cluster.namespace("bench") as namespace:
            jobs = Jobs(installation, namespace)
            section("jobs", many(installation, jobs, options.jobs))
            made = {stages: sized(jobs, stages, n) for stages, n in CONNECTIONS.items()}
            for stages, some in made.items():
                section(f"capacity {stages}", full(installation, jobs, stages, some, 15.0))
            for name, stages, over in (
                ("reports", STEADY_STAGES, SPREAD),
                ("storm", STORM_STAGES, 0.0),
            ):
                most = PART_OF_CAPACITY * out[f"capacity {stages}"]["jobs_at_agents_rate"]
                some = dict(list(made[stages].items())[: max(1, int(most))])
                section(name, steady(installation, jobs, stages, some, over))
    return out


def table(found: dict[str, Result]) -> str:
    """What docs/benchmarks.md quotes, with what it was measured beside."""
    pods, jobs = found["pods"], found["jobs"]

    def shares(section: Result) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {section[f'{name}_cores']:.2f}"
            for name in (
                "ingest", "planners", "load_generator", "api_server", "etcd", "operator",
                "controllers", "idle",
            )
        )  # fmt: skip

    def cost(section: Result) -> str:
        return (
            f"{section['ingest_cpu_us_per_report']:.0f} µs"
            f" ({section['load_generator_cpu_us_per_report']:.0f} µs)"
        )

    rows = [
        (
            f"apply to all {pods['ranks']:.0f} pods of one job; a plain Indexed Job of the same",
            f"{pods['seconds']:.1f} s; {pods['plain_seconds']:.1f} s, {pods['ratio']:.2f}×",
        ),
        (
            f"API requests per job, {jobs['jobs']:.0f} jobs",
            f"{jobs['requests_per_job']:.1f}",
        ),
        ("operator's memory then", f"{jobs['memory_mib']:.0f} MiB"),
        ("restarted operator: until each was looked at", f"{jobs['restart_seconds']:.1f} s"),
    ]
    for full in (found[f"capacity {stages}"] for stages in CONNECTIONS):
        rows += [
            (
                f"one ingest, {full['connections']:.0f} jobs of {full['stages']:.0f} stages busy",
                f"{full['reports_per_second_wall']:.0f} reports/s,"
                f" {full['reports_per_cpu_second']:.0f} per second of its processor",
            ),
            (
                f"… which is so many jobs at the agents' rate, {1 / PERIOD:.0f} report/s each",
                f"{full['jobs_at_agents_rate']:.0f}",
            ),
            ("… processor time per report (of the load generator)", cost(full)),
            ("… processors busy", shares(full)),
        ]
    for name, when in (("reports", f"within {SPREAD:g} s"), ("storm", "at once")):
        steady = found[name]
        rows += [
            (
                f"{steady['jobs']:.0f} jobs of {steady['stages']:.0f} stages at the agents' rate:"
                " report answered, p50 / p99",
                f"{steady['answer_p50_ms']:.1f} / {steady['answer_p99_ms']:.0f} ms",
            ),
            (
                f"… link 0 of each goes slow {when}: first report that shows it to the directive,"
                " p50 / p99",
                f"{steady['evidence_p50_ms']:.0f} / {steady['evidence_p99_ms']:.0f} ms",
            ),
            (
                "… the report that completes the evidence"
                f" (number {steady['completing_report']:.0f}) to the directive, p50 / p99",
                f"{steady['directive_p50_ms']:.0f} / {steady['directive_p99_ms']:.0f} ms",
            ),
            (
                "… of which on average: decision; and, meanwhile, persisted in status",
                f"{steady['decision_ms']:.0f} ms, {steady['persist_ms']:.0f} ms",
            ),
            (
                "… processor time of a decision, and how many there were",
                f"{steady['planner_cpu_ms']:.1f} ms, {steady['decisions']:.0f}",
            ),
            ("… slow links without a directive", f"{steady['directives_missing']:.0f}"),
            ("… processor time per report (of the load generator)", cost(steady)),
            ("… latest report of the load generator", f"{steady['load_generator_late_ms']:.0f} ms"),
            ("… processors busy", shares(steady)),
            ("… ingest's memory", f"{steady['memory_mib']:.0f} MiB"),
        ]
    lines = ["| operator and ingest at scale | |", "|---|---:|"]
    lines += [f"| {what} | {figure} |" for what, figure in rows]
    first, last = found["capacity 2"], found["storm"]
    lines += [
        "",
        f"{first['processors']:.0f} processors, which everything shares, the load generator and the"
        " control plane included; load average before the first of the reports and before the last"
        f" {first['machine_load_before']:.1f} and {last['machine_load_before']:.1f}. No kubelets.",
    ]
    return "\n".join(lines)


def goals(found: dict[str, Result]) -> list[tuple[str, bool]]:
    """What is promised with what was measured, and whether it holds."""
    pods, full = found["pods"], found["capacity 2"]
    slow = [found["reports"], found["storm"]]
    links = sum(each["jobs"] for each in slow)
    missing = sum(each["directives_missing"] for each in slow)
    unasked = sum(each["directives_unasked"] for each in slow)
    return [
        (
            f"apply to all {pods['ranks']:.0f} pods ≤ {MOST_OF_PLAIN} × a plain Indexed Job:"
            f" {pods['ratio']:.2f}",
            pods["ratio"] <= MOST_OF_PLAIN,
        ),
        (
            f"one ingest ≥ {LEAST_REPORTS:.0f} reports/s of two stages:"
            f" {full['reports_per_second_wall']:.0f} over {full['connections']:.0f} connections",
            full["reports_per_second_wall"] >= LEAST_REPORTS,
        ),
        (f"slow links of {links:.0f} without a directive = 0: {missing:.0f}", not missing),
        (f"directives before there was evidence = 0: {unasked:.0f}", not unasked),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal does not hold")
    options = parser.parse_args()
    result = run(options)
    print(table(result) + "\n")
    kept = goals(result)
    for text, holds in kept:
        print(f"{text} {'holds' if holds else 'DOES NOT HOLD'}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if options.check and not all(holds for _, holds in kept) else 0


if __name__ == "__main__":
    sys.exit(main())
