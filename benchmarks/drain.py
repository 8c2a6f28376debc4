"""What of a gradient reduction the drain hides: measured beside what the simulator says it cannot.

    python benchmarks/drain.py [--quick] [--json FILE] [--check]

Emulated stages in 8 local processes, 4 stages of 2 replicas: real collectives, of which a fault
trace lets each take as long as on a slow network. A reduction takes half, one and two drains: the
time from the end of the first stage to the end of the last. *Exposed* is the time from the end of
the last op of any rank to the end of the last reduction, median of the iterations.

The simulator is told what follows the last op of a stage: of buckets that its last op writes one
after another, what is left of the reduction when it ends. ``after the drain`` is a reduction that
begins when the ops of all ranks have ended.

Rows with HSDP have 16 processes, 4 stages × 2 replicas × 2 shards: modules that sleep, sharded by
``fully_shard``. FSDP reduces over the shards once, after the last op, and only then is there
something to send to the other replicas. So all of a reduction follows the last op, after what FSDP
took (as measured, that of the last rank to come), and the simulator is told so.

``--check`` exits 1 if more than 1.1 × of what cannot be hidden is exposed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from time import time
from typing import Any, NamedTuple

from ranks import run_ranks

from pipemorph.planning import Link, Policy, Problem, Route, Schedule, StageTimes, plan, simulate
from pipemorph.planning.ir import OpKind

STAGES, REPLICAS, SHARDS, MICROBATCHES = 4, 2, 2, 8
OP_SECONDS = 0.02
GRADIENT_BYTES = 1 << 16
WARM_UP = 3
LIMIT = 1.1
DEADLINE_SECONDS = 300.0


class Case(NamedTuple):
    """``drains``: how long a reduction takes. ``late``: it begins when all ops have ended.
    ``sharded``: the stages are, by FSDP."""

    policy: str
    drains: float
    late: bool
    iterations: int
    stages: int = STAGES
    sharded: bool = False

    @property
    def ranks(self) -> int:
        return self.stages * REPLICAS * (SHARDS if self.sharded else 1)


def problem(stages: int, reductions: list[float] | None = None) -> Problem:
    """Seconds. ``reductions``: what follows the last op of each stage."""
    times = tuple(
        StageTimes(
            forward=OP_SECONDS, backward_input=OP_SECONDS, backward_weight=OP_SECONDS,
            reduction=reductions[i] if reductions else None,
        )
        for i in range(stages)
    )  # fmt: skip
    return Problem(microbatches=MICROBATCHES, stages=times, links=(Link(),) * (stages - 1))


def schedule_of(policy: str, stages: int = STAGES) -> Schedule:
    return plan(problem(stages), Policy(policy)).schedule


def drain_of(schedule: Schedule) -> float:
    ends = [ops[-1].end for ops in simulate(schedule, problem(schedule.stage_count)).stages]
    return max(ends) - min(ends)


def left(reduction: float, writes: float, buckets: int) -> float:
    """What is left of a reduction at the end of an op that writes its equal ``buckets`` one after
    another in ``writes`` seconds."""
    each, sent = reduction / buckets, 0.0
    for i in range(buckets):
        sent = max(sent, (i + 1) * writes / buckets) + each
    return sent - writes


def cannot_be_hidden(schedule: Schedule, reduction: float, buckets: int) -> float:
    """What the simulator says of reductions of this length on all stages. ``buckets``: that the
    last op writes; 0: they follow it."""
    times = {OpKind.W: OP_SECONDS, OpKind.BW: 2 * OP_SECONDS}
    tails = [
        left(reduction, times[ops[-1].kind], buckets) if buckets else reduction
        for ops in schedule.stages
    ]
    return simulate(schedule, problem(schedule.stage_count, tails)).exposed_reduction


# --- a rank ---------------------------------------------------------------------------------


def stage_of(case: Case) -> tuple[Any, int, dict[str, Any], tuple[Any, ...]]:
    """This rank's stage, bytes of its gradients, arguments of the pipeline, and a batch."""
    if not case.sharded:
        from pipemorph_trainer import EmulatedStage

        stage = EmulatedStage(
            OP_SECONDS, OP_SECONDS, OP_SECONDS, message_bytes=4096, gradient_bytes=GRADIENT_BYTES
        )
        return stage, GRADIENT_BYTES, {"stages": case.stages, "policy": case.policy}, ()
    import sharded_sleeper as sleeper

    sharded, mesh = sleeper.build((case.stages, REPLICAS, SHARDS), OP_SECONDS)
    planned = plan(problem(case.stages), Policy(case.policy))
    first = planned.to_plan(0, (Route.DIRECT,) * (case.stages - 1))
    options = {"mesh": mesh, "loss_fn": sleeper.loss_fn, "plan": first}
    return sharded, sleeper.gradient_bytes(sharded), options, (sleeper.batch(MICROBATCHES),)


class Found(NamedTuple):
    """``exposed``: seconds, by iteration. ``shards``: what FSDP's reduction over shards took."""

    exposed: list[float]
    shards: list[float]


