"""A change of plan on its way to all ranks of a large job: ``python benchmarks/plan_handout.py``.

The ingest and the job's agent are the product's own, the agent a process of its own. The ranks are
played: connections of one process that do the handshake and read what comes. Says what the agent
sends, beside what whole plans to all ranks would be, how much processor that takes it, and when the
first and the last rank have their plan. All ranks are on this machine here, so their
side shares the processors with the agent. With --check it exits 1 if a goal does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import JobSpec
from pipemorph.ingest import BearerAuthenticator, IngestServer, MemoryStore
from pipemorph.planning import Dispatch, Link, Plan, Problem, Route, StageTimes, plan
from pipemorph.wire import Directive, DirectiveEnvelope, PlanMessage
from pipemorph_trainer.agent import AgentHandle, frames, start_agent
from pipemorph_trainer.context import TrainerContext

STAGES, REPLICAS, MICROBATCHES = 64, 160, 128
MOST_BYTES = 20e6
AT_A_TIME = 256
"""Handshakes, so that the agent's backlog has room."""
DEADLINE_SECONDS = 300.0
NAMESPACE, JOB = "default", "job"


def main() -> int:
    if "--ranks" in sys.argv:
        asyncio.run(play(json.loads(sys.stdin.readline())))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=STAGES)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    return asyncio.run(measure(args))


# --- the played ranks, in a process of their own ----------------------------------------------


async def play(seat: dict[str, Any]) -> None:
    """Connect all ranks, say so, then read one plan each. Prints figures as JSON."""
    gate = asyncio.Semaphore(AT_A_TIME)
    secret = bytes.fromhex(seat["secret"])

    async def connect(rank: int) -> asyncio.StreamReader:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", seat["port"])
            challenge = frames.decode(frames.Challenge, await read(reader)).nonce
            nonce = frames.new_nonce()
            proof = frames.proof(secret, "rank", challenge, nonce, rank)
            writer.write(frames.encode(frames.Hello(rank=rank, nonce=nonce, proof=proof)))
            welcome = frames.decode(frames.Welcome, await read(reader))
            assert welcome.proof is not None, welcome.refused
            kept.append(writer)
            return reader

    async def hear(reader: asyncio.StreamReader) -> tuple[int, float]:
        return len(await read(reader)), time.monotonic()

    kept: list[asyncio.StreamWriter] = []
    readers = await asyncio.gather(*(connect(rank) for rank in range(seat["ranks"])))
    print("connected", flush=True)
    heard = await asyncio.gather(*map(hear, readers))
    sizes, times = zip(*heard, strict=True)
    print(json.dumps({
        "bytes": sum(sizes) + frames.HEADER_BYTES * len(sizes),
        "first": min(times), "last": max(times),
    }), flush=True)  # fmt: skip


async def read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(frames.HEADER_BYTES), "big")
    return await reader.readexactly(length)


# --- the measurement --------------------------------------------------------------------------


class Scripted:
    """A job that has one directive once it is told to."""

    attempt = 0
    replan, wants_plan = None, False
    spec = JobSpec.model_validate(
        {
            "parallelism": {"stages": 2},
            "schedule": {"microbatches": 2},
            "trainer": {"module": "none", "iterations": 1},
            "adaptation": {"enabled": False},
        }
    )
    """As far as it is asked for: no versions for the agent."""

    def __init__(self) -> None:
        self.issued: Directive | None = None

    @property
    def plan_version(self) -> int:
        return 0 if self.issued is None else self.issued.plan_version

    def report(self, *_: Any) -> DirectiveEnvelope:
        """Heard, and ignored."""
        return DirectiveEnvelope(memory="host")

    def tick(self, now: float) -> None:
        """Nothing is timed."""

    def settle(self, *_: Any) -> None:
        """Nothing is planned."""

    def directive(self, after: int = 0) -> Directive | None:
        return self.issued if self.plan_version > after else None

    def snapshot(self) -> dict[str, Any]:
        return {}


class Hosted(NamedTuple):
    """A job's agent, the host that it reports to, and the secret of its ranks."""

    agent: AgentHandle
    server: IngestServer
    secret: bytes


