"""The control loop of one job: reports in, directives out. Pure; hosts bring clock and sockets.

``observe`` processes reports: ``detector`` judges one direction of a link, ``link_health`` a job's
links, ``stage_profile`` its stages, ``reductions`` their gradient reductions. ``decide`` makes
decisions: ``triggers`` finds a cause, ``forecast`` predicts iteration times, ``replan`` proposes a
plan with its ``findings``, ``reasons`` turns them into text. ``controller`` runs the loop and
issues plans, ``history`` records the effect of each, ``worth`` what they were worth together,
``goodput`` how much of a job's time counts, and ``snapshot`` is the state that survives a restart
of the host. ``generations`` says which ranks of pods run.
"""

from pipemorph.control.controller import JobController
from pipemorph.control.first_plan import initial_plan, initial_routes
from pipemorph.control.history import Decision
from pipemorph.control.observed.links import Health, LinkHealth
from pipemorph.control.view import JobView
from pipemorph.wire import AdaptationRecord, ReductionHealth

__all__ = [
    "AdaptationRecord",
    "Decision",
    "Health",
    "JobController",
    "JobView",
    "LinkHealth",
    "ReductionHealth",
    "initial_plan",
    "initial_routes",
]
