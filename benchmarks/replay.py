"""Share of the possible gain that the control loop achieves, on replayed traces of link delays.

    python benchmarks/replay.py [--json FILE] [--quick|--only TEXT] [--seeds N]

Eight stages with the op times of a 14B model, 24 microbatches. *Nine faults*: 1-3 links slow by
20-60 ms, 70 iterations each. *Narrow*: links of 2.5 and 5 Gb/s. *Redrawn*: the delay of one link
changes randomly every 50-400 ms. *Varying bandwidth*: the rate of one link changes randomly between
3 and 12 Gb/s every 100-400 ms.
*Congestion*: a link is slow by 60 ms in runs of 50-400 ms, with pauses of the same length.
*Flapping*: a link is slow by 30 ms, with pauses, for 8 iterations each. *Dead port*: a direct route
is down, then another one while the delegated route is slow and jitters.
Detector, controller and planner are real; trainer and wire times are simulated. Prints the share of
the gain of an oracle over a schedule and routes that never change. The oracle knows the trace and
changes at once to the best plan for the mean delay of the iteration that begins. A second share
uses an oracle that learns of a fault from the iteration in which it begins.
*From the first iteration on*: :data:`STATES`, such as one or all links slow from the start, and a
stage that is slow or pauses, with the worst loss against doing nothing, in total and over 20
iterations.
*Random*: N traces of each kind of varying delay (:data:`RANDOM`), with each dispatch, with and
without an in-flight limit; 0: none.

Exits 1 if a goal is not reached, and lists the missed goals.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, get_args

from pipemorph.planning import Dispatch, Problem
from pipemorph.planning.problem import load_problem
from pipemorph.replay.adaptive_trainer import Telemetry
from pipemorph.replay.baselines import (
    ReplayResult,
    measure_late_share,
    replay_trace,
    use_guided_dispatch,
)
from pipemorph.replay.link_trace import LinkTrace, load_trace, parse_trace
from pipemorph.replay.simulated_links import DispatchChoice

TRACES = Path(__file__).resolve().parent.parent / "examples" / "traces"
CAP = 16
"""Two microbatches in flight per stage of the pipeline."""


class ReplayCase(NamedTuple):
    trace: str
    telemetry: Telemetry
    dispatch: DispatchChoice = "auto"
    cap: int | None = None
    delegation: float = 0.0
    """Fraction of an op that a delegated message takes at either end."""
    goal: float | None = None
    """Goal of the share of the oracle's gain."""
    of_late: float | None = None
    """Goal of the share of an oracle that is one iteration late: a directive takes effect in the
    iteration after the first slow one."""
    slower: float | None = None
    """Goal of the time, as a multiple of the oracle's, if ``static`` does not finish."""

    def __str__(self) -> str:
        cap = "no limit" if self.cap is None else f"limit {self.cap}"
        cost = f", delegation {self.delegation:.0%}" if self.delegation else ""
        return f"{self.trace}, {self.telemetry} telemetry, {self.dispatch}, {cap}{cost}"

    def list_goals(self) -> dict[str, float | None]:
        return {"goal": self.goal, "of_late": self.of_late, "slower": self.slower}

    @property
    def conditions(self) -> tuple[str, int | None, float]:
        """Conditions on which oracles depend."""
        return self.trace, self.cap, self.delegation


