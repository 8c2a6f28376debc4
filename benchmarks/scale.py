"""Load of many jobs on one ingest, and of one large job on its agent.

    python benchmarks/scale.py [--jobs 100] [--ranks 1024] [--only agent|fleet] [--check]

agent  one job of 64 stages and RANKS ranks: processor share of its agent while all links are
       healthy, after link 0 turned slow, and after half of all links did. Agent, ingest and the
       monitors of the ranks are real; their measurements are played.
fleet  JOBS jobs of 2, 8 and 64 stages on one ingest, with real etcd, kube-apiserver, job
       controllers and operator (``make testbeds``); pods and agents are played. A link turns slow
       in one job per second: measures seconds from the alarm to the directive. Then the ingest is
       killed and started: measures seconds until every job is answered again. Then links of other
       jobs turn slow. Over both: counts plan versions that were sent with two different plans, and
       alarms without a directive.

Everything shares this machine, so the output includes the processors that each program used.
With --check the exit status is 1 if a goal does not hold or was not measured. Six minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]

import yaml  # noqa: E402
from goals import finish_benchmark, make_parser  # noqa: E402
from operator_support import SYSTEM, Installation, Jobs, manifest, own_installation  # noqa: E402
from scale_load import ITERATION, Kind, RecordedReports, cpu_seconds, run_load  # noqa: E402
from testbed import Cluster, catalog, wait_for  # noqa: E402

from pipemorph.argument_types import duration_type  # noqa: E402
from pipemorph.control import JobController  # noqa: E402
from pipemorph.control.decide.plan_choice import decide  # noqa: E402
from pipemorph.ingest import BearerAuthenticator, IngestServer, InMemoryJobStore  # noqa: E402
from pipemorph.manifest import parse_job  # noqa: E402
from pipemorph.protocol import LinkHealthReport  # noqa: E402
from pipemorph.spec.mesh import MeshShape  # noqa: E402
from pipemorph_trainer.agent import start_agent  # noqa: E402
from pipemorph_trainer.context import TrainerContext  # noqa: E402

Result = dict[str, float]
STAGES, RANKS_PER_POD = 64, 8
"""Stages of the large job; limit of ranks per pod."""
MIX = {2: 0.4, 8: 0.4, 64: 0.2}
"""Share of jobs, by stages."""
WELL, FAULT, SETTLE = 30.0, 5.0, 10.0
"""Seconds of the large job: healthy links, each fault, and before the measurement."""
BEGIN, CALM, RESTART = 30.0, 10.0, 60.0
"""Seconds of the fleet: until each job has been written once, after the last alarm, and after the
ingest was killed."""
QUIET = 20
"""Number of reports before the alarm when a job is drawn."""
LET_BE = 1.0
"""Seconds before the kill in which the ingest may already be away: clocks need not be exact."""
FIRST = 1_000_000
"""Sequence number of the first report: above those of earlier loads."""
DEADLINE = 1800.0
NAMESPACE, JOB = "default", "job"
"""Namespace and name of the large job."""
MOST_AGENT, MOST_SECONDS, MOST_RESTART = 0.15, 1.0, 30.0
"""Goals: processors of the agent; alarm to directive, p99; ingest killed until all are answered."""


def find_children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def compute_quantile(values: Sequence[float], q: float) -> float:
    """Quantile of the values; infinite without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else math.inf


