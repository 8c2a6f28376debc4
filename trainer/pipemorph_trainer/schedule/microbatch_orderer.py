"""Order of an iteration's microbatches, which stage 0 computes from their costs.

Ops, messages and plans refer to *places* 0 … N-1. The microbatch that runs in place *k* on all
stages is element *k* of the order: its inputs and its target are used there. So an order needs no
other plan, and every sum of gradients is one over the microbatches in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import fmean

from pydantic import ValidationError

from pipemorph.errors import InputError, one_line
from pipemorph.planning import Link, Plan, Problem, StageTimes
from pipemorph.planning.search.microbatch_order import order_microbatches
from pipemorph.protocol import PlanMessage
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.agent.rank_plan import RankPlan

log = logging.getLogger("pipemorph.trainer")

LEAST_SECONDS, OP_SECONDS = 1e-3, 1e-6
"""Effort of a search at least, and for each op of the plan: it finds nearly what ten times as much
would, and delays the start of the iteration."""


class MicrobatchOrderer:
    """Orderer of the microbatches of a column, on the rank of its stage 0. Main thread only."""

    def __init__(self, mesh: MeshShape) -> None:
        self._mesh = mesh
        self._version = -1
        self._problem: Problem | None = None
        self._plan: Plan | None = None
        self._has_warned = False

    def order_microbatches(self, plan: RankPlan, costs: Sequence[float]) -> tuple[int, ...]:
        """Return the microbatch of each place; empty: all in order, as without ``costs``, with
        equal ones, or without the plan of the whole pipeline. It depends only on the arguments."""
        if plan.whole is None or not costs or min(costs) == max(costs):
            return ()
        mean = fmean(costs)
        try:
            if plan.version != self._version or self._plan is None:
                self._version, self._plan = plan.version, plan.whole.to_plan()
                self._problem = build_order_problem(plan.whole, self._mesh)
            assert self._problem is not None
            order = order_microbatches(
                self._problem,
                self._plan,
                [cost / mean for cost in costs],
                seconds=max(LEAST_SECONDS, OP_SECONDS * sum(map(len, self._plan.schedule.ranks))),
            )
        except (InputError, ValidationError) as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "microbatches run in order, since none was found: %s", one_line(str(error))
                )
            return ()
        return () if order == tuple(range(len(costs))) else order


def build_order_problem(plan: PlanMessage, mesh: MeshShape) -> Problem:
    """Build the problem of a plan from the times that came with it; equal op times and no delays
    without them."""
    times = plan.times
    equal = StageTimes(forward=1, backward_input=1, backward_weight=1)
    return Problem(
        microbatches=plan.microbatches,
        stages=(equal,) * mesh.stages
        if times is None
        else tuple(
            StageTimes(
                forward=stage.forward,
                backward_input=stage.backward_input,
                backward_weight=stage.backward_weight,
                fused_backward=stage.fused_backward,
            )
            for stage in times.stages
        ),
        links=(Link(),) * (mesh.stages - 1)
        if times is None
        else tuple(Link(delay=delay) for delay in times.delays),
        ranks=mesh.sizes["pp"] if mesh.stages_per_rank > 1 else None,
        placement=mesh.placement,
    )
