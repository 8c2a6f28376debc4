"""Reserves plan versions in blocks, so that a directive need not wait until it is persisted.

A version must never name two plans. So a host persists up to which version it may serve plans, and
serves these at once. After a crash nobody knows which of them were served: the next host begins
above all of them. Where hosts share a store, its fence makes sure that one at a time reserves.

With each block for itself the host reserves one for the job's agent, which decides while no host
answers. Its versions are above the host's, so that ranks take them for newer ones; the host leaves
them out (:meth:`~pipemorph.control.JobController.leave`). Another agent of the job gets others.
"""

from __future__ import annotations

BLOCK = 64
"""Versions that are reserved at a time. A job that changes its plan every four iterations, which is
the most that the rate limit allows for long, uses them up in 256 iterations."""
LOW = BLOCK // 2
"""The next block is reserved when so many versions are left."""
AGENT_BLOCK = 32
"""Versions of an agent: it decides for minutes, not for days."""


class Versions:
    """The plan versions of a job that a host may serve before they are persisted.

    ``in_use``: the highest that is reserved already. ``granted``: the highest one that may be
    served; 0 before this host has reserved any.
    """

    def __init__(self, in_use: int) -> None:
        self.reserved = in_use
        """What should be persisted: at least what is."""
        self._before = self._persisted = in_use
        self._own = 0
        self.granted = 0
        self._agent, self._given = range(0), False
        self._all_given: list[range] = []

    def may_have(self, version: int) -> bool:
        """Whether ranks may have this version from anybody but this host."""
        return version <= self._before or any(version in given for given in self._all_given)

    def run_out(self, issued: int) -> bool:
        """Whether another block should be reserved. ``issued``: the newest version."""
        return self.granted - issued < LOW or not self._agent

    def reserve(self, issued: int) -> None:
        """Reserve another block with the next write, if this one runs out."""
        if self.run_out(issued):
            # A write that seemed to fail may have got through.
            above = max(self._persisted, issued) + BLOCK + AGENT_BLOCK
            self.reserved = self._own = max(self.reserved, above)

    def written(self, reserved: int) -> None:
        """Note that this has been persisted."""
        self._persisted = max(self._persisted, reserved)
        if reserved == self._own and reserved - AGENT_BLOCK != self.granted:
            self.granted = reserved - AGENT_BLOCK
            self._agent, self._given = range(self.granted + 1, reserved + 1), False

    def for_agent(self) -> range:
        """The versions that the job's agent may give plans; none before they are reserved."""
        if self._agent and not self._given:
            self._given = True
            self._all_given.append(self._agent)
        return self._agent

    def another_agent(self) -> None:
        """Another process is the job's agent: the one before may have used its versions."""
        if self._given:
            self._agent, self._given = range(0), False
