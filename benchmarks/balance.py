"""Iteration time of batches that vary in work: known and balanced against neither, simulated.

One command: ``python benchmarks/balance.py [--json FILE]``. Four replicas of four equal stages,
eight microbatches each, with the memory of 1F1B. Costs are lognormal, so that op times vary over
microbatches with a coefficient of variation of 0.4, as in a job whose sequence lengths vary; one
sample per microbatch, or four that are packed. A batch of 1F1B, and of a plan for equal
microbatches, has its samples dealt at random; then each part is added: the order of microbatches
in each replica, the deal of samples, and both. An iteration is that of the last replica.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from math import exp, log
from statistics import fmean
from time import process_time

from goals import finish_benchmark, make_parser

from pipemorph.planning import Dispatch, Link, Policy, Problem, Route, StageTimes, plan, predict
from pipemorph.planning.search.microbatch_order import order_microbatches
from pipemorph_trainer.data import balance

REPLICAS, STAGES, MICROBATCHES = 4, 4, 8
VARIATION = 0.4
BATCHES = 200
GOAL = 1.25
ROWS = ("1F1B", "random deal", "order known", "samples balanced", "both")


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


def compare_batch(problem: Problem, costs: Sequence[float], rng: random.Random) -> list[float]:
    """Iterations of one batch, by row, in units of a stage's time for a microbatch of mean cost;
    and the processor time of its deal, milliseconds."""
    planned, rule = plan(problem), plan(problem, Policy.ONE_F_ONE_B)
    runs = planned.to_plan(0, [Route.DIRECT] * (STAGES - 1), Dispatch.STATIC)
    unit = sum(costs) / (REPLICAS * MICROBATCHES)

    def simulate_rows(
        rows: Sequence[Sequence[float]], *, by_rule: bool = False, ordered: bool = False
    ) -> float:
        found = []
        for row in rows:
            factors = tuple(cost / unit for cost in row)
            varied = problem.model_copy(update={"microbatch_costs": (factors,)})
            order = order_microbatches(problem, runs, factors) if ordered else ()
            schedule = rule.schedule if by_rule else runs.schedule
            found.append(predict(schedule, varied.with_microbatch_order(order)))
        return max(found)

    shuffled = list(costs)
    rng.shuffle(shuffled)
    each = len(costs) // (REPLICAS * MICROBATCHES)
    sums = [sum(shuffled[k : k + each]) for k in range(0, len(costs), each)]
    drawn = [sums[r * MICROBATCHES :][:MICROBATCHES] for r in range(REPLICAS)]
    began = process_time()
    dealt = [list(row) for row in balance(costs, REPLICAS, MICROBATCHES, problem=problem).costs]
    took = process_time() - began
    # The deal has an order already: without it, the microbatches of a replica are in any.
    any_order = [rng.sample(row, len(row)) for row in dealt]
    return [
        simulate_rows(drawn, by_rule=True),
        simulate_rows(drawn),
        simulate_rows(drawn, ordered=True),
        simulate_rows(any_order),
        simulate_rows(dealt),
        1e3 * took,
    ]


def main() -> int:
    args = make_parser(__doc__).parse_args()
    problem, figures = make_problem(), dict[int, dict[str, float]]()
    equal = plan(problem).makespan
    heads = ("samples per microbatch", *ROWS, "equal costs", "ms of a deal")
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for each in (1, 4):
        rng = random.Random(each)
        # The sum of `each` samples has the wanted variation.
        sigma = log(1 + each * VARIATION**2) ** 0.5
        found = [
            compare_batch(
                problem,
                [exp(rng.gauss(0, sigma)) for _ in range(REPLICAS * MICROBATCHES * each)],
                rng,
            )
            for _ in range(BATCHES)
        ]
        *means, took = map(fmean, zip(*found, strict=True))
        row = figures[each] = dict(zip(ROWS, means, strict=True))
        cells = [
            f"{value:.2f} ({row['random deal'] / value:.2f}×)" for value in (*row.values(), equal)
        ]
        print(f"| {each} | {' | '.join(cells)} | {took:.1f} |")
    goals = [
        (
            f"{each} per microbatch: {row['random deal'] / row['both']:.2f}× faster; goal {GOAL}×",
            row["random deal"] / row["both"] >= GOAL,
        )
        for each, row in figures.items()
    ]
    return 0 if finish_benchmark(goals, args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
