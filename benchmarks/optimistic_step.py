"""What jobs that clip gradients gain by a step that does not wait for the norm of all stages.

    python benchmarks/optimistic_step.py [--rounds 4] [--iterations 6] [--json FILE] [--check]

Eight emulated stages with the op times of a 14B model (10 / 10.5 / 5.5 ms) and 24 microbatches.
*Waiting*: ``clip_grad_norm_`` after each iteration, under the plan with the least makespan. *Going
on*: ``clip_and_step``, under the plan with the least period. *Taken again*: the same, where every
second step goes on and has to be taken again, the most there can be. All take turns in the same
processes.

Simulated: iterations follow each other, and the first backward of each stage waits for the norm,
which is known a given time after the last op of any stage. *Least possible*: the planner's lower
bound for the period.

``--check`` exits 1 if the simulated period is more than 1.01 × the least possible, or if going on
is not faster than waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import monotonic

from ranks import run_ranks

from pipemorph.planning import (
    OpKind,
    Plan,
    PlannedSchedule,
    Policy,
    Problem,
    Route,
    Schedule,
    StageTimes,
    plan,
    problem_for,
)

STAGES, MICROBATCHES = 8, 24
TIMES_MS = (10.0, 10.5, 5.5)
NORM_MS = (0.0, 1.0, 5.0, 10.0, 20.0)
"""Times that the norm takes over the stages."""
WAITING, GOING_ON, AGAIN = "waiting", "going on", "taken again"
SETTLED, LIMIT = 20, 1.01
DEADLINE_SECONDS = 600.0


def problem(objective: str) -> Problem:
    """In seconds."""
    times = StageTimes(
        forward=TIMES_MS[0] / 1e3,
        backward_input=TIMES_MS[1] / 1e3,
        backward_weight=TIMES_MS[2] / 1e3,
    )
    found = problem_for(MICROBATCHES, [times] * STAGES, [0.0] * (STAGES - 1))
    return found.model_copy(update={"objective": objective})


def planned(objective: str) -> PlannedSchedule:
    return plan(problem(objective), Policy("pipemorph"))


def seconds_per_iteration(schedule: Schedule, norm: float, *, waits: bool) -> float:
    """Simulated, once many iterations have followed each other. ``norm``: seconds from the last op
    of any stage until all know the norm. ``waits``: before the next iteration, else before the next
    first backward."""
    forward, backward, weight = (each / 1e3 for each in TIMES_MS)
    length = {OpKind.F: forward, OpKind.B: backward, OpKind.W: weight, OpKind.BW: backward + weight}
    free, known, began = [0.0] * STAGES, 0.0, 0.0
    for _ in range(SETTLED):
        began = max(free)
        if waits:
            free = [known] * STAGES
        free = run_once(schedule, free, known, length)
        known = max(free) + norm
    return max(free) - began


def run_once(
    schedule: Schedule, free: Sequence[float], known: float, length: dict[OpKind, float]
) -> list[float]:
    """When each stage has ended an iteration that it may begin when it is ``free``."""
    now, at = list(free), [0] * STAGES
    ended: dict[tuple[bool, int, int], float] = {}
    left = sum(map(len, schedule.stages))
    while left:
        for stage, ops in enumerate(schedule.stages):
            while at[stage] < len(ops):
                kind, microbatch = ops[at[stage]]
                ready = 0.0
                forward = kind is OpKind.F
                source = stage - 1 if forward else stage + 1
                if kind is not OpKind.W and 0 <= source < STAGES:
                    found = ended.get((forward, source, microbatch))
                    if found is None:
                        break
                    ready = found
                if not forward:
                    ready = max(ready, known)
                now[stage] = max(now[stage], ready) + length[kind]
                if kind is not OpKind.W:
                    ended[forward, stage, microbatch] = now[stage]
                at[stage] += 1
                left -= 1
    return now


def plan_of(way: str) -> Plan:
    found = planned("makespan" if way == WAITING else "period")
    return found.to_plan(0, [Route.DIRECT] * (STAGES - 1))


def rank_main(rounds: int, iterations: int) -> None:
    """What every rank runs; rank 0 prints a line of JSON per measurement."""
    from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext

    context = TrainerContext.from_env()
    for _ in range(rounds):
        for way in (WAITING, GOING_ON, AGAIN):
            stage = EmulatedStage(*(each / 1e3 for each in TIMES_MS), message_bytes=1 << 16)
            times = []
            with Pipeline(stage, context=context, plan=plan_of(way)) as pipe:
                for index in range(iterations + 3):
                    began = monotonic()
                    pipe.step()
                    if way == WAITING:
                        pipe.clip_grad_norm_(1.0)
                    else:
                        # No norm is below 0.
                        taken_again = way == AGAIN and index % 2
                        pipe.clip_and_step(None, -1.0 if taken_again else 1.0)
                    times.append(monotonic() - began)
                pipe.settle()
            if context.rank == 0:
                # Shapes, and the steps that wait to see whether gradients are clipped.
                print(json.dumps([way, times[3:]]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=6, help="per way and round; even")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rounds, args.iterations)
        return 0
    makespan, period = planned("makespan"), planned("period")
    least = period.lower_bound
    print(
        f"{STAGES} emulated stages, {MICROBATCHES} microbatches, {TIMES_MS} ms; load "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    print(f"least possible period: {least * 1e3:.1f} ms")
    print("| the norm takes | waiting, simulated | going on, simulated | of the least possible |")
    print("|---:|---:|---:|---:|")
    simulated = {}
    for norm_ms in NORM_MS:
        waits, goes = (
            seconds_per_iteration(found.schedule, norm_ms / 1e3, waits=waits)
            for found, waits in ((makespan, True), (period, False))
        )
        simulated[norm_ms] = waits, goes
        print(
            f"| {norm_ms:g} ms | {waits * 1e3:.1f} ms | {goes * 1e3:.1f} ms | {goes / least:.3f}× |"
        )
    flags = ["--rounds", str(args.rounds), "--iterations", str(args.iterations)]
    times: dict[str, list[float]] = {}
    for line in run_ranks(__file__, STAGES, flags, DEADLINE_SECONDS).splitlines():
        way, found = json.loads(line)
        # Pairs, since every second step is another.
        times.setdefault(way, []).extend(
            sum(found[k : k + 2]) / 2 for k in range(0, len(found) - 1, 2)
        )
    measured = {way: median(each) for way, each in times.items()}
    print("| way | measured |")
    print("|---|---:|")
    for way, seconds in measured.items():
        print(f"| {way} | {seconds * 1e3:.0f} ms |")
    share = simulated[1.0][1] / least
    faster = measured[WAITING] / measured[GOING_ON]
    kept = [
        (share <= LIMIT, f"simulated {share:.3f}× the least possible period (≤ {LIMIT}×)"),
        (faster > 1, f"going on is {faster:.3f}× faster than waiting"),
    ]
    for holds, text in kept:
        print(f"{'ok ' if holds else 'NO '} {text}")
    if args.json:
        args.json.write_text(
            json.dumps({"least": least, "simulated": simulated, "measured": times}, indent=1)
        )
    return 1 if args.check and not all(holds for holds, _ in kept) else 0


if __name__ == "__main__":
    sys.exit(main())
