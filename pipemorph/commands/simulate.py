"""``pipemorph simulate PLAN PROBLEM``: what a plan does under other times and delays."""

from __future__ import annotations

import argparse
from typing import Any

from pipemorph.commands.output import add_output_arguments, write
from pipemorph.errors import InputError
from pipemorph.planning.bounds import lower_bound
from pipemorph.planning.ir import Dispatch
from pipemorph.planning.problem import load_problem
from pipemorph.planning.report import load_plan_file, report
from pipemorph.planning.simulator import simulate


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="run a plan under the delays of another problem",
        description="Run PLAN, as `pipemorph plan --output json` prints it, under PROBLEM.",
    )
    parser.add_argument("plan", metavar="PLAN", help="JSON file; - reads stdin")
    parser.add_argument("problem", metavar="PROBLEM", help="YAML or JSON file; - reads stdin")
    parser.add_argument(
        "--dispatch",
        choices=[d.value for d in Dispatch],
        default=Dispatch.STATIC.value,
        help="static keeps the order; online runs what is ready (default: %(default)s)",
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.plan == args.problem == "-":
        raise InputError("only one of PLAN and PROBLEM can be read from standard input")
    plan_file = load_plan_file(args.plan)
    problem = load_problem(args.problem)
    dispatch = Dispatch(args.dispatch)
    simulation = simulate(plan_file.schedule(), problem, dispatch)
    write(
        report(
            simulation,
            problem,
            policy=plan_file.policy,
            lower_bound=min(lower_bound(problem), simulation.makespan),
            planning_seconds=plan_file.planning_ms / 1e3,
            dispatch=dispatch,
        ),
        simulation,
        problem,
        args,
    )
    return 0
