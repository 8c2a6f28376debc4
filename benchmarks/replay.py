"""What the control loop makes of what could be had: replayed traces of link delays.

One command: ``python benchmarks/replay.py [--json FILE] [--quick|--only TEXT]``. Eight stages with
the op times of a 14B model, 24 microbatches. *Nine faults*: 1-3 links slow by 20-60 ms, 70
iterations each. *Narrow*: links of 2.5 and 5 Gb/s. *Redrawn*: the delay of one link is drawn anew
every 50-400 ms. *Varying bandwidth*: so is the rate of one link, 3 to 12 Gb/s, every 100-400 ms.
*Congestion*: a link is slow by 60 ms in runs of 50-400 ms, with pauses as long.
*Flapping*: a link is slow by 30 ms, with pauses, for 8 iterations each. *Dead port*: a direct route
is down, then another one while the delegated route is slow and jitters.
Real detector, controller and planner; trainer and wire times are simulated. Printed is the share of
what an oracle gains over schedule and routes that never change; the oracle knows the trace and
changes at once, to the best plan for the mean delay of the iteration that begins. Beside it is the
share of what an oracle gets that learns of a fault from the iteration in which it begins.

Exits 1 if a goal is not reached, and says which.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple, get_args

from pipemorph.planning import Dispatch, Problem
from pipemorph.planning.problem import load_problem
from pipemorph.replay.contenders import (
    Replay,
    delegated_ready_first,
    fixed_share,
    guided,
    late_share,
    ready_first,
    replay,
)
from pipemorph.replay.links import DispatchChoice
from pipemorph.replay.trace import LinkTrace, load_trace, parse_trace
from pipemorph.replay.trainer import Telemetry

TRACES = Path(__file__).resolve().parent.parent / "examples" / "traces"
CAP = 16
"""Two microbatches in flight per stage of the pipeline."""


class Case(NamedTuple):
    trace: str
    telemetry: Telemetry
    dispatch: DispatchChoice = "auto"
    cap: int | None = None
    delegation: float = 0.0
    """Part of an op that a delegated message takes at either end."""
    goal: float | None = None
    """Of the oracle's gain."""
    of_late: float | None = None
    """Goal of the share of an oracle that is one iteration late: a directive is in force in the
    iteration after the first slow one."""
    slower: float | None = None
    """Goal of the time, as a multiple of the oracle's, where ``static`` does not finish."""

    def __str__(self) -> str:
        cap = "no limit" if self.cap is None else f"limit {self.cap}"
        cost = f", delegation {self.delegation:.0%}" if self.delegation else ""
        return f"{self.trace}, {self.telemetry} telemetry, {self.dispatch}, {cap}{cost}"

    def goals(self) -> dict[str, float | None]:
        return {"goal": self.goal, "of_late": self.of_late, "slower": self.slower}

    @property
    def conditions(self) -> tuple[str, int | None, float]:
        """What oracles depend on."""
        return self.trace, self.cap, self.delegation


STATED: dict[Telemetry, float] = {"exact": 0.99, "python": 0.99, "device": 0.98}
NARROW: dict[Telemetry, float] = {"exact": 0.97, "python": 0.97, "device": 0.93}
FLAPPING, DEAD_PORT = 0.95, 1.05
WITH_LATE_ORACLE = ("nine-faults", "narrow", "redrawn", "flapping")
CASES = (
    *(Case("nine-faults", each, goal=STATED[each], of_late=0.99) for each in get_args(Telemetry)),
    *(Case("nine-faults", each, cap=CAP, goal=0.97) for each in get_args(Telemetry)),
    *(Case("nine-faults", each, Dispatch.STATIC, goal=0.975) for each in get_args(Telemetry)),
    *(Case("nine-faults", each, delegation=0.05, goal=0.975) for each in get_args(Telemetry)),
    Case("nine-faults", "python", Dispatch.ONLINE, of_late=0.98),
    Case("nine-faults", "python", Dispatch.GUIDED, of_late=0.99),
    *(Case("redrawn", each, goal=0.98) for each in get_args(Telemetry)),
    Case("redrawn", "python", Dispatch.STATIC, of_late=0.995),
    Case("redrawn", "python", Dispatch.ONLINE, of_late=1.025),
    *(Case("narrow", each, of_late=NARROW[each]) for each in get_args(Telemetry)),
    Case("varying-bandwidth", "python", goal=0.4),
    Case("congestion", "python", goal=1.1),
    Case("congestion", "python", Dispatch.STATIC, goal=1.1),
    Case("congestion", "python", Dispatch.ONLINE, goal=1.1),
    *(Case("flapping", each, goal=FLAPPING) for each in get_args(Telemetry)),
    *(Case("dead-port", each, slower=DEAD_PORT) for each in get_args(Telemetry)),
)


