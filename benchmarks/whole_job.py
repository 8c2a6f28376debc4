"""A job of 10,240 ranks from end to end: 64 stages × 160 replicas, eight ranks in a pod.

    python benchmarks/whole_job.py [--json FILE] [--check]

The API server, its controllers, the operator, the ingest with its planners, the job's agent and the
agents of PARTS pods are real, each a process. The agents of the other 1,275 pods are played, as in
agent_tree.py, and so are all ranks: those of real agents send windows and op times. Nobody trains.
Link 0 of the first pipeline turns slow. Says how long it is until the directive is served, until
the first and the last rank have their part of the plan, and until the job's status tells of the
link; what each process takes of a processor while the job is healthy, and in the first second of
the fault; and what leaves rank 0's host. About four minutes, most of them for the job's pods. With
--check it exits 1 if a goal does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from agent_tree import (
    BASE,
    DELAY,
    HEALTHY,
    MICROBATCHES,
    OP,
    RANKS,
    REPLICAS,
    STAGES,
    Pods,
    played,
    windows,
)
from plan_handout import processor_seconds

from pipemorph.api.spec import JobSpec, PipeMorphJob
from pipemorph.control import initial_plan
from pipemorph.planning import StageTimes, predict, problem_for
from pipemorph.wire import IterationSample
from pipemorph_trainer.agent import start_agent, start_part_agent
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.context import TrainerContext

ROOT = Path(__file__).resolve().parents[1]
NAME = "whole"
PODS = STAGES * REPLICAS // RANKS
PARTS = (1, REPLICAS // RANKS, REPLICAS // RANKS + 1, PODS - 1)
"""Pods other than the first whose agents are real. The second of them has stage 1 of the first
pipeline, where link 0 is slow."""
SLOW_LINK, SLOW_AT = 0, 5.0
"""The link, and when it turns slow in its phase."""
FAULT = "fault"
MOST_AGENT, MOST_INGEST, MOST_ONSET = 5.0, 10.0, 50.0
"""Percent of a processor; the last one for either in the first second of the fault."""
MOST_BYTES = 20e6
"""From rank 0's host for a change of plan."""
PLAN_SECONDS, DEADLINE = 60.0, 600.0
"""For all ranks to have another plan, and for all pods to run."""


# --- the played pods and ranks, in a process of their own -----------------------------------------


class Whole(Pods):
    """The pods of a job whose ranks tell of iterations, and take the plans that they get."""

    def __init__(self, seat: dict[str, Any]) -> None:
        super().__init__(seat)
        self.iteration, self._slow_iteration = seat["healthy"], seat["slow"]
        self._last = self.iteration
        self._version = 0
        self._heard: dict[int, float] = {}
        """When each line had its plan, by its first rank."""
        self._handed = 0
        """Bytes of these plans."""
        self._slow_at: float | None = None
        self._all = asyncio.Event()

    def hear(self, first: int, payload: bytes) -> None:
        told = json.loads(payload)
        plan = told if "digest" in told else (told.get("plans") or {"plans": [{}]})["plans"][0]
        if plan.get("version", 0) == 0:
            return
        self._version = max(self._version, plan["version"])
        if plan.get("promised"):
            self.iteration = self._slow_iteration * (1 - plan["promised"])
        if first not in self._heard:
            self._heard[first] = time.time()
            self._handed += len(payload) if self._leaves_host(first) else 0
            if self._reached == STAGES * REPLICAS:
                self._all.set()

    @property
    def _reached(self) -> int:
        """Ranks that have the plan, or whose pod's agent has it."""
        return sum(1 if first // RANKS in self._ports else RANKS for first in self._heard)

    def _leaves_host(self, first: int) -> bool:
        """Whether this line is one of the job's agent to another pod."""
        return first // RANKS not in self._ports

    def telemetry(self, rank: int, iteration: int, *, ends: bool) -> RankTelemetry:
        stage, column = divmod(rank, REPLICAS)
        told = super().telemetry(rank, iteration, ends=ends)
        # Of the others this rank knows what it knew before.
        well = windows(self._draw, self.noise, stage, range(column, column + 1), frozenset())
        links = [
            (slow if slow.link == SLOW_LINK else other).model_copy(update={"iteration": iteration})
            for slow, other in zip(told.links, well, strict=True)
        ]
        mine = {"applied_plan_version": self._version, "prepared_plan_version": self._version}
        if rank == 0 and ends:
            mine["finished_iteration"] = IterationSample(
                index=iteration - 1, seconds=self._last, loss=1.0,
                plan_version=self._version, bubble_fraction=0.3,
            )  # fmt: skip
            self._last = self.iteration
        return told.model_copy(update=mine | {"links": links})

    async def play(self, what: str) -> None:
        if what != FAULT:
            return await super().play("healthy")
        turning = asyncio.create_task(self._turn_slow())
        await super().play("healthy")
        await turning
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all.wait(), PLAN_SECONDS)

    async def _turn_slow(self) -> None:
        await asyncio.sleep(SLOW_AT)
        self.slow, self._slow_at = frozenset({0}), time.time()
        self.iteration = self._slow_iteration

    def told(self) -> dict[str, Any]:
        """Of the phase."""
        found: dict[str, Any] = super().told()
        if self._slow_at is not None and self._heard:
            first, last = min(self._heard.values()), max(self._heard.values())
            found |= {
                "version": self._version, "ranks": self._reached, "handed": self._handed,
                "first": first - self._slow_at, "last": last - self._slow_at,
            }  # fmt: skip
        return found | {"slow_at": self._slow_at}


