"""Reads the snapshot that a job's agent hands in, for a controller that does not know the job.

A host has made it, and the ranks run its plan already. But it comes from a pod of the job, and what
a controller decides next, serves and writes follows from it: so it is checked like one that was
never seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import ValidationError

from pipemorph.api.spec import JobSpec
from pipemorph.api.status_base import MAX_STAGES
from pipemorph.control.decide import reasons
from pipemorph.control.decide.forecast import runnable
from pipemorph.control.observed.stages import excess, in_flight_limits, stated_rooms
from pipemorph.control.snapshot import Snapshot, unpack
from pipemorph.errors import InputError, one_line
from pipemorph.planning import Plan, Route
from pipemorph.planning.ir import dashed
from pipemorph.wire import AdaptationRecord, Directive, HandIn, PlanMessage


class HandedIn(NamedTuple):
    """A checked message, and its snapshot."""

    message: HandIn
    snapshot: Snapshot


def read(body: bytes, spec: JobSpec) -> HandedIn:
    """Parse and check a message of the agent of a job of ``spec``. Takes seconds for the largest
    plans. Raises :class:`InputError` that names the field and the value."""
    try:
        message = HandIn.model_validate_json(body)
    except ValidationError as error:
        raise InputError(_first(error, "the body")) from None
    try:
        saved = Snapshot.model_validate_json(unpack(message.snapshot))
    except ValidationError as error:
        raise InputError(f"snapshot.{_first(error, 'the body')}") from None
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
    return HandedIn(message, saved)


def _first(error: ValidationError, whole: str) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return one_line(f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}")


def _check_lists(saved: Snapshot, spec: JobSpec) -> None:
    """Check that lists are of as many stages and links as the job has."""
    parallelism = spec.parallelism
    stages, links = parallelism.stages, parallelism.stages - 1
    lists: list[tuple[str, int, int]] = [
        ("stages", len(saved.stages), stages),
        ("footprints", len(saved.footprints), stages),
        ("layers", len(saved.layers), stages),
        ("beside", len(saved.beside), stages),
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
    if any(not -2 <= source < links for source in saved.doubts):
        raise InputError("snapshot.doubts names a link of another job")


def _check_directive(directive: Directive, newest: int, spec: JobSpec) -> None:
    sent, record, version = directive.plan, directive.record, directive.plan_version
    if sent.version != version:
        raise InputError(f"snapshot.directive.plan.version is {sent.version}; expected {version}")
    if record is None or record.plan_version != version:
        raise InputError(f"snapshot.directive.record is not that of plan v{version}")
    _check_record(record, newest, spec)
    _check_plan("directive.plan", sent, spec)


def _check_plan(name: str, sent: PlanMessage, spec: JobSpec) -> None:
    name = f"snapshot.{name}"
    _check_shape(name, sent, spec)
    plan, placed = sent.plan(), spec.parallelism.mesh.placed
    if plan.schedule.placement != placed:
        raise InputError(
            f"{name}: the stages are on ranks {dashed(plan.schedule.placement)}; the job has"
            f" them on {dashed(placed)}"
        )
    if broken := runnable(plan):
        raise InputError(one_line(f"{name}: {broken}"))
    _check_limits(name, plan, spec)


def _check_record(record: AdaptationRecord, version: int, spec: JobSpec) -> None:
    """Bound what goes to status."""
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
    """Check what needs no decoding, before anything large is made of it."""
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
    for name, found, none, some in lists:
        if found not in (none, some):
            raise InputError(f"{where}.{name} has {found} items; expected {some}")
    expected = schedule.microbatches
    if sent.microbatches != expected:
        raise InputError(f"{where} has {sent.microbatches} microbatches; expected {expected}")
    if sent.policy is not schedule.policy_kind:
        raise InputError(f"{where}.policy is {sent.policy}; expected {schedule.policy_kind}")


def _check_limits(where: str, plan: Plan, spec: JobSpec) -> None:
    """Check that the plan keeps to the spec: no rank may hold more than it says."""
    if spec.transport.route == "direct" and Route.DELEGATED in plan.routes:
        raise InputError(f"{where}.routes: a link is delegated; spec.transport.route is direct")
    held = zip(plan.device_limits, plan.in_flight_limits, in_flight_limits(spec), strict=True)
    for stage, (device, in_all, most) in enumerate(held):
        found = min((limit for limit in (device, in_all) if limit is not None), default=None)
        if most is not None and (found is None or found > most):
            raise InputError(
                f"{where}: stage {stage} may hold {'all' if found is None else found}"
                f" microbatches; the spec allows {most}"
            )
    too_much = excess(plan, stated_rooms(spec))
    if too_much is not None and too_much.field == "rank":
        raise InputError(f"{where}: {reasons.too_much(too_much)}")
