"""Watches the network below all jobs: takes their links into the memory, and publishes what it
finds. See :mod:`pipemorph.fabric.triangulation`.

A rank's node is read from its pod, not from a report: a job can accuse only nodes that it runs on.

Of several replicas each takes in the links of its own jobs. One of them judges and publishes; the
others tell it what they remember, each in a ConfigMap of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipemorph.api.running import Running
from pipemorph.api.spec import JobSpec
from pipemorph.control import Health, JobController
from pipemorph.fabric.findings import Findings
from pipemorph.fabric.memory import End, FabricMemory
from pipemorph.fabric.triangulation import suspects
from pipemorph.wire import FabricView
from pipemorph_operator import names
from pipemorph_operator.cluster.client import (
    REQUEST_ERRORS,
    ApiRefused,
    Cluster,
    path,
    reason_of,
)
from pipemorph_operator.cluster.fabric_map import (
    Place,
    config_map,
    findings_of,
    memory_of,
    part_map,
    ports_of,
)
from pipemorph_operator.cluster.facts import PodFacts
from pipemorph_operator.ingest.status.tracked import TrackedJob
from pipemorph_operator.metrics import FABRIC_PAIRS, FABRIC_SUSPECTS

log = logging.getLogger("pipemorph.fabric")

ROUND_SECONDS = 30.0
SAVE_SECONDS = 300.0
"""Longest time between a change of the memory and its publication; findings are published at
once."""
RACKS_SECONDS = 600.0
"""Interval of looks at the nodes' labels."""
MOST_LISTS = 100
"""Most jobs whose pods are looked up in one round."""

MOST_RAILS = 4
"""Pairs of ports that one job's check counts for between two nodes."""


@dataclass(frozen=True)
class Placed:
    """The nodes of one attempt's ranks, in the pods of ``running``, and of all pods by their
    numbers. ``ways``: of each link, the nodes at its ends, by column; without links within a node
    and those into which the job itself injects faults."""

    attempt: int
    running: Running
    node_of_rank: Mapping[int, str]
    node_of_pod: Mapping[int, str]
    ways: tuple[Mapping[int, tuple[str, str]], ...]

    @staticmethod
    def of(
        spec: JobSpec, attempt: int, pods: Sequence[PodFacts], running: Running
    ) -> Placed | None:
        """``spec``: of what runs. None unless every pod with ranks has a node."""
        size, mesh = spec.parallelism.ranks_per_pod, spec.parallelism.mesh
        nodes: dict[int, str] = {}
        # Of all: those that have checked the ports may have been more than run now.
        hosts = {pod.index: pod.node for pod in pods if pod.node is not None}
        for pod in pods:
            place = running.place(pod.index)
            if pod.node is not None and place is not None and running.has(pod.index):
                first = running.rank(place * size)
                nodes |= dict.fromkeys(range(first, first + size), pod.node)
        if not nodes.keys() >= set(range(mesh.world_size)):
            return None
        injected = {(fault.link, fault.replica) for fault in spec.faults}
        ways: list[dict[int, tuple[str, str]]] = []
        for link in range(mesh.stages - 1):
            ways.append({})
            for column in range(mesh.columns):
                ends = nodes[mesh.rank(link, column)], nodes[mesh.rank(link + 1, column)]
                if ends[0] != ends[1] and (link, column) not in injected:
                    ways[link][column] = ends
        return Placed(attempt, running, nodes, hosts, tuple(ways))


class Part(NamedTuple):
    """This replica's part: whether it is the one that judges, its number, and the others'."""

    judges: bool
    own: str
    others: tuple[str, ...]


