"""Processor time of the main thread per op, beyond the op itself.

One command: ``python benchmarks/op_cost.py [--json FILE]``. Two stages, each a linear layer of 8
values, run 64 microbatches under zero-bubble, so that the ops cost next to nothing. The processor
time of the main thread in an iteration (``CLOCK_THREAD_CPUTIME_ID``), less that of the forwards and
backwards themselves, is divided by the number of ops: the rest is messages, waits, telemetry and
the boundary between two iterations. Waiting uses no processor time, so other load on the machine
changes this figure less than a wall-clock time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import thread_time
from typing import Any

from goals import make_parser, write_figures
from ranks import run_ranks

STAGES, MICROBATCHES, WIDTH, WARM_UP = 2, 64, 8, 3
ROUTES = ("direct", "delegated")
DEADLINE_SECONDS = 300


def rank_main(route: str, iterations: int) -> None:
    """Program of a rank. Rank 0 prints a line of JSON: microseconds per op on each rank."""
    import torch
    import torch.distributed as dist

    from pipemorph_trainer import Options, Pipeline, TrainerContext

    context = TrainerContext.from_env()
    torch.set_num_threads(1)
    torch.manual_seed(context.rank)
    pipe = Pipeline(
        torch.nn.Linear(WIDTH, WIDTH), context=context, policy="zero-bubble",
        loss_fn=torch.nn.functional.mse_loss, microbatches=MICROBATCHES,
        options=Options(route=route),
    )  # fmt: skip
    in_ops = [0.0]

    def time_op(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = thread_time()
        found = run(*args, **kwargs)
        in_ops[0] += thread_time() - began
        return found

    runner: Any = next(each for each in gc.get_objects() if type(each).__name__ == "ModuleRunner")
    for name in ("run_forward", "backward_input", "backward_weight", "run_fused_backward"):
        setattr(runner, name, partial(time_op, getattr(runner, name)))
    x, target = torch.randn(2, MICROBATCHES, WIDTH).unbind()
    costs = []
    for _ in range(WARM_UP + iterations):
        in_ops[0], began = 0.0, thread_time()
        pipe.step(x, target=target)
        costs.append(thread_time() - began - in_ops[0])
    found = torch.zeros(STAGES, dtype=torch.float64)
    found[context.rank] = statistics.median(costs[WARM_UP:]) / (3 * MICROBATCHES) * 1e6
    dist.all_reduce(found)
    pipe.close()
    if context.rank == 0:
        print(json.dumps(found.tolist()), flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30, help="per route and round")
    parser.add_argument("--rank", choices=ROUTES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, args.iterations)
        return 0
    found: dict[str, list[float]] = {route: [] for route in ROUTES}
    """Mean over ranks, in each round."""
    for _ in range(args.rounds):
        for route in ROUTES:
            flags = [route, "--iterations", str(args.iterations)]
            line = run_ranks(__file__, STAGES, flags, DEADLINE_SECONDS)
            found[route].append(statistics.fmean(json.loads(line)))
    print(
        f"processor time of the main thread per op beyond the op, µs; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; medians of {args.rounds} rounds\n"
        "| route | µs per op | spread |\n|---|---:|---:|"
    )
    for route, costs in found.items():
        print(f"| {route} | {statistics.median(costs):.0f} | {min(costs):.0f}–{max(costs):.0f} |")
    write_figures(found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