class ProcessorShares:
    """Processors that programs use from now on, by name."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self._pids = {name: list(some) for name, some in pids.items()}
        self._before, self._began = self._read_used(), time.monotonic()

    def _read_used(self) -> Result:
        return {
            name: sum(cpu_seconds(pid) for pid in some if Path(f"/proc/{pid}").exists())
            for name, some in self._pids.items()
        }

    def read_shares(self) -> Result:
        wall = time.monotonic() - self._began
        return {
            name: (used - self._before[name]) / wall for name, used in self._read_used().items()
        }


# --- one large job -------------------------------------------------------------------------------


async def measure_large_job(ranks: int, stages: int, well: float) -> Result:
    """Measure the processors that the agent of one job uses, by phase. Raises RuntimeError if the
    ingest refuses a report."""
    replicas = ranks // stages
    job = make_job(stages, JOB, replicas=replicas)
    controller = JobController(parse_job(yaml.safe_dump(job)).spec)
    store, token, secret = InMemoryJobStore(), secrets.token_hex(16), secrets.token_bytes(16)
    store.add_job(NAMESPACE, JOB, controller)
    answers: Counter[int] = Counter()
    found: Result = {"ranks": ranks}
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(token)
        async with IngestServer(
            store,
            BearerAuthenticator(token),
            on_answer=lambda _, status, __: answers.update([int(status)]),
        ) as server:
            context = TrainerContext(
                rank=0, world_size=ranks, local_rank=0, master_addr="127.0.0.1", master_port=1,
                secret=secret, ingest_url=server.url, token_file=token_file,
            )  # fmt: skip
            agent = start_agent(context, MeshShape(stages, replicas))
            try:
                load = {
                    "port": agent.port, "agent": agent.process.pid, "secret": secret.hex(),
                    "stages": stages, "replicas": replicas,
                    "settle": SETTLE, "healthy": well, "fault": FAULT,
                }  # fmt: skip
                with contextlib.ExitStack() as stack:
                    figures = await asyncio.to_thread(
                        stack.enter_context, run_load("ranks", **load)
                    )
                    sent = await asyncio.to_thread(figures)
            finally:
                agent.close(1.0)
    if refused := {status: n for status, n in answers.items() if status != HTTPStatus.OK}:
        raise RuntimeError(f"the ingest answered the agent with errors: {refused}; expected none")
    return found | {"reports": answers[200], "plan_version": controller.plan_version, **sent}


# --- many jobs on one ingest ---------------------------------------------------------------------


def make_job(stages: int, name: str, replicas: int = 1) -> dict[str, Any]:
    """Manifest of a job with many remaining iterations: near its end no plan change pays."""
    cut = {"stages": stages, "replicas": replicas, "ranksPerPod": min(stages, RANKS_PER_POD)}
    trainer = {"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000_000}
    job = manifest(name, stages=stages, parallelism=cut, trainer=trainer)
    job["spec"]["schedule"]["microbatches"] = max(12, 2 * stages)
    return job


def mix_stages(count: int) -> list[int]:
    """Stages of ``count`` jobs, shuffled."""
    sizes = [stages for stages, share in MIX.items() for _ in range(round(share * count))]
    random.Random(count).shuffle(sizes)
    return sizes


def compute_gain(stages: int, seed: int) -> float:
    """Iteration time under the old plan over that under the new one, as predicted by the product's
    controller for the reports of such a job; 0 if it issues no plan at the alarm."""
    controller = JobController(parse_job(yaml.safe_dump(make_job(stages, "j"))).spec)
    reports = RecordedReports(stages, seed)
    kinds: tuple[Kind, ...] = ("first", *["quiet"] * (QUIET - 1), "alarm")
    for at, kind in enumerate(kinds):
        if controller.get_directive() is not None:
            return 0.0
        body = reports.make_body("default", "j", FIRST + at, 0, kind)
        controller.process_report(LinkHealthReport.model_validate_json(body), now=at * ITERATION)
        if (request := controller.pending_request) is not None:
            controller.apply_proposal(request, decide(request), now=at * ITERATION)
    directive = controller.get_directive()
    if directive is None or directive.record is None:
        return 0.0
    record = directive.record
    assert record.predicted_seconds_before is not None
    return record.predicted_seconds_before / record.predicted_seconds_after


def draw_alarms(sizes: Sequence[int]) -> tuple[list[dict[str, Any]], float]:
    """Draw stages and seed of each job, the time at which its link turns slow, and the time at
    which the ingest is killed. One link per second turns slow, in the first half of the jobs, and
    after the restart in a quarter of them."""
    before, after = len(sizes) // 2, len(sizes) // 4
    gone_at = BEGIN + before + CALM
    times = [BEGIN + i for i in range(before)]
    times += [gone_at + RESTART / 2 + i * RESTART / 4 / max(1, after) for i in range(after)]
    jobs: list[dict[str, Any]] = [{"stages": stages, "seed": 0} for stages in sizes]
    seed = 0
    for job, slow_at in zip(jobs, times, strict=False):
        seed += 1
        while not (ratio := compute_gain(job["stages"], seed)):
            seed += 1
        job |= {"seed": seed, "slow_at": slow_at, "slow_iteration": ratio * ITERATION}
    return jobs, gone_at


def start_jobs(jobs: Jobs, sizes: Sequence[int]) -> list[str]:
    """Create the jobs and report their pods as running; return a rank's token of each job."""

    def start_job(number: int) -> str:
        name, wanted = f"j{number}", max(1, sizes[number] // RANKS_PER_POD)
        jobs.cluster.client.request(
            "POST",
            f"/apis/pipemorph.io/v1alpha1/namespaces/{jobs.namespace}/pipemorphjobs",
            make_job(sizes[number], name),
        )

        def all_pods() -> list[Any] | None:
            labels = f"pipemorph.io/job-name={name}"
            pods = jobs.cluster.client.list("pods", jobs.namespace, labels=labels)
            return pods if len(pods) == wanted else None

        pods: list[Any] = wait_for(f"{wanted} pods of {name}", all_pods, DEADLINE)
        for pod in pods:
            jobs.cluster.fake_pod_running(jobs.namespace, pod["metadata"]["name"])
        return jobs.token(name, pods[0])

    def running_all() -> bool:
        found = jobs.cluster.client.list("pipemorphjobs", jobs.namespace)
        return all(job["status"]["state"] == "Running" for job in found)

    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(start_job, range(len(sizes))))
    wait_for("all jobs to be Running", running_all, DEADLINE, interval=5.0)
    return tokens