STATED: dict[Telemetry, float] = {"exact": 0.99, "python": 0.99, "device": 0.98}
NARROW: dict[Telemetry, float] = {"exact": 0.97, "python": 0.97, "device": 0.93}
FLAPPING, DEAD_PORT = 0.95, 1.05
WITH_LATE_ORACLE = ("nine-faults", "narrow", "redrawn", "flapping")
CASES = (
    *(
        ReplayCase("nine-faults", each, goal=STATED[each], of_late=0.99)
        for each in get_args(Telemetry)
    ),
    *(ReplayCase("nine-faults", each, cap=CAP, goal=0.97) for each in get_args(Telemetry)),
    *(ReplayCase("nine-faults", each, Dispatch.STATIC, goal=0.975) for each in get_args(Telemetry)),
    *(ReplayCase("nine-faults", each, delegation=0.05, goal=0.975) for each in get_args(Telemetry)),
    ReplayCase("nine-faults", "python", Dispatch.GUIDED, of_late=0.99),
    *(ReplayCase("redrawn", each, goal=0.98) for each in get_args(Telemetry)),
    ReplayCase("redrawn", "python", Dispatch.STATIC, of_late=0.995),
    *(ReplayCase("narrow", each, of_late=NARROW[each]) for each in get_args(Telemetry)),
    ReplayCase("varying-bandwidth", "python", goal=0.4),
    ReplayCase("congestion", "python", goal=1.1),
    ReplayCase("congestion", "python", Dispatch.STATIC, goal=1.1),
    *(ReplayCase("flapping", each, goal=FLAPPING) for each in get_args(Telemetry)),
    *(ReplayCase("dead-port", each, slower=DEAD_PORT) for each in get_args(Telemetry)),
)


# --- delays that vary, at random -----------------------------------------------------------------

ITERATIONS, BEGINS, ENDS = 55, 2.0, 45.0
"""Iterations of a random trace, and seconds at which its delay begins and ends to vary."""
LINKS = (6, 3, 5)
"""Slow link, by seed."""
DISPATCHES: tuple[DispatchChoice, ...] = (Dispatch.STATIC, "auto")
LEAST_GAIN, SLOWER = 0.95, 1.01
"""Goals: mean share of the oracle's gain, and time of auto over that of the best dispatch."""

Delays = Iterator[tuple[float, float]]
"""Start of each delay in seconds, and its milliseconds."""


def redraw_delays(rng: random.Random, sigma: float, least: float, most: float) -> Delays:
    now = BEGINS
    while now < ENDS:
        yield now, max(1.0, rng.gauss(30, sigma))
        now += rng.uniform(least, most)


def draw_runs(rng: random.Random, delay: float, pause: float, least: float, most: float) -> Delays:
    now, slow = BEGINS, True
    while now < ENDS:
        yield now, delay if slow else 0.0
        now += rng.uniform(least, most) * (1 if slow else pause)
        slow = not slow


RANDOM: dict[str, Callable[[random.Random], Delays]] = {
    "N(30, 10) ms, 50-400 ms": lambda rng: redraw_delays(rng, 10, 0.05, 0.4),
    "N(30, 20) ms, 50-400 ms": lambda rng: redraw_delays(rng, 20, 0.05, 0.4),
    "N(30, 15) ms, 0.5-3 s": lambda rng: redraw_delays(rng, 15, 0.5, 3),
    "runs of 60 ms, pauses as long": lambda rng: draw_runs(rng, 60, 1, 0.05, 0.4),
    "runs of 60 ms, longer pauses": lambda rng: draw_runs(rng, 60, 2, 0.05, 0.3),
    "runs of 40 ms, pauses as long": lambda rng: draw_runs(rng, 40, 1, 0.05, 0.3),
    "long runs of 60 ms": lambda rng: draw_runs(rng, 60, 1, 0.3, 2),
}


def random_trace(kind: str, seed: int) -> LinkTrace:
    link = str(LINKS[seed % len(LINKS)])
    lines = (
        {
            "at_seconds": round(at, 3),
            "links": {link: {"delay_ms": round(delay, 2)}} if delay else {},
        }
        for at, delay in RANDOM[kind](random.Random(seed))
    )
    return parse_trace("\n".join(map(json.dumps, lines)), 7)


