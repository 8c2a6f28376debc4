"""Waits until the API server lists PipeMorphJobs.

kopf checks once, at start: a kind that is not listed then is never watched, although the process
runs and reports ready. The chart installs the CRD together with this process, and the API server
lists a new CRD with a delay, on a busy one later than this process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from pipemorph_operator.cluster.client import REQUEST_ERRORS, Cluster, reason_of
from pipemorph_operator.names import API_GROUP, API_VERSION, PLURAL

log = logging.getLogger("pipemorph.operator")

LOOK_SECONDS = 1.0


async def until_listed(cluster: Cluster, stop: asyncio.Event) -> None:
    """Return once the kind is listed, or ``stop`` is set."""
    logged = ""
    while not stop.is_set():
        missing = await _missing(cluster)
        if not missing:
            return
        if missing != logged:
            log.warning("waiting for the CRD: %s", missing)
            logged = missing
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_SECONDS)


async def _missing(cluster: Cluster) -> str:
    """Why the kind is not served yet; empty if it is."""
    try:
        # The same two requests as kopf's: versions of the group, then kinds of our version.
        groups = (await cluster.get("/apis") or {}).get("groups") or ()
        kinds = (await cluster.get(f"/apis/{API_VERSION}") or {}).get("resources") or ()
    except REQUEST_ERRORS as error:
        return f"cannot list the API server's resources: {reason_of(error)}"
    versions = {version["groupVersion"] for group in groups for version in group["versions"]}
    if API_VERSION in versions and PLURAL in {kind["name"] for kind in kinds}:
        return ""
    return f"the API server does not list {PLURAL}.{API_GROUP}; is its CRD installed?"
