"""Excludes nodes whose links were slow in several attempts from the next attempt.

A slow link has two ends, so one attempt makes two nodes suspect. The next attempt may place ranks
elsewhere; a node that is suspect again is likely the cause. If ranks land on the same nodes again,
or there are no other nodes, suspect nodes are only avoided while other nodes have room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipemorph.spec.job_status import MAX_ATTEMPTS_KEPT, MAX_NODES_KEPT, NodeRecord
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph.spec.sections.placement import NodeExclusion
from pipemorph.spec.status_base import MAX_SLOW_LINKS
from pipemorph.spec.status_links import AttemptNodes, LinkNodes, SlowLink

SUSPECT_ATTEMPTS, MAX_EXCLUDED = 2, 8
"""Attempts that end with a slow link at a node before it is excluded; limit of excluded nodes."""


def find_link_ends(link: SlowLink, mesh: MeshShape) -> tuple[int, int]:
    """Ranks at the two ends of a link."""
    return mesh.find_rank(link.link, link.replica), mesh.find_rank(link.link + 1, link.replica)


def add_slow_link_nodes(
    noted: AttemptNodes | None,
    slow: Iterable[SlowLink],
    node_of_rank: Mapping[int, str],
    records: Sequence[NodeRecord],
    mesh: MeshShape,
) -> AttemptNodes:
    """Nodes of the attempt in progress, with those at the ends of its slow links added.

    ``node_of_rank``: nodes of the existing pods, which are all pods unless the attempt is ending.
    """
    recorded = {record.name for record in records}
    if noted is None:
        ran_on = set(node_of_rank.values())
        noted = AttemptNodes(count=len(ran_on), others=len(ran_on - recorded))
    by_link = {(known.link, known.replica): known for known in noted.links}
    for link in slow:
        nodes = [node_of_rank[rank] for rank in find_link_ends(link, mesh) if rank in node_of_rank]
        found = LinkNodes(link=link.link, replica=link.replica, nodes=nodes)
        by_link[link.link, link.replica] = found
    links = list(by_link.values())[-MAX_SLOW_LINKS:]
    newly = {n for link in links for n in link.nodes} - recorded - _collect_nodes(noted)
    return AttemptNodes(links=links, count=noted.count, others=max(0, noted.others - len(newly)))


def find_suspects(
    noted: AttemptNodes, slow: Iterable[SlowLink], faults: Iterable[Fault]
) -> dict[str, SlowLink]:
    """Nodes at both ends of the links in ``slow``, where both are known, with the slowest of them.

    Ignores links within a node, which use no network, and links into which the job itself injects
    faults.
    """
    injected = {(fault.link, fault.replica) for fault in faults if fault.link is not None}
    nodes = {(known.link, known.replica): known.nodes for known in noted.links}
    return {
        node: link
        for link in sorted(slow, key=lambda link: link.delay_ms)
        if (link.link, link.replica) not in injected
        for node in nodes.get((link.link, link.replica), ())
        if len(set(nodes[link.link, link.replica])) == 2
    }


def add_suspects(
    records: Sequence[NodeRecord],
    found: Iterable[str],
    attempt: int,
    rule: NodeExclusion,
    noted: AttemptNodes,
) -> list[NodeRecord]:
    """Records after adding an attempt's suspect nodes and excluding repeated suspects.

    Exclusions are permanent. No node is excluded beyond :data:`MAX_EXCLUDED`, nor if that would
    leave fewer known nodes than the attempt ran on (``noted``): the ranks might wait forever.
    """
    by_name = {record.name: record for record in records}
    for name in sorted(set(found)):
        old = by_name.get(name, NodeRecord(name=name))
        if attempt not in old.attempts:
            attempts = [*old.attempts, attempt][-MAX_ATTEMPTS_KEPT:]
            by_name[name] = old.model_copy(update={"attempts": attempts})
    excluded = {record.name for record in by_name.values() if record.excluded}
    known = {*by_name, *_collect_nodes(noted)}
    out = []
    for record in sorted(by_name.values(), key=lambda r: -len(r.attempts)):
        newly = (
            _is_repeated_suspect(record, rule)
            and not record.excluded
            and len(excluded) < MAX_EXCLUDED
            and len(known - excluded - {record.name}) + noted.others >= noted.count
        )
        if newly:
            excluded.add(record.name)
        out.append(record.model_copy(update={"excluded": True}) if newly else record)
    # Bounded: excluded nodes stay first, then those suspected most often.
    out.sort(key=lambda r: (not r.excluded, -len(r.attempts), r.name))
    return out[:MAX_NODES_KEPT]


def select_avoided_nodes(
    records: Sequence[NodeRecord], rule: NodeExclusion
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes that the next attempt must not use, and nodes that it should avoid: repeated suspects
    that the limits in :func:`add_suspects` exempt from exclusion."""
    if not rule.enabled:
        return (), ()
    return (
        tuple(record.name for record in records if record.excluded),
        tuple(r.name for r in records if not r.excluded and _is_repeated_suspect(r, rule)),
    )


def _collect_nodes(noted: AttemptNodes) -> set[str]:
    return {node for link in noted.links for node in link.nodes}


def _is_repeated_suspect(record: NodeRecord, rule: NodeExclusion) -> bool:
    return rule.enabled and len(record.attempts) >= SUSPECT_ATTEMPTS