def run(case: Case, known: Replay | None = None) -> Replay:
    """``known``: of a case with the same conditions."""
    problem, trace = _given(case)
    return replay(
        problem,
        trace,
        telemetry=case.telemetry,
        dispatch=case.dispatch,
        delegation=case.delegation,
        known=known,
    )


def _given(case: Case) -> tuple[Problem, LinkTrace]:
    problem = with_cap(load_problem(str(TRACES / "problem.yaml")), case.cap)
    return problem, load_trace(str(TRACES / f"{case.trace}.jsonl"), len(problem.links))


def _missed(case: Case, share: float | None, of_late: float | None, found: Replay) -> list[str]:
    """What the case promises and does not keep."""
    took, oracle = found.seconds["adaptive"], found.seconds["oracle"]
    times = took / oracle if took is not None and oracle else None
    said = []
    if case.goal is not None and (share is None or share < case.goal):
        said.append(f"NO {case}:{_percent(share)} of the oracle's gain, goal {case.goal:.1%}")
    if case.of_late is not None and (of_late is None or of_late < case.of_late):
        said.append(
            f"NO {case}:{_percent(of_late)} of the oracle that is one iteration late, goal"
            f" {case.of_late:.1%}"
        )
    if case.slower is not None and (times is None or times > case.slower):
        said.append(f"NO {case}: {_cell(times, 1, 3)} times the oracle's time, goal {case.slower}")
    return said


def _percent(share: float | None) -> str:
    return f"{'–':>7}" if share is None else f"{100 * share:6.1f}%"


def _cell(value: float | None, width: int, digits: int = 1) -> str:
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
    args = parser.parse_args()
    cases = CASES[:1] if args.quick else [case for case in CASES if args.only in str(case)]
    missed, rows = [], []
    late: dict[tuple[str, int | None, float], float] = {}
    for case in {c.conditions: c for c in cases if c.trace in WITH_LATE_ORACLE}.values():
        share = late[case.conditions] = late_share(*_given(case), case.delegation)
        print(
            f"{case.trace}, limit {case.cap}, delegation {case.delegation:.0%}: an oracle one"
            f" iteration late gets {share:.1%}"
        )
    if any(case.trace == "nine-faults" for case in cases):
        share = late_share(*_given(CASES[0]), late=ready_first)
        print(
            f"nine-faults, the same if any ready op runs in the first slow iteration: {share:.1%}"
        )
        share = late_share(*_given(CASES[0]), late=guided)
        print(f"nine-faults, the same with guided dispatch: {share:.1%}")
        for cost in (0.0, 0.01, 0.05):
            share = fixed_share(*_given(CASES[0]), cost, delegated_ready_first)
            print(
                f"nine-faults, delegation {cost:.0%}: without a controller, all links delegated and"
                f" any ready op next, always: {share:.1%}"
            )
    print(
        f"{'':68} {'static s':>9} {'adaptive s':>10} {'oracle s':>9} {'share':>7} {'of late':>7}"
        f" {'changes':>8}"
    )
    known: dict[tuple[str, int | None, float], Replay] = {}
    for case in cases:
        found = known[case.conditions] = run(case, known.get(case.conditions))
        share, most = found.share("adaptive"), late.get(case.conditions)
        of_late = None if share is None or most is None else share / most
        seconds = [found.seconds[name] for name in ("static", "adaptive", "oracle")]
        print(
            f"{case!s:68} {_cell(seconds[0], 9)} {_cell(seconds[1], 10)} {_cell(seconds[2], 9)}"
            f" {_percent(share)} {_percent(of_late)} {len(found.changes):8}",
            flush=True,
        )
        rows.append({"case": str(case)} | case.goals() | found.fields())
        missed += _missed(case, share, of_late, found)
    well = parse_trace('{"at_iteration": 0, "links": {}}', 7)
    problem = load_problem(str(TRACES / "problem.yaml"))
    for telemetry in get_args(Telemetry):
        count = len(replay(problem, well, telemetry=telemetry, iterations=1000).changes)
        print(f"1,000 iterations without a fault, {telemetry} telemetry: {count} changes of plan")
        if count:
            missed.append(f"NO change without a fault, {telemetry} telemetry: {count}")
    print("\n".join(missed) or "all goals reached")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
