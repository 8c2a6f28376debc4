"""Plans that a rank has prepared, and the checks that it can run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning import Route
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.agent.receive_windows import SPARE_MESSAGES
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.transport.link import LinkEnd
from pipemorph_trainer.transport.message import Direction, MessageBatch, TensorMeta

# --- checks whether a plan may run on this rank -------------------------------------------


def check_device_limits(
    plan: RankPlan, no_offload: Mapping[int, str], no_recompute: Mapping[int, str]
) -> None:
    """Raise :class:`InputError` if a plan offloads activations, or recomputes them, on a stage here
    that cannot. ``no_offload``, ``no_recompute``: by stage, why it cannot; empty if it can."""
    for mine in plan.stages:
        why = (no_recompute if mine.recompute else no_offload).get(mine.stage)
        if mine.device_limit is not None and why:
            does = (
                f"runs forwards of stage {mine.stage} again"
                if mine.recompute
                else f"moves activations of stage {mine.stage} to host memory"
            )
            raise InputError(
                f"plan {plan.version} {does} (device_limit {mine.device_limit}), but: {why}"
            )


def check_shares(plan: RankPlan, *, rebalances: bool) -> None:
    """Raise :class:`InputError` if a plan has shares, and replicas must have equal numbers of
    microbatches."""
    if plan.shares and not rebalances:
        raise InputError(
            f"plan {plan.version} gives the replicas {list(plan.shares)} microbatches; that needs"
            " adaptation.rebalance: true, in a script Options(rebalance=True)"
        )


def check_routes(plan: RankPlan, ends: Iterable[LinkEnd]) -> None:
    """Raise :class:`InputError` if a plan gives a link a route that the link does not have."""
    for end in ends:
        route = plan.by_link[end.link].route
        if route is Route.DIRECT and end.no_direct is not None:
            raise InputError(
                f"plan {plan.version} has link {end.link} on the direct route, but "
                f"{end.no_direct}; give each rank a GPU, or set transport.route: delegated, as a "
                'script Pipeline(options=Options(route="delegated"))'
            )
        if not end.has_route(route):
            raise InputError(
                f"plan {plan.version} delegates link {end.link}, which has no engine link; "
                "build the transfer engine or plan for the direct route"
            )


# --- the plans of this rank ---------------------------------------------------------------


class PlanStore:
    """Plans that one rank has prepared, and the current one (``current_plan``).

    ``no_offload``, ``no_recompute``: by stage, why it cannot offload or recompute; empty, or
    without an entry, if it can. ``rebalances``: plans may have shares. Raises :class:`InputError`
    if the first plan does not fit.
    """

    def __init__(
        self,
        first: RankPlan,
        coordinate: Coordinate,
        ends: Sequence[LinkEnd],
        *,
        no_offload: Mapping[int, str],
        no_recompute: Mapping[int, str],
        rebalances: bool = False,
    ) -> None:
        self.rebalances = rebalances
        """True if plans may give replicas unequal numbers of microbatches."""
        self._coordinate, self._ends = coordinate, ends
        self._no_offload, self._no_recompute = dict(no_offload), dict(no_recompute)
        self._metas: dict[int, tuple[TensorMeta, ...]] = {}
        """Tensors received per link and microbatch, once their shapes are known."""
        self._reserved: dict[int, _ReservedSlots] = {}
        """Reserved slots of these shapes, per link."""
        check_routes(first, ends)
        self._plans = {first.version: first}
        self.current_plan = first

    @property
    def newest_version(self) -> int:
        """Newest version that this rank holds."""
        return max(self._plans)

    def prepare_plan(self, plan: RankPlan, *, page_lock: bool = True) -> bool:
        """Prepare a plan to run. Returns False, and prepares nothing, if this must page-lock memory
        of a device and ``page_lock`` forbids it.

        Raises :class:`InputError` if the plan does not fit the job or this rank. Such a plan is
        never committed, since this rank does not hold it.
        """
        if plan.version <= self.current_plan.version or plan.version in self._plans:
            return True
        have, want = self._count_microbatches(self.current_plan), self._count_microbatches(plan)
        if (plan.stage_count, want) != (self.current_plan.stage_count, have):
            raise InputError(
                f"plan {plan.version} has {plan.stage_count} stages and {want} microbatches; the "
                f"job runs {self.current_plan.stage_count} and {have}"
            )
        if tuple(mine.stage for mine in plan.stages) != self._coordinate.held_stages:
            raise InputError(
                f"plan {plan.version} is of stages {[mine.stage for mine in plan.stages]}; this "
                f"rank has {list(self._coordinate.held_stages)}"
            )
        check_shares(plan, rebalances=self.rebalances)
        check_routes(plan, self._ends)
        check_device_limits(plan, self._no_offload, self._no_recompute)
        if not page_lock and any(
            end.staged and self._find_missing_slots(end, plan) for end in self._ends
        ):
            return False
        self.reserve_slots(plan)
        self._plans[plan.version] = plan
        return True

    def _count_microbatches(self, plan: RankPlan) -> int:
        """Count the microbatches of a replica if all have as many."""
        return sum(plan.shares) // self._coordinate.mesh.replicas or plan.microbatches

    def forbid_offload(self, stage: int, why: str) -> None:
        """Refuse plans that offload on ``stage`` from now on, since a test has found that it
        cannot. Raises :class:`InputError` if a prepared plan needs it."""
        self._no_offload[stage] = why
        for plan in self._plans.values():
            check_device_limits(plan, self._no_offload, {})

    def find_plan(self, version: int) -> RankPlan | None:
        """Find a prepared plan, or the current one; None if this rank does not hold it."""
        return self._plans.get(version)

    def get_plan(self, version: int) -> RankPlan:
        """Return the prepared plan of a version. Raises :class:`PipelineError` if there is none."""
        if version not in self._plans:
            held = ", ".join(map(str, sorted(self._plans)))
            raise PipelineError(
                f"{self._coordinate} must run plan {version}, which it does not hold; it holds "
                f"{held}. Install the same build of PipeMorph on every rank"
            )
        return self._plans[version]

    def find_digest(self, version: int) -> str | None:
        """Return the digest of a version's whole plan; None if this rank does not hold it."""
        plan = self._plans.get(version)
        return plan.digest if plan is not None else None

    def list_held_versions(self) -> frozenset[int]:
        """Return the versions of prepared plans that are newer than the current one."""
        return frozenset(self._plans) - {self.current_plan.version}

    def commit_version(self, version: int) -> bool:
        """Make ``version`` the current plan and drop older ones. Returns True if it changed. Raises
        :class:`PipelineError` if this rank does not hold it."""
        changed, plan = version != self.current_plan.version, self.get_plan(version)
        if changed:
            self.current_plan = plan
            self._plans = {v: plan for v, plan in self._plans.items() if v >= version}
        return changed

    def set_link_shapes(self, end: LinkEnd, metas: tuple[TensorMeta, ...]) -> None:
        """Reserve slots for every prepared plan, after the shapes of a link became known.

        ``metas``: the tensors that this rank receives on the link, per microbatch.
        """
        self._metas[end.link] = metas
        self._reserved.pop(end.link, None)
        for plan in self._plans.values():
            self._reserve_link_slots(end, plan)

    def reserve_slots(self, plan: RankPlan) -> None:
        """Reserve receive slots for a plan's messages on links with known shapes."""
        for end in self._ends:
            self._reserve_link_slots(end, plan)

    def _reserve_link_slots(self, end: LinkEnd, plan: RankPlan) -> None:
        lacks = self._find_missing_slots(end, plan)
        if lacks is None:
            return
        assert end.delegated is not None
        end.expect_messages(lacks.messages)
        batch = MessageBatch(0, 0, plan.microbatches, self._metas[end.link])
        end.delegated.reserve_slots(lacks.messages, batch, lacks.used)
        self._reserved[end.link] = lacks

    def _find_missing_slots(self, end: LinkEnd, plan: RankPlan) -> _ReservedSlots | None:
        """Return the slots that a link needs under ``plan`` and earlier ones; None if it has them,
        or needs none."""
        # On a device, slots are page-locked: too slow to do when a direct route breaks.
        planned = plan.by_link[end.link]
        delegated = Route.DELEGATED in (planned.route, end.route) or end.staged
        if not self._metas.get(end.link) or end.delegated is None or not delegated:
            return None
        has = self._reserved.get(end.link, _ReservedSlots(0, 0))
        messages = min(plan.microbatches, max(0, planned.slack) + SPARE_MESSAGES)
        used = 0
        if not end.staged:  # On a device, ops use their own tensors.
            upper = end.receives is Direction.FORWARD
            used = plan.count_peak_activations(end.link + upper)[end.receives]
        wants = _ReservedSlots(max(messages, has.messages), max(used, has.used))
        return wants if wants != has else None


class _ReservedSlots(NamedTuple):
    """Reserved slots of a link. ``messages``: those ahead of their ops; ``used``: those that ops
    need, which read messages in place."""

    messages: int
    used: int
