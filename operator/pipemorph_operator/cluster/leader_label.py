"""The label of the pod that leads, by which a Service selects it.

The leader labels its own pod and no other one of its Deployment, and checks that every few seconds:
a leader that died may still have the label, and so may a container that was started again in its
pod. Until the label is removed there, requests that meet that pod are answered with 503.
"""

from __future__ import annotations

import asyncio
import logging

from pipemorph_operator.cluster.client import REQUEST_ERRORS, Cluster, path, reason_of
from pipemorph_operator.names import LABEL_LEADER

log = logging.getLogger("pipemorph.election")

CHECK_SECONDS, RETRY_SECONDS = 5.0, 0.5
REMOVE_SECONDS = 1.0
"""Limit for the removal of a label; the Lease of a leader that stops lasts longer."""


class LeaderLabel:
    """``pod``: name of this process's pod. ``selector``: label selector of all pods of its
    Deployment. ``owner``: field owner of the label."""

    def __init__(
        self, cluster: Cluster, namespace: str, pod: str, selector: str, *, owner: str
    ) -> None:
        self._cluster = cluster
        self._namespace, self._pod = namespace, pod
        self._selector, self._owner = selector, owner

    async def hold(self, leading: Cluster) -> None:
        """Label this pod alone, and check the labels again, until cancelled. ``leading``: client
        that writes only while this process leads."""
        failing = False
        while True:
            try:
                await self._take(leading)
                failing = False
            except REQUEST_ERRORS as error:
                if not failing:
                    log.warning("the leader's pod could not be labelled: %s", reason_of(error))
                failing = True
            await asyncio.sleep(RETRY_SECONDS if failing else CHECK_SECONDS)

    async def _take(self, leading: Cluster) -> None:
        labelled = await leading.list(
            path("Pod", self._namespace), labels=f"{self._selector},{LABEL_LEADER}=true"
        )
        pods = {pod["metadata"]["name"] for pod in labelled}
        for other in sorted(pods - {self._pod}):
            await self._write(leading, other, None)
            log.info("removed the leader's label of pod %s", other)
        if self._pod not in pods:
            await self._write(leading, self._pod, "true")

    async def remove(self) -> None:
        """Remove the label of this pod. If that fails, the next leader removes it."""
        try:
            async with asyncio.timeout(REMOVE_SECONDS):
                await self._write(self._cluster, self._pod, None)
        except REQUEST_ERRORS as error:
            log.warning("the leader's label could not be removed: %s", reason_of(error))

    async def _write(self, cluster: Cluster, pod: str, value: str | None) -> None:
        changes = {"metadata": {"labels": {LABEL_LEADER: value}}}
        await cluster.patch(path("Pod", self._namespace, pod), changes, self._owner)
