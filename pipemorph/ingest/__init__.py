"""The HTTP side of the control loop: reports in, directives out, on a cluster or one machine.

``handler`` implements the protocol without sockets, ``app`` serves it over aiohttp, ``connections``
limits connections, ``interfaces`` defines what a host provides: authentication of callers, lookup
of jobs, persistence of status.
``planner_pool`` makes the decisions of many jobs in turn. ``generations`` answers launchers of
pods.
"""

from pipemorph.ingest.app import IngestServer, Join, make_app
from pipemorph.ingest.connections import Acceptor, ConnectionLimits, open_files_limit
from pipemorph.ingest.generations import GenerationDesk, GenerationStore, PollLimits
from pipemorph.ingest.handler import IngestHandler, Limits, Reply
from pipemorph.ingest.interfaces import (
    Authenticator,
    BearerAuthenticator,
    Identity,
    JobStore,
    MemoryStore,
    Refused,
)
from pipemorph.ingest.planner_pool import (
    FirstPlanner,
    Planner,
    PlannerLost,
    PlannerPool,
    Search,
    search_here,
)

__all__ = [
    "Acceptor",
    "Authenticator",
    "BearerAuthenticator",
    "ConnectionLimits",
    "FirstPlanner",
    "GenerationDesk",
    "GenerationStore",
    "Identity",
    "IngestHandler",
    "IngestServer",
    "JobStore",
    "Join",
    "Limits",
    "MemoryStore",
    "Planner",
    "PlannerLost",
    "PlannerPool",
    "PollLimits",
    "Refused",
    "Reply",
    "Search",
    "make_app",
    "open_files_limit",
    "search_here",
]