def run_random(seeds: int) -> tuple[list[str], list[dict[str, object]]]:
    """Replay random traces. Returns missed goals, and a row per trace."""
    problem = load_problem(str(TRACES / "problem.yaml"))
    seconds: dict[DispatchChoice, list[float]] = {each: [] for each in DISPATCHES}
    shares: dict[DispatchChoice, list[float]] = {each: [] for each in DISPATCHES}
    rows: list[dict[str, object]] = []
    print(f"{'':32} {'limit':>5} {'seconds: static, auto':>30} {'of the gain':>20} changes")
    for kind, cap, seed in ((k, c, s) for k in RANDOM for c in (None, CAP) for s in range(seeds)):
        found: list[ReplayResult] = []
        for dispatch in DISPATCHES:
            found.append(
                replay_trace(
                    with_cap(problem, cap), random_trace(kind, seed), telemetry="python",
                    dispatch=dispatch, iterations=ITERATIONS, known=found[0] if found else None,
                )
            )  # fmt: skip
            seconds[dispatch].append(found[-1].seconds["adaptive"] or 0.0)
            shares[dispatch].append(found[-1].compute_oracle_share("adaptive") or 0.0)
        took = ", ".join(f"{each.seconds['adaptive']:.1f}" for each in found)
        parts = ", ".join(f"{each.compute_oracle_share('adaptive') or 0.0:.0%}" for each in found)
        changes = ", ".join(str(len(each.changes)) for each in found)
        print(f"{kind:32} {cap or '':>5} {took:>30} {parts:>20} {changes}", flush=True)
        rows.append({"case": kind, "cap": cap, "seed": seed, "seconds": took})
    means, missed = {dispatch: fmean(each) for dispatch, each in seconds.items()}, []
    for dispatch, gains in shares.items():
        print(
            f"random, dispatch {dispatch}: {means[dispatch]:.2f} s per trace, {fmean(gains):.1%} of"
            f" the oracle's gain on average, {min(gains):.1%} at least"
        )
        if fmean(gains) < LEAST_GAIN:
            missed.append(f"NO dispatch {dispatch}: {fmean(gains):.1%}, goal {LEAST_GAIN:.0%}")
    if means["auto"] > SLOWER * min(means.values()):
        missed.append(f"NO dispatch auto takes {means['auto']:.2f} s, more than the best and 1%")
    return missed, rows


# --- from the first iteration on, and without an end ----------------------------------------------

ALL, END = range(7), 130
States = Callable[[random.Random], Iterator[tuple[int, Mapping[int, float | dict[str, float]]]]]
"""First iterations of link delays in milliseconds, or of states of stages."""


def make_steady_trace(begins: int, *links: int, delay: float, until: int = 90) -> States:
    return lambda rng: iter([(begins, dict.fromkeys(links, delay)), (until, {})])


def make_iteration_trace(*links: int, draw: Callable[[int, random.Random], float]) -> States:
    """States that are drawn anew in each iteration from the 20th to the 120th."""
    return lambda rng: (
        (k, {link: draw(k, rng) for link in links} if k < 120 else {}) for k in range(20, 121)
    )


def draw_pareto(_: int, rng: random.Random) -> float:
    return min(300.0, 2 * (rng.paretovariate(1.2) - 1))


STATES: dict[str, States] = {
    "slow from 0, 15 ms": make_steady_trace(0, 3, delay=15),
    "slow from 0, 40 ms": make_steady_trace(0, 3, delay=40),
    "slow from 1, 40 ms": make_steady_trace(1, 3, delay=40),
    "slow from 0, two links": make_steady_trace(0, 1, 5, delay=40),
    "slow from 0, no end": make_steady_trace(0, 3, delay=60, until=END),
    "all links from 0": make_steady_trace(0, *ALL, delay=30),
    **{
        f"own delay {ms} ms": make_steady_trace(0, *ALL, delay=ms, until=END)
        for ms in (5, 12, 20, 31, 45)
    },
    "own delays, drawn": lambda rng: iter([(0, {k: rng.uniform(5, 45) for k in ALL}), (END, {})]),
    "sawtooth": make_iteration_trace(2, draw=lambda k, _: 3 * (k % 20)),
    "spikes": make_iteration_trace(3, draw=lambda k, _: 60 * (k % 10 == 0)),
    "walking link": lambda rng: ((20 + 8 * k, {k % 7: 40}) for k in range(13)),
    "heavy tail": make_iteration_trace(3, draw=draw_pareto),
    "heavy tails": make_iteration_trace(*ALL, draw=draw_pareto),
    "stage 3 is slow": lambda _: iter([(20, {3: {"slowdown": 1.6}}), (90, {})]),
    "stage 3 pauses": lambda _: (
        (k, {3: {"pause_ms": 300}} if k % 10 == 0 else {}) for k in range(20, 120)
    ),
}
SHARES: dict[Telemetry, float] = {"exact": 0.95, "python": 0.9, "device": 0.9}
HARM, SPAN, HARM_IN_SPAN = 0.01, 20, 0.05
"""Goals: largest loss against doing nothing over a trace, and over any SPAN iterations."""


