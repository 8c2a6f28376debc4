"""Played ranks of a large job for scale.py, in a process of their own.

:func:`run_load` starts ``python benchmarks/scale_load.py``, sends a JSON object to its standard
input and returns its figures. The ranks' own monitors judge played windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipemorph.detection.job_observer import REPORT_SECONDS
from pipemorph.detection.rank_monitor import RankMonitor
from pipemorph.planning import Route
from pipemorph.protocol import (
    IterationSample,
    LinkSample,
    StageProfile,
    WireTime,
)
from pipemorph.protocol.rank_messages import RANK_PROTOCOL, RankFrame, RankReport
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.agent import frames

ITERATION = REPORT_SECONDS
"""Seconds of an undisturbed iteration."""
NORMAL, SLOW, OP = 0.002, (0.04, 0.12), 0.01
"""Seconds of a normal wire time, of a slow one (range), and of an op."""
WINDOW, POOL = 0.05, 8
"""Seconds of a window; different windows of a direction."""
OPENED_AT_A_TIME = 32
BEGAN = "began"
"""Printed to standard error once everything is connected: the load's time begins."""
DEADLINE = 900.0


def make_window(
    draw: random.Random, link: int, column: int, direction: str, usual: float
) -> LinkSample:
    """Make a window in which messages take about ``usual`` seconds."""
    least, middle, most = (usual * (1 + draw.uniform(0, 0.02) + more) for more in (0, 0.02, 0.04))
    wire = WireTime(count=5, exact=5, min=least, p50=middle, p99=most, mean=middle)
    return LinkSample(
        link=link, replica=column, direction=direction, route=Route.DIRECT,  # type: ignore[arg-type]
        transport="gloo", iteration=0, bytes=5 << 24, queue_p50=1e-5, wire=wire,
    )  # fmt: skip


def make_profile(draw: random.Random, stage: int, column: int) -> StageProfile:
    names = ("forward", "backward_input", "backward_weight")
    return StageProfile(
        stage=stage, replica=column, split="deferred", peak_memory=2**34,
        **{name: draw.gauss(OP, OP / 100) for name in names},
    )  # fmt: skip


@dataclass(frozen=True)
class RanksLoad:
    """Load of all ranks of a large job, connected to its agent, process ``agent``, at ``port``.
    Links are healthy for ``settle`` and ``healthy`` seconds; then link 0 is slow for ``fault``
    seconds, then half of all links, for ``fault`` seconds, too."""

    port: int
    agent: int
    secret: str
    stages: int
    replicas: int
    settle: float
    healthy: float
    fault: float


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class PlayedRank:
    """Played rank: its monitor, its windows, and its connection."""

    def __init__(self, mesh: MeshShape, rank: int) -> None:
        self.rank, self.monitor = rank, RankMonitor(mesh, rank)
        at, draw = mesh.find_coordinate(rank), random.Random(rank)
        received = [(at.stage - 1, "forward"), (at.stage, "backward")]
        self._links = [each for each in received if 0 <= each[0] < mesh.stages - 1]
        wires = {False: NORMAL, True: sum(SLOW) / 2}
        self._windows = {
            (link, slow): [make_window(draw, link, at.column, way, wire) for _ in range(POOL)]
            for link, way in self._links
            for slow, wire in wires.items()
        }
        self._profiles = [make_profile(draw, at.stage, at.column) for _ in range(POOL)]
        self.writer: asyncio.StreamWriter | None = None
        self.sent = 0

    def end_window(self, number: int, now: float, slow: int, iteration: int | None) -> None:
        """End a window. ``slow``: number of slow links; ``iteration``: finished one, if any."""
        windows = [
            found.model_copy(update={"iteration": number}) if link < slow else found
            for link, _ in self._links
            for found in [self._windows[link, link < slow][number % POOL]]
        ]
        profiles = [] if iteration is None else [self._profiles[number % POOL]]
        self.monitor.observe_windows(windows, now, profiles=profiles)
        finished = None
        if self.rank == 0 and iteration is not None:
            finished = IterationSample(
                index=iteration, seconds=ITERATION, loss=2.5, plan_version=0, bubble_fraction=0.1
            )
        if finished is not None or self.monitor.is_report_due(now):
            report = RankReport(
                rank=self.rank, state="training", iteration=iteration or 0, ports=0,
                applied_plan_version=0, finished_iteration=finished,
                **self.monitor.take_changes(now),
            )  # fmt: skip
            data = frames.add_length_prefix(report.to_json())
            assert self.writer is not None
            self.writer.write(data)
            self.sent += len(data)


