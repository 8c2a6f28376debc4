"""``pipemorph simulate PLAN PROBLEM``: simulates a plan under other times and delays."""

from __future__ import annotations

import argparse
from typing import Any

from pipemorph.commands.output import add_output_arguments, write
from pipemorph.errors import InputError
from pipemorph.planning.formats.plan_json import LoadedPlan, load_plan, report, report_interleaved
from pipemorph.planning.interleaved import interleaved_bound
from pipemorph.planning.ir import Dispatch
from pipemorph.planning.problem import Problem, load_problem
from pipemorph.planning.simulation.interleaved import InterleavedSchedule, simulate_interleaved
from pipemorph.planning.simulation.lower_bound import lower_bound
from pipemorph.planning.simulation.simulator import check_fits, simulate
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
        help="static keeps the order; guided runs of the ready ops the first in the order "
        "(default: PLAN's own)",
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.plan == args.problem == "-":
        raise InputError("only one of PLAN and PROBLEM can be read from standard input")
    loaded = load_plan(args.plan)
    problem = load_problem(args.problem)
    dispatch = Dispatch(args.dispatch) if args.dispatch else loaded.dispatch
    if loaded.interleaved is not None:
        _simulate_interleaved(loaded, loaded.interleaved, problem, dispatch, args)
        return 0
    assert loaded.schedule is not None
    if loaded.device_limits is not None:
        check_fits(loaded.schedule, problem)
        problem = problem.with_device_limits(loaded.device_limits, loaded.recompute)
    simulation = simulate(loaded.schedule, problem, dispatch, waits=loaded.waits)
    write(
        report(
            simulation,
            problem,
            policy=loaded.policy,
            lower_bound=min(lower_bound(problem), simulation.objective(problem)),
            planning_seconds=loaded.planning_seconds,
            dispatch=dispatch,
        ),
        simulation,
        problem,
        args,
    )
    return 0


def _simulate_interleaved(
    loaded: LoadedPlan,
    order: InterleavedSchedule,
    problem: Problem,
    dispatch: Dispatch,
    args: argparse.Namespace,
) -> None:
    if loaded.device_limits is not None:
        check_fits(order.per_stage(), problem)
        problem = problem.with_device_limits(loaded.device_limits, loaded.recompute)
    ran = simulate_interleaved(order, problem, dispatch, waits=loaded.waits)
    fields = report_interleaved(
        ran,
        problem,
        policy=loaded.policy,
        lower_bound=min(interleaved_bound(problem, ran.placement), ran.objective(problem)),
        planning_seconds=loaded.planning_seconds,
        dispatch=dispatch,
    )
    write(fields, ran, problem, args)
