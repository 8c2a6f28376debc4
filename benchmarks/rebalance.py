"""Microbatches moved away from a replica with a slow device, against equal numbers.

One command: ``python benchmarks/rebalance.py [--json FILE]``. Four replicas of two emulated stages;
one device takes twice as long in the middle third of the run. The same job runs with
``adaptation.rebalance`` off and on. *Best deal*: simulated time of the best numbers of microbatches
over that of equal ones, times the measured undisturbed iteration. The share of the gain is that of
the best deal, over the iterations once the plan is in effect.

Then a small model, 2 stages × 2 replicas, trains on the same samples with both; its losses are
compared.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

from goals import finish_benchmark, make_parser

from pipemorph.planning import Link, Problem, StageTimes, plan
from pipemorph.reproduce.emulated_runs import run_job

STAGES, REPLICAS, EACH = 2, 4, 8
OP_MS, FACTOR, SLOW_REPLICA = 30.0, 2.0, 1
SLOW_FROM, SLOW_TO, ITERATIONS = 10, 26, 40
LEAST_SHARE, MOST_ITERATIONS, TOLERANCE = 0.85, 3, 1e-5
"""Goals: share of the best deal's gain; iterations from the event that names the slow stage to the
first under the new plan; and the largest relative difference of losses."""
REAL_STAGES, REAL_REPLICAS, REAL_EACH, REAL_OP_SECONDS = 2, 2, 8, 0.02


def make_manifest(*, rebalance: bool, real: bool) -> dict[str, Any]:
    """Make the job. ``real``: stages compute; else they are emulated."""
    stages, replicas, each = (
        (REAL_STAGES, REAL_REPLICAS, REAL_EACH) if real else (STAGES, REPLICAS, EACH)
    )
    slow = SLOW_REPLICA * stages
    trainer: dict[str, Any] = {"module": "pipemorph_trainer.examples.emulated"}
    if real:
        trainer = {"command": ["python", str(Path(__file__).resolve()), "--rank"]}
    spec: dict[str, Any] = {
        # The ranks of a replica have consecutive numbers.
        "parallelism": {
            "stages": stages, "replicas": replicas, "order": ["dp_replicate", "pp"],
        },
        "schedule": {"microbatches": each},
        "adaptation": {"rebalance": rebalance},
        "trainer": {**trainer, "iterations": ITERATIONS, "threads": 1},
        "faults": [{"device": slow, "slowdown": FACTOR,
                    "fromIteration": SLOW_FROM, "toIteration": SLOW_TO}],
    }  # fmt: skip
    if not real:
        times = {"forward": OP_MS, "backwardInput": OP_MS, "backwardWeight": OP_MS}
        spec["emulation"] = {"stageTimes": [times], "messageBytes": 4096}
    name = f"{'real' if real else 'emulated'}-{'on' if rebalance else 'off'}"
    return {
        "apiVersion": "pipemorph.io/v1alpha1", "kind": "PipeMorphJob",
        "metadata": {"name": name}, "spec": spec,
    }  # fmt: skip


def rank_main() -> None:
    """Program of a rank of the real job: microbatches by number, so that both runs have the same
    samples in each iteration."""
    import torch

    from pipemorph_trainer import Pipeline, TrainerContext

    class Stage(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            torch.manual_seed(number)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sleep(REAL_OP_SECONDS)
            out: torch.Tensor = x + self.layers(x)
            return out

    def draw(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
        return x, x.roll(1, 1)

    context = TrainerContext.from_env()
    torch.set_num_threads(1)
    stage = Stage(context.coordinate().stage)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with Pipeline(stage, context=context, loss_fn=torch.nn.functional.mse_loss) as pipe:
        for number in range(pipe.start_iteration, ITERATIONS):
            if context.job is not None and context.job.spec.adaptation.rebalance:
                pipe.step(microbatches=draw)
            else:
                # The same samples as a whole batch.
                first = (number * REAL_REPLICAS + pipe.coordinate.replica) * REAL_EACH
                rows = [draw(first + k) for k in range(REAL_EACH)]
                x, target = (torch.cat(each) for each in zip(*rows, strict=True))
                pipe.step(x, target=target)
            optimizer.step()
            optimizer.zero_grad()


def simulate_deals() -> tuple[float, float]:
    """Simulated seconds of an undisturbed iteration, and of one with a slow replica and the best
    numbers of microbatches."""

    def predict(microbatches: int, factor: float) -> float:
        op = OP_MS / 1e3
        fast = StageTimes(forward=op, backward_input=op, backward_weight=op)
        slow = StageTimes(
            forward=op * factor, backward_input=op * factor, backward_weight=op * factor
        )
        stages = (slow, *[fast] * (STAGES - 1))
        links = (Link(),) * (STAGES - 1)
        return plan(Problem(microbatches=microbatches, stages=stages, links=links)).makespan

    best = float("inf")
    for few in range(1, EACH + 1):
        others = REPLICAS * EACH - few
        most = -(-others // (REPLICAS - 1))
        best = min(best, max(predict(few, FACTOR), predict(most, 1.0)))
    return predict(EACH, 1.0), best


def summarize_report(report: dict[str, Any]) -> dict[str, Any]:
    """Return the iterations, changes of shares and events of a report."""
    seconds = {each["index"]: each["seconds"] for each in report["iterations"]}
    versions = {each["index"]: each["plan_version"] for each in report["iterations"]}
    changes = [
        {"applied": each["applied_at_iteration"], "shares": each["shares"], "kind": each["kind"]}
        for each in report["adaptations"]
    ]
    texts = [
        {"iteration": each["iteration"], "text": each["text"]}
        for each in report["events"]
        if "computes" in each["text"]
    ]
    return {"seconds": seconds, "versions": versions, "changes": changes, "events": texts,
            "losses": [each["loss"] for each in report["iterations"]]}  # fmt: skip


def compute_median(found: dict[str, Any], first: int, last: int) -> float:
    """Compute the median seconds of the iterations from ``first`` to before ``last``."""
    return float(median(found["seconds"][index] for index in range(first, last)))


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main()
        return 0
    args = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        off, on, real_off, real_on = (
            summarize_report(run_job(Path(folder), make_manifest(rebalance=rebalance, real=real)))
            for real in (False, True)
            for rebalance in (False, True)
        )
    even_nominal, best_nominal = simulate_deals()
    even = compute_median(off, 3, SLOW_FROM)
    slow = compute_median(off, SLOW_FROM + 1, SLOW_TO)
    best = even * best_nominal / even_nominal
    dealt = [c for c in on["changes"] if c["shares"] and c["applied"] is not None]
    back = [c for c in on["changes"] if not c["shares"] and c["applied"] is not None]
    began = dealt[0]["applied"] if dealt else SLOW_TO - 1
    named = [e["iteration"] for e in on["events"] if "times as long as its peers" in e["text"]]
    healthy = [e["iteration"] for e in on["events"] if "as fast as it should" in e["text"]]
    moved = compute_median(on, min(began + 1, SLOW_TO - 1), SLOW_TO)
    share = (slow - moved) / (slow - best)
    after = compute_median(on, ITERATIONS - 5, ITERATIONS)
    apart = max(
        abs(a - b) / abs(a) for a, b in zip(real_off["losses"], real_on["losses"], strict=True)
    )
    real_dealt = [c["shares"] for c in real_on["changes"] if c["shares"]]
    calm, late = compute_median(on, 3, SLOW_FROM), compute_median(off, ITERATIONS - 5, ITERATIONS)
    print("| iterations, s | undisturbed | one device twice as slow | afterwards |")
    print("|---|---|---|---|")
    print(f"| equal numbers | {even:.3f} | {slow:.3f} | {late:.3f} |")
    print(f"| `adaptation.rebalance` | {calm:.3f} | {moved:.3f} | {after:.3f} |")
    print(f"| best deal | | {best:.3f} | |")
    print(f"{slow / moved:.2f}× faster; {share:.0%} of the gain of the best deal")
    print(f"microbatches by replica: {dealt[0]['shares'] if dealt else 'equal'}")
    print(f"slow from iteration {SLOW_FROM}, named in {named[:1]}, plan in effect from {began}")
    until = back[-1]["applied"] if back else "never"
    print(f"slow until iteration {SLOW_TO}, named in {healthy[:1]}, equal numbers from {until}")
    print(f"small model: shares {real_dealt}, losses differ by at most {apart:.1e}")
    figures = {"even": even, "slow": slow, "moved": moved, "best": best, "share": share,
               "on": on, "off": off, "real_apart": apart, "real_shares": real_dealt}  # fmt: skip
    quick = bool(dealt and named) and dealt[0]["applied"] - named[0] <= MOST_ITERATIONS
    returns = bool(back and healthy) and back[-1]["applied"] - healthy[0] <= MOST_ITERATIONS
    goals = [
        (f"at least {LEAST_SHARE:.0%} of the gain of the best deal", share >= LEAST_SHARE),
        (f"within {MOST_ITERATIONS} iterations of being named", quick),
        (f"equal numbers within {MOST_ITERATIONS} iterations of being named healthy", returns),
        (f"losses of the small model equal within {TOLERANCE:g}, with unequal numbers",
         bool(real_dealt) and apart <= TOLERANCE),
    ]  # fmt: skip
    return 0 if finish_benchmark(goals, args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
