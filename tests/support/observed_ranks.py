"""Ranks of an observed job, simulated: the reports of their steps to ``pipemorph serve``."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launch import free_port

from pipemorph.cli import main
from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
)
from pipemorph.http_client import HttpClient, NoResponseError
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.protocol.observed_steps import (
    ObservedPlace,
    ObservedRow,
    ObservedStep,
    StepsReport,
)

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
USUAL = 0.001
"""Seconds of an op, and of a message on a healthy link."""
STAGES, STEPS = 4, 40
Order = Sequence[Sequence[tuple[OpKind, int]]]


def order_1f1b(stages: int, microbatches: int) -> Order:
    """Ops of each stage by torch's 1F1B."""
    ranks = []
    for stage in range(stages):
        warmup = min(microbatches, stages - stage)
        ops = [(OpKind.F, m) for m in range(warmup)]
        for m in range(microbatches):
            ops.append((OpKind.BW, m))
            if warmup + m < microbatches:
                ops.append((OpKind.F, warmup + m))
        ranks.append(ops)
    return ranks


def run_step(
    step: int,
    began: float,
    order: Order,
    wires: Mapping[int, float],
    *,
    noise: float = 0.0,
    sizes: Sequence[int] = (-1,),
    rates: Mapping[int, float] | None = None,
) -> list[ObservedStep]:
    """Run a step on all ranks, by one clock. ``wires``: seconds of a message by link. ``sizes``:
    bytes of messages, of the microbatches in turn; ``rates``: bytes per second by narrow link."""
    done: dict[tuple[OpKind, int, int], float] = {}
    ran: list[list[TimedOp]] = [[] for _ in order]
    receives: dict[int, list[tuple[str, int, float, float]]] = defaultdict(list)
    positions, free = [0] * len(order), [began] * len(order)
    while any(at < len(ops) for at, ops in zip(positions, order, strict=True)):
        for stage, ops in enumerate(order):
            while positions[stage] < len(ops):
                kind, m = ops[positions[stage]]
                source = stage - 1 if kind is OpKind.F else stage + 1
                start = free[stage]
                if 0 <= source < len(order):
                    if (kind, source, m) not in done:
                        break
                    wire = wires.get(min(stage, source), USUAL) + noise * ((7 * m + step) % 3)
                    if (rate := (rates or {}).get(min(stage, source))) is not None:
                        wire += sizes[m % len(sizes)] / rate
                    start = max(start, done[kind, source, m] + wire)
                    optype = FORWARD_RECV if kind is OpKind.F else BACKWARD_RECV
                    receives[stage].append((optype, m, free[stage], start))
                free[stage] = start + (FORWARD_SECONDS if kind is OpKind.F else BACKWARD_SECONDS)
                done[kind, stage, m] = free[stage]
                ran[stage].append(TimedOp(kind, m, start, free[stage]))
                positions[stage] += 1
    ended = max(free)
    return [
        _make_step(step, stage, ops, receives[stage], (began, ended, len(order)), sizes=sizes)
        for stage, ops in enumerate(ran)
    ]


def _make_step(
    step: int,
    stage: int,
    ops: Sequence[TimedOp],
    received: Sequence[tuple[str, int, float, float]],
    span: tuple[float, float, int],
    *,
    sizes: Sequence[int],
) -> ObservedStep:
    began, ended, stages = span

    def make_row(optype: str, m: int, start: float, end: float) -> ObservedRow:
        at, until = round(1e6 * (start - began)), round(1e6 * (end - began))
        moments = (at, at) if optype in (FORWARD_RECV, BACKWARD_RECV) else (None, None)
        size = -1 if optype in (FORWARD, BACKWARD) else sizes[m % len(sizes)]
        return optype, stage, m, at, until - at, *moments, size

    rows = []
    for op in ops:
        is_forward = op.kind is OpKind.F
        rows.append(make_row(FORWARD if is_forward else BACKWARD, *op[1:4]))
        if stage < stages - 1 if is_forward else stage > 0:
            optype = FORWARD_SEND if is_forward else BACKWARD_SEND
            rows.append(make_row(optype, op.microbatch, op.end, op.end))
    rows.extend(make_row(*each) for each in received)
    return ObservedStep(step=step, began_at=began, ended_at=ended, rows=rows)


def shift_clock(step: ObservedStep, seconds: float) -> ObservedStep:
    """Step by a clock that is ahead."""
    times = {"began_at": step.began_at + seconds, "ended_at": step.ended_at + seconds}
    return step.model_copy(update=times)


def make_report(
    stage: int,
    stages: int,
    steps: Sequence[ObservedStep] = (),
    *,
    session: str = "a",
    ahead: float = 0.0,
    crowding: float | None = None,
    **fields: object,
) -> bytes:
    """Report of a rank. ``ahead``: seconds by which its clock is ahead of the host's."""
    place = ObservedPlace(
        rank=stage,
        stages=stages,
        chunks=(stage,),
        host=f"host{stage}",
        framework="torch Schedule1F1B",
        crowding=crowding,
    )
    report = StepsReport(
        protocol=1, session=f"{session}{stage}", place=place, clock=-ahead, round_trip=0.001,
        steps=[shift_clock(step, ahead) for step in steps],
    )  # fmt: skip
    return report.model_copy(update=fields).model_dump_json().encode()


def post(client: HttpClient, body: bytes) -> None:
    """Post a report; the host may start at the same time."""
    deadline = time.monotonic() + 20
    while True:
        try:
            answer = client.request_blocking("/v1/observations", body=body, seconds=5.0)
            assert answer.status == 200, answer.reason
            return
        except NoResponseError:
            assert time.monotonic() < deadline


def report_steps(url: str, token: Path, late_until: int, look: Callable[[], bool]) -> None:
    """Report :data:`STEPS` steps of :data:`STAGES` ranks, with link 2 late from step 15 up to a
    step, and their end once ``look`` returns True, at the latest after 20 s."""
    client, now = HttpClient(url, token), time.time()
    order = order_1f1b(STAGES, 4)
    ran = []
    for step in range(1, STEPS + 1):
        wires = {2: USUAL + 0.02 * (15 <= step < late_until)}
        ran.append(run_step(step, now, order, wires, noise=1e-4))
        now = ran[-1][0].ended_at
    for stage in range(STAGES):
        steps = [each[stage] for each in ran]
        post(client, make_report(stage, STAGES, steps))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(NoResponseError):
            if look():
                break
    for stage in range(STAGES):
        post(client, make_report(stage, STAGES, finished=True))


def serve_while_ranks_report(
    folder: Path, late_until: int, look: Callable[[], bool], *options: str
) -> None:
    """Run ``pipemorph serve --observe`` until the ranks have ended, see :func:`report_steps`."""
    listen, token = f"127.0.0.1:{free_port()}", folder / "token"
    arguments = (f"http://{listen}", token, late_until, look)
    ranks = threading.Thread(target=report_steps, args=arguments)
    ranks.start()
    command = ["serve", "--observe", "--listen", listen, "--token-file", str(token), *options]
    assert main(command) == 0
    ranks.join()