async def play_ranks(load: RanksLoad) -> dict[str, Any]:
    mesh, gate = MeshShape(load.stages, load.replicas), asyncio.Semaphore(OPENED_AT_A_TIME)
    ranks = [PlayedRank(mesh, rank) for rank in range(mesh.world_size)]
    answered = 0

    async def connect(each: PlayedRank) -> asyncio.StreamReader:
        async with gate:
            reader, each.writer = await asyncio.open_connection("127.0.0.1", load.port)
            await send_handshake(reader, each.writer, bytes.fromhex(load.secret), each.rank)
        each.monitor.record_connection()
        return reader

    async def receive(each: PlayedRank, reader: asyncio.StreamReader) -> None:
        nonlocal answered
        while True:
            payload = await frames.read_frame(reader)
            answered += len(payload)
            if RankFrame.is_answer(payload):
                answer = RankFrame.model_validate_json(payload).answer
                each.monitor.process_answer(answer, time.monotonic())

    readers = await asyncio.gather(*(connect(each) for each in ranks))
    tasks = [
        asyncio.create_task(receive(each, reader))
        for each, reader in zip(ranks, readers, strict=True)
    ]
    print(BEGAN, file=sys.stderr, flush=True)
    began, number, late = time.monotonic(), 0, 0.0
    found: dict[str, Any] = {}
    for phase, seconds, slow in (
        ("settle", load.settle, 0),
        ("well", load.healthy, 0),
        ("one_slow", load.fault, 1),
        ("half_slow", load.fault, load.stages // 2),
    ):
        used = cpu_seconds(load.agent)
        for _ in range(round(seconds / WINDOW)):
            number += 1
            iteration, rest = divmod(number, round(ITERATION / WINDOW))
            for i, each in enumerate(ranks):
                if i % 64 == 0:
                    await asyncio.sleep(0)
                each.end_window(number, time.monotonic(), slow, iteration if rest == 0 else None)
            due = began + number * WINDOW
            late = max(late, time.monotonic() - due)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        # Relative to the played time: a busy machine takes longer.
        found[phase] = (cpu_seconds(load.agent) - used) / seconds
    for task in tasks:
        if task.done():
            task.result()  # Raises: a connection was lost.
        task.cancel()
    sent = sum(each.sent for each in ranks)
    return found | {"sent": sent, "answered": answered, "load_late": late}


async def send_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, rank: int
) -> None:
    """Perform the rank's part of the handshake."""
    challenge = frames.decode_message(frames.Challenge, await frames.read_frame(reader)).nonce
    nonce = frames.new_nonce()
    mine = frames.compute_proof(secret, "rank", challenge, nonce, rank)
    hello = frames.Hello(rank=rank, nonce=nonce, proof=mine, protocol=RANK_PROTOCOL)
    writer.write(frames.encode_frame(hello))
    welcome = frames.decode_message(frames.Welcome, await frames.read_frame(reader))
    if welcome.proof is None:
        raise RuntimeError(f"the agent refused rank {rank}: {welcome.refused}")


# --- the process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def run_load(**load: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """Run :class:`RanksLoad` in a separate process. Enters once everything is connected; yields a
    function that waits for the figures. Raises RuntimeError if the process fails."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    try:
        process.stdin.write(json.dumps(load))
        process.stdin.close()
        process.stdin = None
        if (line := process.stderr.readline()).strip() != BEGAN:
            raise RuntimeError(f"scale_load.py: {line}{process.stderr.read()[-2000:]}")

        def read_figures() -> dict[str, Any]:
            out, errors = process.communicate(timeout=DEADLINE)
            if process.returncode != 0:
                raise RuntimeError(f"scale_load.py: {errors[-2000:]}")
            found: dict[str, Any] = json.loads(out)
            return found

        yield read_figures
    finally:
        process.kill()
        process.wait()


def main() -> None:
    load = json.load(sys.stdin)
    json.dump(asyncio.run(play_ranks(RanksLoad(**load))), sys.stdout)


if __name__ == "__main__":
    main()