def list_programs(installation: Installation) -> dict[str, list[int]]:
    ingest, plane = installation.ingest.process.pid, installation.cluster.control_plane
    return {
        "ingest": [ingest], "planners": find_children(ingest),
        "operator": [installation.operator.process.pid], "api_server": [plane.apiserver.pid],
        "etcd": [plane.etcd.pid], "controllers": [plane.controller_manager.pid],
    }  # fmt: skip


def measure_fleet(count: int) -> Result:
    """Measure a fleet: all jobs report, links turn slow, the ingest is killed and started."""
    sizes = mix_stages(count)
    played, gone_at = draw_alarms(sizes)
    with own_installation() as (cluster, installation), cluster.namespace("bench") as namespace:
        hasten_controllers(cluster)
        tokens = start_jobs(Jobs(installation, namespace), sizes)
        jobs = [
            {"namespace": namespace, "name": f"j{number}", "token": token} | job
            for number, (token, job) in enumerate(zip(tokens, played, strict=True))
        ]
        with run_load(
            "agents", port=installation.port, jobs=jobs, period=ITERATION, first=FIRST,
            server_name=f"pm-pipemorph-operator-ingest.{SYSTEM}.svc",
            ca_file=str(installation.folder / "ca.crt"),
            seconds=gone_at + RESTART, gone_at=gone_at,
        ) as figures:  # fmt: skip
            began = time.monotonic()
            time.sleep(BEGIN)
            processors = ProcessorShares(list_programs(installation))
            time.sleep(gone_at + LET_BE + began - time.monotonic())
            shares = processors.read_shares()
            installation.ingest.restart()
            found = figures()
    return summarize_fleet(found, [job.get("slow_at") for job in played], gone_at) | {
        f"{name}_processors": share for name, share in shares.items()
    }


def hasten_controllers(cluster: Cluster) -> None:
    """Raise the job controllers' limit of 20 requests per second: they are not measured."""
    plane = cluster.control_plane
    plane.controller_manager.stop(grace=2.0)
    plane.controller_manager.command += ["--kube-api-qps=200", "--kube-api-burst=300"]
    plane.controller_manager.start()
    plane.wait_for_controllers()