# --- the measurement ------------------------------------------------------------------------------


def spec_of_job() -> dict[str, Any]:
    op = {"forward": 1e3 * OP, "backwardInput": 1e3 * OP, "backwardWeight": 1e3 * OP}
    return {
        "parallelism": {"stages": STAGES, "replicas": REPLICAS, "ranksPerPod": RANKS},
        "schedule": {"microbatches": MICROBATCHES, "stageTimes": [op] * STAGES},
    }


def iteration_seconds(spec: JobSpec) -> dict[str, float]:
    """Of an iteration under the plan of the start, without and with the slow link."""
    plan, found = initial_plan(spec), {}
    step = StageTimes(forward=OP, backward_input=OP, backward_weight=OP)
    for name, delay in (("healthy", 0.0), ("slow", DELAY)):
        felt = [BASE + (delay if link == SLOW_LINK else 0.0) for link in range(STAGES - 1)]
        problem = problem_for(MICROBATCHES, [step] * STAGES, felt, plan.routes, queues=8)
        found[name] = predict(plan.schedule, problem, plan.dispatch, plan.waits)
    return found


def children(pid: int) -> list[int]:
    """Of a process, as far as they go."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = each.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == pid:
            found += [int(each.parent.name), *children(int(each.parent.name))]
    return found


class Meter:
    """Shares of a processor, by process."""

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self._pids = pids
        self._began, self._used = time.monotonic(), self._now()

    def _now(self) -> dict[str, float]:
        return {name: sum(map(processor_seconds, pids)) for name, pids in self._pids.items()}

    def percent(self) -> dict[str, float]:
        lasted = time.monotonic() - self._began
        return {name: 100 * (now - self._used[name]) / lasted for name, now in self._now().items()}


def wait_until(at: float) -> None:
    time.sleep(max(0.0, at - time.time()))


def measure(args: argparse.Namespace) -> int:
    # The testbed is the tests'.
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]
    from operator_support import Jobs, manifest, own_installation
    from testbed import wait_for

    with own_installation() as (cluster, installation), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        jobs, began = Jobs(installation, "default"), time.monotonic()
        jobs.apply(manifest(NAME, **spec_of_job()))
        pods = jobs.pods(NAME, PODS)
        made = time.monotonic() - began
        with ThreadPoolExecutor(8) as pool:
            names = (pod["metadata"]["name"] for pod in pods)
            list(pool.map(lambda pod: cluster.fake_pod_running("default", pod), names))
        jobs.wait(NAME, "Running", DEADLINE)
        print(f"{PODS} pods exist after {made:.0f} s, for {STAGES * REPLICAS} ranks", flush=True)

        token = folder / "token"
        token.write_text(jobs.token(NAME, pods[0]))
        job = PipeMorphJob.model_validate(
            {key: jobs.get(NAME)[key] for key in ("apiVersion", "kind", "spec")}
            | {"metadata": {"name": NAME, "namespace": "default"}}
        )
        mesh = job.spec.parallelism.mesh
        volumes = pods[0]["spec"]["volumes"]
        (secret_name,) = (v["secret"]["secretName"] for v in volumes if "secret" in v)
        data = cluster.client.get("secrets", secret_name, "default")["data"]
        (secret,) = (base64.b64decode(each) for each in data.values())
        os.environ["PIPEMORPH_CA_FILE"] = str(installation.folder / "ca.crt")

        def context(rank: int) -> TrainerContext:
            return TrainerContext(
                rank=rank, world_size=mesh.world_size, local_rank=0, master_addr="127.0.0.1",
                master_port=1, job=job, secret=secret, token_file=token,
                ingest_url=f"https://localhost:{installation.port}",
            )  # fmt: skip

        agent = stack.enter_context(closing(start_agent(context(0), mesh, part_ranks=RANKS)))
        upstream = ("127.0.0.1", agent.port)
        parts = {
            part: stack.enter_context(
                closing(
                    start_part_agent(
                        context(part * RANKS), mesh, part_ranks=RANKS, upstream=upstream
                    )
                )
            )
            for part in PARTS
        }
        players = subprocess.Popen(
            [sys.executable, __file__, "--pods"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        stack.callback(players.wait)
        stack.callback(players.kill)
        seat = {
            "port": agent.port, "secret": secret.hex(), "noise": args.noise, "job": NAME,
            "parts": {part: each.port for part, each in parts.items()},
        } | iteration_seconds(job.spec)  # fmt: skip

        def say(what: str) -> None:
            assert players.stdin is not None
            players.stdin.write(what + "\n")

        def hear() -> dict[str, Any]:
            assert players.stdout is not None
            line = players.stdout.readline()
            assert line, "the played pods ended; see above"
            found: dict[str, Any] = json.loads(line)
            return found

        say(json.dumps(seat))
        hear()
        print(f"{hear()['connected']} pods whose agents are played, {1 + len(parts)} real ones")
        ingest = installation.ingest.process.pid
        pids = {
            "the job's agent": [agent.process.pid],
            "an agent of a pod": [parts[PARTS[1]].process.pid],
            "the ingest": [ingest],
            "its planners": children(ingest),
        }
        say("healthy")
        hear()
        meter = Meter(pids)
        time.sleep(HEALTHY)
        healthy = meter.percent()
        hear()
        say(FAULT)
        slow_at = hear()["begins"] + SLOW_AT
        wait_until(slow_at)
        meter = Meter(pids)
        wait_until(slow_at + 1.0)
        onset = meter.percent()

        def slow() -> bool:
            return bool(jobs.get(NAME)["status"]["training"]["slowLinkCount"])

        wait_for("the status to tell of the slow link", slow, PLAN_SECONDS, interval=0.02)
        known = time.time() - slow_at
        found = hear()
    return report(args, healthy, onset, found, known)


def report(
    args: argparse.Namespace,
    healthy: dict[str, float],
    onset: dict[str, float],
    found: dict[str, Any],
    known: float,
) -> int:
    assert "ranks" in found, "no rank was told of another plan"
    print("percent of a processor: healthy, in the first second of the fault")
    for name, percent in healthy.items():
        print(f"  {name}: {percent:.1f}, {onset[name]:.1f}")
    print(
        f"after the fault: the first rank has its plan after {found['first']:.2f} s, the last of"
        f" {found['ranks']} after {found['last']:.2f} s; {found['handed'] / 1e6:.2f} MB leave rank"
        f" 0's host; the status tells of the link after {known:.2f} s"
    )
    goals = {
        f"all {STAGES * REPLICAS} ranks have it": found["ranks"] == STAGES * REPLICAS,
        f"the job's agent takes at most {MOST_AGENT:.0f} %": healthy["the job's agent"]
        <= MOST_AGENT,
        f"the ingest takes at most {MOST_INGEST:.0f} %": healthy["the ingest"] <= MOST_INGEST,
        f"in the first second at most {MOST_ONSET:.0f} %": max(
            onset["the job's agent"], onset["the ingest"]
        )
        <= MOST_ONSET,
        f"at most {MOST_BYTES / 1e6:.0f} MB": found["handed"] <= MOST_BYTES,
    }
    for goal, holds in goals.items():
        print(f"{goal}: {'holds' if holds else 'DOES NOT HOLD'}")
    if args.json is not None:
        figures = {"healthy": healthy, "onset": onset, "status_seconds": known} | found
        args.json.write_text(json.dumps(figures) + "\n")
    return 1 if args.check and not all(goals.values()) else 0


def main() -> int:
    if "--pods" in sys.argv:
        asyncio.run(played(Whole(json.loads(sys.stdin.readline()))))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--noise", type=float, default=0.03, help="of wire and op times")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return measure(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