def exposed(context: Any, case: Case) -> Found:
    """Runs one rank."""
    import torch.distributed as dist

    from pipemorph.api.sections.faults import Fault
    from pipemorph_trainer import Pipeline

    schedule = schedule_of(case.policy, case.stages)
    stage, nbytes, options, batch = stage_of(case)
    rate = nbytes * 8 / (case.drains * drain_of(schedule)) / 1e6
    ops, own, ends = [], [], []
    with Pipeline(
        stage, context=context, microbatches=MICROBATCHES, deadline_seconds=DEADLINE_SECONDS / 2,
        faults=[
            Fault(reduction=i, bandwidth_mbps=rate, from_iteration=0)
            for i in range(case.stages)
        ],
        **options,
    ) as pipe:  # fmt: skip
        iterations: Any = pipe._parts.iterations
        reducer: Any = iterations._reducer
        control = pipe._parts.world.control
        ended, finished, shards = reducer.end_last_op, reducer.finish, iterations._reduce_shards
        if case.late and not case.sharded:
            reducer.begin_last_op = lambda kind: None
            ended = reducer._clock.end_ops

        def end_last_op() -> None:
            ops.append(time())
            ended()

        def reduce_shards(iteration: int) -> None:
            if case.late:
                dist.barrier(control)
            began = time()
            shards(iteration)
            own.append(time() - began)

        def finish() -> list[float]:
            found: list[float] = finished()
            ends.append(time())
            return found

        reducer.end_last_op, reducer.finish = end_last_op, finish
        iterations._reduce_shards = reduce_shards
        for _ in range(case.iterations + WARM_UP):
            pipe.step(*batch, target=batch[0] if batch else None)
        if case.sharded and case.policy != "1f1b" and pipe.split != "module":
            raise RuntimeError(f"the stage was to be split by its modules; it is {pipe.split}")
        everyone: list[Any] = [None] * context.world_size
        dist.all_gather_object(everyone, list(zip(ops, own, ends, strict=True)), group=control)
    rows = list(zip(*everyone, strict=True))[WARM_UP:]
    return Found(
        [max(e for *_, e in row) - max(o for o, *_ in row) for row in rows],
        [of_last_stage(row) for row in rows],
    )


def of_last_stage(row: Any) -> float:
    """What FSDP took on the stage that ended last, of its ranks that which came last."""
    ranks = REPLICAS * SHARDS
    last = max(range(len(row)), key=lambda rank: row[rank][0]) // ranks * ranks
    return min(seconds for _, seconds, _ in row[last : last + ranks])


# --- the table ------------------------------------------------------------------------------


def measure(case: Case) -> tuple[float, float]:
    """Exposed seconds, and those of FSDP; medians."""
    flags = (str(int(flag)) for flag in (case.late, case.sharded))
    arguments = [case.policy, str(case.drains), str(case.iterations), *flags]
    out = run_ranks(__file__, case.ranks, arguments, DEADLINE_SECONDS)
    found = Found(*json.loads(out.splitlines()[-1]))
    return median(found.exposed), median(found.shards)


def compare(case: Case) -> dict[str, Any]:
    """One row, in milliseconds."""
    from pipemorph_trainer.executor.stages.emulated import GRADIENT_PARTS

    schedule = schedule_of(case.policy)
    drain = drain_of(schedule)
    (found, shards), (late, _) = measure(case), measure(case._replace(late=True))
    if case.sharded:
        least = cannot_be_hidden(schedule, case.drains * drain + shards, 0)
    else:
        least = cannot_be_hidden(schedule, case.drains * drain, GRADIENT_PARTS)
    return {
        "policy": case.policy,
        "sharded": case.sharded,
        "drain_ms": round(drain * 1e3, 1),
        "reduction_ms": round(case.drains * drain * 1e3, 1),
        "cannot_be_hidden_ms": round(least * 1e3, 1),
        "exposed_ms": round(found * 1e3, 1),
        "after_the_drain_ms": round(late * 1e3, 1),
        "shards_ms": round(shards * 1e3, 1) if case.sharded else None,
        "ratio": round(found / least, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one policy, fewer iterations")
    parser.add_argument("--sharded", action="store_true", help="only the rows with HSDP")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows = []
    print("EMULATED: stages wait instead of computing, a fault trace slows the reductions")
    print("| policy | drain | reduction | cannot be hidden | exposed | ratio | after the drain |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for sharded in (True,) if args.sharded else (False, True):
        for policy in ("1f1b",) if args.quick else ("1f1b", "zero-bubble"):
            for drains in (0.5, 1.0) if sharded else (0.5, 1.0, 2.0):
                count = 5 if args.quick else 8 if sharded else 15
                row = compare(Case(policy, drains, False, count, sharded=sharded))
                rows.append(row)
                print(
                    f"| {policy}{', HSDP' if sharded else ''} | {row['drain_ms']:.0f} ms "
                    f"| {row['reduction_ms']:.0f} ms | {row['cannot_be_hidden_ms']:.0f} ms "
                    f"| {row['exposed_ms']:.0f} ms | {row['ratio']:.2f} "
                    f"| {row['after_the_drain_ms']:.0f} ms |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"emulated": True, "rows": rows}, indent=1))
    worst = max(row["ratio"] for row in rows)
    holds = worst <= LIMIT
    print(f"{'ok' if holds else 'NO'} at most {LIMIT} × of what cannot be hidden is exposed")
    return 0 if holds or not args.check else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        from pipemorph_trainer import TrainerContext

        policy, drains, iterations, late, sharded = sys.argv[2:]
        case = Case(
            policy, float(drains), bool(int(late)), int(iterations), sharded=bool(int(sharded))
        )
        print(json.dumps(exposed(TrainerContext.from_env(), case)))
    else:
        sys.exit(main())
