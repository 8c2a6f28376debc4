"""Writes and reads the JSON of ``pipemorph plan`` and ``simulate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pipemorph.errors import InputError, one_line
from pipemorph.planning.analysis.bubbles import explain_idle_time
from pipemorph.planning.formats.torch_csv import dump_csv, find_microbatch_order, parse_csv
from pipemorph.planning.ir import Dispatch, Op, OpKind, Policy, Schedule, invert_order
from pipemorph.planning.offload import count_away_microbatches
from pipemorph.planning.problem import (
    MAX_CELLS,
    Count,
    Problem,
    check_integer,
    describe_problem_error,
    quote_value,
)
from pipemorph.planning.simulation.execution import Waits, find_planned_waits
from pipemorph.planning.simulation.simulator import Simulation
from pipemorph.yaml_json import read_text


def build_plan_json(
    simulation: Simulation,
    problem: Problem,
    *,
    policy: str,
    lower_bound: float,
    planning_seconds: float,
    dispatch: Dispatch = Dispatch.STATIC,
    microbatch_order: Sequence[int] = (),
) -> dict[str, Any]:
    """JSON fields of a plan, as documented. Times in milliseconds, as in the problem file.

    ``policy``: a :class:`Policy`, or ``IMPORTED``. If ranks have several stages, the fields include
    ``ranks``, the rank of each stage, and ``order``, the ops of each rank in torch's notation.
    ``microbatch_order[k]``: the microbatch that runs as microbatch *k* of the simulation; empty:
    *k* itself. Ops in the fields have the microbatches' own numbers.
    """
    order = microbatch_order or range(simulation.schedule.microbatches)
    schedule = simulation.schedule
    away = count_away_microbatches(
        schedule, problem.list_device_limits(), problem.list_recompute_flags()
    )
    several: dict[str, Any] = {}
    if not schedule.one_stage_each:
        text = dump_csv(schedule.rename_microbatches(order))
        several = {"ranks": list(schedule.placement), "order": text.splitlines()}
    return {
        "policy": str(policy),
        "dispatch": dispatch.value,
        "microbatches": schedule.microbatches,
        "microbatch_order": list(order),
        "makespan": _round_milliseconds(simulation.makespan),
        "period": _round_milliseconds(simulation.period),
        "exposed_reduction": _round_milliseconds(simulation.exposed_reduction),
        "objective": problem.objective,
        "lower_bound": _round_milliseconds(lower_bound),
        "gap": _compute_gap(simulation.select_objective(problem), lower_bound),
        "bubble_fraction": _round_milliseconds(simulation.bubble_fraction),
        "warmup": list(schedule.count_warmup()),
        "slackness": list(schedule.compute_slackness()),
        "in_flight_peak": list(schedule.count_in_flight_peaks()),
        "in_flight_limit": list(problem.list_in_flight_limits()),
        "device_limit": list(problem.list_device_limits()),
        "offloaded": away.offloaded,
        "recompute": list(problem.list_recompute_flags()),
        "recomputed": away.recomputed,
        "waits": [list(positions) for positions in find_planned_waits(schedule, problem)],
        "planning_ms": round(planning_seconds * 1e3, 3),
        "bubbles": {
            cause.value: [_round_milliseconds(time) for time in per_rank]
            for cause, per_rank in explain_idle_time(simulation, problem).sum_by_cause().items()
        },
        **several,
        "stages": _list_stage_ops(simulation, order),
    }


def _compute_gap(objective: float, lower_bound: float) -> float:
    """Excess over the bound as a fraction of it; 0: proven shortest."""
    return _round_milliseconds(objective / lower_bound - 1) if lower_bound > 0 else 0.0


def _list_stage_ops(simulation: Simulation, order: Sequence[int]) -> list[list[dict[str, Any]]]:
    return [
        [
            {
                "op": op.kind.value,
                "microbatch": order[op.microbatch],
                "start": _round_milliseconds(op.start),
                "end": _round_milliseconds(op.end),
            }
            for op in ops
        ]
        for ops in simulation.stages
    ]


def _round_milliseconds(value: float) -> float:
    """Round milliseconds to picoseconds, so that 0.1 + 0.2 prints as 0.3."""
    return round(float(value), 9)


_Index = Annotated[int, BeforeValidator(check_integer), Field(ge=0)]


class _PlannedOp(BaseModel):
    model_config = ConfigDict(extra="ignore")

    op: OpKind
    microbatch: Annotated[int, BeforeValidator(check_integer), Field(ge=0, le=MAX_CELLS)]


IMPORTED = "imported"
"""The policy of a plan whose file names no policy."""
_KNOWN = (*(policy.value for policy in Policy), IMPORTED)


def _check_policy(value: object) -> object:
    if value not in _KNOWN:
        raise ValueError(f"is not one of {', '.join(_KNOWN)}")
    return value


class PlanFile(BaseModel):
    """Fields of a plan file that determine its ops; times are ignored. ``device_limit``: limits of
    stages that offload, or recompute if ``recompute``; None if the file has none.

    ``order``: only for ranks with several stages. ``microbatch_order``: the microbatches in the
    order in which they run; empty: 0, 1, ….
    """

    model_config = ConfigDict(extra="ignore")

    policy: Annotated[str, BeforeValidator(_check_policy)]
    microbatches: Count | None = None
    dispatch: Dispatch = Dispatch.STATIC
    planning_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    stages: tuple[tuple[_PlannedOp, ...], ...] = Field(min_length=1)
    order: tuple[str, ...] | None = None
    device_limit: tuple[Count | None, ...] | None = None
    recompute: tuple[bool, ...] = ()
    waits: tuple[tuple[_Index, ...], ...] = ()
    microbatch_order: tuple[_Index, ...] = ()

    def to_schedule(self) -> Schedule:
        """Order of the ops, with places in ``microbatch_order`` as microbatches; not validated."""
        places = invert_order(self.microbatch_order)
        if self.order is not None:
            return parse_csv("\n".join(self.order)).rename_microbatches(places)
        n = self.microbatches or sum(op.op is OpKind.F for op in self.stages[0])
        ranks = tuple(tuple(Op(op.op, op.microbatch) for op in ops) for ops in self.stages)
        return Schedule(n, ranks).rename_microbatches(places)


def parse_plan_file(text: str) -> PlanFile:
    """Parse the JSON of ``pipemorph plan``. Raises :class:`InputError`, one line."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the plan is not JSON: {one_line(str(error))}") from None
    if not isinstance(data, dict):
        raise InputError(f"the plan is {quote_value(data)}; expected the JSON of `pipemorph plan`")
    try:
        return PlanFile.model_validate(data)
    except ValidationError as error:
        raise InputError(f"the plan: {describe_problem_error(error)}") from None


