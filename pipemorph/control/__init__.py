"""The control loop: what a job reports, what it should do. Pure; hosts bring clock and sockets.

``detector`` judges one direction of a link, ``health`` a job's links, ``profile`` its stages,
``reports`` takes in, ``judgement`` finds a cause to act, ``forecast`` predicts, ``replan``
proposes, ``controller`` decides, ``reasons`` says why, ``records`` keeps what it was worth,
``snapshot`` what outlives the host.
"""

from pipemorph.control.controller import JobController
from pipemorph.control.first_plan import initial_paths, initial_plan
from pipemorph.control.history import AdaptationRecord, Decision
from pipemorph.control.observe.link_health import Health, LinkHealth
from pipemorph.control.view import JobView

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