@asynccontextmanager
async def hosted(job: Scripted, mesh: MeshShape, *, part_ranks: int = 0) -> AsyncIterator[Hosted]:
    """The agent of a job, in a process of its own, and its host, here. Raises RuntimeError at the
    end if the host has answered it with an error: then something else was measured."""
    token, secret, store = secrets.token_hex(16), secrets.token_bytes(16), MemoryStore()
    store.add(NAMESPACE, JOB, job)
    errors: Counter[tuple[str, int]] = Counter()

    def answered(kind: str, status: int, seconds: float) -> None:
        if status != HTTPStatus.OK:
            errors[kind, status] += 1

    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(token)
        authenticator = BearerAuthenticator(token)
        async with IngestServer(store, authenticator, on_answer=answered) as server:
            agent = start_agent(
                TrainerContext(
                    rank=0, world_size=mesh.world_size, local_rank=0, master_addr="127.0.0.1",
                    master_port=1, secret=secret, ingest_url=server.url, token_file=token_file,
                ),
                mesh, part_ranks=part_ranks,
            )  # fmt: skip
            try:
                yield Hosted(agent, server, secret)
            finally:
                agent.close(1.0)
    if errors:
        told = ", ".join(f"{n} of kind {kind}: {status}" for (kind, status), n in errors.items())
        raise RuntimeError(f"the host answered the agent with errors ({told}); expected none")


async def measure(args: argparse.Namespace) -> int:
    mesh = MeshShape(args.stages, args.replicas)
    chosen = slow_link_plan(args.stages, args.microbatches)
    whole = len(frames.encode(PlanMessage.of(chosen))) * mesh.world_size
    job = Scripted()
    async with hosted(job, mesh) as (agent, server, secret):
        ranks = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--ranks",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert ranks.stdin is not None
        assert ranks.stdout is not None
        seat = {"port": agent.port, "secret": secret.hex(), "ranks": mesh.world_size}
        ranks.stdin.write(json.dumps(seat).encode() + b"\n")
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                began = time.monotonic()
                line = await ranks.stdout.readline()
                assert line == b"connected\n", "the played ranks ended; see above"
                connecting = time.monotonic() - began
                used, issued = processor_seconds(agent.process.pid), time.monotonic()
                job.issued = Directive(
                    plan_version=1, issued_at=time.time(), reason="link 0 is slow",
                    plan=PlanMessage.of(chosen),
                )  # fmt: skip
                await server.handler.tick(NAMESPACE, JOB)
                found = json.loads(await ranks.stdout.readline())
                used = processor_seconds(agent.process.pid) - used
        finally:
            if ranks.returncode is None:
                ranks.kill()
            await ranks.wait()
    first, last = found["first"] - issued, found["last"] - issued
    print(
        f"{args.stages} stages × {args.replicas} replicas, {args.microbatches} microbatches: "
        f"{mesh.world_size} ranks, connected in {connecting:.1f} s\n"
        f"sent by the agent: {found['bytes'] / 1e6:.1f} MB; whole plans to all would be "
        f"{whole / 1e6:.0f} MB ({whole / found['bytes']:.0f}×)\n"
        f"processor of the agent: {used:.2f} s\n"
        f"the first rank has its plan after {first:.2f} s, the last after {last:.2f} s"
    )
    if args.json is not None:
        figures = {"bytes": found["bytes"], "whole_bytes": whole, "agent_seconds": used}
        figures |= {"first_seconds": first, "last_seconds": last}
        args.json.write_text(json.dumps(figures) + "\n")
    holds = found["bytes"] <= MOST_BYTES
    print(f"at most {MOST_BYTES / 1e6:.0f} MB: {'holds' if holds else 'DOES NOT HOLD'}")
    return 1 if args.check and not holds else 0


def slow_link_plan(stages: int, microbatches: int) -> Plan:
    """A plan for a slow link 0 and equal ops."""
    op = StageTimes(forward=1, backward_input=1, backward_weight=1)
    links = (Link(delay=3), *(Link(),) * (stages - 2))
    problem = Problem(microbatches=microbatches, stages=(op,) * stages, links=links)
    return plan(problem).to_plan(1, (Route.DIRECT,) * (stages - 1), Dispatch.STATIC)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
