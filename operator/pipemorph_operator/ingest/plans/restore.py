"""A controller that goes on from what another ingest has saved."""

from __future__ import annotations

from collections.abc import Callable

from pipemorph.api.plan import SavedPlan
from pipemorph.api.spec import JobSpec
from pipemorph.api.status import ControlState
from pipemorph.control import JobController
from pipemorph.errors import InputError
from pipemorph.wire import LinkHealthReport
from pipemorph_operator.ingest.plans import snapshot_codec


def in_use(control: ControlState | None) -> int:
    """The highest plan version that may be in use."""
    return max(control.reserved or 0, control.plan_version) if control is not None else 0


def is_ahead(saved: SavedPlan, control: ControlState) -> bool:
    """Whether a plan was saved after this was read from status."""
    return saved.plan_version > control.plan_version or saved.attempt > control.attempt


def in_status(uid: str, control: ControlState | None) -> SavedPlan | None:
    """The plan that an earlier version of the ingest has left in status, if it has. ``uid``: of the
    job."""
    if control is None or not control.snapshot:
        return None
    return SavedPlan(
        job_uid=uid,
        attempt=control.attempt,
        plan_version=control.plan_version,
        snapshot=control.snapshot,
    )


def restore(
    spec: JobSpec,
    control: ControlState | None,
    saved: SavedPlan | None,
    attempt: int,
    on_report: Callable[[LinkHealthReport], None],
) -> tuple[JobController, str]:
    """A controller for an attempt, and the problem with what was saved, if any. Its plan version is
    never below those that may be in use, whatever was saved.

    ``saved`` may be older than ``control``: if the ranks run a newer plan, their agent hands it in.
    One that is newer is nothing that an ingest has written, as status is written first.
    """
    if control is None:
        return JobController(spec, attempt=attempt, on_report=on_report), ""
    bare = {"attempt": control.attempt, "plan_version": control.plan_version, "sequence": 0}
    controller, problem = None, ""
    try:
        if saved is not None:
            if is_ahead(saved, control):
                raise InputError(
                    f"it is of v{saved.plan_version} in attempt {saved.attempt}, but status of at"
                    f" most v{control.plan_version} in attempt {control.attempt}"
                )
            snapshot = snapshot_codec.unpack(saved.snapshot)
            controller = JobController.restore(spec, snapshot, on_report=on_report)
    except (ValueError, InputError) as error:
        problem = f"the saved plan is unusable; kept only its version: {error}"
    if controller is None:
        controller = JobController.restore(spec, bare, on_report=on_report)
    controller.skip_to(in_use(control))
    if attempt > controller.attempt:
        controller.begin_attempt(attempt)
    return controller, problem
