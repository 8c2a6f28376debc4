"""The plans of a job: which one its ranks run, which one they should, and their version numbers."""

from __future__ import annotations

from dataclasses import replace

from pipemorph.planning import Plan
from pipemorph.wire import Directive

HAND_IN_SECONDS = 5.0
"""Time for the agent to hand in a plan that the controller does not know, before it decides again
without knowing it."""


class PlanVersions:
    """Numbers of plans. They only grow, also across attempts, and no number is ever two plans."""

    def __init__(self) -> None:
        self.newest = 0
        """The newest one issued, or known to be in use; 0 before the first."""
        self._agents = range(0)

    def take(self) -> int:
        """The number of another plan."""
        self.newest += 1
        if self.newest in self._agents:
            self.newest = self._agents.stop
        return self.newest

    def skip_to(self, version: int) -> None:
        """Take only numbers above ``version``: others may be in use."""
        self.newest = max(self.newest, version)

    def leave(self, versions: range) -> None:
        """Never take these: the job's agent may. Those that were left until now may be in use."""
        if versions != self._agents:
            self.skip_to(self._agents.stop - 1)
            self._agents = versions

    def agent_used(self, version: int) -> None:
        """The agent has used the numbers up to ``version``, perhaps those of another host."""
        if version >= self._agents.stop:
            self.skip_to(version)

    def adopt(self, other: PlanVersions) -> None:
        """Leave to the agent what another controller of the job has left to it."""
        self._agents = other._agents


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
        """Whether the ranks have a newer plan than this controller knows."""
        self._hand_in_until = float("-inf")

    @property
    def known(self) -> Plan | None:
        """The plan that the ranks run, or are about to; None if the controller does not know it."""
        return None if self.unknown else self.wanted

    def issue(self, plan: Plan, directive: Directive) -> None:
        """Make ``plan`` the wanted one."""
        self.wanted, self.directive, self.unknown = plan, directive, False

    def applied(self, version: int) -> None:
        """The ranks run the plan of this version."""
        if version == self.wanted.version:
            self.running = self.wanted

    def keep_as_baseline(self) -> None:
        """The wanted plan is that for healthy links from now on."""
        self.baseline = replace(self.wanted, version=0, routes=self.first.routes)

    # --- a plan that is not known -----------------------------------------------------------

    def ranks_have(self, version: int, now: float) -> bool:
        """The ranks have the plan of this version. Returns whether it is newer than the wanted
        one: then the controller has lost its newest state."""
        if version <= self.wanted.version:
            return False
        if not self.unknown:
            self.unknown, self._hand_in_until = True, now + HAND_IN_SECONDS
        return True

    def awaits(self, now: float) -> bool:
        """Whether the agent should hand in its plan, and it may still come."""
        return self.unknown and now < self._hand_in_until

    @property
    def may_be_handed_in(self) -> bool:
        """Whether the ranks run a plan that the controller does not know, and would accept."""
        return self.unknown and self._hand_in_until > float("-inf")

    def refuse(self) -> None:
        """The plan that was handed in is not a good one: go on without knowing it."""
        self._hand_in_until = float("-inf")

    def hand_in(self, plan: Plan, directive: Directive) -> None:
        """The ranks run this plan, which was not known."""
        self.issue(plan, directive)
        self.running = plan