def summarize_fleet(
    found: Mapping[str, Any], slow_at: Sequence[float | None], gone_at: float
) -> Result:
    """Figures of a fleet of jobs, from those of its agents."""
    requested = [at for at in slow_at if at is not None]
    before = [each for each in found["directives"] if each[1] < gone_at]
    back = [seconds - LET_BE for seconds in found["back"]]
    result = {
        f"alarm_{stages}_{name}": compute_quantile([t for s, _, t in before if s == stages], q)
        for stages in MIX
        for name, q in (("p50", 0.5), ("p99", 0.99))
    }
    return result | {
        "jobs": len(slow_at),
        "alarms": len(requested),
        "alarm_p99": compute_quantile([took for _, _, took in before], 0.99),
        "missing": len(requested) - len(found["directives"]),
        "unasked": len(found["unasked"]),
        "twice": len(found["twice"]),
        "restart_p50": compute_quantile(back, 0.5),
        "restart_last": max(back) if len(back) == len(slow_at) else math.inf,
        "answer_p99": compute_quantile(found["answers"], 0.99),
        "reports_per_second": found["reports"] / found["wall"],
        "reconnects": found["reconnects"],
        "load_late": found["late"],
        "load_processors": found["own_cpu"] / found["wall"],
    }


# --- what is printed -----------------------------------------------------------------------------


def format_table(agent: Result | None, fleet: Result | None) -> str:
    rows = []
    if agent is not None:
        rows.append((
            f"agent of {agent['ranks']:.0f} ranks, processors: links well; one slow; half slow",
            f"{agent['well']:.3f}; {agent['one_slow']:.3f}; {agent['half_slow']:.3f}",
        ))  # fmt: skip
    if fleet is not None:
        shares = [f"{k.removesuffix('_processors').replace('_', ' ')} {v:.2f}"
                  for k, v in fleet.items() if k.endswith("_processors")]  # fmt: skip
        rows += [
            *(
                (
                    f"alarm to directive, {stages} stages, p50; p99",
                    f"{fleet[f'alarm_{stages}_p50']:.3f}; {fleet[f'alarm_{stages}_p99']:.3f} s",
                )
                for stages in MIX
            ),
            (
                f"ingest killed until half, and all {fleet['jobs']:.0f} jobs are answered",
                f"{fleet['restart_p50']:.1f}; {fleet['restart_last']:.1f} s",
            ),
            (
                "reports a second; answered within, p99; latest report of the load",
                f"{fleet['reports_per_second']:.0f}; {1e3 * fleet['answer_p99']:.0f} ms;"
                f" {1e3 * fleet['load_late']:.0f} ms",
            ),
            ("processors", ", ".join(shares)),
        ]
    lines = [f"| scale, {os.cpu_count()} processors for everything | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {figure} |" for what, figure in rows)])


def list_goals(agent: Result | None, fleet: Result | None) -> list[tuple[str, bool]]:
    """Goals with their figures, and True if they hold."""
    found = []
    if agent is not None:
        most = max(agent["well"], agent["one_slow"])
        found.append((f"agent ≤ {MOST_AGENT:.2f} processors: {most:.3f}", most <= MOST_AGENT))
    if fleet is not None:
        for text, most, name in (
            ("alarm to directive, p99", MOST_SECONDS, "alarm_p99"),
            ("ingest killed until all are answered", MOST_RESTART, "restart_last"),
            ("plan versions that came twice", 0, "twice"),
            ("alarms without a directive", 0, "missing"),
            ("directives before an alarm", 0, "unasked"),
            ("reports that failed before the ingest was killed", 0, "reconnects"),
        ):
            unit = " s" if isinstance(most, float) else ""
            value = fleet[name]
            found.append((f"{text} ≤ {most:g}{unit}: {value:.3g}", value <= most))
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=STAGES, help="of the large job")
    parser.add_argument("--seconds", type=duration_type, default=WELL, help="of healthy links")
    parser.add_argument("--only", choices=["agent", "fleet"])
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal does not hold")
    options = parser.parse_args()
    agent = many = None
    why_not = catalog.status("api") if options.only != "agent" else None
    if options.only != "fleet":
        agent = asyncio.run(measure_large_job(options.ranks, options.stages, options.seconds))
    if options.only != "agent" and why_not is None:
        many = measure_fleet(options.jobs)
    print(format_table(agent, many) + "\n")
    verdicts = list_goals(agent, many)
    if why_not is not None:
        verdicts.append((f"fleet of jobs: not measured, {why_not}", False))
    all_hold = finish_benchmark(verdicts, options.json, {"agent": agent, "fleet": many})
    return 1 if options.check and not all_hold else 0


if __name__ == "__main__":
    sys.exit(main())