def state_lines(kind: str) -> Iterator[dict[str, object]]:
    what = "stages" if kind.startswith("stage ") else "links"
    for at, states in STATES[kind](random.Random(0)):
        each = {str(i): s if isinstance(s, dict) else {"delay_ms": s} for i, s in states.items()}
        yield {"at_iteration": at, "links": {}} | {what: each}


def run_states(only: str) -> tuple[list[str], list[dict[str, object]]]:
    """Replay :data:`STATES`. Returns missed goals, and a row per trace and telemetry."""
    problem, missed, rows = load_problem(str(TRACES / "problem.yaml")), [], []
    heads = "".join(f"{each:>30}" for each in get_args(Telemetry))
    print(f"{'share; harm over all, over any 20; changes':32} {'limit':>5}{heads}")
    for kind, cap in ((k, c) for k in STATES if only in k for c in (None, CAP)):
        trace = parse_trace("\n".join(map(json.dumps, state_lines(kind))), 7)
        found, cells = None, []
        for telemetry in get_args(Telemetry):
            found = replay_trace(
                with_cap(problem, cap), trace, telemetry=telemetry, iterations=END, known=found
            )
            share, harm = found.compute_oracle_share("adaptive"), found.compute_harm("adaptive")
            in_span = found.compute_harm("adaptive", SPAN)
            cells.append(
                f"{_format_percent(share)} {harm:7.1%} {in_span:7.1%} {len(found.changes):3}"
            )
            name = f"{kind}, limit {cap}, {telemetry} telemetry"
            if harm > HARM or in_span > HARM_IN_SPAN:
                missed.append(f"NO {name}: {harm:.1%} lost, {in_span:.1%} in {SPAN} iterations")
            if " from " in kind and (share or 0.0) < SHARES[telemetry]:
                missed.append(f"NO {name}:{_format_percent(share)} of the oracle's gain")
            rows.append({"case": name, "harm": harm, "harm_in_span": in_span} | found.to_json())
        print(f"{kind:32} {cap or '':>5}{''.join(f'{each:>30}' for each in cells)}", flush=True)
    return missed, rows


def run_case(case: ReplayCase, known: ReplayResult | None = None) -> ReplayResult:
    """Replay a case. ``known``: replay of a case with the same conditions."""
    problem, trace = _load_case(case)
    return replay_trace(
        problem,
        trace,
        telemetry=case.telemetry,
        dispatch=case.dispatch,
        delegation=case.delegation,
        known=known,
    )


def _load_case(case: ReplayCase) -> tuple[Problem, LinkTrace]:
    problem = with_cap(load_problem(str(TRACES / "problem.yaml")), case.cap)
    return problem, load_trace(str(TRACES / f"{case.trace}.jsonl"), len(problem.links))


