"""Delays that change all the time: static or online dispatch, adaptive or not, or both.

One command: ``python benchmarks/traces.py [--json FILE] [--png FILE] [--simulated N]``. The
delay of the last link is drawn from N(30, 10) ms and redrawn every 50–400 ms, several times
within an iteration, as in the paper's experiment. Eight stages with the op times of a 14B model
and 24 microbatches.

*Simulated*: N random traces, 16 iterations each. An adaptive run plans iteration *k* for the
mean delay of the messages of iteration *k-1*, which is when all ranks can have committed it,
if that promises 5%. *Emulated*: one ``pipemorph run`` per variant with emulated stages, the
first of these traces as its fault trace; the real controller sees what the telemetry shows.
Counted are the iterations after the first ones, in which the controller finds out.

Exits 1 if a promise of the documentation is not kept.
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
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipemorph.planning import Dispatch, Policy, Route, StageTimes, link_on, plan, problem_for
from pipemorph.planning import predict as predict_static
from pipemorph.planning.simulation.simulator import simulate_changing

STAGES, MICROBATCHES, SLOW_LINK = 8, 24, 6
TIMES_MS = {"forward": 10.0, "backward_input": 10.5, "backward_weight": 5.5}
MEAN_MS, SIGMA_MS, LEAST_MS = 30.0, 10.0, 1.0
REDRAWN_MS = (50.0, 400.0)
DRAWS = 250
"""As many as a manifest takes: about 56 s."""
ITERATIONS, SETTLE = 16, 6
MIN_GAIN = 0.05
DEADLINE_SECONDS = 240


@dataclass(frozen=True)
class Variant:
    name: str
    policy: Policy = Policy.PIPEMORPH
    route: str = "direct"
    dispatch: Dispatch = Dispatch.STATIC
    adaptive: bool = False

    @property
    def slug(self) -> str:
        how = "adaptive" if self.adaptive else self.route
        return f"{self.policy.value}-{how}-{self.dispatch.value}"


BASELINE = Variant("1F1B, direct", Policy.ONE_F_ONE_B)
STATIC, ONLINE = Variant("static"), Variant("online", dispatch=Dispatch.ONLINE)
STATIC_DELEGATED = Variant("static, delegated", route="delegated")
ONLINE_DELEGATED = Variant("online, delegated", route="delegated", dispatch=Dispatch.ONLINE)
ADAPTIVE = Variant("adaptive", route="auto", adaptive=True)
BOTH = Variant("adaptive and online", route="auto", dispatch=Dispatch.ONLINE, adaptive=True)
VARIANTS = (BASELINE, STATIC, ONLINE, STATIC_DELEGATED, ONLINE_DELEGATED, ADAPTIVE, BOTH)


@dataclass
class Trace:
    """``delays[k]`` holds from ``since[k]`` on; milliseconds from the begin of training."""

    since: list[float]
    delays: list[float]

    @staticmethod
    def random(seed: int) -> Trace:
        rng = random.Random(seed)
        since, delays, now = [], [], 0.0
        for _ in range(DRAWS):
            since.append(now)
            delays.append(round(max(LEAST_MS, rng.gauss(MEAN_MS, SIGMA_MS)), 2))
            now = round(now + rng.uniform(*REDRAWN_MS), 1)
        return Trace(since, delays)

    def at(self, moment: float) -> float:
        return self.delays[bisect_right(self.since, moment) - 1]

    def faults(self) -> list[dict[str, Any]]:
        ends = [*self.since[1:], None]
        found = []
        for start, end, delay in zip(self.since, ends, self.delays, strict=True):
            fault = {"link": SLOW_LINK, "fromSeconds": start / 1e3, "delayMs": delay}
            found.append(fault if end is None else fault | {"toSeconds": end / 1e3})
        return found


@dataclass
class Row:
    variant: str
    simulated: list[float] = field(default_factory=list)
    """Mean settled iteration time in milliseconds, one per trace."""
    simulated_first: float = 0.0
    """On the trace that is emulated."""
    emulated: float | None = None
    emulated_iterations: list[float] = field(default_factory=list)
    adaptations: int = 0
    bubble: float | None = None


# --- simulated -----------------------------------------------------------------------------

STAGE = StageTimes(**TIMES_MS)


def simulate_run(variant: Variant, trace: Trace) -> float:
    """Mean time of the settled iterations in milliseconds."""
    delegated = variant.route == "delegated"
    route = Route.DELEGATED if delegated else Route.DIRECT
    quiet = problem_for(MICROBATCHES, [STAGE] * STAGES, [0.0] * (STAGES - 1))
    schedule = plan(quiet, variant.policy).schedule
    now, took, seen = 0.0, [], []
    for index in range(ITERATIONS):
        if variant.adaptive and index >= 1:
            schedule, route = _adapted(schedule, route, seen[index - 1])
        links = [link_on(route if i == SLOW_LINK else Route.DIRECT, 0.0) for i in range(STAGES - 1)]
        problem = quiet.model_copy(update={"links": tuple(links)})
        delays: list[float] = []

        def delay_at(link: int, sent: float, begin: float = now, to: list[float] = delays) -> float:
            if link != SLOW_LINK:
                return 0.0
            to.append(trace.at(begin + sent))
            return to[-1]

        makespan = simulate_changing(schedule, problem, delay_at, variant.dispatch).makespan
        seen.append(statistics.mean(delays))
        took.append(makespan)
        now += makespan
    return statistics.mean(took[SETTLE:])


def _adapted(schedule: Any, route: Route, delay: float) -> tuple[Any, Route]:
    """The plan for ``delay`` if it is predicted to save enough, else the present one."""
    problems = {
        choice: problem_for(
            MICROBATCHES,
            [STAGE] * STAGES,
            [delay if i == SLOW_LINK else 0.0 for i in range(STAGES - 1)],
            [choice if i == SLOW_LINK else Route.DIRECT for i in range(STAGES - 1)],
        )
        for choice in Route
    }
    present = predict_static(schedule, problems[route])
    planned = {choice: plan(problem) for choice, problem in problems.items()}
    best = min(planned, key=lambda choice: planned[choice].makespan)
    if planned[best].makespan <= present * (1 - MIN_GAIN):
        return planned[best].schedule, best
    return schedule, route


# --- emulated ------------------------------------------------------------------------------


def manifest(variant: Variant, trace: Trace) -> dict[str, Any]:
    times = {
        "forward": TIMES_MS["forward"],
        "backwardInput": TIMES_MS["backward_input"],
        "backwardWeight": TIMES_MS["backward_weight"],
    }
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": f"traces-{variant.slug}"},
        "spec": {
            "parallelism": {"stages": STAGES},
            "schedule": {
                "microbatches": MICROBATCHES,
                "policy": variant.policy.value,
                "dispatch": variant.dispatch.value,
                "stageTimes": [times] * STAGES,
            },
            "adaptation": {"enabled": variant.adaptive, "minGain": MIN_GAIN},
            "transport": {"route": variant.route},
            "emulation": {
                "stageTimes": [times],
                "messageBytes": 1 << 16,
                "standsForBytes": 1 << 24,
            },
            "trainer": {
                "module": "pipemorph_trainer.examples.emulated",
                "iterations": ITERATIONS,
            },
            "faults": trace.faults(),
        },
    }


def emulate(variant: Variant, trace: Trace, out: Path, row: Row) -> None:
    """One ``pipemorph run``. Raises RuntimeError if it does not complete or saw no delay."""
    out.mkdir(parents=True, exist_ok=True)
    job = out / "job.yaml"
    job.write_text(yaml.safe_dump(manifest(variant, trace), sort_keys=False))
    command = [sys.executable, "-m", "pipemorph.cli", "run", str(job), "--out", str(out / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"{variant.name}: pipemorph run exited {done.returncode}:\n{tail}")
    report = json.loads((out / "run" / "report.json").read_text())
    held = sum(fault["messages_held"] for fault in report["faults"])
    least = 2 * MICROBATCHES * ITERATIONS
    if held < 0.95 * least:
        raise RuntimeError(f"{variant.name}: the trace held {held} messages; expected {least}")
    iterations = report["iterations"]
    row.emulated_iterations = [each["seconds"] * 1e3 for each in iterations]
    row.emulated = statistics.mean(row.emulated_iterations[SETTLE:])
    row.bubble = statistics.mean(each["bubble_fraction"] for each in iterations[SETTLE:])
    row.adaptations = len(report["adaptations"])


# --- what comes of it ----------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    base = rows[0]
    lines = [
        f"| {STAGES} stages, {MICROBATCHES} microbatches |"
        f" simulated, {len(base.simulated)} trace{'s'[: len(base.simulated) > 1]} | against 1F1B |"
        " emulated | simulated, same trace | against 1F1B | plans |",
        "|---|" + "---:|" * 6,
    ]
    mean = statistics.mean(base.simulated)
    for row in rows:
        ours = statistics.mean(row.simulated)
        spread = f"{min(row.simulated):.0f}–{max(row.simulated):.0f}"
        cells = [f"{ours:.0f} ms ({spread})", f"{mean / ours:.2f}×"]
        if row.emulated is None or base.emulated is None:
            cells += ["not run", f"{row.simulated_first:.0f} ms", "", ""]
        else:
            cells += [
                f"{row.emulated:.0f} ms",
                f"{row.simulated_first:.0f} ms",
                f"{base.emulated / row.emulated:.2f}×",
                str(row.adaptations),
            ]
        lines.append(f"| {row.variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def promises(rows: list[Row]) -> list[tuple[str, bool]]:
    """What the documentation says about these figures, and whether it holds."""
    at = {row.variant: row for row in rows}
    both = statistics.mean(at[BOTH.name].simulated)
    static = statistics.mean(at[STATIC.name].simulated)
    baseline = statistics.mean(at[BASELINE.name].simulated)
    others = [statistics.mean(row.simulated) for row in rows]
    kept = [
        (f"simulated: both are {baseline / both:.2f}× faster than 1F1B (≥ 2×)",
         baseline >= 2 * both),
        (f"simulated: both are {static / both:.2f}× faster than static (≥ 1.4×)",
         static >= 1.4 * both),
        (f"simulated: both are within 1% of the best ({both:.0f} of {min(others):.0f} ms)",
         both <= 1.01 * min(others)),
    ]  # fmt: skip
    ours, fixed = at[BOTH.name].emulated, at[STATIC.name].emulated
    if ours is not None and fixed is not None:
        kept.append(
            (f"emulated: both are {fixed / ours:.2f}× faster than static (≥ 1.3×)",
             fixed >= 1.3 * ours)
        )  # fmt: skip
    return kept


def draw(rows: list[Row], trace: Trace, out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
    places = range(len(rows))
    means = [statistics.mean(row.simulated) for row in rows]
    low = [m - min(row.simulated) for m, row in zip(means, rows, strict=True)]
    high = [max(row.simulated) - m for m, row in zip(means, rows, strict=True)]
    left.barh(
        [p - 0.2 for p in places], means, 0.38, xerr=[low, high], color="#9fb8d9", capsize=2,
        label=f"simulated, {len(rows[0].simulated)} traces (range)",
    )  # fmt: skip
    if all(row.emulated is not None for row in rows):
        left.barh(
            [p + 0.2 for p in places], [row.emulated or 0.0 for row in rows], 0.38,
            color="#3b6fb6", label="emulated, first trace",
        )  # fmt: skip
    left.set_yticks(list(places), [row.variant for row in rows])
    left.invert_yaxis()
    left.set_xlabel("ms per iteration, settled")
    left.legend(loc="lower right", fontsize=8)
    left.set_title("delay of the last link N(30, 10) ms, redrawn every 50–400 ms", fontsize=10)
    for row in rows:
        ends, now = [], 0.0
        for took in row.emulated_iterations:
            now += took / 1e3
            ends.append(now)
        if ends:
            right.plot(ends, row.emulated_iterations, marker=".", label=row.variant)
    right.set_xlabel("s since training began (EMULATED stages)")
    right.set_ylabel("ms per iteration")
    # Room above for the legend.
    right.set_ylim(0, 1.4 * right.get_ylim()[1])
    longest = max(sum(row.emulated_iterations) for row in rows) / 1e3
    if longest:
        right.set_xlim(0, longest)
    below = right.twinx()
    shown = [s / 1e3 for s in trace.since]
    below.step(shown, trace.delays, where="post", color="#8a2be2", linewidth=0.6, alpha=0.7)
    below.set_ylabel("delay, ms", color="#8a2be2")
    below.set_ylim(0, 200)
    if any(row.emulated_iterations for row in rows):
        right.legend(fontsize=8, loc="upper right", ncols=2)
    figure.savefig(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--png", type=Path, help="draw here; default: beside --json")
    parser.add_argument("--simulated", type=int, default=20, metavar="N", help="random traces")
    parser.add_argument("--no-emulation", action="store_true", help="simulate only")
    parser.add_argument("--keep", type=Path, help="keep the runs here")
    args = parser.parse_args()
    rows = [Row(variant.name) for variant in VARIANTS]
    for seed in range(args.simulated):
        for variant, row in zip(VARIANTS, rows, strict=True):
            row.simulated.append(simulate_run(variant, Trace.random(seed)))
    trace = Trace.random(0)
    with tempfile.TemporaryDirectory(prefix="pipemorph-bench-") as scratch:
        base = args.keep or Path(scratch)
        for variant, row in zip(VARIANTS, rows, strict=True):
            row.simulated_first = row.simulated[0]
            if not args.no_emulation:
                print(f"running {variant.name} …", file=sys.stderr, flush=True)
                emulate(variant, trace, base / variant.slug, row)
    print(table(rows))
    where = "Simulated only" if args.no_emulation else "Emulated stages"
    print(f"\n{where}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")
    kept = promises(rows)
    for text, holds in kept:
        print(f"{'ok ' if holds else 'NO '} {text}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if picture := args.png or (args.json.with_suffix(".png") if args.json else None):
        draw(rows, trace, picture)
    return 0 if all(holds for _, holds in kept) else 1


if __name__ == "__main__":
    sys.exit(main())
