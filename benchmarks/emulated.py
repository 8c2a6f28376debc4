"""Iteration time under a slow last link, measured against simulated (emulated stages).

One command: ``python benchmarks/emulated.py [--json FILE] [--rounds N]``. Eight emulated
stages with the op times of a 14B model (10 / 10.5 / 5.5 ms) and 24 microbatches run the plans
of four policies for 0, 30 and 60 ms on the last link. The ranks get their plans directly;
``benchmarks/slow_link.py`` shows how the controller finds them. Every rank waits for the gradient
norm of all stages after each iteration, except in two variants without this barrier. In one
variant the last link is not delayed but narrow: 2.5 Gb/s for messages of 16 MB, each of which
occupies it for 51.2 ms.

All variants run in the same processes, in rounds, so that a disturbance of the machine affects
all of them. Zero-bubble runs on two kinds of direct route: with one queue per pair of ranks, a
send waits for the neighbour's sends, as on the NCCL stream that torch.distributed gives a pair
of ranks, and in the published baseline; with one queue per direction it does better.

There are two simulated times. *Nominal*: the op times above and a network that costs only the
delay. *Measured costs*: op, hop and boundary times as traced in the undisturbed zero-bubble
iterations of this run (``calibrate.py``), from which all other cells are predicted.
Exits 1 if a promise of docs/benchmarks.md does not hold.

``--saved N``: compares the seconds that N runs with drawn faults report as saved with the same
runs without adaptation. In every second run the plan outlives the last fault. Medians of each
state and plan count, so that a disturbance of one of two runs does not look like a saving.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml
from calibrate import ExecutorCosts, read_costs
from goals import finish_benchmark, make_parser, print_goals
from ranks import run_ranks

from pipemorph.planning import (
    Plan,
    Policy,
    Route,
    StageTimes,
    build_problem,
    compute_lower_bound,
    plan,
    predict,
    predict_period,
)
from pipemorph.planning.problem import transfer_ms

STAGES, MICROBATCHES = 8, 24
TIMES_MS = (10.0, 10.5, 5.5)
SLOW_LINK = STAGES - 2
DELAYS_MS = (0.0, 30.0, 60.0)
STANDS_FOR_BYTES = 16 << 20
GBPS, NARROW_BYTES = 2.5, 16_000_000
"""Rate of the narrow link, and size of its messages. The messages that are sent are smaller, and
their rate in proportion."""
IN_FLIGHT, RECOMPUTE_LIMIT = 8, 112
"""Limits of the limited variants: a microbatch's inputs take a sixteenth of its activations."""
EXAMPLES = Path(__file__).parents[1] / "examples"
RUN = 28
"""Iterations of a run with drawn faults."""
DEADLINE_SECONDS = 600


@dataclass(frozen=True)
class Variant:
    name: str
    policy: str
    delegated: bool
    adapted: bool
    """True if the plan is made for the delay; else it is made for none."""
    half_duplex: bool = False
    """True if both directions of a direct link share one queue."""
    barrier: bool = True
    """True if stages wait for each other between iterations; else the plan minimizes the period."""
    limited: bool = False
    """True if at most :data:`IN_FLIGHT` microbatches are in flight without recomputation."""
    recomputes: bool = False
    narrow: bool = False
    """True if the last link has :data:`GBPS`."""

    @property
    def delays_ms(self) -> tuple[float, ...]:
        return DELAYS_MS if self.barrier and not self.narrow else DELAYS_MS[:1]

    @property
    def transfer(self) -> float:
        """Seconds for which a message occupies the last link."""
        return transfer_ms(NARROW_BYTES, GBPS) / 1e3 if self.narrow else 0.0


BASELINE = "zero-bubble, queue per pair of ranks"
CALIBRATION = "zero-bubble, queue per direction"
LIMITED, RECOMPUTED = "pipemorph, 8 in flight", "pipemorph, 8 in flight, recomputation"
NARROW = f"pipemorph, {GBPS:g} Gb/s"
FREE_BASELINE, FREE = "zero-bubble, without barrier", "pipemorph, without barrier"
VARIANTS = (
    Variant("1F1B, queue per direction", "1f1b", delegated=False, adapted=False),
    Variant(BASELINE, "zero-bubble", delegated=False, adapted=False, half_duplex=True),
    Variant(CALIBRATION, "zero-bubble", delegated=False, adapted=False),
    Variant("zero-bubble, delegated", "zero-bubble", delegated=True, adapted=False),
    Variant("pipemorph", "pipemorph", delegated=True, adapted=True),
    Variant(LIMITED, "pipemorph", delegated=True, adapted=True, limited=True),
    Variant(RECOMPUTED, "pipemorph", delegated=True, adapted=True, limited=True, recomputes=True),
    Variant(NARROW, "pipemorph", delegated=True, adapted=True, narrow=True),
    Variant(FREE_BASELINE, "zero-bubble", delegated=False, adapted=False, barrier=False),
    Variant(FREE, "pipemorph", delegated=True, adapted=True, barrier=False),
)