@dataclass
class FabricWatch:
    """``jobs``: this replica's that may report; ``rack_label``: label of a node that names its
    rack, empty if nodes have none; ``part``: of several replicas."""

    cluster: Cluster
    jobs: Callable[[], Collection[TrackedJob]]
    place: Place
    rack_label: str = ""
    part: Callable[[], Part] = lambda: Part(True, "0", ())
    clock: Callable[[], float] = time.time
    memory: FabricMemory = field(default_factory=FabricMemory)
    findings: Findings = field(default_factory=Findings)
    _placed: dict[str, Placed] = field(default_factory=dict)
    _checked: dict[str, int] = field(default_factory=dict)
    """Of each job, the attempt whose check of the fabric is in the memory."""
    _asked: dict[str, int] = field(default_factory=dict)
    """In which round a job's pods were looked up last."""
    _round: int = 0
    _racks: Mapping[str, str] = field(default_factory=dict)
    _racks_at: float = float("-inf")
    _saved: Sequence[tuple[object, ...]] = field(default_factory=list)
    _saved_at: float = float("-inf")
    _known: bool = False

    async def run(self) -> None:
        """Look at all jobs in rounds, forever."""
        while True:
            try:
                await self.look()
            except REQUEST_ERRORS as error:
                log.warning("the network could not be looked at: %s", reason_of(error))
            except Exception:
                # An unexpected error must not end the process: jobs do not depend on this.
                log.exception("the network could not be looked at")
            await asyncio.sleep(ROUND_SECONDS)

    async def look(self) -> None:
        """Take in the links of all jobs, judge, and publish what has changed. Raises
        :data:`REQUEST_ERRORS`."""
        part = self.part()
        if not part.judges:
            self._known = False  # Somebody else knows more from now on.
        elif not self._known:
            body = await self._read(self.place)
            known, self.findings = memory_of(body), Findings(findings_of(body))
            known.merge(self.memory)
            self.memory, self._known, self._saved = known, True, _told(self.findings)
        now = self.clock()
        if self.rack_label and now - self._racks_at > RACKS_SECONDS:
            self._racks, self._racks_at = await self._read_racks(), now
        sick_ports: dict[str, set[str]] = defaultdict(set)
        await self._place()
        for job in self.jobs():
            placed = self._placed.get(job.uid)
            if placed is not None and self._is_current(placed, job):
                self._take(job, placed, sick_ports, now)
                await asyncio.sleep(0)
        if part.judges:
            for other in part.others:
                body = await self._read(self.place.part(other))
                self.memory.merge(memory_of(body))
                for node, ports in ports_of(body, now - 2 * SAVE_SECONDS).items():
                    sick_ports[node].update(ports)
        self.memory.forget_old(now)
        if not part.judges:
            FABRIC_SUSPECTS.clear()
            await self._tell(part.own, sick_ports, now)
            return
        # Beside the event loop: of a large cluster it takes up to a second.
        evidence = await asyncio.to_thread(self.memory.evidence, now)
        found = await asyncio.to_thread(suspects, evidence, self._racks)
        accused, well = self.findings.update(found, sick_ports, now)
        for finding in accused:
            log.warning("accused: %s", finding.text)
        for finding in well:
            log.info("%s %s is well again", finding.kind, finding.name)
        FABRIC_PAIRS.set(len(evidence))
        FABRIC_SUSPECTS.clear()
        for finding in self.findings.all:
            FABRIC_SUSPECTS.labels(kind=finding.kind, name=finding.name).set(finding.confidence)
        await self._publish(now)

    async def _read(self, place: Place) -> Mapping[str, Any]:
        return await self.cluster.get(path("ConfigMap", place.namespace, place.name)) or {}

    async def _tell(self, own: str, ports: Mapping[str, set[str]], now: float) -> None:
        """Tell the replica that judges about pairs of nodes that were slow, and about others of the
        nodes that it suspects."""
        suspected = memory_of(await self._read(self.place)).sick_nodes
        dumped = self.memory.dump(now, also=suspected)
        told: list[tuple[object, ...]] = [(node, *sorted(ports[node])) for node in ports]
        for row in dumped["sightings"]:
            slow, _, well = (age is not None for age in row[5:])
            told.append((*(dumped["names"][number] for number in row[:5]), slow, well))
        told.sort(key=str)
        if told != self._saved or (told and now - self._saved_at >= SAVE_SECONDS):
            body = part_map(self.place.part(own), dumped, ports)
            await self.cluster.apply(body, names.INGEST_OWNER)
            self._saved, self._saved_at = told, now

    async def _read_racks(self) -> dict[str, str]:
        nodes = self.cluster.metadata(path("Node", None))
        found = {m["name"]: (m.get("labels") or {}).get(self.rack_label) async for m in nodes}
        return {name: rack for name, rack in found.items() if rack}

    async def _place(self) -> None:
        """Look up the nodes of jobs that have begun to report; a few in a round, in turn."""
        jobs = {job.uid: job for job in self.jobs()}
        self._placed = {uid: each for uid, each in self._placed.items() if uid in jobs}
        self._checked = {uid: turn for uid, turn in self._checked.items() if uid in jobs}
        self._asked = {uid: turn for uid, turn in self._asked.items() if uid in jobs}
        unknown = [
            job
            for uid, job in jobs.items()
            if job.reports.reported_at is not None
            and (uid not in self._placed or not self._is_current(self._placed[uid], job))
        ]
        self._round += 1
        unknown.sort(key=lambda job: self._asked.get(job.uid, 0))
        for job in unknown[:MOST_LISTS]:
            self._asked[job.uid] = self._round
            try:
                placed = await self._found(job)
            except (ApiRefused, ValueError) as error:
                # Other jobs do not depend on this one's pods.
                log.warning("%s/%s: its nodes are not known: %s", *job.key, reason_of(error))
                continue
            if placed is not None:
                self._placed[job.uid] = placed

    async def _found(self, job: TrackedJob) -> Placed | None:
        """The nodes of a job's ranks. Raises ValueError for a pod without a number."""
        attempt, spec = job.controller.attempt, job.controller.spec
        about = f"{names.LABEL_JOB_UID}={job.uid},{names.LABEL_ATTEMPT}={attempt}"
        pods = await self.cluster.list(path("Pod", job.namespace), labels=about)
        ours = [PodFacts.of(pod) for pod in pods if _is_of(pod, job.job_uid)]
        return Placed.of(spec, attempt, ours, job.running)

    @staticmethod
    def _is_current(placed: Placed, job: TrackedJob) -> bool:
        """Whether it is of the attempt in progress, and of the pods that have ranks now."""
        return placed.attempt == job.controller.attempt and placed.running == job.running

    def _take(
        self, job: TrackedJob, placed: Placed, sick_ports: Mapping[str, set[str]], now: float
    ) -> None:
        slow, healthy = sightings(job.controller, placed, now)
        # A pair with both is slow: it comes last.
        for pairs, is_slow in ((healthy - slow, False), (slow, True)):
            for a, b in pairs:
                self.memory.observe(job.uid, End(a), End(b), slow=is_slow, now=now)
        self._take_check(job, placed, now)
        mesh = job.controller.spec.parallelism.mesh
        for port in job.controller.rails(now).sick:
            node = placed.node_of_rank[mesh.rank(port.stage, port.replica)]
            sick_ports[node].add(f"{port.device}/{port.port}")

    def _take_check(self, job: TrackedJob, placed: Placed, now: float) -> None:
        """Take in what the pods measured between them before the attempt: once, as of then."""
        view = job.controller.fabric()
        if view is None or self._checked.get(job.uid) == placed.attempt:
            return
        self._checked[job.uid] = placed.attempt
        at = min(view.at, now) if view.at else now
        for a, b, sick in measured(view, placed, self.memory.sick_nodes):
            self.memory.observe(job.uid, a, b, slow=sick, now=at, proven=True)

    async def _publish(self, now: float) -> None:
        told = _told(self.findings)
        due = self.memory.any_slow and now - self._saved_at >= SAVE_SECONDS
        if told != self._saved or due:
            body = config_map(self.place, self.findings.all, self.memory, now)
            await self.cluster.apply(body, names.INGEST_OWNER)
            self._saved, self._saved_at = told, now


