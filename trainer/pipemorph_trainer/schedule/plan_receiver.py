"""Plans that arrive while a rank trains, prepared between two ops."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.agent.messages import ControlClient
from pipemorph_trainer.agent.rank_plan import RankPlan, split_plan
from pipemorph_trainer.schedule.plan_agreement import PlanAgreement
from pipemorph_trainer.schedule.plan_store import PlanStore
from pipemorph_trainer.telemetry.reporter import TelemetryReporter
from pipemorph_trainer.trackers.listeners import IterationListeners
from pipemorph_trainer.transport.link import LinkEnd

log = logging.getLogger("pipemorph.trainer")


class PlanReceiver:
    """Receiver of plans: adds those from ``control`` to those of this rank. Main thread only.

    Args:
        coordinate: this rank's; ``ends``: those of its links.
        plans: get each plan. ``agreements``, one per stage here, announce it to the stages above.
        reporter, listeners: get each plan.
        warm: the stages here have measured whether they can offload. Until then plans wait.
        orders: stage 0 orders the microbatches of each iteration.
    """

    def __init__(
        self,
        *,
        coordinate: Coordinate,
        ends: Sequence[LinkEnd],
        plans: PlanStore,
        agreements: Collection[PlanAgreement],
        control: ControlClient,
        reporter: TelemetryReporter,
        listeners: IterationListeners,
        warm: bool,
        orders: bool = False,
    ) -> None:
        self._coordinate, self._ends, self._plans = coordinate, ends, plans
        self._agreements, self._control = agreements, control
        self._reporter, self._listeners = reporter, listeners
        self.warm, self._orders = warm, orders
        self._postponed: RankPlan | None = None
        """Plan to prepare at the end of the iteration."""

    def install_plan(self, plan: Plan) -> None:
        """Prepare a plan on this rank, between two iterations. Raises :class:`InputError` if it
        does not fit this job."""
        at = self._coordinate
        (mine,) = split_plan(
            plan, at.mesh, [at.index_along("pp")], replica=at.replica, orders=self._orders
        )
        self._prepare_plan(mine, page_lock=True)

    def take_plan(self, *, page_lock: bool) -> None:
        """Prepare a plan that has arrived, and read which versions the stages below hold.

        Between ops, no memory may be page-locked, since that may wait for all work of the device,
        and so for a posted receive. Such a plan waits for the end of the iteration, as do all in
        the first iteration, whose end shows what the stage can do.
        """
        for end in self._ends:
            end.socket.read_arrived()
        plan = self._control.pop_newest_plan() if self._reporter.has_listener else None
        if plan is not None:
            self._listeners.record_plan(plan)
            self._postponed = plan
            if self.warm:
                self.prepare_postponed(page_lock=page_lock)

    def prepare_postponed(self, *, page_lock: bool = True) -> None:
        """Prepare the plan that waits, if any, unless it needs memory that must not be page-locked
        now. A plan that does not fit is refused, which is reported."""
        plan = self._postponed
        if plan is None:
            return
        try:
            if not self._prepare_plan(plan, page_lock=page_lock):
                return
        except InputError as error:
            log.warning("%s: plan %d refused: %s", self._coordinate, plan.version, error)
            self._reporter.publish(message=f"plan {plan.version} refused: {error}")
        self._postponed = None

    def _prepare_plan(self, plan: RankPlan, *, page_lock: bool) -> bool:
        """Prepare a plan, and announce it to the stages above; see
        :meth:`PlanStore.prepare_plan`."""
        prepared = self._plans.prepare_plan(plan, page_lock=page_lock)
        if prepared:
            self._reporter.prepared = self._plans.newest_version
            for agreement in self._agreements:
                agreement.send_held_versions()
        return prepared
