"""The HTTP side of the control loop: reports in, directives out, on a cluster or one machine.

``handler`` implements the protocol without sockets, ``app`` serves it over aiohttp, ``connections``
limits connections, ``interfaces`` defines what a host provides: authentication of callers, lookup
of jobs, persistence of status. ``planner_pool`` makes the decisions of many jobs in turn.
``restart_handler`` answers the launchers of pods.
"""

from pipemorph.ingest.app import IngestServer, Join, make_app
from pipemorph.ingest.connections import Acceptor, ConnectionLimits, raise_open_files_limit
from pipemorph.ingest.handler import IngestHandler, RateLimits, Reply
from pipemorph.ingest.interfaces import (
    AccessDeniedError,
    Authenticator,
    BearerAuthenticator,
    Identity,
    InMemoryJobStore,
    JobStore,
)
from pipemorph.ingest.planner_pool import (
    FirstPlanner,
    Planner,
    PlannerLostError,
    PlannerPool,
    Search,
    search_in_process,
)
from pipemorph.ingest.restart_handler import GenerationStore, PollLimits, RestartHandler

__all__ = [
    "Acceptor",
    "AccessDeniedError",
    "Authenticator",
    "BearerAuthenticator",
    "ConnectionLimits",
    "FirstPlanner",
    "GenerationStore",
    "Identity",
    "InMemoryJobStore",
    "IngestHandler",
    "IngestServer",
    "JobStore",
    "Join",
    "Planner",
    "PlannerLostError",
    "PlannerPool",
    "PollLimits",
    "RateLimits",
    "Reply",
    "RestartHandler",
    "Search",
    "make_app",
    "raise_open_files_limit",
    "search_in_process",
]
