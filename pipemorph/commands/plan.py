"""``pipemorph plan PROBLEM``: makes a schedule and predicts its time."""

from __future__ import annotations

import argparse
import re
from typing import Any

from pipemorph.commands.output_file import add_output_arguments
from pipemorph.commands.simulation_output import DETAILS, FORMATS, write_simulation
from pipemorph.errors import InputError
from pipemorph.planning.ir import Dispatch, Policy
from pipemorph.planning.planner import plan
from pipemorph.planning.problem import load_problem, quote_value
from pipemorph.removed import DISPATCHES, POLICIES, refuse_removed


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="make a schedule for given op times and link delays",
        description="Make a schedule for the op times, caps and link delays of PROBLEM.",
    )
    parser.add_argument("problem", metavar="PROBLEM", help="YAML or JSON file; - reads stdin")
    parser.add_argument(
        "--policy",
        type=refuse_removed(POLICIES),
        choices=[p.value for p in Policy],
        help="overrides the problem's policy",
    )
    parser.add_argument(
        "--warmup", metavar="X0,X1,…", help="forwards before the first backward, per stage"
    )
    parser.add_argument(
        "--dispatch",
        type=refuse_removed(DISPATCHES),
        choices=[d.value for d in Dispatch],
        help="static: stages keep the plan's order; guided: they run the ready op that is first in "
        "the plan's order; overrides the problem's dispatch",
    )
    add_output_arguments(parser, FORMATS, "json", DETAILS)


def run(args: argparse.Namespace) -> int:
    problem = load_problem(args.problem)
    if args.warmup is not None:
        problem = problem.with_warmup(parse_warmup(args.warmup))
    policy = Policy(args.policy) if args.policy else problem.policy
    dispatch = Dispatch(args.dispatch) if args.dispatch else problem.dispatch
    problem = problem.model_copy(update={"dispatch": dispatch})
    planned = plan(problem, policy, tight_bound=True)
    write_simulation(
        args, planned.simulation, planned.problem, policy=planned.policy,
        bound=planned.lower_bound, planning_seconds=planned.planning_seconds, dispatch=dispatch,
        microbatch_order=planned.microbatch_order,
    )  # fmt: skip
    return 0


def parse_warmup(text: str) -> list[int]:
    """``"7,5,3,1"`` → ``[7, 5, 3, 1]``. Raises :class:`InputError` that names an invalid part."""
    counts = []
    for part in text.split(","):
        if not re.fullmatch(r"\d{1,9}", part.strip(), re.ASCII):
            raise InputError(
                f"--warmup: {quote_value(part)} in {quote_value(text)} is not a whole number"
            )
        counts.append(int(part))
    return counts
