"""What requests of the operator and the ingest cost a real API server, and those who watch.

    python benchmarks/api_cost.py [--requests 300] [--json FILE]

The control plane is that of tests/cluster (built once from Go modules), with the operator and the
ingest, which have nothing to do: what they take is for watching. Each kind of request is made
REQUESTS times, one after the other. Figures are processor time: they hold on a busy machine. Two
minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]

import yaml  # noqa: E402
from agent_reports import PERIOD, Reports, parsed  # noqa: E402
from operator_scale import (  # noqa: E402
    DEADLINE,
    create,
    job_of,
    say,
)
from operator_support import FULL_NAME, Installation, Jobs, own_installation  # noqa: E402
from scale_table import MIX  # noqa: E402
from scale_usage import Processors, Result  # noqa: E402
from testbed import catalog, wait_for  # noqa: E402

from pipemorph.api.plan import SavedPlan  # noqa: E402
from pipemorph.api.status import ControlState, JobStatus  # noqa: E402
from pipemorph.control import JobController  # noqa: E402
from pipemorph.control.decide.replan import propose  # noqa: E402
from pipemorph.manifest import parse_job  # noqa: E402
from pipemorph_operator import names  # noqa: E402
from pipemorph_operator.children.attempt import audience  # noqa: E402
from pipemorph_operator.cluster.client import Cluster, path  # noqa: E402
from pipemorph_operator.cluster.events import Event, emit  # noqa: E402
from pipemorph_operator.ingest.auth import REVIEW_PATH  # noqa: E402
from pipemorph_operator.ingest.plans import snapshot_codec  # noqa: E402
from pipemorph_operator.ingest.plans.plan_object import PlanObject, saved_plan  # noqa: E402
from pipemorph_operator.ingest.status.summary import Source, judge, summarize  # noqa: E402

EACH, WARM, REST = 20, 20, 2.0
"""Jobs of each size; requests that are not counted; seconds until the last one is seen."""
RESERVED = 96

Ask = Callable[[int], Awaitable[Any]]


def written_of(stages: int) -> tuple[dict[str, Any], SavedPlan]:
    """What the ingest writes of a job after a slow link: status, and a plan."""
    controller = JobController(parse_job(yaml.safe_dump(job_of(stages, "j"))).spec)
    reports = Reports(stages, 1)
    for at, kind in enumerate(("first", *["quiet"] * 19, "alarm")):
        body = reports.body("default", "j", 1 + at, 0, kind)  # type: ignore[arg-type]
        controller.report(parsed(body), now=at * PERIOD)
        if (asked := controller.replan) is not None:
            controller.settle(asked, propose(asked), now=at * PERIOD)
    source = Source(controller, 20.0, 1)
    snapshot = controller.snapshot()
    version = snapshot["plan_version"]
    status = JobStatus(
        conditions=judge(source, [], 20.0), training=summarize(source, 20.0),
        control=ControlState(attempt=0, plan_version=version, reserved=RESERVED),
    )  # fmt: skip
    plan = saved_plan("", snapshot, snapshot_codec.pack(snapshot))
    return status.model_dump(
        mode="json", by_alias=True, exclude_none=True,
        include={"conditions", "training", "control"},
    ), plan  # fmt: skip


async def measured(installation: Installation, jobs: Jobs, requests: int) -> dict[str, Result]:
    """Milliseconds of a processor per request, by kind of request and by process."""
    found: dict[str, Result] = {}
    namespace = jobs.namespace

    async def measure(what: str, ask: Ask) -> None:
        for number in range(WARM):
            await ask(number)
        busy = Processors(installation)
        for number in range(WARM, WARM + requests):
            await ask(number)
        await asyncio.sleep(REST)
        found[what] = {
            name: 1e3 * busy.used(name) / requests
            for name in ("api_server", "etcd", "operator", "ingest")
        }
        say(f"{what}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in found[what].items()))

    async with await Cluster.configured() as cluster:
        for first, stages in enumerate(MIX):
            status, plan = written_of(stages)
            objects: dict[str, tuple[PlanObject, dict[str, str]]] = {}

            def name(number: int, first: int = first) -> str:
                return f"j{first * EACH + number % EACH}"

            async def apply(number: int, status: dict[str, Any] = status) -> None:
                training = status["training"] | {"iteration": number}
                await cluster.apply(
                    {
                        "apiVersion": names.API_VERSION, "kind": names.KIND,
                        "metadata": {"name": name(number), "namespace": namespace},
                        "status": status | {"training": training},
                    },
                    names.INGEST_OWNER, subresource="status",
                )  # fmt: skip

            async def save(
                number: int,
                plan: SavedPlan = plan,
                objects: dict[str, tuple[PlanObject, dict[str, str]]] = objects,
            ) -> None:
                job = name(number)
                if job not in objects:
                    found = await cluster.get(path(names.KIND, namespace, job))
                    assert found is not None
                    about = {"namespace": namespace, "name": job, "uid": found["metadata"]["uid"]}
                    objects[job] = PlanObject(None), about
                saves, about = objects[job]
                changes = {"job_uid": about["uid"], "attempt": number}  # Or nothing is written.
                await saves.write(cluster, about, plan.model_copy(update=changes))

            async def read(number: int) -> None:
                await cluster.get(path(names.KIND, namespace, name(number)))

            await measure(f"write of the ingest's status, {stages} stages", apply)
            await measure(f"write of a plan, {stages} stages", save)
            await measure(f"read of a job, {stages} stages", read)
        job = await cluster.get(path(names.KIND, namespace, "j0"))
        assert job is not None
        uid = job["metadata"]["uid"]
        pod = jobs.cluster.client.list("pods", namespace, labels="pipemorph.io/job-name=j0")[0]
        asked = {"token": jobs.token("j0", pod), "audiences": [audience(namespace, "j0", uid)]}
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": asked}

        async def event(number: int) -> None:
            told = Event("Normal", "ScheduleAdapted", f"plan v{number}")
            await emit(cluster, job["metadata"], told, names.INGEST_OWNER)

        async def reviewed(_: int) -> None:
            await cluster.post(REVIEW_PATH, review)

        async def pod_read(_: int) -> None:
            await cluster.get(path("Pod", namespace, pod["metadata"]["name"]))

        await measure("event", event)
        await measure("review of a token", reviewed)
        await measure("read of a pod", pod_read)
    return found


def run(requests: int) -> dict[str, Result]:
    catalog.check(["api"])
    with own_installation() as (cluster, installation), cluster.namespace("bench") as namespace:
        jobs = Jobs(installation, namespace)
        sizes = [stages for stages in MIX for _ in range(EACH)]
        for number, stages in enumerate(sizes):
            create(jobs, job_of(stages, f"j{number}"))
        wait_for(
            f"{len(sizes)} jobs to have pods",
            lambda: all(
                jobs.cluster.client.list(
                    "pods", namespace, labels=f"pipemorph.io/job-name=j{number}"
                )
                for number in range(len(sizes))
            ),
            DEADLINE,
            interval=1.0,
        )
        time.sleep(REST)
        os.environ["KUBECONFIG"] = str(installation.account(f"{FULL_NAME}-ingest"))
        return asyncio.run(measured(installation, jobs, requests))


def table(found: dict[str, Result]) -> str:
    """What docs/benchmarks.md quotes."""
    lines = [
        "| processor time, ms | API server | etcd | operator | ingest |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {what} | " + " | ".join(f"{value:.1f}" for value in result.values()) + " |"
        for what, result in found.items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="of each kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(options.requests)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
