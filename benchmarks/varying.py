"""Delays that vary, at random: is adapting worth it, and is the right dispatch chosen?

One command: ``python benchmarks/varying.py [--json FILE] [--seeds N]``, five minutes. The problem
of ``benchmarks/replay.py``, with and without an in-flight limit of 16. Kinds of delay of one link:
redrawn from N(30, 10) and N(30, 20) ms every 50-400 ms, and from N(30, 15) ms every 0.5-3 s; 60 and
40 ms in runs of 50-400 ms with pauses as long, or twice as long; in runs of 0.3-2 s. 55 iterations
each, with python telemetry; all but ranks and links is real. Printed are mean seconds per trace,
and the least and the mean share of the oracle's gain, which plans for the mean delay of the
iteration that begins.

Exits 1 if a goal is not reached, and says which.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from replay import CAP, TRACES, with_cap

from pipemorph.planning import Dispatch
from pipemorph.planning.problem import load_problem
from pipemorph.replay.contenders import Replay, replay
from pipemorph.replay.links import DispatchChoice
from pipemorph.replay.trace import LinkTrace, parse_trace

ITERATIONS, BEGINS, ENDS = 55, 2.0, 45.0
LINKS = (6, 3, 5)
"""One after the other is slow."""
DISPATCHES: tuple[DispatchChoice, ...] = (Dispatch.STATIC, "auto", Dispatch.ONLINE)
LEAST_GAIN = 0.95
"""Mean share of the oracle's gain that adapting must have."""
SLOWER = 1.01
"""Times as long as the better of static and online that auto may take on average."""

Delays = Iterator[tuple[float, float]]
"""Since when, in seconds, and how many milliseconds."""


def redrawn(rng: random.Random, sigma: float, least: float, most: float) -> Delays:
    now = BEGINS
    while now < ENDS:
        yield now, max(1.0, rng.gauss(30, sigma))
        now += rng.uniform(least, most)


def runs(rng: random.Random, delay: float, pause: float, least: float, most: float) -> Delays:
    now, slow = BEGINS, True
    while now < ENDS:
        yield now, delay if slow else 0.0
        now += rng.uniform(least, most) * (1 if slow else pause)
        slow = not slow


KINDS: dict[str, Callable[[random.Random], Delays]] = {
    "N(30, 10) ms, 50-400 ms": lambda rng: redrawn(rng, 10, 0.05, 0.4),
    "N(30, 20) ms, 50-400 ms": lambda rng: redrawn(rng, 20, 0.05, 0.4),
    "N(30, 15) ms, 0.5-3 s": lambda rng: redrawn(rng, 15, 0.5, 3),
    "runs of 60 ms, pauses as long": lambda rng: runs(rng, 60, 1, 0.05, 0.4),
    "runs of 60 ms, longer pauses": lambda rng: runs(rng, 60, 2, 0.05, 0.3),
    "runs of 40 ms, pauses as long": lambda rng: runs(rng, 40, 1, 0.05, 0.3),
    "long runs of 60 ms": lambda rng: runs(rng, 60, 1, 0.3, 2),
}


def trace(kind: str, seed: int) -> LinkTrace:
    link = str(LINKS[seed % len(LINKS)])
    lines = (
        {
            "at_seconds": round(at, 3),
            "links": {link: {"delay_ms": round(delay, 2)}} if delay else {},
        }
        for at, delay in KINDS[kind](random.Random(seed))
    )
    return parse_trace("\n".join(map(json.dumps, lines)), 7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="traces of each kind and limit")
    args = parser.parse_args()
    problem = load_problem(str(TRACES / "problem.yaml"))
    took: dict[DispatchChoice, list[float]] = {each: [] for each in DISPATCHES}
    shares: dict[DispatchChoice, list[float]] = {each: [] for each in DISPATCHES}
    rows = []
    print(f"{'':32} {'limit':>5} {'seconds: static, auto, online':>30} {'of the gain':>20} changes")
    for kind in KINDS:
        for cap in (None, CAP):
            for seed in range(args.seeds):
                found: list[Replay] = []
                for dispatch in DISPATCHES:
                    found.append(
                        replay(
                            with_cap(problem, cap),
                            trace(kind, seed),
                            telemetry="python",
                            dispatch=dispatch,
                            iterations=ITERATIONS,
                            known=found[0] if found else None,
                        )
                    )
                for dispatch, each in zip(DISPATCHES, found, strict=True):
                    took[dispatch].append(each.seconds["adaptive"])
                    shares[dispatch].append(each.share("adaptive") or 0.0)
                seconds = ", ".join(f"{each.seconds['adaptive']:.1f}" for each in found)
                parts = ", ".join(f"{each.share('adaptive') or 0.0:.0%}" for each in found)
                changes = ", ".join(str(len(each.changes)) for each in found)
                print(f"{kind:32} {cap or '':>5} {seconds:>30} {parts:>20} {changes}", flush=True)
                rows.append({"kind": kind, "cap": cap, "seed": seed, "seconds": seconds})
    means = {dispatch: fmean(each) for dispatch, each in took.items()}
    missed = []
    for dispatch in DISPATCHES:
        gains = shares[dispatch]
        print(
            f"dispatch {dispatch}: {means[dispatch]:.2f} s per trace, {fmean(gains):.1%} of the"
            f" oracle's gain on average, {min(gains):.1%} at least"
        )
        if fmean(gains) < LEAST_GAIN:
            missed.append(f"NO dispatch {dispatch}: {fmean(gains):.1%}, goal {LEAST_GAIN:.0%}")
    if means["auto"] > SLOWER * min(means.values()):
        missed.append(f"NO dispatch auto takes {means['auto']:.2f} s, more than the best and 1%")
    print("\n".join(missed) or "all goals reached")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