@dataclass
class Row:
    variant: str
    delay_ms: float
    nominal: float
    """Simulated seconds with the nominal op times and no cost of a hop."""
    simulated: float
    """Simulated seconds with the costs measured in this run."""
    measured: float
    """Measured seconds, median over all rounds."""
    bound: float
    """Lower bound of any schedule in seconds, at the costs measured in this run."""
    iterations: list[float]
    warmup: list[int]


def make_plan(
    variant: Variant, delay_ms: float, costs: ExecutorCosts | None = None
) -> tuple[Plan, float, float, float]:
    """Plan of a variant under a delay, its simulated iteration time in seconds, nominal and with
    measured costs (0 without), and the bound of the latter."""
    forward, backward_input, backward_weight = (t / 1e3 for t in TIMES_MS)
    held = IN_FLIGHT if variant.limited else None
    stages = [
        StageTimes(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            in_flight_limit=held,
            recompute_limit=RECOMPUTE_LIMIT if variant.recomputes else None,
        )
    ] * STAGES
    disturbed = delay_ms > 0 or variant.narrow
    slow = Route.DELEGATED if variant.delegated and disturbed else Route.DIRECT
    routes = [slow if link == SLOW_LINK else Route.DIRECT for link in range(STAGES - 1)]
    delays = [delay_ms / 1e3 if link == SLOW_LINK else 0.0 for link in range(STAGES - 1)]
    links = {
        "transfers": [variant.transfer if link == SLOW_LINK else 0.0 for link in range(STAGES - 1)],
        "half_duplex": variant.half_duplex,
    }
    real = build_problem(MICROBATCHES, stages, delays, routes, **links)
    # The plan without knowledge of the link: pure latency, no shared queue.
    unaware = build_problem(MICROBATCHES, stages, [0.0] * (STAGES - 1))
    problem = real if variant.adapted and disturbed else unaware
    if not variant.barrier:
        problem = problem.model_copy(update={"objective": "period"})
    planned = plan(problem, Policy(variant.policy))
    ready = planned.to_plan(0, routes)
    seconds_of = predict if variant.barrier else predict_period
    as_measured = bound = 0.0
    if costs is not None:
        timed = StageTimes(
            forward=costs.ops["F"], backward_input=costs.ops["B"], backward_weight=costs.ops["W"]
        )
        hops = [delay + costs.hop for delay in delays]
        full = build_problem(MICROBATCHES, [timed] * STAGES, hops, routes, **links)
        as_measured = seconds_of(planned.schedule, full.with_plan_limits(ready)) + costs.boundary
        bound = compute_lower_bound(full) + costs.boundary
    return ready, seconds_of(planned.schedule, real.with_plan_limits(ready)), as_measured, bound


def rank_main(rounds: int, iterations: int, message_bytes: int, traces: Path) -> None:
    """Program of a rank; rank 0 prints a line of JSON per measurement."""
    from pipemorph.spec.sections.faults import Fault
    from pipemorph_trainer import EmulatedStage, Options, Pipeline, TrainerContext

    context = TrainerContext.from_env()
    stage = EmulatedStage(*(t / 1e3 for t in TIMES_MS), message_bytes, STANDS_FOR_BYTES)
    for round_ in range(rounds):
        for variant in VARIANTS:
            for delay_ms in variant.delays_ms:
                plan, *_ = make_plan(variant, delay_ms)
                calibrates = variant.name == CALIBRATION and not delay_ms
                folder = traces / str(round_) if calibrates else None
                if folder is not None:
                    folder.mkdir(exist_ok=True)
                faults = [Fault(link=SLOW_LINK, delay_ms=delay_ms)] if delay_ms else []
                if variant.narrow:
                    mbps = message_bytes * 8 / variant.transfer / 1e6
                    faults = [Fault(link=SLOW_LINK, bandwidth_mbps=mbps)]
                times = []
                duplex = "half" if variant.half_duplex else "full"
                with Pipeline(
                    stage, context=replace(context, trace_dir=folder), plan=plan,
                    options=Options(faults=faults, direct_duplex=duplex), recompute="auto",
                ) as pipe:  # fmt: skip
                    for _ in range(iterations + 1):
                        began = time.monotonic()
                        pipe.step()
                        if variant.barrier:
                            pipe.clip_grad_norm_(1.0)
                        times.append(time.monotonic() - began)
                if context.rank == 0:
                    # The first iteration exchanges shapes.
                    print(json.dumps([variant.name, delay_ms, times[1:]]), flush=True)