def _find_missed_goals(
    case: ReplayCase, share: float | None, of_late: float | None, found: ReplayResult
) -> list[str]:
    """Goals of the case that are missed."""
    took, oracle = found.seconds["adaptive"], found.seconds["oracle"]
    times = took / oracle if took is not None and oracle else None
    said = []
    if case.goal is not None and (share is None or share < case.goal):
        said.append(
            f"NO {case}:{_format_percent(share)} of the oracle's gain, goal {case.goal:.1%}"
        )
    if case.of_late is not None and (of_late is None or of_late < case.of_late):
        said.append(
            f"NO {case}:{_format_percent(of_late)} of the oracle that is one iteration late, goal"
            f" {case.of_late:.1%}"
        )
    if case.slower is not None and (times is None or times > case.slower):
        said.append(
            f"NO {case}: {_format_cell(times, 1, 3)} times the oracle's time, goal {case.slower}"
        )
    return said


def _format_percent(share: float | None) -> str:
    return f"{'–':>7}" if share is None else f"{100 * share:6.1f}%"


def _format_cell(value: float | None, width: int, digits: int = 1) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def with_cap(problem: Problem, cap: int | None) -> Problem:
    stages = [stage.model_copy(update={"in_flight_limit": cap}) for stage in problem.stages]
    return problem.model_copy(update={"stages": tuple(stages)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--quick", action="store_true", help="the first case only")
    some.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="cases with TEXT in their name; none: healthy only",
    )
    parser.add_argument("--seeds", type=int, default=3, help="random traces of each kind and limit")
    args = parser.parse_args()
    cases = CASES[:1] if args.quick else [case for case in CASES if args.only in str(case)]
    missed, rows = [], []
    late: dict[tuple[str, int | None, float], float] = {}
    for case in {c.conditions: c for c in cases if c.trace in WITH_LATE_ORACLE}.values():
        share = late[case.conditions] = measure_late_share(*_load_case(case), case.delegation)
        print(
            f"{case.trace}, limit {case.cap}, delegation {case.delegation:.0%}: an oracle one"
            f" iteration late gets {share:.1%}"
        )
    if any(case.trace == "nine-faults" for case in cases):
        share = measure_late_share(*_load_case(CASES[0]), late=use_guided_dispatch)
        print(f"nine-faults, the same with guided dispatch: {share:.1%}")
    print(
        f"{'':68} {'static s':>9} {'adaptive s':>10} {'oracle s':>9} {'share':>7} {'of late':>7}"
        f" {'changes':>8}"
    )
    known: dict[tuple[str, int | None, float], ReplayResult] = {}
    for case in cases:
        found = known[case.conditions] = run_case(case, known.get(case.conditions))
        share, most = found.compute_oracle_share("adaptive"), late.get(case.conditions)
        of_late = None if share is None or most is None else share / most
        seconds = [found.seconds[name] for name in ("static", "adaptive", "oracle")]
        print(
            f"{case!s:68} {_format_cell(seconds[0], 9)} {_format_cell(seconds[1], 10)}"
            f" {_format_cell(seconds[2], 9)}"
            f" {_format_percent(share)} {_format_percent(of_late)} {len(found.changes):8}",
            flush=True,
        )
        rows.append({"case": str(case)} | case.list_goals() | found.to_json())
        missed += _find_missed_goals(case, share, of_late, found)
    well = parse_trace('{"at_iteration": 0, "links": {}}', 7)
    problem = load_problem(str(TRACES / "problem.yaml"))
    for telemetry in get_args(Telemetry):
        count = len(replay_trace(problem, well, telemetry=telemetry, iterations=1000).changes)
        print(f"1,000 iterations without a fault, {telemetry} telemetry: {count} changes of plan")
        if count:
            missed.append(f"NO change without a fault, {telemetry} telemetry: {count}")
    if not args.quick:
        missed_at_worst, state_rows = run_states(args.only)
        missed, rows = missed + missed_at_worst, rows + state_rows
    if args.seeds and not args.quick:
        missed_randomly, random_rows = run_random(args.seeds)
        missed, rows = missed + missed_randomly, rows + random_rows
    print("\n".join(missed) or "all goals reached")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
