"""Schedules: representation, validation, planning and simulation."""

from pipemorph.planning.ir import Dispatch, Op, OpKind, Plan, Policy, Route, Schedule
from pipemorph.planning.planner import PlannedSchedule, build_link, build_problem, plan
from pipemorph.planning.problem import Link, Problem, StageTimes, load_problem, parse_problem
from pipemorph.planning.simulation.execution import compute_lower_bound
from pipemorph.planning.simulation.simulator import (
    Simulation,
    TimedOp,
    predict,
    predict_changing,
    predict_period,
    simulate,
)
from pipemorph.planning.validator import (
    ScheduleError,
    validate,
    validate_online,
    validate_waits,
)

__all__ = [
    "Dispatch",
    "Link",
    "Op",
    "OpKind",
    "Plan",
    "PlannedSchedule",
    "Policy",
    "Problem",
    "Route",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "StageTimes",
    "TimedOp",
    "build_link",
    "build_problem",
    "compute_lower_bound",
    "load_problem",
    "parse_problem",
    "plan",
    "predict",
    "predict_changing",
    "predict_period",
    "simulate",
    "validate",
    "validate_online",
    "validate_waits",
]
