"""Reads the snapshot that a job's agent sends to a controller that is new to the job.

An earlier host made it, and the ranks already run its plan. But it comes from a pod of the job, and
the controller's next decisions and status follow from it: so it is checked like untrusted input.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import ValidationError

from pipemorph.control.decide import reasons
from pipemorph.control.decide.forecast import find_plan_error
from pipemorph.control.decide.situation import PACE_SOURCE
from pipemorph.control.job_state.stages import (
    compute_stated_rooms,
    find_excess,
    get_in_flight_limits,
)
from pipemorph.control.snapshot import Snapshot, unpack_snapshot
from pipemorph.errors import InputError, one_line
from pipemorph.planning import Plan, Route
from pipemorph.planning.ir import join_dashed
from pipemorph.protocol import AdaptationRecord, Directive, PlanMessage, SnapshotMessage
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.status_base import MAX_STAGES


class AdoptedPlan(NamedTuple):
    """Checked message of an agent, and the snapshot in it."""

    message: SnapshotMessage
    snapshot: Snapshot


def parse_message(body: bytes, spec: JobSpec) -> AdoptedPlan:
    """Parse and check a message of a job's agent. Takes seconds for the largest plans. Raises
    :class:`InputError` that names the field and the value."""
    try:
        message = SnapshotMessage.model_validate_json(body)
    except ValidationError as error:
        raise InputError(_format_first_error(error, "the body")) from None
    try:
        saved = Snapshot.model_validate_json(unpack_snapshot(message.snapshot))
    except ValidationError as error:
        raise InputError(f"snapshot.{_format_first_error(error, 'the body')}") from None
    except ValueError as error:
        raise InputError(one_line(f"snapshot: {error}")) from None
    _check_lists(saved, spec)
    for record in saved.records:
        _check_record(record, saved.plan_version, spec)
    if saved.directive is not None:
        _check_directive(saved.directive, saved.plan_version, spec)
    if saved.baseline is not None:
        if saved.baseline.version:
            raise InputError(f"snapshot.baseline.version is {saved.baseline.version}; expected 0")
        _check_plan("baseline", saved.baseline, spec)
    return AdoptedPlan(message, saved)


def _format_first_error(error: ValidationError, whole: str) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return one_line(f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}")


def _check_lists(saved: Snapshot, spec: JobSpec) -> None:
    """Check that lists have as many items as the job has stages or links."""
    parallelism = spec.parallelism
    stages, links = parallelism.stages, parallelism.stages - 1
    lists: list[tuple[str, int, int]] = [
        ("stages", len(saved.stages), stages),
        ("footprints", len(saved.footprints), stages),
        ("layers", len(saved.layers), stages),
        ("initial_stage_seconds", len(saved.initial_stage_seconds), stages),
    ]
    lists += [(name, len(getattr(saved, name)), links) for name in ("wire_times", "delays", "slow")]
    for name, found, expected in lists:
        if found not in (0, expected):
            raise InputError(f"snapshot.{name} has {found} items; expected {expected}")
    if saved.layers and sum(saved.layers) != parallelism.layers:
        raise InputError(
            f"snapshot.layers are {sum(saved.layers)}; the job has {parallelism.layers}"
        )
    columns = parallelism.mesh.columns
    if any(row.link >= links or row.replica >= columns for row in saved.slow_directions):
        raise InputError("snapshot.slow_directions names a link of another job")
    if any(not PACE_SOURCE <= source < links for source in saved.doubts):
        raise InputError("snapshot.doubts names a link of another job")


def _check_directive(directive: Directive, newest: int, spec: JobSpec) -> None:
    """Check that a directive, its plan and its record belong together."""
    sent, record, version = directive.plan, directive.record, directive.plan_version
    if sent.version != version:
        raise InputError(f"snapshot.directive.plan.version is {sent.version}; expected {version}")
    if record is None or record.plan_version != version:
        raise InputError(f"snapshot.directive.record is not that of plan v{version}")
    _check_record(record, newest, spec)
    _check_plan("directive.plan", sent, spec)


def _check_plan(name: str, sent: PlanMessage, spec: JobSpec) -> None:
    """Check that a plan has the job's shape and placement, is valid, and fits the spec."""
    name = f"snapshot.{name}"
    _check_shape(name, sent, spec)
    plan, placed = sent.to_plan(), spec.parallelism.mesh.pp_indices
    if plan.schedule.placement != placed:
        raise InputError(
            f"{name}: the stages are on ranks {join_dashed(plan.schedule.placement)}; the job has"
            f" them on {join_dashed(placed)}"
        )
    if broken := find_plan_error(plan):
        raise InputError(one_line(f"{name}: {broken}"))
    _check_limits(name, plan, spec)
    if plan.shares and not spec.adaptation.rebalance:
        raise InputError(f"{name}.shares is set; spec.adaptation.rebalance is false")
    for each in plan.resized:
        _check_limits(f"{name}.resized", each, spec)


