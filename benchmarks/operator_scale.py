"""What the operator costs at scale, against a real API server and Job controller.

    python benchmarks/operator_scale.py [--jobs 1000] [--ranks 1000] [--json FILE] [--check]

The control plane is that of tests/cluster (built once from Go modules); no kubelet, so what is
measured is the operator, the ingest, the API server and the Job controller. Everything shares
this machine, the load generator included, so the table says what each of them took of it. About
ten minutes on two cores with nothing else to do. Each goal is said to hold or not; with --check
the exit status is 1 if one does not, and without it if a report failed before the ingest was
killed. They are for the default sizes. Sections:

pods      apply of one job of RANKS ranks until all its pods exist, against a plain Indexed Job of
          the same pods in the same run (goal: at most 1.2 times); the controllers have their
          default settings, 20 requests a second, here alone
jobs      JOBS jobs of 2, 8 and 64 stages, eight ranks in a pod: API requests of the operator per
          job, its memory, and the time a restarted operator needs until it has looked at all
fleet     all these jobs report at their agents' rate and hold a long poll, over TLS. Once all have
          begun, a link turns slow in one job a second, ONSETS of them; then in STORM jobs in the
          same moment. From the report that shows it to the directive at the agent (goals: p50
          50 ms and p99 250 ms with 2 and 8 stages, p99 1 s with 64; the storm within 10 s), and of
          that, decision by decision and for the storm apart: the report, the wait for a planner,
          the decision, its way to the agent, and the write to status, which comes after; what
          the ingest takes without its planners (goals: one processor, 512 MiB)
restart   the ingest and the operator are killed in the same moment and started while all of them
          are connected: until the ingest has answered each again, and the operator has looked at
          all

Reports are made by the agent's code from what ranks tell it, and sent at its rate while a job
trains: one a second, or as seldom as the ingest asks for, one at once when a link turns slow, and
one an iteration from then on. Iterations take as long as the plan in effect promises. Of each job
whose link does, the op times, the link and its delay are drawn, so that no two decisions are the
same; it is one that the controller answers with a plan.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]

import yaml  # noqa: E402
from agent_reports import ITERATION, PERIOD, Kind, Reports, parsed  # noqa: E402
from operator_support import SYSTEM, Installation, Jobs, manifest, own_installation  # noqa: E402
from report_load import load  # noqa: E402
from scale_table import (  # noqa: E402
    BEGIN,
    CALM,
    LET_BE,
    MIX,
    ONSETS,
    ONSETS_AT,
    QUIET,
    RESTART,
    STORM,
    STORM_AT,
    goals,
    table,
)
from scale_usage import (  # noqa: E402
    Alarm,
    Processors,
    Requests,
    Result,
    by_part,
    milliseconds,
    quantile,
    resident_bytes,
    told_in,
)
from testbed import Cluster, NotYet, TestbedError, catalog, wait_for  # noqa: E402

from pipemorph.control import JobController  # noqa: E402
from pipemorph.control.decide.replan import propose  # noqa: E402
from pipemorph.manifest import parse_job  # noqa: E402

DEADLINE, LOOKED_AT = 1800.0, 300.0
RANKS_PER_POD = 8
"""At most."""
MORE_THAN_SENT = 1_000_000
"""A sequence number above those of the load before."""


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


def many(installation: Installation, jobs: Jobs, sizes: Sequence[int]) -> Result:
    """Jobs of so many stages that exist: what they cost the operator."""
    count = len(sizes)
    operator = installation.operator
    before = operator.metric("pipemorph_api_requests_total")
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: create(jobs, job_of(sizes[i], f"j{i}")), range(count)))
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
    job = manifest(
        name,
        stages=stages,
        parallelism={"stages": stages, "ranksPerPod": min(stages, RANKS_PER_POD)},
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000_000},
    )
    job["spec"]["schedule"]["microbatches"] = max(12, 2 * stages)
    return job


def mixed(count: int) -> list[int]:
    """Stages of so many jobs, in an order that mixes them."""
    sizes = [stages for stages, part in MIX.items() for _ in range(round(part * count))]
    random.Random(count).shuffle(sizes)
    return sizes


def create(jobs: Jobs, job: dict[str, Any]) -> None:
    """As fast as a program can: without kubectl."""
    jobs.cluster.client.request(
        "POST", f"/apis/pipemorph.io/v1alpha1/namespaces/{jobs.namespace}/pipemorphjobs", job
    )


def started(jobs: Jobs, sizes: Sequence[int]) -> list[str]:
    """Report all pods of the jobs as running, until the jobs are. A rank's token per job."""

    def one(number: int) -> str:
        name, wanted = f"j{number}", max(1, sizes[number] // RANKS_PER_POD)
        labels = f"pipemorph.io/job-name={name}"

        def all_pods() -> list[Any] | None:
            found = jobs.cluster.client.list("pods", jobs.namespace, labels=labels)
            return found if len(found) == wanted else None

        found: list[Any] = wait_for(f"{wanted} pods of {name}", all_pods, DEADLINE)
        for pod in found:
            jobs.cluster.fake_pod_running(jobs.namespace, pod["metadata"]["name"])
        return jobs.token(name, found[0])

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(one, range(len(sizes))))

    def running() -> bool:
        found = jobs.cluster.client.list("pipemorphjobs", jobs.namespace)
        return all(job["status"]["state"] == "Running" for job in found)

    wait_for("all jobs to be Running", running, DEADLINE, interval=5.0)
    return made


