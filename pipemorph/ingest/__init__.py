"""The HTTP side of the control loop: reports in, directives out, on a cluster or one machine.

``handler`` implements the protocol without sockets, ``app`` serves it over aiohttp, ``connections``
limits connections, ``interfaces`` defines what a host provides: authentication of callers, lookup
of jobs, persistence of directives.
"""

from pipemorph.ingest.app import IngestServer, Join, make_app
from pipemorph.ingest.connections import Acceptor, ConnectionLimits
from pipemorph.ingest.handler import IngestHandler, Limits, Reply
from pipemorph.ingest.interfaces import (
    Authenticator,
    BearerAuthenticator,
    ControlledJob,
    Identity,
    JobStore,
    MemoryStore,
    Refused,
)
from pipemorph.ingest.planner_pool import Planner, PlannerLost, ProcessPlanner

__all__ = [
    "Acceptor",
    "Authenticator",
    "BearerAuthenticator",
    "ConnectionLimits",
    "ControlledJob",
    "Identity",
    "IngestHandler",
    "IngestServer",
    "JobStore",
    "Join",
    "Limits",
    "MemoryStore",
    "Planner",
    "PlannerLost",
    "ProcessPlanner",
    "Refused",
    "Reply",
    "make_app",
]
