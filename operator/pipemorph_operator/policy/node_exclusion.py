"""Excludes nodes whose links were slow in several attempts from the next attempt.

A slow link has two ends, so one attempt makes two nodes suspect. The next attempt may place ranks
elsewhere; a node that is suspect again is likely the cause. If ranks land on the same nodes again,
or there are no other nodes, suspect nodes are only avoided while other nodes have room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipemorph.api.mesh import MeshShape
from pipemorph.api.sections.faults import Fault
from pipemorph.api.sections.placement import NodeExclusion
from pipemorph.api.status import MAX_ATTEMPTS_KEPT, MAX_NODES_KEPT, NodeRecord
from pipemorph.api.status_base import MAX_SLOW_LINKS
from pipemorph.api.status_links import AttemptNodes, LinkNodes, SlowLink

SUSPECT_ATTEMPTS, MOST_EXCLUDED = 2, 8
"""Attempts that end with a slow link at a node before it is excluded, and most excluded nodes."""


def ends(link: SlowLink, mesh: MeshShape) -> tuple[int, int]:
    """Ranks at the two ends of a link."""
    return mesh.rank(link.link, link.replica), mesh.rank(link.link + 1, link.replica)


def note_nodes(
    noted: AttemptNodes | None,
    slow: Iterable[SlowLink],
    node_of_rank: Mapping[int, str],
    records: Sequence[NodeRecord],
    mesh: MeshShape,
) -> AttemptNodes:
    """The nodes of an attempt in progress, with those at the ends of its slow links added.

    ``node_of_rank``: of the pods that exist now, all of them unless the attempt is ending.
    """
    recorded = {record.name for record in records}
    if noted is None:
        ran_on = set(node_of_rank.values())
        noted = AttemptNodes(count=len(ran_on), others=len(ran_on - recorded))
    by_link = {(known.link, known.replica): known for known in noted.links}
    for link in slow:
        nodes = [node_of_rank[rank] for rank in ends(link, mesh) if rank in node_of_rank]
        found = LinkNodes(link=link.link, replica=link.replica, nodes=nodes)
        by_link[link.link, link.replica] = found
    links = list(by_link.values())[-MAX_SLOW_LINKS:]
    newly = {n for link in links for n in link.nodes} - recorded - _named(noted)
    return AttemptNodes(links=links, count=noted.count, others=max(0, noted.others - len(newly)))


def suspects(
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
    """The records after adding an attempt's suspect nodes and excluding repeated suspects.

    Exclusions are permanent. No node is excluded beyond :data:`MOST_EXCLUDED`, nor if that would
    leave fewer known nodes than the attempt ran on (``noted``): the ranks might wait forever.
    """
    by_name = {record.name: record for record in records}
    for name in sorted(set(found)):
        old = by_name.get(name, NodeRecord(name=name))
        if attempt not in old.attempts:
            attempts = [*old.attempts, attempt][-MAX_ATTEMPTS_KEPT:]
            by_name[name] = old.model_copy(update={"attempts": attempts})
    excluded = {record.name for record in by_name.values() if record.excluded}
    known = {*by_name, *_named(noted)}
    out = []
    for record in sorted(by_name.values(), key=lambda r: -len(r.attempts)):
        newly = (
            _is_repeated(record, rule)
            and not record.excluded
            and len(excluded) < MOST_EXCLUDED
            and len(known - excluded - {record.name}) + noted.others >= noted.count
        )
        if newly:
            excluded.add(record.name)
        out.append(record.model_copy(update={"excluded": True}) if newly else record)
    # Bounded: keep excluded nodes first, then those suspected most often.
    out.sort(key=lambda r: (not r.excluded, -len(r.attempts), r.name))
    return out[:MAX_NODES_KEPT]


def avoided(
    records: Sequence[NodeRecord], rule: NodeExclusion
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes that the next attempt must not use, and nodes it should avoid: suspect as often, but
    not excluded because of the limits in :func:`add_suspects`."""
    if not rule.enabled:
        return (), ()
    return (
        tuple(record.name for record in records if record.excluded),
        tuple(r.name for r in records if not r.excluded and _is_repeated(r, rule)),
    )


def _named(noted: AttemptNodes) -> set[str]:
    return {node for link in noted.links for node in link.nodes}


def _is_repeated(record: NodeRecord, rule: NodeExclusion) -> bool:
    return rule.enabled and len(record.attempts) >= SUSPECT_ATTEMPTS