def gain(stages: int, seed: int) -> float:
    """Times the iteration with the old plan takes that with the new one, as promised, if a
    controller answers the alarm of such a job with a plan, and nothing before it: the product's
    own, given what report_load.py sends. 0: it does not."""
    controller = JobController(parse_job(yaml.safe_dump(job_of(stages, "j"))).spec)
    reports = Reports(stages, seed)
    kinds: tuple[Kind, ...] = ("first", *["quiet"] * (QUIET - 1), "alarm")
    for at, kind in enumerate(kinds):
        if controller.directive() is not None:
            return 0.0
        body = reports.body("default", "j", MORE_THAN_SENT + at, 0, kind)
        controller.report(parsed(body), now=at * PERIOD)
        if (asked := controller.replan) is not None:
            controller.settle(asked, propose(asked), now=at * PERIOD)
    if (found := controller.directive()) is None:
        return 0.0
    assert found.record is not None and found.record.predicted_seconds_before is not None
    return found.record.predicted_seconds_before / found.record.predicted_seconds_after


def onsets(sizes: Sequence[int]) -> tuple[list[dict[str, Any]], int]:
    """Per job, what its agent plays: the seed of its telemetry, and when its link turns slow.
    Returns as well how many were drawn for that."""
    found: list[dict[str, Any]] = [{"stages": stages, "seed": 0} for stages in sizes]
    times = [ONSETS_AT + i for i in range(ONSETS)] + [STORM_AT] * STORM
    drawn = 0
    for job, slow_at in zip(found, times, strict=False):
        drawn += 1
        while not (times := gain(job["stages"], drawn)):
            drawn += 1
        job |= {"seed": drawn, "slow_at": slow_at, "slow_iteration": times * ITERATION}
    return found, drawn


def lacking(found: dict[str, Any], slow_at: Sequence[float], gone_at: float) -> dict[str, int]:
    """Slow links without a directive: by the time at which the storm begins, of those before it; by
    the ingest's end, of the storm; and at the end of all."""
    unasked = [at for at in found["unasked"] if at]

    def missing(first: float, last: float, until: float) -> int:
        asked = sum(first <= at < last for at in slow_at)
        served = [at for _, at, _, when in found["directives"] if when < until] + unasked
        return asked - sum(first <= at < last for at in served)

    return {
        "onsets": missing(0.0, STORM_AT, STORM_AT),
        "storm": missing(STORM_AT, math.inf, gone_at),
        "end": missing(0.0, math.inf, math.inf),
    }


def tell_times(installation: Installation) -> Path:
    """Let the ingest tell when it makes its decisions, in a file."""
    told = installation.folder / "decisions.jsonl"
    told.touch()
    command = installation.ingest.process.command
    assert command[1] == "-m", command
    command[1:3] = [str(ROOT / "benchmarks/timed_ingest.py"), str(told)]
    installation.ingest.restart()
    return told


def restarted(installation: Installation, count: int) -> float:
    """Kill and start both programs, as at the end of the node that had them. Seconds until the
    operator has looked at so many jobs, infinite if it has not; the ingest serves before that."""
    operator = installation.operator
    began = time.monotonic()
    for program in (installation.ingest, operator):
        program.kill()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(each.start) for each in (installation.ingest, operator)]:
            done.result()

    def looked_at_all() -> bool:
        try:
            return operator.metric("pipemorph_operator_reconcile_seconds_count") >= count
        except (OSError, http.client.HTTPException) as error:
            raise NotYet(f"it does not answer: {error!r}") from None

    try:
        wait_for("every job to be looked at", looked_at_all, LOOKED_AT, interval=0.5)
    except TestbedError as error:
        # What was measured before is told all the same.
        say(f"{error}: {operator.process.log_end()}")
        return math.inf
    return time.monotonic() - began