def _told(findings: Findings) -> list[tuple[object, ...]]:
    """What is worth a write at once if it changes."""
    return [(f.kind, f.name, f.accused, round(f.confidence, 1), f.ports) for f in findings.all]


Pairs = set[tuple[str, str]]


def sightings(controller: JobController, placed: Placed, now: float) -> tuple[Pairs, Pairs]:
    """Nodes between which a link is slow now, and between which one is healthy. Of a slow link only
    its slowest column is known."""
    slow: Pairs = set()
    healthy: Pairs = set()
    for link in controller.links(now):
        ways = placed.ways[link.link]
        if link.health is Health.SLOW and link.replica in ways:
            slow.add(_ordered(ways[link.replica]))
        elif link.health is Health.HEALTHY:
            healthy.update(map(_ordered, ways.values()))
    return slow, healthy


def measured(
    view: FabricView, placed: Placed, suspected: Collection[str]
) -> Iterator[tuple[End, End, bool]]:
    """The ports between which a check measured, and whether it found them sick: those with a node
    that is sick by it, or ``suspected`` before; of two nodes at most :data:`MOST_RAILS`.

    Pods that the attempt does not have are left out, so that a job can accuse only nodes that it
    runs on, and so are ports without a name.
    """
    found: dict[tuple[str, str], list[tuple[End, End, bool]]] = defaultdict(list)
    for pair in view.pairs:
        nodes = [placed.node_of_pod.get(pod) for pod in (pair.first, pair.second)]
        if all(number is None or number < len(view.ports) for number in pair.ports):
            names = ["" if number is None else view.ports[number] for number in pair.ports]
            if nodes[0] is not None and nodes[1] is not None:
                ends = End(nodes[0], names[0]), End(nodes[1], names[1])
                found[_ordered((nodes[0], nodes[1]))].append((*ends, pair.sick))
    matters = {*suspected}
    for ways, rows in found.items():
        if any(sick for _, _, sick in rows):
            matters.update(ways)
    for ways, rows in found.items():
        if matters.intersection(ways):
            yield from sorted(rows, key=lambda row: not row[2])[:MOST_RAILS]


def _ordered(ends: tuple[str, str]) -> tuple[str, str]:
    return min(ends), max(ends)


def _is_of(pod: Mapping[str, object], job_uid: str | None) -> bool:
    """Whether the attempt's Job made the pod: anybody who may create pods can set its labels."""
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    owners = metadata.get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == job_uid for owner in owners)
