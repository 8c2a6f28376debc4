"""Whether the API server lists our kind yet.

kopf asks once, when it starts: a kind that is not listed then is never served, though the process
goes on and says that it is ready. A CRD that is installed along with this process, as the chart
does, is listed a moment after it is there, and on a busy API server later than this process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import aiohttp

from pipemorph_operator.cluster.client import ApiRefused, Cluster
from pipemorph_operator.names import API_GROUP, API_VERSION, PLURAL

log = logging.getLogger("pipemorph.operator")

LOOK_SECONDS = 1.0


async def until_listed(cluster: Cluster, stop: asyncio.Event) -> None:
    """Return once the kind is listed, or ``stop`` is set."""
    told = ""
    while not stop.is_set():
        missing = await _missing(cluster)
        if not missing:
            return
        if missing != told:
            log.warning("no job is served yet: %s", missing)
            told = missing
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_SECONDS)


async def _missing(cluster: Cluster) -> str:
    """What is in the way; empty if nothing is."""
    try:
        # As kopf looks: the group's versions first, then the kinds of ours.
        groups = (await cluster.get("/apis") or {}).get("groups") or ()
        kinds = (await cluster.get(f"/apis/{API_VERSION}") or {}).get("resources") or ()
    except (ApiRefused, aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"the API server cannot be asked for its kinds: {error or type(error).__name__}"
    versions = {version["groupVersion"] for group in groups for version in group["versions"]}
    if API_VERSION in versions and PLURAL in {kind["name"] for kind in kinds}:
        return ""
    return f"the API server lists no {PLURAL}.{API_GROUP}; is its CRD installed?"
