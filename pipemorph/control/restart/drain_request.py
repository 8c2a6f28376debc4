"""Requests that the ranks of a generation leave between two iterations: for replicas that are
complete again, or for another layout. Pure.

Ranks may refuse, with a reason. A request for replicas is repeated later; one for a layout is not.
"""

from __future__ import annotations

from math import inf

from pipemorph.control.restart.layout_transition import LayoutTransition
from pipemorph.spec.layout import RankLayout

LEAVE_SECONDS = 600.0
"""Seconds to wait for ranks that are requested to leave and do not report."""
STAY_SECONDS = 60.0
"""Seconds until ranks that refused to leave receive another request."""


class DrainRequest:
    """Requests to leave of one job. ``layouts``: with the requested one. Times: wall clock,
    seconds."""

    def __init__(self, layouts: LayoutTransition) -> None:
        self._layout_transition = layouts
        self.begin_generation()

    def begin_generation(self) -> None:
        """Forget the requests to the ranks before."""
        self.is_requested = False
        """True if the ranks are requested to leave."""
        self._newest_report_at = -inf
        """Time of the newest report of ranks of this generation, or of the first request."""
        self._requested_at = inf
        """Time of the request to leave for another layout."""
        self._stay_reason: tuple[str, float] | None = None
        """Reason why the ranks refused to leave, and its time."""

    @property
    def stay_reason(self) -> str:
        """Reason why the ranks have not left on the last request; empty if they could."""
        return self._stay_reason[0] if self._stay_reason is not None else ""

    @property
    def end_reason(self) -> str:
        """Reason for the end of a generation without a failed rank."""
        if self._layout_transition.requested_layout:
            return f"the ranks leave for {self._layout_transition.requested_layout}"
        return "a replica can join" if self.is_requested else "the ranks have ended"

    @property
    def _for_layout(self) -> bool:
        return self.is_requested and bool(self._layout_transition.requested_layout)

    def record_activity(self, now: float) -> None:
        """Record the time of a report of ranks of this generation."""
        self._newest_report_at = max(self._newest_report_at, now)

    def request_for_layout(
        self, layout: RankLayout, now: float, promised: float | None, *, undoes: bool
    ) -> None:
        """Request that ranks leave for a layout. ``promised``: expected saving, as a fraction of an
        iteration, if known; ``undoes``: see :attr:`LayoutTransition.undoes_change`."""
        self.is_requested, self._stay_reason, self._requested_at = True, None, now
        self._layout_transition.request_layout(layout, promised, undoes=undoes)

    def request_for_replicas(self, now: float) -> None:
        """Request that ranks leave for replicas whose pods are all present."""
        self.is_requested, self._newest_report_at = True, now

    def withdraw_request(self, why: str, now: float) -> None:
        """Withdraw the request: the ranks stay, for the reason ``why``."""
        self.is_requested, self._stay_reason = False, (why, now)
        self._layout_transition.begin_generation()

    def get_departure_deadline(self) -> float:
        """Time by which ranks must begin to leave for another layout; infinite: no request."""
        return self._requested_at + LEAVE_SECONDS if self._for_layout else inf

    def get_silence_deadline(self) -> float:
        """Time at which ranks that are to leave for replicas have been silent for too long;
        infinite: no such request."""
        return (
            self._newest_report_at + LEAVE_SECONDS
            if self.is_requested and not self._for_layout
            else inf
        )

    def get_retry_time(self) -> float:
        """Time from which ranks that refused may receive another request for replicas."""
        return -inf if self._stay_reason is None else self._stay_reason[1] + STAY_SECONDS
