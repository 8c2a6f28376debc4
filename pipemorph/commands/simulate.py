"""``pipemorph simulate PLAN PROBLEM``: simulates a plan under other times and delays."""

from __future__ import annotations

import argparse
from typing import Any

from pipemorph.commands.output_file import add_output_arguments
from pipemorph.commands.simulation_output import DETAILS, FORMATS, write_simulation
from pipemorph.errors import InputError
from pipemorph.planning.formats.plan_json import load_plan
from pipemorph.planning.ir import Dispatch
from pipemorph.planning.problem import load_problem
from pipemorph.planning.simulation.execution import compute_lower_bound
from pipemorph.planning.simulation.simulator import check_same_shape, simulate
from pipemorph.removed import DISPATCHES, refuse_removed


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a plan under the delays of another problem",
        description="Simulate PLAN, the output of `pipemorph plan --output json` or a .csv of "
        "torch.distributed.pipelining, under PROBLEM.",
    )
    parser.add_argument("plan", metavar="PLAN", help="JSON or .csv file; - reads JSON from stdin")
    parser.add_argument("problem", metavar="PROBLEM", help="YAML or JSON file; - reads stdin")
    parser.add_argument(
        "--dispatch",
        type=refuse_removed(DISPATCHES),
        choices=[d.value for d in Dispatch],
        help="static keeps the order; guided runs the ready op that is first in the order "
        "(default: PLAN's own)",
    )
    add_output_arguments(parser, FORMATS, "json", DETAILS)


def run(args: argparse.Namespace) -> int:
    if args.plan == args.problem == "-":
        raise InputError("only one of PLAN and PROBLEM can be read from standard input")
    loaded = load_plan(args.plan)
    problem = load_problem(args.problem)
    dispatch = Dispatch(args.dispatch) if args.dispatch else loaded.dispatch
    schedule = loaded.schedule
    check_same_shape(schedule, problem)
    if loaded.device_limits is not None:
        if any(limit is not None for limit in loaded.device_limits):
            problem = problem.with_divided_memory()
        problem = problem.with_device_limits(loaded.device_limits, loaded.recompute)
    bound = compute_lower_bound(problem, schedule.placement)
    problem = problem.with_microbatch_order(loaded.microbatch_order)
    simulation = simulate(schedule, problem, dispatch, waits=loaded.waits)
    write_simulation(
        args, simulation, problem, policy=loaded.policy, bound=bound,
        planning_seconds=loaded.planning_seconds, dispatch=dispatch,
        microbatch_order=loaded.microbatch_order,
    )  # fmt: skip
    return 0
