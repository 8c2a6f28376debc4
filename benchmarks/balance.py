"""Iteration time of batches that vary in work: known and balanced against neither.

One command: ``python benchmarks/balance.py [--json FILE]``. Four replicas of four equal stages,
eight microbatches each, with the memory of 1F1B. Costs are lognormal, so that op times vary over
microbatches with a coefficient of variation of 0.4, as in a job whose sequence lengths vary; one
sample per microbatch, or four that are packed. A batch of 1F1B, and of a plan for equal
microbatches, has its samples dealt at random; then each part is added: the order of microbatches
in each replica, the deal of samples, and both. An iteration is that of the last replica.

All of them are simulated. Then sixteen ranks with emulated stages, whose mean op takes 50 ms, run
some of the batches, the variants of each in turn.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import NamedTuple

from goals import finish_benchmark, make_parser
from ranks import run_ranks

from pipemorph.planning import (
    Dispatch,
    Link,
    Plan,
    Policy,
    Problem,
    Route,
    StageTimes,
    plan,
    predict,
)
from pipemorph.planning.search.microbatch_order import order_microbatches
from pipemorph_trainer.data import balance

REPLICAS, STAGES, MICROBATCHES = 4, 4, 8
VARIATION = 0.4
BATCHES = 200
GOAL = 1.25
EMULATED_BATCHES, OP_SECONDS, DEADLINE_SECONDS = 16, 0.05, 300
"""Number of emulated batches, after one that does not count."""
SAMPLES = (1, 4)
"""Samples per microbatch."""
ROWS = ("1F1B", "random deal", "order known", "samples balanced", "both")
EMULATED_ROWS = ROWS[1:]


class Batch(NamedTuple):
    """Costs of a batch's microbatches by replica, in units of the mean: of samples dealt at random,
    of balanced ones in any order, and in the planned order."""

    drawn: list[list[float]]
    any_order: list[list[float]]
    dealt: list[list[float]]


def make_problem() -> Problem:
    """Equal stages whose ops take a third each for a microbatch of cost 1."""
    third = 1 / 3
    stages = tuple(
        StageTimes(
            forward=third, backward_input=third, backward_weight=third, in_flight_limit=STAGES - i
        )
        for i in range(STAGES)
    )
    return Problem(microbatches=MICROBATCHES, stages=stages, links=(Link(),) * (STAGES - 1))


def draw_batch(problem: Problem, each: int, rng: random.Random) -> tuple[Batch, float]:
    """Draw the costs of samples, ``each`` per microbatch, and deal them. Returns the batch, and the
    processor time of the balanced deal, milliseconds."""
    # The sum of `each` samples has the wanted variation.
    sigma = log(1 + each * VARIATION**2) ** 0.5
    costs = [exp(rng.gauss(0, sigma)) for _ in range(REPLICAS * MICROBATCHES * each)]
    unit = sum(costs) / (REPLICAS * MICROBATCHES)
    costs = [cost / unit for cost in costs]
    shuffled = rng.sample(costs, len(costs))
    sums = [sum(shuffled[k : k + each]) for k in range(0, len(costs), each)]
    drawn = [sums[r * MICROBATCHES :][:MICROBATCHES] for r in range(REPLICAS)]
    began = process_time()
    dealt = [list(row) for row in balance(costs, REPLICAS, MICROBATCHES, problem=problem).costs]
    took = process_time() - began
    # The deal has an order already: without it, the microbatches of a replica are in any.
    return Batch(drawn, [rng.sample(row, len(row)) for row in dealt], dealt), 1e3 * took


def simulate_batch(problem: Problem, batch: Batch) -> list[float]:
    """Iterations of a batch, by row, in units of a stage's time for a microbatch of mean cost."""
    runs, rule = make_plan(problem), plan(problem, Policy.ONE_F_ONE_B)

    def simulate_rows(
        rows: Sequence[Sequence[float]], *, by_rule: bool = False, ordered: bool = False
    ) -> float:
        found = []
        for factors in rows:
            varied = problem.model_copy(update={"microbatch_costs": (tuple(factors),)})
            order = order_microbatches(problem, runs, factors) if ordered else ()
            schedule = rule.schedule if by_rule else runs.schedule
            found.append(predict(schedule, varied.with_microbatch_order(order)))
        return max(found)

    return [
        simulate_rows(batch.drawn, by_rule=True),
        simulate_rows(batch.drawn),
        simulate_rows(batch.drawn, ordered=True),
        simulate_rows(batch.any_order),
        simulate_rows(batch.dealt),
    ]


