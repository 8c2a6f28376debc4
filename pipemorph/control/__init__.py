"""The control loop: what a job reports, what it should do. Pure; hosts bring clock and sockets.

``detector`` judges one direction of a link, ``health`` a job's links, ``profile`` its stages,
``forecast`` predicts, ``controller`` decides, ``records`` keeps what it was worth.
"""

from pipemorph.control.controller import JobController, JobView
from pipemorph.control.health import Health, LinkHealth
from pipemorph.control.initial import initial_paths, initial_plan
from pipemorph.control.records import AdaptationRecord, Decision

__all__ = [
    "AdaptationRecord",
    "Decision",
    "Health",
    "JobController",
    "JobView",
    "LinkHealth",
    "initial_paths",
    "initial_plan",
]
