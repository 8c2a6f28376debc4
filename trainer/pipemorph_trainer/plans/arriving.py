"""Takes the plans that arrive while a rank trains, and prepares them between two ops."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from pipemorph.api.mesh import Coordinate
from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph_trainer.agent.messages import ControlClient
from pipemorph_trainer.agent.rank_plan import RankPlan, cut
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.plans.book import PlanBook
from pipemorph_trainer.plans.token import Agreement
from pipemorph_trainer.telemetry.reporter import Reporter
from pipemorph_trainer.trackers.listeners import Listeners

log = logging.getLogger("pipemorph.trainer")


class ArrivingPlans:
    """Adds plans from ``control`` to those of this rank. Main thread only.

    Args:
        coordinate: of this rank; ``ends``: of its links.
        plans: get each plan. ``agreements``, one per stage here, tell the stages above of it.
        reporter, listeners: told of each plan.
        warm: whether it is known what the stages here can do. Until then plans wait.
    """

    def __init__(
        self,
        *,
        coordinate: Coordinate,
        ends: Sequence[LinkEnd],
        plans: PlanBook,
        agreements: Collection[Agreement],
        control: ControlClient,
        reporter: Reporter,
        listeners: Listeners,
        warm: bool,
    ) -> None:
        self._coordinate, self._ends, self._plans = coordinate, ends, plans
        self._agreements, self._control = agreements, control
        self._reporter, self._listeners = reporter, listeners
        self.warm = warm
        self._postponed: RankPlan | None = None
        """A plan that is prepared at the end of the iteration."""

    def install(self, plan: Plan) -> None:
        """Prepare a plan on this rank, between two iterations. Raises :class:`InputError` if it
        does not fit this job."""
        at = self._coordinate
        (mine,) = cut(plan, at.mesh, [at.along("pp")])
        self._prepare(mine, page_lock=True)

    def take(self, *, page_lock: bool) -> None:
        """Prepare a plan that has arrived, and look what the stages below hold.

        Between ops, no memory may be page-locked, since that may wait for all work of the device,
        and with it for a posted receive. In the first iteration it is not known what the stage can
        do. Then the plan waits for the end of the iteration.
        """
        for end in self._ends:
            end.socket.pump()
        plan = self._control.newest_plan() if self._reporter.listened_to else None
        if plan is not None:
            self._listeners.heard(plan)
            self._postponed = plan
            if self.warm:
                self.prepare_postponed(page_lock=page_lock)

    def prepare_postponed(self, *, page_lock: bool = True) -> None:
        """Prepare the plan that waits, if any, unless it needs memory that must not be page-locked
        now. One that does not fit is refused, which is reported."""
        plan = self._postponed
        if plan is None:
            return
        try:
            if not self._prepare(plan, page_lock=page_lock):
                return
        except InputError as error:
            log.warning("%s: plan %d refused: %s", self._coordinate, plan.version, error)
            self._reporter.publish(message=f"plan {plan.version} refused: {error}")
        self._postponed = None

    def _prepare(self, plan: RankPlan, *, page_lock: bool) -> bool:
        """Prepare a plan, and tell the stages above; see :meth:`PlanBook.prepare`."""
        prepared = self._plans.prepare(plan, page_lock=page_lock)
        if prepared:
            self._reporter.prepared = self._plans.newest
            for agreement in self._agreements:
                agreement.tell()
        return prepared
