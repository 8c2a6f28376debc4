"""Load of one large job on its agent.

    python benchmarks/scale.py [--ranks 1024] [--check]

A job of 64 stages and RANKS ranks: processor share of its agent while all links are healthy, after
link 0 turned slow, and after half of all links did. Agent, ingest and the monitors of the ranks are
real; their measurements are played. Everything shares this machine. With --check the exit status is
1 if a goal does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections import Counter
from http import HTTPStatus
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]

import yaml  # noqa: E402
from goals import finish_benchmark, make_parser  # noqa: E402
from operator_support import manifest  # noqa: E402
from scale_load import run_load  # noqa: E402

from pipemorph.argument_types import duration_type  # noqa: E402
from pipemorph.control import JobController  # noqa: E402
from pipemorph.ingest import BearerAuthenticator, IngestServer, InMemoryJobStore  # noqa: E402
from pipemorph.manifest import parse_job  # noqa: E402
from pipemorph.spec.mesh import MeshShape  # noqa: E402
from pipemorph_trainer.agent import start_agent  # noqa: E402
from pipemorph_trainer.context import TrainerContext  # noqa: E402

Result = dict[str, float]
STAGES, RANKS_PER_POD = 64, 8
"""Stages of the large job; limit of ranks per pod."""
WELL, FAULT, SETTLE = 30.0, 5.0, 10.0
"""Seconds of healthy links, of each fault, and before the measurement."""
NAMESPACE, JOB = "default", "job"
"""Namespace and name of the job."""
MOST_AGENT = 0.15
"""Goal: processors of the agent."""


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
                    figures = await asyncio.to_thread(stack.enter_context, run_load(**load))
                    sent = await asyncio.to_thread(figures)
            finally:
                agent.close(1.0)
    if refused := {status: n for status, n in answers.items() if status != HTTPStatus.OK}:
        raise RuntimeError(f"the ingest answered the agent with errors: {refused}; expected none")
    return found | {"reports": answers[200], "plan_version": controller.plan_version, **sent}


def make_job(stages: int, name: str, replicas: int = 1) -> dict[str, Any]:
    """Manifest of a job with many remaining iterations: near its end no plan change pays."""
    cut = {"stages": stages, "replicas": replicas, "ranksPerPod": min(stages, RANKS_PER_POD)}
    trainer = {"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000_000}
    job = manifest(name, stages=stages, parallelism=cut, trainer=trainer)
    job["spec"]["schedule"]["microbatches"] = max(12, 2 * stages)
    return job


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=STAGES)
    parser.add_argument("--seconds", type=duration_type, default=WELL, help="of healthy links")
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal does not hold")
    options = parser.parse_args()
    found = asyncio.run(measure_large_job(options.ranks, options.stages, options.seconds))
    shares = " | ".join(f"{found[phase]:.3f}" for phase in ("well", "one_slow", "half_slow"))
    print(
        f"| agent of {found['ranks']:.0f} ranks, {os.cpu_count()} processors for everything "
        "| links well | one slow | half slow |\n|---|---|---|---|\n"
        f"| processors | {shares} |\n"
    )
    most = max(found["well"], found["one_slow"])
    goals = [(f"agent ≤ {MOST_AGENT:.2f} processors: {most:.3f}", most <= MOST_AGENT)]
    return 1 if not finish_benchmark(goals, options.json, found) and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
