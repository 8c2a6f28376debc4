"""The job's agent of a large job whose pods have agents of their own.

    python benchmarks/agent_tree.py [--check]

The job's agent is the product's own, as a process. The agents of all other pods are played: what
they send is recorded from the product's observers in virtual time, a few of them with noise of
their own, and replayed on real connections with the numbers of each pod, at the times at which it
was made. The ranks of the first pod are played, too. Says which share of a processor the job's
agent takes, and what it hears, while the job is healthy and in the first second of faults; and when
the host knows of a slow link. With --check it exits 1 if a goal does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_handout import Scripted, hosted, processor_seconds, slow_link_plan

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.observer import SELDOM_REPORTS, JobTelemetry, Observer
from pipemorph.ingest import IngestServer
from pipemorph.planning import Route
from pipemorph.wire import (
    Directive,
    DirectiveEnvelope,
    LinkSample,
    PlanMessage,
    StageProfile,
    WireTime,
)
from pipemorph.wire.parts import PartAnswer
from pipemorph_trainer.agent import frames, lines
from pipemorph_trainer.agent.messages import RankTelemetry

STAGES, REPLICAS, RANKS, MICROBATCHES = 64, 160, 8, 128
"""Ranks: of a pod."""
NAMESPACE, JOB = "default", "job"
WINDOW, ITERATION = 0.05, 0.5
SETTLE, HEALTHY, PAUSE = 60.0, 40.0, 4.0
"""Seconds before what is recorded, of it (as long as between two heartbeats of a part), and between
two faults."""
BASE, DELAY, OP = 0.002, 0.030, 0.01
TEMPLATES = 8
"""Pods that are recorded; the others are as these."""
AT_A_TIME = 64
DEADLINE_SECONDS = 300.0
MOST_HEALTHY, MOST_ONSET = 5.0, 50.0
"""Percent of a processor."""
PLAN = "a new plan"
FAULTS = ("one column of a link", "a link in all columns", "half of all links")


# --- recording: reports of one pod, in virtual time ---------------------------------------------


@dataclass
class Recorded:
    """Reports of a pod of stage 1 and the first columns: seconds after the start, and body."""

    healthy: list[tuple[float, str]]
    one: list[tuple[float, str]]
    """One of its directions has turned slow at 0 s; ``all``: all have."""
    all: list[tuple[float, str]]


def windows(
    draw: random.Random, noise: float, stage: int, columns: range, slow: frozenset[int]
) -> list[LinkSample]:
    found = []
    for column in columns:
        for link, direction in ((stage - 1, "forward"), (stage, "backward")):
            if not 0 <= link < STAGES - 1:
                continue
            wire = max(1e-4, draw.gauss(BASE, noise * BASE)) + DELAY * (column in slow)
            found.append(
                LinkSample(
                    link=link, replica=column, direction=direction, route=Route.DIRECT,  # type: ignore[arg-type]
                    transport="gloo", iteration=0, bytes=1 << 24, queue_p50=1e-5,
                    wire=WireTime(count=5, exact=5, min=wire, p50=wire, p99=wire, mean=wire),
                )
            )  # fmt: skip
    return found


def profiles(draw: random.Random, noise: float, stage: int, columns: range) -> list[StageProfile]:
    return [
        StageProfile(
            stage=stage, replica=column, split="module", peak_memory=1 << 34,
            forward=abs(draw.gauss(OP, noise * OP)), backward_input=abs(draw.gauss(OP, noise * OP)),
            backward_weight=abs(draw.gauss(OP, noise * OP)),
        )
        for column in columns
    ]  # fmt: skip


def record(seed: int, noise: float) -> Recorded:
    mesh, draw = MeshShape(STAGES, REPLICAS), random.Random(seed)
    number = REPLICAS // RANKS
    observer = Observer(mesh, job=JOB, namespace=NAMESPACE, attempt=0, part=number)
    parts = mesh.world_size // RANKS
    answer = PartAnswer(memory="m", seldom=max(1.0, parts / SELDOM_REPORTS))
    now, turn, sequence = 1.7e9, 0, 0
    observer.take(answer, now)
    columns = range(RANKS)

    def run(seconds: float, slow: frozenset[int] = frozenset()) -> list[tuple[float, str]]:
        nonlocal now, turn, sequence
        began, found = now, []
        for _ in range(round(seconds / WINDOW)):
            now, turn = now + WINDOW, turn + 1
            ends = turn % round(ITERATION / WINDOW) == 0
            observer.observe(
                JobTelemetry(
                    iteration=turn // 10, links=windows(draw, noise, 1, columns, slow),
                    stages=profiles(draw, noise, 1, columns) if ends else (), ports=0,
                ),
                now,
            )  # fmt: skip
            if observer.due(now):
                sequence += 1
                report = observer.report(sequence, now, 0)
                found.append((now - began, report.body().decode()))
                observer.told(report)
        return found

    run(SETTLE)
    healthy = run(HEALTHY)
    one = run(PAUSE, frozenset({0}))
    run(2 * PAUSE)
    return Recorded(healthy, one, run(PAUSE, frozenset(columns)))


def placed(body: str, part: int) -> dict[str, Any]:
    """The report as one of another pod."""
    told = json.loads(body)
    stage, column = part * RANKS // REPLICAS, part * RANKS % REPLICAS
    told["part"] = part
    for name, shift in (("links", -1), ("directions", -1), ("stages", 0), ("paces", 0)):
        for row in told.get(name, ()):
            key = "link" if shift else "stage"
            row[key] += stage - 1
            if name != "stages":
                row["column"] = row.get("column", 0) + column
    told["late"] = [link + stage - 1 for link in told.get("late", ())]
    ends = range(STAGES - 1)
    told["late"] = [link for link in told["late"] if link in ends]
    for name in ("links", "directions"):
        told[name] = [row for row in told.get(name, ()) if row["link"] in ends]
    told.pop("transports", None)
    return told


# --- the played pods, in a process of their own ---------------------------------------------------


class Pods:
    """Connections of the agents of pods, and of the ranks of those pods whose agents are real: of
    the first, which has the job's agent, and maybe of others."""

    def __init__(self, seat: dict[str, Any]) -> None:
        self._secret = bytes.fromhex(seat["secret"])
        self._port = seat["port"]
        real = {int(part): port for part, port in seat.get("parts", {}).items()}
        self._ports = {0: self._port} | real
        """Of the real agents, by pod."""
        self._names = {"namespace": seat.get("namespace", NAMESPACE), "job": seat.get("job", JOB)}
        pods = STAGES * REPLICAS // RANKS
        self.parts = [part for part in range(pods) if part not in self._ports]
        self._recorded = [record(seed, seat["noise"]) for seed in range(TEMPLATES)]
        self._lines: dict[int, asyncio.StreamWriter] = {}
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._sequence = dict.fromkeys(self.parts, 10_000)
        self._settings = dict.fromkeys(self.parts, "")
        """The revision that each pod was told of."""
        self._keep: list[Any] = []
        self._draw = random.Random(1)
        self.slow: frozenset[int] = frozenset()
        """Columns of the first pods of which link 0 is slow."""
        self.noise, self.iteration = seat["noise"], ITERATION
        """Of the latter, seconds of the next iteration."""
        self.sent = self.messages = self.answered = 0

    async def connect(self) -> None:
        gate = asyncio.Semaphore(AT_A_TIME)

        async def dial(side: frames.Side, number: int, port: int) -> asyncio.StreamWriter:
            async with gate:
                reader, line = await asyncio.open_connection("127.0.0.1", port)
                await lines.introduce(reader, line, self._secret, side, number)
            ranks = number if side == "rank" else number * RANKS
            self._keep.append(asyncio.create_task(self._listen(reader, ranks)))
            return line

        ranks = {part * RANKS + i: port for part, port in self._ports.items() for i in range(RANKS)}
        found = await asyncio.gather(*(dial("rank", *each) for each in ranks.items()))
        self._ranks = dict(zip(ranks, found, strict=True))
        found = await asyncio.gather(*(dial("part", each, self._port) for each in self.parts))
        self._lines = dict(zip(self.parts, found, strict=True))
        self._keep.append(asyncio.create_task(self._train()))
        for number in self.parts:
            # What a pod tells first: that its links are well.
            self._send(number, self._first(number))
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0.05)

    async def _listen(self, reader: asyncio.StreamReader, first: int) -> None:
        """Hear what is told to one line. ``first``: its first rank."""
        while True:
            payload = await lines.read(reader)
            self.answered += len(payload) + frames.HEADER_BYTES
            if (number := first // RANKS) in self._settings and b'"answer":{' in payload:
                settings = json.loads(payload)["answer"].get("settings") or {}
                self._settings[number] = settings.get("revision", self._settings[number])
            self.hear(first, payload)

    def hear(self, first: int, payload: bytes) -> None:
        """Take what a line was told."""

    def _first(self, number: int) -> dict[str, Any]:
        stage, column = number * RANKS // REPLICAS, number * RANKS % REPLICAS
        rests = [
            {"link": link, "health": "healthy", "wire_time": BASE, "confidence": 0.9987,
             "column": column}
            for link in (stage - 1, stage) if 0 <= link < STAGES - 1
        ]  # fmt: skip
        ops = {"forward": OP, "backward_input": OP, "backward_weight": OP}
        paces = [
            {"stage": stage, "column": column + i, "seconds": 3 * OP, "settled": True}
            for i in range(RANKS)
        ]
        base = {
            "protocol": 4, "attempt": 0, "sent_at": 1.0,
            "state": "training", "iteration": 1, "observed_plan_version": 0,
            "applied_plan_version": 0, "part": number,
        }  # fmt: skip
        return base | {
            "links": rests, "paces": paces, "stages": [{"stage": stage, **ops}],
            "bases": [{"route": "direct", "counts": {"-621": len(rests) * RANKS}}],
        }  # fmt: skip

    def _send(self, number: int, told: dict[str, Any]) -> None:
        self._sequence[number] += 1
        told |= self._names
        told |= {"sequence": self._sequence[number], "settings": self._settings[number]}
        data = frames.frame(json.dumps(told).encode())
        self._lines[number].write(data)
        self.sent += len(data)
        self.messages += 1

    async def _train(self) -> None:
        """The ranks: windows each 50 ms, op times with each iteration."""
        turn, iteration, began = 0, 0, time.monotonic()
        end = self.iteration
        while True:
            turn += 1
            if ends := turn * WINDOW >= end:
                iteration, end = iteration + 1, end + self.iteration
            for rank, line in self._ranks.items():
                line.write(frames.encode(self.telemetry(rank, iteration, ends=ends)))
            await asyncio.sleep(max(0.0, began + turn * WINDOW - time.monotonic()))

    def telemetry(self, rank: int, iteration: int, *, ends: bool) -> RankTelemetry:
        """What a rank tells now. ``ends``: whether it has just finished the iteration before."""
        stage, column = divmod(rank, REPLICAS)
        columns = range(column, column + 1)
        return RankTelemetry(
            rank=rank, stage=stage, replica=column, state="training", iteration=iteration,
            applied_plan_version=0, prepared_plan_version=0, ports=0,
            links=windows(self._draw, self.noise, stage, columns, self.slow),
            profile=profiles(self._draw, self.noise, stage, columns)[0] if ends else None,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """What was sent and heard in the last phase."""
        return {"sent": self.sent, "messages": self.messages, "answered": self.answered}

    async def play(self, what: str) -> None:
        """Replay what pods tell in a phase, at its times."""
        events: list[tuple[float, int, str]] = []
        for number in self.parts:
            recorded = self._recorded[number % TEMPLATES]
            reports = recorded.healthy
            if what == PLAN:
                continue
            if what == "healthy":
                shift = random.Random(number).uniform(0, HEALTHY)
                reports = [((at + shift) % HEALTHY, body) for at, body in reports]
            else:
                reports = self._of_fault(number, what, recorded)
            events += [(at, number, body) for at, body in reports]
        events.sort()
        ready = [(at, number, placed(body, number)) for at, number, body in events]
        self.sent = self.messages = self.answered = 0
        print(json.dumps({"begins": time.time()}), flush=True)
        began = time.monotonic()
        for at, number, told in ready:
            if (left := began + at - time.monotonic()) > 0:
                await asyncio.sleep(left)
            self._send(number, told)
        lasted = HEALTHY if what == "healthy" else PAUSE
        await asyncio.sleep(max(0.0, began + lasted - time.monotonic()))
        for each in self._keep:
            if each.done():
                each.result()  # Raises, for a line was lost.

    def _of_fault(self, number: int, what: str, recorded: Recorded) -> list[tuple[float, str]]:
        stage, column = number * RANKS // REPLICAS, number * RANKS % REPLICAS
        if what == FAULTS[0]:
            return recorded.one if (stage, column) == (1, 0) else []
        if what == FAULTS[1]:
            return recorded.all if stage == 1 else []
        return recorded.all if 1 <= stage <= STAGES // 2 else []


async def played(pods: Pods) -> None:
    """Play what standard input says, line by line, and tell of it on standard output."""
    print(json.dumps({"recorded": True}), flush=True)
    await pods.connect()
    print(json.dumps({"connected": len(pods.parts)}), flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().strip():
        pods.slow = frozenset({0}) if line in FAULTS[:2] else frozenset()
        await pods.play(line)
        print(json.dumps(pods.told()), flush=True)


# --- the measurement ------------------------------------------------------------------------------


class Host(Scripted):
    """A job that notes when it is told of slow directions."""

    def __init__(self) -> None:
        super().__init__()
        self.told_at: float | None = None
        self.known: set[tuple[int, int, str]] = set()
        self.directions = self.reports = self.bytes = 0

    def report(self, *args: Any) -> DirectiveEnvelope:
        report = args[0]
        self.reports += 1
        self.bytes += len(report.body())
        rows = {(row.link, row.column, row.direction) for row in report.directions}
        slow = rows - self.known
        self.known |= rows
        self.directions += len(slow)
        if slow and self.told_at is None:
            self.told_at = time.time()
        return DirectiveEnvelope(memory="host")


async def measure(args: argparse.Namespace) -> int:
    mesh = MeshShape(STAGES, REPLICAS)
    host = Host()
    rows: list[dict[str, Any]] = []
    async with hosted(host, mesh, part_ranks=RANKS) as (agent, server, secret):
        pods = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--pods",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert pods.stdin is not None
        assert pods.stdout is not None
        stdin, stdout = pods.stdin, pods.stdout

        async def say(line: str) -> None:
            stdin.write(line.encode() + b"\n")
            await stdin.drain()

        async def hear() -> dict[str, Any]:
            line = await stdout.readline()
            assert line, "the played pods ended; see above"
            found: dict[str, Any] = json.loads(line)
            return found

        seat = {"port": agent.port, "secret": secret.hex(), "noise": args.noise}
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await say(json.dumps(seat))
                await hear()
                connected = await hear()
                print(f"{connected['connected']} pods of {RANKS} ranks, and one more")
                await asyncio.sleep(PAUSE)
                for phase in ("healthy", *FAULTS):
                    rows.append(await one(phase, say, hear, host, agent.process.pid))
                    if phase != "healthy":
                        await asyncio.sleep(PAUSE)
                await new_plan(say, hear, host, server, agent.process.pid)
        finally:
            if pods.returncode is None:
                pods.kill()
            await pods.wait()
    holds = rows[0]["percent"] <= MOST_HEALTHY and rows[1]["percent"] <= MOST_ONSET
    verdict = "holds" if holds else "DOES NOT HOLD"
    print(f"at most {MOST_HEALTHY:.0f} and {MOST_ONSET:.0f} %: {verdict}")
    if args.json is not None:
        args.json.write_text(json.dumps(dict(zip(("healthy", *FAULTS), rows, strict=True))) + "\n")
    return 1 if args.check and not holds else 0


async def new_plan(say: Any, hear: Any, host: Host, server: IngestServer, pid: int) -> None:
    chosen = slow_link_plan(STAGES, MICROBATCHES)
    await say(PLAN)
    await hear()
    used = processor_seconds(pid)
    host.issued = Directive(
        plan_version=1, issued_at=time.time(), reason=FAULTS[0], plan=PlanMessage.of(chosen)
    )
    await server.handler.tick(NAMESPACE, JOB)
    found = await hear()
    used = processor_seconds(pid) - used
    print(
        f"{PLAN} of {MICROBATCHES} microbatches: {found['answered'] / 1e6:.2f} MB to pods and to"
        f" {RANKS} ranks, {used:.2f} s of processor within {PAUSE:.0f} s"
    )


async def one(phase: str, say: Any, hear: Any, host: Host, pid: int) -> dict[str, Any]:
    host.told_at, host.directions, host.reports, host.bytes = None, 0, 0, 0
    await say(phase)
    begins = (await hear())["begins"]
    used, began = processor_seconds(pid), time.monotonic()
    lasted = HEALTHY if phase == "healthy" else 1.0
    await asyncio.sleep(max(0.0, began + lasted - time.monotonic()))
    percent = 100 * (processor_seconds(pid) - used) / (time.monotonic() - began)
    found = await hear()
    seconds = HEALTHY if phase == "healthy" else PAUSE
    told = "" if host.told_at is None else f"; known to it after {host.told_at - begins:.2f} s"
    first = "" if phase == "healthy" else " in the first second"
    sent, answered = found["sent"] / seconds / 1e3, found["answered"] / seconds / 1e3
    print(
        f"{phase}: {percent:.1f} % of a processor{first};"
        f" from pods {found['messages'] / seconds:.0f} reports/s, {sent:.0f} kB/s, to them"
        f" {answered:.0f} kB/s; to the host {host.reports / seconds:.1f} reports/s,"
        f" {host.bytes / seconds / 1e3:.1f} kB/s, {host.directions} slow directions{told}",
        flush=True,
    )
    return found | {"percent": percent}


def main() -> int:
    if "--pods" in sys.argv:
        asyncio.run(played(Pods(json.loads(sys.stdin.readline()))))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--noise", type=float, default=0.03, help="of wire and op times")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