def measure_variants(
    rounds: int, iterations: int, message_bytes: int, traces: Path
) -> dict[tuple[str, float], list[float]]:
    """Iteration times in seconds by variant and delay, round after round."""
    arguments = {
        "rounds": rounds,
        "iterations": iterations,
        "message-bytes": message_bytes,
        "traces": traces,
    }
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    found: dict[tuple[str, float], list[float]] = {}
    for line in run_ranks(__file__, STAGES, flags, DEADLINE_SECONDS).splitlines():
        name, delay_ms, times = json.loads(line)
        found.setdefault((name, delay_ms), []).extend(times)
    return found


def calibrate_all(traces: Path, times: list[float], iterations: int) -> ExecutorCosts:
    """Median costs over all rounds."""
    rounds = [
        # The first iteration of a round is traced, but its time is missing.
        read_costs(folder, [0.0, *times[k * iterations : (k + 1) * iterations]])
        for k, folder in enumerate(sorted(traces.iterdir(), key=lambda p: int(p.name)))
    ]
    return ExecutorCosts(
        {kind: statistics.median(c.ops[kind] for c in rounds) for kind in rounds[0].ops},
        statistics.median(c.hop for c in rounds),
        statistics.median(c.boundary for c in rounds),
    )


def check_goals(rows: list[Row]) -> list[tuple[str, bool]]:
    """Claims of docs/benchmarks.md about these figures, and their results."""
    at = {(row.variant, row.delay_ms): row for row in rows}
    ours, own = at["pipemorph", 60.0].measured, at["pipemorph", 0.0].measured
    bound = at["pipemorph", 60.0].bound
    direct = at[BASELINE, 60.0].measured
    free, free_baseline = at[FREE, 0.0].measured, at[FREE_BASELINE, 0.0].measured
    limited, recomputed = at[LIMITED, 60.0].measured, at[RECOMPUTED, 60.0].measured
    narrow = at[NARROW, 0.0]
    missed = narrow.measured / narrow.simulated - 1
    worst = max(rows, key=lambda row: abs(row.measured / row.simulated - 1))
    error = worst.measured / worst.simulated - 1
    return [
        (f"pipemorph at 60 ms: {ours / own:.2f}× its own undisturbed time (≤ 1.15×)",
         ours <= 1.15 * own),
        (f"pipemorph at 60 ms: {ours / bound:.3f}× the bound at measured costs (≤ 1.05×)",
         ours <= 1.05 * bound),
        (f"pipemorph at 60 ms: {direct / ours:.2f}× faster than {BASELINE} (≥ 3×)",
         direct >= 3 * ours),
        (f"{FREE}: {free_baseline / free:.3f}× faster than {FREE_BASELINE} (≥ 1×)",
         free <= free_baseline),
        (f"{RECOMPUTED}, 60 ms: {limited / recomputed:.3f}× faster than {LIMITED} (≥ 1.02×)",
         limited >= 1.02 * recomputed),
        (f"{NARROW}: measured {missed:+.1%} from simulated (within 5%), "
         f"{narrow.measured / narrow.bound:.3f}× the bound at measured costs (≤ 1.03×)",
         abs(missed) <= 0.05 and narrow.measured <= 1.03 * narrow.bound),
        (f"measured against simulated: {error:+.1%} at worst, {worst.variant} at "
         f"{worst.delay_ms:g} ms (within 5%)", abs(error) <= 0.05),
    ]  # fmt: skip


def format_table(rows: list[Row]) -> str:
    head = "".join(f" {d:g} ms nominal | simulated | measured |" for d in DELAYS_MS)
    shown = [variant for variant in VARIANTS if not variant.narrow]
    lines = [f"| policy (emulated stages) |{head}", "|---|" + "---:|---:|---:|" * len(DELAYS_MS)]
    for variant in shown:
        cells = [
            f"{row.nominal * 1e3:.0f} | {row.simulated * 1e3:.0f} | {row.measured * 1e3:.0f} ms"
            for row in rows
            if row.variant == variant.name
        ]
        cells += [" | | "] * (len(DELAYS_MS) - len(cells))
        lines.append(f"| {variant.name} | " + " | ".join(cells) + " |")
    narrow = next(row for row in rows if row.variant == NARROW)
    lines += ["", f"{NARROW} on the last link, {NARROW_BYTES} bytes a message (emulated): nominal "
              f"{narrow.nominal * 1e3:.0f}, simulated {narrow.simulated * 1e3:.0f}, measured "
              f"{narrow.measured * 1e3:.0f} ms"]  # fmt: skip
    return "\n".join(lines)


