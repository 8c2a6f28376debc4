"""Spread of iteration times with pauses of Python's garbage collector, and without them inside.

One command: ``python benchmarks/pauses.py [--json FILE]``. Four stages whose ops wait 5 ms and make
objects in cycles, of which those of the newest microbatches stay alive, as in a script that caches.
Once with ``Options(gc="off")`` and once with ``auto``; the iterations before the collector has
moved do not count, nor as many of the other run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import deque
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any

from goals import finish_benchmark, make_parser
from ranks import run_ranks

STAGES, MICROBATCHES, OP_SECONDS = 4, 8, 0.005
OBJECTS, ALIVE = 5000, 48
"""Objects that each forward makes, and microbatches whose objects stay alive."""
SETTLED = 14
"""Iterations after which the collector has moved."""
DEADLINE_SECONDS = 600


class Cycle:
    """Object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


def rank_main(choice: Any, iterations: int) -> None:
    """Program of a rank. Rank 0 prints a line of JSON: seconds of each iteration, and the longest
    pauses of a rank inside them and between."""
    import torch
    import torch.distributed as dist

    from pipemorph_trainer import Options, Pipeline, TrainerContext

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.alive: deque[list[Cycle]] = deque(maxlen=ALIVE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.alive.append([Cycle() for _ in range(OBJECTS)])
            sleep(OP_SECONDS)
            out: torch.Tensor = self.linear(x)
            return out

    context = TrainerContext.from_env()
    torch.set_num_threads(1)
    torch.manual_seed(context.rank)
    seconds: list[float] = []
    inside, between = [], []
    with Pipeline(
        Stage(), context=context, loss_fn=torch.nn.functional.mse_loss, microbatches=MICROBATCHES,
        options=Options(gc=choice),
    ) as pipe:  # fmt: skip
        ending = pipe._collector.end_iteration

        def record_pauses() -> Any:
            found = ending()
            inside.append(found.inside)
            between.append(found.between)
            return found

        pipe._collector.end_iteration = record_pauses  # type: ignore[method-assign]
        x, target = torch.randn(2, MICROBATCHES, 8).unbind()
        began = perf_counter()
        for _ in range(SETTLED + iterations):
            pipe.step(x, target=target)
            pipe.clip_grad_norm_(1.0)
            began, before = perf_counter(), began
            seconds.append(began - before)
        moved = gc.get_threshold()[0] == 0
        longest = torch.tensor([inside[SETTLED:], between[SETTLED:]])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    if context.rank == 0:
        print(json.dumps([moved, seconds[SETTLED:], *longest.tolist()]))


def summarize_run(choice: str, iterations: int) -> dict[str, Any]:
    """Run the job; return its figures, times in milliseconds."""
    printed = run_ranks(__file__, STAGES, [choice, str(iterations)], DEADLINE_SECONDS)
    moved, seconds, inside, between = json.loads(printed.splitlines()[-1])
    return {
        "moved": moved,
        "median": 1e3 * median(seconds),
        "p95": 1e3 * quantiles(seconds, n=20)[-1],
        "mean": 1e3 * sum(seconds) / len(seconds),
        "inside": 100 * sum(inside) / sum(seconds),
        "between": 100 * sum(between) / sum(seconds),
    }


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = make_parser(__doc__)
    parser.add_argument("--iterations", type=int, default=100, help=argparse.SUPPRESS)
    args = parser.parse_args()
    figures = {choice: summarize_run(choice, args.iterations) for choice in ("off", "auto")}
    print("| gc | median, ms | mean, ms | p95, ms | pauses inside, % | pauses between, % |")
    print("|---|---|---|---|---|---|")
    for choice, row in figures.items():
        cells = (f"{row[name]:.1f}" for name in ("median", "mean", "p95", "inside", "between"))
        print(f"| `{choice}` | {' | '.join(cells)} |")
    off, auto = figures["off"], figures["auto"]
    goals = [
        ("gc=auto: the collector has moved, and no pause is inside an iteration",
         auto["moved"] and auto["inside"] == 0),
        ("gc=auto: p95 over the median is smaller", auto["p95"] / auto["median"]
         < off["p95"] / off["median"]),
        ("gc=auto: the mean iteration is shorter", auto["mean"] < off["mean"]),
    ]  # fmt: skip
    return 0 if finish_benchmark(goals, args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