def make_plan(problem: Problem) -> Plan:
    """Plan for equal microbatches."""
    return plan(problem).to_plan(0, [Route.DIRECT] * (STAGES - 1), Dispatch.STATIC)


def rank_main(file: str) -> None:
    """Program of an emulated rank; rank 0 prints the seconds of each batch by row as JSON."""
    from pipemorph_trainer import EmulatedStage, Options, Pipeline, TrainerContext

    context = TrainerContext.from_env()
    # Replicas wait for each other in the reduction of gradients, as real ones do.
    stage = EmulatedStage(
        OP_SECONDS, OP_SECONDS, OP_SECONDS, message_bytes=1024, gradient_bytes=4096
    )
    seconds: list[list[float]] = []
    with Pipeline(
        stage, context=context, stages=STAGES, plan=make_plan(make_problem()),
        options=Options(reorder="sums"),
    ) as pipe:  # fmt: skip
        for batch in (Batch(*each) for each in json.loads(Path(file).read_text())):
            seconds.append([])
            for rows, ordered in (
                (batch.drawn, False), (batch.drawn, True), (batch.any_order, False),
                (batch.dealt, True),
            ):  # fmt: skip
                work = rows[pipe.coordinate.replica]
                pipe.clip_grad_norm_(1.0)
                began = perf_counter()
                pipe.step(work=work, costs=work if ordered else None)
                pipe.clip_grad_norm_(1.0)
                seconds[-1].append(perf_counter() - began)
    if context.rank == 0:
        print(json.dumps(seconds))


def run_emulated(batches: Sequence[Batch]) -> list[list[float]]:
    """Run batches with emulated stages. Returns the seconds of an iteration by batch and row."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(batches, file)
        file.flush()
        printed = run_ranks(__file__, STAGES * REPLICAS, [file.name], DEADLINE_SECONDS)
    seconds: list[list[float]] = json.loads(printed.splitlines()[-1])
    return seconds


def print_heads(rows: Sequence[str]) -> None:
    """Print the head of a table whose columns are ``rows`` of a batch."""
    heads = ("samples per microbatch", *rows)
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")


def print_row(name: str, values: Sequence[float], base: float, unit: str = "") -> None:
    """Print a row of a table: ``values``, and how many times faster than ``base`` each is."""
    cells = [f"{value:.2f}{unit} ({base / value:.2f}×)" for value in values]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2])
        return 0
    args = make_parser(__doc__).parse_args()
    problem, figures = make_problem(), dict[str, dict[str, float]]()
    equal = plan(problem).makespan
    print_heads((*ROWS, "equal costs"))
    deals: list[str] = []
    batches: dict[int, list[Batch]] = {}
    simulated: dict[int, list[list[float]]] = {}
    for each in SAMPLES:
        rng = random.Random(each)
        dealt = [draw_batch(problem, each, rng) for _ in range(BATCHES)]
        batches[each] = [batch for batch, _ in dealt]
        simulated[each] = [simulate_batch(problem, batch) for batch in batches[each]]
        means = list(map(fmean, zip(*simulated[each], strict=True)))
        figures[f"simulated, {each}"] = dict(zip(ROWS, means, strict=True))
        print_row(str(each), (*means, equal), means[1])
        deals.append(f"{fmean(took for _, took in dealt):.1f} ms")
    print(f"\nprocessor time of a deal: {', '.join(deals)}\n")
    print_heads(EMULATED_ROWS)
    counted = slice(1, EMULATED_BATCHES + 1)
    for each in SAMPLES:
        measured = run_emulated(batches[each][: counted.stop])[counted]
        expected = simulated[each][counted]
        means = list(map(fmean, zip(*measured, strict=True)))
        figures[f"emulated, {each}"] = dict(zip(EMULATED_ROWS, means, strict=True))
        print_row(f"{each}, emulated", means, means[0], " s")
        _, *means = (3 * OP_SECONDS * fmean(row) for row in zip(*expected, strict=True))
        print_row(f"{each}, simulated", means, means[0], " s")
    goals = []
    for name, row in figures.items():
        gain = row["random deal"] / row["both"]
        goals.append((f"{name} per microbatch: {gain:.2f}× faster; goal {GOAL}×", gain >= GOAL))
    return 0 if finish_benchmark(goals, args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