def compare_saving(seed: int, folder: Path) -> tuple[str, bool]:
    """Text on the seconds that a run reports as saved; True if its interval has the true ones."""
    rng, ends = random.Random(seed), RUN - (2 if seed % 2 else 8)
    faults, at = list[dict[str, float]](), rng.randint(6, 8)
    while at < ends - 2:
        until = min(at + rng.randint(5, 8), ends)
        faults.append({"link": rng.randrange(3), "fromIteration": at, "toIteration": until,
                       "delayMs": rng.choice([30.0, 50.0, 80.0])})  # fmt: skip
        at = until + rng.randint(3, 6)
    job = yaml.safe_load((EXAMPLES / "emulated-14b.yaml").read_text())
    schedule, trainer = job["spec"]["schedule"], job["spec"]["trainer"] | {"iterations": RUN}
    schedule |= {"microbatches": 12, "stageTimes": schedule["stageTimes"][:4]}
    job["spec"] |= {"parallelism": {"stages": 4}, "trainer": trainer, "faults": faults}
    reports, path = [], folder / f"{seed}.json"
    for adapts in (True, False):
        path.write_text(
            json.dumps(job | {"spec": job["spec"] | {"adaptation": {"enabled": adapts}}})
        )
        command = [sys.executable, "-m", "pipemorph.cli", "run", path, "--out", f"{path}-{adapts}"]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_SECONDS)
        reports.append(json.loads(Path(f"{path}-{adapts}", "report.json").read_text()))
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for on, off in zip(*(report["iterations"] for report in reports), strict=True):
        slow = [f["link"] for f in faults if f["fromIteration"] <= on["index"] < f["toIteration"]]
        times = groups.setdefault((on["plan_version"], *slow), [])
        times.append((on["seconds"], off["seconds"]))
    median = {
        k: [statistics.median(each) for each in zip(*g, strict=True)] for k, g in groups.items()
    }
    truth = sum(len(groups[k]) * (off - on) for k, (on, off) in median.items() if k[0])
    well = median[0,][1]
    cost = sum(len(groups[k]) * (off - well) for k, (_, off) in median.items() if k[1:])
    says, error = reports[0]["saved"]["seconds"], reports[0]["saved"]["error"]
    return (
        f"run {seed}: saved {truth:.2f} s, said {says:.2f} ± {error:.2f}, which is"
        f" {error / cost:.0%} of what faults cost (≤ 15%)",
        abs(says - truth) <= error <= 0.15 * cost,
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--saved", type=int, default=0, metavar="N", help="runs of this kind only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4, help="per variant and round")
    parser.add_argument("--message-bytes", type=int, default=1 << 16)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--traces", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rounds, args.iterations, args.message_bytes, args.traces)
        return 0
    if args.saved:
        with tempfile.TemporaryDirectory(prefix="pipemorph-bench-") as scratch:
            return (
                0
                if print_goals(compare_saving(seed, Path(scratch)) for seed in range(args.saved))
                else 1
            )
    with tempfile.TemporaryDirectory(prefix="pipemorph-bench-") as scratch:
        found = measure_variants(args.rounds, args.iterations, args.message_bytes, Path(scratch))
        costs = calibrate_all(Path(scratch), found[CALIBRATION, 0.0], args.iterations)
    rows = []
    for variant in VARIANTS:
        for delay_ms in variant.delays_ms:
            plan, nominal, simulated, bound = make_plan(variant, delay_ms, costs)
            times = found[variant.name, delay_ms]
            rows.append(
                Row(variant.name, delay_ms, nominal, simulated, statistics.median(times), bound,
                    times, list(plan.warmup))
            )  # fmt: skip
    print(
        f"{STAGES} emulated stages, {MICROBATCHES} microbatches, {TIMES_MS} ms; messages of "
        f"{args.message_bytes} bytes stand for {STANDS_FOR_BYTES}; load {os.getloadavg()[0]:.1f} "
        f"on {os.cpu_count()} cores"
    )
    shown = ", ".join(f"{kind} {seconds * 1e3:.2f}" for kind, seconds in costs.ops.items())
    print(
        f"measured costs, undisturbed: {shown}, hop {costs.hop * 1e3:.2f}, "
        f"boundary {costs.boundary * 1e3:.2f} ms"
    )
    print(format_table(rows))
    return 0 if finish_benchmark(check_goals(rows), args.json, [asdict(row) for row in rows]) else 1


if __name__ == "__main__":
    sys.exit(main())
