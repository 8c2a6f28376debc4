"""Plan of a single rank, and the split of a pipeline's plan into such parts.

A plan names the ops of all ranks of a pipeline. A rank needs only the order of its own stages, the
conditions of its receives, and the routes of its links. Decoding and checking a large plan takes
tens of milliseconds, so the agent does it once, while the ranks train, and sends each rank its
part. ``digest`` names the whole plan: ranks with different digests do not run together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property

from pydantic import Field

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
from pipemorph.protocol import Count, PlanMessage, PlannedTimes, PlanVersion, ProtocolModel
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.schedule import ONE_ORDER_IN_LOCKSTEP
from pipemorph_trainer.agent import receive_windows

DIGEST_LETTERS = 8
"""Length of a digest, hex: 32 bits, since plans of one version differ by mistake, not by intent."""


class RankReceiveLimits(ProtocolModel):
    """Conditions under which a stage may post receives of one link; see :mod:`.receive_windows`.

    ``after[m]``: number of messages that the stage must have sent in the other direction before the
    sender can send message *m*. ``ops[m]`` replaces it on a rank with several stages: number of ops
    that the rank must have run. ``window``: most messages received ahead of their ops.
    """

    after: tuple[Count, ...] = ()
    ops: tuple[Count, ...] = ()
    window: Count


class RankStage(ProtocolModel):
    """Stage of a rank, as its plan runs it."""

    stage: Count
    device_limit: Count | None = None
    recompute: bool = False
    above: RankReceiveLimits | None = None
    """None on the first stage."""
    below: RankReceiveLimits | None = None
    """None on the last stage."""


class RankLink(ProtocolModel):
    """Link with an end on this rank. ``slack``: the warm-up that absorbs its delay."""

    link: Count
    route: Route
    slack: int


class RankPlan(ProtocolModel):
    """Plan of a single rank. The fields have the meaning of those of
    :class:`~pipemorph.planning.Plan`.

    ``reason`` and ``promised`` come from the directive. Only rank 0 gets them, for its trackers.
    """

    version: PlanVersion
    digest: str = Field(min_length=DIGEST_LETTERS, max_length=DIGEST_LETTERS)
    microbatches: Count
    stage_count: Count
    """Number of stages of the whole pipeline."""
    dispatch: Dispatch = Dispatch.STATIC
    ops: str
    """Ops of the rank in order, as in the wire format of a schedule."""
    waits: tuple[Count, ...] = ()
    stages: tuple[RankStage, ...]
    """Stages of the rank, by chunk."""
    links: tuple[RankLink, ...] = ()
    whole: PlanMessage | None = None
    """Plan of all ranks, on the rank of stage 0 if it orders microbatches; else None."""
    shares: tuple[Count, ...] = ()
    """Microbatches of each replica; empty: all have those of this plan."""
    reason: str = ""
    promised: float | None = None

    @cached_property
    def order(self) -> tuple[tuple[int, Op], ...]:
        """Ops of the rank in order, each with its stage."""
        chunks = (0,) * len(self.stages)
        (ops,) = Schedule.decode(len(self.ops), [self.ops], chunks).ranks
        return tuple((self.stages[op.chunk].stage, op) for op in ops)

    @cached_property
    def orders(self) -> dict[int, tuple[Op, ...]]:
        """Ops of each stage in order."""
        return {
            mine.stage: tuple(op for stage, op in self.order if stage == mine.stage)
            for mine in self.stages
        }

    def count_peak_activations(self, stage: int) -> tuple[int, int]:
        """Peak number of microbatches whose activations from above (from F to W), and whose
        gradients from below (from B to W), ops of a stage need at one time."""
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
            f"plan {plan.version} has recompute for {len(plan.recompute)} stages;"
            f" expected {mesh.stages}"
        )
    if schedule.placement != mesh.pp_indices:
        raise InputError(
            f"plan {plan.version} has its stages on ranks {list(schedule.placement)} of a pipeline;"
            f" this job has them on {list(mesh.pp_indices)}"
        )
    has = f"plan {plan.version} has dispatch {plan.dispatch}"
    if plan.dispatch is Dispatch.GUIDED and mesh.lockstep_size > 1:
        raise InputError(f"{has}; {ONE_ORDER_IN_LOCKSTEP}")
    if plan.microbatch_order:
        raise InputError(
            f"plan {plan.version} has an order of microbatches; ranks find it in each iteration,"
            " from the costs= of step() with reorder=sums: remove it from the plan"
        )
    validate(schedule, plan.in_flight_limits, plan.device_limits)
    validate_waits(schedule, plan.waits)
    check_shares(plan, mesh)
    for each in plan.resized:
        check_plan(each, mesh)


def check_shares(plan: Plan, mesh: MeshShape) -> None:
    """Raise :class:`InputError` unless the shares of a plan are those of the replicas of ``mesh``
    and add up to as many microbatches as without shares."""
    shares, wanted = plan.shares, plan.schedule.microbatches * mesh.replicas
    if not shares:
        return
    if len(shares) != mesh.replicas or min(shares) < 1 or sum(shares) != wanted:
        raise InputError(
            f"plan {plan.version} has shares {list(shares)}; expected {mesh.replicas} numbers above"
            f" 0 whose sum is {wanted}"
        )
    for replica in range(mesh.replicas):
        plan.for_replica(replica)


def split_plan(
    plan: Plan,
    mesh: MeshShape,
    places: Iterable[int] | None = None,
    *,
    replica: int = 0,
    orders: bool = False,
    times: PlannedTimes | None = None,
) -> list[RankPlan]:
    """Split ``plan`` into the plans of a replica's ranks at ``places`` along ``pp``; None: of all.
    ``orders``: stage 0 orders the microbatches of each iteration, by these ``times``.

    Raises :class:`InputError` if the pipelines of ``mesh`` cannot run it.
    """
    check_plan(plan, mesh)
    body = PlanMessage.from_plan(plan).model_dump_json(exclude_defaults=True).encode()
    digest = hashlib.sha256(body).hexdigest()[:DIGEST_LETTERS]
    shares, plan = plan.shares, plan.for_replica(replica) if plan.shares else plan
    message = PlanMessage.from_plan(plan)
    whole = message.model_copy(update={"times": times}) if orders else None
    windows, last = receive_windows.compute_windows(plan), mesh.stages - 1

    def make_receive_limits(
        stage: int, *, forward: bool, ops: receive_windows.OpsBefore | None
    ) -> RankReceiveLimits:
        window = windows[stage - 1 if forward else stage]
        if ops is not None:
            return RankReceiveLimits(ops=ops[stage, forward], window=window)
        after = (
            receive_windows.count_sends_before_forward
            if forward
            else receive_windows.count_sends_before_backward
        )
        return RankReceiveLimits(after=after(plan, stage), window=window)

    def make_stage(stage: int, ops: receive_windows.OpsBefore | None) -> RankStage:
        return RankStage(
            stage=stage,
            device_limit=plan.device_limits[stage],
            recompute=plan.recompute[stage],
            above=make_receive_limits(stage, forward=True, ops=ops) if stage else None,
            below=make_receive_limits(stage, forward=False, ops=ops) if stage < last else None,
        )

    def make_link(number: int) -> RankLink:
        slack = plan.warmup[number] - plan.warmup[number + 1]
        return RankLink(link=number, route=plan.routes[number], slack=slack)

    def make_rank_plan(place: int) -> RankPlan:
        held = plan.schedule.stages_by_rank[place]
        ends = sorted({end for s in held for end in (s - 1, s) if 0 <= end < last})
        ops = (
            None
            if plan.schedule.one_stage_each
            else receive_windows.count_ops_before_receives(plan.schedule, place)
        )
        return RankPlan(
            version=plan.version,
            digest=digest,
            microbatches=plan.schedule.microbatches,
            stage_count=mesh.stages,
            dispatch=plan.dispatch,
            ops=message.ranks[place],
            waits=plan.waits[place] if plan.waits else (),
            stages=tuple(make_stage(stage, ops) for stage in held),
            links=tuple(map(make_link, ends)),
            whole=whole if 0 in held else None,
            shares=shares,
        )

    return [
        make_rank_plan(place) for place in (range(mesh.sizes["pp"]) if places is None else places)
    ]
