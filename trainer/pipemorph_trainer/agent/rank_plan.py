"""What one rank runs of a plan, and how the agent cuts a plan into these.

A plan says what all ranks of a pipeline do. A rank needs the order of its own stages, when to post
receives, and the routes of its links. To decode and check the whole takes a large job tens of
milliseconds. So the agent does it once, beside the iteration, and each rank gets its part.
``digest`` names the whole plan: ranks whose digests differ do not run together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property

from pydantic import Field

from pipemorph.api.mesh import MeshShape
from pipemorph.api.sections.schedule import ONE_ORDER_IN_LOCKSTEP
from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Op,
    OpKind,
    Plan,
    Route,
    Schedule,
    validate,
    validate_waits,
)
from pipemorph.wire import Count, PlanMessage, PlanVersion, WireModel
from pipemorph_trainer.agent import receives

DIGEST_LETTERS = 8
"""32 bits: two plans of one version differ by a mistake, not by intent."""


class RankReceives(WireModel):
    """When a stage may post its receives of one link; see :mod:`.receives`.

    ``after[m]``: number of messages that the stage must have sent in the other direction before the
    sender can send message *m*; ``ops[m]``, in its place, of a rank with several stages: number of
    ops that the rank must have run. ``window``: most messages received ahead of their ops.
    """

    after: tuple[Count, ...] = ()
    ops: tuple[Count, ...] = ()
    window: Count


class RankStage(WireModel):
    """One stage of the rank."""

    stage: Count
    device_limit: Count | None = None
    recompute: bool = False
    above: RankReceives | None = None
    """None on the first stage."""
    below: RankReceives | None = None
    """None on the last stage."""


class RankLink(WireModel):
    """A link with an end on this rank. ``slack``: the warm-up that absorbs its delay."""

    link: Count
    route: Route
    slack: int


class RankPlan(WireModel):
    """What one rank runs of a plan. The fields have the meaning of those of
    :class:`~pipemorph.planning.Plan`.

    ``reason``, ``promised``: of the directive, for the trackers of rank 0; other ranks are not
    told.
    """

    version: PlanVersion
    digest: str = Field(min_length=DIGEST_LETTERS, max_length=DIGEST_LETTERS)
    microbatches: Count
    stage_count: Count
    """Of the whole pipeline."""
    dispatch: Dispatch = Dispatch.STATIC
    ops: str
    """The ops of the rank in order, as in the wire format of a schedule."""
    waits: tuple[Count, ...] = ()
    stages: tuple[RankStage, ...]
    """By chunk."""
    links: tuple[RankLink, ...] = ()
    reason: str = ""
    promised: float | None = None

    @cached_property
    def order(self) -> tuple[tuple[int, Op], ...]:
        """The ops of the rank in order, each with its stage."""
        chunks = (0,) * len(self.stages)
        (ops,) = Schedule.decode(len(self.ops), [self.ops], chunks).ranks
        return tuple((self.stages[op.chunk].stage, op) for op in ops)

    @cached_property
    def orders(self) -> dict[int, tuple[Op, ...]]:
        """The ops of each stage in order."""
        return {
            mine.stage: tuple(op for stage, op in self.order if stage == mine.stage)
            for mine in self.stages
        }

    def used(self, stage: int) -> tuple[int, int]:
        """Most microbatches whose activations from above, and whose gradients from below, ops of a
        stage need at one time in this order: from F, or from B, to W."""
        now, most = [0, 0], [0, 0]
        for op in self.orders[stage]:
            now[0] += op.kind is OpKind.F
            now[1] += op.kind in (OpKind.B, OpKind.BW)
            most = [max(pair) for pair in zip(now, most, strict=True)]
            if op.kind in (OpKind.W, OpKind.BW):
                now = [each - 1 for each in now]
        return most[0], most[1]

    @cached_property
    def by_stage(self) -> dict[int, RankStage]:
        return {mine.stage: mine for mine in self.stages}

    @cached_property
    def by_link(self) -> dict[int, RankLink]:
        return {end.link: end for end in self.links}


def check_plan(plan: Plan, mesh: MeshShape) -> None:
    """Raise :class:`InputError` unless the pipelines of ``mesh`` can run ``plan``."""
    schedule = plan.schedule
    if schedule.stage_count != mesh.stages:
        raise InputError(
            f"plan {plan.version} has {schedule.stage_count} stages; this job runs {mesh.stages}"
        )
    if len(plan.routes) != mesh.stages - 1:
        raise InputError(
            f"plan {plan.version} has {len(plan.routes)} routes; expected {mesh.stages - 1}"
        )
    if len(plan.recompute) != mesh.stages:
        raise InputError(
            f"plan {plan.version} says of {len(plan.recompute)} stages whether they recompute;"
            f" expected {mesh.stages}"
        )
    if schedule.placement != mesh.placed:
        raise InputError(
            f"plan {plan.version} has its stages on ranks {list(schedule.placement)} of a pipeline;"
            f" this job has them on {list(mesh.placed)}"
        )
    has = f"plan {plan.version} has dispatch {plan.dispatch}"
    if plan.dispatch is Dispatch.GUIDED and mesh.lockstep > 1:
        raise InputError(f"{has}; {ONE_ORDER_IN_LOCKSTEP}")
    validate(schedule, plan.in_flight_limits, plan.device_limits)
    validate_waits(schedule, plan.waits)


def cut(plan: Plan, mesh: MeshShape, places: Iterable[int] | None = None) -> list[RankPlan]:
    """The parts of a plan for the ranks at ``places`` along ``pp``; None: for all of a pipeline.

    Raises :class:`InputError` if the pipelines of ``mesh`` cannot run it.
    """
    check_plan(plan, mesh)
    message = PlanMessage.of(plan)
    body = message.model_dump_json(exclude_defaults=True).encode()
    digest = hashlib.sha256(body).hexdigest()[:DIGEST_LETTERS]
    windows, last = receives.windows(plan), mesh.stages - 1

    def received(stage: int, *, forward: bool, ops: receives.OpsBefore | None) -> RankReceives:
        window = windows[stage - 1 if forward else stage]
        if ops is not None:
            return RankReceives(ops=ops[stage, forward], window=window)
        after = receives.after_above if forward else receives.after_below
        return RankReceives(after=after(plan, stage), window=window)

    def stage_of(stage: int, ops: receives.OpsBefore | None) -> RankStage:
        return RankStage(
            stage=stage,
            device_limit=plan.device_limits[stage],
            recompute=plan.recompute[stage],
            above=received(stage, forward=True, ops=ops) if stage else None,
            below=received(stage, forward=False, ops=ops) if stage < last else None,
        )

    def link(number: int) -> RankLink:
        slack = plan.warmup[number] - plan.warmup[number + 1]
        return RankLink(link=number, route=plan.routes[number], slack=slack)

    def rank(place: int) -> RankPlan:
        held = plan.schedule.stages_of[place]
        ends = sorted({end for s in held for end in (s - 1, s) if 0 <= end < last})
        ops = None if plan.schedule.one_stage_each else receives.after_ops(plan.schedule, place)
        return RankPlan(
            version=plan.version,
            digest=digest,
            microbatches=plan.schedule.microbatches,
            stage_count=mesh.stages,
            dispatch=plan.dispatch,
            ops=message.ranks[place],
            waits=plan.waits[place] if plan.waits else (),
            stages=tuple(stage_of(stage, ops) for stage in held),
            links=tuple(map(link, ends)),
        )

    return [rank(place) for place in (range(mesh.sizes["pp"]) if places is None else places)]
