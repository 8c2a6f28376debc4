"""Orders microbatches that differ in cost, for a plan whose order of ops stays.

A schedule's microbatches are *places*: place *k* of every stage runs the same microbatch. Which one
that is may change from iteration to iteration without another plan, since all ranks find the same
order from the same costs. The search is compiled (``csrc/planner/microbatch_order.cpp``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pydantic import ValidationError

from pipemorph.errors import InputError
from pipemorph.planning import _planner
from pipemorph.planning.ir import Dispatch, Plan, Schedule
from pipemorph.planning.problem import Problem, describe_problem_error
from pipemorph.planning.simulation.execution import Costs, Waits, build_guide
from pipemorph.planning.simulation.simulator import check_same_shape, predict

OPS_PER_SECOND = 100_000_000
"""Ops that the search simulates per second of effort."""
DRAWS = 8
"""Iterations with drawn costs in a predicted gain."""


def order_microbatches(
    problem: Problem,
    plan: Plan,
    costs: Sequence[float] | Sequence[Sequence[float]],
    *,
    seconds: float = 0.005,
) -> tuple[int, ...]:
    """Order of the microbatches with the shortest iteration found for ``plan``: element *k* is the
    microbatch that runs in place *k*.

    ``problem``: stage times and links; its own ``microbatch_costs`` are ignored. ``costs``: one row
    of a factor per microbatch, or one row per stage. ``seconds``: effort, converted to a number of
    ops, so that every machine finds the same order; it takes about that time. The iteration is
    never longer than in the order 0, 1, …, which is the result for equal costs, and if the problem
    forbids to ``reorder``. Raises :class:`InputError` for costs that do not fit the problem, or a
    plan of another shape.
    """
    check_same_shape(plan.schedule, problem)
    varied = with_microbatch_costs(problem.with_plan_limits(plan), costs)
    if not problem.reorder:
        return tuple(range(problem.microbatches))
    waits = plan.waits if plan.dispatch is Dispatch.GUIDED else None
    return search_microbatch_order(
        varied, plan.schedule, waits, effort=int(seconds * OPS_PER_SECOND)
    )


def predict_reordering_gain(problem: Problem, plan: Plan, spread: float) -> float:
    """Predict the fraction of an iteration that ordering the microbatches by their costs saves:
    the mean of :data:`DRAWS` iterations under ``plan``, whose costs are drawn with the standard
    deviation ``spread`` and mean 1, lognormal. Raises :class:`InputError` as
    :func:`order_microbatches`."""
    deviation = math.sqrt(math.log1p(spread * spread))
    rng, waits = random.Random(0), plan.waits if plan.dispatch is Dispatch.GUIDED else ()
    limited = problem.with_plan_limits(plan)
    before = after = 0.0
    for _ in range(DRAWS):
        costs = [
            rng.lognormvariate(-deviation * deviation / 2, deviation)
            for _ in range(problem.microbatches)
        ]
        order = order_microbatches(problem, plan, costs)
        varied = with_microbatch_costs(limited, costs)
        ordered = varied.with_microbatch_order(order)
        before += predict(plan.schedule, varied, plan.dispatch, waits)
        after += predict(plan.schedule, ordered, plan.dispatch, waits)
    return 1 - after / before if before else 0.0


def search_microbatch_order(
    problem: Problem,
    schedule: Schedule,
    waits: Waits | None = None,
    *,
    enough: float = 0.0,
    effort: int,
) -> tuple[int, ...]:
    """Order of the problem's microbatches for a valid schedule, with costs of the microbatches.

    ``waits``: those of guided dispatch; None: static dispatch. ``enough``: makespan at which the
    search stops; ``effort``: ops that it may execute.
    """
    guide = build_guide(schedule, problem, waits or ())
    order, _ = _planner.order_microbatches(
        Costs.from_problem(problem, schedule.placement).pack_for_planner(),
        guide.op_codes,
        guide.waits,
        guide.caps,
        waits is not None,
        enough,
        max(1, effort),
    )
    return tuple(order)


def with_microbatch_costs(
    problem: Problem, costs: Sequence[float] | Sequence[Sequence[float]]
) -> Problem:
    """Problem with these costs of its microbatches, for the makespan. Raises :class:`InputError`
    for costs that do not fit it."""
    given = {**problem.model_dump(), "microbatch_costs": costs, "objective": "makespan"}
    try:
        return Problem.model_validate(given)
    except ValidationError as error:
        raise InputError(describe_problem_error(error)) from None
