"""The JSON that ``pipemorph plan`` and ``simulate`` print, and reading it back."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pipemorph.errors import InputError
from pipemorph.planning.bubbles import explain
from pipemorph.planning.ir import Dispatch, Op, OpKind, Policy, Schedule
from pipemorph.planning.problem import Count, Problem, describe, integer, read_text, shown
from pipemorph.planning.simulator import Simulation


def report(
    simulation: Simulation,
    problem: Problem,
    *,
    policy: Policy,
    lower_bound: float,
    planning_seconds: float,
    dispatch: Dispatch = Dispatch.STATIC,
) -> dict[str, Any]:
    """The contracted fields. Times in milliseconds, as in the problem file."""
    schedule = simulation.schedule()
    idle = explain(simulation, problem).by_cause()
    return {
        "policy": policy.value,
        "dispatch": dispatch.value,
        "microbatches": schedule.microbatches,
        "makespan": _rounded(simulation.makespan),
        "lower_bound": _rounded(lower_bound),
        "bubble_fraction": _rounded(simulation.bubble_fraction),
        "warmup": list(schedule.warmup()),
        "slackness": list(schedule.slackness()),
        "in_flight_peak": list(schedule.in_flight_peak()),
        "in_flight_limit": list(problem.in_flight_limits()),
        "planning_ms": round(planning_seconds * 1e3, 3),
        "bubbles": {
            cause.value: [_rounded(time) for time in per_stage] for cause, per_stage in idle.items()
        },
        "stages": [
            [
                {
                    "op": op.kind.value,
                    "microbatch": op.microbatch,
                    "start": _rounded(op.start),
                    "end": _rounded(op.end),
                }
                for op in ops
            ]
            for ops in simulation.stages
        ],
    }


def _rounded(value: float) -> float:
    """A picosecond of a millisecond: enough for anyone, and 0.1 + 0.2 prints as 0.3."""
    return round(float(value), 9)


class _PlannedOp(BaseModel):
    model_config = ConfigDict(extra="ignore")

    op: OpKind
    microbatch: Annotated[int, BeforeValidator(integer), Field(ge=0)]


class PlanFile(BaseModel):
    """The part of a printed plan that says what to run; times in it are not read."""

    model_config = ConfigDict(extra="ignore")

    policy: Policy
    microbatches: Count | None = None
    planning_ms: float = 0.0
    stages: tuple[tuple[_PlannedOp, ...], ...] = Field(min_length=1)

    def schedule(self) -> Schedule:
        """The order of the ops. Not validated."""
        n = self.microbatches or sum(op.op is OpKind.F for op in self.stages[0])
        return Schedule(
            n, tuple(tuple(Op(op.op, op.microbatch) for op in ops) for ops in self.stages)
        )


def parse_plan_file(text: str) -> PlanFile:
    """A plan from the JSON of ``pipemorph plan``. Raises :class:`InputError` of one line."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the plan is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"the plan is {shown(data)}; expected what `pipemorph plan` prints")
    try:
        return PlanFile.model_validate(data)
    except ValidationError as error:
        raise InputError(f"the plan: {describe(error)}") from None


def load_plan_file(path: str) -> PlanFile:
    """A plan from a file (``-``: standard input). Raises :class:`InputError` of one line."""
    return parse_plan_file(read_text(path))