MAX_BYTES = 256 << 20
"""Largest plan file; a plan of a million ops takes 75 MB."""


class LoadedPlan(NamedTuple):
    """Plan read from a file."""

    policy: str
    planning_seconds: float
    schedule: Schedule
    dispatch: Dispatch = Dispatch.STATIC
    device_limits: tuple[int | None, ...] | None = None
    recompute: tuple[bool, ...] = ()
    waits: Waits = ()
    microbatch_order: tuple[int, ...] = ()


def load_plan(path: str) -> LoadedPlan:
    """Load a plan from a file (``-``: standard input): the JSON of ``pipemorph plan``, or torch's
    compute-only CSV if the name ends in ``.csv``. Raises :class:`InputError`, one line."""
    text = read_text(path, MAX_BYTES)
    if path.lower().endswith(".csv"):
        schedule = parse_csv(text)
        order = find_microbatch_order(schedule)
        schedule = schedule.rename_microbatches(invert_order(order))
        return LoadedPlan(IMPORTED, 0.0, schedule, microbatch_order=order)
    plan = parse_plan_file(text)
    return LoadedPlan(
        plan.policy, plan.planning_ms / 1e3, plan.to_schedule(), plan.dispatch, plan.device_limit,
        plan.recompute, plan.waits, plan.microbatch_order,
    )  # fmt: skip