def _check_record(record: AdaptationRecord, version: int, spec: JobSpec) -> None:
    """Check the bounds of a record, which goes to status."""
    if not 0 < record.plan_version <= version:
        raise InputError(f"a record is of plan v{record.plan_version}; expected 1 to {version}")
    longest = max(len(value) for _, value in record if isinstance(value, list))
    if longest > MAX_STAGES:
        raise InputError(
            f"a list in the record of plan v{record.plan_version} has {longest} items; expected at"
            f" most {MAX_STAGES}"
        )
    if any(row.link >= spec.parallelism.stages - 1 for row in record.links):
        raise InputError(f"the record of plan v{record.plan_version} names a link of another job")


def _check_shape(where: str, sent: PlanMessage, spec: JobSpec) -> None:
    """Check what needs no decoding, before anything large is built from it."""
    stages, schedule = spec.parallelism.stages, spec.schedule
    ranks = spec.parallelism.mesh.sizes["pp"]
    lists: Iterable[tuple[str, int, int, int]] = (
        ("ranks", len(sent.ranks), ranks, ranks),
        ("routes", len(sent.routes), stages - 1, stages - 1),
        ("in_flight_limits", len(sent.in_flight_limits), stages, stages),
        ("warmup", len(sent.warmup), stages, stages),
        ("device_limits", len(sent.device_limits), 0, stages),
        ("recompute", len(sent.recompute), 0, stages),
        ("waits", len(sent.waits), 0, ranks),
        ("placement", len(sent.placement), 0 if ranks == stages else stages, stages),
    )
    if (times := sent.times) is not None:
        lists = (
            *lists,
            ("times.stages", len(times.stages), stages, stages),
            ("times.delays", len(times.delays), stages - 1, stages - 1),
        )
    for name, found, none, some in lists:
        if found not in (none, some):
            raise InputError(f"{where}.{name} has {found} items; expected {some}")
    for part in sent.resized:
        items: list[tuple[str, int, int, int]] = [
            ("ranks", len(part.ranks), ranks, ranks),
            ("in_flight_limits", len(part.in_flight_limits), stages, stages),
            ("warmup", len(part.warmup), stages, stages),
            ("device_limits", len(part.device_limits), 0, stages),
            ("recompute", len(part.recompute), 0, stages),
            ("waits", len(part.waits), 0, ranks),
        ]
        for name, count, none, some in items:
            if count not in (none, some):
                raise InputError(f"{where}.resized.{name} has {count} items; expected {some}")
        if part.microbatches > schedule.microbatches * spec.parallelism.replicas:
            raise InputError(f"{where}.resized has {part.microbatches} microbatches, too many")
    if sent.shares and len(sent.shares) != spec.parallelism.replicas:
        raise InputError(
            f"{where}.shares has {len(sent.shares)} items; the job has"
            f" {spec.parallelism.replicas} replicas"
        )
    expected = schedule.microbatches
    if sent.microbatches != expected:
        raise InputError(f"{where} has {sent.microbatches} microbatches; expected {expected}")
    if sent.policy is not schedule.policy_kind:
        raise InputError(f"{where}.policy is {sent.policy}; expected {schedule.policy_kind}")


def _check_limits(where: str, plan: Plan, spec: JobSpec) -> None:
    """Check that the plan respects the spec's routes and memory limits."""
    if spec.transport.route == "direct" and Route.DELEGATED in plan.routes:
        raise InputError(f"{where}.routes: a link is delegated; spec.transport.route is direct")
    held = zip(plan.device_limits, plan.in_flight_limits, get_in_flight_limits(spec), strict=True)
    for stage, (device, in_all, most) in enumerate(held):
        found = min((limit for limit in (device, in_all) if limit is not None), default=None)
        if most is not None and (found is None or found > most):
            raise InputError(
                f"{where}: stage {stage} may hold {'all' if found is None else found}"
                f" microbatches; the spec allows {most}"
            )
    too_much = find_excess(plan, compute_stated_rooms(spec))
    if too_much is not None and too_much.field == "rank":
        raise InputError(f"{where}: {reasons.describe_excess(too_much)}")
