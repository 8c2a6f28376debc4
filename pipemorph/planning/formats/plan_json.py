"""Writes and reads the JSON of ``pipemorph plan`` and ``simulate``."""

from __future__ import annotations

import json
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pipemorph.document import read_text
from pipemorph.errors import InputError, one_line
from pipemorph.planning.analysis.bubbles import explain
from pipemorph.planning.formats.torch_csv import dump_csv, parse_csv
from pipemorph.planning.ir import Dispatch, Op, OpKind, Policy, Schedule
from pipemorph.planning.offload import left
from pipemorph.planning.problem import MAX_CELLS, Count, Problem, describe, integer, shown
from pipemorph.planning.simulation.core import Waits, planned_waits
from pipemorph.planning.simulation.simulator import Simulation


def report(
    simulation: Simulation,
    problem: Problem,
    *,
    policy: str,
    lower_bound: float,
    planning_seconds: float,
    dispatch: Dispatch = Dispatch.STATIC,
) -> dict[str, Any]:
    """The documented JSON fields. Times in milliseconds, as in the problem file.

    ``policy``: a :class:`Policy`, or ``IMPORTED``. Of ranks with several stages it has ``ranks``,
    the rank of each stage, and ``order``, the ops of each rank in torch's notation.
    """
    schedule = simulation.schedule
    away = left(schedule, problem.device_limits(), problem.recompute())
    several: dict[str, Any] = {}
    if not schedule.one_stage_each:
        several = {"ranks": list(schedule.placement), "order": dump_csv(schedule).splitlines()}
    return {
        "policy": str(policy),
        "dispatch": dispatch.value,
        "microbatches": schedule.microbatches,
        "makespan": _rounded(simulation.makespan),
        "period": _rounded(simulation.period),
        "exposed_reduction": _rounded(simulation.exposed_reduction),
        "objective": problem.objective,
        "lower_bound": _rounded(lower_bound),
        "gap": _gap(simulation.objective(problem), lower_bound),
        "bubble_fraction": _rounded(simulation.bubble_fraction),
        "warmup": list(schedule.warmup()),
        "slackness": list(schedule.slackness()),
        "in_flight_peak": list(schedule.in_flight_peak()),
        "in_flight_limit": list(problem.in_flight_limits()),
        "device_limit": list(problem.device_limits()),
        "offloaded": away.offloaded,
        "recompute": list(problem.recompute()),
        "recomputed": away.recomputed,
        "waits": [list(positions) for positions in planned_waits(schedule, problem)],
        "planning_ms": round(planning_seconds * 1e3, 3),
        "bubbles": {
            cause.value: [_rounded(time) for time in per_rank]
            for cause, per_rank in explain(simulation, problem).by_cause().items()
        },
        **several,
        "stages": _stages(simulation),
    }


def _gap(objective: float, lower_bound: float) -> float:
    """Excess over the bound as a fraction of it; 0: proven shortest."""
    return _rounded(objective / lower_bound - 1) if lower_bound > 0 else 0.0


def _stages(simulation: Simulation) -> list[list[dict[str, Any]]]:
    return [
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
    ]


def _rounded(value: float) -> float:
    """Round milliseconds to picoseconds, so that 0.1 + 0.2 prints as 0.3."""
    return round(float(value), 9)


class _PlannedOp(BaseModel):
    model_config = ConfigDict(extra="ignore")

    op: OpKind
    microbatch: Annotated[int, BeforeValidator(integer), Field(ge=0, le=MAX_CELLS)]


IMPORTED = "imported"
"""The policy of a plan whose file names no policy."""
_KNOWN = (*(policy.value for policy in Policy), IMPORTED)


def _known_policy(value: object) -> object:
    if value not in _KNOWN:
        raise ValueError(f"is not one of {', '.join(_KNOWN)}")
    return value


class PlanFile(BaseModel):
    """The fields of a plan file that determine its ops; times are ignored. ``device_limit``: limits
    of stages that offload or, where ``recompute``, recompute; None if the file has none.

    ``order``: only for ranks with several stages.
    """

    model_config = ConfigDict(extra="ignore")

    policy: Annotated[str, BeforeValidator(_known_policy)]
    microbatches: Count | None = None
    dispatch: Dispatch = Dispatch.STATIC
    planning_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    stages: tuple[tuple[_PlannedOp, ...], ...] = Field(min_length=1)
    order: tuple[str, ...] | None = None
    device_limit: tuple[Count | None, ...] | None = None
    recompute: tuple[bool, ...] = ()
    waits: tuple[tuple[Annotated[int, BeforeValidator(integer), Field(ge=0)], ...], ...] = ()

    def schedule(self) -> Schedule:
        """The order of the ops. Not validated."""
        if self.order is not None:
            return parse_csv("\n".join(self.order))
        n = self.microbatches or sum(op.op is OpKind.F for op in self.stages[0])
        return Schedule(
            n, tuple(tuple(Op(op.op, op.microbatch) for op in ops) for ops in self.stages)
        )


def parse_plan_file(text: str) -> PlanFile:
    """Parse the JSON of ``pipemorph plan``. Raises :class:`InputError`, one line."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the plan is not JSON: {one_line(str(error))}") from None
    if not isinstance(data, dict):
        raise InputError(f"the plan is {shown(data)}; expected the JSON of `pipemorph plan`")
    try:
        return PlanFile.model_validate(data)
    except ValidationError as error:
        raise InputError(f"the plan: {describe(error)}") from None


MAX_BYTES = 256 << 20
"""Largest plan file; a plan of a million ops has 75 MB."""


class LoadedPlan(NamedTuple):
    """A plan from a file."""

    policy: str
    planning_seconds: float
    schedule: Schedule
    dispatch: Dispatch = Dispatch.STATIC
    device_limits: tuple[int | None, ...] | None = None
    recompute: tuple[bool, ...] = ()
    waits: Waits = ()


def load_plan(path: str) -> LoadedPlan:
    """Load a plan from a file (``-``: standard input): the JSON of ``pipemorph plan``, or torch's
    compute-only CSV if the name ends in ``.csv``. Raises :class:`InputError`, one line."""
    text = read_text(path, MAX_BYTES)
    if path.lower().endswith(".csv"):
        return LoadedPlan(IMPORTED, 0.0, parse_csv(text))
    plan = parse_plan_file(text)
    return LoadedPlan(
        plan.policy, plan.planning_ms / 1e3, plan.schedule(), plan.dispatch, plan.device_limit,
        plan.recompute, plan.waits,
    )  # fmt: skip
