"""The plans that a rank has prepared, and the checks whether it can run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipemorph.api.mesh import Coordinate
from pipemorph.api.spec import ONLINE_IN_LOCKSTEP
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Plan, Route, validate, validate_online
from pipemorph.planning.simulation.interleaved import InterleavedSchedule, validate_interleaved
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.receives import SPARE, windows
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.links.message import Batch, TensorMeta

# --- checks whether a plan may run in this job and on this rank ---------------------------


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
    if len(plan.recompute) != have.stage_count:
        raise InputError(
            f"plan {plan.version} says of {len(plan.recompute)} stages whether they recompute;"
            f" expected {have.stage_count}"
        )
    if plan.turns:
        validate_interleaved(InterleavedSchedule.of_plan(plan), plan.in_flight_limits)
    elif plan.dispatch is Dispatch.ONLINE:
        validate(have)
        validate_online(plan.warmup, plan.in_flight_limits, device_limits=plan.device_limits)
    else:
        validate(have, plan.in_flight_limits, plan.device_limits)


def check_stages(plan: Plan, coordinate: Coordinate) -> None:
    """Raise :class:`InputError` if a plan has another number of stages than the job, or an order of
    ops that the ranks of one stage cannot have in common."""
    if plan.schedule.stage_count != coordinate.stages:
        raise InputError(
            f"the plan has {plan.schedule.stage_count} stages; this job runs {coordinate.stages}"
        )
    mesh = coordinate.mesh
    placed = InterleavedSchedule.of_plan(plan).placement() if plan.turns else range(mesh.stages)
    if tuple(placed) != mesh.placed:
        raise InputError(
            f"plan {plan.version} has its stages on ranks {list(placed)} of a pipeline; this job"
            f" has them on {list(mesh.placed)}"
        )
    if plan.dispatch is Dispatch.ONLINE and mesh.stages_per_rank > 1:
        raise InputError(
            f"plan {plan.version} has dispatch online; ranks with several stages need static"
        )
    if plan.dispatch is Dispatch.ONLINE and mesh.lockstep > 1:
        raise InputError(f"plan {plan.version} has dispatch online; {ONLINE_IN_LOCKSTEP}")


def check_offload(plan: Plan, coordinate: Coordinate, no_offload: str) -> None:
    """Raise :class:`InputError` if a plan offloads activations of a stage here that cannot.

    ``no_offload``: why it cannot; empty if it can.
    """
    for stage in coordinate.held:
        limit = plan.device_limits[stage]
        if limit is not None and not plan.recompute[stage] and no_offload:
            raise InputError(
                f"plan {plan.version} moves activations of stage {stage} to host memory"
                f" (device_limit {limit}), but: {no_offload}"
            )


def check_recompute(plan: Plan, coordinate: Coordinate, no_recompute: str) -> None:
    """Raise :class:`InputError` if a plan recomputes on a stage here that cannot.

    ``no_recompute``: why it cannot; empty if it can.
    """
    for stage in coordinate.held:
        if stage in plan.recomputing and no_recompute:
            raise InputError(
                f"plan {plan.version} runs forwards of stage {stage} again"
                f" (device_limit {plan.device_limits[stage]}), but: {no_recompute}"
            )


def check_routes(plan: Plan, ends: Iterable[LinkEnd]) -> None:
    """Raise :class:`InputError` if a plan delegates a link that has no engine link."""
    for end in ends:
        if end.link < len(plan.routes) and not end.has(plan.routes[end.link]):
            raise InputError(
                f"plan {plan.version} delegates link {end.link}, which has no engine link; "
                "build the transfer engine or plan for the direct route"
            )


# --- the plans of this rank ---------------------------------------------------------------


class PlanBook:
    """The plans that one rank has prepared, and the current one (``in_force``).

    ``no_offload``, ``no_recompute``: why this stage cannot offload or recompute; empty if it can.
    Raises :class:`InputError` if
    the first plan does not fit.
    """

    def __init__(
        self,
        first: Plan,
        coordinate: Coordinate,
        ends: Sequence[LinkEnd],
        *,
        no_offload: str,
        no_recompute: str = "",
    ) -> None:
        self._coordinate, self._ends = coordinate, ends
        self._no_offload, self._no_recompute = no_offload, no_recompute
        self._metas: dict[int, tuple[TensorMeta, ...]] = {}
        """Tensors received per link and microbatch, if their shapes are known."""
        self._reserved: dict[int, int] = {}
        """Messages per link for which slots of these shapes are reserved."""
        check_plan(first, first)
        check_routes(first, ends)
        self._plans = {first.version: first}
        self.in_force = first

    @property
    def newest(self) -> int:
        return max(self._plans)

    def prepare(self, plan: Plan, *, page_lock: bool = True) -> bool:
        """Make a plan, or that of this replica in it, ready to run. Returns False, and prepares
        nothing, if this has to page-lock memory of a device and ``page_lock`` forbids it.

        Raises :class:`InputError` if the plan does not fit the job or this rank. Such a plan is
        never committed, since this rank does not hold it.
        """
        plan = plan.of_replica(self._coordinate.replica)
        check_routes(plan, self._ends)
        check_offload(plan, self._coordinate, self._no_offload)
        check_recompute(plan, self._coordinate, self._no_recompute)
        if plan.version <= self.in_force.version or plan.version in self._plans:
            return True
        check_plan(plan, self.in_force)
        check_stages(plan, self._coordinate)
        if not page_lock and any(end.staged and self._lacks(end, plan) for end in self._ends):
            return False
        self.reserve(plan)
        # Computed now, and not in the first iteration of the plan.
        windows(plan)
        self._plans[plan.version] = plan
        return True

    def forbid_offload(self, why: str) -> None:
        """Refuse plans with offload from now on, since the self-test found that the stage cannot
        offload. Raises :class:`InputError` if a prepared plan needs it."""
        self._no_offload = why
        for plan in self._plans.values():
            check_offload(plan, self._coordinate, why)

    def forbid_recompute(self, why: str) -> None:
        """The same for plans that recompute."""
        self._no_recompute = why
        for plan in self._plans.values():
            check_recompute(plan, self._coordinate, why)

    def held(self) -> frozenset[int]:
        """Versions of the prepared plans that are newer than the current one."""
        return frozenset(self._plans) - {self.in_force.version}

    def commit(self, version: int) -> bool:
        """Make ``version`` the current plan and drop older ones. Returns whether it changed. Raises
        :class:`PipelineError` if this rank does not hold it."""
        changed = version != self.in_force.version
        if version not in self._plans:
            held = ", ".join(map(str, sorted(self._plans)))
            raise PipelineError(
                f"{self._coordinate} has to run plan {version}, which it does not hold; it holds "
                f"{held}. Install the same build of PipeMorph on every rank"
            )
        if changed:
            self.in_force = self._plans[version]
            self._plans = {v: plan for v, plan in self._plans.items() if v >= version}
        return changed

    def shapes_known(self, end: LinkEnd, metas: tuple[TensorMeta, ...]) -> None:
        """Reserve slots for every prepared plan, after the shapes of a link became known.

        ``metas``: the tensors that this rank receives on the link, per microbatch.
        """
        self._metas[end.link] = metas
        self._reserved.pop(end.link, None)
        for plan in self._plans.values():
            self._reserve(end, plan)

    def reserve(self, plan: Plan) -> None:
        """Reserve receive slots for a plan's messages on links with known shapes."""
        for end in self._ends:
            self._reserve(end, plan)

    def _reserve(self, end: LinkEnd, plan: Plan) -> None:
        messages = self._lacks(end, plan)
        if not messages:
            return
        assert end.delegated is not None
        end.expect(messages)
        batch = Batch(0, 0, plan.schedule.microbatches, self._metas[end.link])
        end.delegated.reserve(messages, batch)
        self._reserved[end.link] = messages

    def _lacks(self, end: LinkEnd, plan: Plan) -> int:
        """Messages for which a link needs slots under ``plan``; 0 if it has them, or needs none."""
        # On a device, slots are page-locked: too slow to do when a direct route breaks.
        delegated = Route.DELEGATED in (plan.routes[end.link], end.route) or end.staged
        if not self._metas.get(end.link) or end.delegated is None or not delegated:
            return 0
        slack = plan.warmup[end.link] - plan.warmup[end.link + 1]
        messages = min(plan.schedule.microbatches, max(0, slack) + SPARE)
        return messages if messages > self._reserved.get(end.link, 0) else 0
