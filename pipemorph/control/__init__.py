"""The control loop of one job: reports in, directives out. Pure; hosts bring clock and sockets.

``controller`` is what hosts call. ``decision`` finds a cause for another plan, as far as measured
iterations confirm it, asks for a proposal, and issues the plan that it chose; ``snapshot`` survives
a restart of the host. ``record`` is what has happened: ``history`` of iterations, what changes of
plan were worth, ``goodput``. ``generations`` says which ranks of pods run.

``observe`` runs in the agent, and judges what ranks measure; ``observed`` is what it has told.
``decide`` has what a decision is made of: its ``state``, with the plans that ranks run, should run,
or return to; the ``situation``; the ``forecast`` of iteration times; ``replan``, which proposes a
plan; and ``reasons``, which has texts and records.
"""

from pipemorph.control.controller import JobController, JobView
from pipemorph.control.first_plan import initial_plan, initial_routes
from pipemorph.control.record.history import Decision
from pipemorph.wire import AdaptationRecord, Health, LinkState, ReductionHealth

__all__ = [
    "AdaptationRecord",
    "Decision",
    "Health",
    "JobController",
    "JobView",
    "LinkState",
    "ReductionHealth",
    "initial_plan",
    "initial_routes",
]
