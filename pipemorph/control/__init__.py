"""The control loop: what a job reports, what it should do. Pure; hosts bring clock and sockets.

Three steps. ``observe`` takes reports in: ``detector`` judges one direction of a link,
``link_health`` a job's links, ``stage_profile`` its stages. ``decide`` makes of them a decision:
``triggers`` finds a cause, ``forecast`` predicts, ``replan`` proposes with its ``findings``,
``reasons`` writes the sentences. ``controller`` runs the loop and issues plans, ``history`` keeps
what each was worth, ``snapshot`` what outlives the host.
"""

from pipemorph.control.controller import JobController
from pipemorph.control.first_plan import initial_plan, initial_routes
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
    "initial_plan",
    "initial_routes",
]