def fleet(
    installation: Installation, jobs: Jobs, sizes: Sequence[int], told: Path
) -> tuple[Result, Result]:
    """All jobs report; link after link turns slow, then many at once; then both programs are
    killed. ``told``: where the ingest tells of its decisions."""
    ingest = installation.ingest
    played, drawn = onsets(sizes)
    made = [
        {"namespace": jobs.namespace, "name": f"j{number}", "token": token} | job
        for number, (token, job) in enumerate(zip(started(jobs, sizes), played, strict=True))
    ]
    gone_at = STORM_AT + CALM
    with load(
        port=installation.port,
        server_name=f"pm-pipemorph-operator-ingest.{SYSTEM}.svc",
        ca_file=str(installation.folder / "ca.crt"),
        jobs=made,
        period=PERIOD,
        seconds=gone_at + RESTART,
        gone_at=gone_at,
        first=MORE_THAN_SENT,
    ) as figures:
        began = time.monotonic()
        time.sleep(BEGIN)
        busy, load_before = Processors(installation), os.getloadavg()[0]
        requests = Requests(installation)
        planned = ingest.metric("pipemorph_ingest_plan_seconds_count")
        time.sleep(gone_at + LET_BE + began - time.monotonic())
        planned = ingest.metric("pipemorph_ingest_plan_seconds_count") - planned
        used: Result = {
            "decisions": planned,
            "planner_cpu_ms": 1e3 * busy.used("planners") / max(1.0, planned),
            "memory_mib": resident_bytes(ingest.process.pid) / 2**20,
            "machine_load_before": load_before,
            **busy.shares(),
            **requests.rates(),
        }
        looked_at = restarted(installation, len(made))
        found = figures()
    asked = sum("slow_at" in job for job in played)
    missing = lacking(found, [job["slow_at"] for job in played if "slow_at" in job], gone_at)
    result: Result = {
        "jobs": len(made),
        "drawn": drawn,
        "asked": asked,
        "reports": found["reports"],
        "reports_per_second": found["reports"] / found["wall"],
        **milliseconds("answer", found["answers"]),
        **{f"directives_missing_{phase}": float(n) for phase, n in missing.items()},
        "directives_unasked": len(found["unasked"]),
        "ingest_cpu_us_per_report": 1e6 * used["ingest_cores"] * found["wall"] / found["reports"],
        "load_generator_cpu_us_per_report": 1e6 * found["own_cpu"] / found["reports"],
        "load_generator_late_ms": 1e3 * found["late"],
        "reconnects": found["reconnects"],
        "load_generator_cores": found["own_cpu"] / found["wall"],
        **used,
    }
    for stages in MIX:
        took = [t for s, at, t, _ in found["directives"] if s == stages and at < STORM_AT]
        result |= milliseconds(f"onset_{stages}", took or [math.inf])
        result[f"onsets_{stages}"] = len(took)
    alarms, decided = [Alarm(*each) for each in found["alarms"]], told_in(told)
    for stages in MIX:
        some = [each for each in alarms if each.stages == stages and each.slow_at < STORM_AT]
        result |= by_part(f"onset_{stages}", some, decided)
    result |= by_part("storm", [each for each in alarms if each.slow_at >= STORM_AT], decided)
    storm = [took for _, at, took, _ in found["directives"] if at >= STORM_AT]
    result |= milliseconds("storm", storm or [math.inf])
    result["storm_last_seconds"] = max(storm) if len(storm) == STORM else math.inf
    back = [seconds - LET_BE for seconds in found["back"]]
    restart: Result = {
        "jobs": len(back),
        "missing": len(made) - len(back),
        "p50_seconds": quantile(back, 0.5) if back else math.inf,
        "last_seconds": max(back) if len(back) == len(made) else math.inf,
        "operator_seconds": looked_at,
        "memory_mib": resident_bytes(ingest.process.pid) / 2**20,
    }
    return result, restart


def run(options: argparse.Namespace) -> dict[str, Result]:
    out: dict[str, Result] = {}

    def section(name: str, result: Result) -> None:
        out[name] = result
        say(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in result.items()))

    catalog.check(["api"])
    with own_installation() as (cluster, installation):
        section("pods", pods(installation, options.ranks))
        hasten_controllers(cluster)
        installation.operator.restart()
        told = tell_times(installation)
        with cluster.namespace("bench") as namespace:
            jobs = Jobs(installation, namespace)
            sizes = mixed(options.jobs)
            section("jobs", many(installation, jobs, sizes))
            for name, result in zip(
                ("fleet", "restart"), fleet(installation, jobs, sizes, told), strict=True
            ):
                section(name, result)
    return out


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
    if hung_up := result["fleet"]["reconnects"]:
        say(f"{hung_up:.0f} reports failed since the ingest hung up; expected none")
        return 1
    return 1 if options.check and not all(holds for _, holds in kept) else 0


if __name__ == "__main__":
    sys.exit(main())
