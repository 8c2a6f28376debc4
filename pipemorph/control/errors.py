"""Reports a controller turns down. State is as if they had never come."""

from __future__ import annotations

from pipemorph.errors import PipeMorphError


class ReportRefused(PipeMorphError):
    """Base of the reasons below; the message is one line."""


class WrongAttempt(ReportRefused):
    """The report is of another attempt of the job than the one in progress."""


class ReplayedReport(ReportRefused):
    """The report's sequence number is not above ``last``, the last one accepted."""

    def __init__(self, sequence: int, last: int) -> None:
        super().__init__(f"sequence {sequence} is not above {last}, the last one taken")
        self.last = last


class ReportMismatch(ReportRefused):
    """The report names something the job does not have. ``field`` says where."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
