"""Reserves plan versions in blocks, so that a directive need not wait until it is persisted.

A version must never name two plans. So the ingest writes to status up to which version it may
serve plans, and serves these at once. After a crash nobody knows which of them were served: the
next ingest begins above all of them. The fence of status writes makes sure that one ingest at a
time reserves.
"""

from __future__ import annotations

from pipemorph.api.status import ControlState

BLOCK = 64
"""Versions that are reserved at a time. A job that changes its plan every four iterations, which is
the most that the rate limit allows for long, uses them up in 256 iterations."""
LOW = BLOCK // 2
"""The next block is reserved when so many versions are left."""


class Versions:
    """The plan versions of a job that this ingest may serve before they are persisted.

    ``control``: as read from the job. What another ingest has reserved, it may have served.
    ``granted``: the highest version; 0 before this ingest has reserved any. ``in_use``: the highest
    version that ranks may have from another ingest.
    """

    def __init__(self, control: ControlState | None) -> None:
        found = (control.reserved or 0, control.plan_version) if control is not None else (0,)
        self.in_use = self.reserved = max(found)
        """What status should say: at least what it says."""
        self._own = 0
        self.granted = 0

    def run_out(self, issued: int) -> bool:
        """Whether another block should be reserved. ``issued``: the newest version."""
        return self.granted - issued < LOW

    def reserve(self, issued: int) -> None:
        """Reserve another block with the next write, if this one runs out."""
        if self.run_out(issued):
            # A write that seemed to fail may have got through.
            self.reserved = self._own = max(self.reserved, issued + BLOCK)

    def written(self, reserved: int) -> None:
        """Status says so now."""
        if reserved == self._own:
            self.granted = reserved
