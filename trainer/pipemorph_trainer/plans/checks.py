"""Checks whether a plan may run in this job and on this rank. They raise :class:`InputError`."""

from __future__ import annotations

from collections.abc import Iterable

from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Plan, validate, validate_online
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.topology.coordinate import Coordinate


def check_plan(plan: Plan, current: Plan) -> None:
    """Raise :class:`InputError` unless ``plan`` can replace ``current``."""
    have, want = plan.schedule, current.schedule
    if have.stage_count != want.stage_count or have.microbatches != want.microbatches:
        raise InputError(
            f"plan {plan.version} has {have.stage_count} stages and {have.microbatches} "
            f"microbatches; the job runs {want.stage_count} and {want.microbatches}"
        )
    if len(plan.routes) != have.stage_count - 1:
        raise InputError(
            f"plan {plan.version} has {len(plan.routes)} routes; expected {have.stage_count - 1}"
        )
    if plan.dispatch is Dispatch.ONLINE:
        validate(have)
        validate_online(plan.warmup, plan.in_flight_limits, device_limits=plan.device_limits)
    else:
        validate(have, plan.in_flight_limits, plan.device_limits)


def check_stages(plan: Plan, coordinate: Coordinate) -> None:
    """Raise :class:`InputError` if a plan has another number of stages than the job."""
    if plan.schedule.stage_count != coordinate.stages:
        raise InputError(
            f"the plan has {plan.schedule.stage_count} stages; this job runs {coordinate.stages}"
        )


def check_offload(plan: Plan, coordinate: Coordinate, no_offload: str) -> None:
    """Raise :class:`InputError` if a plan offloads activations of a stage that cannot.

    ``no_offload``: why it cannot; empty if it can.
    """
    limit = plan.device_limits[coordinate.stage]
    if limit is not None and no_offload:
        raise InputError(
            f"plan {plan.version} moves activations of stage {coordinate.stage} to host memory"
            f" (device_limit {limit}), but: {no_offload}"
        )


def check_routes(plan: Plan, ends: Iterable[LinkEnd]) -> None:
    """Raise :class:`InputError` if a plan delegates a link that has no engine link."""
    for end in ends:
        if end.link < len(plan.routes) and not end.has(plan.routes[end.link]):
            raise InputError(
                f"plan {plan.version} delegates link {end.link}, which has no engine link; "
                "build the transfer engine or plan for the direct route"
            )
