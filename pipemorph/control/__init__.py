"""Control loop of one job: reports in, directives out. Pure; hosts bring clock and sockets.

Hosts call ``controller``. A report updates ``job_state``, the state of the job. ``decision`` looks
there for a cause to change the plan, checks it against measured iterations, requests a proposal and
issues the plan that was chosen. ``snapshot`` carries the controller's state to the next host.

``decide`` makes the choice: ``decision_state`` holds the plans that ranks run, should run or return
to; ``situation`` the measurements; ``forecast`` predicts iteration times; ``plan_choice`` proposes
a plan; ``reasons`` writes texts and records. ``history`` has the history of iterations, changes of
plan, their worth, and goodput. ``job_generations`` decides which ranks of the job's pods run.
"""

from pipemorph.control.controller import JobController, JobView
from pipemorph.control.first_plan import initial_plan, initial_routes
from pipemorph.control.history.job_history import DecisionRecord
from pipemorph.protocol import AdaptationRecord, Health, LinkState, ReductionHealth

__all__ = [
    "AdaptationRecord",
    "DecisionRecord",
    "Health",
    "JobController",
    "JobView",
    "LinkState",
    "ReductionHealth",
    "initial_plan",
    "initial_routes",
]
