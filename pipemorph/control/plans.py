"""The plans of a job: which one its ranks run, which one they should, and their version numbers."""

from __future__ import annotations

from dataclasses import replace

from pipemorph.control.observed.reports import Superseded
from pipemorph.planning import Plan
from pipemorph.wire import Directive

HAND_IN_SECONDS = 5.0
"""Time for the agent to hand in its snapshot, before the controller decides without it."""


class PlanVersions:
    """Numbers of plans. They only grow, also across attempts.

    Two hosts may give one number to two plans, when one takes over from the other: of these, the
    ranks run the one that reached their agent first, and the other host gives its plan another
    number (:meth:`Plans.ranks_have`). ``term``: of the lease of this host.
    """

    def __init__(self, term: int = 0) -> None:
        self.newest = 0
        """The newest one issued, or known to be in use; 0 before the first."""
        self.term = term
        """Of this host in this job: above that of all hosts before it, once the agent reports."""
        self._met = False

    def take(self) -> int:
        """The number of another plan."""
        self.newest += 1
        return self.newest

    def skip_to(self, version: int) -> None:
        """Take only numbers above ``version``: others may be in use."""
        self.newest = max(self.newest, version)

    def meet(self, reported: int | None) -> None:
        """Take the highest term that the agent has seen; None: it has seen no host.

        The term of a lease begins at 0 again when the lease is made anew. So it is not enough.
        Raises :class:`Superseded` if the agent has met a later host since.
        """
        if self._met and reported is not None and reported > self.term:
            raise Superseded(reported, self.term)
        if not self._met and reported is not None:
            self.term = max(self.term, reported + 1)
        self._met = True

    def adopt(self, other: PlanVersions) -> None:
        """Go on with the numbers of another controller of the same job and host."""
        self.skip_to(other.newest)
        self.term, self._met = other.term, other._met


class Plans:
    """The plans of one attempt, which begins with that of the spec, ``first``."""

    def __init__(self, first: Plan) -> None:
        self.first = first
        self.wanted = self.running = first
        """The plan of the newest directive, and the one that ranks are known to run."""
        self.baseline = first
        """The plan for healthy links: that of the spec, unless measurements require another."""
        self.directive: Directive | None = None
        self.unknown = False
        """Whether the ranks have a plan that this controller does not know."""
        self._confirmed = False
        """Whether the agent has reported the wanted plan as its newest."""
        self._hand_in_until = float("-inf")

    @property
    def known(self) -> Plan | None:
        """The plan that the ranks run, or are about to; None if the controller does not know it."""
        return None if self.unknown else self.wanted

    def issue(self, plan: Plan, directive: Directive) -> None:
        """Make ``plan`` the wanted one."""
        self.wanted, self.directive = plan, directive
        self.unknown = self._confirmed = False
        self.refuse()

    def applied(self, version: int) -> None:
        """The ranks run the plan of this version."""
        if version == self.wanted.version and not self.unknown:
            self.running = self.wanted

    def keep_as_baseline(self) -> None:
        """The wanted plan is that for healthy links from now on."""
        self.baseline = replace(self.wanted, version=0, routes=self.first.routes)

    # --- a plan that is not known -----------------------------------------------------------

    def ranks_have(self, version: int, issued_at: float | None, now: float) -> bool:
        """Take the newest plan of the ranks: its version, and when it was issued, see
        :attr:`~.observed.reports.Observed.newest_plan_version`. Returns whether this controller
        does not know it.

        Another host may have given the version of the wanted plan to the plan of the ranks. Then
        the wanted plan will never run: there is none any more.
        """
        if version < self.wanted.version:
            return False
        if version == self.wanted.version:
            ours = self.directive is None or issued_at in (None, self.directive.issued_at)
            self._confirmed |= ours
            if self._confirmed:
                return False
            self.wanted, self.directive = self.first, None
        if not self.unknown:
            self.unknown = True
            self.expect(now)
        return True

    def expect(self, now: float) -> None:
        """Wait for the snapshot of the agent."""
        self._hand_in_until = now + HAND_IN_SECONDS

    def awaits(self, now: float) -> bool:
        """Whether the agent should hand in its snapshot, and it may still come."""
        return now < self._hand_in_until

    @property
    def may_be_handed_in(self) -> bool:
        """Whether a snapshot of the agent would be accepted."""
        return self._hand_in_until > float("-inf")

    def refuse(self) -> None:
        """Wait for no snapshot, and accept none."""
        self._hand_in_until = float("-inf")
